"""Measures again and again: each target in its own time, spread over the interval, none waiting for another.

A step starts what is due, in a thread, and says when the next is. A target that is still
being measured when it is due again is left out that time, and nobody else notices.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.log import event
from kura_shaper.probe.failures import Failure, Reason
from kura_shaper.probe.target import Measured, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.probe.task import Task

    Measure = Callable[[Task, threading.Event], Measured]

_SECOND_NS = 1_000_000_000
# So often the loop turns, whether something is due or not.
_TURN_NS = 5 * _SECOND_NS
_ALIVE_WITHIN_S = 60
_END_S = 5.0
_LOG = logging.getLogger("kura_shaper.probe")


@dataclass(slots=True)
class Watched:
    """A target and what is known of it."""

    task: Task
    due_ns: int
    rounds: int = 0
    skipped: int = 0
    received_bytes: int = 0
    failures: Counter[Reason] = field(default_factory=Counter)
    last: Measured | None = None
    last_at_ns: int = 0
    last_at_s: float = 0.0
    last_success_s: float = 0.0
    thread: threading.Thread | None = None
    is_running: bool = False


class ProbeService:
    """One probe. `run` returns when `stop` was called, from whatever thread or signal."""

    def __init__(
        self,
        tasks: Sequence[Task],
        measure: Measure,
        *,
        interval_ns: int,
        clock: Clock,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self.interval_ns = interval_ns
        self.lock = threading.Lock()
        self._measure, self._clock, self._unix_time_s = measure, clock, unix_time_s
        self._stopped = threading.Event()
        self.alive_at_ns = now_ns = clock.now_ns()
        self.watched = tuple(
            Watched(task, now_ns + number * interval_ns // len(tasks)) for number, task in enumerate(tasks)
        )

    def run(self) -> None:
        """Measure until it is told to stop, then end what is under way."""
        while not self._stopped.is_set():
            self._stopped.wait(self.step() / _SECOND_NS)
        for watched in self.watched:
            if watched.thread is not None:
                watched.thread.join(_END_S)

    def stop(self) -> None:
        """End soon: what is being measured is cut, and counts for nothing."""
        self._stopped.set()

    def step(self) -> int:
        """Start what is due, and return how long it is until the next one (ns)."""
        self.alive_at_ns = now_ns = self._clock.now_ns()
        for watched in self.watched:
            if watched.due_ns > now_ns:
                continue
            # Later by whole intervals, so that it keeps its place among the others, also after the machine slept.
            missed = (now_ns - watched.due_ns) // self.interval_ns
            watched.due_ns += (1 + missed) * self.interval_ns
            if missed or watched.is_running:
                with self.lock:
                    watched.skipped += 1 + missed
            else:
                self._start(watched)
        return min(_TURN_NS, *(watched.due_ns - now_ns for watched in self.watched))

    def why_dead(self) -> str:
        """Return why the probe should be started again, "" while it works. A target that fails is no reason."""
        turned_s = (self._clock.now_ns() - self.alive_at_ns) / _SECOND_NS
        return f"the loop has not turned for {turned_s:.0f} s" if turned_s > _ALIVE_WITHIN_S else ""

    def is_fresh(self, watched: Watched) -> bool:
        """Whether the last result still says something of now."""
        limit_ns = 3 * self.interval_ns + watched.task.longest_ns
        return watched.last is not None and self._clock.now_ns() - watched.last_at_ns <= limit_ns

    def _start(self, watched: Watched) -> None:
        watched.is_running = True
        watched.thread = threading.Thread(
            target=self._measure_one, args=(watched,), name=f"probe-{watched.task.target.name[:20]}", daemon=True
        )
        try:
            watched.thread.start()
        except RuntimeError as error:  # no more threads
            watched.thread = None
            failure = Failure(Reason.LOCAL, f"this machine could not try: {error}")
            self._take(watched, Measured(target=watched.task.target, failures=(failure,)))

    def _measure_one(self, watched: Watched) -> None:
        try:
            measured = self._measure(watched.task, self._stopped)
        except Exception as error:
            _LOG.exception("measurement_failed")
            failure = Failure(Reason.LOCAL, f"a fault of the probe itself, see its log: {type(error).__name__}")
            measured = Measured(target=watched.task.target, failures=(failure,))
        if self._stopped.is_set():
            return
        self._take(watched, measured)

    def _take(self, watched: Watched, measured: Measured) -> None:
        before = watched.last.verdict if watched.last else Verdict.FINE
        with self.lock:
            watched.rounds += 1
            watched.received_bytes += measured.received_bytes
            for failure in measured.failures:
                watched.failures[failure.reason] += failure.count
            watched.last, watched.last_at_ns = measured, self._clock.now_ns()
            watched.last_at_s = self._unix_time_s()
            if not measured.failures:
                watched.last_success_s = watched.last_at_s
            watched.is_running = False
        if measured.verdict is not before:
            _tell(measured)


def _tell(measured: Measured) -> None:
    """Log that a target is another than before; silence means that nothing changed."""
    name, tenant = measured.target.name, measured.target.tenant
    if measured.verdict is Verdict.FINE:
        event(_LOG, "target_fine", target=name, tenant=tenant)
        return
    reasons = [str(failure) for failure in measured.failures]
    rate = measured.rate.bits_per_second if measured.rate else None
    event(
        _LOG,
        f"target_{measured.verdict}",
        level=logging.WARNING,
        target=name,
        tenant=tenant,
        address=measured.address,
        rate_bits_per_second=rate,
        failures=reasons,
    )
