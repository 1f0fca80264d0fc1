"""Rates are told from readings alone: the pure part of the sampler, with time that tests advance."""

import itertools
from collections.abc import Mapping

import pytest

from kura_shaper.clock import FakeClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.measure import ByteSampler, Reading, Samples, Series, Window
from kura_shaper.units import Rate

MS = 1_000_000
MBIT = 1_000_000


def series(*points: tuple[int, int]) -> Series:
    """Points of (milliseconds, bytes)."""
    return Series("nic0.tx", tuple(Reading(at_ms * MS, count) for at_ms, count in points))


def steady(rate_bytes_per_ms: int, *, until_ms: int, every_ms: int = 100) -> list[tuple[int, int]]:
    return [(at_ms, at_ms * rate_bytes_per_ms) for at_ms in range(0, until_ms + 1, every_ms)]


def test_the_average_is_over_the_readings_inside_the_interval() -> None:
    line = series((0, 0), (100, 5_000), (200, 30_000), (300, 55_000), (400, 1_000_000))
    assert line.average_rate(90 * MS, 310 * MS) == Rate(50_000 * 8 * 1_000 // 200)


def test_an_average_of_fewer_than_two_readings_is_unknown() -> None:
    with pytest.raises(StateUnknownError, match="read 1 times"):
        series((0, 0), (100, 5)).average_rate(50 * MS, 150 * MS)


def test_the_worst_window_is_found_where_it_is_and_says_how_long_it_really_was() -> None:
    line = series((0, 0), (100, 1_000), (207, 9_000), (307, 10_000))
    worst = line.worst_window(window_ms=100)
    assert worst == Window(100 * MS, 207 * MS, 8_000)
    assert worst.duration_ms == 107


def test_a_window_may_not_be_shorter_than_asked() -> None:
    spike = series((0, 0), (10, 5_000), (100, 5_100), (200, 5_200))
    assert spike.worst_window(window_ms=100) == Window(0, 100 * MS, 5_100)


def test_a_longer_window_is_worse_when_the_full_one_ends_in_a_pause() -> None:
    line = series((0, 0), (60, 0), (120, 0), (180, 9_000), (250, 30_000))
    assert line.worst_window(window_ms=100) == Window(120 * MS, 250 * MS, 30_000)


def test_windows_slide_over_readings_that_are_closer_than_a_window() -> None:
    points = [*steady(10, until_ms=100, every_ms=20), (120, 3_000), (140, 5_000), (160, 5_200), (180, 5_400)]
    assert series(*points).worst_window(window_ms=40) == Window(100 * MS, 140 * MS, 4_000)


@pytest.mark.parametrize("window_ms", [100, 150, 1_000])
def test_steady_traffic_has_the_same_rate_in_every_window(window_ms: int) -> None:
    assert series(*steady(25_000, until_ms=3_000)).worst_window(window_ms=window_ms).rate == Rate(200 * MBIT)


def test_no_window_of_that_length_is_unknown_and_not_zero() -> None:
    with pytest.raises(StateUnknownError, match="no window of 100 ms"):
        series((0, 0), (99, 1)).worst_window(window_ms=100)


def test_the_worst_window_is_that_of_the_slow_search_over_every_pair() -> None:
    counts = [0]
    for step in range(60):
        counts.append(counts[-1] + (step * step * 7919) % 1_009)
    line = series(*((at * 37 + at % 5, count) for at, count in enumerate(counts)))
    pairs = [
        Window(a.at_ns, b.at_ns, b.count_bytes - a.count_bytes)
        for i, a in enumerate(line.readings)
        for b in line.readings[i + 1 :]
        if b.at_ns - a.at_ns >= 100 * MS
    ]
    assert line.worst_window(window_ms=100).rate == max(pair.rate for pair in pairs)
    ceiling = Rate(20_000)
    above = max(8_000 * MS * p.sent_bytes - ceiling.bits_per_second * (p.end_ns - p.start_ns) for p in _all(line))
    assert line.excess(ceiling, burst_bytes=10).excess_bytes == above // (8_000 * MS) - 10


def _all(line: Series) -> list[Window]:
    readings = line.readings
    return [
        Window(a.at_ns, b.at_ns, b.count_bytes - a.count_bytes)
        for i, a in enumerate(readings)
        for b in readings[i + 1 :]
    ]


def test_the_excess_is_what_passes_the_ceiling_and_the_burst() -> None:
    points = [*steady(25_000, until_ms=500), (600, 500 * 25_000 + 2_600_000), (700, 600 * 25_000 + 2_600_000)]
    found = series(*points).excess(Rate(200 * MBIT), burst_bytes=20_000)
    assert found.window == Window(500 * MS, 600 * MS, 2_600_000)
    assert found.excess_bytes == 100_000 - 20_000


def test_traffic_below_the_ceiling_has_no_excess() -> None:
    assert series(*steady(20_000, until_ms=1_000)).excess(Rate(200 * MBIT), burst_bytes=0).excess_bytes < 0


def test_a_small_overrun_that_lasts_is_found_over_its_whole_length() -> None:
    found = series(*steady(25_250, until_ms=10_000)).excess(Rate(200 * MBIT), burst_bytes=100_000)
    assert found.window.duration_ms == 10_000
    assert found.excess_bytes == 10_000 * 250 - 100_000


def test_a_counter_that_went_back_is_an_error_and_not_a_rate() -> None:
    samples = Samples({"1:10": (Reading(0, 500), Reading(100, 20))})
    with pytest.raises(StateUnknownError, match="went back from 500 to 20"):
        samples.series("1:10")


def test_a_counter_that_was_never_read_is_named_with_those_that_were() -> None:
    with pytest.raises(StateUnknownError, match=r"no counter 'acme'.*beta, nic0\.tx"):
        Samples({"nic0.tx": (Reading(0, 1),), "beta": (Reading(0, 1),)}).series("acme")


class FakeSource:
    """Bytes that grow with the fake time; each reading costs what the list says, in ns."""

    def __init__(self, clock: FakeClock, name: str, *, costs_ns: tuple[int, ...] = ()) -> None:
        self._clock = clock
        self._name = name
        self._costs_ns = list(costs_ns)
        self.calls = 0

    def __call__(self) -> Mapping[str, int]:
        self.calls += 1
        self._clock.wait_ns(self._costs_ns.pop(0) if self._costs_ns else 0)
        return {self._name: self._clock.now_ns() // MS * 125}


def test_each_source_is_read_with_a_time_of_its_own() -> None:
    clock = FakeClock(1_000 * MS)
    nic = FakeSource(clock, "nic0.tx", costs_ns=(400_000,))
    classes = FakeSource(clock, "acme", costs_ns=(200_000,))
    sampler = ByteSampler([nic, classes], clock=clock)
    sampler.sample()
    samples = sampler.samples()
    assert samples.series("nic0.tx").readings[0].at_ns == 1_000 * MS + 200_000
    assert samples.series("acme").readings[0].at_ns == 1_000 * MS + 500_000


def test_a_reading_that_was_interrupted_is_taken_again_and_the_best_one_kept() -> None:
    clock = FakeClock()
    source = FakeSource(clock, "nic0.tx", costs_ns=(30 * MS, 20_000))
    sampler = ByteSampler([source], clock=clock)
    sampler.sample()
    assert source.calls == 2
    assert sampler.samples().series("nic0.tx").readings == (Reading(30 * MS + 10_000, 30 * 125),)


def test_sampled_traffic_has_the_rate_it_had() -> None:
    clock = FakeClock()
    sampler = ByteSampler([FakeSource(clock, "nic0.tx")], clock=clock)
    for _ in range(20):
        sampler.sample()
        clock.wait_ns(100 * MS)
    line = sampler.samples().series("nic0.tx")
    assert line.whole().rate == line.worst_window().rate == Rate(MBIT)
    assert [window.sent_bytes for window in line.windows()] == [12_500] * 19


def test_what_a_source_raises_in_the_background_comes_out_at_the_end() -> None:
    class Vanishing:
        calls = 0

        def __call__(self) -> Mapping[str, int]:
            self.calls += 1
            if self.calls > 2:
                raise StateUnknownError("the device is gone")
            return {"nic0.tx": self.calls}

    sampler = ByteSampler([Vanishing()], interval_ms=1)
    sampler.start()
    sampler._thread.join(timeout=5)
    with pytest.raises(StateUnknownError, match="the device is gone"):
        sampler.stop()


def test_readings_in_the_background_are_at_least_an_interval_apart() -> None:
    sampler = ByteSampler([lambda: {"nic0.tx": 0}], interval_ms=5)
    with sampler:
        while len(sampler.samples().counters["nic0.tx"]) < 6:
            pass
        line = sampler.stop().series("nic0.tx")
    background = line.readings[:-1]  # the last reading is taken by stop, whenever that is
    gaps_ns = [b.at_ns - a.at_ns for a, b in itertools.pairwise(background)]
    assert min(gaps_ns) >= 5 * MS


def test_a_window_counts_as_long_as_it_can_have_been_when_it_is_held_against_a_ceiling() -> None:
    # 1 Mbit/s: 125 bytes a millisecond. Read in no time 2,500 bytes in 10 ms are too many.
    points = ((0, 0), (10, 2_500))
    exact = Series("nic0.tx", tuple(Reading(at * MS, count) for at, count in points))
    blurred = Series("nic0.tx", tuple(Reading(at * MS, count, spread_ns=10 * MS) for at, count in points))
    assert exact.excess(Rate(MBIT), burst_bytes=0).excess_bytes == 1_250
    assert blurred.excess(Rate(MBIT), burst_bytes=0).excess_bytes == 0
