"""Looks at a device's counters ten times a second, in a thread of its own, so that no burst hides between scrapes.

The interval grows with what a look costs, so that the sampler never takes more than a
twentieth of a processor: with thousands of classes the windows are longer, and say so.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.agent.accounting import Outside, Windows, roots_of
from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.dump import read_counters
from kura_shaper.tenants.marks import SHAPED_QUEUES_MAX
from kura_shaper.tree.model import HTB_HANDLE, Handle

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.clock import Clock
    from kura_shaper.tree.snapshot import ClassCounters

WINDOW_NS = 100_000_000
_SHARE = 20
_FRESH_NS = 5_000_000_000
_EVERY_HTB = tuple(Handle(HTB_HANDLE.major + queue) for queue in range(SHAPED_QUEUES_MAX))


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. `counters` is empty where there is no tree of ours."""

    at_ns: int
    counters: dict[Handle, ClassCounters]
    device_bytes: int


@dataclass(slots=True)
class Sampled:
    """What a device's sampler knows. `window_ns` is how long its windows are now."""

    newest: Sample | None = None
    windows: Windows = field(default_factory=Windows)
    outside: Outside = field(default_factory=Outside)
    window_ns: int = WINDOW_NS

    def is_fresh(self, now_ns: int) -> bool:
        """Whether the newest sample is of a moment ago; else nothing could be read since, and it tells nothing."""
        return self.newest is not None and now_ns - self.newest.at_ns <= max(_FRESH_NS, 3 * self.window_ns)


class Sampler:
    """Samples one device until it is stopped.

    `device_bytes` returns what the device has sent. It may raise nothing but KuraShaperError and OSError.
    """

    def __init__(self, ifindex: int, *, device_bytes: Callable[[], int], clock: Clock) -> None:
        self.sampled = Sampled()
        self.lock = threading.Lock()
        self._ifindex, self._device_bytes, self._clock = ifindex, device_bytes, clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name=f"sampler-{self._ifindex}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(0.0):
            # A socket that can't be had now may be had later.
            with suppress(OSError):
                self._sample_until_stopped()
            self._stop.wait(1.0)

    def _sample_until_stopped(self) -> None:
        with TcClient() as client:
            while not self._stop.is_set():
                began_ns = self._clock.now_ns()
                self.look(client)
                cost_ns = self._clock.now_ns() - began_ns
                self.sampled.window_ns = max(WINDOW_NS, _SHARE * cost_ns)
                self._stop.wait(max(0.0, (self.sampled.window_ns - cost_ns) / 1e9))

    def look(self, client: TcClient) -> None:
        """Take one sample. What can't be read is left out, and the next window is longer for it."""
        try:
            # Whatever stands there now, not what the last look found: else a tree would count as none for a while.
            counters = read_counters(client, self._ifindex, _EVERY_HTB)
            device_bytes = self._device_bytes()
        except (KuraShaperError, OSError):
            return
        at_ns = self._clock.now_ns()
        sent = {classid: found.sent_bytes for classid, found in counters.items()}
        with self.lock:
            self.sampled.newest = Sample(at_ns, counters, device_bytes)
            self.sampled.windows.add(at_ns, sent, device_bytes)
            self.sampled.outside.add(at_ns, device_bytes, roots_of(sent))
