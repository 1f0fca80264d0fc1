"""A client's end of one HTTP/2 connection, without I/O: requests that wait for a place, bodies both ways.

It is the h2 library and what a tunnel needs beyond it: a GOAWAY that does not end live streams,
places on the connection that are given in the order in which they were asked for, credit that is given
back when bytes are used and not when they come, and a rest of the connection's window that
data can't use, so that the session's own frames get through when the router grants nothing.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

from kura_shaper.broker.data_frames import DataFrames
from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.goaway import NO_ERROR, FrameSplitter, GoAway
from kura_shaper.broker.protocol.limits import KIB, STREAM_WINDOW_BYTES, STREAMS_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

Header = tuple[str, str]

_FRAME_BYTES = 16 * KIB
_HEADER_LIST_BYTES = 16 * KIB
# Larger DATA frames cost less each, up to about here; and a frame is what other streams wait for.
_DATA_FRAME_BYTES_MAX = 64 * KIB
WINDOW_RESERVE_BYTES = 16 * KIB
_INITIAL_WINDOW_BYTES = 65_535
_PING = b"shaping."
_SETTINGS = 0x4
# Each may change the window of every stream, so thousands of them in one read cost a minute with thousands of streams.
SETTINGS_MAX = 32
_STATUS = re.compile("[1-5][0-9]{2}", re.ASCII)


class _Connection(h2.connection.H2Connection):
    """Remembers fewer streams that have ended, 150 bytes for each: a frame of one is late by seconds at most."""

    MAX_CLOSED_STREAMS = 2 * STREAMS_MAX


class _SettingsWatch:
    """Sees a flood of settings before the library works on it: no router changes them time and again."""

    is_enough = False

    def __init__(self) -> None:
        self.of_this_read = 0

    def on_frame(self, kind: int, flags: int, length_bytes: int) -> None:
        """See FrameWatch."""
        del flags, length_bytes
        self.of_this_read += kind == _SETTINGS
        if self.of_this_read > SETTINGS_MAX:
            raise ProtocolViolationError("the settings of HTTP/2 change time and again")


def _quieten() -> None:
    """Keep the libraries below from spelling things out."""
    # h2 has each frame that it receives described for a trace that nobody reads: 40 % of a relay's time.
    hyperframe.frame.DataFrame.__repr__ = object.__repr__  # type: ignore[method-assign]
    # At level debug hpack logs every header, the token among them.
    logging.getLogger("hpack").setLevel(logging.WARNING)


class ConnectionFailedError(Exception):
    """The connection can't be used any more; `goaway` is set when the router ended it so."""

    def __init__(self, message: str, *, is_goaway: bool = False) -> None:
        super().__init__(message)
        self.is_goaway = is_goaway


class Exchange(Protocol):
    """Who is told of one request."""

    def on_sent(self, http_id: int) -> None:
        """The request has a place, and its headers are on their way."""

    def on_response(self, status: int, headers: dict[str, str]) -> None:
        """The final response's head came."""

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """A part of its body came; give the credit back when it was used."""

    def on_end(self) -> None:
        """Its body is whole."""

    def on_reset(self, reason: str) -> None:
        """There will be no more of it."""

    def on_window(self) -> None:
        """There may be more room to send."""


