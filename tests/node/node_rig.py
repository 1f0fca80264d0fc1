"""A real Kubernetes node: kubelet, containerd and runc, with a control plane, on a device that a DaemonSet may shape.

The node has a root, processes, mounts, cgroups and a network of its own, by `scripts/kubernetes/own-root`, which
leaves nothing of them however the test ends. Its programs come from `scripts/kubernetes/install-node`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from kube_rig import Cluster, RefusedError
from manifest_tools import ROOT, run, tool

from kura_shaper.haproxy.binary import cache_directory
from kura_shaper.kernel.netns import inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME, ADDRESS, GATEWAY = "node", "192.0.2.10", "192.0.2.1"
DEVICE = "nic0"
# Of the Dockerfile; and its base.
TARGETS = ("agent", "agent-bcc", "gateway", "event-broker", "debian")
_SCRIPTS = ROOT / "scripts" / "kubernetes"
_PATIENCE_S = 90
# The API has the first address of the services, so that pods find it without a kube-proxy. The other end of the device
# answers nobody; what leaves by it is only counted.
_LINKS = f"""
link set lo up
addr add 10.0.0.1/32 dev lo
link add {DEVICE} numtxqueues 4 type veth peer name up0 numrxqueues 4
addr add {ADDRESS}/24 dev {DEVICE}
link set up0 up
link set {DEVICE} up
neigh add {GATEWAY} lladdr 02:00:00:00:00:01 dev {DEVICE}
route add default via {GATEWAY} dev {DEVICE}
"""
# The first process of the node runs each line that it reads, and ends with the last.
_INIT = 'while read -r line; do sh -c "$line" & done'
_CONTAINERD = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  # Without CAP_SYS_RESOURCE nobody may be made less likely to be killed than the test itself.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/node/cni"
"""
# A pod that does not have the node's network has one of its own, from which it reaches every address of the node.
PODS = "10.244.0.0/24"
_ADDRESSES = {"type": "host-local", "subnet": PODS, "dataDir": "/run/cni", "routes": [{"dst": "0.0.0.0/0"}]}
_NETWORKS = {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipam": _ADDRESSES}]}
_KUBELET = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
clusterDNS: [10.0.0.10]
failSwapOn: false
makeIPTablesUtilChains: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
# The disk is the machine's: how full it is is not the node's business.
evictionHard: {memory.available: 1Mi, nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%"}
imageGCHighThresholdPercent: 100
# A Secret that changed is in its pods after a few seconds and not after a minute.
syncFrequency: 5s
"""

# Run in a pod, as its account: which paths of the API answer with what.
_ASK = """
import json, os, ssl, sys, urllib.error, urllib.request
where = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=f"{where}/ca.crt")
headers = {"Authorization": "Bearer " + open(f"{where}/token").read()}
found = {}
for path in sys.argv[1:]:
    asked = urllib.request.Request(f"https://{os.environ['KUBERNETES_SERVICE_HOST']}{path}", headers=headers)
    try:
        found[path] = urllib.request.urlopen(asked, context=context).status
    except urllib.error.HTTPError as error:
        found[path] = error.code
print(json.dumps(found))
"""

# No pod here asks for a name, so that it does not matter that nobody answers.
_FILES = {
    "containerd.toml": _CONTAINERD,
    "kubelet.yaml": _KUBELET,
    "cni/pods.conflist": json.dumps(_NETWORKS),
    "hosts": "127.0.0.1 localhost\n",
    "resolv.conf": f"nameserver {GATEWAY}\n",
}


def until(holds: Callable[[], Any], *, within_s: float = _PATIENCE_S, what: Callable[[], object] = str) -> Any:
    """Return what `holds` returns once that is true; `what` tells what is the case instead."""
    end = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end, f"not within {within_s} s: {what()}"
        time.sleep(0.05)
    return found


def node_prefix() -> Path:
    """Return where the node's programs are. Skips the test where they are missing or can't run."""
    found = cache_directory() / "node"
    if not (found / "root").exists():
        pytest.skip(f"no node at {found}; scripts/kubernetes/install-node brings it")
    if "cgroup" not in {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}:
        pytest.skip("this kernel has no cgroups of version 1 mounted, which a kubelet of 1.20 needs")
    return found


def images(*targets: str) -> list[Path]:
    """Return the archives of images of daemonset/Dockerfile. All are built at once, by steps that they share."""
    where = cache_directory() / "images"
    done = run(_SCRIPTS / "build-images", node_prefix(), where, *TARGETS)
    built = dict(zip(TARGETS, map(Path, done.stdout.split()), strict=True))
    return [built[each] for each in targets]


def is_well(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready, and does not leave."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


class _NodeCluster(Cluster):
    """The control plane, with controllers and a scheduler, in the network and among the processes of the node."""

    # Tokens are of the kind that servers since 1.22 give to pods: projected, bound to the pod, and renewed.
    _gates = ("--feature-gates", "BoundServiceAccountTokenVolume=true")
    server_options = (
        *("--bind-address", "0.0.0.0", "--allow-privileged", "--kubelet-preferred-address-types", "InternalIP"),
        *_gates,
    )

    def __init__(self, directory: Path, node: Node) -> None:
        super().__init__(directory, cache_directory() / "kubernetes" / "bin", port=443)
        self._node = node

    @property
    def admin_kubeconfig(self) -> Path:
        """How to reach it as somebody who may do everything."""
        return self.directory / "admin.kubeconfig"

    def start(self) -> None:
        super().start()
        self.kubeconfig(self.admin_kubeconfig, token=self.admin)
        common = ("--kubeconfig", str(self.admin_kubeconfig), "--leader-elect=false", "--port=0", "--secure-port=0")
        keys = ("--service-account-private-key-file", str(self.directory / "sa.key"))
        authority = ("--root-ca-file", str(self.certificate))
        self._commands["controllers"] = [
            str(self._bin / "kube-controller-manager"),
            *common,
            *keys,
            *authority,
            *self._gates,
        ]
        self._commands["scheduler"] = [str(self._bin / "kube-scheduler"), *common]
        self._run("controllers")
        self._run("scheduler")

    def _run(self, name: str) -> None:
        enter = ["nsenter", "--target", str(self._node.pid), "--net", "--pid", "--"]
        if self._commands[name][0] != "nsenter":
            self._commands[name] = [*enter, *self._commands[name]]
        super()._run(name)


class Node:
    """A node that is up. The test's thread is in its network for as long."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        assert process.stdout
        said = process.stdout.readline()
        assert said, "the node has no first process: own-root says why above"
        self._process, self.pid, self.directory = process, int(said), directory
        self.cluster = _NodeCluster(directory / "cluster", self)

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Return what a program of the node says; the test fails when it fails."""
        return run("nsenter", "--target", str(self.pid), "--all", "--", *words, stdin=stdin).stdout

    def begin(self, name: str, *words: str) -> None:
        """Run a program in the node until that ends."""
        assert self._process.stdin
        self._process.stdin.write(f"exec {shlex.join(words)} >>/node/{name}.log 2>&1\n")
        self._process.stdin.flush()

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        """Return what kubectl says; "" where it may fail and did."""
        done = run(tool("kubectl"), "--kubeconfig", self.cluster.admin_kubeconfig, *words, stdin=stdin, check=check)
        return done.stdout if done.returncode == 0 else ""

    def answers(self, namespace: str, pod: str, *paths: str) -> dict[str, int]:
        """Return with what the API answers a pod's account that asks for these paths."""
        said = self.kubectl("--namespace", namespace, "exec", pod, "--", "python3", "-c", _ASK, *paths)
        found: dict[str, int] = json.loads(said)
        return found

    def logs(self) -> str:
        """Return the last words of each of the node's programs."""
        files = sorted([*(self.directory / "node").glob("*.log"), *(self.directory / "cluster").glob("*.log")])
        return "\n".join(f"{file.stem}: {file.read_text(errors='replace')[-1500:]}" for file in files)

    def pods(self, namespace: str, labels: str) -> list[dict[str, Any]]:
        """Return the pods that have these labels."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(labels)}"
        return list(self.cluster.ask("GET", path)["items"])

    def is_ready(self) -> bool:
        """Whether pods are started here."""
        try:
            found = self.cluster.ask("GET", f"/api/v1/nodes/{NAME}")
        except RefusedError:
            return False
        return any(each["type"] == "Ready" and each["status"] == "True" for each in found["status"]["conditions"])


@contextmanager
def running_node(directory: Path, *archives: Path) -> Iterator[Node]:
    """Have a node with images; the calling thread is in its network meanwhile."""
    prefix = node_prefix()
    for each in ("cluster", "node/cni", "root/containerd", "root/kubelet"):
        (directory / each).mkdir(parents=True)
    for name, text in _FILES.items():
        (directory / "node" / name).write_text(text)
    seen = (
        *(f"{directory}/node:/node", f"{directory}/cluster:{directory}/cluster"),
        # An overlay can't be on the root's own; and what is in there goes with the root.
        *(f"{directory}/root/{name}:/var/lib/{name}" for name in ("containerd", "kubelet")),
        *(f"{archive}:/images/{archive.name}" for archive in archives),
        *(f"{directory}/node/{name}:/etc/{name}" for name in ("hosts", "resolv.conf")),
        f"{cache_directory()}/kubernetes/bin:/opt/kubernetes",
    )
    own_root = (str(_SCRIPTS / "own-root"), "--net", f"{prefix}/root", f"{directory}/root", *seen)
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        # A session of its own: an interrupt at the terminal is for pytest, at whose end its input ends.
        words = (*own_root, "--", "sh", "-c", _INIT)
        process = stack.enter_context(
            subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        )
        node = Node(process, directory)
        namespace = os.open(f"/proc/{node.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, namespace)
        stack.enter_context(inside(namespace))
        run("ip", "-batch", "-", stdin=_LINKS)
        stack.callback(node.cluster.remove)
        node.cluster.start()
        _start(node, archives)
        yield node


def _start(node: Node, archives: tuple[Path, ...]) -> None:
    node.begin("containerd", "containerd", "--config", "/node/containerd.toml")
    socket = Path(f"/proc/{node.pid}/root/run/containerd/containerd.sock")
    until(socket.exists, what=node.logs)
    for archive in archives:
        # Pods find an image by the name that it has in its archive.
        node.run("ctr", "--namespace", "k8s.io", "images", "import", f"/images/{archive.name}")
    endpoint = "unix:///run/containerd/containerd.sock"
    runtime = ("--container-runtime=remote", f"--container-runtime-endpoint={endpoint}")
    who = (f"--hostname-override={NAME}", f"--node-ip={ADDRESS}", f"--kubeconfig={node.cluster.admin_kubeconfig}")
    node.begin("kubelet", "/opt/kubernetes/kubelet", "--config=/node/kubelet.yaml", *runtime, *who)
    until(node.is_ready, what=node.logs)
