"""What a client may make a server work: its frames are counted by their heads, before anything is done about one.

Frames that bring nothing (SETTINGS, PING, a reset, credit, an empty body) cost the client nothing and us much. So they
cost units of a budget that fills again with time, by what one of them takes here. A stranger, whose token
was not seen yet, has a few frames in all. A header block may be no longer than the headers that it may stand for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_BLOCK_BYTES_MAX = 16 * KIB
# A request takes a stranger about five frames, and it may guess a few tokens.
STRANGER_FRAMES_MAX = 64
_STRANGER_FRAME_BYTES_MAX = 16 * KIB
# All of 4096 streams may be opened, ended and given credit at once; and then half as many each second.
BUDGET_UNITS, _UNITS_PER_S = 32_768, 8_192
_DATA, _HEADERS, _SETTINGS, _PING, _CONTINUATION = 0x0, 0x1, 0x4, 0x6, 0x9
_END_STREAM, _END_HEADERS = 0x1, 0x4
# SETTINGS may concern each stream there is, a PING is answered, and a request is looked at.
_UNITS = {_SETTINGS: 512, _PING: 16, _HEADERS: 4}
# A frame that we send may be answered with credit for its stream and for the connection.
SENT_EARNS_UNITS = 2
# What it takes to open, end and reset a stream that we asked for.
STREAM_EARNS_UNITS = 8
# What is done at a time before others have their turn, some milliseconds of work.
_FRAMES_AT_A_TIME, _STRANGERS_FRAMES_AT_A_TIME = 128, 16


class FloodError(ProtocolViolationError):
    """A client makes more work than it may."""


class FrameGuard:
    """A FrameWatch. `now_s` is any clock in seconds that goes forward."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._is_admitted = False
        self._frames = 0
        self._left_units = float(BUDGET_UNITS)
        self._filled_s = now_s()
        self._header_block_bytes = 0
        self._left_now = 0

    @property
    def is_enough(self) -> bool:
        """See FrameWatch."""
        return self._left_now <= 0

    def begin_turn(self) -> None:
        """Let the next few frames through."""
        self._left_now = _FRAMES_AT_A_TIME if self._is_admitted else _STRANGERS_FRAMES_AT_A_TIME

    def admit(self) -> None:
        """It is no stranger."""
        self._is_admitted = True

    def earn(self, units: int) -> None:
        """Something happened that the client does well to answer."""
        self._left_units = min(self._left_units + units, BUDGET_UNITS)

    def on_frame(self, kind: int, flags: int, length_bytes: int) -> None:
        """See FrameWatch. Raises FloodError."""
        self._left_now -= 1
        if kind in (_HEADERS, _CONTINUATION):
            self._note_headers(kind, flags, length_bytes)
        if not self._is_admitted:
            self._note_stranger(kind, flags, length_bytes)
        if kind == _DATA and (length_bytes or flags & _END_STREAM):
            return
        self._left_units -= _UNITS.get(kind, 1)
        if self._left_units < 0:
            self._fill()
            if self._left_units < 0:
                raise FloodError("too many frames that bring nothing")

    def _note_headers(self, kind: int, flags: int, length_bytes: int) -> None:
        before_bytes = self._header_block_bytes if kind == _CONTINUATION else 0
        self._header_block_bytes = before_bytes + length_bytes
        if self._header_block_bytes > HEADER_BLOCK_BYTES_MAX:
            raise FloodError("a header block is longer than it may be")
        if flags & _END_HEADERS:
            self._header_block_bytes = 0

    def _note_stranger(self, kind: int, flags: int, length_bytes: int) -> None:
        self._frames += 1
        if self._frames > STRANGER_FRAMES_MAX or length_bytes > _STRANGER_FRAME_BYTES_MAX:
            raise FloodError("a stranger says too much")
        if kind in (_HEADERS, _CONTINUATION) and flags & _END_HEADERS:
            # What comes after a request counts by the answer to it.
            self._left_now = 0

    def _fill(self) -> None:
        now_s = self._now_s()
        earned = (now_s - self._filled_s) * _UNITS_PER_S
        self._left_units = min(self._left_units + earned, BUDGET_UNITS)
        self._filled_s = now_s
