"""Frames as bytes: a length of four bytes, big endian, and so many bytes of one JSON object.

The length comes first, so that a bound is kept before anything is kept. What a reader of JSON may
take either way is refused: keys that stand twice, NaN, numbers that not everybody keeps exactly,
depth without end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.frames import Frame, frame_of, object_of
from kura_shaper.broker.protocol.limits import FRAME_BYTES_BEFORE_WELCOME, INTEGER_MAX, JSON_DEPTH_MAX

if TYPE_CHECKING:
    from kura_shaper.broker.protocol.fields import Json

_LENGTH_BYTES = 4
_FRAME_BYTES_LEAST = 2
_INTEGER_DIGITS = len(str(INTEGER_MAX))


@dataclass(frozen=True, slots=True)
class UnknownFrame:
    """A frame of a type that is not known here. It is ignored, and counted."""

    type: str


def encode(frame: Frame, *, max_frame_bytes: int = FRAME_BYTES_BEFORE_WELCOME) -> bytes:
    """Return a frame as bytes. Raises ProtocolViolationError for one that the other end would refuse."""
    return encode_object(object_of(frame), max_frame_bytes=max_frame_bytes)


def encode_object(value: Json, *, max_frame_bytes: int = FRAME_BYTES_BEFORE_WELCOME) -> bytes:
    """Return any JSON object as a frame, unchecked but for its length."""
    payload = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    if len(payload) > max_frame_bytes:
        raise ProtocolViolationError(f"a frame has {len(payload)} bytes, and {max_frame_bytes} are allowed")
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class FrameDecoder:
    """Frames out of bytes that come in pieces of any size.

    `feed` it, then ask for the `next_frame` until there is none. `max_frame_bytes` may change
    between two frames, and counts from the next one on. After an error nothing more comes.
    """

    def __init__(self, *, max_frame_bytes: int = FRAME_BYTES_BEFORE_WELCOME) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._waiting = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        if self._at:
            del self._waiting[: self._at]
            self._at = 0
        self._waiting += data

    def next_frame(self) -> Frame | UnknownFrame | None:
        """Return the next frame that is whole, None when there is none yet. Raises ProtocolViolationError."""
        begin = self._at + _LENGTH_BYTES
        if len(self._waiting) < begin:
            return None
        length = int.from_bytes(self._waiting[self._at : begin], "big")
        if not _FRAME_BYTES_LEAST <= length <= self.max_frame_bytes:
            raise ProtocolViolationError(f"a frame of {length} bytes, and 2 to {self.max_frame_bytes} are allowed")
        if len(self._waiting) < begin + length:
            return None
        self._at = begin + length
        return _parse(bytes(self._waiting[begin : self._at]))


def _parse(payload: bytes) -> Frame | UnknownFrame:
    try:
        value = json.loads(
            payload.decode(),
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_int=_exact,
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolViolationError("a frame is no JSON") from error
    if not isinstance(value, dict):
        raise ProtocolViolationError("a frame is no JSON object")
    _require_shallow(value)
    return frame_of(value) or UnknownFrame(value["type"])


def _without_twins(pairs: list[tuple[str, object]]) -> Json:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ProtocolViolationError("a frame has a key twice")
    return made


def _refuse_constant(_: str) -> NoReturn:
    raise ProtocolViolationError("a frame has a number that JSON does not have")


def _exact(digits: str) -> int:
    if len(digits) > _INTEGER_DIGITS + 1 or abs(int(digits)) > INTEGER_MAX:
        raise ProtocolViolationError("a frame has a whole number beyond 2^53-1")
    return int(digits)


def _require_shallow(value: Json) -> None:
    """Refuse what is nested deeper than is allowed; the frame's own object is the first level."""
    level: list[object] = [value]
    for _ in range(JSON_DEPTH_MAX):
        inner = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]  # type: ignore[attr-defined]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise ProtocolViolationError(f"a frame is nested deeper than {JSON_DEPTH_MAX}")
