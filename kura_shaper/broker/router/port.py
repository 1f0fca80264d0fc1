"""A publisher as a local TCP port: whoever connects there is, byte for byte, connected to the publisher.

So an unmodified ZeroMQ subscriber reads a publisher that it has no route to. Each connection is a stream of its own,
and a reader that is slow slows only that stream down, by credit that is not given.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.limits import KIB
from kura_shaper.broker.router.listening import Listening
from kura_shaper.broker.router.session import SessionChooser

if TYPE_CHECKING:
    from kura_shaper.broker.router.counts import RouterCounts
    from kura_shaper.broker.router.seldom import SeldomLog
    from kura_shaper.broker.router.settings import Subscription
    from kura_shaper.broker.router.tunnel import Tunnel, TunnelEnd
    from kura_shaper.tenants.document import Endpoint

CONNECTIONS_MAX = 64
_OUT_BYTES = 64 * KIB
_CLOSE_WITHIN_S = 5.0
# A ZeroMQ socket whose connection is closed comes back within 0.1 s, for ever.
_REFUSE_AFTER_S = 1.0


class PortOwner(SessionChooser, Protocol):
    """Who has the port."""

    counts: RouterCounts
    seldom: SeldomLog


class LocalPort:
    """Listens until it is closed."""

    def __init__(self, wanted: Subscription, listen: Endpoint, owner: PortOwner) -> None:
        self.wanted, self.listen, self.owner = wanted, listen, owner
        self.connections: set[LocalConnection] = set()
        self._listening = Listening("expose", listen, seldom=owner.seldom)

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return self._listening.port

    def want(self, wanted: Subscription) -> None:
        """Expose this from now on. Whoever is connected to another publisher has to come again."""
        before, self.wanted = self.wanted, wanted
        if before.target != wanted.target:
            for connection in tuple(self.connections):
                connection.abort()

    async def start(self) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        await self._listening.start(lambda: LocalConnection(self), backlog=CONNECTIONS_MAX)

    def stop(self) -> None:
        """Take no further connections."""
        self._listening.stop()

    def close(self) -> None:
        """Take none, and end those that are there."""
        self.stop()
        for connection in tuple(self.connections):
            connection.abort()


class LocalConnection(asyncio.Protocol):
    """One of them: a protocol of asyncio, and the consumer of its tunnel."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tunnel: Tunnel | None = None
        # The sessions that did not have it.
        self._asked: set[str] = set()
        self._owed_bytes = 0
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        transport.set_write_buffer_limits(high=_OUT_BYTES)
        if len(self._port.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return
        self._port.connections.add(self)
        self._port.owner.counts.local_connections += 1
        transport.pause_reading()
        self._ask()

    def _ask(self) -> None:
        wanted = self._port.wanted
        session = self._port.owner.choose(wanted.dynamo_namespace, role=wanted.role, other_than=self._asked)
        if session is None:
            self._refuse()
        else:
            self._asked.add(session.id)
            self._tunnel = session.subscribe(wanted.target, self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._tunnel is None or self._transport is None:
            return
        if not self._tunnel.send(data):
            self._transport.abort()
        elif self._tunnel.buffer.length_bytes >= _OUT_BYTES:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_full = False
        self._give_credit()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        del error
        self._transport = None
        self._port.connections.discard(self)
        self._give_credit()
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def on_open(self) -> None:
        """See Consumer."""
        if self._transport is not None:
            self._transport.resume_reading()

    def on_bytes(self, data: bytes, credit_bytes: int) -> None:
        """See Consumer."""
        self._owed_bytes += credit_bytes
        if self._transport is not None:
            self._transport.write(data)
        if not self._is_full:
            self._give_credit()

    def on_sent(self) -> None:
        """See Consumer."""
        if self._transport is not None:
            self._transport.resume_reading()

    def on_over(self, end: TunnelEnd) -> None:
        """See Consumer."""
        tunnel = self._tunnel
        self._give_credit()
        self._tunnel = None
        if self._transport is not None and tunnel is not None and not tunnel.http_id:
            # Another broker may have it.
            self._ask()
        elif end.code:
            self._refuse()
        elif self._transport is not None:
            self._close()

    def _refuse(self) -> None:
        self._loop.call_later(_REFUSE_AFTER_S, self._close)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_CLOSE_WITHIN_S, self.abort)

    def _give_credit(self) -> None:
        owed_bytes, self._owed_bytes = self._owed_bytes, 0
        if owed_bytes and self._tunnel is not None:
            self._tunnel.give_credit(owed_bytes)
