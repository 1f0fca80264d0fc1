"""Events for other programs: whoever connects gets each event from then on, as one object of JSON in one line.

Nobody is held back for a client that reads too slowly, and nothing is left out for it either: it is cut off, and
counted. One that connects again begins with the next event, and sees by `missed_before` and the numbers what it lacks.
There is no login, so by default it is the loopback that is listened on.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.listening import Listening
from kura_shaper.broker.router.output import json_line
from kura_shaper.broker.router.seldom import SeldomLog
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from kura_shaper.broker.router.counts import RouterCounts
    from kura_shaper.broker.router.dynamo import Event
    from kura_shaper.broker.router.sequences import Arrival
    from kura_shaper.tenants.document import Endpoint

CLIENTS_MAX = 32
# What may wait for one client before the lines of one more turn.
WAITING_BYTES_MAX = 4 * MIB
# A client whose machine is gone is found out by the kernel, within a minute and a half.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
_CLOSE_WITHIN_S = 2.0
_log = logging.getLogger("kura_shaper.broker.router")


class CutOff(StrEnum):
    """Why a client was let go."""

    SLOW = "slow"
    TOO_MANY = "too_many"


class EventServer:
    """An output of events, from the event loop. Listens from `start` until `close`."""

    def __init__(self, listen: Endpoint, counts: RouterCounts) -> None:
        self.listen, self.counts = listen, counts
        self.clients: set[EventClient] = set()
        self._listening = Listening("serve", listen, seldom=SeldomLog())
        # What came in this turn of the event loop leaves together: a call of the kernel costs more than an event.
        self._lines: list[bytes] = []

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return self._listening.port

    async def start(self) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        await self._listening.start(lambda: EventClient(self), backlog=CLIENTS_MAX)
        if not ip_address(self.listen.host).is_loopback:
            log_event(_log, "events_open_to_the_network", level=logging.WARNING, listen=str(self.listen))

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput. Everybody who is there has it, so nothing is ever dropped here."""
        if self.clients:
            if not self._lines:
                asyncio.get_running_loop().call_soon(self._send)
            self._lines.append(json_line(event, endpoint, arrival, missed))
        return True

    def _send(self) -> None:
        data = b"".join(self._lines)
        self._lines.clear()
        for client in tuple(self.clients):
            client.send(data)

    def close(self) -> None:
        """Take no further clients, and let those that are there have what waits for them, if they take it soon."""
        self._listening.stop()
        self._send()
        for client in tuple(self.clients):
            client.close()


class EventClient(asyncio.Protocol):
    """One client: a protocol of asyncio. What it says is heard and means nothing."""

    def __init__(self, server: EventServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport
        if len(self._server.clients) >= CLIENTS_MAX:
            self._cut_off(CutOff.TOO_MANY)
            return
        made: socket.socket = transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        self._server.clients.add(self)
        self._server.counts.served_connections += 1

    def send(self, lines: bytes) -> None:
        """Send lines, or cut the client off."""
        if self._transport is None or not lines:
            return
        if self._transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self._cut_off(CutOff.SLOW)
        else:
            self._transport.write(lines)

    def close(self) -> None:
        """Let it have what waits, for a moment."""
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_WITHIN_S, self._transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        del error
        self._transport = None
        self._server.clients.discard(self)

    def _cut_off(self, why: CutOff) -> None:
        self._server.counts.served_cut_off[why] += 1
        self._server.clients.discard(self)
        if why is CutOff.SLOW:
            log_event(_log, "event_client_cut_off", level=logging.WARNING, reason=why)
        if self._transport is not None:
            self._transport.abort()
