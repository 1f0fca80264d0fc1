"""The frames of HTTP/2 told apart, so that a GOAWAY can be taken out before a library sees it, and floods be stopped.

A GOAWAY only says that no further streams are served (RFC 9113, section 6.8). The h2 library
closes the connection's state at once instead, and the live streams with it
(https://github.com/python-hyper/h2/issues/1181). So it is never shown one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kura_shaper.broker.protocol.errors import ProtocolViolationError

_HEADER_BYTES = 9
_GOAWAY = 0x7
_GOAWAY_BYTES_LEAST = 8
_STREAM_MASK = 0x7FFF_FFFF
LAST_STREAM_MAX = _STREAM_MASK
NO_ERROR = 0


@dataclass(frozen=True, slots=True)
class GoAway:
    """No stream with an id above `last_stream_id` was or will be served."""

    last_stream_id: int
    error_code: int


def encode_goaway(last_stream_id: int = LAST_STREAM_MAX, error_code: int = NO_ERROR) -> bytes:
    """Return a GOAWAY as bytes, for an end whose library would end the connection with it."""
    payload = last_stream_id.to_bytes(4, "big") + error_code.to_bytes(4, "big")
    return len(payload).to_bytes(3, "big") + bytes((_GOAWAY, 0)) + bytes(4) + payload


class FrameWatch(Protocol):
    """Who sees the head of each frame before its library does."""

    @property
    def is_enough(self) -> bool:
        """Whether further frames have to wait."""
        ...

    def on_frame(self, kind: int, flags: int, length_bytes: int) -> None:
        """A frame begins. May raise ProtocolViolationError."""


class FrameSplitter:
    """Passes every byte on but those of GOAWAY frames. `preface_bytes` come before the first frame of a client."""

    def __init__(self, *, max_frame_bytes: int, preface_bytes: int = 0, watch: FrameWatch | None = None) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._left_bytes = preface_bytes
        self._watch = watch
        self._rest = memoryview(b"")
        self._goaway: bytearray | None = None

    @property
    def has_whole_heads(self) -> bool:
        """Whether frames wait that came, since there were enough at a time."""
        return len(self._rest) >= _HEADER_BYTES

    def feed(self, data: bytes) -> tuple[bytes, tuple[GoAway, ...]]:
        """Return what a library may see, and what it may not. Raises ProtocolViolationError for a frame too long."""
        passed: list[bytes | memoryview] = []
        found: list[GoAway] = []
        view = memoryview(b"".join((self._rest, data))) if self._rest and data else self._rest or memoryview(data)
        at = 0
        while at < len(view):
            if not self._left_bytes:
                header = view[at : at + _HEADER_BYTES]
                if len(header) < _HEADER_BYTES or (self._watch is not None and self._watch.is_enough):
                    break
                self._begin(header)
                if self._goaway is None:
                    passed.append(header)
                at += _HEADER_BYTES
            body = view[at : at + self._left_bytes]
            at += len(body)
            self._left_bytes -= len(body)
            if self._goaway is None:
                passed.append(body)
            else:
                self._goaway += body
                if not self._left_bytes:
                    found.append(_parse(self._goaway))
                    self._goaway = None
        rest = view[at:]
        # The few bytes of half a head need not keep all that came before them.
        self._rest = rest if len(rest) >= _HEADER_BYTES else memoryview(bytes(rest))
        return b"".join(passed), tuple(found)

    def _begin(self, header: memoryview) -> None:
        self._left_bytes = int.from_bytes(header[:3], "big")
        if self._left_bytes > self._max_frame_bytes:
            raise ProtocolViolationError("an HTTP/2 frame is longer than we allow")
        if self._watch is not None:
            self._watch.on_frame(header[3], header[4], self._left_bytes)
        if header[3] == _GOAWAY:
            if self._left_bytes < _GOAWAY_BYTES_LEAST:
                raise ProtocolViolationError("a GOAWAY is too short")
            self._goaway = bytearray()


def _parse(payload: bytearray) -> GoAway:
    last_stream_id = int.from_bytes(payload[:4], "big") & _STREAM_MASK
    return GoAway(last_stream_id, int.from_bytes(payload[4:8], "big"))
