"""Worlds that are broken in one way each, and the one finding that `verify` then has: what passes in a while."""

from __future__ import annotations

import json
import socket
import struct
import tarfile
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kernel_traffic import FAMILIES, send_datagrams
from kernel_trees import ACME, GATEWAY_PORT, ZETA
from verify_rig import GATEWAY, PATIENT, TENANTS, VerifyRig, client, gateway, mark_of, only, peer_of, tc

from kura_shaper.kernel.prove import send_frames
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.tree.ebpf import EbpfProgram
from kura_shaper.tree.model import EGRESS, DirectBpf, Filter
from kura_shaper.tree.operations import AddHook, SetFilter
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from xml.etree import ElementTree as ET

    from conftest import Cli, Network

    from kura_shaper.tree.build import Capabilities
    from kura_shaper.verify.run import Report

pytestmark = pytest.mark.privileged

_KB, _LOTS = 1_000, 1 << 31
_STRANGE = 0x0999
# Who wants more than he gets loses what his queue can't hold: that is how TCP finds its rate.
FULL = replace(PATIENT, accepted=frozenset({"retransmits-high"}))
_QDISC_BYPASS = 20
_RANDOM = 0xFFFFF038  # SKF_AD_OFF + SKF_AD_RANDOM


@pytest.fixture
def rig(network: Network, capabilities: Capabilities) -> Iterator[VerifyRig]:
    """A node with its tree and a gateway that serves."""
    with gateway():
        made = VerifyRig(network, capabilities)
        made.shape()
        yield made


def outcome(report: Report, name: str) -> Outcome:
    """Return what came of one check."""
    (found,) = [result for result in report.results if result.check.name == name]
    return found.outcome


# Nothing is wrong.


@pytest.mark.parametrize("shape", ["single", "mq"])
def test_a_healthy_node_under_traffic_has_no_finding(network: Network, capabilities: Capabilities, shape: str) -> None:
    with gateway(), ExitStack() as stack:
        rig = VerifyRig(network, capabilities)
        if shape == "mq" and not capabilities.steering:
            pytest.skip("this kernel can't steer")
        rig.shape(ShapeChoice(shape))
        clients = [stack.enter_context(client(rig, mark_of(c.minor), 50 * _KB)) for c in (ACME, ZETA)]

        def meanwhile() -> None:
            with ExitStack() as some:
                for classid in (ACME, ZETA):
                    some.enter_context(client(rig, mark_of(classid.minor), 200 * _KB))

        report = rig.verify(PATIENT, meanwhile=meanwhile)
        assert len(clients) == 2
    assert [finding.message for finding in report.findings] == []
    assert report.unknown == ()
    assert report.exit_code == 0
    for name in ("ceilings", "budget", "attribution", "accounting", "sockets"):
        assert outcome(report, name) is Outcome.HOLDS, name


@pytest.mark.traffic
@pytest.mark.slow
def test_tenants_that_want_everything_get_their_floors_and_no_more_than_their_ceilings(rig: VerifyRig) -> None:
    with client(rig, mark_of(), _LOTS, reads=True), client(rig, mark_of(ZETA.minor), _LOTS, reads=True):
        time.sleep(0.5)
        report = _verify_full(rig)
    assert [finding.message for finding in report.findings] == []
    for name in ("ceilings", "budget", "floors", "sockets"):
        assert outcome(report, name) is Outcome.HOLDS, name


def test_an_idle_node_is_no_proof_and_says_so(rig: VerifyRig) -> None:
    assert rig.verify(PATIENT).exit_code == 0
    report = rig.verify(replace(PATIENT, needs_traffic=True))
    assert report.exit_code == 4
    assert outcome(report, "ceilings") is Outcome.UNKNOWN


# Rates.


