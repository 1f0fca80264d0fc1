"""A client's session as the router has it: what was agreed, the streams that were asked for, how it ends.

Its streams are found by the session's id, whatever connection they come on: between a broker and a router there
may be a proxy that puts requests of one connection on another.
"""

from __future__ import annotations

import asyncio
import secrets
from random import Random
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.counts import count
from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.codes import RefusalCode, Role, label_of
from kura_shaper.broker.protocol.frames import Draining, StreamClosed, StreamOpened, StreamRefused
from kura_shaper.broker.protocol.limits import KIB, MIB, SECOND_NS
from kura_shaper.broker.protocol.router_session import Claim, RouterSession
from kura_shaper.broker.router.counts import (
    CLIENT_READS_NOTHING,
    CONNECTION_LOST,
    DRAINED,
    RouterCounts,
    TunnelEnding,
)
from kura_shaper.broker.router.tunnel import Consumer, Tunnel, TunnelEnd

if TYPE_CHECKING:
    from collections.abc import Collection

    from kura_shaper.broker.protocol.codes import DrainReason, SessionCode
    from kura_shaper.broker.protocol.frames import AnnouncedSource, Hello, Welcome, ZmqEndpoint
    from kura_shaper.broker.router.connection import BusConnection
    from kura_shaper.broker.router.seldom import SeldomLog

_ANNOUNCE = "announce"
# What may wait for a client that does not read: all the subscribes that it may be asked for at once, and more.
_OUT_BYTES_LEAST, _OUT_BYTES_A_STREAM = MIB, 2 * KIB
_CODE_SHOWN, _MESSAGE_SHOWN = 64, 256
_CLOSED_WITHIN_S, _LINGER_S = 5.0, 2.0


class SessionChooser(Protocol):
    """Who knows the sessions."""

    def choose(
        self, dynamo_namespace: str, *, role: Role = Role.BROKER, other_than: Collection[str] = ()
    ) -> ClientSession | None:
        """Return the session that covers a namespace and has the least to do, None when there is none.

        Of this role, and with another id than those.
        """
        ...


class SessionOwner(Protocol):
    """Who admits clients."""

    seldom: SeldomLog

    def on_greeted(self, session: ClientSession, hello: Hello) -> None:
        """A client says who it is: welcome it, or end it."""

    def on_leaving(self, session: ClientSession) -> None:
        """The client leaves: it takes no further subscribes."""

    def on_announced(self, session: ClientSession) -> None:
        """A kv_listener says that it has something new."""

    def on_session_over(self, session: ClientSession) -> None:
        """The session has ended, and its streams with it."""


