"""The lab's parts on this machine's kernel: isolation that leaves nothing, a topology, traffic at its NIC."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from kura_shaper.errors import RefusedError, UsageError
from kura_shaper.lab.isolation import CRASHED_STATUS, NETNS_DIR, SCRATCH_DIR, inside, require_privilege, run_isolated
from kura_shaper.lab.nic import DeviceBytes, count_wire_bytes
from kura_shaper.lab.servers import ServerSpec
from kura_shaper.lab.topology import NIC, UPLINK, Family, Lab, LabSpec, Namespace, Pod
from kura_shaper.lab.traffic import Application, Security, TrafficResult, TrafficSpec
from kura_shaper.measure import ByteSampler
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _why_not() -> str:
    try:
        require_privilege()
    except RefusedError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.privileged, pytest.mark.skipif(bool(_why_not()), reason=_why_not())]

SERVERS = "kura_shaper.lab.servers"
TRAFFIC = "kura_shaper.lab.traffic"
SNI = "peer.acme.test"


def isolated(tmp_path: Path, work: Callable[[], object]) -> Any:
    """Run work in isolation and return what it returned, as JSON brings it."""
    result = tmp_path / "result.json"

    def write() -> int:
        result.write_text(json.dumps(work()))
        return 0

    assert run_isolated(write) == 0
    return json.loads(result.read_text())


# --- isolation ---------------------------------------------------------------------------------

# A run with all that could be left behind: a namespace, a process in it, a temporary file. Says which, then waits.
_RUN = """
import json, os, subprocess, sys, tempfile, time
from pyroute2 import netns
from kura_shaper.errors import UsageError
from kura_shaper.lab.isolation import NETNS_DIR, inside, run_isolated

def work():
    netns.create("ks-test-node")
    with inside(NETNS_DIR / "ks-test-node"):
        subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
    handle, path = tempfile.mkstemp()
    inode = os.stat(NETNS_DIR / "ks-test-node").st_ino
    print(json.dumps({"netns": inode, "file": path}), flush=True)
    match sys.argv[1]:
        case "return": return 7
        case "raise": raise ValueError("on purpose")
        case "refuse": raise UsageError("no such tenant", remedy="name another")
        case "wait": time.sleep(60)
        case "stubborn":
            while True:
                try: time.sleep(60)
                except KeyboardInterrupt: print("{}", flush=True)

sys.exit(run_isolated(work))
"""


class Run:
    """A run in a process of its own, with a mark by which what it leaves is found."""

    def __init__(self, ending: str) -> None:
        self.mark = f"{600 + os.getpid() / 1e7:.7f}{time.monotonic_ns()}"
        argv = [sys.executable, "-c", _RUN, ending, self.mark]
        self.parent = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.parent.stdout is not None
        self.made: dict[str, Any] = json.loads(self.parent.stdout.readline())

    def line(self) -> list[int]:
        """The processes of the run from the parent on, each the first child of the one before: outer pids."""
        pids = [self.parent.pid]
        while children := Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children").read_text().split():
            pids.append(int(children[0]))
        return pids

    def left(self) -> list[str]:
        """Everything of the run that is still there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (process / "cmdline").read_text() and int(process.name) != self.parent.pid:
                    found.append(f"process {process.name}")
                if (process / "ns" / "net").stat().st_ino == self.made["netns"]:
                    found.append(f"namespace of {process.name}")
        found += [path for path in (self.made["file"], str(SCRATCH_DIR)) if Path(path).exists()]
        found += [str(path) for path in NETNS_DIR.glob("ks-test-*")]
        found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "ks-test-" in line]
        return found

    def end(self) -> int:
        """Wait for the parent, and for all that the kernel takes away a moment later."""
        status = self.parent.wait(timeout=20)
        deadline_s = time.monotonic() + 5
        while self.left() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        left = self.left()
        for pid in {int(words[1]) for words in map(str.split, left) if words[0] == "process"}:
            os.kill(pid, signal.SIGKILL)  # the test has failed; the next one shall not find them
        assert left == []
        return status


@pytest.mark.parametrize(("ending", "status"), [("return", 7), ("raise", CRASHED_STATUS), ("refuse", 1)])
def test_a_run_that_ends_by_itself_leaves_nothing(ending: str, status: int) -> None:
    run = Run(ending)
    assert run.end() == status
    errors = run.parent.stderr.read() if run.parent.stderr else ""
    assert ("ValueError: on purpose" in errors) == (ending == "raise")
    assert ("UsageError: no such tenant; name another" in errors) == (ending == "refuse")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_ends_the_work(number: signal.Signals, status: int) -> None:
    run = Run("wait")
    assert run.left() != []
    run.parent.send_signal(number)
    assert run.end() == status