@pytest.mark.traffic
@pytest.mark.slow
@pytest.mark.finding("ceiling-exceeded")
def test_a_tenant_above_its_ceiling(rig: VerifyRig) -> None:
    """The tree has another ceiling from the moment on that it was looked at: only the bytes can tell."""
    change = "class change dev nic0 parent 20:3 classid 20:2a7 htb rate 25mbit ceil 90mbit burst 64k cburst 64k prio 1"
    with client(rig, mark_of(), _LOTS, reads=True):
        only(rig.verify(replace(FULL, duration_ms=2_000), meanwhile=lambda: tc(change)), "ceiling-exceeded")


@pytest.mark.traffic
@pytest.mark.slow
@pytest.mark.finding("budget-exceeded")
def test_all_tenants_together_above_the_budget(rig: VerifyRig) -> None:
    change = "class change dev nic0 parent 20:1 classid 20:3 htb rate 400mbit ceil 400mbit burst 64k cburst 64k"
    with client(rig, mark_of(), _LOTS, reads=True), client(rig, mark_of(ZETA.minor), _LOTS, reads=True):
        settings = replace(FULL, duration_ms=2_000)
        only(rig.verify(settings, meanwhile=lambda: tc(change)), "budget-exceeded")


@pytest.mark.traffic
@pytest.mark.slow
@pytest.mark.finding("floor-missed")
def test_a_tenant_that_waits_and_gets_less_than_its_floor(rig: VerifyRig) -> None:
    change = "class change dev nic0 parent 20:3 classid 20:2a7 htb rate 1mbit ceil 50mbit prio 5 burst 64k cburst 64k"
    with ExitStack() as stack:
        stack.enter_context(client(rig, mark_of(), _LOTS, reads=True))
        for _ in range(3):  # so that the budget is full whatever one of them waits for
            stack.enter_context(client(rig, mark_of(ZETA.minor), _LOTS, reads=True))
        time.sleep(0.5)
        # Where the others do not take all that is left for a while, the one without a floor has its share after all.
        for _ in range(5):
            report = _verify_full(rig, meanwhile=lambda: tc(change))
            if report.findings:
                break
            rig.shape()
    only(report, "floor-missed")


def _verify_full(rig: VerifyRig, *, meanwhile: Callable[[], object] = lambda: None) -> Report:
    """Look until the budget was full for a while: on a busy machine the senders may not fill it at once."""
    for _ in range(5):
        report = rig.verify(replace(FULL, duration_ms=3_000), meanwhile=meanwhile)
        if outcome(report, "floors") is not Outcome.SKIPPED:
            break
        rig.shape()
    return report


# Bytes that pass the tree by, or nobody can be charged with.


@pytest.mark.finding("unattributed-bytes")
@pytest.mark.parametrize("family", FAMILIES)
def test_payload_of_a_gateway_port_without_a_mark(rig: VerifyRig, family: socket.AddressFamily) -> None:
    only(
        rig.verify(PATIENT, meanwhile=lambda: send_datagrams(family, source_port=GATEWAY_PORT, count=3)),
        "unattributed-bytes",
    )


@pytest.mark.finding("unknown-mark-bytes")
def test_bytes_with_a_mark_that_no_class_has(rig: VerifyRig) -> None:
    only(
        rig.verify(PATIENT, meanwhile=lambda: send_datagrams(socket.AF_INET, mark=mark_of(_STRANGE))),
        "unknown-mark-bytes",
    )


@pytest.mark.finding("direct-packets")
def test_packets_that_pass_without_a_class(rig: VerifyRig) -> None:
    def meanwhile() -> None:
        tc("class del dev nic0 classid 20:12")
        send_datagrams(socket.AF_INET, mark=mark_of(_STRANGE), count=5)

    only(rig.verify(PATIENT, meanwhile=meanwhile), "direct-packets")


@pytest.mark.case("E4")
@pytest.mark.finding("bytes-outside")
def test_frames_that_pass_every_qdisc(rig: VerifyRig) -> None:
    def meanwhile() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(263, _QDISC_BYPASS, 1)
            sender.bind(("nic0", 0))
            for _ in range(400):
                sender.sendto(bytes(1_400), ("nic0", 0x0800, 0, 0, b"\2\0\0\0\0\1"))

    report = rig.verify(PATIENT, meanwhile=meanwhile)
    only(report, "bytes-outside")
    # Less what packets under way may explain: a node always has a few of its own.
    assert int(str(report.findings[0].evidence["outside_bytes"])) > 400 * 1_414 - 2 * 65_536 - 50_000


