"""HTTP/1.1 as a client reads it: one object after the other, each counted and let go.

`Response` knows no socket: bytes in, how many of them were payload out. What an other side
can make it keep is bounded (RFC 9112 for the rules).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

from kura_shaper.probe.failures import ClientError, Phase, Reason, translated

if TYPE_CHECKING:
    import socket

    from kura_shaper.probe.request import Request

# Each stream has so much; over TLS no read fills more than a record of 16 KiB of it.
_READ_BYTES: Final = 2**17
_HEAD_BYTES_MAX = 65_536
_CHUNK_LINE_BYTES_MAX = 4_096
_INTERIM_MAX = 16
_STATUS_LINE = re.compile(rb"HTTP/1\.(?P<minor>[01]) (?P<status>[1-9][0-9]{2})(?: [^\r\n\0]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"(?P<size>[0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_BODILESS = frozenset({204, 304})


class Sink(Protocol):
    """What one stream tells as it goes, from the thread that reads."""

    @property
    def wants_more(self) -> bool:
        """Whether to read on, or to ask again where an object has ended."""
        ...

    def asked(self) -> None:
        """The last byte of a request was sent."""
        ...

    def answered(self, status: int) -> None:
        """HTTP's status came."""
        ...

    def answered_grpc(self, status: int) -> None:
        """And that of gRPC."""
        ...

    def take(self, size_bytes: int) -> None:
        """So many bytes of payload came."""
        ...

    def ended(self) -> None:
        """The object is whole."""
        ...

    def failed(self, error: ClientError) -> None:
        """This stream alone has failed; others on its connection go on."""
        ...


def read_http1(peer: socket.socket, request: Request, sink: Sink, *, read_bytes: int = _READ_BYTES) -> None:
    """Ask for one object after the other, reading so much at a time. Raises ClientError.

    Returns when the sink wants no more, or when the other side wants another connection for it.
    """
    buffer = memoryview(bytearray(read_bytes))
    question = request.http1()
    with translated(Phase.READING):
        while sink.wants_more:
            peer.sendall(question)
            sink.asked()
            response = Response(request)
            _read_one(peer, response, sink=sink, buffer=buffer)
            if not response.is_finished:
                return
            sink.ended()
            if not response.keeps_connection:
                return


def _read_one(peer: socket.socket, response: Response, *, sink: Sink, buffer: memoryview) -> None:
    is_told = False
    while not response.is_finished and sink.wants_more:
        size_bytes = peer.recv_into(buffer)
        payload_bytes = response.feed(buffer[:size_bytes]) if size_bytes else response.feed_end()
        if response.status and not is_told:
            is_told = True
            sink.answered(response.status)
            response.require_expected()
        if payload_bytes:
            sink.take(payload_bytes)


