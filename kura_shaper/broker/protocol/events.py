"""What a session tells its owner. Where a frame says it all, the frame itself is the event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.frames import Draining, StreamClosed, StreamOpened, StreamRefused

if TYPE_CHECKING:
    from kura_shaper.broker.protocol.codes import DrainReason, RefusalCode, SessionCode
    from kura_shaper.broker.protocol.frames import Error, Hello, Welcome, ZmqEndpoint
    from kura_shaper.broker.protocol.limits import Limits


@dataclass(frozen=True, slots=True)
class Welcomed:
    """To a broker: the session is there. `limits` are those in force."""

    welcome: Welcome
    limits: Limits


@dataclass(frozen=True, slots=True)
class SubscribeAsked:
    """To a broker: open a stream. It has its place already, and ends in exactly one way."""

    stream_id: str
    target: ZmqEndpoint
    max_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class SubscribeRefused:
    """To a broker: the session itself refused a subscribe, and has said so. `endpoint` is what was asked for."""

    stream_id: str
    code: RefusalCode
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class UnsubscribeAsked:
    """To a broker: end a stream, open or being opened; nothing is to be said of it any more."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """To a broker: finish what is open until a time on the session's clock, and leave."""

    reason: DrainReason
    until_ns: int


@dataclass(frozen=True, slots=True)
class Greeted:
    """To a router: a client says who it is. Answer with `welcome` or `fail`."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class OpenExpired:
    """To a router: a subscribe became no stream in time; its stream is unknown from now on."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """The peer is there."""

    seq: int


@dataclass(frozen=True, slots=True)
class FrameIgnored:
    """A frame of a type that is not known here."""

    type: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """The peer ends the session, and says why."""

    error: Error


@dataclass(frozen=True, slots=True)
class Failed:
    """We end the session; the error frame that says so is among the bytes to send."""

    code: SessionCode
    message: str


BrokerEvent = (
    Welcomed | SubscribeAsked | SubscribeRefused | UnsubscribeAsked | DrainAsked | HeartbeatSeen | FrameIgnored
)
RouterEvent = (
    Greeted | OpenExpired | StreamOpened | StreamRefused | StreamClosed | Draining | HeartbeatSeen | FrameIgnored
)
Ended = PeerFailed | Failed
Event = BrokerEvent | RouterEvent | Ended
