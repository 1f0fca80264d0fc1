"""A subscriber of ZMTP 3 without I/O: the bytes of a publisher in, its messages out, and nothing without a bound.

ZMTP 3.0 (RFC 23) and 3.1 (RFC 37), mechanism NULL. A peer may send anything: what the protocol
does not allow, or more than was agreed to keep, ends it with `ZmtpError`, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    from collections.abc import Sequence

_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_VERSION = b"\x03\x01"
_NULL = b"NULL".ljust(20, b"\0")
_MORE, _LONG, _COMMAND = 0x01, 0x02, 0x04
_COMMAND_BYTES_MAX = 8 * KIB
_CONTEXT_BYTES_MAX = 16
_PUBLISHERS = (b"PUB", b"XPUB")
# What answers to a peer's questions may take until they are taken away.
_OUT_BYTES_MAX = 64 * KIB
PARTS_MAX = 16


class ZmtpFault(StrEnum):
    """What a peer may do wrong."""

    GREETING = "greeting"
    VERSION = "version"
    MECHANISM = "mechanism"
    HANDSHAKE = "handshake"
    PEER_ERROR = "peer_error"
    FRAME = "frame"
    COMMAND = "command"
    TOO_LARGE = "too_large"
    TOO_MANY_PARTS = "too_many_parts"
    FLOOD = "flood"
    SILENT = "silent"


class ZmtpError(Exception):
    """The peer is no publisher that can be read. The message has nothing of what it sent."""

    def __init__(self, fault: ZmtpFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class _State(Enum):
    GREETING = "greeting"
    READY = "ready"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The handshake is over, and the subscriptions are among the bytes to send."""

    minor_version: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message, whole."""

    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ponged:
    """The peer answered a ping."""


Found = Subscribed | Message | Ponged


class ZmtpSubscriber:
    """Subscribes to topics, which are prefixes; an empty one is everything. `data_to_send` has the greeting at once."""

    def __init__(self, topics: Sequence[bytes], *, max_message_bytes: int) -> None:
        self._topics, self._max_message_bytes = tuple(topics), max_message_bytes
        self._state = _State.GREETING
        self._minor = 0
        self._waiting = bytearray()
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._out = bytearray(_SIGNATURE + _VERSION + _NULL + bytes(32))

    @property
    def is_subscribed(self) -> bool:
        """Whether the handshake is over."""
        return self._state is _State.TRAFFIC

    @property
    def kept_bytes(self) -> int:
        """How much waits for the rest of a frame or of a message."""
        return len(self._waiting) + self._parts_bytes

    def data_to_send(self) -> bytes:
        """Return the bytes that are to be sent, once."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def ping(self) -> bool:
        """Ask whether the peer is there. Returns whether it can be asked, which ZMTP 3.0 does not know."""
        if not self.is_subscribed or self._minor < 1:
            return False
        self._say(_command(b"PING", b"\0\0"))
        return True

    def receive(self, data: bytes) -> list[Found]:
        """Take bytes of the peer, in pieces of any size, and return what is whole. Raises ZmtpError."""
        found: list[Found] = []
        waiting = self._waiting
        waiting += data
        at = 0
        with memoryview(waiting) as view:
            if self._state is _State.GREETING:
                at = self._greeting(view)
            while self._state is not _State.GREETING:
                end = self._frame(view, at, found)
                if end is None:
                    break
                at = end
        if at:
            del waiting[:at]
        return found

    def _greeting(self, view: memoryview) -> int:
        """Check as much of a greeting as there is, so that a peer that will never send the rest is known early."""
        if (view and view[0] != 0xFF) or (len(view) > 9 and view[9] != 0x7F):
            raise ZmtpError(ZmtpFault.GREETING, "no greeting of ZMTP came")
        if len(view) > 10 and view[10] < 3:
            raise ZmtpError(ZmtpFault.VERSION, "the peer speaks a version before ZMTP 3")
        if len(view) < _GREETING_BYTES:
            return 0
        if bytes(view[12:32]) != _NULL:
            raise ZmtpError(ZmtpFault.MECHANISM, "the peer wants another mechanism than NULL")
        # A later major version speaks as we do when it sees ours (RFC 23, section 3.2).
        self._minor = view[11] if view[10] == 3 else 1
        self._state = _State.READY
        self._say(_command(b"READY", _property(b"Socket-Type", b"SUB") + _property(b"Identity", b"")))
        return _GREETING_BYTES

    def _frame(self, view: memoryview, at: int, found: list[Found]) -> int | None:
        """Take one frame; return where it ends, None when it is not whole."""
        size = len(view)
        if size < at + 2:
            return None
        flags = view[at]
        if flags & _LONG:
            if size < at + 9:
                return None
            begin, length = at + 9, int.from_bytes(view[at + 1 : at + 9], "big")
        else:
            begin, length = at + 2, view[at + 1]
        self._require_allowed(flags, length)
        end = begin + length
        if size < end:
            return None
        if flags & _COMMAND:
            self._take_command(bytes(view[begin:end]), found)
        else:
            self._take_part(bytes(view[begin:end]), found, is_last=flags & _MORE == 0)
        return end

    def _require_allowed(self, flags: int, length: int) -> None:
        """Refuse a frame by its head, before anything of it is kept."""
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_COMMAND | _MORE) == _COMMAND | _MORE:
            raise ZmtpError(ZmtpFault.FRAME, "a frame has flags that there are none of")
        if flags & _COMMAND:
            if length > _COMMAND_BYTES_MAX:
                raise ZmtpError(ZmtpFault.TOO_LARGE, f"a command has more than {_COMMAND_BYTES_MAX} bytes")
            return
        if self._state is not _State.TRAFFIC:
            raise ZmtpError(ZmtpFault.HANDSHAKE, "a message came before READY")
        if self._parts_bytes + length > self._max_message_bytes:
            raise ZmtpError(ZmtpFault.TOO_LARGE, f"a message has more than {self._max_message_bytes} bytes")
        if len(self._parts) >= PARTS_MAX:
            raise ZmtpError(ZmtpFault.TOO_MANY_PARTS, f"a message has more than {PARTS_MAX} parts")

    def _take_part(self, part: bytes, found: list[Found], *, is_last: bool) -> None:
        self._parts.append(part)
        if not is_last:
            self._parts_bytes += len(part)
            return
        found.append(Message(tuple(self._parts)))
        self._parts.clear()
        self._parts_bytes = 0

    def _take_command(self, body: bytes, found: list[Found]) -> None:
        name_length = body[0] if body else 0
        name, rest = body[1 : 1 + name_length], body[1 + name_length :]
        if not name or len(name) != name_length:
            raise ZmtpError(ZmtpFault.COMMAND, "a command has no name")
        if name == b"ERROR":
            raise ZmtpError(ZmtpFault.PEER_ERROR, "the peer refused the handshake")
        if self._state is _State.READY:
            found.append(self._ready(name, rest))
        elif name == b"PING":
            # The first two bytes say how long the peer waits; the rest it wants to see again.
            if not 2 <= len(rest) <= 2 + _CONTEXT_BYTES_MAX:
                raise ZmtpError(ZmtpFault.COMMAND, "a PING is not as long as one may be")
            self._say(_command(b"PONG", rest[2:]))
        elif name == b"PONG":
            found.append(Ponged())
        elif name == b"READY":
            raise ZmtpError(ZmtpFault.HANDSHAKE, "READY came twice")
        # Any other command is of a later version, and ignored.

    def _ready(self, name: bytes, rest: bytes) -> Subscribed:
        if name != b"READY":
            raise ZmtpError(ZmtpFault.HANDSHAKE, "another command came than READY")
        if _properties(rest).get(b"socket-type") not in _PUBLISHERS:
            raise ZmtpError(ZmtpFault.HANDSHAKE, "the peer is no publisher")
        self._state = _State.TRAFFIC
        for topic in self._topics:
            self._say(_command(b"SUBSCRIBE", topic) if self._minor else _frame_of(0, b"\x01" + topic))
        return Subscribed(self._minor)

    def _say(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > _OUT_BYTES_MAX + sum(map(len, self._topics)):
            raise ZmtpError(ZmtpFault.FLOOD, "the peer asks more than it lets be answered")


def _frame_of(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def _command(name: bytes, rest: bytes) -> bytes:
    return _frame_of(_COMMAND, bytes((len(name),)) + name + rest)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties of a READY, by their names in lower case. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        name, size = data[at + 1 : name_end], data[name_end : name_end + 4]
        at = name_end + 4 + int.from_bytes(size, "big")
        if not name or len(size) < 4 or at > len(data):
            raise ZmtpError(ZmtpFault.HANDSHAKE, "the properties of READY are cut off")
        found[name.lower()] = data[name_end + 4 : at]
    return found
