"""One session with the router, from its request to its end, and the streams that live in it.

All of it shares one connection: when that is gone, so is everything. The session ends by itself only
after its streams: a drain, ours or the router's, waits for them until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.broker import endings
from kura_shaper.broker.counts import Counts, DialOutcome, StreamEnd, count
from kura_shaper.broker.deauthorise import LOOK_EVERY_S, end_what_left
from kura_shaper.broker.link import BusLink
from kura_shaper.broker.outbox import Outbox
from kura_shaper.broker.pace import Paced
from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.broker_session import BrokerSession
from kura_shaper.broker.protocol.buffer import Budget
from kura_shaper.broker.protocol.codes import CloseCode, SessionCode
from kura_shaper.broker.protocol.limits import KIB, MEDIA_TYPE, SECOND_NS, SESSION_PATH
from kura_shaper.broker.relay import Relay
from kura_shaper.broker.security import StreamRefusedError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from kura_shaper.broker.endings import SessionEnd
    from kura_shaper.broker.http2 import ConnectionFailedError, Http2Client
    from kura_shaper.broker.opening import Publishers
    from kura_shaper.broker.protocol.frames import Hello
    from kura_shaper.broker.protocol.limits import Limits
    from kura_shaper.broker.refusals import RefusalLog
    from kura_shaper.units import Rate

_HEAD_WITHIN_S = 10.0
_CLOSE_WITHIN_S = 2.0
_PROBE_WITHIN_S = 5.0
_BODY_BYTES_MAX = 4 * KIB
# A timer that comes this late says that we were held up, not that the router is silent.
_LATE_S, _HEAR_OUT_S = 1.0, 0.05
_OK = 200
_SHOWN = 256
_log = logging.getLogger("kura_shaper.broker")


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session is made of beside its connection."""

    hello: Hello
    token: str
    other_token: Callable[[str], str | None]
    """Returns the token as it is now when it is not this one."""
    user_agent: str
    path_prefix: str
    publishers: Publishers
    counts: Counts
    refusals: RefusalLog
    random: Random
    deauthorise_after_s: float | None = None
    max_stream_rate: Rate | None = None