def test_ctrl_c_reaches_the_work_once_and_a_second_one_ends_it_whatever_it_wants() -> None:
    run = Run("stubborn")
    os.killpg(run.parent.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert run.parent.stdout is not None
    assert run.parent.stdout.readline() == "{}\n"
    assert select.select([run.parent.stdout], [], [], 0.3)[0] == []
    assert run.parent.poll() is None
    os.killpg(run.parent.pid, signal.SIGINT)
    assert run.end() == 130


# The parent, the warden, the reaper that is pid 1 inside, the worker.
@pytest.mark.parametrize(("victim", "status"), [(0, -9), (1, 137), (2, 137), (3, 137)])
def test_a_kill_of_any_process_of_the_run_leaves_nothing(victim: int, status: int) -> None:
    run = Run("wait")
    line = run.line()
    assert len(line) >= 4
    os.kill(line[victim], signal.SIGKILL)
    assert run.end() == status


def test_the_kernel_alone_is_enough() -> None:
    run = Run("wait")
    parent, *others = run.line()
    for pid in others[:2]:
        os.kill(pid, signal.SIGSTOP)  # the warden and the reaper can't do a thing any more
    os.kill(parent, signal.SIGKILL)
    assert run.end() == -9


def test_the_work_lives_in_a_world_of_its_own(tmp_path: Path) -> None:
    def look() -> dict[str, object]:
        addresses = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
        return {
            "pid": os.getpid(),
            "processes": sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")),
            "namespaces": [path.name for path in NETNS_DIR.iterdir()],
            "devices": [line.split(": ")[1] for line in addresses.splitlines()],
            "tmpdir": os.environ["TMPDIR"],
            "run": sorted(path.name for path in Path("/run").iterdir()),
        }

    seen = isolated(tmp_path, look)
    assert seen["pid"] == 2
    assert seen["processes"] == [1, 2]
    assert seen["namespaces"] == []
    assert seen["devices"] == ["lo"]
    assert seen["tmpdir"] == str(SCRATCH_DIR)
    machine = {path.name for path in Path("/run").iterdir()}
    assert machine <= set(seen["run"]) <= machine | {NETNS_DIR.name, SCRATCH_DIR.name}


def test_an_error_of_the_work_reaches_the_caller_as_what_it_is() -> None:
    def work() -> int:
        raise UsageError("no such tenant", remedy="name another")

    with pytest.raises(UsageError, match="no such tenant; name another"):
        run_isolated(work)


def test_orphans_are_reaped(tmp_path: Path) -> None:
    def orphan() -> bool:
        script = "import os, time; pid = os.fork(); pid or time.sleep(0.1); pid and print(pid)"
        pid = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        deadline_s = time.monotonic() + 5
        while Path("/proc", pid).exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return Path("/proc", pid).exists()

    assert isolated(tmp_path, orphan) is False


# --- topology ----------------------------------------------------------------------------------


def write_certificates() -> tuple[Path, Path]:
    """Return the CA's file and the server's, in the run's own temporary files."""
    authority = trustme.CA()
    ca_file, cert_file = SCRATCH_DIR / "ca.pem", SCRATCH_DIR / "cert.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    authority.issue_cert(SNI).private_key_and_cert_chain_pem.write_to_path(str(cert_file))
    return ca_file, cert_file


@contextlib.contextmanager
def lab_with_server() -> Iterator[tuple[Lab, Pod, Path]]:
    """A lab whose first tenant serves everything, and the CA that its clients trust."""
    with Lab(LabSpec(("acme", "beta"))) as lab:
        ca_file, cert_file = write_certificates()
        spec = ServerSpec(peer_port=7_443, cert_file=cert_file, stream_port=9_000)
        pod = lab.topology.pod("acme")
        lab.spawn_module(pod.namespace, SERVERS, spec.arguments()).wait_event("ready", timeout_s=10)
        yield lab, pod, ca_file


def run_traffic(lab: Lab, namespace: Namespace, spec: TrafficSpec) -> TrafficResult:
    client = lab.spawn_module(namespace, TRAFFIC, spec.arguments())
    flowing = client.wait_event("flowing", timeout_s=spec.timeout_s)
    assert flowing["streams"] == spec.streams
    result = TrafficResult.from_event(client.wait_event("result", timeout_s=spec.timeout_s))
    assert client.child.wait(timeout=2) == 0
    return result


def read_object(address: str, size_bytes: int) -> int:
    """Read one object by a socket of this process; return how many bytes came, head included."""
    with socket.create_connection((address, 4_000), timeout=5) as peer:
        peer.sendall(f"GET /object/{size_bytes} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
        received_bytes = 0
        while part := peer.recv(2**20):
            received_bytes += len(part)
    return received_bytes


def tcp_segments(namespace: Namespace) -> tuple[int, int]:
    """Return how many segments TCP has sent there, and how many of them again."""
    with inside(namespace.path):
        names, values = (
            line.split()
            for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
            if line.startswith("Tcp:")
        )
    counts = dict(zip(names, values, strict=True))
    return int(counts["OutSegs"]), int(counts["RetransSegs"])


@pytest.mark.parametrize(("family", "header_bytes"), [(Family.V4, 66), (Family.V6, 86)])
def test_the_nic_counts_each_byte_of_the_wire(tmp_path: Path, family: Family, header_bytes: int) -> None:
    size_bytes = 20_000_000

    def count() -> list[int]:
        with lab_with_server() as (lab, pod, _):
            source = DeviceBytes(lab.topology.node.path, [NIC, "pod-0"])
            before = source()
            with inside(lab.topology.client.path):
                received_bytes = read_object(pod.addresses.of(family), size_bytes)
            after = source()
            segments = tcp_segments(pod.namespace)
        moved_bytes = (after[name] - before[name] for name in (f"{NIC}.tx", f"{NIC}.rx", "pod-0.rx"))
        return [received_bytes, *segments, *moved_bytes]

    received_bytes, segments, again, tx_bytes, rx_bytes, pod_bytes = isolated(tmp_path, count)
    assert received_bytes > size_bytes
    assert segments > size_bytes / 1_448
    # Each segment with its own headers: Ethernet 14, IP 20 or 40, TCP with timestamps 32.
    assert tx_bytes == pytest.approx(
        received_bytes + again * (1_514 - header_bytes) + segments * header_bytes, rel=0.005
    )
    # On the pod's own device they go by in pieces of up to 64 kB, with one header each.
    assert pod_bytes < tx_bytes - 0.9 * segments * header_bytes
    assert 0 < rx_bytes < received_bytes * 0.05


def test_the_topology_has_what_a_node_has(tmp_path: Path) -> None:
    def look() -> dict[str, str]:
        with Lab(LabSpec(("acme", "beta"), tx_queues=3)) as lab:
            node = lab.topology.node
            commands = {
                "nic": ["ip", "-d", "-o", "link", "show", "dev", NIC],
                "uplink": ["ip", "-o", "-d", "link", "show", "dev", UPLINK],
                "routes4": ["ip", "route"],
                "routes6": ["ip", "-6", "route"],
                "tentative": ["ip", "-6", "addr", "show", "tentative"],
            }
            seen = {}
            for name, argv in commands.items():
                with inside((lab.topology.client if name == "uplink" else node).path):
                    seen[name] = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
            seen["listed"] = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
            count_wire_bytes(node.path, NIC)
            return seen

    seen = isolated(tmp_path, look)
    assert "numtxqueues 3" in seen["nic"]
    assert "LOWER_UP" in seen["uplink"]
    assert f"dev {NIC}" in seen["routes4"].splitlines()[0]
    assert all(f"10.61.1.{number} dev pod-{number - 1} " in seen["routes4"] for number in (1, 2, 3))
    assert f"default via fd4b:7572:6100::2 dev {NIC}" in seen["routes6"]
    assert "fd4b:7572:6101::101 dev pod-0" in seen["routes6"]
    assert seen["tentative"] == ""
    assert sorted(line.split()[0].split("-", 2)[2] for line in seen["listed"].splitlines()) == [
        "client",
        "local",
        "node",
        "pod-acme",
        "pod-beta",
    ]


def test_a_lab_takes_its_processes_and_namespaces_with_it(tmp_path: Path) -> None:
    def look() -> list[object]:
        with Lab(LabSpec(("acme",))) as lab:
            child = lab.spawn(lab.topology.node, ["sleep", "600"]).child
            missing = ""
            try:
                lab.spawn(lab.topology.node, ["no-such-program"])
            except UsageError as error:
                missing = str(error)
        return [child.poll(), [path.name for path in NETNS_DIR.iterdir()], missing]

    status, namespaces, missing = isolated(tmp_path, look)
    assert status in (-signal.SIGTERM, -signal.SIGKILL)
    assert namespaces == []
    assert "no-such-program could not be started" in missing


# --- traffic -----------------------------------------------------------------------------------

PROTOCOLS = {
    "direct": (Application.HTTP1, Security.PLAIN, 4_000, 2, 1),
    "h2c connections": (Application.HTTP2, Security.PLAIN, 4_000, 2, 1),
    "h2c streams": (Application.HTTP2, Security.PLAIN, 4_000, 1, 4),
    "grpc": (Application.GRPC, Security.PLAIN, 4_000, 2, 2),
    "peer": (Application.HTTP1, Security.TLS, 7_443, 2, 1),
    "foreign": (Application.TCP, Security.PLAIN, 9_000, 2, 1),
}


def traffic_spec(protocol: str, pod: Pod, ca_file: Path, *, family: Family = Family.V4) -> TrafficSpec:
    application, security, port, connections, streams = PROTOCOLS[protocol]
    return TrafficSpec(
        application=application,
        security=security,
        address=pod.addresses.of(family),
        port=port,
        sni=SNI,
        ca_file=str(ca_file),
        connections=connections,
        streams_per_connection=streams,
        duration_ms=700,
    )


@pytest.mark.traffic
def test_every_protocol_flows_through_the_nic_faster_than_a_shaped_tenant(tmp_path: Path) -> None:
    def measure() -> dict[str, list[int]]:
        measured = {}
        with lab_with_server() as (lab, pod, ca_file):
            source = DeviceBytes(lab.topology.node.path, [NIC])
            for number, protocol in enumerate(PROTOCOLS):
                spec = traffic_spec(protocol, pod, ca_file, family=(Family.V4, Family.V6)[number % 2])
                with ByteSampler([source], interval_ms=20) as sampler:
                    result = run_traffic(lab, lab.topology.client, spec)
                    line = sampler.stop().series(f"{NIC}.tx")
                measured[protocol] = [
                    result.received_bytes,
                    result.rate.bits_per_second,
                    line.whole().sent_bytes,
                    line.worst_window().rate.bits_per_second,
                    result.failures,
                ]
        return measured

    for protocol, (received_bytes, rate, nic_bytes, worst_rate, failures) in isolated(tmp_path, measure).items():
        assert failures == 0, protocol
        assert nic_bytes > received_bytes > 0, protocol
        assert worst_rate >= rate, protocol
        assert Rate(rate) > Rate.parse("500M"), protocol


@pytest.mark.traffic
def test_a_reader_on_the_same_node_never_touches_the_nic(tmp_path: Path) -> None:
    def measure() -> list[int]:
        with lab_with_server() as (lab, pod, ca_file):
            source = DeviceBytes(lab.topology.node.path, [NIC])
            before = source()
            result = run_traffic(lab, lab.topology.local.namespace, traffic_spec("direct", pod, ca_file))
            return [result.rate.bits_per_second, source()[f"{NIC}.tx"] - before[f"{NIC}.tx"]]

    rate, nic_bytes = isolated(tmp_path, measure)
    assert Rate(rate) > Rate.parse("3G")
    assert nic_bytes < 10_000


def test_a_client_without_an_answer_says_so_in_time(tmp_path: Path) -> None:
    def measure() -> dict[str, list[object]]:
        told: dict[str, list[object]] = {}
        with lab_with_server() as (lab, pod, ca_file):
            nobody = lab.topology.pod("beta")
            specs = {
                "nobody": replace(traffic_spec("direct", nobody, ca_file), start_timeout_ms=300),
                # The object port says nothing in a handshake, so the client waits for as long as it may.
                "mute": replace(traffic_spec("peer", pod, ca_file), port=4_000, start_timeout_ms=300),
                "stranger": replace(traffic_spec("peer", pod, ca_file), sni="other.test", start_timeout_ms=300),
            }
            for name, spec in specs.items():
                client = lab.spawn_module(lab.topology.client, TRAFFIC, spec.arguments())
                started_s = time.monotonic()
                result = TrafficResult.from_event(client.wait_event("result", timeout_s=spec.timeout_s))
                status = client.child.wait(timeout=2)
                elapsed_s = time.monotonic() - started_s
                told[name] = [status, result.received_bytes, result.failures, "; ".join(result.reasons), elapsed_s]
        return told

    told = isolated(tmp_path, measure)
    assert all((status, received_bytes) == (1, 0) for status, received_bytes, *_ in told.values())
    assert max(elapsed_s for *_, elapsed_s in told.values()) < 2
    assert "refused" in told["nobody"][3]
    assert told["mute"][2] == 0
    assert "other.test" in told["stranger"][3]


def test_a_client_leaves_at_its_deadline_whatever_is_under_way(tmp_path: Path) -> None:
    def measure() -> float:
        with lab_with_server() as (lab, pod, ca_file):
            spec = replace(traffic_spec("foreign", pod, ca_file), duration_ms=200)
            client = lab.spawn_module(lab.topology.client, TRAFFIC, spec.arguments())
            client.wait_event("flowing", timeout_s=spec.timeout_s)
            started_s = time.monotonic()
            client.child.wait(timeout=5)
            return time.monotonic() - started_s

    assert 0.15 < isolated(tmp_path, measure) < 0.7
