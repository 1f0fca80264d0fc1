"""What the streams of a measurement have read, and the window in which all of them flowed.

The moments are taken by the threads that read, where they happen: whoever waits for them
wakes too late to tell how fast a small object came.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.probe.failures import ClientError, Failure, Reason
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.clock import Clock

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: when it was, what all streams had read until then, and our own processor time."""

    at_ns: int
    received_bytes: int
    processor_ns: int


class Progress:
    """All streams of one measurement."""

    def __init__(
        self,
        streams: int,
        *,
        clock: Clock,
        size_bytes: int | None,
        processor_ns: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self.clock = clock
        self.changed = threading.Event()
        self.start: Mark | None = None
        self.end: Mark | None = None
        self.first_flow_ns: int | None = None
        self._processor_ns = processor_ns
        self._lock = threading.Lock()
        self._is_spoilt = False
        self.meters = tuple(Meter(self, size_bytes) for _ in range(streams))

    @property
    def received_bytes(self) -> int:
        """Payload of all streams so far."""
        return sum(meter.received_bytes for meter in self.meters)

    @property
    def is_over(self) -> bool:
        """Whether no stream goes on."""
        return all(meter.is_over for meter in self.meters)

    def note_change(self) -> None:
        """A stream began to flow, or ended: open the window, or close it."""
        with self._lock:
            if self.first_flow_ns is None and any(meter.flows for meter in self.meters):
                self.first_flow_ns = self.clock.now_ns()
            if self.start is None and not self._is_spoilt:
                if any(meter.flows and meter.is_over for meter in self.meters):
                    # One was through before another began: there is no moment at which all flowed.
                    self._is_spoilt = len(self.meters) > 1
                if not self._is_spoilt and self._all_flow():
                    self.start = self._mark()
            if self.start is not None and any(meter.flows and meter.is_over for meter in self.meters):
                self._close()
        self.changed.set()

    def close(self) -> None:
        """Close the window now, if it is open."""
        with self._lock:
            self._close()

    def rate(self) -> tuple[Rate | None, int, int]:
        """Return the rate in the window, how long that was (ns), and the percentage of it that we were busy."""
        start, end = self.start, self.end
        if start is None or end is None or end.at_ns <= start.at_ns or end.received_bytes <= start.received_bytes:
            return None, 0, 0
        window_ns = end.at_ns - start.at_ns
        bits_per_second = (end.received_bytes - start.received_bytes) * 8 * _SECOND_NS // window_ns
        return Rate(bits_per_second), window_ns, (end.processor_ns - start.processor_ns) * 100 // window_ns

    def _all_flow(self) -> bool:
        return all(meter.flows or meter.is_over for meter in self.meters) and any(meter.flows for meter in self.meters)

    def _close(self) -> None:
        if self.start is not None and self.end is None:
            self.end = self._mark()

    def _mark(self) -> Mark:
        return Mark(self.clock.now_ns(), self.received_bytes, self._processor_ns())


class Meter:
    """What one stream has read: a Sink. Only the thread that reads it writes to it, so no lock is in its way."""

    __slots__ = (
        *("_progress", "_size_bytes", "_object_bytes", "asked_ns", "failure", "first_byte_ns", "grpc_status"),
        *("is_over", "last_ns", "received_bytes", "status"),
    )

    def __init__(self, progress: Progress, size_bytes: int | None) -> None:
        self._progress, self._size_bytes, self._object_bytes = progress, size_bytes, 0
        self.asked_ns = 0
        self.last_ns = 0
        self.first_byte_ns: int | None = None
        self.received_bytes = 0
        self.status: int | None = None
        self.grpc_status: int | None = None
        self.failure: Failure | None = None
        self.is_over = False

    @property
    def flows(self) -> bool:
        """Whether its first byte has come."""
        return self.first_byte_ns is not None

    @property
    def wants_more(self) -> bool:
        """See Sink."""
        return not self.is_over

    def asked(self) -> None:
        """See Sink."""
        self.last_ns = self._progress.clock.now_ns()
        self.asked_ns = self.asked_ns or self.last_ns
        self._object_bytes = 0

    def answered(self, status: int) -> None:
        """See Sink."""
        self.status = status

    def answered_grpc(self, status: int) -> None:
        """See Sink."""
        self.grpc_status = status

    def take(self, size_bytes: int) -> None:
        """See Sink."""
        self.last_ns = self._progress.clock.now_ns()
        self.received_bytes += size_bytes
        self._object_bytes += size_bytes
        is_first = self.first_byte_ns is None
        if is_first:
            self.first_byte_ns = self.last_ns - self.asked_ns
        if self._size_bytes is not None and self.received_bytes >= self._size_bytes:
            self.finish()
        elif is_first:
            self._progress.note_change()

    def ended(self) -> None:
        """See Sink. Raises ClientError where more is wanted and there is nothing to be had."""
        self.last_ns = self._progress.clock.now_ns()
        if self.first_byte_ns is None:
            self.first_byte_ns = self.last_ns - self.asked_ns
        if self._size_bytes is None:
            self.finish()
        elif not self._object_bytes:
            raise ClientError(Reason.PROTOCOL, "the object is empty, so no rate can be measured")

    def failed(self, error: ClientError) -> None:
        """See Sink."""
        self.finish(error.failure)

    def finish(self, failure: Failure | None = None) -> None:
        """It is over, for a reason or for none. What it was over for stays."""
        if self.is_over:
            return
        self.failure = failure
        self.is_over = True
        self._progress.note_change()
