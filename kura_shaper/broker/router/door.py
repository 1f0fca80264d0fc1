"""Where clients come in: a listener, TLS with each of them, and the places that they have.

Whoever comes is a stranger, with a place among few, until a token of its own is accepted; those that were let in have
places that no stranger can take.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from kura_shaper.broker.router.connection import BusConnection, shown_peer
from kura_shaper.broker.router.listening import accept_each, listen_on
from kura_shaper.broker.router.strangers import STRANGER_WITHIN_S, Stranger, Strangers, source_of

if TYPE_CHECKING:
    from kura_shaper.broker.router.connection import ConnectionOwner
    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.tenants.document import Endpoint

_CLOSE_WITHIN_S = 2.0
_BACKLOG = 1_024


class Door:
    """A listener, from `open` until `close`. `places` are for clients that were let in."""

    def __init__(
        self,
        at: Endpoint,
        credentials: ServerCredentials,
        owner: ConnectionOwner,
        *,
        places: int,
    ) -> None:
        self._at, self._credentials, self._owner = at, credentials, owner
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._strangers = Strangers(owner.seldom)
        self._known: dict[BusConnection, Stranger] = {}
        self._admitted: set[BusConnection] = set()

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    @property
    def strangers(self) -> int:
        """How many have a place that have not shown a token."""
        return len(self._strangers)

    def open(self) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        self._listener = listen_on("listen", self._at, backlog=_BACKLOG)

    def admit(self, connection: BusConnection) -> bool:
        """A connection showed a token. Returns whether there is a place for it."""
        if connection not in self._admitted and len(self._admitted) >= self._places:
            return False
        self.forget(connection)
        self._admitted.add(connection)
        return True

    def forget(self, connection: BusConnection) -> None:
        """A connection is gone, or was never made."""
        self._admitted.discard(connection)
        stranger = self._known.pop(connection, None)
        if stranger is not None:
            self._strangers.discard(stranger)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def accept(self) -> None:
        """Take connections while there is a place, until it is cancelled."""
        if self._listener is None:
            return
        try:
            await accept_each(self._listener, self._take, seldom=self._owner.seldom)
        finally:
            for task in self._handshakes:
                task.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _take(self, accepted: socket.socket, address: tuple[Any, ...]) -> None:
        source = source_of(str(address[0]))
        try:
            has_room = await self._strangers.make_room(source)
        except asyncio.CancelledError:
            accepted.close()
            raise
        if not has_room:
            self._owner.counts.connections_refused += 1
            accepted.close()
            return
        connection = BusConnection(self._owner, peer=shown_peer(address))
        task = self._loop.create_task(self._shake_hands(accepted, connection))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        self._known[connection] = self._strangers.add(source, lambda: self._cut(connection, task))

    def _cut(self, connection: BusConnection, handshake: asyncio.Task[None]) -> None:
        self._known.pop(connection, None)
        if handshake.done():
            self._owner.counts.connections_refused += 1
            connection.link.abort()
        else:
            handshake.cancel()

    async def _shake_hands(self, accepted: socket.socket, connection: BusConnection) -> None:
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._loop.connect_accepted_socket(
                lambda: connection.link,
                accepted,
                ssl=self._credentials.context,
                ssl_handshake_timeout=STRANGER_WITHIN_S,
                ssl_shutdown_timeout=_CLOSE_WITHIN_S,
            )
        except OSError as error:
            accepted.close()
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            self._owner.seldom.warn("tls_failed", peer=connection.peer, reason=reason)
        finally:
            if not connection.was_made:
                self._owner.counts.connections_refused += 1
                self.forget(connection)
