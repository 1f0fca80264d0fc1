"""A publisher's events, whatever brokers come and go: one stream that is read, and now and then the one after it.

A stream that is to move (its broker leaves, or another one has less to do) is not just cut: the next one is opened
beside it, what that brings is held back for a moment, and only then the first is closed. The numbers of
the events tell which of those that were held back have been seen already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.counts import Dropped, RouterCounts, TunnelEnding
from kura_shaper.broker.router.dynamo import Event, EventError, decode_event
from kura_shaper.broker.router.feed_stream import FeedStream
from kura_shaper.broker.router.sequences import Arrival, Sequences
from kura_shaper.broker.router.session import SessionChooser

if TYPE_CHECKING:
    from collections.abc import Collection
    from random import Random

    from kura_shaper.broker.protocol.buffer import Budget
    from kura_shaper.broker.router.output import EventOutput
    from kura_shaper.broker.router.seldom import SeldomLog
    from kura_shaper.broker.router.session import ClientSession
    from kura_shaper.broker.router.settings import Subscription
    from kura_shaper.broker.router.tunnel import TunnelEnd
    from kura_shaper.broker.router.zmtp import ZmtpFault

_RETRY_LEAST_S, _RETRY_MOST_S, _LIVED_S = 0.25, 30.0, 10.0
# How long two streams bring the same, and how long after that the second may repeat what the first one brought.
_OVERLAP_S, _REPEATS_FOR_S = 1.0, 10.0
_HELD_BYTES_MAX, _EVENT_OVERHEAD_BYTES = 4 * MIB, 512


class FeedOwner(SessionChooser, Protocol):
    """Who has the feeds."""

    counts: RouterCounts
    output: EventOutput
    random: Random
    seldom: SeldomLog
    max_message_bytes: int
    kept: Budget


class Feed:
    """One subscription of the settings."""

    def __init__(self, wanted: Subscription, owner: FeedOwner) -> None:
        self.wanted, self._owner, self._counts = wanted, owner, owner.counts
        self._loop = asyncio.get_running_loop()
        self.target = wanted.target
        self.topics = tuple(topic.encode() for topic in wanted.topics)
        self.sequences = Sequences()
        self.current: FeedStream | None = None
        self.next: FeedStream | None = None
        self.last_failure = ""
        self._failures = 0
        # The sessions that did not have it: each is asked once before any is asked again.
        self._refused: set[str] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._held: deque[Event] = deque()
        self._held_bytes = 0
        self._repeats_until_s: float | None = None
        self._is_closed = False

    @property
    def session(self) -> ClientSession | None:
        """The session that it is read over, or is about to be."""
        stream = self.next or self.current
        return stream.session if stream else None

    @property
    def is_read(self) -> bool:
        """Whether its publisher has been subscribed to."""
        return self.current is not None and self.current.is_subscribed

    def place(self) -> None:
        """Have it read by a session that stays, if it is not and there is one."""
        if self.current is None or self.current.session.protocol.is_draining:
            self.move()

    def move(self) -> None:
        """Have it read over another session than now, if there is one; it goes on as it is until then."""
        if self._is_closed:
            return
        if self.next is not None:
            if not self.next.session.protocol.is_draining:
                return
            # Where it was bound for leaves as well.
            self.next.close()
            self._drop_next()
        self._cancel_retry()
        session = self._choose(() if self.current is None else (self.current.session.id,))
        if session is None:
            return
        owner = self._owner
        stream = FeedStream(self, session, kept=owner.kept, max_message_bytes=owner.max_message_bytes)
        if self.current is None:
            self.current = stream
        else:
            self.current.session.moving += 1
            self.next = stream

    def _choose(self, other_than: tuple[str, ...]) -> ClientSession | None:
        """Return a session that did not refuse it, or when all of them did, any."""
        session = self._ask_for({*other_than, *self._refused})
        if session is None:
            self._refused.clear()
            session = self._ask_for(other_than)
        return session

    def _ask_for(self, other_than: Collection[str]) -> ClientSession | None:
        wanted = self.wanted
        return self._owner.choose(wanted.dynamo_namespace, role=wanted.role, other_than=other_than)

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._cancel_retry()
        for stream in (self.current, self.next):
            if stream is not None:
                stream.close()
        if self.next is not None:
            self._drop_next()
        self.current = None
        self._end_repeats()

    # What its streams tell.

    def on_subscribed(self, stream: FeedStream) -> None:
        """A stream's handshake is over."""
        self.last_failure = ""
        self._refused.clear()
        if stream is self.next:
            # The publisher takes a moment to heed a subscription.
            self._loop.call_later(_OVERLAP_S, self._change_over, stream)

    def on_message(self, stream: FeedStream, parts: tuple[bytes, ...]) -> None:
        """A stream brought a message."""
        try:
            event = decode_event(parts)
        except EventError as error:
            self._counts.bad_events[error.fault] += 1
            self._owner.seldom.warn("no_event", error.fault, endpoint=self.wanted.name, reason=error.fault)
            return
        if stream is self.current:
            self._take(event)
        elif stream is self.next:
            self._hold(event, stream)

    def on_fault(self, stream: FeedStream, fault: ZmtpFault) -> None:
        """A stream's publisher can't be read."""
        self._counts.bad_publishers[fault] += 1
        over = stream.session.client_id
        self._owner.seldom.warn("publisher_not_read", fault, endpoint=self.wanted.name, over=over, reason=fault)
        self._lost(stream, f"publisher: {fault}", lived_s=0.0)

    def on_over(self, stream: FeedStream, end: TunnelEnd, *, lived_s: float) -> None:
        """A stream ended by itself. When it was with its session, the owner of all feeds places them anew."""
        words = f"{end.ending}: {end.code}" if end.code and end.code != end.ending else str(end.ending)
        self._lost(stream, words, lived_s=lived_s)
        if end.ending in (TunnelEnding.REFUSED, TunnelEnding.EXPIRED):
            self._refused.add(stream.session.id)
            if self._ask_for(self._refused) is not None:
                # Another broker may have it, and that at once.
                self.place()

    def _lost(self, stream: FeedStream, why: str, *, lived_s: float) -> None:
        if stream is self.next:
            self._drop_next()
            if self.current is not None and self.current.session.protocol.is_draining:
                self._plan_retry()
            return
        if stream is not self.current:
            return
        self.last_failure = why
        if self.next is not None:
            self._change_over(self.next)
            return
        self.current = None
        # Whatever stream comes next begins after this one, so what it brings has not been seen.
        self._end_repeats()
        if lived_s >= _LIVED_S:
            self._failures = 0
        self._plan_retry()

    def _plan_retry(self) -> None:
        most_s = min(_RETRY_MOST_S, _RETRY_LEAST_S * 2 ** min(self._failures + 1, 10))
        self._failures += 1
        self._cancel_retry()
        self._retry = self._loop.call_later(self._owner.random.uniform(most_s / 2, most_s), self.place)

    def _drop_next(self) -> None:
        if self.current is not None:
            self.current.session.moving -= 1
        self.next = None
        self._drop_held()

    def _change_over(self, stream: FeedStream) -> None:
        """Go on with the next stream, with what it brought meanwhile."""
        if stream is not self.next:
            return
        before, self.current, self.next = self.current, stream, None
        if before is not None:
            before.session.moving -= 1
            before.close()
        self._repeats_until_s = self._loop.time() + _REPEATS_FOR_S
        self.sequences.begin_repeats()
        held = tuple(self._held)
        self._drop_held()
        for event in held:
            self._take(event)

    def _take(self, event: Event) -> None:
        if self._repeats_until_s is not None and self._loop.time() >= self._repeats_until_s:
            self._end_repeats()
        counts, before = self._counts, self.sequences.forgotten
        arrival, missed = self.sequences.note(event.publisher_id, event.topic, event.sequence)
        counts.sequences_forgotten += self.sequences.forgotten - before
        counts.arrivals[_LABELS[arrival]] += 1
        if arrival is Arrival.DUPLICATE:
            counts.dropped[Dropped.DUPLICATE] += 1
            return
        counts.events += 1
        counts.events_missed += missed
        if not self._owner.output.put(event, endpoint=self.wanted.name, arrival=arrival, missed=missed):
            counts.dropped[Dropped.OUTPUT_FULL] += 1

    def _end_repeats(self) -> None:
        self._repeats_until_s = None
        self.sequences.end_repeats()

    def _hold(self, event: Event, stream: FeedStream) -> None:
        """Keep an event of the next stream for later; when no more may be kept, the time has come."""
        size = len(event.payload) + _EVENT_OVERHEAD_BYTES
        if self._held_bytes + size > _HELD_BYTES_MAX or not self._owner.kept.take(size):
            self._change_over(stream)
            self._take(event)
            return
        self._held.append(event)
        self._held_bytes += size

    def _drop_held(self) -> None:
        self._held.clear()
        self._owner.kept.give_back(self._held_bytes)
        self._held_bytes = 0

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


_LABELS = {each: each.value.replace(" ", "_") for each in Arrival}
