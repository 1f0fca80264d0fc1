"""Counters of bytes read at a pace, and what the readings say of any stretch of time.

A promise about a NIC is kept or broken in every window of 100 ms, not on the average of
a run. A `ByteSampler` reads counters at a fixed pace and keeps each reading with its time;
a `Series` then answers with real readings only: nothing is interpolated or smoothed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kura_shaper.clock import Clock, SystemClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from types import TracebackType

# Counters in bytes that only grow, by name; called once for each reading.
Source = Callable[[], Mapping[str, int]]

DEFAULT_INTERVAL_MS: Final = 100
_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
# A reading whose moment is known less well than this is taken again: at 100 ms a window, 0.5 ms is 0.5 %.
_TIGHT_READING_NS = 500_000
_READING_TRIES = 3


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes between two readings."""

    start_ns: int
    end_ns: int
    sent_bytes: int

    @property
    def duration_ms(self) -> float:
        """How long the window really was, for people and reports."""
        return (self.end_ns - self.start_ns) / _NS_PER_MS

    @property
    def rate(self) -> Rate:
        """The average over the window, rounded down to a whole bit/s."""
        return Rate(self.sent_bytes * 8 * _NS_PER_S // (self.end_ns - self.start_ns))


@dataclass(frozen=True, slots=True)
class Excess:
    """The window that passed a ceiling by most; 0 or fewer bytes mean that none did."""

    window: Window
    excess_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One counter at one moment of CLOCK_MONOTONIC, which is known to half of spread_ns in either direction."""

    at_ns: int
    count_bytes: int
    spread_ns: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """The readings of one counter, in order of time."""

    name: str
    readings: tuple[Reading, ...]

    def between(self, start_ns: int, end_ns: int) -> Series:
        """Return the readings taken from `start_ns` to `end_ns`, both included."""
        kept = tuple(reading for reading in self.readings if start_ns <= reading.at_ns <= end_ns)
        return Series(self.name, kept)

    def whole(self) -> Window:
        """Return the window from the first to the last reading.

        Raises StateUnknownError when there are fewer than two.
        """
        if len(self.readings) < 2:
            raise StateUnknownError(f"{self.name} was read {len(self.readings)} times", remedy="measure for longer")
        return _window(self.readings[0], self.readings[-1])

    def windows(self) -> tuple[Window, ...]:
        """Return the window between each reading and the next: the line to plot."""
        return tuple(_window(a, b) for a, b in itertools.pairwise(self.readings))

    def average_rate(self, start_ns: int, end_ns: int) -> Rate:
        """Return the rate over the readings that lie in [start_ns, end_ns].

        Raises StateUnknownError when fewer than two do.
        """
        return self.between(start_ns, end_ns).whole().rate

    def worst_window(self, *, window_ms: int = DEFAULT_INTERVAL_MS) -> Window:
        """Return the window of at least `window_ms` with the highest rate.

        Raises StateUnknownError when the readings span less than that.
        """
        wanted_ns = window_ms * _NS_PER_MS
        worst: Window | None = None
        for index, first in enumerate(self.readings):
            full_at_ns: int | None = None
            for last in self.readings[index + 1 :]:
                if last.at_ns - first.at_ns < wanted_ns:
                    continue
                full_at_ns = last.at_ns if full_at_ns is None else full_at_ns
                # From here on it splits into two full windows, one of which is as fast or faster.
                if last.at_ns - full_at_ns >= wanted_ns:
                    break
                window = _window(first, last)
                if worst is None or window.rate > worst.rate:
                    worst = window
        if worst is None:
            raise StateUnknownError(f"{self.name}: no window of {window_ms} ms was read", remedy="measure for longer")
        return worst

    def excess(self, ceiling: Rate, *, burst_bytes: int) -> Excess:
        """Return by how much the worst window of any length is above `ceiling` x time + `burst_bytes`.

        A window counts as long as it can have been: what is above the ceiling is so beyond doubt.
        Raises StateUnknownError when there are fewer than two readings.
        """
        self.whole()
        bits = ceiling.bits_per_second

        def above(reading: Reading, at_ns: int) -> int:
            return reading.count_bytes * 8 * _NS_PER_S - bits * at_ns

        def first(reading: Reading) -> int:
            return above(reading, reading.at_ns - reading.spread_ns // 2)

        def last(reading: Reading) -> int:
            return above(reading, reading.at_ns + reading.spread_ns // 2)

        lowest = self.readings[0]
        worst = (lowest, self.readings[1])
        for reading in self.readings[1:]:
            if last(reading) - first(lowest) > last(worst[1]) - first(worst[0]):
                worst = (lowest, reading)
            if first(reading) <= first(lowest):  # the later of equals: the shorter window tells more
                lowest = reading
        excess_bytes = (last(worst[1]) - first(worst[0])) // (8 * _NS_PER_S) - burst_bytes
        return Excess(_window(*worst), excess_bytes)


def _window(first: Reading, last: Reading) -> Window:
    return Window(first.at_ns, last.at_ns, last.count_bytes - first.count_bytes)


@dataclass(frozen=True, slots=True)
class Samples:
    """All that a sampler read."""

    counters: Mapping[str, tuple[Reading, ...]]

    def series(self, name: str) -> Series:
        """Return the readings of one counter.

        Raises StateUnknownError when it was never read, or went back: it was then made anew.
        """
        readings = self.counters.get(name, ())
        if not readings:
            known = ", ".join(sorted(self.counters)) or "none"
            raise StateUnknownError(f"no counter {name!r} was read", remedy=f"known: {known}")
        for before, after in itertools.pairwise(readings):
            if after.count_bytes < before.count_bytes:
                raise StateUnknownError(f"{name} went back from {before.count_bytes} to {after.count_bytes} bytes")
        return Series(name, readings)


class ByteSampler:
    """Reads sources at a fixed pace in a thread of its own, from `start` (or `with`) to `stop`.

    Each source has its own timestamp, so that a slow one doesn't blur the others.
    """

    def __init__(
        self, sources: Sequence[Source], *, interval_ms: int = DEFAULT_INTERVAL_MS, clock: Clock | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._interval_ns = interval_ms * _NS_PER_MS
        self._clock = clock or SystemClock()
        self._counters: dict[str, list[Reading]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="byte-sampler", daemon=True)
        self._failure: Exception | None = None

    def start(self) -> None:
        """Take the first reading and go on in the background."""
        self.sample()
        self._thread.start()

    def stop(self) -> Samples:
        """Take a last reading and return all of them. Raises what a source raised."""
        if self._thread.is_alive():
            self._end()
            self.sample()
        return self.samples()

    def samples(self) -> Samples:
        """Return what was read so far. Raises what a source raised."""
        if self._failure is not None:
            raise self._failure
        return Samples({name: tuple(readings) for name, readings in list(self._counters.items())})

    def sample(self) -> None:
        """Read every source once, now."""
        for source in self._sources:
            at_ns, counters = self._read(source)
            for name, count_bytes in counters.items():
                self._counters.setdefault(name, []).append(Reading(at_ns, count_bytes))

    def _read(self, source: Source) -> tuple[int, Mapping[str, int]]:
        tries: list[tuple[int, int, Mapping[str, int]]] = []
        for _ in range(_READING_TRIES):
            before_ns = self._clock.now_ns()
            counters = source()
            spread_ns = self._clock.now_ns() - before_ns
            tries.append((spread_ns, before_ns + spread_ns // 2, counters))
            if spread_ns <= _TIGHT_READING_NS:
                break
        _, at_ns, tightest = min(tries, key=lambda one: one[0])
        return at_ns, tightest

    def _run(self) -> None:
        # The traffic that is measured competes for the same processors; a late reading is a longer window.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        try:
            while not self._stopping.is_set():
                # From the end of the last reading, not on a grid: each two readings are then at least an
                # interval apart, and a window of one interval is one interval long, not two.
                self._clock.wait_ns(self._interval_ns)
                self.sample()
        except Exception as error:
            self._failure = error

    def __enter__(self) -> ByteSampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5 + self._interval_ns / _NS_PER_S)
