"""A connection of the bus, from either end: TLS below, HTTP/2 above, and never more in between than is counted.

Everything happens in the event loop, and what there is to send is sent once per turn of it: what
came from many publishers in one turn leaves together. Nothing is put into the transport while
the transport is full, so what waits, waits where it is counted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kura_shaper.broker.http2 import ConnectionFailedError
from kura_shaper.broker.outbox import CONTROL_BYTES_MAX, Outbox
from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    from kura_shaper.broker.outbox import Http2End, Source
    from kura_shaper.broker.protocol.buffer import Budget

HttpT = TypeVar("HttpT", bound="Http2End")

# The transport takes one batch beyond its mark, and so does the one below it that TLS writes to: 256 KiB in all.
_BATCH_BYTES = 64 * KIB
_TRANSPORT_BYTES = 64 * KIB
# What is sent before publishers, timers and the peer are heard again: some milliseconds of work.
_TURN_BYTES = 1024 * KIB


class LinkOwner(Protocol):
    """Who is told of the connection."""

    def on_lost(self, error: ConnectionFailedError) -> None:
        """The connection is gone; told once."""

    def on_leaving(self) -> None:
        """The peer takes no further streams on it; told once."""

    def on_framed(self, framed_bytes: int) -> None:
        """So many bytes of data streams were put into frames."""


class BusLink(asyncio.Protocol, Generic[HttpT]):
    """A protocol of asyncio."""

    def __init__(self, http: HttpT, *, budget: Budget, owner: LinkOwner) -> None:
        self.http = http
        self.outbox = Outbox(http)
        self._budget, self._owner = budget, owner
        self._is_leaving = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._control = b""
        self._is_full = False
        self._is_due = False
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        transport.set_write_buffer_limits(high=_TRANSPORT_BYTES, low=_TRANSPORT_BYTES // 2)
        self.stir()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._is_lost:
            return
        try:
            self.http.receive(data)
        except ConnectionFailedError as error:
            self.fail(error)
        if self.http.is_leaving and not self._is_leaving:
            self._is_leaving = True
            self._owner.on_leaving()
        self.stir()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        why = f": {type(error).__name__}" if error else ""
        self.fail(ConnectionFailedError(f"the connection was closed{why}"))

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = False
        self.stir()

    def put(self, source: Source) -> None:
        """A data stream has something to send, or room for it."""
        self.outbox.put(source)
        self.stir()

    def say(self, data: bytes) -> None:
        """Say something on the session's stream."""
        self.outbox.put_session(data)
        self.stir()

    def stir(self) -> None:
        """Send what there is at the end of this turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._send)

    def send_now(self) -> None:
        """Send what there is, as far as it goes; the connection is about to be closed."""
        self._send()

    def fail(self, error: ConnectionFailedError) -> None:
        """Give the connection up."""
        if not self._is_lost:
            self._is_lost = True
            self.http.break_off()
            self._owner.on_lost(error)

    def close(self, *, within_s: float) -> None:
        """Close the connection in good order if that takes no longer, else at once."""
        self._is_lost = True
        if self._transport is not None:
            self._transport.close()
            # A peer that never answers close_notify, or reads nothing, would keep it for ever.
            self._loop.call_later(within_s, self._transport.abort)

    def _send(self) -> None:
        self._is_due = False
        if self._is_lost or self._transport is None:
            return
        sent_bytes = 0
        while not self._is_full:
            if sent_bytes >= _TURN_BYTES:
                self.stir()
                break
            framed_bytes = self.outbox.fill(_BATCH_BYTES)
            sent_bytes += framed_bytes
            self._owner.on_framed(framed_bytes)
            data = self.http.data_to_send()
            if self._control:
                data, self._control = self._control + data, b""
            if data:
                self._transport.write(data)
            if framed_bytes < _BATCH_BYTES:
                # Nothing else is ready, or the peer's windows are used up.
                break
        else:
            # The transport is full: what HTTP/2 itself has to say waits here.
            self._control += self.http.data_to_send()
        own_bytes = len(self._control) + self.outbox.session_bytes
        self._budget.outside_bytes = self._transport.get_write_buffer_size() + own_bytes
        if own_bytes > CONTROL_BYTES_MAX:
            self.fail(ConnectionFailedError("the peer takes nothing and keeps asking"))
