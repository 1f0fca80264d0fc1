"""One tunnel of a feed, read as ZMTP: its handshake, its messages, and pings to a publisher that is quiet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.router.zmtp import Message, Subscribed, ZmtpError, ZmtpFault, ZmtpSubscriber

if TYPE_CHECKING:
    from kura_shaper.broker.protocol.buffer import Budget
    from kura_shaper.broker.protocol.frames import AnnouncedSource, ZmqEndpoint
    from kura_shaper.broker.router.session import ClientSession
    from kura_shaper.broker.router.tunnel import TunnelEnd

_HANDSHAKE_WITHIN_S, _PING_EVERY_S, _SILENT_FOR_S = 30.0, 30.0, 90.0


class StreamReader(Protocol):
    """Whose stream it is."""

    target: ZmqEndpoint | AnnouncedSource
    topics: tuple[bytes, ...]

    def on_subscribed(self, stream: FeedStream) -> None:
        """The handshake is over."""

    def on_message(self, stream: FeedStream, parts: tuple[bytes, ...]) -> None:
        """A message came."""

    def on_fault(self, stream: FeedStream, fault: ZmtpFault) -> None:
        """The publisher can't be read."""

    def on_over(self, stream: FeedStream, end: TunnelEnd, *, lived_s: float) -> None:
        """It ended by itself."""


class FeedStream:
    """It is the consumer of its tunnel. `kept` is what all streams together may keep of messages that are not whole."""

    def __init__(self, feed: StreamReader, session: ClientSession, *, kept: Budget, max_message_bytes: int) -> None:
        self._feed, self.session = feed, session
        self._kept, self._kept_bytes = kept, 0
        self._loop = asyncio.get_running_loop()
        self._began_s = self._heard_s = self._loop.time()
        self._zmtp = ZmtpSubscriber(feed.topics, max_message_bytes=max_message_bytes)
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.tunnel = session.subscribe(feed.target, self)

    @property
    def is_subscribed(self) -> bool:
        """Whether the publisher knows what is wanted of it."""
        return self._zmtp.is_subscribed

    def close(self) -> None:
        """End it; the feed is not told."""
        self._let_go()
        self.tunnel.close()

    def on_open(self) -> None:
        """See Consumer."""
        self._say()
        self._timer = self._loop.call_later(_HANDSHAKE_WITHIN_S, self._fail, ZmtpFault.HANDSHAKE)

    def on_bytes(self, data: bytes, credit_bytes: int) -> None:
        """See Consumer."""
        self._heard_s = self._loop.time()
        # What is read here is used at once: it is bounded by what one message may be.
        self.tunnel.give_credit(credit_bytes)
        try:
            found = self._zmtp.receive(data)
        except ZmtpError as error:
            self._fail(error.fault)
            return
        for each in found:
            if self._is_over:
                return
            if isinstance(each, Message):
                self._feed.on_message(self, each.parts)
            elif isinstance(each, Subscribed):
                self._feed.on_subscribed(self)
                self._plan_ping()
        self._say()
        self._note_kept()

    def on_sent(self) -> None:
        """See Consumer."""

    def on_over(self, end: TunnelEnd) -> None:
        """See Consumer."""
        self._let_go()
        self._feed.on_over(self, end, lived_s=self._loop.time() - self._began_s)

    def _note_kept(self) -> None:
        """Count what waits for the rest of a message, which all publishers together may only have so much of."""
        if self._is_over:
            return
        more_bytes = self._zmtp.kept_bytes - self._kept_bytes
        if not self._kept.take(more_bytes):
            self._fail(ZmtpFault.FLOOD)
            return
        self._kept_bytes += more_bytes

    def _let_go(self) -> None:
        self._is_over = True
        self._cancel_timer()
        self._kept.give_back(self._kept_bytes)
        self._kept_bytes = 0

    def _say(self) -> None:
        data = self._zmtp.data_to_send()
        if data and not self.tunnel.send(data):
            self._fail(ZmtpFault.FLOOD)

    def _fail(self, fault: ZmtpFault) -> None:
        self.close()
        self._feed.on_fault(self, fault)

    def _plan_ping(self) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(_PING_EVERY_S, self._ping)

    def _ping(self) -> None:
        """Ask a publisher that says nothing whether it is there; one that does not say so is as good as gone."""
        if self._loop.time() - self._heard_s > _SILENT_FOR_S:
            self._fail(ZmtpFault.SILENT)
        elif self._zmtp.ping():
            self._say()
            self._plan_ping()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
