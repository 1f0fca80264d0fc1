"""What both ends of a session have: frames in order, heartbeats, silence that ends it, errors that end it.

Bytes go in by `receive`, time by `tick`, and both give events; what is to be sent is taken by
`data_to_send`. Only whole frames prove that the peer is there: bytes of data streams do not
come by here, and half a frame can come from anybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.codec import FrameDecoder, UnknownFrame, encode
from kura_shaper.broker.protocol.codes import SessionCode
from kura_shaper.broker.protocol.errors import MisuseError, ProtocolViolationError
from kura_shaper.broker.protocol.frames import Error, Frame, Heartbeat, Sender, Welcome, sender_of, type_of
from kura_shaper.broker.protocol.limits import FRAME_BYTES_BEFORE_WELCOME, MS_NS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

_MESSAGE_CHARACTERS = 256


class Session(ABC):
    """One end of a session. `now_ns` is a monotonic clock, `random` spreads heartbeats."""

    _own: ClassVar[Sender]

    def __init__(self, *, now_ns: Callable[[], int], random: Random, first_frame_within_ns: int) -> None:
        self._now_ns, self._random = now_ns, random
        self._first_frame_within_ns = first_frame_within_ns
        self._decoder = FrameDecoder()
        self._out = bytearray()
        self._first_due_ns = now_ns() + first_frame_within_ns
        self._terms: Welcome | None = None
        self._send_bytes_max = FRAME_BYTES_BEFORE_WELCOME
        self._heard_ns = now_ns()
        self._beat_due_ns = 0
        self._beats = 0
        self.has_ended = False
        self.is_draining = False

    def connected(self) -> None:
        """The connection is there: from now on the first frame is waited for."""
        self._first_due_ns = self._now_ns() + self._first_frame_within_ns

    @property
    def terms(self) -> Welcome | None:
        """The welcome that this session is under, None before it."""
        return self._terms

    @property
    def heard_ns(self) -> int:
        """When the peer's last whole frame came."""
        return self._heard_ns

    @property
    def next_due_ns(self) -> int | None:
        """When `tick` has something to do if nothing comes before; None when the session has ended."""
        if self.has_ended:
            return None
        if self._terms is None:
            return self._first_due_ns
        return min(self._beat_due_ns, self._heard_ns + self._terms.idle_timeout_ms * MS_NS)

    def receive(self, data: bytes) -> tuple[events.Event, ...]:
        """Take bytes of the peer, in pieces of any size, and return what they say."""
        found: list[events.Event] = []
        if self.has_ended:
            return ()
        self._decoder.feed(data)
        try:
            while not self.has_ended and (frame := self._decoder.next_frame()) is not None:
                self._heard_ns = self._now_ns()
                found.extend(self._take_any(frame))
        except ProtocolViolationError as error:
            found.append(self.fail(error.session_code, error.message))
        return tuple(found)

    def tick(self) -> tuple[events.Event, ...]:
        """Let time pass: beat when it is due, and end what is silent for too long."""
        now_ns = self._now_ns()
        if self.has_ended:
            return ()
        if self._terms is None:
            if now_ns < self._first_due_ns:
                return ()
            return (self.fail(SessionCode.IDLE_TIMEOUT, "nothing came that begins a session"),)
        if now_ns - self._heard_ns >= self._terms.idle_timeout_ms * MS_NS:
            return (self.fail(SessionCode.IDLE_TIMEOUT, "no frame came within idle_timeout_ms"),)
        if now_ns >= self._beat_due_ns:
            self.beat()
        return ()

    def beat(self) -> None:
        """Beat now, whenever the next one was due."""
        if not self.has_ended and self._terms is not None:
            self._beats += 1
            self._send(self._heartbeat(self._beats))
            self._plan_beat()

    def data_to_send(self) -> bytes:
        """Return the bytes that are to be sent, once."""
        data = bytes(self._out)
        self._out.clear()
        return data

    @property
    def has_data_to_send(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._out)

    def fail(self, code: SessionCode, message: str, *, retry_after_ms: int | None = None) -> events.Failed:
        """End the session, and tell the peer why."""
        if not self.has_ended:
            self._send(Error(code, message[:_MESSAGE_CHARACTERS], retry_after_ms))
            self.has_ended = True
        return events.Failed(code, message)

    @abstractmethod
    def _take(self, frame: Frame) -> tuple[events.Event, ...]:
        """Take a frame that the peer may send."""

    @abstractmethod
    def _heartbeat(self, seq: int) -> Heartbeat:
        """Return the next heartbeat."""

    def _take_any(self, frame: Frame | UnknownFrame) -> tuple[events.Event, ...]:
        if isinstance(frame, UnknownFrame):
            return (events.FrameIgnored(frame.type),)
        if sender_of(frame) is self._own:
            raise ProtocolViolationError(f"{type_of(frame)} is not for this side to receive")
        if isinstance(frame, Error):
            self.has_ended = True
            return (events.PeerFailed(frame),)
        return self._take(frame)

    def _begin(self, terms: Welcome) -> None:
        self._terms = terms
        self._decoder.max_frame_bytes = self._send_bytes_max = terms.limits.max_frame_bytes
        self._heard_ns = self._now_ns()
        self._plan_beat()

    def _plan_beat(self) -> None:
        """Beat about when it is due, so that a router's brokers don't beat as one."""
        if self._terms is None:
            raise MisuseError("there is no session yet")
        whole_ns = self._terms.heartbeat_interval_ms * MS_NS
        self._beat_due_ns = self._now_ns() + self._random.randint(whole_ns * 9 // 10, whole_ns * 11 // 10)

    def _send(self, frame: Frame) -> None:
        if self.has_ended:
            raise MisuseError("the session has ended")
        self._out += encode(frame, max_frame_bytes=self._send_bytes_max)
