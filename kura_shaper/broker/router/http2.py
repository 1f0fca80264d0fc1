"""A server's end of one HTTP/2 connection, without I/O: requests told as they come, bodies both ways.

The same library and the same care as at the client's end. What a client can do to a server is bounded here: how
many streams it may open, how far each and all of them may be ahead of what was used, how long a header may
be, how much work its frames may make at a time; and a GOAWAY of its own changes nothing, since it opens no fewer
streams for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h2.stream

from kura_shaper.broker.data_frames import DataFrames
from kura_shaper.broker.http2 import ConnectionFailedError
from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.goaway import LAST_STREAM_MAX, NO_ERROR, FrameSplitter, encode_goaway
from kura_shaper.broker.protocol.limits import KIB
from kura_shaper.broker.router.counts import ConnectionFault
from kura_shaper.broker.router.frame_guard import (
    HEADER_BLOCK_BYTES_MAX,
    SENT_EARNS_UNITS,
    STREAM_EARNS_UNITS,
    FloodError,
    FrameGuard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kura_shaper.broker.http2 import Header

# Larger DATA frames cost both ends less each, up to about here; and a frame is what other streams wait for.
FRAME_BYTES = 64 * KIB
_HEADER_LIST_BYTES = HEADER_BLOCK_BYTES_MAX
_INITIAL_WINDOW_BYTES = 65_535
_WINDOW_BYTES_MAX = 2**31 - 1
_PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
_OWN_SIDE_OPEN = {h2.stream.StreamState.OPEN, h2.stream.StreamState.HALF_CLOSED_REMOTE}
_OK = 200
_WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
ENHANCE_YOUR_CALM, _PROTOCOL_ERROR = 0xB, 0x1


class ClientFailedError(ConnectionFailedError):
    """The connection can't be used any more, since the client broke a rule."""

    def __init__(self, fault: ConnectionFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Body(Protocol):
    """Who is told of the rest of one request."""

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """A part of its body came; give the credit back when it was used."""

    def on_end(self) -> None:
        """Its body is whole."""

    def on_reset(self) -> None:
        """There will be no more of it, nor of the answer."""

    def on_window(self) -> None:
        """There may be more room to send."""


class Requests(Protocol):
    """Who answers requests."""

    def on_request(self, http_id: int, headers: dict[str, str]) -> Body | None:
        """Answer a request, and return who is told of its body; None when nobody is."""


class Http2Server:
    """One connection. `data_to_send` is what the library wants to send, headers and credit and all."""

    def __init__(
        self, requests: Requests, *, max_streams: int, stream_window_bytes: int, now_s: Callable[[], float]
    ) -> None:
        self._requests = requests
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: max_streams,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: stream_window_bytes,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: _HEADER_LIST_BYTES,
            },
        )
        # The library applies these of its own settings only when a client acknowledges later ones.
        self._h2.max_inbound_frame_size = FRAME_BYTES
        self._h2.decoder.max_header_list_size = _HEADER_LIST_BYTES
        self._h2.initiate_connection()
        # No stream that is not read may hold up another, so all may be a whole window ahead.
        window_bytes = min((max_streams + 1) * stream_window_bytes, _WINDOW_BYTES_MAX)
        if window_bytes > _INITIAL_WINDOW_BYTES:
            self._h2.increment_flow_control_window(window_bytes - _INITIAL_WINDOW_BYTES)
        self._frames = DataFrames(self._h2)
        self._guard = FrameGuard(now_s=now_s)
        self._splitter = FrameSplitter(max_frame_bytes=FRAME_BYTES, preface_bytes=_PREFACE_BYTES, watch=self._guard)
        self._bodies: dict[int, Body] = {}
        self._raw = b""
        self._is_broken = False

    @property
    def is_leaving(self) -> bool:
        """A client that goes away opens no streams, and that is all."""
        return False

    @property
    def has_unread(self) -> bool:
        """Whether frames of the client wait for the next `receive`, which may be of nothing."""
        return self._splitter.has_whole_heads

    @property
    def open_bodies(self) -> int:
        """How many requests somebody is told of."""
        return len(self._bodies)

    @property
    def data_room_bytes(self) -> int:
        """How much of the connection's window is left."""
        return self._h2.outbound_flow_control_window

    @property
    def frame_bytes_max(self) -> int:
        """The largest DATA frame to send."""
        return min(self._h2.max_outbound_frame_size, FRAME_BYTES)

    def admit(self) -> None:
        """The client showed a token: it may do more than a stranger."""
        self._guard.admit()

    def data_to_send(self) -> bytes:
        """Return what is to be sent, once."""
        raw, self._raw = self._raw, b""
        return self._frames.take() + raw

    def respond(self, http_id: int, status: int, headers: Sequence[Header] = (), *, body: bytes | None = None) -> None:
        """Send the head of an answer, and with a body all of it."""
        if not self._is_open(http_id):
            return
        if body and len(body) > self._h2.local_flow_control_window(http_id):
            # Its status says enough to a client that grants nothing.
            body = b""
        if status == _OK:
            self._guard.earn(STREAM_EARNS_UNITS)
        self._h2.send_headers(http_id, [(":status", str(status)), *headers], end_stream=body == b"")
        if body:
            self._h2.send_data(http_id, body, end_stream=True)

    def stream_room_bytes(self, http_id: int) -> int:
        """Return how much the client's windows of a stream and of the connection let through."""
        return self._frames.room_bytes(http_id)

    def send(self, http_id: int, data: bytes) -> None:
        """Send a part of an answer, which has to fit a frame and the windows."""
        self._guard.earn(SENT_EARNS_UNITS)
        self._frames.put(http_id, data)

    def finish(self, http_id: int) -> None:
        """End an answer, if its request is still there and it has not ended yet."""
        stream = self._h2.streams.get(http_id)
        if http_id not in self._bodies or stream is None or self._is_broken:
            return
        if stream.state_machine.state in _OWN_SIDE_OPEN:
            self._h2.end_stream(http_id)

    def release(self, http_id: int) -> None:
        """End a stream at once, unless both ways have ended. Nobody is told of it any more."""
        if self._bodies.pop(http_id, None) is None:
            return
        if self._is_open(http_id):
            self._h2.reset_stream(http_id, h2.errors.ErrorCodes.CANCEL)

    def give_credit(self, http_id: int, credit_bytes: int) -> None:
        """Let the client send so much more: these bytes were used."""
        self._h2.acknowledge_received_data(credit_bytes, http_id)

    def go_away(self, error_code: int = NO_ERROR, *, last_stream_id: int = LAST_STREAM_MAX) -> None:
        """Say that no further streams are served. Those that are there go on."""
        self._raw += encode_goaway(last_stream_id, error_code)

    def break_off(self) -> None:
        """The connection is gone: nothing can be sent any more, and nothing is tried."""
        self._is_broken = True

    def lose(self) -> None:
        """The connection is gone: there is no more of any request."""
        bodies, self._bodies = tuple(self._bodies.values()), {}
        for body in bodies:
            body.on_reset()

    def receive(self, data: bytes) -> None:
        """Take bytes of the client, and tell whom they concern; only so much at a time, see `has_unread`.

        Raises ClientFailedError.
        """
        try:
            self._guard.begin_turn()
            passed, _ = self._splitter.feed(data)
        except FloodError as error:
            raise self._failed(ConnectionFault.FLOOD, str(error), ENHANCE_YOUR_CALM) from error
        except ProtocolViolationError as error:
            raise self._failed(ConnectionFault.PROTOCOL, str(error), _PROTOCOL_ERROR) from error
        try:
            events = self._h2.receive_data(passed)
        except h2.exceptions.ProtocolError as error:
            # The library has its own last words ready.
            raise ClientFailedError(ConnectionFault.PROTOCOL, f"HTTP/2: {type(error).__name__}") from error
        except Exception as error:
            # Whatever the libraries stumble over is what the client sent: text that is none, for one.
            raise self._failed(ConnectionFault.UNREADABLE, type(error).__name__, _PROTOCOL_ERROR) from error
        for event in events:
            self._tell(event)

    def _failed(self, fault: ConnectionFault, message: str, error_code: int) -> ClientFailedError:
        self.go_away(error_code, last_stream_id=self._h2.highest_inbound_stream_id)
        return ClientFailedError(fault, f"HTTP/2: {message}")

    def _is_open(self, http_id: int) -> bool:
        """Whether anything can be sent on a stream: one may have been reset before we are told of its request."""
        stream = self._h2.streams.get(http_id)
        return stream is not None and not stream.closed and not self._is_broken

    def _tell(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._data(event)
            case h2.events.RequestReceived():
                self._request(event)
            case h2.events.WindowUpdated(stream_id=http_id) if http_id in self._bodies:
                self._bodies[http_id].on_window()
            case h2.events.RemoteSettingsChanged(changed_settings=changed) if _WINDOW in changed:
                # What waits for the connection's window alone is in its turn anyway.
                for body in tuple(self._bodies.values()):
                    body.on_window()
            case h2.events.StreamEnded(stream_id=http_id) if http_id in self._bodies:
                self._bodies[http_id].on_end()
            case h2.events.StreamReset(stream_id=http_id) if http_id in self._bodies:
                self._bodies.pop(http_id).on_reset()

    def _request(self, event: h2.events.RequestReceived) -> None:
        http_id = event.stream_id or 0
        headers = {str(name): str(value) for name, value in event.headers or ()}
        body = self._requests.on_request(http_id, headers)
        if body is not None:
            self._bodies[http_id] = body

    def _data(self, event: h2.events.DataReceived) -> None:
        http_id, credit_bytes = event.stream_id or 0, event.flow_controlled_length or 0
        body = self._bodies.get(http_id)
        if body is not None:
            body.on_data(event.data or b"", credit_bytes)
        elif credit_bytes:
            self._h2.acknowledge_received_data(credit_bytes, http_id)