class Http2Client:
    """Requests of one connection. `data_to_send` is what the library wants to send, headers and credit and all."""

    def __init__(self, authority: str, *, max_streams: int) -> None:
        _quieten()
        self._authority = authority
        self._h2 = _Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: _FRAME_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: _HEADER_LIST_BYTES,
            },
        )
        self._h2.decoder.max_header_list_size = _HEADER_LIST_BYTES
        self._h2.initiate_connection()
        # All streams may be ahead of their publishers by a whole window and the session still hears its router.
        self._h2.increment_flow_control_window((max_streams + 1) * STREAM_WINDOW_BYTES - _INITIAL_WINDOW_BYTES)
        self._frames = DataFrames(self._h2)
        self._watch = _SettingsWatch()
        self._splitter = FrameSplitter(max_frame_bytes=_FRAME_BYTES, watch=self._watch)
        self._exchanges: dict[int, Exchange] = {}
        self._waiting: OrderedDict[Exchange, list[Header]] = OrderedDict()
        self._knows_settings = False
        self._is_broken = False
        self._last_stream_id: int | None = None
        # How many pings were answered.
        self.pongs = 0

    @property
    def is_leaving(self) -> bool:
        """Whether the router said that it serves no further streams."""
        return self._last_stream_id is not None

    @property
    def data_room_bytes(self) -> int:
        """How much of the connection's window data streams may use."""
        return self._h2.outbound_flow_control_window - WINDOW_RESERVE_BYTES

    @property
    def frame_bytes_max(self) -> int:
        """The largest DATA frame to send."""
        return min(self._h2.max_outbound_frame_size, _DATA_FRAME_BYTES_MAX)

    def data_to_send(self) -> bytes:
        """Return what is to be sent, once."""
        return self._frames.take()

    def request(self, exchange: Exchange, path: str, headers: Sequence[Header]) -> None:
        """Send a request's headers when there is a place for it, in the order of asking."""
        head = [(":method", "POST"), (":scheme", "https"), (":authority", self._authority), (":path", path), *headers]
        self._waiting[exchange] = head
        self._give_places()

    def withdraw(self, exchange: Exchange) -> bool:
        """Ask for no place any more. Returns whether it was waited for."""
        return self._waiting.pop(exchange, None) is not None

    def stream_room_bytes(self, http_id: int) -> int:
        """Return how much the router's windows of a stream and of the connection let through; 0 of one that ended."""
        return self._h2.local_flow_control_window(http_id) if self._is_open(http_id) else 0

    def send(self, http_id: int, data: bytes) -> None:
        """Send a part of a body, which has to fit a frame and the windows."""
        self._frames.put(http_id, data)

    def finish(self, http_id: int) -> None:
        """End a body, if its exchange is still there."""
        if http_id in self._exchanges and self._is_open(http_id):
            self._h2.end_stream(http_id)

    def release(self, http_id: int) -> None:
        """End an exchange at once (CANCEL), unless both ways have ended. Nobody is told of it any more."""
        if self._exchanges.pop(http_id, None) is None:
            return
        if self._is_open(http_id):
            self._h2.reset_stream(http_id, h2.errors.ErrorCodes.CANCEL)
        self._give_places()

    def nudge(self, http_id: int) -> None:
        """Tell an exchange, if it is still there, that there may be more room to send."""
        if http_id in self._exchanges:
            self._exchanges[http_id].on_window()

    def ping(self) -> None:
        """Ask for an answer that every router gives, whatever else it does."""
        if not self._is_broken:
            self._h2.ping(_PING)

    def break_off(self) -> None:
        """The connection is gone: nothing can be sent any more, and nothing is tried."""
        self._is_broken = True

    def _is_open(self, http_id: int) -> bool:
        """Return whether a stream can still be written to.

        The library takes all frames of a read before it tells of the first: a stream may have ended
        that nobody was told of yet.
        """
        stream = self._h2.streams.get(http_id)
        return stream is not None and not stream.closed and not self._is_broken

    def give_credit(self, http_id: int, credit_bytes: int) -> None:
        """Let the router send so much more: these bytes were used."""
        self._h2.acknowledge_received_data(credit_bytes, http_id)

    def receive(self, data: bytes) -> None:
        """Take bytes of the router, and tell whom they concern. Raises ConnectionFailedError."""
        events, goaways = self._parsed(data)
        try:
            for event in events:
                self._tell(event)
            if goaways:
                self._go_away(goaways)
            if any(isinstance(event, h2.events.RemoteSettingsChanged) for event in events):
                # Once, however many there were: each would wake every stream.
                self._knows_settings = True
                for exchange in tuple(self._exchanges.values()):
                    exchange.on_window()
            self._give_places()
        except (h2.exceptions.H2Error, ProtocolViolationError) as error:
            raise self._broken(error) from error

    def _parsed(self, data: bytes) -> tuple[list[h2.events.Event], tuple[GoAway, ...]]:
        """Return what the bytes of the router say. Raises ConnectionFailedError."""
        try:
            self._watch.of_this_read = 0
            passed, goaways = self._splitter.feed(data)
            return self._h2.receive_data(passed), goaways
        # Not all that a hostile router can provoke in h2 and hpack is an error of theirs: UnicodeDecodeError is none.
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ConnectionFailedError:
        self.break_off()
        # What a library says may repeat what the router sent.
        why = error.message if isinstance(error, ProtocolViolationError) else type(error).__name__
        return ConnectionFailedError(f"HTTP/2: {why}")

    def _tell(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                self._data(event)
            case h2.events.WindowUpdated(stream_id=http_id) if http_id in self._exchanges:
                self._exchanges[http_id].on_window()
            case h2.events.ResponseReceived(stream_id=http_id) if http_id in self._exchanges:
                headers = {str(name): str(value) for name, value in event.headers}
                self._exchanges[http_id].on_response(_status(headers.get(":status", "")), headers)
            case h2.events.StreamEnded(stream_id=http_id) if http_id in self._exchanges:
                self._exchanges[http_id].on_end()
            case h2.events.PingAckReceived():
                self.pongs += 1
            case h2.events.StreamReset(stream_id=http_id) if http_id in self._exchanges:
                self._exchanges.pop(http_id).on_reset("the router reset the stream")

    def _data(self, event: h2.events.DataReceived) -> None:
        exchange = self._exchanges.get(event.stream_id or 0)
        credit_bytes = event.flow_controlled_length or 0
        if exchange is None:
            if credit_bytes:
                self._h2.acknowledge_received_data(credit_bytes, event.stream_id or 0)
            return
        exchange.on_data(event.data or b"", credit_bytes)

    def _go_away(self, told: tuple[GoAway, ...]) -> None:
        for goaway in told:
            if goaway.error_code != NO_ERROR:
                raise ConnectionFailedError(f"GOAWAY with error {goaway.error_code}", is_goaway=True)
        # All of them at once, since each would have every stream looked at.
        last = min(goaway.last_stream_id for goaway in told)
        self._last_stream_id = last if self._last_stream_id is None else min(last, self._last_stream_id)
        for http_id, exchange in tuple(self._exchanges.items()):
            if http_id > self._last_stream_id:
                del self._exchanges[http_id]
                exchange.on_reset("the router goes away")
        for exchange in tuple(self._waiting):
            del self._waiting[exchange]
            exchange.on_reset("the router goes away")

    def _give_places(self) -> None:
        # Before the router's settings are known, h2 counts with as many places as there are numbers.
        while self._waiting and not self.is_leaving and not self._is_broken and self._has_place():
            exchange, head = self._waiting.popitem(last=False)
            http_id = self._h2.get_next_available_stream_id()
            self._h2.send_headers(http_id, head)
            self._exchanges[http_id] = exchange
            exchange.on_sent(http_id)

    def _has_place(self) -> bool:
        if not self._knows_settings:
            return not self._exchanges  # the session itself may go first
        return self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams


def _status(text: str) -> int:
    """Return a status. Raises ProtocolViolationError for what is none (RFC 9110, section 15)."""
    if not _STATUS.fullmatch(text):
        raise ProtocolViolationError("an answer has no status")
    return int(text)
