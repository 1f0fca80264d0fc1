"""A stream is framed at its rate, after a burst, whatever others do; the session is not paced at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kura_shaper.broker.outbox import Outbox
from kura_shaper.broker.pace import Paced
from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.limits import KIB, MIB
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

SESSION = 1


@dataclass
class Http:
    """A connection with all the room there is."""

    data_room_bytes: int = 1 << 40
    frame_bytes_max: int = 64 * KIB
    sent: dict[int, int] = field(default_factory=dict)

    def stream_room_bytes(self, http_id: int) -> int:
        return 1 << 40

    def send(self, http_id: int, data: bytes) -> None:
        self.sent[http_id] = self.sent.get(http_id, 0) + len(data)


class Stream:
    """A stream that always has something to send."""

    def __init__(self, http_id: int) -> None:
        self.http_id, self.sent_bytes = http_id, 0
        self.buffer = StreamBuffer(1 << 40, Budget(1 << 40))

    def fill(self) -> None:
        while self.buffer.length_bytes < 4 * MIB:
            self.buffer.put(bytes(64 * KIB))

    def on_drained(self) -> None:
        pass


class World:
    """An outbox that is paced, streams, and time that a test moves."""

    def __init__(self, rate: Rate, *http_ids: int) -> None:
        self.now_s, self.http, self.due = 0.0, Http(), list[tuple[float, int]]()
        self.paced = Paced(self.http, rate, now_s=lambda: self.now_s, call_later=self.call_later, wake=self.wake)
        self.paced.exempt_id = SESSION
        self.outbox = Outbox(self.paced)
        self.outbox.begin_session(SESSION)
        self.streams = {http_id: Stream(http_id) for http_id in http_ids}
        for http_id in http_ids:
            self.wake(http_id)

    def call_later(self, delay_s: float, call: Callable[[int], None], http_id: int) -> None:
        assert call == self.paced._due
        assert delay_s > 0
        self.due.append((self.now_s + delay_s, http_id))

    def wake(self, http_id: int) -> None:
        self.outbox.put(self.streams[http_id])

    def _send_all(self) -> None:
        framed_bytes = 1
        while framed_bytes:
            for stream in self.streams.values():
                stream.fill()
                self.wake(stream.http_id)
            framed_bytes = self.outbox.fill(MIB)

    def run(self, seconds: float) -> None:
        """Send all that may be sent, and move on to when more may be."""
        until_s = self.now_s + seconds
        while True:
            self._send_all()
            if not self.due or min(self.due)[0] > until_s:
                break
            at_s, http_id = min(self.due)
            self.due.remove((at_s, http_id))
            self.now_s = max(self.now_s, at_s)
            self.paced._due(http_id)
        self.now_s = until_s


@pytest.mark.parametrize(("rate", "seconds"), [(Rate(256_000), 20), (Rate(20_000_000), 10), (Rate(4_000_000_000), 0.1)])
def test_each_stream_has_its_burst_and_then_its_rate(rate: Rate, seconds: float) -> None:
    world = World(rate, 3, 5)
    world.run(0)
    burst = max(64 * KIB, rate.bits_per_second // 8 // 20)
    assert all(burst - 16 * KIB < world.http.sent[http_id] <= burst for http_id in (3, 5))
    world.run(seconds)
    wanted = burst + seconds * rate.bits_per_second / 8
    # At most what a wait of a millisecond lets by, and a frame.
    late = 16 * KIB + rate.bits_per_second / 8 / 1_000
    assert all(wanted - late <= world.http.sent[http_id] <= wanted + 1 for http_id in (3, 5))


def test_a_stream_that_was_quiet_has_one_burst_and_no_more() -> None:
    world = World(Rate(8_000_000), 3)
    world.run(0)
    world.now_s += 3_600
    world.due.clear()
    world.paced._due(3)
    before = world.http.sent[3]
    world.run(0)
    assert world.http.sent[3] - before <= 64 * KIB


def test_the_session_is_not_paced() -> None:
    world = World(Rate(256_000))
    world.outbox.put_session(bytes(5 * MIB))
    world.run(0)
    assert (world.http.sent, world.due) == ({SESSION: 5 * MIB}, [])


def test_streams_that_have_ended_are_not_remembered_without_end() -> None:
    world = World(Rate(8_000_000))
    for http_id in range(3, 100_003, 2):
        world.now_s += 0.01
        world.paced.send(http_id, bytes(1_000))
    assert len(world.paced._buckets) <= 8_192


def test_a_stream_waits_for_one_alarm_at_a_time() -> None:
    world = World(Rate(8_000_000), 3)
    world.run(0)
    for _ in range(10):
        world.wake(3)
        assert world.outbox.fill(MIB) == 0
    assert len(world.due) == 1
