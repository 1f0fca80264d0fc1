"""The broker's end of a session, and the states of its streams.

A subscribe takes one of `max_streams` places at once and ends in exactly one way: refused; or
opened and later closed; or in silence after an unsubscribe, a stream that the router ended, or the
end of the session. What comes too late, of a stream that is gone, is not sent: each of the calls
below says whether the stream was still there.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.codes import CloseCode, DrainReason, RefusalCode, SessionCode
from kura_shaper.broker.protocol.errors import ProtocolViolationError
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
    Unsubscribe,
    Welcome,
    ZmqEndpoint,
    type_of,
)
from kura_shaper.broker.protocol.limits import DRAIN_MS_MAX, MS_NS, WELCOME_WITHIN_NS
from kura_shaper.broker.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random


class StreamState(Enum):
    """Where a stream is. One that has ended is not kept."""

    OPENING = "opening"
    OPEN = "open"


class BrokerSession(Session):
    """Says hello at once. `buffered_bytes` is asked for each heartbeat."""

    _own: ClassVar[Sender] = Sender.BROKER

    def __init__(
        self, hello: Hello, *, now_ns: Callable[[], int], random: Random, buffered_bytes: Callable[[], int]
    ) -> None:
        super().__init__(now_ns=now_ns, random=random, first_frame_within_ns=WELCOME_WITHIN_NS)
        self._hello, self._buffered_bytes = hello, buffered_bytes
        self._streams: dict[str, StreamState] = {}
        self._drain_until_ns: int | None = None
        self.limits = hello.limits
        self._send(hello)

    @property
    def streams(self) -> dict[str, StreamState]:
        """The streams that are open or being opened."""
        return dict(self._streams)

    @property
    def stream_count(self) -> int:
        """How many places of `max_streams` are taken."""
        return len(self._streams)

    def opened(self, stream_id: str) -> bool:
        """Say that a stream is open."""
        if self.has_ended or self._streams.get(stream_id) is not StreamState.OPENING:
            return False
        self._streams[stream_id] = StreamState.OPEN
        self._send(StreamOpened(stream_id))
        return True

    def refuse(self, stream_id: str, code: RefusalCode, message: str = "") -> bool:
        """Say that a stream that is being opened will not be open."""
        if self.has_ended or self._streams.get(stream_id) is not StreamState.OPENING:
            return False
        del self._streams[stream_id]
        self._send(StreamRefused.of(stream_id, code, message))
        return True

    def closed(self, stream_id: str, code: CloseCode, *, bytes_to_router: int, bytes_to_upstream: int) -> bool:
        """Say that an open stream ended by itself."""
        if self.has_ended or self._streams.get(stream_id) is not StreamState.OPEN:
            return False
        del self._streams[stream_id]
        self._send(StreamClosed(stream_id, code, bytes_to_router, bytes_to_upstream))
        return True

    def forget(self, stream_id: str) -> bool:
        """End a stream in silence: the router ended it."""
        return self._streams.pop(stream_id, None) is not None

    def stop_subscribes(self) -> None:
        """Refuse every further subscribe with `draining`, and say nothing else: HTTP/2 itself drains."""
        self.is_draining = True

    def start_draining(self, deadline_ms: int) -> None:
        """Say that this broker leaves, and refuse every further subscribe."""
        self.is_draining = True
        if not self.has_ended:
            self._send(Draining(DrainReason.SHUTDOWN, min(deadline_ms, DRAIN_MS_MAX)))

    def _take(self, frame: Frame) -> tuple[events.Event, ...]:
        if isinstance(frame, Welcome):
            return (self._welcomed(frame),)
        if self._terms is None:
            raise ProtocolViolationError(f"{type_of(frame)} came before welcome")
        match frame:
            case Subscribe():
                return (self._subscribe(frame),)
            case Unsubscribe(stream_id=stream_id):
                return (events.UnsubscribeAsked(stream_id),) if self.forget(stream_id) else ()
            case Drain():
                return (self._drain(frame),)
            case Heartbeat(seq=seq):
                return (events.HeartbeatSeen(seq),)
        raise ProtocolViolationError(f"{type_of(frame)} is not for a broker")

    def _welcomed(self, welcome: Welcome) -> events.Event:
        if self._terms is not None:
            raise ProtocolViolationError("welcome came twice")
        if not self._hello.protocol_min <= welcome.protocol_version <= self._hello.protocol_max:
            return self.fail(SessionCode.UNSUPPORTED_VERSION, "welcome chose a version that hello did not offer")
        self.limits = self._hello.limits.lowered_by(welcome.limits.streams)
        self._begin(welcome)
        return events.Welcomed(welcome, self.limits)

    def _subscribe(self, asked: Subscribe) -> events.Event:
        code = self._why_not(asked)
        if code is not None:
            self._send(StreamRefused.of(asked.stream_id, code))
            endpoint = asked.target.endpoint if isinstance(asked.target, ZmqEndpoint) else ""
            return events.SubscribeRefused(asked.stream_id, code, endpoint)
        self._streams[asked.stream_id] = StreamState.OPENING
        most = self.limits.max_stream_buffer_bytes
        assert isinstance(asked.target, ZmqEndpoint)  # noqa: S101 - for the type checker: _why_not refuses all others
        return events.SubscribeAsked(asked.stream_id, asked.target, min(asked.max_stream_buffer_bytes or most, most))

    def _why_not(self, asked: Subscribe) -> RefusalCode | None:
        """Return the first of the checks that need nothing but the session which fails."""
        if self.is_draining:
            return RefusalCode.DRAINING
        if asked.stream_id in self._streams:
            return RefusalCode.DUPLICATE_STREAM
        if len(self._streams) >= self.limits.max_streams:
            return RefusalCode.STREAM_LIMIT
        return None if isinstance(asked.target, ZmqEndpoint) else RefusalCode.UNSUPPORTED_TARGET

    def _drain(self, asked: Drain) -> events.Event:
        """A second drain may shorten the time, and never make it longer."""
        until_ns = self._now_ns() + asked.deadline_ms * MS_NS
        if self._drain_until_ns is not None:
            until_ns = min(until_ns, self._drain_until_ns)
        self._drain_until_ns, self.is_draining = until_ns, True
        return events.DrainAsked(asked.known_reason, until_ns)

    def _heartbeat(self, seq: int) -> Heartbeat:
        open_streams = sum(state is StreamState.OPEN for state in self._streams.values())
        return Heartbeat(seq, open_streams, self._buffered_bytes())