def test_ordinary_frames_are_not_outside_whatever_their_number(rig: VerifyRig) -> None:
    def meanwhile() -> None:
        for _ in range(50):
            send_frames(rig.network.device, mark=mark_of(), count=100)

    report = rig.verify(PATIENT, meanwhile=meanwhile)
    assert report.findings == ()
    assert outcome(report, "accounting") is Outcome.HOLDS


@pytest.mark.finding("tree-vanished")
def test_a_tree_that_is_taken_away_meanwhile(rig: VerifyRig) -> None:
    report = rig.verify(PATIENT, meanwhile=lambda: tc("qdisc del dev nic0 root"))
    only(report, "tree-vanished")
    assert outcome(report, "ceilings") is not Outcome.HOLDS


# Sockets.


@pytest.mark.finding("socket-unmarked")
def test_a_connection_that_was_served_without_a_mark(rig: VerifyRig) -> None:
    """It is silent now, so no byte counter tells of it any more."""
    with client(rig, 0, 20 * _KB):
        report = rig.verify(PATIENT)
    only(report, "socket-unmarked")
    assert report.findings[0].evidence["sent_bytes"] == 20 * _KB


@pytest.mark.finding("socket-unknown-mark")
def test_a_connection_with_the_mark_of_no_tenant(rig: VerifyRig) -> None:
    with client(rig, mark_of(_STRANGE), 20 * _KB):
        only(rig.verify(PATIENT), "socket-unknown-mark")


def test_clients_on_the_node_itself_are_left_aside(rig: VerifyRig) -> None:
    """Their bytes never come to a NIC, so nobody has to mark them."""
    with socket.create_connection(("10.70.0.1", GATEWAY_PORT)) as near:
        near.sendall(struct.pack("!II", 0, 1_000))
        assert near.recv(1_000, socket.MSG_WAITALL)
        report = rig.verify(PATIENT)
    assert report.findings == ()
    assert outcome(report, "sockets") is Outcome.SKIPPED


@pytest.mark.case("F15")
@pytest.mark.finding("bytes-not-in-class")
def test_a_configuration_that_is_right_and_bytes_that_do_not_pass_it(rig: VerifyRig) -> None:
    """The failure that this product exists for: each value is as it should be, and the traffic goes another way.

    Here a program on the way out gives acme's packets zeta's mark, after everything was looked at.
    """
    with client(rig, mark_of(), _LOTS, reads=True):
        report = rig.verify(FULL, meanwhile=lambda: _mark_all(rig, mark_of(ZETA.minor)))
    only(report, "bytes-not-in-class")
    assert report.findings[0].tenant == "acme"


def _mark_all(rig: VerifyRig, mark: int) -> None:
    """Have every packet leave with this mark: mov r2, mark; stx [r1 + 8], r2; mov r0, -1; exit."""
    program = EbpfProgram(((0xB4, 2, 0, 0, mark), (0x63, 1, 2, 8, 0), (0xB4, 0, 0, 0, -1), (0x95, 0, 0, 0, 0)))
    marking = Filter(EGRESS, 50, 3, 1, DirectBpf(program.name, program))
    refused = [one for one in rig.network.control().send([AddHook(), SetFilter(marking)]) if one]
    assert refused == []


MARKS = "acme 44498944\nzeta 44564480\n"


