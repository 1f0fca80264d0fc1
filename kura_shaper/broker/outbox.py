"""What goes to the peer next: the session first, then each data stream in its turn.

A stream's turn is 16 KiB, so that none waits long for another; one that is ready alone
takes as much at once as a frame holds. Many small pieces leave as one frame. A stream that the
peer grants nothing waits apart, and costs nothing, until it is granted something.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.limits import KIB, MIB

if TYPE_CHECKING:
    from kura_shaper.broker.protocol.buffer import StreamBuffer

_TURN_BYTES = 16 * KIB
# What a peer that reads nothing can make us say (refusals, answers to pings) has an end.
CONTROL_BYTES_MAX = MIB


class Source(Protocol):
    """A data stream with something to send."""

    http_id: int
    buffer: StreamBuffer
    sent_bytes: int

    def on_drained(self) -> None:
        """Everything that waited is framed."""


class Outgoing(Protocol):
    """Where frames go."""

    @property
    def data_room_bytes(self) -> int:
        """How much of the connection's window data streams may use."""
        ...

    @property
    def frame_bytes_max(self) -> int:
        """The largest DATA frame to send."""
        ...

    def stream_room_bytes(self, http_id: int) -> int:
        """Return how much the peer's windows of a stream and of the connection let through; all of it."""
        ...

    def send(self, http_id: int, data: bytes) -> None:
        """Send a part of a body, which has to fit a frame and the windows."""


class Http2End(Outgoing, Protocol):
    """Either end of a connection of HTTP/2, as it is sent on."""

    @property
    def is_leaving(self) -> bool:
        """Whether the peer said that it serves no further streams."""
        ...

    def data_to_send(self) -> bytes:
        """Return what is to be sent, once."""
        ...

    def break_off(self) -> None:
        """The connection is gone: nothing can be sent any more, and nothing is tried."""

    def receive(self, data: bytes) -> None:
        """Take bytes of the peer, and tell whom they concern. Raises ConnectionFailedError."""


class Outbox:
    """Chooses what is framed next."""

    def __init__(self, http: Outgoing) -> None:
        self._http = http
        self._session_id = 0
        self._session = bytearray()
        self._ready: deque[Source] = deque()
        self._queued: set[int] = set()

    @property
    def session_bytes(self) -> int:
        """What the session has to say and could not yet."""
        return len(self._session)

    def begin_session(self, http_id: int) -> None:
        """The session's stream is there."""
        self._session_id = http_id

    def put_session(self, data: bytes) -> None:
        """Say something on the session's stream, before everything else."""
        self._session += data

    def put(self, source: Source) -> None:
        """A stream has something to send, or room for it."""
        if source.http_id not in self._queued:
            self._queued.add(source.http_id)
            self._ready.append(source)

    def remove(self, source: Source) -> None:
        """A stream sends no more."""
        if source.http_id in self._queued:
            self._queued.discard(source.http_id)
            self._ready.remove(source)

    def fill(self, most_bytes: int) -> int:
        """Frame about so many bytes, if there are so many and the windows let them through. Returns how many."""
        self._send_session()
        http, framed_bytes = self._http, 0
        while self._ready and framed_bytes < most_bytes:
            room_bytes = min(http.data_room_bytes, http.frame_bytes_max)
            if room_bytes <= 0:
                break
            source = self._ready[0]
            turn_bytes = _TURN_BYTES if len(self._ready) > 1 else room_bytes
            room_bytes = min(room_bytes, turn_bytes, http.stream_room_bytes(source.http_id))
            if room_bytes <= 0 or not source.buffer:
                self._ready.popleft()
                self._queued.discard(source.http_id)
                continue
            data = source.buffer.take(room_bytes)
            http.send(source.http_id, data)
            source.sent_bytes += len(data)
            framed_bytes += len(data)
            self._ready.rotate(-1)
            if not source.buffer:
                self.remove(source)
                source.on_drained()
        return framed_bytes

    def _send_session(self) -> None:
        http = self._http
        while self._session and self._session_id:
            room_bytes = min(http.stream_room_bytes(self._session_id), http.frame_bytes_max)
            if room_bytes <= 0:
                return
            http.send(self._session_id, bytes(self._session[:room_bytes]))
            del self._session[:room_bytes]
