"""`verify` beside a real gateway under load: what it says itself agrees with its sockets, and what is wrong shows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_rig import VERSIONS
from gateway_wire import BETA, CEILING, DOCUMENT, NIC, NODE, NODE6, Clients, Wire, gateway_on_a_wire, traffic

from kura_shaper.clock import SystemClock
from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.haproxy.options import Design
from kura_shaper.lab.isolation import inside
from kura_shaper.lab.traffic import Application
from kura_shaper.tree.observe import Asked
from kura_shaper.units import Rate
from kura_shaper.verify.collect import NodeReader
from kura_shaper.verify.observed import Question
from kura_shaper.verify.run import Report, Settings, run
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kura_shaper.verify.values import Result

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.traffic]

QUESTION = Question(DOCUMENT, Asked(budget=Rate.parse("4G")))
SETTINGS = Settings(duration_ms=1_500, accepted=frozenset({"retransmits-high"}))


@pytest.fixture(scope="module", params=[(version, design) for version in VERSIONS for design in Design], ids=str)
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A gateway of each branch and design, with the tree on its node's device."""
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    version, design = request.param
    with gateway_on_a_wire(tmp_path_factory.mktemp("gateway"), version=version, design=design) as made:
        made.shape()
        yield made


def verify(wire: Wire, question: Question = QUESTION, settings: Settings = SETTINGS) -> Report:
    """Run `verify` in the node's network namespace."""
    with inside(wire.near.namespace.network):
        master = MasterSocket(PurePath(wire.near.master_socket))
        with NodeReader(NIC, clock=SystemClock(), gateway=master) as reader:
            return run(question, reader, settings)


def results(report: Report) -> dict[str, Result]:
    return {result.check.name: result for result in report.results}


def test_a_gateway_that_serves_two_tenants_has_no_finding_and_every_check_had_something_to_look_at(wire: Wire) -> None:
    with Clients(wire) as clients:
        clients.read(
            traffic(Application.HTTP1, connections=2),
            traffic(Application.HTTP2, connections=1, streams=4),
            traffic(Application.TCP, connections=1),
            traffic(Application.HTTP1, connections=1, tenant=BETA),
        )
        report = verify(wire)
    assert [finding.message for finding in report.findings] == []
    assert report.unknown == ()
    found = results(report)
    for name in ("gateway-ports", "gateway-capability", "gateway-configuration", "ceilings", "sockets", "sessions"):
        assert found[name].outcome is Outcome.HOLDS, (name, found[name])
    # Two of HTTP/1.1, one of HTTP/2, one on the peer plane, and one of the other tenant.
    assert found["sessions"].words.startswith("5 connections carry the mark"), found["sessions"]


def test_a_document_that_gives_a_tenant_another_class_shows_in_the_map_and_on_the_sockets(wire: Wire) -> None:
    """The node has the new document, the gateway still runs with the old one."""
    acme, beta = DOCUMENT.tenants
    moved = replace(DOCUMENT, tenants=(replace(beta, class_id=0x299), replace(acme, class_id=beta.class_id)))
    with Clients(wire) as clients:
        clients.read(traffic(Application.HTTP1, connections=1, tenant=BETA))
        report = verify(wire, replace(QUESTION, document=moved))
    codes = {finding.code.name for finding in report.findings}
    assert {"gateway-marks-differ", "socket-wrong-mark"} <= codes
    (wrong,) = [finding for finding in report.findings if finding.code.name == "socket-wrong-mark"]
    assert wrong.tenant == "beta"
    assert "carry the mark of acme" in wrong.message


@pytest.mark.finding("gateway-old-worker")
def test_a_worker_that_a_reload_left_behind_is_told_and_its_sessions_still_are(wire: Wire) -> None:
    with Clients(wire) as clients:
        # At its ceiling an object takes longer than the test, so the connection stays with the old worker.
        clients.read(traffic(Application.HTTP1, connections=1))
        assert "Success=1" in wire.near.master("reload")
        time.sleep(0.5)
        assert verify(wire).findings == (), "a moment ago"
        report = verify(wire, replace(QUESTION, old_worker_s=-1))
    assert [finding.code.name for finding in report.findings] == ["gateway-old-worker"]
    assert results(report)["sessions"].outcome is Outcome.HOLDS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_gateway_that_can_not_mark_is_named_and_so_is_what_follows_from_it(version: str, tmp_path: Path) -> None:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    launcher = ("setpriv", "--bounding-set", "-net_admin,-net_raw", "--inh-caps", "-net_admin,-net_raw")
    with gateway_on_a_wire(tmp_path, version=version, launcher=launcher, user="root", group="root") as wire:
        wire.shape()
        with Clients(wire) as clients:
            clients.read(traffic(Application.HTTP1, connections=1))
            report = verify(wire)
    codes = {finding.code.name for finding in report.findings}
    assert codes == {"gateway-cant-mark", "unattributed-bytes", "socket-unmarked"}


