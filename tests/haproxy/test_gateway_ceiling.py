"""At the device, in every short window, a tenant's connections together send at most its ceiling."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_rig import VERSIONS
from gateway_wire import Clients, Wire, gateway_on_a_wire, settle, traffic

from kura_shaper.haproxy.options import BandwidthLimit
from kura_shaper.lab.traffic import Application

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.lab.traffic import TrafficSpec

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

HTTP1, HTTP2, GRPC, PEER = Application.HTTP1, Application.HTTP2, Application.GRPC, Application.TCP
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
        with shaped.reading() as reading:
            time.sleep(1.5)
            samples = reading.stop()
    shaped.assert_ceiling_held(samples)
    after = shaped.counters()
    assert after["unattributed"] == before["unattributed"]
