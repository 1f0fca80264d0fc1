"""Where events go, and lines on stdout: written by a thread, so that a reader that is slow holds up no broker.

What waits for it is bounded in number and bytes. An event that does not fit is dropped and counted, and the
next line tells how many were. Topics and payloads are what strangers sent: what a terminal would heed is escaped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.dynamo import shown_payload
from kura_shaper.broker.router.seldom import SeldomLog
from kura_shaper.broker.router.sequences import Arrival
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.router.dynamo import Event

WAITING_MAX, WAITING_BYTES_MAX = 10_000, 16 * MIB
_ORDINARY = (Arrival.FIRST, Arrival.NEXT)
# From the first that is not ASCII on, what JSON's escapes leave as it is otherwise.
_NOT_ASCII = re.compile(r'[^ -~][^"\\]*')
_log = logging.getLogger("kura_shaper.broker.router")


class EventOutput(Protocol):
    """Who takes events."""

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """Take an event, before which so many are missing. Returns False when it had to be dropped."""
        ...

    def close(self) -> None:
        """Write what waits, as far as that goes quickly."""


class ProcessOutput(EventOutput, Protocol):
    """What takes events for the process itself."""

    def when_gone(self, call: Callable[[str], object]) -> None:
        """Have this called from any thread, once, with the reason, when nobody reads any more."""


class NoOutput:
    """Only counts are wanted."""

    def when_gone(self, call: Callable[[str], object]) -> None:
        """See ProcessOutput."""

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


class _Waiting(NamedTuple):
    """An event that is to be a line."""

    event: Event
    endpoint: str
    arrival: Arrival
    missed: int
    dropped: int


class LineOutput:
    """One line an event: an object of JSON, or a few words."""

    def __init__(self, stream: IO[bytes], *, as_json: bool, closes_within_s: float = 2.0) -> None:
        self._stream, self._closes_within_s = stream, closes_within_s
        self._line = json_line if as_json else _text_line
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        # Since the last event that was taken.
        self._dropped = 0
        self._seldom = SeldomLog()
        self._changed = threading.Condition()
        self._is_closed = False
        self._why_broken = ""
        self._when_gone: Callable[[str], object] | None = None
        self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether nobody reads any more."""
        return bool(self._why_broken)

    def when_gone(self, call: Callable[[str], object]) -> None:
        """See ProcessOutput."""
        with self._changed:
            self._when_gone = call
        if self._why_broken:
            call(self._why_broken)

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput."""
        size = len(event.payload)
        with self._changed:
            if self._why_broken:
                return False
            has_room = len(self._waiting) < WAITING_MAX and self._waiting_bytes + size <= WAITING_BYTES_MAX
            if has_room:
                self._waiting.append(_Waiting(event, endpoint, arrival, missed, self._dropped))
                self._waiting_bytes += size
                self._dropped = 0
                self._changed.notify()
            else:
                self._dropped += 1
        if not has_room:
            self._seldom.warn("events_dropped", output="stdout", reason="it is read too slowly")
        return has_room

    def close(self) -> None:
        """See EventOutput."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._dropped:
            # No line comes any more that would say so.
            log_event(_log, "events_dropped", level=logging.WARNING, output="stdout", at_the_end=self._dropped)
        self._thread.join(self._closes_within_s)

    def _write_all(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._stream.writelines(self._line(*each) for each in batch)
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._break(getattr(error, "strerror", None) or "it is closed")
                return

    def _break(self, why: str) -> None:
        """Whoever read is gone, or the disk is full."""
        # What is still buffered has no place to go, and the interpreter's end would stumble over it.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self._stream.fileno())
        with self._changed:
            self._why_broken, self._dropped = why, 0
            self._waiting.clear()
            call = self._when_gone
        if call is not None:
            call(why)

    def _take(self) -> list[_Waiting] | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            batch = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            return batch


def json_line(event: Event, endpoint: str, arrival: Arrival, missed: int, dropped: int = 0) -> bytes:
    """Return an event as one object of JSON in one line. `dropped` is how many before it this reader was not given."""
    head = {
        "endpoint": endpoint,
        "topic": event.topic,
        "publisher_id": event.publisher_id,
        "sequence": event.sequence,
        "published_at_ms": event.published_at_ms,
        "arrival": arrival.value,
        "missed_before": missed,
        "dropped_before": dropped,
    }
    return _printable(msgspec.json.encode(head | shown_payload(event.payload))) + b"\n"


def _text_line(event: Event, endpoint: str, arrival: Arrival, missed: int, dropped: int) -> bytes:
    topic = _printable(msgspec.json.encode(event.topic)).decode()
    told = "" if arrival in _ORDINARY else f" {arrival.value}"
    gap = f" of {missed}" if missed else ""
    lost = f" ({dropped} dropped before it)" if dropped else ""
    name = f"{event.publisher_id:x}"
    return f"{endpoint} {topic} {name} #{event.sequence} {len(event.payload)} bytes{told}{gap}{lost}\n".encode()


def _printable(line: bytes) -> bytes:
    """Return JSON that says the same without what is not printable, such as a terminal's and bidi's controls.

    A line with any such character is ASCII alone then; what is ASCII already, as nearly all are, costs next to nothing.
    """
    if line.isascii() and b"\x7f" not in line:
        return line
    text = line.decode()
    return line if text.isprintable() else _NOT_ASCII.sub(_escaped, text).encode()


def _escaped(run: re.Match[str]) -> str:
    return json.dumps(run[0])[1:-1].replace("\x7f", "\\u007f")
