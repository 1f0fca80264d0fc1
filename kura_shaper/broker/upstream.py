"""A publisher's socket: read all the time, whatever becomes of the bytes, and written to as far as it takes.

A publisher of ZeroMQ that is not read drops messages at its high-water mark and says nothing, so it is
never held back here: what can't be kept ends the stream, and the router subscribes again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    import socket

# With what Python and malloc put before it, a piece of this size is 64 KiB, and what one leaves is where the next fits.
_READ_BYTES_MAX = 64 * KIB - 64
_CLOSE_WITHIN_S = 5.0
# All of them are read in one loop, one after the other, and what was read is copied out at once.
_shared = memoryview(bytearray(_READ_BYTES_MAX))


class UpstreamOwner(Protocol):
    """Who is told of a publisher's socket."""

    def on_upstream_data(self, piece: bytes) -> None:
        """The publisher sent something."""

    def on_upstream_end(self) -> None:
        """The publisher sends no more; told once or more often."""

    def on_credit(self, credit_bytes: int) -> None:
        """So many bytes of the router are the kernel's now."""


class Upstream(asyncio.BufferedProtocol):
    """A protocol of asyncio. A piece is never more than half of what a stream may keep, so that a first one fits."""

    def __init__(self, owner: UpstreamOwner, *, buffer_bytes: int) -> None:
        # None when it was told of the end: each would keep the other alive until somebody collects such pairs.
        self._owner: UpstreamOwner | None = owner
        self._view = _shared[: min(_READ_BYTES_MAX, buffer_bytes // 2)]
        self._transport: asyncio.Transport | None = None
        self._credit_bytes = 0
        self._is_full = False
        self._closing: asyncio.TimerHandle | None = None

    async def attach(self, made: socket.socket) -> None:
        """Take a connected socket over, and read from it at once."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=made)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BufferedProtocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        # Told when the last byte is the kernel's: only then the router may send more.
        transport.set_write_buffer_limits(high=0)

    def get_buffer(self, _: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        if self._owner is not None:
            self._owner.on_upstream_data(bytes(self._view[:nbytes]))

    def eof_received(self) -> bool:
        """See asyncio.BufferedProtocol."""
        if self._owner is not None:
            self._owner.on_upstream_end()
        return True

    def connection_lost(self, _: Exception | None) -> None:
        """See asyncio.BufferedProtocol."""
        self._transport = None
        self._give_credit()
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.on_upstream_end()
        if self._closing is not None:
            self._closing.cancel()

    def pause_writing(self) -> None:
        """See asyncio.BufferedProtocol."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See asyncio.BufferedProtocol."""
        self._is_full = False
        self._give_credit()

    def write(self, data: bytes, credit_bytes: int) -> None:
        """Pass bytes of the router on; their credit comes back when the kernel has them."""
        self._credit_bytes += credit_bytes
        if self._transport is not None:
            self._transport.write(data)
        if not self._is_full:
            self._give_credit()

    def close(self) -> None:
        """Let the publisher go when it has what was written to it, or after a while."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._closing = asyncio.get_running_loop().call_later(_CLOSE_WITHIN_S, self.abort)

    def abort(self) -> None:
        """Let the publisher go at once."""
        if self._transport is not None:
            self._transport.abort()

    def _give_credit(self) -> None:
        credit_bytes, self._credit_bytes = self._credit_bytes, 0
        if credit_bytes and self._owner is not None:
            self._owner.on_credit(credit_bytes)