def test_load_from_outside_is_held_by_one_ceiling_over_every_protocol_family_and_number_of_streams(
    wire: Wire, tmp_path: Path
) -> None:
    """The whole command, in the node's namespace, with its client in the world."""
    document = tmp_path / "tenants.yaml"
    document.write_text(_document_text())
    command = [
        *(sys.executable, "-m", "kura_shaper", "verify", "--tenants", str(document), "--device", NIC),
        *("--budget", "4G", "--json", "--accept", "retransmits-high", "--duration", "0.8"),
        *("--live", "--url", "https://acme.kura.test/object/268435456", "--streams", "1,4"),
        *("--connect-to", f"{NODE},{NODE6}", "--protocols", "http1,http2,grpc"),
        # From the node itself to a server on it: what never leaves has no ceiling.
        *("--control", "http://127.0.0.1:4000/object/268435456"),
        *("--ca-file", str(wire.rig.ca_file), "--live-from", f"nsenter --net={wire.world.network}"),
    ]
    argv = ["nsenter", f"--net={wire.near.namespace.network}", *command]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr)
    report = json.loads(ended.stdout)
    (live,) = [check for check in report["checks"] if check["name"] == "live"]
    assert live["outcome"] == "holds", live
    rows = {(row["path"], row["streams"]): row for row in report["live"]}
    paths = [f"{protocol} {family}" for family in ("IPv4", "IPv6") for protocol in ("http1", "http2", "grpc")]
    assert list(rows) == [(path, streams) for path in (*paths, "control 1 IPv4") for streams in (1, 4)]
    for row in rows.values():
        if row["is_control"]:
            assert row["received_bits_per_second"] > 2 * CEILING.bits_per_second
            assert row["class_bits_per_second"] < row["received_bits_per_second"] // 10
        else:
            assert row["received_bits_per_second"] <= CEILING.scaled(101, 100).bits_per_second
            assert row["class_bits_per_second"] >= row["received_bits_per_second"] * 9 // 10


RESTART = """
pkill -TERM -o haproxy
while pgrep haproxy >/dev/null; do sleep 0.05; done
setsid {haproxy} -W -S {run}/master.sock -f {config} </dev/null >/dev/null 2>&1 &
until curl -s --insecure --connect-to ::127.0.0.1:443 --max-time 5 https://acme.kura.test/object/1 >/dev/null; do
  sleep 0.05
done
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_gateway_that_is_ended_and_started_again_in_the_middle_of_the_command_changed_nothing(
    version: str, tmp_path: Path
) -> None:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    document, restart = tmp_path / "tenants.yaml", tmp_path / "restart.sh"
    document.write_text(_document_text())
    with gateway_on_a_wire(tmp_path, version=version) as wire:
        wire.shape()
        config = wire.near.options.directory / "haproxy.cfg"
        haproxy = gateway_rig.haproxy_of(version).path
        restart.write_text(RESTART.format(haproxy=haproxy, run=gateway_rig.RUN_DIRECTORY, config=config))
        argv = wire.near.namespace.command(
            *(sys.executable, "-m", "kura_shaper", "verify", "--tenants", str(document), "--device", NIC),
            *("--budget", "4G", "--static", "--json", "--after", "gateway", "--within", "30"),
            *("--restart", f"sh {restart}"),
        )
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
        assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr)
        report = json.loads(ended.stdout)
        assert report["before"] == {"part": "gateway", "verdict": "pass", "findings": []}
        (again,) = [check for check in report["checks"] if check["name"] == "restart"]
        assert "the gateway was restarted" in again["seen"]
        # Its marks are what they were, in the kernel's eyes.
        with wire.rig.connect_tls("acme.kura.test") as client:
            assert wire.rig.mark(client) == 0x2A7 << 16


def _document_text() -> str:
    """The document of the gateway, for the command."""
    rows = [
        f"  - {{name: {t.name}, class: {t.class_id:#x}, floor: 0, ceiling: {t.ceiling}, hosts: [{t.hosts[0]}],"
        f' peer_hosts: [{t.peer_hosts[0]}], backends: {{http: {{address: "127.0.0.1:4000"}},'
        f' grpc: {{address: "127.0.0.1:4000"}}, peer: {{address: "127.0.0.1:6000"}}}}}}'
        for t in DOCUMENT.tenants
    ]
    return "\n".join(["apiVersion: kura-shaper/v1", "kind: Tenants", "region: test", "tenants:", *rows]) + "\n"
