"""When to try again: a clock that a coroutine can wait on, and waits that grow and are never alike.

Both are passed in, so that tests neither wait nor depend on chance.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from random import Random


class AsyncClock(Protocol):
    """A monotonic clock in nanoseconds and the means for a coroutine to wait on it."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary point that never moves back."""
        ...

    async def sleep_ns(self, duration_ns: int) -> None:
        """Return when so many nanoseconds have passed."""
        ...


class SystemAsyncClock:
    """CLOCK_MONOTONIC of this machine, and the running event loop."""

    def now_ns(self) -> int:
        """See AsyncClock."""
        return time.monotonic_ns()

    async def sleep_ns(self, duration_ns: int) -> None:
        """See AsyncClock."""
        await asyncio.sleep(duration_ns / 1e9)


class Backoff:
    """Waits that double from the least to the most, each a random part of it between a half and the whole.

    The random part keeps the nodes of a fleet, which all lost the API server at once, from
    coming back at once.
    """

    def __init__(self, *, least_ns: int, most_ns: int, random: Random) -> None:
        self._least_ns, self._most_ns, self._random = least_ns, most_ns, random
        self._next_ns = least_ns

    def next_ns(self) -> int:
        """Return how long to wait this time."""
        whole_ns = self._next_ns
        self._next_ns = min(2 * whole_ns, self._most_ns)
        return self._random.randint(whole_ns // 2, whole_ns)

    def reset(self) -> None:
        """Begin with the least again: it went well."""
        self._next_ns = self._least_ns
