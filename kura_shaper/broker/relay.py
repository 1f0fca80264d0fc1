"""One stream between a publisher and the router, from the subscribe to its end.

```
opening --200--> open --publisher ends--> flushing --all sent--> over
   |               |--does not fit------> over (reset; stream_closed: buffer_overflow)
   |               '--router ends, unsubscribes, session lost--> over (nothing is said)
   '--refused, unsubscribed, session lost--> over
```

Nothing here waits for anything but the opening: each event does its work at once, so a stream that
overflows is reset, let go and told of in one step that no other stream notices.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.counts import Counts, Stage, StreamEnd
from kura_shaper.broker.opening import (
    HEAD_WITHIN_S,
    OPEN_WITHIN_S,
    SLOT_WITHIN_S,
    Publishers,
    StageClock,
    connect_publisher,
)
from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.codes import CloseCode, RefusalCode
from kura_shaper.broker.protocol.limits import KIB, STREAM_MEDIA_TYPE, STREAMS_PATH
from kura_shaper.broker.security import StreamRefusedError
from kura_shaper.broker.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.endpoint import PublisherAddress
    from kura_shaper.broker.http2 import Http2Client
    from kura_shaper.broker.link import BusLink
    from kura_shaper.broker.protocol.events import SubscribeAsked

_FLUSH_WITHIN_S = 5.0
_OK = 200
_BODY_BYTES_MAX = 4 * KIB
_REFUSED_BY_STATUS = {
    404: RefusalCode.UNKNOWN_STREAM,
    409: RefusalCode.DUPLICATE_STREAM,
}
SESSION_GONE = 410
_LOGIN_REFUSED = (401, 403)
# What the router sent before it ended a stream is still the publisher's.
_GENTLE = (StreamEnd.ROUTER_CLOSED, StreamEnd.UNSUBSCRIBED, StreamEnd.UPSTREAM_CLOSED)
_log = logging.getLogger("kura_shaper.broker")


class RelayState(Enum):
    """Where a stream is; see the module."""

    OPENING = "opening"
    OPEN = "open"
    FLUSHING = "flushing"
    OVER = "over"


class RelayOwner(Protocol):
    """The session that a stream belongs to."""

    link: BusLink[Http2Client]
    counts: Counts
    headers: list[tuple[str, str]]

    def on_opened(self, relay: Relay) -> None:
        """The router answered 200."""

    def on_refused(self, relay: Relay, refused: StreamRefusedError) -> None:
        """The stream was not opened."""

    def on_closed(self, relay: Relay, end: StreamEnd, code: CloseCode | None) -> None:
        """An open stream is over; a code is told to the router."""

    def on_session_gone(self) -> None:
        """The router does not know this session any more."""

    def on_login_refused(self) -> None:
        """The router does not take the token of a stream."""


class Relay:
    """A stream. It is the exchange of HTTP/2, the source of what is sent, and the owner of the publisher's socket."""

    def __init__(self, asked: SubscribeAsked, owner: RelayOwner, *, path_prefix: str, budget: Budget) -> None:
        self._path = f"{path_prefix}{STREAMS_PATH}{asked.stream_id}"
        self.stream_id, self.target = asked.stream_id, asked.target
        self.buffer = StreamBuffer(asked.max_buffer_bytes, budget)
        self.http_id = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.state = RelayState.OPENING
        self._owner, self._link = owner, owner.link
        self._loop = asyncio.get_running_loop()
        self.began_s = self._loop.time()
        self._upstream = Upstream(self, buffer_bytes=asked.max_buffer_bytes)
        self._upstream_ended = False
        self._sent: asyncio.Future[None] = self._loop.create_future()
        self._head: asyncio.Future[None] = self._loop.create_future()
        self._status = 0
        self._body = b""
        self._failed: StreamRefusedError | None = None
        self.address: PublisherAddress | None = None
        self.gone_since_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._router_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._sent_before = 0

    def start(self, publishers: Publishers, address: PublisherAddress) -> asyncio.Task[None]:
        """Begin to open it. The task has an end of its own also after the stream was ended."""
        self.address = address
        self._task = self._loop.create_task(self._open(publishers, address))
        return self._task

    def end(self, end: StreamEnd) -> None:
        """End it in silence, wherever it is."""
        if self.state is RelayState.OPENING:
            self.state = RelayState.OVER
            self._let_go()
            if self._task is not None:
                self._task.cancel()
        elif self.state is not RelayState.OVER:
            self._over(end, None)

    def deauthorise(self) -> None:
        """End it, and tell the router: nobody advertises its publisher any more."""
        if self.state is RelayState.OPEN:
            self._over(StreamEnd.DEAUTHORISED, CloseCode.UPSTREAM_CLOSED)

    # Opening.

    async def _open(self, publishers: Publishers, address: PublisherAddress) -> None:
        stages = StageClock(self._owner.counts.stages, self._loop.time)
        try:
            async with asyncio.timeout(OPEN_WITHIN_S):
                made = await connect_publisher(publishers, address, self.target, stages)
                await self._upstream.attach(made)
                await self._ask(stages)
        except TimeoutError:
            self._refuse(stages.refusal)
        except StreamRefusedError as refused:
            self._refuse(refused)
        except asyncio.CancelledError:
            self._let_go()
            raise
        except Exception:
            # A fault of ours ends this stream, not its neighbours.
            _log.exception("stream_failed")
            self._refuse(StreamRefusedError(RefusalCode.INTERNAL))
        finally:
            stages.done()

    async def _ask(self, stages: StageClock) -> None:
        """Ask the router for the stream. Raises StreamRefusedError, TimeoutError."""
        with stages.during(Stage.SLOT):
            self._link.http.request(self, self._path, self._request_headers())
            self._link.stir()
            async with asyncio.timeout(SLOT_WITHIN_S):
                await self._sent
        with stages.during(Stage.HEAD):
            try:
                async with asyncio.timeout(HEAD_WITHIN_S):
                    await self._head
            except TimeoutError:
                if not self._status:  # else only the rest of a refusal's body is missing
                    raise
        if self._failed is not None:
            raise self._failed
        if self._status != _OK:
            raise self._rejected()

    def _request_headers(self) -> list[tuple[str, str]]:
        return [*self._owner.headers, ("content-type", STREAM_MEDIA_TYPE), ("accept", STREAM_MEDIA_TYPE)]

    def _rejected(self) -> StreamRefusedError:
        if self._status == SESSION_GONE:
            self._owner.on_session_gone()
        code = _REFUSED_BY_STATUS.get(self._status, RefusalCode.STREAM_REJECTED)
        with suppress(ValueError, RecursionError, AttributeError):
            said = json.loads(self._body).get("code")
            code = RefusalCode(said) if isinstance(said, str) else code
        return StreamRefusedError(code, f"the router answered {self._status}")

    def _refuse(self, refused: StreamRefusedError) -> None:
        if self.state is RelayState.OPENING:
            self.state = RelayState.OVER
            self._let_go()
            self._owner.on_refused(self, refused)

    def _fail_opening(self, refused: StreamRefusedError) -> None:
        self._failed = self._failed or refused
        for each in (self._sent, self._head):
            if not each.done():
                each.set_result(None)

    # What HTTP/2 tells.

    def on_sent(self, http_id: int) -> None:
        """See Exchange."""
        self.http_id = http_id
        if not self._sent.done():
            self._sent.set_result(None)

    def on_response(self, status: int, headers: dict[str, str]) -> None:
        """See Exchange."""
        del headers
        if self.state is not RelayState.OPENING or self._status:
            return
        self._status = status
        if status in _LOGIN_REFUSED:
            self._owner.on_login_refused()
        if status == _OK and self._failed is None:
            self.state = RelayState.OPEN
            self._owner.on_opened(self)
            self._settle_head()
            if self.buffer:
                self._link.put(self)
            if self._upstream_ended:
                self._finish_when_sent()

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """See Exchange."""
        if self.state in (RelayState.OPEN, RelayState.FLUSHING) and not self._upstream_ended:
            self.received_bytes += len(data)
            self._owner.counts.to_upstream_bytes += len(data)
            self._upstream.write(data, credit_bytes)
            return
        if self.state is RelayState.OPENING:
            self._body = (self._body + data)[:_BODY_BYTES_MAX]
            if len(self._body) == _BODY_BYTES_MAX:
                self._settle_head()
        self.on_credit(credit_bytes)

    def on_end(self) -> None:
        """See Exchange."""
        self._router_ended = True
        if self.state is RelayState.OPENING:
            self._settle_head()
        elif self.state is RelayState.OVER:
            self._release()
        elif self.state is RelayState.OPEN:
            self._link.outbox.remove(self)
            self._link.http.finish(self.http_id)
            self._over(StreamEnd.ROUTER_CLOSED, None)

    def on_reset(self, reason: str) -> None:
        """See Exchange."""
        if self.state is RelayState.OPENING:
            # A server may break off what it has refused already (RFC 9113, section 8.1); the refusal counts.
            if not self._head.done():
                self._fail_opening(StreamRefusedError(RefusalCode.STREAM_REJECTED, reason))
        elif self.state is not RelayState.OVER:
            self._over(StreamEnd.ROUTER_CLOSED, None)

    def on_window(self) -> None:
        """See Exchange."""
        if self.buffer and self.state in (RelayState.OPEN, RelayState.FLUSHING):
            self._link.put(self)

    def on_drained(self) -> None:
        """See Source."""
        if self.state is RelayState.FLUSHING:
            self._finished()

    # What the publisher's socket tells.

    def on_upstream_data(self, piece: bytes) -> None:
        """See UpstreamOwner."""
        if self.state not in (RelayState.OPENING, RelayState.OPEN):
            return
        if not self.buffer.put(piece):
            self._overflow()
        elif self.state is RelayState.OPEN:
            self._link.put(self)

    def on_upstream_end(self) -> None:
        """See UpstreamOwner."""
        if self._upstream_ended:
            return
        self._upstream_ended = True
        if self.state is RelayState.OPEN:
            self._finish_when_sent()

    def on_credit(self, credit_bytes: int) -> None:
        """See UpstreamOwner."""
        if self.http_id and credit_bytes:
            self._link.http.give_credit(self.http_id, credit_bytes)
            self._link.stir()

    # Ends.

    def _settle_head(self) -> None:
        if not self._head.done():
            self._head.set_result(None)

    def _overflow(self) -> None:
        if self.state is RelayState.OPEN:
            self._over(StreamEnd.BUFFER_OVERFLOW, CloseCode.BUFFER_OVERFLOW)
        else:
            text = "the publisher sent more than may wait before the stream was open"
            self._fail_opening(StreamRefusedError(RefusalCode.INTERNAL, text))

    def _finish_when_sent(self) -> None:
        self.state = RelayState.FLUSHING
        self._upstream.close()
        if self.buffer:
            self._watch_flush()
        else:
            self._finished()

    def _watch_flush(self) -> None:
        self._sent_before = self.sent_bytes
        self._set_timer(self._look_at_flush)

    def _look_at_flush(self) -> None:
        """Go on while the router takes anything at all."""
        if self.sent_bytes > self._sent_before:
            self._watch_flush()
        elif self.state is RelayState.FLUSHING:
            self._over(StreamEnd.UPSTREAM_CLOSED, CloseCode.UPSTREAM_CLOSED)

    def _finished(self) -> None:
        """Everything is sent: end the body, and leave the router a while to end its own."""
        self._link.http.finish(self.http_id)
        self._count_over(StreamEnd.UPSTREAM_CLOSED, CloseCode.UPSTREAM_CLOSED)
        if self._router_ended:
            self._release()
        else:
            self._set_timer(self._release)
        self._link.stir()

    def _release(self) -> None:
        self._cancel_timer()
        self._link.http.release(self.http_id)
        self._link.stir()

    def _set_timer(self, call: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(_FLUSH_WITHIN_S, call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self, end: StreamEnd, code: CloseCode | None) -> None:
        self._let_go(gently=end in _GENTLE)
        self._count_over(end, code)

    def _count_over(self, end: StreamEnd, code: CloseCode | None) -> None:
        self.state = RelayState.OVER
        self._cancel_timer()
        self._owner.on_closed(self, end, code)

    def _let_go(self, *, gently: bool = False) -> None:
        """Give everything back: the place, what waits, the publisher."""
        http = self._link.http
        if not http.withdraw(self) and self.http_id:
            self._link.outbox.remove(self)
            http.release(self.http_id)
        self.buffer.drop()
        if gently:
            self._upstream.close()
        else:
            self._upstream.abort()
        self._link.stir()
