"""The router's end of a session, and the states of its streams.

A subscribe waits until the broker opens the data stream with its id (`claim`), says that it will
not, or says nothing for too long. Frames of streams that are gone cross with an unsubscribe
and are ignored; frames that no order of events explains end the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.codes import DrainReason, SessionCode
from kura_shaper.broker.protocol.errors import MisuseError, ProtocolViolationError
from kura_shaper.broker.protocol.frames import (
    Drain,
    Draining,
    Frame,
    Heartbeat,
    Hello,
    Sender,
    StreamClosed,
    StreamOpened,
    StreamRefused,
    Subscribe,
    Target,
    Unsubscribe,
    Welcome,
    type_of,
)
from kura_shaper.broker.protocol.limits import (
    HELLO_WITHIN_NS,
    PROTOCOL_VERSION,
    STREAM_OPEN_WITHIN_NS,
)
from kura_shaper.broker.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


class RoutedState(Enum):
    """Where a stream is, as the router knows it."""

    PENDING = "pending"
    CLAIMED = "claimed"
    OPEN = "open"


class Claim(Enum):
    """The answer to the request of a data stream, by its status of HTTP."""

    ACCEPTED = 200
    UNKNOWN = 404
    DUPLICATE = 409


@dataclass(slots=True)
class _Routed:
    state: RoutedState
    asked_ns: int


class RouterSession(Session):
    """Waits for a hello, and is under way when it was answered with `welcome`."""

    _own: ClassVar[Sender] = Sender.ROUTER

    def __init__(self, *, now_ns: Callable[[], int], random: Random) -> None:
        super().__init__(now_ns=now_ns, random=random, first_frame_within_ns=HELLO_WITHIN_NS)
        self._streams: dict[str, _Routed] = {}
        self._asked = 0
        self.hello: Hello | None = None

    @property
    def streams(self) -> dict[str, RoutedState]:
        """The streams that are open or waited for."""
        return {stream_id: stream.state for stream_id, stream in self._streams.items()}

    @property
    def stream_count(self) -> int:
        """How many streams are open or waited for."""
        return len(self._streams)

    @property
    def next_due_ns(self) -> int | None:
        """See Session; a subscribe that expires is due as well."""
        due_ns = super().next_due_ns
        # They are in the order in which they were asked for.
        first_ns = next((each.asked_ns for each in self._streams.values() if each.state is RoutedState.PENDING), None)
        if due_ns is None or first_ns is None:
            return due_ns
        return min(due_ns, first_ns + STREAM_OPEN_WITHIN_NS)

    def welcome(self, terms: Welcome) -> None:
        """Answer the hello: the session begins on these terms."""
        if self.hello is None or self._terms is not None:
            raise MisuseError("a welcome answers one hello")
        self._send(terms)
        self._begin(terms)

    def subscribe(
        self, target: Target, *, stream_id: str | None = None, max_stream_buffer_bytes: int | None = None
    ) -> str:
        """Ask for a stream and return its id, a new one when none is given.

        Raises MisuseError before the welcome, for an id in use and beyond `max_streams`.
        """
        if self._terms is None or self.hello is None:
            raise MisuseError("there is no session yet")
        if len(self._streams) >= min(self._terms.limits.max_streams, self.hello.limits.max_streams):
            raise MisuseError("the session has all the streams that it may have")
        self._asked += 1
        chosen = stream_id if stream_id is not None else f"s{self._asked}"
        if chosen in self._streams:
            raise MisuseError("the stream's id is in use")
        self._send(Subscribe(chosen, target, max_stream_buffer_bytes))
        self._streams[chosen] = _Routed(RoutedState.PENDING, self._now_ns())
        return chosen

    def unsubscribe(self, stream_id: str, reason: str | None = None) -> bool:
        """End a stream in silence. Returns whether it was there."""
        if self.has_ended or self._streams.pop(stream_id, None) is None:
            return False
        self._send(Unsubscribe(stream_id, reason))
        return True

    def claim(self, stream_id: str) -> Claim:
        """Return the answer to a data stream of this id, which is the stream's from now on when accepted."""
        stream = self._streams.get(stream_id)
        if self.has_ended or stream is None:
            return Claim.UNKNOWN
        if stream.state is not RoutedState.PENDING:
            return Claim.DUPLICATE
        stream.state = RoutedState.CLAIMED
        return Claim.ACCEPTED

    def forget(self, stream_id: str) -> bool:
        """Drop a stream whose data stream this router ended. Returns whether it was there."""
        return self._streams.pop(stream_id, None) is not None

    def drain(self, reason: DrainReason, deadline_ms: int) -> None:
        """Ask the broker to leave."""
        self.is_draining = True
        self._send(Drain(reason, deadline_ms))

    def tick(self) -> tuple[events.Event, ...]:
        """See Session; gives up subscribes that became no stream in time."""
        found = super().tick()
        if self.has_ended:
            return found
        before_ns = self._now_ns() - STREAM_OPEN_WITHIN_NS
        late = [
            stream_id
            for stream_id, stream in self._streams.items()
            if stream.state is RoutedState.PENDING and stream.asked_ns <= before_ns
        ]
        for stream_id in late:
            del self._streams[stream_id]
        return (*found, *map(events.OpenExpired, late))

    def _take(self, frame: Frame) -> tuple[events.Event, ...]:
        if isinstance(frame, Hello):
            return (self._greeted(frame),)
        if self._terms is None:
            raise ProtocolViolationError(f"{type_of(frame)} came before the welcome")
        match frame:
            case StreamOpened() | StreamRefused() | StreamClosed():
                return (frame,) if self._goes_on(frame) else ()
            case Draining():
                self.is_draining = True
                return (frame,)
            case Heartbeat(seq=seq):
                return (events.HeartbeatSeen(seq),)
        raise ProtocolViolationError(f"{type_of(frame)} is not for a router")

    def _greeted(self, hello: Hello) -> events.Event:
        if self.hello is not None:
            raise ProtocolViolationError("hello came twice")
        self.hello = hello
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            return self.fail(SessionCode.UNSUPPORTED_VERSION, f"only version {PROTOCOL_VERSION} is spoken here")
        return events.Greeted(hello)

    def _goes_on(self, frame: StreamOpened | StreamRefused | StreamClosed) -> bool:
        """Move a stream on; False when it is gone already."""
        stream = self._streams.get(frame.stream_id)
        if stream is None:
            return False
        wanted = {
            StreamOpened: {RoutedState.CLAIMED},
            StreamRefused: {RoutedState.PENDING, RoutedState.CLAIMED},
            StreamClosed: {RoutedState.OPEN},
        }[type(frame)]
        if stream.state not in wanted:
            raise ProtocolViolationError(f"{type_of(frame)} came of a stream that is {stream.state.value}")
        if isinstance(frame, StreamOpened):
            stream.state = RoutedState.OPEN
        else:
            del self._streams[frame.stream_id]
        return True

    def _heartbeat(self, seq: int) -> Heartbeat:
        return Heartbeat(seq, sum(each.state is RoutedState.OPEN for each in self._streams.values()))
