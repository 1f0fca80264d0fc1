"""The DaemonSet as it is shipped, in the image that its Dockerfile makes, on a real kubelet and containerd."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from node_rig import ADDRESS, DEVICE, GATEWAY, NAME, Node, images, node_prefix, running_node, until
from pause_image import write_pause_image

from kube_rig import CEILING, INSTANCES, kura_instance
from manifest_tools import DAEMONSET, ROOT, containers, kustomized, manifests, of_kind, run, the, tool

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.links import read_device
from kura_shaper.tree.model import Handle
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Nothing may run beside it: a kubelet and its whole control plane want both processors for themselves.
pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.kube, pytest.mark.traffic]

OVERLAY = "overlays/canary"
AGENT = "daemonset/kura-shaper-us-east"
ACME, BETA = 0x2A7, 0x2A8
_TC_GROUP, _TC_MESSAGES = 0x8, range(36, 48)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Return a node of the pool us-east, with two tenants in its region and the overlay `canary` as it is."""
    directory = tmp_path_factory.mktemp("node")
    built = images("agent", "gateway", "debian")
    pause = write_pause_image(directory / "pause.tar", node_prefix() / "root" / "usr" / "bin" / "busybox")
    with running_node(directory, pause, *built.values()) as made:
        definitions = str(ROOT / "tests" / "manifests" / "definitions.yaml")
        made.kubectl("apply", "--filename", definitions)
        made.kubectl("wait", "--for=condition=Established", "--timeout=30s", "--filename", definitions)
        made.kubectl("label", "node", NAME, "node.cluster.x-k8s.io/pool=kura-us-east")
        made.cluster.patch(f"/api/v1/nodes/{NAME}/status", {"status": {"capacity": {"tuist.dev/egress-mbps": "3k"}}})
        for account, class_id in (("acme", ACME), ("beta", BETA)):
            made.cluster.create(INSTANCES, kura_instance(account, class_id))
        made.kubectl("apply", "--filename", "-", stdin=kustomized(OVERLAY))
        the_one_pod(made)
        yield made


def pods(node: Node, labels: str = "app.kubernetes.io/component=agent") -> list[dict[str, Any]]:
    found = node.cluster.ask("GET", f"/api/v1/namespaces/kura-shaper/pods?labelSelector={labels.replace('=', '%3D')}")
    return list(found["items"])


