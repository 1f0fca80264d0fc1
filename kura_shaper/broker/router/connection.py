"""One connection of clients: who may ask, what is asked for, and what each refusal is called in HTTP.

A client is let in by its bearer token alone, checked for each request in the same time whatever it is. A token that is
taken out of the file ends no session: the streams of one are let in by the token that it began with. Nothing is
kept for one that was refused, and a connection on which nobody is let in is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING, Any, Protocol

from kura_shaper.broker.http2 import ConnectionFailedError
from kura_shaper.broker.link import BusLink
from kura_shaper.broker.protocol.buffer import Budget
from kura_shaper.broker.protocol.codes import UNKNOWN, SessionCode
from kura_shaper.broker.protocol.limits import (
    MEDIA_TYPE,
    PROTOCOL_VERSION,
    SESSION_PATH,
    STREAM_MEDIA_TYPE,
    STREAMS_PATH,
)
from kura_shaper.broker.protocol.router_session import Claim
from kura_shaper.broker.router.credentials import token_digest
from kura_shaper.broker.router.http2 import ENHANCE_YOUR_CALM, Body, ClientFailedError, Http2Server
from kura_shaper.broker.router.session import ClientSession, SessionOwner

if TYPE_CHECKING:
    from kura_shaper.broker.router.counts import RouterCounts
    from kura_shaper.broker.router.settings import RouterSettings

_IDLE_WITHIN_S, _CLOSE_WITHIN_S = 10.0, 2.0
# A client that guesses tokens is not served for long.
_REFUSED_MAX = 16
_BEARER = "bearer "
_RETRY_AFTER_S = "5"
_NO_SESSION = 410
_STREAM_CODES = {404: "unknown_stream", 409: "duplicate_stream"}


class ConnectionOwner(SessionOwner, Protocol):
    """The router, as its connections see it."""

    settings: RouterSettings
    counts: RouterCounts

    def is_allowed(self, token: str) -> bool:
        """Return whether a bearer token is one that may come in."""
        ...

    def why_not_now(self) -> SessionCode | None:
        """Return why no session can begin at the moment."""
        ...

    def session_of(self, session_id: str) -> ClientSession | None:
        """Return a session that is there."""
        ...

    def on_connected(self, connection: BusConnection) -> bool:
        """A connection is there. Returns whether it may stay."""
        ...

    def on_admitted(self, connection: BusConnection) -> bool:
        """A connection showed a token. Returns whether there is a place for it."""
        ...

    def on_disconnected(self, connection: BusConnection) -> None:
        """A connection is gone."""


class BusConnection:
    """A connection, from its first byte to its last."""

    def __init__(self, owner: ConnectionOwner, *, peer: str = "") -> None:
        settings = owner.settings
        self._owner, self.counts = owner, owner.counts
        self._loop = asyncio.get_running_loop()
        # Beside the streams: the session, and places for requests that are only refused.
        http = Http2Server(
            self,
            max_streams=settings.max_streams + 16,
            stream_window_bytes=settings.stream_window_bytes,
            now_s=self._loop.time,
        )
        self._budget = Budget()
        self.link: ServerLink = ServerLink(http, budget=self._budget, owner=self)
        self._refused = 0
        # Who it is, as far as TCP says, and what ended it.
        self.peer, self.why_lost = peer, ""
        self._is_closing = self._is_admitted = self.was_made = False
        self._idle_timer: asyncio.TimerHandle | None = None

    def on_made(self) -> None:
        """TLS is there, and HTTP/2 was agreed on."""
        self.was_made = True
        self.counts.connections += 1
        if not self._owner.on_connected(self):
            self.counts.connections_refused += 1
            self.close()
        self.look_if_idle()

    def look_if_idle(self) -> None:
        """Close it after a while when nothing is going on."""
        if self._idle_timer is None and not self.link.http.open_bodies:
            self._idle_timer = self._loop.call_later(_IDLE_WITHIN_S, self._close_if_idle)

    def close(self) -> None:
        """Say that nothing more is served, and close it."""
        if not self._is_closing:
            self._is_closing = True
            self.link.http.go_away()
            self.link.send_now()
            self.link.close(within_s=_CLOSE_WITHIN_S)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if not self.link.http.open_bodies:
            self.close()

    # What the link tells.

    def on_lost(self, error: ConnectionFailedError) -> None:
        """See LinkOwner."""
        self.why_lost = str(error)
        if isinstance(error, ClientFailedError):
            self.counts.connection_faults[error.fault] += 1
            self._owner.seldom.warn(
                "client_failed", error.fault, peer=self.peer, reason=error.fault, message=str(error)
            )
        elif not self.was_made:
            self._owner.seldom.warn("connection_failed", peer=self.peer, reason=self.why_lost)
        self.on_gone()
        self.link.close(within_s=_CLOSE_WITHIN_S)

    def on_gone(self) -> None:
        """The transport is gone, or of no use any more."""
        self._is_closing = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.link.http.lose()
        self._owner.on_disconnected(self)

    def on_leaving(self) -> None:
        """See LinkOwner. A client's GOAWAY changes nothing here."""

    def on_framed(self, framed_bytes: int) -> None:
        """See LinkOwner."""
        self.counts.to_broker_bytes += framed_bytes

    # Requests.

    def on_request(self, http_id: int, headers: dict[str, str]) -> Body | None:
        """See Requests."""
        prefix = self._owner.settings.path_prefix
        path = headers.get(":path", "")
        session = self._owner.session_of(headers.get("x-bus-session", ""))
        if not self._may_come_in(headers.get("authorization", ""), session):
            self._refuse(http_id, session)
            return None
        if not self._is_admitted:
            self._is_admitted = self._owner.on_admitted(self)
            if not self._is_admitted:
                self._loop.call_soon(self.close)
                return self._answer(http_id, 503, SessionCode.OVERLOADED, ("retry-after", _RETRY_AFTER_S))
            self.link.http.admit()
        if not path.startswith(prefix):
            return self._answer(http_id, 404, "")
        path = path[len(prefix) :]
        if path != SESSION_PATH and not path.startswith(STREAMS_PATH):
            return self._answer(http_id, 404, "")
        if headers.get(":method") != "POST":
            return self._answer(http_id, 405, "", ("allow", "POST"))
        if path == SESSION_PATH:
            return self._begin_session(http_id, headers)
        return self._begin_stream(http_id, path.removeprefix(STREAMS_PATH), session)

    def _may_come_in(self, authorization: str, session: ClientSession | None) -> bool:
        """Whether the token is allowed now, or the one that the session was let in with, which outlives its removal."""
        is_bearer, token = authorization[: len(_BEARER)].lower() == _BEARER, _token_in(authorization)
        # Compared in any case, so that the time says nothing.
        is_allowed = self._owner.is_allowed(token)
        is_the_sessions = session is not None and hmac.compare_digest(session.token_digest, token_digest(token))
        return (is_allowed or is_the_sessions) and is_bearer

    def _refuse(self, http_id: int, session: ClientSession | None) -> None:
        """Answer a request whose token is none. Whoever knows a session's id guesses nothing."""
        self._answer(http_id, 401, "unauthorized", ("www-authenticate", "Bearer"))
        self._refused += session is None
        if self._refused >= _REFUSED_MAX:
            self._owner.seldom.warn("connection_cut_off", peer=self.peer, reason="too many tokens that are none")
            self.link.http.go_away(ENHANCE_YOUR_CALM)
            self._loop.call_soon(self.close)

    def _begin_session(self, http_id: int, headers: dict[str, str]) -> Body | None:
        if headers.get("content-type", "").partition(";")[0].strip() != MEDIA_TYPE:
            return self._answer(http_id, 415, "")
        if headers.get("x-bus-protocol", str(PROTOCOL_VERSION)) != str(PROTOCOL_VERSION):
            return self._answer(http_id, 426, SessionCode.UNSUPPORTED_VERSION)
        code = self._owner.why_not_now()
        if code is not None:
            return self._answer(http_id, 503, code, ("retry-after", _RETRY_AFTER_S))
        self._respond(http_id, 200, MEDIA_TYPE)
        return ClientSession(
            self,
            http_id,
            owner=self._owner,
            counts=self.counts,
            max_streams=self._owner.settings.max_streams,
            token_digest=token_digest(_token_in(headers.get("authorization", ""))),
        )

    def _begin_stream(self, http_id: int, stream_id: str, session: ClientSession | None) -> Body | None:
        if session is None:
            return self._answer(http_id, _NO_SESSION, "")
        if session.stream_status is not None:
            return self._as_told(http_id, session.stream_status)
        claim, tunnel = session.claim(stream_id)
        if claim is not Claim.ACCEPTED or tunnel is None:
            status = claim.value if claim is not Claim.ACCEPTED else Claim.UNKNOWN.value
            return self._answer(http_id, status, _STREAM_CODES[status])
        self._respond(http_id, 200, STREAM_MEDIA_TYPE)
        tunnel.attach(self, http_id)
        return tunnel

    def _as_told(self, http_id: int, status: int) -> Body | None:
        """Answer as a test's fault wants it: not at all, or with a refusal."""
        return _Unanswered(self.link.http, http_id) if status == 0 else self._answer(http_id, status, "")

    def _respond(self, http_id: int, status: int, media_type: str) -> None:
        self._count(status)
        self.link.http.respond(http_id, status, [("content-type", media_type)])

    def _answer(self, http_id: int, status: int, code: str, *headers: tuple[str, str]) -> Body | None:
        """Answer at once. Nobody is told of the request's body."""
        self._count(status)
        self._owner.seldom.warn("request_refused", str(status), peer=self.peer, status=status, code=code)
        body = json.dumps({"code": code}).encode() if code else b""
        found = [*headers, ("content-type", "application/json")] if code else [*headers]
        self.link.http.respond(http_id, status, found, body=body)
        self.look_if_idle()
        return None

    def _count(self, status: int) -> None:
        key = str(status)
        self.counts.answers[key if key in self.counts.answers else UNKNOWN] += 1


