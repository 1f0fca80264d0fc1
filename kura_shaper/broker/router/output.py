"""Where events go, and lines on stdout: written by a thread, so that a reader that is slow holds up no broker.

What waits for it is bounded in number and bytes. An event that does not fit is dropped and counted, and the
next line tells how many were.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.dynamo import shown_payload
from kura_shaper.broker.router.sequences import Arrival

if TYPE_CHECKING:
    from kura_shaper.broker.router.dynamo import Event

WAITING_MAX, WAITING_BYTES_MAX = 10_000, 16 * MIB
_ORDINARY = (Arrival.FIRST, Arrival.NEXT)


class EventOutput(Protocol):
    """Who takes events."""

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """Take an event, before which so many are missing. Returns False when it had to be dropped."""
        ...

    def close(self) -> None:
        """Write what waits, as far as that goes quickly."""


class NoOutput:
    """Only counts are wanted."""

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput."""
        del event, endpoint, arrival, missed
        return True

    def close(self) -> None:
        """See EventOutput."""


class AllOutputs:
    """Several outputs; each has every event, whatever becomes of it in another."""

    def __init__(self, *outputs: EventOutput) -> None:
        self._outputs = outputs

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput."""
        took = [each.put(event, endpoint=endpoint, arrival=arrival, missed=missed) for each in self._outputs]
        return all(took)

    def close(self) -> None:
        """See EventOutput."""
        for each in self._outputs:
            each.close()


class LineOutput:
    """One line an event: an object of JSON, or a few words."""

    def __init__(self, stream: IO[bytes], *, as_json: bool, closes_within_s: float = 2.0) -> None:
        self._stream, self._closes_within_s = stream, closes_within_s
        self._line = json_line if as_json else _text_line
        self._waiting: deque[tuple[Event, str, Arrival, int]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self.is_broken = False
        self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)
        self._thread.start()

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput."""
        size = len(event.payload)
        with self._changed:
            if len(self._waiting) >= WAITING_MAX or self._waiting_bytes + size > WAITING_BYTES_MAX or self.is_broken:
                return False
            self._waiting.append((event, endpoint, arrival, missed))
            self._waiting_bytes += size
            self._changed.notify()
        return True

    def close(self) -> None:
        """See EventOutput."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(self._closes_within_s)

    def _write_all(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._stream.writelines(self._line(*each) for each in batch)
                self._stream.flush()
            except (OSError, ValueError):
                # Whoever read is gone.
                self.is_broken = True
                return

    def _take(self) -> list[tuple[Event, str, Arrival, int]] | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            batch = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            return batch


def json_line(event: Event, endpoint: str, arrival: Arrival, missed: int) -> bytes:
    """Return an event as one object of JSON in one line."""
    head = {
        "endpoint": endpoint,
        "topic": event.topic,
        "publisher_id": event.publisher_id,
        "sequence": event.sequence,
        "published_at_ms": event.published_at_ms,
        "arrival": arrival.value,
        "missed_before": missed,
    }
    return msgspec.json.encode(head | shown_payload(event.payload)) + b"\n"


def _text_line(event: Event, endpoint: str, arrival: Arrival, missed: int) -> bytes:
    # A topic is what a stranger sent; JSON's escapes keep it one line and off the terminal.
    topic = msgspec.json.encode(event.topic).decode().encode("ascii", "backslashreplace").decode()
    told = "" if arrival in _ORDINARY else f" {arrival.value}"
    gap = f" of {missed}" if missed else ""
    name = f"{event.publisher_id:x}"
    return f"{endpoint} {topic} {name} #{event.sequence} {len(event.payload)} bytes{told}{gap}\n".encode()