def is_well(pod: dict[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def the_one_pod(node: Node, *, other_than: str = "") -> str:
    """Return the name of the agent's pod once it is ready, and no other is left."""

    def only() -> str:
        found = pods(node)
        name: str = found[0]["metadata"]["name"] if len(found) == 1 and is_well(found[0]) else ""
        return "" if name == other_than else name

    def told() -> str:
        events = node.kubectl("--namespace=kura-shaper", "get", "events")
        return events + node.kubectl("--namespace=kura-shaper", "logs", AGENT, check=False)

    name: str = until(only, what=told)
    return name


def tree() -> Snapshot:
    """Return what is on the node's device, read from outside of every container."""
    with TcClient() as client:
        found = KernelTrafficControl(client, read_device(DEVICE), clock=SystemClock()).snapshot()
    assert isinstance(found, Snapshot), found
    return found


def ceiling(class_id: int) -> Rate | None:
    spec = tree().classes.get(Handle(0x20, class_id))
    return spec.ceil if spec else None


def asked(path: str) -> str:
    """Return a page of the agent, which listens on the node's own address."""
    with urllib.request.urlopen(f"http://{ADDRESS}:9469{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def metric(name: str) -> float:
    (value,) = re.findall(rf"^kura_shaper_{name}(?:{{[^}}]*}})? (\S+)$", asked("/metrics"), re.MULTILINE)
    return float(value)


def shown(words: str) -> str:
    """Return the command of daemonset/README.md that has these words, for this node and its agent."""
    blocks = re.findall(r"```console\n(.+?)```", (DAEMONSET / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    (command,) = (line for line in lines if words in line)
    return command.replace("NODE", NAME).replace(" POD ", f" {AGENT} ")


def typed(node: Node, command: str) -> str:
    """Return what a command says that somebody types in the tree."""
    config = node.directory / "cluster" / "admin.kubeconfig"
    environment = {"PATH": f"{os.path.dirname(tool('kubectl'))}:{os.environ['PATH']}", "KUBECONFIG": str(config)}
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def hearing() -> Iterator[Callable[[], int]]:
    """Count what changes traffic control on the device, whoever does it."""
    count, ifindex = 0, socket.if_nametoindex(DEVICE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as listening:
        listening.bind((0, _TC_GROUP))
        listening.setblocking(False)

        def heard() -> int:
            nonlocal count
            with suppress(BlockingIOError):
                while data := listening.recv(65_536):
                    while data:
                        length, kind, _, _, _, _, its_ifindex = struct.unpack_from("=IHHIIIi", data)
                        count += kind in _TC_MESSAGES and its_ifindex == ifindex
                        data = data[(length + 3) & ~3 :]
            return count

        yield heard


def send(class_id: int, *, count: int = 20) -> None:
    """Have a tenant's bytes leave by the device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", class_id << 16))
        for _ in range(count):
            made.sendto(bytes(1000), (GATEWAY, 9))


def test_what_the_overlay_says_makes_a_pod_that_is_ready_and_a_tree_on_the_device(node: Node) -> None:
    the_one_pod(node)
    found = tree()
    assert is_ours(found.root)
    for class_id in (ACME, BETA):
        spec = found.classes[Handle(0x20, class_id)]
        assert (spec.floor, spec.ceil) == (Rate.parse("25M"), Rate.parse("1500M"))
    assert ceiling(0x3) == Rate.parse("3G")
    before = found.counters[Handle(0x20, ACME)].sent_packets
    send(ACME)
    assert tree().counters[Handle(0x20, ACME)].sent_packets == before + 20


def test_the_pod_has_what_the_manifest_grants_and_no_more(node: Node) -> None:
    (container,) = containers(the(manifests(kustomized("base")), "DaemonSet"))
    pid = node.run("pgrep", "--full", "--oldest", "kura-shaper agent").strip()
    status = dict(
        line.split(":\t", 1) for line in node.run("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line
    )
    numbers = {"NET_ADMIN": 12, "PERFMON": 38, "BPF": 39}
    granted = sum(1 << numbers[name] for name in container["securityContext"]["capabilities"]["add"])
    sets = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert sets["CapEff"] == sets["CapPrm"] == sets["CapBnd"] == granted
    assert sets["CapInh"] in (0, granted)
    assert sets["CapAmb"] == 0
    # It can't gain others, and a filter of system calls is in force.
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    root = [line for line in node.run("cat", f"/proc/{pid}/mounts").splitlines() if line.split()[1] == "/"]
    assert all("ro" in line.split()[3].split(",") for line in root)


def test_with_so_little_retransmits_are_still_counted_in_the_best_way(node: Node) -> None:
    if not os.path.exists("/sys/kernel/btf/vmlinux"):
        pytest.skip("this kernel has no BTF")
    assert json.loads(asked("/statusz"))["retransmits"] == "tracepoint"


def test_nothing_is_left_pinned_by_finding_out_what_the_kernel_can(node: Node) -> None:
    """A pin outlives its pod: one that a start leaves behind is one more with each."""
    the_one_pod(node)
    assert node.run("find", "/sys/fs/bpf", "-name", "steer_*") == ""


def test_the_account_reads_what_it_should_and_no_secret(node: Node) -> None:
    script = """
import json, os, ssl, urllib.error, urllib.request
where = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=f"{where}/ca.crt")
headers = {"Authorization": "Bearer " + open(f"{where}/token").read()}
found = {}
for path in ("/apis/kura.tuist.dev/v1alpha1/namespaces/kura/kurainstances", "/api/v1/nodes", "/api/v1/secrets",
             "/api/v1/namespaces/kura-shaper/secrets", "/api/v1/namespaces/kura/pods"):
    url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}{path}"
    try:
        found[path.rpartition("/")[2]] = urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context).status
    except urllib.error.HTTPError as error:
        found[path.rpartition("/")[2]] = error.code
print(json.dumps(found))
"""
    said = node.kubectl("--namespace=kura-shaper", "exec", AGENT, "--", "python3", "-c", script)
    assert json.loads(said) == {"kurainstances": 200, "nodes": 200, "secrets": 403, "pods": 403}


def test_a_changed_instance_changes_its_class(node: Node) -> None:
    before = tree()
    for wanted in ("700M", "1500M"):
        node.cluster.patch(f"{INSTANCES}/kura-acme", {"spec": {"podAnnotations": {CEILING: wanted}}})
        until(lambda wanted=wanted: ceiling(ACME) == Rate.parse(wanted), within_s=10)
    after = tree()
    assert after.classes == before.classes
    assert after.counters[Handle(0x20, ACME)].sent_bytes >= before.counters[Handle(0x20, ACME)].sent_bytes


def test_a_root_that_was_deleted_by_hand_is_back_within_two_seconds(node: Node) -> None:
    wanted = tree().classes
    run("tc", "qdisc", "del", "dev", DEVICE, "root")
    until(lambda: tree().classes == wanted, within_s=2)
    until(lambda: metric("repairs_total") >= 1, within_s=10)
    the_one_pod(node)


def test_what_observing_looks_at_is_shown_as_documented(node: Node) -> None:
    found = json.loads(typed(node, shown("/statusz")))
    assert found["ready"]
    assert found["source"] | {"age_s": 0} == {"valid": True, "age_s": 0, "tenants": 2, "problems": []}
    assert found["devices"][DEVICE]["verdict"] == "in step"


def untouched(node: Node, change: Callable[[], object]) -> None:
    """Make a change that ends with another pod; nothing is written to the device, and its counters go on."""
    name = the_one_pod(node)
    send(ACME)
    before = tree()
    with hearing() as heard:
        change()
        the_one_pod(node, other_than=name)
        until(lambda: '"in step"' in asked("/statusz"))
        after = tree()
        assert heard() == 0
    assert (after.root, after.classes, after.leaves, after.filters) == (
        *(before.root, before.classes, before.leaves, before.filters),
    )
    assert after.counters[Handle(0x20, ACME)] == before.counters[Handle(0x20, ACME)]
    assert metric("installs_total") == 0
    assert json.loads(asked("/statusz"))["devices"][DEVICE]["pending"] == 0


def test_a_rollout_leaves_the_kernel_alone_and_the_next_pod_takes_it_over(node: Node) -> None:
    untouched(
        node, lambda: node.kubectl("--namespace=kura-shaper", "set", "env", AGENT, "KURA_SHAPER_LOG_FORMAT=text")
    )


def test_a_daemonset_that_goes_leaves_its_tree_and_one_that_comes_takes_it_over(node: Node) -> None:
    def again() -> None:
        node.kubectl("--namespace=kura-shaper", "delete", AGENT)
        until(lambda: not pods(node))
        assert is_ours(tree().root)
        node.kubectl("apply", "--filename", "-", stdin=kustomized(OVERLAY))

    untouched(node, again)


def test_an_agent_that_is_held_off_mends_nothing_until_it_is_let_again(node: Node) -> None:
    typed(node, shown("kura-shaper disable"))
    until(lambda: metric("disabled") == 1, within_s=10)
    run("tc", "qdisc", "del", "dev", DEVICE, "root")
    until(lambda: "incident 4711" in str(json.loads(asked("/statusz"))["disabled"]), within_s=10)
    # The marker is the node's: the next pod keeps off as well.
    name = pods(node)[0]["metadata"]["name"]
    node.kubectl("--namespace=kura-shaper", "delete", "pod", name)
    until(lambda: [each["metadata"]["name"] for each in pods(node)] not in ([], [name]))
    until(lambda: metric_or_none("disabled") == 1)
    assert not is_ours(tree().root)
    typed(node, shown("kura-shaper enable"))
    until(lambda: ceiling(ACME) is not None, within_s=10)
    the_one_pod(node)


def metric_or_none(name: str) -> float | None:
    """Return a metric; None while no agent answers."""
    with suppress(OSError):
        return metric(name)
    return None


def test_break_glass_takes_the_tree_away_and_says_so_by_its_phase(node: Node) -> None:
    typed(node, shown("kubectl debug"))
    name = until(lambda: re.findall(r"pod/(node-debugger-\S+)", node.kubectl("get", "-n", "kura-shaper", "pods", "-o", "name")))[0]

    def phase() -> str:
        found: str = node.cluster.ask("GET", f"/api/v1/namespaces/kura-shaper/pods/{name}")["status"]["phase"]
        return found

    until(lambda: phase() in ("Succeeded", "Failed"))
    said = node.kubectl("--namespace=kura-shaper", "logs", name)
    assert phase() == "Succeeded", said
    assert "nothing of ours is left" in said
    assert not is_ours(tree().root)
    assert "incident 4711" in str(json.loads(asked("/statusz"))["disabled"])
    typed(node, shown("kura-shaper enable"))
    until(lambda: ceiling(ACME) is not None, within_s=10)
    the_one_pod(node)