class BusSession:
    """Runs when its link is connected. `ended` is done with how it ended."""

    def __init__(self, http: Http2Client, parts: SessionParts) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts, self.counts = parts, parts.counts
        self.budget = Budget()
        self.link = BusLink(http, budget=self.budget, owner=self)
        self._paced: Paced | None = None
        if parts.max_stream_rate is not None:
            self._paced = Paced(
                http, parts.max_stream_rate, now_s=self._loop.time, call_later=self._loop.call_later, wake=http.nudge
            )
            self.link.outbox = Outbox(self._paced)
        self.protocol = BrokerSession(
            parts.hello, now_ns=self.now_ns, random=parts.random, buffered_bytes=lambda: self.buffered_bytes
        )
        self.headers: list[tuple[str, str]] = []
        self.relays: dict[str, Relay] = {}
        self.established_ns = 0
        self._session_id = ""
        self.ended: asyncio.Future[SessionEnd] = self._loop.create_future()
        self._openings: set[asyncio.Task[None]] = set()
        self._status = 0
        self._retry_after, self._body = "", b""
        self._timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._after_drain: SessionEnd | None = None
        self._http_id = 0
        self._token = parts.token

    def now_ns(self) -> int:
        """The time of the event loop."""
        return int(self._loop.time() * SECOND_NS)

    @property
    def buffered_bytes(self) -> int:
        """What all streams keep, and the connection."""
        return self.budget.used_bytes + self.budget.outside_bytes

    @property
    def is_established(self) -> bool:
        """Whether the router welcomed us."""
        return bool(self.established_ns)

    def start(self) -> None:
        """Ask for the session: the link is connected."""
        self.protocol.connected()
        self.link.http.request(self, f"{self._parts.path_prefix}{SESSION_PATH}", self._request_headers())
        self._say()
        self._head_timer = self._loop.call_later(_HEAD_WITHIN_S, self._expect_head)
        self._plan_tick()

    def drain(self, deadline_ms: int) -> None:
        """Leave: say so, take nothing new, and end when the streams have ended or at the deadline."""
        self.protocol.start_draining(deadline_ms)
        self._say()
        self._leave(endings.stopped(), deadline_ms / 1000)

    async def close(self) -> None:
        """Give everything back; the session has ended or is ended by this."""
        self._end(endings.lost("the session was closed"))
        for relay in tuple(self.relays.values()):
            relay.end(StreamEnd.SESSION_LOST)
        self.relays.clear()
        for timer in (self._timer, self._head_timer, self._deadline, self._look_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        if not self.link.outbox.session_bytes:
            self.link.http.finish(self._http_id)
        self.link.send_now()
        self.link.close(within_s=_CLOSE_WITHIN_S)
        await asyncio.gather(*self._openings, return_exceptions=True)

    def _request_headers(self) -> list[tuple[str, str]]:
        version = str(self._parts.hello.protocol_max)
        return [*self._who(), ("content-type", MEDIA_TYPE), ("accept", MEDIA_TYPE), ("x-bus-protocol", version)]

    def _who(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self._token}"), ("user-agent", self._parts.user_agent)]

    # What HTTP/2 tells of the session's own request.

    def on_sent(self, http_id: int) -> None:
        """See Exchange."""
        self._http_id = http_id
        if self._paced is not None:
            self._paced.exempt_id = http_id
        self.link.outbox.begin_session(http_id)
        self.link.stir()

    def on_response(self, status: int, headers: dict[str, str]) -> None:
        """See Exchange."""
        self._status, self._retry_after = status, headers.get("retry-after", "")
        if status == _OK and headers.get("content-type", "").partition(";")[0].strip() != MEDIA_TYPE:
            self._end(endings.not_dialled(DialOutcome.REJECTED, "the router answered with another content type"))

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """See Exchange."""
        if credit_bytes:
            self.link.http.give_credit(self._http_id, credit_bytes)
        if self.ended.done():
            return
        if self._status == _OK:
            self._take(self.protocol.receive(data))
        else:
            self._body = (self._body + data)[:_BODY_BYTES_MAX]

    def on_end(self) -> None:
        """See Exchange."""
        if self._status == _OK:
            self._end(endings.lost("the router ended the session's stream"))
        else:
            self._end(endings.of_status(self._status, retry_after=self._retry_after, body=self._body))

    def on_reset(self, reason: str) -> None:
        """See Exchange."""
        self._end(endings.lost(reason))

    def on_window(self) -> None:
        """See Exchange."""

    # What the link tells.

    def on_lost(self, error: ConnectionFailedError) -> None:
        """See LinkOwner."""
        end = endings.lost(str(error), is_goaway=error.is_goaway)
        self._end(replace(end, dial=DialOutcome.DIAL_FAILED))

    def on_leaving(self) -> None:
        """See LinkOwner."""
        self.protocol.stop_subscribes()
        self._leave(endings.lost("the router goes away", is_goaway=True), None)

    def on_framed(self, framed_bytes: int) -> None:
        """See LinkOwner."""
        self.counts.to_router_bytes += framed_bytes

    # What the protocol tells.

    def _take(self, told: tuple[events.Event, ...]) -> None:
        for event in told:
            self._take_one(event)
        self._say()
        self._plan_tick()

    def _take_one(self, event: events.Event) -> None:
        match event:
            case events.Welcomed():
                self._begin(event)
            case events.SubscribeAsked():
                self._subscribe(event)
            case events.SubscribeRefused(code=code, endpoint=endpoint):
                self._parts.refusals.note(code, target=endpoint)
            case events.UnsubscribeAsked(stream_id=stream_id):
                if relay := self.relays.pop(stream_id, None):
                    relay.end(StreamEnd.UNSUBSCRIBED)
                self._leave_if_done()
            case events.DrainAsked(reason=reason, until_ns=until_ns):
                self._leave(endings.of_drain(reason), max(0, until_ns - self.now_ns()) / SECOND_NS)
            case events.HeartbeatSeen():
                self.counts.heartbeats_received += 1
            case events.FrameIgnored():
                self.counts.frames_ignored += 1
            case events.PeerFailed(error=error):
                count(self.counts.errors_received, error.code)
                self._end(endings.of_error(error.code, error.message, error.retry_after_ms))
            case events.Failed(code=code, message=message):
                self._failed(code, message)

    def _begin(self, welcomed: events.Welcomed) -> None:
        self.established_ns = self.now_ns()
        count(self.counts.dials, DialOutcome.ESTABLISHED)
        for code in self.counts.terminal_error:
            self.counts.terminal_error[code] = 0
        log_event(_log, "session_established", session_id=welcomed.welcome.session_id, **_shown(welcomed.limits))
        self._session_id = welcomed.welcome.session_id
        self.headers = [*self._who(), ("x-bus-session", self._session_id)]
        self._look_again()

    def _subscribe(self, asked: events.SubscribeAsked) -> None:
        relay = Relay(asked, self, path_prefix=self._parts.path_prefix, budget=self.budget)
        try:
            address = self._parts.publishers.check.address_of(asked.target)
        except StreamRefusedError as refused:
            self.on_refused(relay, refused)
            return
        self.relays[asked.stream_id] = relay
        opening = relay.start(self._parts.publishers, address)
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)

    def _failed(self, code: SessionCode, message: str) -> None:
        count(self.counts.errors_sent, code)
        self._say()
        # What it says of itself is worth a moment: the connection is closed right after.
        self.link.send_now()
        end = endings.of_code(code, message)
        if code is SessionCode.IDLE_TIMEOUT:
            end = replace(end, dial=DialOutcome.HANDSHAKE_TIMEOUT)
        self._end(end)

    # What streams tell.

    def on_opened(self, relay: Relay) -> None:
        """See RelayOwner."""
        self.counts.streams_opened += 1
        self.protocol.opened(relay.stream_id)
        self._say()

    def on_refused(self, relay: Relay, refused: StreamRefusedError) -> None:
        """See RelayOwner."""
        self._forget(relay)
        if self.protocol.refuse(relay.stream_id, refused.code, refused.message):
            self.counts.recent_refusals.append({"endpoint": relay.target.endpoint[:_SHOWN], "code": str(refused.code)})
            self._parts.refusals.note(refused.code, refused.message, relay.target.endpoint)
        self._say()
        self._leave_if_done()

    def on_closed(self, relay: Relay, end: StreamEnd, code: CloseCode | None) -> None:
        """See RelayOwner."""
        count(self.counts.stream_ends, end)
        self.counts.recent_closes.append(
            {"endpoint": relay.target.endpoint[:_SHOWN], "code": str(end), "bytes_to_router": relay.sent_bytes}
        )
        self._forget(relay)
        if code is None:
            self.protocol.forget(relay.stream_id)
        else:
            self.protocol.closed(
                relay.stream_id, code, bytes_to_router=relay.sent_bytes, bytes_to_upstream=relay.received_bytes
            )
        self._say()
        self._leave_if_done()

    def on_session_gone(self) -> None:
        """See RelayOwner."""
        self._end(endings.lost("the router does not know the session any more"))

    def on_login_refused(self) -> None:
        """See RelayOwner."""
        other = self._parts.other_token(self._token)
        if other is not None:
            # The session was let in and stays; what is asked for from now on is asked for with what is good now.
            self._token = other
            self.headers = [*self._who(), ("x-bus-session", self._session_id)]
            log_event(_log, "token_changed")

    def _forget(self, relay: Relay) -> None:
        if self.relays.get(relay.stream_id) is relay:
            del self.relays[relay.stream_id]

    # Ends.

    def _leave(self, after: SessionEnd, within_s: float | None) -> None:
        """End when the last stream has ended, or at a deadline, which can only come nearer."""
        self._after_drain = self._after_drain or after
        if within_s is not None and (self._deadline is None or self._deadline.when() > self._loop.time() + within_s):
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_later(within_s, self._cut)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._after_drain is not None and not self.relays:
            self._end(self._after_drain)

    def _cut(self) -> None:
        """The deadline of a drain: what is still open is ended."""
        after = self._after_drain
        for relay in tuple(self.relays.values()):
            relay.end(StreamEnd.DRAIN_DEADLINE)
        if after is not None:
            self._end(after)

    def _end(self, end: SessionEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)

    def _expect_head(self) -> None:
        if self._status == 0:
            self._end(endings.not_dialled(DialOutcome.HANDSHAKE_TIMEOUT, "no answer within 10 s"))
        elif self._status != _OK:
            self._end(endings.of_status(self._status, retry_after=self._retry_after, body=self._body))

    # Time.

    def probe(self) -> None:
        """Ask whether the router is still there, and end the session when nothing at all comes back soon."""
        if not self.is_established or self.ended.done() or self._probe_timer is not None:
            return
        self.link.http.ping()
        self.protocol.beat()
        self.counts.heartbeats_sent += 1
        self._say()
        self._plan_tick()
        self._probe_timer = self._loop.call_later(_PROBE_WITHIN_S, self._judge, self.link.http.pongs, self.now_ns())

    def _judge(self, pongs: int, began_ns: int) -> None:
        self._probe_timer = None
        if self.link.http.pongs == pongs and self.protocol.heard_ns <= began_ns and not self.ended.done():
            failed = self.protocol.fail(SessionCode.IDLE_TIMEOUT, "nothing came back after this machine had slept")
            self._failed(failed.code, failed.message)

    def _look_again(self) -> None:
        after_s = self._parts.deauthorise_after_s
        if after_s is not None and not self.ended.done():
            check, now_s = self._parts.publishers.check, self._loop.time()
            end_what_left(self.relays.values(), check, now_s=now_s, after_s=after_s)
            self._look_timer = self._loop.call_later(LOOK_EVERY_S, self._look_again)

    def _plan_tick(self) -> None:
        due_ns = self.protocol.next_due_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns is not None and not self.ended.done():
            self._timer = self._loop.call_at(due_ns / SECOND_NS, self._tick, due_ns)

    def _tick(self, due_ns: int) -> None:
        if self.now_ns() - due_ns > _LATE_S * SECOND_NS:
            # Held up, or the machine slept: first hear what the socket has held meanwhile.
            self._timer = self._loop.call_later(_HEAR_OUT_S, self._tick_now)
        else:
            self._tick_now()

    def _tick_now(self) -> None:
        if self.ended.done():
            return
        had = self.protocol.has_data_to_send
        told = self.protocol.tick()
        if not told and self.protocol.has_data_to_send and not had:
            self.counts.heartbeats_sent += 1
        self._take(told)

    def _say(self) -> None:
        if self.protocol.has_data_to_send:
            self.link.say(self.protocol.data_to_send())


def _shown(limits: Limits) -> dict[str, int]:
    return {"max_streams": limits.max_streams, "max_stream_buffer_bytes": limits.max_stream_buffer_bytes}
