"""A broker's life: wait for the metadata, have a session, stay away as long as it takes, have the next one.

Never two sessions at once: the router allows one for each client id, and a second one would end
the streams of the first. A first signal lets streams finish and ends with 0; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import ssl
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from kura_shaper import __version__
from kura_shaper.broker import endings
from kura_shaper.broker.addresses import AddressFilter
from kura_shaper.broker.counts import Counts, DialOutcome, count
from kura_shaper.broker.credentials import CredentialError, Credentials
from kura_shaper.broker.dial import DialError, connect_any
from kura_shaper.broker.endings import Reaction, SessionEnd
from kura_shaper.broker.endpoint import PublisherAddress
from kura_shaper.broker.failures import FailedDials
from kura_shaper.broker.http2 import Http2Client
from kura_shaper.broker.opening import Publishers
from kura_shaper.broker.process import turns
from kura_shaper.broker.protocol.frames import Hello, Software
from kura_shaper.broker.protocol.limits import MS_NS, SECOND_NS, Limits
from kura_shaper.broker.protocol.reconnect import Reconnect, Wait
from kura_shaper.broker.refusals import RefusalLog, Targets
from kura_shaper.broker.resolve import ResolveError, Resolver
from kura_shaper.broker.security import Advertised, TargetCheck
from kura_shaper.broker.session import BusSession, SessionParts
from kura_shaper.errors import RefusedError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from random import Random

    from kura_shaper.broker.settings import BrokerSettings

_RESOLVE_WITHIN_S, _DIAL_WITHIN_S, _CONNECT_WITHIN_S, _CLOSE_WITHIN_S = 5.0, 10.0, 5.0, 2.0
_SLEPT_S = 1.0
_log = logging.getLogger("kura_shaper.broker")


def time_slept_s() -> float:
    """Return how long this machine has slept since it was started: what one clock counts of that and the other not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class Directory(Advertised, Protocol):
    """Who knows what is advertised, and keeps it current while it runs."""

    async def run(self) -> None:
        """Keep it current, for ever."""
        ...

    async def synced(self) -> None:
        """Return when every namespace was listed once."""
        ...


@dataclass(slots=True)
class View:
    """What the broker is doing, for whoever shows it."""

    is_synced: bool = False
    is_stopping: bool = False
    session: BusSession | None = None
    last_end: SessionEnd | None = None
    turned_s: float = field(default_factory=time.monotonic)


class OnTerminal(Enum):
    """What to do when only other settings will do."""

    STAY_AWAY = "stay away"
    GIVE_UP = "give up"


