"""Where clients come in: a listener, and TLS with each of them, for so many at a time that there is a place for.

Whoever comes when there is none waits in the kernel, and costs nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from kura_shaper.broker.router.connection import BusConnection, shown_peer
from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from kura_shaper.broker.router.connection import ConnectionOwner
    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.tenants.document import Endpoint

_HANDSHAKE_WITHIN_S, _CLOSE_WITHIN_S = 10.0, 2.0
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.2
_log = logging.getLogger("kura_shaper.broker.router")


class Door:
    """A listener, from `open` until `close`."""

    def __init__(self, at: Endpoint, credentials: ServerCredentials, owner: ConnectionOwner, *, places: int) -> None:
        self._at, self._credentials, self._owner = at, credentials, owner
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(places)
        self._listener: socket.socket | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    def open(self) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        family = socket.AF_INET6 if ":" in self._at.host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self._at.host, self._at.port))
            made.listen(_BACKLOG)
        except OSError as error:
            made.close()
            words = f"listen {self._at}: {error.strerror}"
            raise UsageError(words, remedy="choose another address or port") from error
        self._listener = made

    def give_place_back(self) -> None:
        """A connection that came in is gone."""
        self._places.release()

    def close(self) -> None:
        """Let nobody in any more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def accept(self) -> None:
        """Take connections while there is a place, until it is cancelled."""
        try:
            while self._listener is not None:
                await self._places.acquire()
                try:
                    accepted, peer = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    # Without descriptors for a moment; whoever wants in waits as well.
                    self._places.release()
                    log_event(_log, "accept_failed", level=logging.WARNING, reason=error.strerror)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                task = self._loop.create_task(self._shake_hands(accepted, peer=shown_peer(peer)))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        finally:
            for task in self._handshakes:
                task.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _shake_hands(self, accepted: socket.socket, *, peer: str) -> None:
        connection = BusConnection(self._owner)
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._loop.connect_accepted_socket(
                lambda: connection.link,
                accepted,
                ssl=self._credentials.context,
                ssl_handshake_timeout=_HANDSHAKE_WITHIN_S,
                ssl_shutdown_timeout=_CLOSE_WITHIN_S,
            )
        except OSError as error:
            accepted.close()
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            self._owner.seldom.warn("tls_failed", peer=peer, reason=reason)
        finally:
            if not connection.was_made:
                self._owner.counts.connections_refused += 1
                self._places.release()
