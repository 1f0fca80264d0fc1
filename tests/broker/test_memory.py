"""What a broker's process takes at the most, however much publishers send and however little a router takes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from bus_rig import Connection, Peer, Publisher, Script, in_flowing_time, loop, pause, until
from program_rig import Program, as_pod, program

from kura_shaper.broker.protocol.frames import StreamClosed, StreamRefused
from kura_shaper.broker.protocol.limits import MIB, SESSION_BUFFER_BYTES

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.traffic]

PUBLISHERS, OVERFLOWS = 256, 4_000
# What the program itself may take, beside what waits in it.
FIXED_BYTES = 64 * MIB
_PIECE = os.urandom(1 << 18)


class Flood(Connection):
    """One connection of a publisher that sends for ever, as fast as it is read."""

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        loop().create_task(self._send())

    async def _send(self) -> None:
        while not self.lost:
            await self.send(_PIECE)
            await asyncio.sleep(0)


class FloodingPublisher(Publisher):
    """Its connections flood, and are forgotten when they are gone."""

    async def start(self, *, port: int = 0) -> None:
        self._server = await loop().create_server(lambda: Flood(self), "127.0.0.1", port)


def peak_bytes(run: Program) -> int:
    """Return the most that was ever resident."""
    return next(1024 * int(line.split()[1]) for line in status(run) if line.startswith("VmHWM"))


def status(run: Program) -> list[str]:
    return Path(f"/proc/{run.process.pid}/status").read_text().splitlines()


def held(run: Program) -> tuple[int, int]:
    """Return how many descriptors and threads the process has."""
    threads = next(int(line.split()[1]) for line in status(run) if line.startswith("Threads"))
    return len(tuple(Path(f"/proc/{run.process.pid}/fd").iterdir())), threads


class Attack:
    """A router that grants nothing and asks anew for each stream that overflows, until it was enough."""

    def __init__(self, peer: Peer, endpoint: str) -> None:
        self._peer, self._endpoint = peer, endpoint
        self._seen = 0
        self.overflows = 0

    def begin(self) -> None:
        for _ in range(PUBLISHERS):
            self._peer.subscribe(self._endpoint)

    def goes_on(self) -> bool:
        """Ask anew for what has ended, and return whether there is more to come."""
        told, self._seen = self._peer.told[self._seen :], len(self._peer.told)
        assert not self._peer.lost
        for each in told:
            if isinstance(each, StreamClosed):
                assert each.code == "buffer_overflow", each
                self.overflows += 1
            if isinstance(each, StreamClosed | StreamRefused):
                self._peer.subscribe(self._endpoint)
        return self.overflows < OVERFLOWS

    def end(self) -> None:
        for stream_id in self._peer.session.streams:
            self._peer.unsubscribe(stream_id)


@in_flowing_time
async def test_publishers_that_send_for_ever_to_a_router_that_takes_nothing_fill_no_more_than_is_allowed(
    tmp_path: Path,
) -> None:
    stingy = Script(grants=False, stream_window=65_535)
    flood = FloodingPublisher()
    async with program(tmp_path, script=stingy, reach=as_pod, publisher=flood, level="info") as run:
        peer = await run.router.peer()
        await run.has("/readyz", 200)
        before, idle = held(run), peak_bytes(run)
        attack = Attack(peer, flood.endpoint)
        attack.begin()
        while attack.goes_on():
            await pause()
        peak = peak_bytes(run)
        attack.end()
        print(f"idle {idle / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB, {attack.overflows} overflows")
        await until(lambda: held(run) <= before)
        page = (await run.get("/metrics"))[1]
        assert "continuum_event_broker_buffered_bytes 0.0" in page
        assert idle < FIXED_BYTES
        assert peak < FIXED_BYTES + SESSION_BUFFER_BYTES
