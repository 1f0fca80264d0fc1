"""The window of a rate: from when all streams flow until the first one ends, to the nanosecond."""

from __future__ import annotations

import pytest

from kura_shaper.clock import FakeClock
from kura_shaper.probe.failures import ClientError, Failure, Reason
from kura_shaper.probe.progress import Meter, Progress
from kura_shaper.probe.target import Load, Measured, Protocol, Target, Verdict
from kura_shaper.units import Rate

SECOND = 1_000_000_000
RESET = Failure(Reason.RESET, "gone")


class Streams:
    """Some streams at a clock that a test moves, each of which was asked at its beginning."""

    def __init__(self, count: int, *, size_bytes: int | None = 10**9) -> None:
        self.clock = FakeClock(SECOND)
        self.processor_ns = 0
        self.progress = Progress(count, clock=self.clock, size_bytes=size_bytes, processor_ns=lambda: self.processor_ns)
        for meter in self.progress.meters:
            meter.asked()

    def after(self, ms: int, *taken: tuple[int, int]) -> None:
        """Let time pass, then let streams take bytes."""
        self.clock.wait_ns(ms * SECOND // 1_000)
        for number, size_bytes in taken:
            self.progress.meters[number].take(size_bytes)

    def __getitem__(self, number: int) -> Meter:
        return self.progress.meters[number]


def test_the_first_piece_is_before_the_window() -> None:
    streams = Streams(1)
    streams.after(250, (0, 1_000_000))
    streams.after(1_000, (0, 125_000))
    streams.progress.close()
    assert streams.progress.rate() == (Rate(1_000_000), SECOND, 0)
    assert streams[0].first_byte_ns == 250_000_000


def test_the_window_begins_with_the_last_stream_and_ends_with_the_first() -> None:
    streams = Streams(2, size_bytes=300_000)
    streams.after(100, (0, 100_000))
    streams.after(400, (0, 100_000), (1, 50_000))
    streams.after(500, (1, 60_000))
    # The first one has all it wanted; what the other reads afterwards counts no more.
    streams.after(500, (0, 100_000))
    streams.after(500, (1, 90_000))
    assert streams[0].is_over
    assert streams.progress.rate() == (Rate(160_000 * 8), SECOND, 0)


def test_a_stream_that_never_flows_is_not_waited_for() -> None:
    streams = Streams(2)
    streams.after(100, (0, 10))
    assert streams.progress.start is None
    streams.after(100)
    streams[1].finish(RESET)
    streams.after(1_000, (0, 1_000))
    streams.progress.close()
    assert streams.progress.rate()[:2] == (Rate(8_000), SECOND)


def test_a_stream_that_breaks_ends_the_window() -> None:
    streams = Streams(2)
    streams.after(0, (0, 10), (1, 10))
    streams.after(1_000, (0, 1_000))
    streams[1].finish(RESET)
    streams.after(1_000, (0, 9_000))
    assert streams.progress.rate()[:2] == (Rate(8_000), SECOND)
    assert streams[1].failure == RESET


def test_streams_that_never_flowed_together_have_no_rate() -> None:
    streams = Streams(2, size_bytes=None)
    streams.after(100, (0, 1_000))
    streams[0].ended()
    streams.after(100, (1, 1_000))
    streams.after(100, (1, 1_000))
    streams[1].ended()
    streams.progress.close()
    assert streams.progress.rate()[0] is None
    assert streams.progress.first_flow_ns == SECOND + SECOND // 10


def test_an_object_that_came_in_one_piece_has_no_rate() -> None:
    streams = Streams(1, size_bytes=None)
    streams.after(100, (0, 1_000))
    streams.after(100)
    streams[0].ended()
    assert streams.progress.rate()[0] is None


def test_an_answer_without_payload_has_a_first_byte_at_the_end_of_its_head() -> None:
    streams = Streams(1, size_bytes=None)
    streams.after(30)
    streams[0].ended()
    assert (streams[0].first_byte_ns, streams[0].is_over) == (30_000_000, True)
    with pytest.raises(ClientError, match="empty"):
        Streams(1)[0].ended()


def test_the_first_byte_is_that_of_the_first_request() -> None:
    streams = Streams(1)
    streams.after(30, (0, 5))
    streams[0].ended()
    streams.after(100)
    streams[0].asked()
    streams.after(70, (0, 5))
    assert streams[0].first_byte_ns == 30_000_000


def test_why_a_stream_ended_stays() -> None:
    streams = Streams(1)
    streams[0].finish(RESET)
    streams[0].finish()
    assert streams[0].failure == RESET
    assert not streams[0].wants_more


def test_a_rate_that_the_probe_itself_bounds_is_no_finding() -> None:
    streams = Streams(1)
    streams.after(0, (0, 1))
    streams.processor_ns = 950_000_000
    streams.after(1_000, (0, 1_000))
    streams.progress.close()
    rate, window_ns, busy_percent = streams.progress.rate()
    assert busy_percent == 95
    target = Target(name="it", host="a.test", min_rate=Rate(1_000_000))
    bounded = Measured(target=target, rate=rate, window_ns=window_ns, busy_percent=busy_percent)
    assert (bounded.is_bound_by_us, bounded.verdict) == (True, Verdict.UNKNOWN)
    assert Measured(target=target, rate=rate, busy_percent=50).verdict is Verdict.SLOW
    assert Measured(target=target).verdict is Verdict.UNKNOWN
    assert Measured(target=target, rate=Rate(1_000_000)).verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("reasons", "verdict"),
    [
        ((Reason.LOCAL,), Verdict.UNKNOWN),
        ((Reason.LOCAL, Reason.REFUSED), Verdict.REFUSED),
        ((Reason.REFUSED, Reason.STALL), Verdict.FAILED),
    ],
)
def test_what_fails_here_says_nothing_of_the_target(reasons: tuple[Reason, ...], verdict: Verdict) -> None:
    failures = tuple(Failure(reason, "x") for reason in reasons)
    assert Measured(target=Target(name="it", host="a.test"), failures=failures).verdict is verdict


@pytest.mark.parametrize(
    ("protocol", "streams", "connections", "expected"),
    [
        (Protocol.HTTP1, 3, 0, (1, 1, 1)),
        (Protocol.AUTO, 2, 0, (1, 1)),
        (Protocol.HTTP2, 8, 0, (8,)),
        (Protocol.HTTP2, 33, 0, (17, 16)),
        (Protocol.GRPC, 7, 3, (3, 2, 2)),
        (Protocol.HTTP2, 2, 5, (1, 1)),
    ],
)
def test_streams_are_spread_over_connections(
    protocol: Protocol, streams: int, connections: int, expected: tuple[int, ...]
) -> None:
    assert Load(streams=streams, connections=connections).streams_of(protocol) == expected