class Gateway:
    """A master that answers as HAProxy does, of one worker."""

    def __init__(
        self,
        *,
        sessions: str = "",
        marks: str = MARKS,
        since: str = "0d00h00m05s",
        old: str = "",
    ) -> None:
        rows = ["0x1 " + row for row in marks.splitlines()]
        self.answers = {
            "show proc": f"#<PID> <type> <reloads> <uptime> <version>\n1 master 1 0d01h00m00s 3.2\n# workers\n"
            f"7 worker 0 {since} 3.2\n# old workers\n{old}",
            "@1 show map": "# id (file) description\n0 (/etc/haproxy/mark.map) pattern loaded from file\n",
            "@1 show map #0": "\n".join(rows) + "\n",
            "@1 show sess": sessions,
        }

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 0) -> str:
        return self.answers.get(command, "")


def session(peer: str, backend: str) -> str:
    return f"0x7f0000: proto=tcpv4 src={peer} fe=edge be={backend} srv=tls ts=00 age=0s\n"


@pytest.mark.finding("socket-wrong-mark")
def test_a_connection_that_the_gateway_serves_as_another_tenants(rig: VerifyRig) -> None:
    with client(rig, mark_of(), 20 * _KB) as made:
        right = rig.verify(PATIENT, gateway=Gateway(sessions=session(peer_of(made), "acme_edge")))
        wrong = rig.verify(PATIENT, gateway=Gateway(sessions=session(peer_of(made), "zeta_edge")))
    assert right.findings == ()
    assert outcome(right, "sessions") is Outcome.HOLDS
    only(wrong, "socket-wrong-mark")


@pytest.mark.finding("gateway-marks-differ")
@pytest.mark.parametrize(
    "marks", ["acme 44498944\nzeta 44564481\n", "acme 44498944\n", "acme 44498944\nzeta 44564480\nnobody 1\n"]
)
def test_a_gateway_that_marks_otherwise_than_the_document(rig: VerifyRig, marks: str) -> None:
    only(rig.verify(gateway=Gateway(marks=marks)), "gateway-marks-differ")


@pytest.mark.finding("gateway-old-worker")
def test_an_old_worker_that_serves_on(rig: VerifyRig) -> None:
    old = "5 worker 1 0d02h00m00s 3.2\n"
    assert rig.verify(gateway=Gateway(old=old)).findings == (), "it was replaced five seconds ago"
    only(rig.verify(gateway=Gateway(old=old, since="0d01h00m00s")), "gateway-old-worker")


# Losses.


@pytest.mark.traffic
@pytest.mark.slow
@pytest.mark.finding("retransmits-high")
def test_a_path_that_loses_a_tenth(rig: VerifyRig) -> None:
    lossy = f"4,32 0 0 {_RANDOM},53 0 1 429496729,6 0 0 4294967295,6 0 0 2"
    with rig.network.in_world():
        tc("qdisc add dev up0 clsact")
        tc("filter add dev up0 ingress protocol all prio 1 bpf da bytecode", lossy)
    with client(rig, mark_of(), _LOTS, reads=True):
        only(rig.verify(replace(PATIENT, duration_ms=4_000)), "retransmits-high")


# The command.


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        TENANTS.replace("- {name: acme,", "- {name: acme, hosts: [acme.secret.example],").replace(
            "floor: 25M", 'floor: 25M, backends: {http: {address: "10.9.8.7:4000"}}'
        )
    )
    return path


def test_the_command_writes_every_report_and_leaves_with_its_verdict(
    rig: VerifyRig, cli: Cli, tenants: Path, tmp_path: Path
) -> None:
    paths = {name: str(tmp_path / f"report.{name}") for name in ("html", "junit", "bundle")}
    files = [part for name, path in paths.items() for part in (f"--{name}", path)]
    fixed = ["verify", "--tenants", str(tenants), "--device", "nic0", "--budget", "100M", "--duration", "1"]
    with client(rig, 0, 20 * _KB), client(rig, mark_of(), 20 * _KB):
        ended = cli(*fixed, "--json", *files)
    assert ended.status == 1, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["exit_code"], found["device"]) == ("findings", 1, "nic0")
    assert [finding["code"] for finding in found["findings"]] == ["socket-unmarked"]
    page = (tmp_path / "report.html").read_text()
    assert "socket-unmarked" in page
    assert "<script src" not in page
    suite = _parse((tmp_path / "report.junit").read_text())
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    with tarfile.open(paths["bundle"]) as archive:
        names = {name.removeprefix("kura-shaper-verify/") for name in archive.getnames()}
    assert {"report.json", "report.html", "readings/tree.json", "readings/sockets.json", "samples.csv"} <= names


