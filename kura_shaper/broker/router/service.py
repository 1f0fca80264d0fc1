"""A router's life: listen, admit clients, keep what is wanted subscribed on the brokers that are there, and leave.

There is one session for each client id: a newcomer's counts, and the one before it ends as superseded. What a session
had is asked of another one in the same turn. A first signal asks every client to leave and ends with 0 when
they have, or at the deadline; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kura_shaper.broker.process import turns
from kura_shaper.broker.protocol.buffer import Budget
from kura_shaper.broker.protocol.codes import DrainReason, Role, SessionCode, label_of
from kura_shaper.broker.protocol.frames import Welcome, WelcomeLimits
from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.counts import RouterCounts
from kura_shaper.broker.router.door import Door
from kura_shaper.broker.router.faults import plan_faults
from kura_shaper.broker.router.output import AllOutputs
from kura_shaper.broker.router.rebalance import Rebalance
from kura_shaper.broker.router.seldom import SeldomLog
from kura_shaper.broker.router.serving import EventServer
from kura_shaper.broker.router.wanted import Wanted
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from random import Random

    from kura_shaper.broker.metadata import Publisher
    from kura_shaper.broker.protocol.frames import Hello
    from kura_shaper.broker.router.connection import BusConnection
    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.broker.router.feed import Feed
    from kura_shaper.broker.router.output import EventOutput
    from kura_shaper.broker.router.port import LocalPort
    from kura_shaper.broker.router.session import ClientSession
    from kura_shaper.broker.router.settings import RouterSettings, Subscription

_RELOAD_EVERY_S = 10.0
_RETRY_AFTER_MS = 5_000
# Beside a connection for each session: those that are only just coming, or going.
SPARE_CONNECTIONS = 32
# What the parts of messages and the events that are held back may take, of all publishers together.
_KEPT_BYTES_MAX = 256 * MIB
_log = logging.getLogger("kura_shaper.broker.router")


class EventBus:
    """Runs until it is stopped. `stop` may be called at any time, from the event loop."""

    def __init__(
        self, settings: RouterSettings, credentials: ServerCredentials, *, output: EventOutput, random: Random
    ) -> None:
        self.settings, self._credentials = settings, credentials
        self.counts = RouterCounts()
        self.served = EventServer(settings.serve, self.counts) if settings.serve else None
        self.output: EventOutput = AllOutputs(output, self.served) if self.served else output
        self.random = random
        self.max_message_bytes = settings.max_message_bytes
        self.kept = Budget(_KEPT_BYTES_MAX)
        self._loop = asyncio.get_running_loop()
        self.seldom = SeldomLog(now_s=self._loop.time)
        self.by_client: dict[str, ClientSession] = {}
        self._by_id: dict[str, ClientSession] = {}
        self._connections: set[BusConnection] = set()
        self._wanted = Wanted(settings.subscriptions, self)
        self._rebalancing: asyncio.Task[None] | None = None
        places = settings.max_sessions + SPARE_CONNECTIONS
        self._door = Door(settings.listen, credentials, self, places=places)
        self._stopping = asyncio.Event()
        self._emptied = asyncio.Event()
        self.turned_s = time.monotonic()

    # As connections and sessions see it.

    @property
    def is_stopping(self) -> bool:
        """Whether it leaves."""
        return self._stopping.is_set()

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """The publishers that are to be read."""
        return self._wanted.feeds

    @property
    def ports(self) -> tuple[LocalPort, ...]:
        """The publishers that are local ports."""
        return self._wanted.ports

    @property
    def feeds_beyond(self) -> int:
        """How many publishers are advertised, and not read since there are as many as may be."""
        return self._wanted.beyond

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return self._door.port

    @property
    def strangers(self) -> int:
        """How many connections have shown no token yet."""
        return self._door.strangers

    def is_allowed(self, token: str) -> bool:
        """See ConnectionOwner."""
        return self._credentials.is_allowed(token)

    def why_not_now(self) -> SessionCode | None:
        """See ConnectionOwner."""
        return SessionCode.SHUTDOWN if self.is_stopping else None

    def session_of(self, session_id: str) -> ClientSession | None:
        """See ConnectionOwner."""
        return self._by_id.get(session_id)

    def on_connected(self, connection: BusConnection) -> bool:
        """See ConnectionOwner."""
        self._connections.add(connection)
        return not self.is_stopping

    def on_admitted(self, connection: BusConnection) -> bool:
        """See ConnectionOwner."""
        return self._door.admit(connection)

    def on_disconnected(self, connection: BusConnection) -> None:
        """See ConnectionOwner."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._door.forget(connection)

    def on_greeted(self, session: ClientSession, hello: Hello) -> None:
        """See SessionOwner."""
        if hello.role not in list(Role):
            session.fail(SessionCode.INVALID_HELLO, "there is no such role here")
            return
        if self.is_stopping:
            session.fail(SessionCode.SHUTDOWN, "the router leaves", retry_after_ms=_RETRY_AFTER_MS)
            return
        before = self.by_client.get(hello.client_id)
        if before is None and len(self.by_client) >= self.settings.max_sessions:
            session.fail(
                SessionCode.OVERLOADED, "there are all the clients that may be", retry_after_ms=_RETRY_AFTER_MS
            )
            return
        # The newcomer is there before the one before it goes: what that had is asked of it at once.
        self.by_client[hello.client_id] = self._by_id[session.id] = session
        session.welcome(self._terms(session))
        log_event(
            _log,
            "session_began",
            client_id=hello.client_id,
            instance_id=hello.instance_id,
            peer=session.connection.peer,
            role=hello.role,
            namespaces=hello.dynamo_namespaces,
        )
        if before is not None:
            before.fail(SessionCode.SUPERSEDED, "this client id is connected elsewhere")
        plan_faults(self.settings.faults, session)
        self._share_out()

    def on_leaving(self, session: ClientSession) -> None:
        """See SessionOwner."""
        log_event(_log, "client_leaves", client_id=session.client_id)
        self._move_away(session)

    def on_announced(self, session: ClientSession) -> None:
        """See SessionOwner. A source that nobody had may be there now."""
        for feed in self.feeds:
            if feed.wanted.source and feed.wanted.dynamo_namespace in session.namespaces:
                feed.place()

    def on_session_over(self, session: ClientSession) -> None:
        """See SessionOwner."""
        hello = session.protocol.hello
        told: dict[str, Any] = {
            "client_id": session.client_id,
            "instance_id": hello.instance_id if hello else "",
            "peer": session.connection.peer,
            "code": session.end_code,
            "reason": session.end_reason,
        }
        if self._by_id.pop(session.id, None) is None:
            self.seldom.warn("session_refused", label_of(session.end_code, SessionCode), **told)
            return
        if self.by_client.get(session.client_id) is session:
            del self.by_client[session.client_id]
        log_event(_log, "session_ended", **told)
        self._share_out()
        if not self._by_id:
            self._emptied.set()

    def choose(
        self, dynamo_namespace: str, *, role: Role = Role.BROKER, other_than: Collection[str] = ()
    ) -> ClientSession | None:
        """See SessionChooser."""
        found = [
            session
            for session in self.by_client.values()
            if session.id not in other_than
            and session.role == role
            and session.takes_subscribes
            and dynamo_namespace in session.namespaces
        ]
        if self.is_stopping or not found:
            return None
        return min(found, key=lambda session: (session.load, session.client_id))

    def drain(self, session: ClientSession, reason: DrainReason) -> None:
        """Ask one client to leave; what it had is read over others first where there are any."""
        session.drain(reason, self.settings.drain_deadline_ms)
        self._move_away(session)

    def read_discovered(self, advertised: Mapping[Publisher, tuple[str, ...]]) -> None:
        """See discovery.Reader."""
        if not self.is_stopping:
            self._wanted.discover(advertised)

    def rebalance(self) -> None:
        """Ask every broker to come anew, in their turn; asked again meanwhile, it goes on as it is."""
        if self.is_stopping or (self._rebalancing is not None and not self._rebalancing.done()):
            log_event(_log, "rebalance_not_begun", reason="it leaves" if self.is_stopping else "one is under way")
            return
        self._rebalancing = self._loop.create_task(Rebalance(self).run())

    async def want(self, subscriptions: Sequence[Subscription]) -> None:
        """Read and expose these from now on. Raises UsageError when an address can't be had: nothing changed then."""
        if not self.is_stopping:
            await self._wanted.change(subscriptions)

    def _terms(self, session: ClientSession) -> Welcome:
        settings = self.settings
        return Welcome(
            session_id=session.id,
            limits=WelcomeLimits(settings.max_streams, settings.max_stream_buffer_bytes),
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            idle_timeout_ms=settings.idle_timeout_ms,
        )

    def _move_away(self, session: ClientSession) -> None:
        for feed in self.feeds:
            if feed.session is session:
                feed.move()

    def _share_out(self) -> None:
        """Place what has no broker, or one that leaves, and give a newcomer its share of the rest."""
        for feed in self.feeds:
            feed.place()
        for feed in self.feeds:
            busy, wanted = feed.session, feed.wanted
            if busy is None:
                continue
            idle = self.choose(wanted.dynamo_namespace, role=wanted.role, other_than=(busy.id,))
            if idle is not None and busy.load - idle.load > 1:
                feed.move()

    # Life.

    def stop(self) -> None:
        """Ask every client to leave, and end when they have or at the deadline."""
        self._stopping.set()

    async def run(self, started: asyncio.Event | None = None) -> None:
        """Run until `stop`. Raises UsageError when an address can't be had."""
        self._door.open()
        background = [self._loop.create_task(each) for each in (self._measure_lag(), self._reload())]
        accepting: asyncio.Task[None] | None = None
        try:
            await self._wanted.start()
            if self.served is not None:
                await self.served.start()
            accepting = self._loop.create_task(self._door.accept())
            if started is not None:
                started.set()
            stopping = self._loop.create_task(self._stopping.wait())
            background.append(stopping)  # type: ignore[arg-type]
            await asyncio.wait([accepting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
            # Before its listener is closed, whose descriptor somebody else may have then.
            accepting.cancel()
            await asyncio.wait([accepting])
            await self._leave()
        finally:
            others = [each for each in (accepting, self._rebalancing) if each is not None]
            tasks = [*background, *others]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._close()

    async def _leave(self) -> None:
        self._door.close()
        for session in tuple(self._by_id.values()):
            session.drain(DrainReason.SHUTDOWN, self.settings.drain_deadline_ms)
        self._wanted.stop()
        log_event(_log, "draining", sessions=len(self._by_id))
        self._emptied.clear()
        if self._by_id:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_deadline_ms / 1000):
                    await self._emptied.wait()

    def _close(self) -> None:
        self._door.close()
        self._wanted.close()
        if self.served is not None:
            self.served.close()
        for session in tuple(self._by_id.values()):
            session.fail(SessionCode.SHUTDOWN, "the router ends")
        for connection in tuple(self._connections):
            connection.link.send_now()
            connection.link.abort()

    async def _measure_lag(self) -> None:
        async for late_s in turns():
            self.turned_s = time.monotonic()
            self.counts.loop_lag_s = late_s

    async def _reload(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_EVERY_S)
            self._credentials.reload(self.counts)
            if not self.is_stopping:
                self._wanted.look_for_brokers()