class Broker:
    """Runs until it is stopped. `stop` may be called at any time, from the event loop."""

    def __init__(
        self,
        settings: BrokerSettings,
        credentials: Credentials,
        directory: Directory,
        *,
        random: Random,
        resolver: Resolver | None = None,
        on_terminal: OnTerminal = OnTerminal.STAY_AWAY,
        targets: Targets = Targets.HASHED,
        start_within_s: float = 0.0,
        slept_s: Callable[[], float] = time_slept_s,
    ) -> None:
        """The first dial is made at some time within `start_within_s`, so that a fleet does not come as one."""
        self._settings, self._credentials, self._directory = settings, credentials, directory
        self._random, self._on_terminal = random, on_terminal
        self._loop = asyncio.get_running_loop()
        self.counts, self.view = Counts(), View()
        self._resolver = resolver or Resolver()
        self._refusals = RefusalLog(self.counts.refusals, now_ns=self.now_ns, targets=targets)
        self._failed = FailedDials(now_ns=self.now_ns)
        self._start_within_s = start_within_s
        self._reconnect = Reconnect(
            least_ns=settings.reconnect_least_ms * MS_NS, most_ns=settings.reconnect_most_ms * MS_NS, random=random
        )
        self._slept_s = slept_s
        self._stopping = asyncio.Event()
        self._instance_id = secrets.token_hex(16)
        self._used_token = ""

    def now_ns(self) -> int:
        """The time of the event loop."""
        return int(self._loop.time() * SECOND_NS)

    @property
    def max_streams(self) -> int:
        """How many streams are allowed now: by the settings, and by the router of a session."""
        session = self.view.session
        return session.protocol.limits.max_streams if session else self._settings.max_streams

    def stop(self) -> None:
        """Let streams finish, until the drain's deadline, and end."""
        self._stopping.set()
        self.view.is_stopping = True
        if self.view.session is not None and self.view.session.is_established:
            self.view.session.drain(self._settings.drain_deadline_ms)

    async def run(self) -> None:
        """Run until `stop`. Raises what ends the directory, MarkRefusedError, and with GIVE_UP RefusedError."""
        background = [self._loop.create_task(self._directory.run()), self._loop.create_task(self._measure_lag())]
        work = self._loop.create_task(self._work())
        try:
            done, _ = await asyncio.wait([work, background[0]], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (work, *background):
                task.cancel()
            await asyncio.gather(work, *background, return_exceptions=True)

    async def _work(self) -> None:
        if not await self._unless_stopped(self._directory.synced()):
            return
        self.view.is_synced = True
        log_event(_log, "metadata_synced")
        if self._start_within_s:
            await self._unless_stopped(asyncio.sleep(self._random.uniform(0, self._start_within_s)))
        while not self._stopping.is_set():
            end = await self._session()
            if self._stopping.is_set():
                return
            if end.is_terminal and self._on_terminal is OnTerminal.GIVE_UP:
                raise RefusedError(f"the router refused: {end.code}: {end.message}", remedy="change the settings")
            wait = self._wait_after(end)
            if wait is not None:
                count(self.counts.reconnects, wait.kind)
                self.counts.reconnect_wait_s = wait.duration_ns / SECOND_NS
                await self._unless_stopped(asyncio.sleep(wait.duration_ns / SECOND_NS))

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for something, or for the stop. Returns whether it came to an end by itself."""
        tasks: list[asyncio.Task[Any]] = [self._loop.create_task(work), self._loop.create_task(self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            return not self._stopping.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_after(self, end: SessionEnd) -> Wait | None:
        """Return how long to stay away, None for not at all."""
        match end.reaction:
            case Reaction.MOVE:
                return self._reconnect.after_rebalance(self.now_ns())
            case Reaction.LEAVE:
                return self._reconnect.after_drain()
            case Reaction.STAY_AWAY:
                return self._reconnect.after_refusal()
            case Reaction.LOG_IN_AGAIN:
                other = self._credentials.has_other_token(self._used_token)
                return None if other else self._reconnect.after_refusal()
        return self._reconnect.after_failure(retry_after_ns=end.retry_after_ns)

    # One session.

    async def _session(self) -> SessionEnd:
        session: BusSession | None = None
        began_ns = self.now_ns()
        try:
            token, context = self._credentials.current(self.counts)
            self._used_token = token
            session = self._new_session(token)
            end = await self._dial(session, context)
            if end is None:
                self.view.session = session
                session.start()
                end = await self._until_ended(session)
        except CredentialError as error:
            end = endings.not_dialled(DialOutcome.DIAL_FAILED, error.message)
        finally:
            self.view.session = None
            if session is not None:
                await session.close()
        self._note(end, session, lived_ns=self.now_ns() - (session.established_ns if session else began_ns))
        return end

    def _new_session(self, token: str) -> BusSession:
        settings = self._settings
        check = TargetCheck(
            frozenset(settings.dynamo_namespaces), self._directory, AddressFilter(settings.allowed_cidrs)
        )
        publishers = Publishers(
            check,
            self._resolver,
            settings.upstream_connect_timeout_ms / 1000,
            failed=self._failed,
            so_mark=settings.so_mark,
        )
        parts = SessionParts(
            hello=Hello(
                client_id=settings.client_id,
                instance_id=self._instance_id,
                kubernetes_namespace=settings.kubernetes_namespace,
                dynamo_namespaces=settings.dynamo_namespaces,
                limits=Limits(settings.max_streams, settings.max_stream_buffer_bytes),
                software=Software("kura-shaper", __version__),
            ),
            token=token,
            other_token=self._credentials.other_token,
            user_agent=f"kura-shaper/{__version__}",
            path_prefix=settings.bus_url.prefix,
            publishers=publishers,
            counts=self.counts,
            refusals=self._refusals,
            random=self._random,
            max_stream_rate=settings.max_stream_rate,
            deauthorise_after_s=None if settings.deauthorise_after_ms is None else settings.deauthorise_after_ms / 1000,
        )
        return BusSession(Http2Client(settings.bus_url.authority, max_streams=settings.max_streams), parts)

    async def _dial(self, session: BusSession, context: ssl.SSLContext) -> SessionEnd | None:
        """Connect a session's link. Returns why that failed, None when it did not."""
        stopping = self._loop.create_task(self._stopping.wait())
        dialling = self._loop.create_task(self._connect(session, context))
        try:
            await asyncio.wait([stopping, dialling], return_when=asyncio.FIRST_COMPLETED)
            if not dialling.done():
                return endings.stopped()
            dialling.result()
        except (ssl.SSLError, ssl.CertificateError) as error:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or type(error).__name__
            return endings.not_dialled(DialOutcome.TLS_FAILED, f"TLS: {reason}")
        except (ResolveError, DialError) as error:
            return endings.not_dialled(DialOutcome.DIAL_FAILED, str(error))
        except OSError as error:
            return endings.not_dialled(DialOutcome.DIAL_FAILED, error.strerror or "the time to connect is over")
        finally:
            for task in (stopping, dialling):
                task.cancel()
            await asyncio.gather(stopping, dialling, return_exceptions=True)
        return None

    async def _connect(self, session: BusSession, context: ssl.SSLContext) -> None:
        settings, url = self._settings, self._settings.bus_url
        async with asyncio.timeout(_RESOLVE_WITHIN_S):
            candidates = list(await self._resolver.resolve(_address(url.host, url.port)))
        # All brokers of a fleet would come back to the first address otherwise.
        self._random.shuffle(candidates)
        async with asyncio.timeout(_DIAL_WITHIN_S):
            made = await connect_any(candidates, so_mark=settings.so_mark, each_within_s=_CONNECT_WITHIN_S)
            try:
                transport, _ = await self._loop.create_connection(
                    lambda: session.link,
                    sock=made,
                    ssl=context,
                    server_hostname=settings.tls_server_name or url.host,
                    ssl_shutdown_timeout=_CLOSE_WITHIN_S,
                )
            except BaseException:
                made.close()
                raise
        chosen = transport.get_extra_info("ssl_object")
        if chosen is None or chosen.selected_alpn_protocol() != "h2":
            raise DialError("the router does not speak HTTP/2")

    async def _until_ended(self, session: BusSession) -> SessionEnd:
        """Return how a session ended. A stop before it is welcomed ends it at once, and after that drains it."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        either: list[asyncio.Future[Any]] = [stopping, session.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not session.ended.done() and not session.is_established:
                return endings.stopped()
            return await session.ended
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)

    def _note(self, end: SessionEnd, session: BusSession | None, *, lived_ns: int) -> None:
        self.view.last_end = end
        if session is not None and session.is_established:
            count(self.counts.session_ends, end.code)
            self._reconnect.session_lived(lived_ns)
            log_event(_log, "session_ended", code=end.code, reason=end.message, lived_s=lived_ns // SECOND_NS)
        elif end.dial is None:
            log_event(_log, "dial_given_up", reason=end.message)
        else:
            count(self.counts.dials, end.dial)
            log_event(_log, "dial_failed", level=logging.WARNING, outcome=end.dial, code=end.code, reason=end.message)
        self.view.last_end = end
        for code in self.counts.terminal_error:
            self.counts.terminal_error[code] = int(end.is_terminal and code == end.code)

    async def _measure_lag(self) -> None:
        """Note how late the loop is, and look after the session when the machine has slept: its router may be gone."""
        slept_s = self._slept_s()
        async for late_s in turns():
            self.view.turned_s = time.monotonic()
            self.counts.loop_lag_s = late_s
            before_s, slept_s = slept_s, self._slept_s()
            if slept_s - before_s > _SLEPT_S:
                log_event(_log, "slept", seconds=round(slept_s - before_s, 1))
                if self.view.session is not None:
                    self.view.session.probe()


def _address(host: str, port: int) -> PublisherAddress:
    """Return the router's address, which no metadata has to know."""
    try:
        return PublisherAddress(host, port, ipaddress.ip_address(host))
    except ValueError:
        return PublisherAddress(host, port, None)
