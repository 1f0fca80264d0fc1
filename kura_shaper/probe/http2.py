"""HTTP/2 and gRPC as a client reads them: each stream asks for one object after the other."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.frame_buffer
import h2.settings
import hyperframe.frame

from kura_shaper.probe.failures import ClientError, Phase, Reason, translated
from kura_shaper.probe.request import Method

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from kura_shaper.probe.http1 import Sink
    from kura_shaper.probe.request import Request

# Below the size from which the allocator takes fresh pages for each piece, which costs half of the time.
_READ_BYTES = 65_536
# Nothing is kept of what comes, so the other side may send as much as it likes.
_WINDOW_BYTES = 2**30
_HEAD_BYTES_MAX = 65_536
_FRAME_HEAD_BYTES = 9
_NO_ERROR = h2.errors.ErrorCodes.NO_ERROR


def quieten_frames() -> None:
    """Let no DATA frame be spelled out. For the whole process, so only its entry points call this.

    h2 spells out each frame that it receives for a trace that nobody reads: 40 % of a client's time.
    """
    hyperframe.frame.DataFrame.__repr__ = object.__repr__  # type: ignore[method-assign]


def read_http2(peer: socket.socket, request: Request, sinks: Sequence[Sink]) -> None:
    """Let each sink's stream ask for one object after the other. Raises ClientError.

    Returns when no sink wants more, or when the other side wants another connection for it.
    """
    with translated(Phase.READING):
        _Session(peer, request).run(sinks)


class _Frames(h2.frame_buffer.FrameBuffer):
    """Frames as they come. h2 waits for the whole of one before it looks whether it may be that long."""

    _has_begun = False

    def __next__(self) -> hyperframe.frame.Frame:
        if len(self._data) >= _FRAME_HEAD_BYTES:
            if not self._has_begun and self._data[3] != hyperframe.frame.SettingsFrame.type:
                raise h2.exceptions.ProtocolError("the answer is no HTTP/2")
            self._has_begun = True
            self._validate_frame_length(int.from_bytes(self._data[:3], "big"))
        return super().__next__()


class _Connection(h2.connection.H2Connection):
    """h2 takes every GOAWAY for the end. One without an error lets go on what is open (RFC 9113, 6.8)."""

    def _receive_goaway_frame(
        self, frame: hyperframe.frame.GoAwayFrame
    ) -> tuple[list[hyperframe.frame.Frame], list[h2.events.Event]]:
        if frame.error_code != _NO_ERROR:
            return super()._receive_goaway_frame(frame)
        event = h2.events.ConnectionTerminated()
        event.error_code, event.last_stream_id = _NO_ERROR, frame.last_stream_id
        return [], [event]


class _Session:
    """One connection and the streams that it carries."""

    def __init__(self, peer: socket.socket, request: Request) -> None:
        self._peer, self._request = peer, request
        self._h2 = _Connection(h2.config.H2Configuration(header_encoding=None))
        self._h2.incoming_buffer = _Frames()
        codes = h2.settings.SettingCodes
        settings = {
            codes.ENABLE_PUSH: 0,
            codes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
            codes.MAX_HEADER_LIST_SIZE: _HEAD_BYTES_MAX,
        }
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self._streams: dict[int, Sink] = {}
        self._without_grpc_status: set[int] = set()
        self._is_leaving = False

    def run(self, sinks: Sequence[Sink]) -> None:
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW_BYTES)
        self._ask([sink for sink in sinks if sink.wants_more])
        buffer = memoryview(bytearray(_READ_BYTES))
        while self._streams:
            size_bytes = self._peer.recv_into(buffer)
            if not size_bytes:
                raise ClientError(Reason.RESET, "closed the connection")
            again = [
                sink
                for event in self._h2.receive_data(bytes(buffer[:size_bytes]))
                if (sink := self._handle(event)) is not None
            ]
            self._ask(again)
        self._h2.close_connection()
        self._send()

    def _ask(self, sinks: Sequence[Sink]) -> None:
        """Send a request for each sink, and whatever else waits to be sent."""
        asked = [] if self._is_leaving else sinks
        for sink in asked:
            stream = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream, self._request.http2(), end_stream=self._request.method is Method.GET)
            if self._request.method is Method.GRPC:
                self._h2.send_data(stream, self._request.body, end_stream=True)
                self._without_grpc_status.add(stream)
            self._streams[stream] = sink
        self._send()
        for sink in asked:
            sink.asked()

    def _send(self) -> None:
        if out := self._h2.data_to_send():
            self._peer.sendall(out)

    def _handle(self, event: h2.events.Event) -> Sink | None:
        """Take an event; return the sink whose object is whole when it wants another one."""
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            self._take(event.stream_id, len(event.data or b""))
        elif isinstance(event, h2.events.StreamEnded):
            return self._end(event.stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            with self._alone(event.stream_id):
                self._take_head(event)
        elif isinstance(event, h2.events.StreamReset):
            with self._alone(event.stream_id):
                raise ClientError(Reason.RESET, f"reset the stream: {_name(event.error_code)}")
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._leave(event)
        return None

    @contextmanager
    def _alone(self, stream: int) -> Iterator[None]:
        """What fails in the block is this stream, and not the connection that others are on."""
        try:
            yield
        except ClientError as error:
            sink = self._streams.get(stream)
            self._drop(stream)
            if sink is not None:
                sink.failed(error)

    def _take(self, stream: int, size_bytes: int) -> None:
        sink = self._streams.get(stream)
        if sink is None or not size_bytes:
            return
        sink.take(size_bytes)
        if not sink.wants_more:
            # It has had enough, most often in the middle of an object.
            self._drop(stream)

    def _drop(self, stream: int) -> None:
        if self._streams.pop(stream, None) is not None:
            with suppress(h2.exceptions.StreamClosedError):
                self._h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)

    def _end(self, stream: int) -> Sink | None:
        sink = self._streams.get(stream)
        if sink is None:
            return None
        with self._alone(stream):
            if stream in self._without_grpc_status:
                raise ClientError(Reason.PROTOCOL, "breaks the rules of gRPC: an end without a status")
            sink.ended()
            del self._streams[stream]
        return sink if sink.wants_more else None

    def _take_head(self, event: h2.events.ResponseReceived | h2.events.TrailersReceived) -> None:
        sink = self._streams.get(event.stream_id)
        if sink is None:
            return
        fields = {os.fsdecode(name): os.fsdecode(value) for name, value in event.headers or ()}
        if isinstance(event, h2.events.ResponseReceived):
            status = _number(fields.get(":status", ""))
            sink.answered(status)
            self._request.require_status(status)
        if self._request.method is Method.GRPC and "grpc-status" in fields:
            status = _number(fields["grpc-status"])
            self._without_grpc_status.discard(event.stream_id)
            sink.answered_grpc(status)
            self._request.require_grpc_status(status)

    def _leave(self, event: h2.events.ConnectionTerminated) -> None:
        """The other side wants to end the connection; what it has taken goes on."""
        self._is_leaving = True
        untaken = [stream for stream in self._streams if stream > (event.last_stream_id or 0)]
        if event.error_code != _NO_ERROR or untaken:
            raise ClientError(Reason.RESET, f"ended the connection: GOAWAY {_name(event.error_code)}")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 3):
        raise ClientError(Reason.PROTOCOL, f"breaks the rules of HTTP/2: status {text[:32]!r}")
    return int(text)


def _name(code: int | None) -> str:
    return code.name if isinstance(code, h2.errors.ErrorCodes) else str(code)
