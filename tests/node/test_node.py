"""The DaemonSet as it is shipped, in the image that its Dockerfile makes, on a real kubelet and containerd."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme
import yaml

sys.path += [str(Path(__file__).parents[1] / each) for each in ("kernel", "kube", "manifests")]

from kernel_events import hearing
from kube_rig import CEILING, INSTANCES, kura_instance
from manifest_tools import DAEMONSET, ROOT, containers, kustomized, manifests, run, the, tool
from node_rig import ADDRESS, DEVICE, NAME, Node, images, is_well, node_prefix, running_node, until
from node_view import (
    AGENT,
    asked,
    ceiling,
    metric,
    metric_or_none,
    pods,
    send,
    shown,
    the_one_pod,
    tree,
    typed,
)
from pause_image import write_pause_image

import kura_shaper
from kura_shaper.tree.model import Handle, HtbQdisc
from kura_shaper.tree.preflight import is_ours
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Nothing may run beside it: a kubelet and its whole control plane want both processors for themselves.
pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.kube, pytest.mark.traffic]

OVERLAY = "overlays/canary"
ACME, BETA = 0x2A7, 0x2A8


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Return a node of the pool us-east, with two tenants in its region and the overlay `canary` as it is."""
    directory = tmp_path_factory.mktemp("node")
    built = images("agent", "agent-bcc", "gateway", "debian")
    pause = write_pause_image(directory / "pause.tar", node_prefix() / "root" / "usr" / "bin" / "busybox")
    with running_node(directory, pause, *built) as made:
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
    status = dict(line.split(":\t", 1) for line in node.run("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line)
    numbers = {"NET_ADMIN": 12, "PERFMON": 38, "BPF": 39}
    granted = sum(1 << numbers[name] for name in container["securityContext"]["capabilities"]["add"])
    sets = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert sets["CapEff"] == sets["CapPrm"] == sets["CapBnd"] == granted
    assert sets["CapInh"] in (0, granted)
    assert sets["CapAmb"] == 0
    # It can't gain others, and a filter of system calls is in force.
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    root = [line for line in node.run("cat", f"/proc/{pid}/mounts").splitlines() if line.split()[1] == "/"]
    assert ["ro" in line.split()[3].split(",") for line in root] == [True]


def test_with_so_little_retransmits_are_still_counted_in_the_best_way(node: Node) -> None:
    if not Path("/sys/kernel/btf/vmlinux").exists():
        pytest.skip("this kernel has no BTF")
    assert json.loads(asked("/statusz"))["retransmits"] == "tracepoint"


def test_nothing_is_left_pinned_by_finding_out_what_the_kernel_can(node: Node) -> None:
    """A pin outlives its pod: one that a start leaves behind is one more with each."""
    the_one_pod(node)
    assert node.run("find", "/sys/fs/bpf", "-name", "steer_*") == ""


def test_the_account_reads_what_it_should_and_no_secret(node: Node) -> None:
    may = (INSTANCES, "/api/v1/nodes")
    may_not = ("/api/v1/secrets", "/api/v1/namespaces/kura-shaper/secrets", "/api/v1/namespaces/kura/pods")
    found = node.answers("kura-shaper", AGENT, *may, *may_not)
    assert found == dict.fromkeys(may, 200) | dict.fromkeys(may_not, 403)
    (pod,) = pods(node)
    assert [each for each in pod["spec"]["volumes"] if "projected" in each], "the token is one that is renewed"


def test_a_changed_instance_changes_its_class(node: Node) -> None:
    before = tree()
    with hearing(DEVICE) as heard:
        for text in ("700M", "1500M"):
            node.cluster.patch(f"{INSTANCES}/kura-acme", {"spec": {"podAnnotations": {CEILING: text}}})
            wanted = Rate.parse(text)
            until(lambda: ceiling(ACME) == wanted, within_s=10)  # noqa: B023 # it is asked before the next round
        assert heard() > 0, "a write is heard, which other tests count on"
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
    # What was mended by the last look is told until the next one.
    assert found["devices"][DEVICE]["verdict"] in {"in step", "repaired"}


def untouched(node: Node, change: Callable[[], object]) -> None:
    """Make a change that ends with another pod; nothing is written to the device, and its counters go on."""
    name = the_one_pod(node)
    send(ACME)
    before = tree()
    with hearing(DEVICE) as heard:
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
    untouched(node, lambda: node.kubectl("--namespace=kura-shaper", "set", "env", AGENT, "KURA_SHAPER_LOG_FORMAT=text"))


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


def test_break_glass_takes_the_tree_away_and_says_so_by_its_phase(node: Node) -> None:
    typed(node, shown("kubectl debug"))

    def debuggers() -> list[str]:
        found = node.cluster.ask("GET", "/api/v1/namespaces/kura-shaper/pods")["items"]
        names = [each["metadata"]["name"] for each in found]
        return [name for name in names if name.startswith("node-debugger-")]

    (name,) = until(debuggers)

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


@pytest.fixture
def steering(node: Node, tmp_path: Path) -> Iterator[None]:
    """Have the overlay with the component `mq` on a device without a tree, as on a new node; and back."""
    made = {"resources": [DAEMONSET / OVERLAY], "components": [DAEMONSET / "components" / "mq"]}
    relative = {kind: [os.path.relpath(path, tmp_path) for path in paths] for kind, paths in made.items()}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(relative))
    rendered = run(tool("kubectl"), "kustomize", "--load-restrictor=LoadRestrictionsNone", tmp_path).stdout
    typed(node, shown("kura-shaper disable"))
    typed(node, shown("kura-shaper uninstall"))
    name = pods(node)[0]["metadata"]["name"]
    node.kubectl("apply", "--filename", "-", stdin=rendered)
    until(lambda: [each["metadata"]["name"] for each in pods(node)] not in ([], [name]))
    until(lambda: metric_or_none("disabled") == 1)
    typed(node, shown("kura-shaper enable"))
    name = the_one_pod(node)
    yield
    typed(node, shown("kura-shaper/maintenance=true"))
    node.kubectl("apply", "--filename", "-", stdin=kustomized(OVERLAY))
    the_one_pod(node, other_than=name)
    until(lambda: isinstance(tree().root, HtbQdisc))
    typed(node, shown("kura-shaper/maintenance-"))


def test_a_steered_tree_outlives_its_pod_with_its_pins(node: Node, steering: None) -> None:
    device = json.loads(asked("/statusz"))["devices"][DEVICE]
    if device["shape"] != "mq":
        pytest.skip(f"this kernel can't steer: {device['why_shape']}")
    assert device["steering"]["is_proven"]
    pins = node.run("find", "/sys/fs/bpf", "-name", "steer_*")
    name = pods(node)[0]["metadata"]["name"]
    untouched(node, lambda: node.kubectl("--namespace=kura-shaper", "delete", "pod", name))
    assert node.run("find", "/sys/fs/bpf", "-name", "steer_*") == pins


HOST, PORT = "acme.cache.example", 8443
TENANTS = f"""
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
gateway: {{https_ports: [{PORT}], peer_ports: [7443]}}
tenants:
  - {{name: acme, class: 0x2a7, hosts: [{HOST}], backends: {{http: {{address: "127.0.0.1:4000"}}}}}}
"""


def name_of(target: str) -> str:
    """Return an image's name, as the Dockerfile and the overlays have it."""
    return f"registry.example.com/kura-shaper/{target}:{kura_shaper.__version__}"


def said_by(node: Node, name: str, container: dict[str, Any]) -> str:
    """Return what a pod of one container says that ends well."""
    spec = {"hostNetwork": True, "restartPolicy": "Never", "containers": [{"name": "only", **container}]}
    node.cluster.create("/api/v1/namespaces/kura/pods", {"metadata": {"name": name}, "spec": spec})
    path = f"/api/v1/namespaces/kura/pods/{name}"
    phase = until(lambda: {"Succeeded", "Failed"} & {node.cluster.ask("GET", path)["status"]["phase"]})
    said = node.kubectl("--namespace=kura", "logs", name)
    assert phase == {"Succeeded"}, said
    return said


def test_the_agents_image_runs_for_who_only_asks_with_no_privilege_at_all(node: Node) -> None:
    security = {
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {"image": name_of("agent"), "args": ["--version"], "securityContext": security}
    assert said_by(node, "version", container) == f"kura-shaper {kura_shaper.__version__}\n"


def test_the_image_with_bcc_has_it_where_the_agent_looks(node: Node) -> None:
    command = ["python3", "-c", "import bcc, kura_shaper; print(kura_shaper.__version__)"]
    assert said_by(node, "bcc", {"image": name_of("agent-bcc"), "command": command}).split() == [
        kura_shaper.__version__
    ]


MADE = "/etc/kura-shaper/haproxy"
RENDER = (
    *("kura-shaper", "render-haproxy", "--tenants", "/given/tenants.yaml", "--out", MADE),
    *("--certificate", "/given/tls.pem"),
)


def test_the_gateways_image_serves_what_it_renders_and_marks_its_connections(node: Node) -> None:
    certificate = trustme.CA().issue_cert(HOST)
    pem = certificate.private_key_and_cert_chain_pem.bytes().decode()
    files = {"tenants.yaml": TENANTS, "tls.pem": pem}
    node.cluster.create("/api/v1/namespaces/kura/secrets", {"metadata": {"name": "gateway"}, "stringData": files})
    node.cluster.create("/api/v1/namespaces/kura/pods", gateway_pod())

    def is_up() -> bool:
        return is_well(node.cluster.ask("GET", "/api/v1/namespaces/kura/pods/gateway"))

    def told() -> str:
        return node.kubectl("--namespace=kura", "logs", "gateway", "--all-containers", check=False)

    until(is_up, what=told)
    rendered = ("--namespace=kura", "exec", "gateway", "--", *RENDER)
    # Whoever may make a socket there can stand in for the master.
    place = node.kubectl(
        "--namespace=kura", "exec", "gateway", "--", "stat", "-c", "%U:%G %a", "/run/kura-shaper-haproxy"
    )
    assert place == "root:haproxy 750\n"
    # Exit code 0: the running gateway has everything.
    node.kubectl(*rendered, "--maxconn", "1000", "--apply", "--diff")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((ADDRESS, PORT), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=HOST),
    ):
        assert "fwmark:0x2a70000" in run("ss", "-tneH", "state", "established", f"( sport = :{PORT} )").stdout
    # Another limit takes a reload. The worker of before ends, for which the master needs a capability too.
    node.kubectl(*rendered, "--maxconn", "1001", "--apply", "--reload-interval-s", "1")
    until(lambda: len(node.run("pgrep", "--full", "^haproxy ").split()) == 2, within_s=20)
    node.kubectl("--namespace=kura", "delete", "pod", "gateway")


def gateway_pod() -> dict[str, Any]:
    """Return a gateway in a pod: the image's own command, with the capabilities that haproxy/README.md says."""
    (capabilities,) = re.findall(r"`capabilities: ({.+})`", (ROOT / "haproxy" / "README.md").read_text())
    common = {
        "image": name_of("gateway"),
        "volumeMounts": [{"name": "given", "mountPath": "/given"}, {"name": "made", "mountPath": MADE}],
    }
    probe = {"httpGet": {"host": "127.0.0.1", "path": "/healthz", "port": 8405}, "periodSeconds": 1}
    security = {"capabilities": yaml.safe_load(capabilities)}
    return {
        "metadata": {"name": "gateway"},
        "spec": {
            "hostNetwork": True,
            "volumes": [{"name": "given", "secret": {"secretName": "gateway"}}, {"name": "made", "emptyDir": {}}],
            "initContainers": [{**common, "name": "render", "command": [*RENDER, "--maxconn", "1000", "--check"]}],
            "containers": [{**common, "name": "haproxy", "securityContext": security, "readinessProbe": probe}],
        },
    }