def shown_peer(name: tuple[Any, ...] | None) -> str:
    """Return an address of a socket for people, "" where there is none any more."""
    if not name:
        return ""
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{host}:{name[1]}"


def _token_in(authorization: str) -> str:
    return authorization[len(_BEARER) :].strip()


class ServerLink(BusLink[Http2Server]):
    """A link that is there only for HTTP/2."""

    def __init__(self, http: Http2Server, *, budget: Budget, owner: BusConnection) -> None:
        super().__init__(http, budget=budget, owner=owner)
        self._connection = owner
        self._is_gone = self._is_stalled = self._is_behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        chosen = transport.get_extra_info("ssl_object")
        if chosen is None or chosen.selected_alpn_protocol() != "h2":
            self.fail(ConnectionFailedError("the client does not speak HTTP/2"))
        else:
            self._connection.on_made()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. A read of many frames takes many turns of the loop."""
        super().data_received(data)
        if self.http.has_unread and not self._is_behind and not self._is_lost and self._transport is not None:
            self._is_behind = True
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_behind = False
        if self._is_stalled:
            return
        self.data_received(b"")
        if not self._is_behind and self._transport is not None:
            self._transport.resume_reading()

    def fail(self, error: ConnectionFailedError) -> None:
        """See BusLink. The client is told why, if it reads."""
        if not self._is_lost and self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.http.data_to_send())
        super().fail(error)

    def pause(self) -> None:
        """Read nothing: a fault that tests want."""
        self._is_stalled = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._is_stalled = False
        if not self._is_behind:
            self._go_on()

    def abort(self) -> None:
        """Break it off."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol. Told also of a connection that we closed."""
        super().connection_lost(error)
        if not self._is_gone:
            self._is_gone = True
            self._connection.on_gone()


class _Unanswered:
    """A request that a test wants to stay without an answer."""

    def __init__(self, http: Http2Server, http_id: int) -> None:
        self._http, self._http_id = http, http_id

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """See Body."""
        del data
        self._http.give_credit(self._http_id, credit_bytes)

    def on_end(self) -> None:
        """See Body."""

    def on_reset(self) -> None:
        """See Body."""

    def on_window(self) -> None:
        """See Body."""
