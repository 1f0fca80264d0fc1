"""Time as a value that is passed in, so that tests advance it and nobody sleeps."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in nanoseconds and the means to wait on it."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary point that never moves back."""
        ...

    def wait_ns(self, duration_ns: int) -> None:
        """Return when so many nanoseconds have passed."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC of this machine."""

    def now_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()

    def wait_ns(self, duration_ns: int) -> None:
        """See Clock."""
        time.sleep(duration_ns / 1e9)


class FakeClock:
    """A clock that moves only when it is told to, or waited on."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """See Clock."""
        return self._now_ns

    def wait_ns(self, duration_ns: int) -> None:
        """Advance at once instead of waiting."""
        self._now_ns += duration_ns