class Response:
    """One response, fed piece by piece."""

    def __init__(self, request: Request) -> None:
        self.status = 0
        self.is_finished = False
        self.keeps_connection = True
        self._request = request
        self._head = bytearray()
        self._searched = 0
        self._interims = 0
        # Bytes of the body that are still to come: of all of it, of this chunk, or None until the end.
        self._left_bytes: int | None = 0
        self._said_bytes = 0
        self._chunks: _Chunks | None = None

    def require_expected(self) -> None:
        """Raise ClientError when the status is another one than the request expects."""
        self._request.require_status(self.status)

    def feed(self, piece: memoryview) -> int:
        """Return how many bytes of a piece are payload. Raises ClientError when it breaks the rules."""
        if not self.status:
            rest = self._feed_head(piece)
            return self.feed(memoryview(rest)) if rest and self.status else 0
        if self.is_finished:
            raise _broken("sends more than it said")
        if self._chunks is not None:
            payload_bytes = self._chunks.feed(piece)
            self.is_finished = self._chunks.is_finished
            return payload_bytes
        if self._left_bytes is None:
            return len(piece)
        if len(piece) > self._left_bytes:
            raise _broken(f"sends more than the {self._said_bytes} bytes that it said")
        self._left_bytes -= len(piece)
        self.is_finished = not self._left_bytes
        return len(piece)

    def feed_end(self) -> int:
        """The other side closed. Raises ClientError where that is too early; returns 0."""
        if self.status and self._left_bytes is None:
            self.is_finished = True
            return 0
        if not self.status:
            raise ClientError(Reason.RESET, "closed the connection instead of an answer")
        if self._chunks is not None:
            raise ClientError(Reason.RESET, "closed the connection before the last chunk")
        came_bytes = self._said_bytes - (self._left_bytes or 0)
        raise ClientError(Reason.RESET, f"closed the connection after {came_bytes} of {self._said_bytes} bytes")

    def _feed_head(self, piece: memoryview) -> bytes:
        """Take what belongs to the head and return what follows it."""
        self._head += piece
        while (end := self._head.find(b"\r\n\r\n", max(self._searched - 3, 0))) >= 0:
            head, rest = bytes(self._head[:end]), bytes(self._head[end + 4 :])
            self._head, self._searched = bytearray(rest), 0
            self._read_head(head)
            if self.status:
                self._head = bytearray()
                if rest and self.is_finished:
                    raise _broken("sends more than it said")
                return rest
        self._searched = len(self._head)
        # A head may begin with anything at all only until the first line is there.
        if not self._head.startswith(b"HTTP/"[: len(self._head)]):
            raise _broken("the answer is no HTTP/1.1")
        if len(self._head) > _HEAD_BYTES_MAX:
            raise _broken(f"the head of the answer has no end within {_HEAD_BYTES_MAX} bytes")
        return b""

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None or len(head) > _HEAD_BYTES_MAX:
            raise _broken("the answer is no HTTP/1.1")
        status = int(found["status"])
        if status < 200:
            self._interims += 1
            if status == 101 or self._interims > _INTERIM_MAX:
                raise _broken(f"status {status} instead of an answer")
            return
        fields = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        self._read_body_length(status, fields)
        connection = b",".join(value for name, value in fields if name == b"connection").lower()
        wants_close = b"close" in [option.strip() for option in connection.split(b",")]
        self.keeps_connection = not wants_close and found["minor"] == b"1" and self._left_bytes is not None
        self.status = status

    def _read_body_length(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        lengths = {value for name, value in fields if name == b"content-length"}
        codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
        if len(lengths) > 1 or (lengths and codings) or any(not _LENGTH.fullmatch(each) for each in lengths):
            raise _broken("says in two ways how long the answer is, or in none that can be read")
        if codings and codings != [b"chunked"]:
            raise _broken(f"transfer-encoding {codings[0][:64]!r}")
        if status in _BODILESS:
            self.is_finished = True
        elif codings:
            self._chunks = _Chunks()
        elif lengths:
            self._said_bytes = self._left_bytes = int(lengths.pop())
            self.is_finished = not self._left_bytes
        else:
            self._left_bytes = None


class _Chunks:
    """A body in chunks: lines that say how long each is, and a line of trailers or more at the end."""

    def __init__(self) -> None:
        self.is_finished = False
        self._line = bytearray()
        self._left_bytes = 0
        self._trailer_bytes = 0
        self._expects = "size"

    def feed(self, piece: memoryview) -> int:
        """Return how many bytes of a piece are payload. Raises ClientError."""
        payload_bytes = 0
        while piece:
            if self.is_finished:
                raise _broken("sends more than it said")
            if self._left_bytes:
                taken_bytes = min(len(piece), self._left_bytes)
                payload_bytes += taken_bytes
                self._left_bytes -= taken_bytes
                piece = piece[taken_bytes:]
                continue
            # Not the whole piece: most of it is payload, and would be copied.
            some = bytes(piece[:_CHUNK_LINE_BYTES_MAX])
            end = some.find(b"\n")
            taken_bytes = end + 1 if end >= 0 else len(some)
            self._line += some[:taken_bytes]
            piece = piece[taken_bytes:]
            if len(self._line) > _CHUNK_LINE_BYTES_MAX:
                raise _broken("the line of a chunk has no end")
            if end >= 0:
                self._take_line()
        return payload_bytes

    def _take_line(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        if not line.endswith(b"\r\n"):
            raise _broken("a line of a chunk is no line")
        content = line[:-2]
        if self._expects == "end":
            if content:
                raise _broken("a chunk is longer than it said")
            self._expects = "size"
        elif self._expects == "trailer":
            self._trailer_bytes += len(line)
            self.is_finished = not content
            if self._trailer_bytes > _HEAD_BYTES_MAX:
                raise _broken("the trailers have no end")
        else:
            found = _CHUNK.fullmatch(content)
            if found is None:
                raise _broken("a chunk does not say how long it is")
            self._left_bytes = int(found["size"], 16)
            self._expects = "end" if self._left_bytes else "trailer"


def _broken(words: str) -> ClientError:
    return ClientError(Reason.PROTOCOL, f"breaks the rules of HTTP/1.1: {words}")
