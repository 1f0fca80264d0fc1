"""The probe against a real gateway, from the other end of a wire: what it says is what is so."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gateway_rig as rig_module
import gateway_wire as wire_module
import pytest
from gateway_rig import HTTPS_PORT, PEER_PORT, VERSIONS
from gateway_wire import ACME, BETA, CEILING, NODE, Wire

from kura_shaper.clock import SystemClock
from kura_shaper.lab.isolation import inside
from kura_shaper.lab.servers import OBJECT_BYTES_HEADER
from kura_shaper.probe.client import measure
from kura_shaper.probe.connection import Resolver
from kura_shaper.probe.failures import Reason
from kura_shaper.probe.http2 import quieten_frames
from kura_shaper.probe.target import Load, Measured, Protocol, Target, Verdict
from kura_shaper.probe.task import ENDLESS_BYTES, GRPC_READ_PATH
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.privileged

SECOND = 1_000_000_000
LARGE = "/object/3000000"


@pytest.fixture(scope="module", params=VERSIONS)
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    if reason := rig_module.why_not_here():
        pytest.skip(reason)
    quieten_frames()
    with wire_module.gateway_on_a_wire(tmp_path_factory.mktemp("gateway"), version=request.param) as made:
        yield made


def target(wire: Wire, protocol: Protocol, **changes: Any) -> Target:
    port = changes.get("port", HTTPS_PORT)
    made = Target(
        name="it",
        host=BETA.hosts[0],
        protocol=protocol,
        small="/ready",
        large=LARGE,
        connect_to=Endpoint(NODE, port),
        ca_file=wire.rig.ca_file,
    )
    return replace(made, **changes)


def probed(wire: Wire, asked: Target, **load: Any) -> Measured:
    # The threads of the probe are in the network in which they are made.
    with inside(wire.world.network):
        return measure(asked, Load(**load), clock=SystemClock(), resolver=Resolver())


@pytest.mark.parametrize(
    ("protocol", "spoken"), [(Protocol.HTTP1, "http/1.1"), (Protocol.HTTP2, "h2"), (Protocol.AUTO, "h2")]
)
def test_each_protocol_of_the_gateway_is_measured(wire: Wire, protocol: Protocol, spoken: str) -> None:
    found = probed(wire, target(wire, protocol), streams=4)
    assert (found.failures, found.verdict) == ((), Verdict.FINE)
    assert (found.spoken, found.status, found.address, found.streams) == (spoken, 200, f"{NODE}:443", 4)
    assert found.received_bytes == 4 * 3_000_000 + len(b"ok\n")
    times = (found.connect_ns, found.handshake_ns, found.first_byte_ns)
    assert all(time_ns is not None and 0 < time_ns < 5 * SECOND for time_ns in times)
    assert found.certificate_ends_at_s


def test_grpc_is_measured(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"{OBJECT_BYTES_HEADER}: 3000000\n")
    asked = target(wire, Protocol.GRPC, small="", large=GRPC_READ_PATH, header_file=tmp_path / "headers")
    found = probed(wire, asked, streams=4)
    assert (found.failures, found.status, found.grpc_status) == ((), 200, 0)
    # A prefix of five bytes for each message.
    assert found.received_bytes > 4 * 3_000_000


def test_the_peer_plane_is_measured(wire: Wire) -> None:
    peer = {"host": BETA.peer_hosts[0], "port": PEER_PORT}
    found = probed(wire, target(wire, Protocol.TCP, small="", large="", **peer))
    assert (found.failures, found.spoken, found.address) == ((), "tls", f"{NODE}:{PEER_PORT}")
    assert found.handshake_ns
    # The peers of this rig speak HTTP/1.1 within.
    found = probed(wire, target(wire, Protocol.HTTP1, **peer), streams=2)
    assert (found.failures, found.received_bytes) == ((), 2 * 3_000_000 + 3)


@pytest.mark.parametrize("protocol", [Protocol.HTTP1, Protocol.HTTP2])
def test_another_tenants_name_on_a_connection_is_a_421(wire: Wire, protocol: Protocol) -> None:
    asked = target(wire, protocol, host=BETA.hosts[0], sni=ACME.hosts[0])
    found = probed(wire, asked)
    assert [failure.reason for failure in found.failures] == [Reason.STATUS]
    assert (found.status, found.rate, found.verdict) == (421, None, Verdict.FAILED)
    # It is what a gateway should say, and can be asked for.
    assert probed(wire, replace(asked, expected_status=421, large="")).verdict is Verdict.FINE


@pytest.mark.parametrize("port", [HTTPS_PORT, PEER_PORT])
@pytest.mark.parametrize("name", ["unknown.kura.test", "peer.unknown.kura.test"])
def test_a_name_that_nobody_owns_ends_in_the_handshake(wire: Wire, port: int, name: str) -> None:
    found = probed(wire, target(wire, Protocol.AUTO, host=name, port=port), streams=2)
    assert [failure.reason for failure in found.failures] == [Reason.HANDSHAKE]
    assert (found.handshake_ns, found.status) == (None, None)
    assert found.connect_ns


def test_an_object_that_is_not_there_is_a_404(wire: Wire) -> None:
    found = probed(wire, target(wire, Protocol.HTTP2, small="/nothing"))
    assert [str(failure) for failure in found.failures] == ["status: status 404; expected 200"]


def test_a_gateway_that_is_loaded_anew_is_no_failure(wire: Wire) -> None:
    results: list[Measured] = []
    # Objects that end all the time, so that the old worker says goodbye in between.
    asked = target(wire, Protocol.HTTP2, small="", large="/object/200000")

    def run() -> None:
        results.append(probed(wire, asked, streams=2, size_bytes=ENDLESS_BYTES, duration_ns=2 * SECOND))

    running = threading.Thread(target=run)
    running.start()
    for _ in range(2):
        threading.Event().wait(0.6)
        assert "Success=1" in wire.near.master("reload")
    running.join(30)
    assert [result.failures for result in results] == [()]


@pytest.mark.traffic
@pytest.mark.parametrize("protocol", [Protocol.HTTP1, Protocol.HTTP2])
def test_the_rate_is_that_of_the_tenants_ceiling(wire: Wire, protocol: Protocol) -> None:
    wire.shape()
    asked = target(wire, protocol, host=ACME.hosts[0], large="/object/1000000000", min_rate=CEILING.scaled(1, 2))
    found = probed(wire, asked, streams=4, size_bytes=ENDLESS_BYTES, duration_ns=2 * SECOND)
    assert (found.failures, found.verdict) == ((), Verdict.FINE)
    assert found.rate is not None
    # Payload in the window may have left before it began.
    assert found.rate < CEILING.scaled(115, 100)
    too_much = replace(found, target=replace(asked, min_rate=CEILING.scaled(2, 1)))
    assert too_much.verdict is Verdict.SLOW


def test_the_command_says_the_same(wire: Wire) -> None:
    words = (sys.executable, "-m", "kura_shaper", "probe", "--url", f"https://{BETA.hosts[0]}{LARGE}", "--json")
    options = ("--connect-to", f"{NODE}:443", "--ca-file", str(wire.rig.ca_file), "--streams", "2", "--protocol")
    for protocol, extra, status, reason in (
        ("http2", (), 0, None),
        ("http1", ("--sni", ACME.hosts[0]), 1, "status"),
        ("auto", ("--sni", "unknown.kura.test"), 1, "handshake"),
    ):
        process = wire.world.spawn(*words, *options, protocol, *extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=30)
        (found,) = json.loads(out)["targets"]
        assert (process.returncode, err) == (status, b"")
        assert [failure["reason"] for failure in found["failures"]] == ([reason] if reason else [])