def test_a_redacted_bundle_has_no_name_and_no_address_in_any_file(
    rig: VerifyRig, cli: Cli, tenants: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.tgz"
    fixed = ["verify", "--tenants", str(tenants), "--device", "nic0", "--budget", "100M", "--duration", "1"]
    with client(rig, 0, 20 * _KB):
        ended = cli(*fixed, "--redact", "--json", "--bundle", str(bundle), "--html", str(tmp_path / "x.html"))
    assert ended.status == 1, ended.stderr
    with tarfile.open(bundle) as archive:
        texts = {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]
    plots = texts.pop("kura-shaper-verify/report.html").split("</script>", 1)[1]
    for text in (*texts.values(), plots, ended.stdout):
        for word in ("acme", "zeta", "secret", "10.70.0.", "10.9.8.7", "us-east"):
            assert word not in text, word
    report = json.loads(texts["kura-shaper-verify/report.json"])
    assert "198.18.0." in report["findings"][0]["message"]
    assert {"tenant-1", "tenant-2"} == {
        row["name"] for row in json.loads(texts["kura-shaper-verify/promises.json"])["tenants"]
    }


def _parse(text: str) -> ET.Element:
    from xml.etree import ElementTree

    return ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--accept", "nonsense"], "is no finding"),
        (["--window", "1"], "--window"),
        (["--duration", "0.05"], "--duration"),
        (["--html", "/nowhere/x.html"], "--html"),
        (["--device", "nope0"], "no such network device"),
    ],
)
def test_a_bad_option_is_said_before_anything_is_looked_at(
    rig: VerifyRig, cli: Cli, tenants: Path, options: list[str], words: str
) -> None:
    fixed = ["--tenants", str(tenants), "--device", "nic0", "--budget", "100M", *options]
    ended = cli("verify", *fixed)
    assert ended.status == 2
    assert words in ended.stderr


def test_quiet_where_there_is_no_terminal_and_text_says_what_was_seen(rig: VerifyRig, cli: Cli, tenants: Path) -> None:
    ended = cli("verify", "--tenants", str(tenants), "--device", "nic0", "--budget", "100M", "--static")
    assert (ended.status, ended.stderr) == (0, "")
    assert "holds    gateway-ports" in ended.stdout
    assert f"ports 443, 7443: {GATEWAY}" in ended.stdout
    assert ended.stdout.rstrip().splitlines()[-1].startswith("nic0: pass: ")


@pytest.mark.case("F72")
def test_after_a_restart_of_the_gateway_nothing_changed_and_after_one_of_the_tree_it_did(
    network: Network, capabilities: Capabilities, cli: Cli, tenants: Path, tmp_path: Path
) -> None:
    rig = VerifyRig(network, capabilities)
    rig.shape()
    earlier = tmp_path / "earlier.json"
    fixed = ["verify", "--tenants", str(tenants), "--device", "nic0", "--budget", "100M", "--static", "--json"]
    with gateway():
        with client(rig, mark_of(), 20 * _KB):
            pass
        earlier.write_text(cli(*fixed).stdout)
    with gateway():
        ended = cli(*fixed, "--baseline", str(earlier))
        assert ended.status == 0, ended.stdout
        (restart,) = [check for check in json.loads(ended.stdout)["checks"] if check["name"] == "restart"]
        assert "the gateway was restarted" in restart["seen"]
        tc("qdisc del dev nic0 root")
        rig.shape()
        ended = cli(*fixed, "--baseline", str(earlier))
    assert [finding["code"] for finding in json.loads(ended.stdout)["findings"]] == ["tree-rebuilt"]