class ClientSession:
    """It is the body of its request, and the source of what is said to the client."""

    def __init__(
        self,
        connection: BusConnection,
        http_id: int,
        *,
        owner: SessionOwner,
        counts: RouterCounts,
        max_streams: int,
        token_digest: bytes,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.connection: BusConnection = connection
        self.http_id = http_id
        self.counts, self._owner = counts, owner
        # Of the token that it was let in with.
        self.token_digest = token_digest
        self.id = secrets.token_hex(16)
        self.protocol = RouterSession(now_ns=self.now_ns, random=Random())  # noqa: S311 - it spreads heartbeats
        out_bytes_max = _OUT_BYTES_LEAST + max_streams * _OUT_BYTES_A_STREAM
        self.buffer = StreamBuffer(out_bytes_max, Budget(out_bytes_max))
        self.sent_bytes = 0
        self.began_s = self._loop.time()
        self.tunnels: dict[str, Tunnel] = {}
        # Of these, how many are only kept until another session has what they bring.
        self.moving = 0
        self.end_code = self.end_reason = ""
        # Why we asked the client to leave, and whether it said that it does.
        self._drained_for: DrainReason | None = None
        self._leaves = False
        self._has_overflown = self._is_finished = False
        # What a test's fault may take away.
        self.grants = self.beats = True
        self.stream_status: int | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._plan_tick()

    def now_ns(self) -> int:
        """The time of the event loop."""
        return int(self._loop.time() * SECOND_NS)

    @property
    def client_id(self) -> str:
        """Who it is, "" before its hello."""
        return self.protocol.hello.client_id if self.protocol.hello else ""

    @property
    def role(self) -> str:
        """What it is, "" before its hello."""
        return self.protocol.hello.role if self.protocol.hello else ""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The Dynamo namespaces that it covers."""
        return self.protocol.hello.dynamo_namespaces if self.protocol.hello else ()

    @property
    def load(self) -> int:
        """How many streams it has that are to stay."""
        return len(self.tunnels) - self.moving

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return bool(self.end_code)

    @property
    def takes_subscribes(self) -> bool:
        """Whether it is welcomed, does not leave, and has a place."""
        protocol, hello = self.protocol, self.protocol.hello
        if self.is_over or self._has_overflown or protocol.has_ended or protocol.is_draining:
            return False
        if hello is None or protocol.terms is None:
            return False
        return protocol.stream_count < min(protocol.terms.limits.max_streams, hello.limits.max_streams)

    def welcome(self, terms: Welcome) -> None:
        """Begin on these terms."""
        self.protocol.welcome(terms)
        self.counts.sessions += 1
        self.say()
        self._plan_tick()

    def subscribe(self, target: ZmqEndpoint | AnnouncedSource, consumer: Consumer) -> Tunnel:
        """Ask for a stream. Only while it `takes_subscribes`."""
        stream_id = self.protocol.subscribe(target)
        made = self.tunnels[stream_id] = Tunnel(stream_id, target, self, consumer)
        self.counts.subscribes += 1
        self.say()
        self._plan_tick()
        return made

    def unsubscribe(self, tunnel: Tunnel) -> None:
        """Say that a stream is not wanted any more."""
        if self.protocol.unsubscribe(tunnel.stream_id):
            self.say()

    def forget(self, tunnel: Tunnel) -> None:
        """A stream is over."""
        self.tunnels.pop(tunnel.stream_id, None)

    def expect_closed(self, tunnel: Tunnel) -> None:
        """The data stream has ended; a broker that does not say why loses its place anyway."""
        if not self.is_over and tunnel.stream_id in self.protocol.streams:
            self._loop.call_later(_CLOSED_WITHIN_S, self.unsubscribe, tunnel)

    def claim(self, stream_id: str) -> tuple[Claim, Tunnel | None]:
        """Return the answer to the request of a data stream, and the tunnel that it is for."""
        claim = self.protocol.claim(stream_id)
        return claim, self.tunnels.get(stream_id) if claim is Claim.ACCEPTED else None

    def drain(self, reason: DrainReason, deadline_ms: int) -> None:
        """Ask the client to leave."""
        if not self.protocol.has_ended and self.protocol.terms is not None:
            self._drained_for = reason
            self.protocol.drain(reason, deadline_ms)
            self.say()

    def fail(self, code: SessionCode, message: str, *, retry_after_ms: int | None = None) -> None:
        """End it, and tell the client why."""
        self.protocol.fail(code, message, retry_after_ms=retry_after_ms)
        self._over(code, message)

    def say(self) -> None:
        """Send what the protocol has to say."""
        if self.protocol.has_data_to_send:
            self.say_bytes(self.protocol.data_to_send())

    def say_bytes(self, data: bytes) -> None:
        """Send bytes as they are. When too much waits already the session ends, but not before the next turn.

        Whoever subscribes has to know of the stream before it is told that the stream ended.
        """
        if self._has_overflown:
            return
        if self.buffer.put(data):
            self.connection.link.put(self)
        else:
            self._has_overflown = True
            self._loop.call_soon(self._over, CLIENT_READS_NOTHING, "it takes nothing that it is told")

    # What HTTP/2 tells.

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """See Body."""
        if credit_bytes:
            self.connection.link.http.give_credit(self.http_id, credit_bytes)
        if not self.is_over:
            self._take(self.protocol.receive(data))

    def on_end(self) -> None:
        """See Body. In good order it is only when one of both had said so."""
        if self._drained_for is not None:
            self._over(self._drained_for, "it was asked to leave")
        elif self._leaves:
            self._over(DRAINED, "it left by itself")
        else:
            self._over(CONNECTION_LOST, "the client ended it without a word")

    def on_reset(self) -> None:
        """See Body."""
        leaving = " while it left" if self.protocol.is_draining else ""
        self._over(CONNECTION_LOST, f"{self.connection.why_lost or 'the client reset it'}{leaving}")

    def on_window(self) -> None:
        """See Body."""
        if self.buffer:
            self.connection.link.put(self)

    def on_drained(self) -> None:
        """See Source."""
        if self.is_over:
            self._finish()

    # What the protocol tells.

    def _take(self, told: tuple[events.Event, ...]) -> None:
        for event in told:
            if self.is_over:
                return
            self._take_one(event)
        self.say()
        self._plan_tick()

    def _take_one(self, event: events.Event) -> None:
        match event:
            case events.Greeted(hello=hello) if not self.protocol.has_ended:
                self._owner.on_greeted(self, hello)
            case StreamOpened() | events.FrameIgnored() | events.HeartbeatSeen():
                self._note(event)
            case StreamRefused():
                count(self.counts.refusals, event.code)
                self._warn_of(event.stream_id, event.code, event.message or "")
                end = TunnelEnd(TunnelEnding.REFUSED, event.code, event.retryable)
                self._end_tunnel(event.stream_id, end)
            case events.OpenExpired(stream_id=stream_id):
                self._warn_of(stream_id, TunnelEnding.EXPIRED, "it answered nothing")
                self._end_tunnel(stream_id, TunnelEnd(TunnelEnding.EXPIRED))
            case StreamClosed():
                count(self.counts.closes, event.code)
                if tunnel := self.tunnels.get(event.stream_id):
                    tunnel.on_closed(event.code)
            case Draining():
                self._leaves = True
                self._owner.on_leaving(self)
            case events.PeerFailed(error=error):
                self._over(error.code[:_CODE_SHOWN], f"the client says: {error.message[:_MESSAGE_SHOWN]}")
            case events.Failed(code=code, message=message):
                self._over(code, message)

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.FrameIgnored):
            self.counts.frames_ignored += 1
            if event.type == _ANNOUNCE and self.role == Role.KV_LISTENER:
                # What else such a frame says is not defined in this version.
                self._owner.on_announced(self)
        elif isinstance(event, events.HeartbeatSeen):
            self.counts.heartbeats_received += 1

    def _warn_of(self, stream_id: str, code: str, message: str) -> None:
        """Log a stream that did not come to be, the first of each code in a minute."""
        tunnel = self.tunnels.get(stream_id)
        self._owner.seldom.warn(
            "stream_refused",
            code if code == TunnelEnding.EXPIRED else label_of(code, RefusalCode),
            client_id=self.client_id,
            endpoint=str(tunnel.target) if tunnel else "",
            code=code[:_CODE_SHOWN],
            message=message[:_MESSAGE_SHOWN],
        )

    def _end_tunnel(self, stream_id: str, end: TunnelEnd) -> None:
        if tunnel := self.tunnels.get(stream_id):
            tunnel.over(end)

    # Ends.

    def _over(self, code: str, reason: str = "") -> None:
        if self.is_over:
            return
        self.end_code, self.end_reason = code, reason
        count(self.counts.session_ends, code)
        for tunnel in tuple(self.tunnels.values()):
            tunnel.over(TunnelEnd(TunnelEnding.SESSION_LOST))
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        # The last words first, and then the end of the answer.
        self.say()
        if self.buffer:
            self._loop.call_later(_LINGER_S, self._finish)
        else:
            self._finish()
        self._owner.on_session_over(self)

    def _finish(self) -> None:
        """End the answer: when the last words are framed, or when the client does not take them in time."""
        if self._is_finished:
            return
        self._is_finished = True
        link = self.connection.link
        link.outbox.remove(self)
        self.buffer.drop()
        link.http.finish(self.http_id)
        self._loop.call_later(_LINGER_S, self._release)
        link.stir()

    def _release(self) -> None:
        self.connection.link.http.release(self.http_id)
        self.connection.link.stir()
        self.connection.look_if_idle()

    # Time.

    def _plan_tick(self) -> None:
        due_ns = self.protocol.next_due_ns
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        if due_ns is not None and not self.is_over and self.beats:
            self._tick_timer = self._loop.call_at(due_ns / SECOND_NS, self._tick)

    def _tick(self) -> None:
        if not self.is_over and self.beats:
            self._take(self.protocol.tick())
