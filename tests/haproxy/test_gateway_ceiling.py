"""At the device, in every short window, a tenant's connections together send at most its ceiling."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_rig import VERSIONS
from gateway_wire import CEILING, NIC, Clients, Wire, gateway_on_a_wire, settle, traffic

from kura_shaper.haproxy.options import BandwidthLimit, Design
from kura_shaper.lab.traffic import Application

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kura_shaper.lab.traffic import TrafficSpec
    from kura_shaper.measure import Samples

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

HTTP1, HTTP2, GRPC, PEER = Application.HTTP1, Application.HTTP2, Application.GRPC, Application.TCP
STALLING_CLIENTS = 32
MOST_COUNTED_BYTES = CEILING.bytes_per_second // 100
# All planes together, and the crowd that broke the gateway's own limit most.
MIXES = {
    "1-stream": [traffic(GRPC, connections=1)],
    "8-streams": [
        traffic(HTTP1, connections=2),
        traffic(HTTP2, connections=1, streams=2),
        traffic(GRPC, connections=1, streams=2),
        traffic(PEER, connections=2),
    ],
    "32-streams": [
        traffic(HTTP1, connections=8),
        traffic(HTTP2, connections=2, streams=4),
        traffic(GRPC, connections=2, streams=4),
        traffic(PEER, connections=8),
    ],
    "800-streams": [traffic(HTTP2, connections=8, streams=100)],
}


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def unshaped(version: str, tmp_path: Path) -> Iterator[Wire]:
    """A gateway that is alone with its limit until a test puts the tree on the device."""
    with gateway_on_a_wire(tmp_path, version=version) as wire:
        yield wire


@pytest.fixture(scope="module", params=list(BandwidthLimit))
def shaped(version: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    directory = tmp_path_factory.mktemp("gateway")
    with gateway_on_a_wire(directory, version=version, bandwidth_limit=request.param, h2_streams=100) as wire:
        wire.shape()
        yield wire


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_all_planes_together_send_at_most_the_ceiling_in_every_window(shaped: Wire, mix: list[TrafficSpec]) -> None:
    before = shaped.counters()
    with Clients(shaped) as clients:
        clients.read(*mix)
        settle()
        shaped.assert_ceiling_held(measured(shaped))
    assert shaped.counters()["unattributed"] == before["unattributed"]


@pytest.mark.parametrize("design", list(Design))
def test_every_stream_of_a_crowd_gets_something_however_often_a_crowd_comes(
    version: str, design: Design, tmp_path: Path
) -> None:
    """The first crowd is no proof: what comes after it finds the limit in the state that it left behind."""
    with gateway_on_a_wire(tmp_path, version=version, design=design, h2_streams=100) as wire:
        for _ in range(3):
            with Clients(wire) as clients:
                # Fails unless all of them have begun.
                clients.read(*MIXES["800-streams"])
                settle()
                assert measured(wire).series(NIC).whole().rate > CEILING.scaled(95, 100)


def test_without_limit_and_tree_the_same_clients_get_many_times_the_ceiling(version: str, tmp_path: Path) -> None:
    """The control: it shows that the test above can fail."""
    changes = {"bandwidth_limit": BandwidthLimit.OFF}
    with gateway_on_a_wire(tmp_path, version=version, **changes) as wire, Clients(wire) as clients:
        clients.read(*MIXES["8-streams"])
        assert measured(wire).series(NIC).whole().rate > CEILING.scaled(2, 1)


def test_during_a_reload_the_gateway_sends_twice_the_ceiling_and_the_tree_does_not(unshaped: Wire) -> None:
    with Clients(unshaped) as clients:
        clients.read(traffic(HTTP1, connections=4))
        settle()
        assert measured(unshaped).series(NIC).whole().rate < CEILING.scaled(115, 100)
        assert "Success=1" in unshaped.near.master("reload")
        clients.read(traffic(HTTP1, connections=4))
        # Each worker has a bucket of its own.
        assert measured(unshaped).series(NIC).whole().rate > CEILING.scaled(15, 10)
        unshaped.shape()
        settle()
        unshaped.assert_ceiling_held(measured(unshaped))


def test_clients_that_stall_and_resume_are_held_to_the_ceiling_by_the_tree(unshaped: Wire) -> None:
    unshaped.shape()
    with Clients(unshaped) as clients:
        unshaped.assert_ceiling_held(stalled(unshaped, clients)[0])


def test_the_gateway_alone_sends_stalled_clients_at_once_only_what_waits_in_their_sockets(
    version: str, unshaped: Wire
) -> None:
    """Up to 3.0 that is a send buffer for each client; from 3.1 on it is 16 KiB, rounded up to a packet."""
    with Clients(unshaped) as clients:
        samples, counted_while_stalled = stalled(unshaped, clients)
    # What the limit counts while nobody reads, it lets pass at once later on.
    assert counted_while_stalled < MOST_COUNTED_BYTES
    assert (samples.series(NIC).excess(CEILING, burst_bytes=0).excess_bytes > 4_000_000) is (version == "3.0")


def stalled(wire: Wire, clients: Clients) -> tuple[Samples, int]:
    """Return what left while many clients stopped reading and a second later, and the rate that was counted before."""
    # Small receive buffers, so that they fill in a moment; what is in them has left the device.
    wire.world.run("sysctl", "-w", "net.ipv4.tcp_rmem=4096 131072 262144")
    # And send buffers of a size that does not depend on how fast a machine is.
    wire.near.namespace.run("sysctl", "-w", "net.ipv4.tcp_wmem=4096 262144 262144")
    clients.read(traffic(HTTP1, connections=STALLING_CLIENTS))
    settle()
    with wire.reading() as reading:
        for process in clients.processes:
            process.send_signal(signal.SIGSTOP)
        # Until the sockets are full, which takes a busy machine longer.
        for _ in range(12):
            time.sleep(1)
            counted = int(wire.near.admin("show table ceilings").rpartition("=")[2])
            if counted < MOST_COUNTED_BYTES:
                break
        for process in clients.processes:
            process.send_signal(signal.SIGCONT)
        time.sleep(1)
        return reading.stop(), counted


def measured(wire: Wire, seconds: float = 1.5) -> Samples:
    with wire.reading() as reading:
        time.sleep(seconds)
        return reading.stop()
