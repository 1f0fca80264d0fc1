"""The frames of event bus v1 as values, and the one table that says what their fields are.

| frame | sent by |
|---|---|
| hello, stream_opened, stream_refused, stream_closed, draining | the broker |
| welcome, subscribe, unsubscribe, drain | the router |
| heartbeat, error | both |

`announce` and `withdraw` are reserved for the role kv_listener, and what they say is not defined here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from kura_shaper.broker.protocol import limits as bounds
from kura_shaper.broker.protocol.codes import DrainReason, RefusalCode, Role
from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.fields import Flag, Integer, Json, Kind, Shape, Text, TextList
from kura_shaper.broker.protocol.limits import Limits

ZMQ_ENDPOINT, ANNOUNCED_SOURCE = "zmq_endpoint", "announced_source"
STREAM_ID_PATTERN = "[A-Za-z0-9_-]{1,64}"
CLIENT_ID_PATTERN = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_PATTERN = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_MESSAGE_CHARACTERS = 256


class Sender(Enum):
    """Which end may send a frame."""

    BROKER = "broker"
    ROUTER = "router"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Software:
    """What a broker runs, for people."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first frame of a broker: who it is, and what it could take."""

    protocol_min: int = bounds.PROTOCOL_VERSION
    protocol_max: int = bounds.PROTOCOL_VERSION
    role: str = Role.BROKER
    client_id: str
    instance_id: str
    kubernetes_namespace: str
    dynamo_namespaces: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    software: Software


@dataclass(frozen=True, slots=True)
class WelcomeLimits:
    """What a router lets a session take."""

    max_streams: int
    max_stream_buffer_bytes: int
    max_frame_bytes: int = bounds.FRAME_BYTES_BEFORE_WELCOME

    @property
    def streams(self) -> Limits:
        """The part that a hello has as well."""
        return Limits(self.max_streams, self.max_stream_buffer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The first frame of a router: the session is there, and these are its terms."""

    protocol_version: int = bounds.PROTOCOL_VERSION
    session_id: str
    limits: WelcomeLimits
    heartbeat_interval_ms: int = bounds.HEARTBEAT_MS_DEFAULT
    idle_timeout_ms: int = bounds.IDLE_MS_DEFAULT


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is there. Not a question: no answer belongs to it."""

    seq: int
    open_streams: int | None = None
    buffered_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ZmqEndpoint:
    """A publisher by its address, as its metadata advertises it, and its Dynamo namespace."""

    endpoint: str
    dynamo_namespace: str

    def __str__(self) -> str:
        return self.endpoint


@dataclass(frozen=True, slots=True)
class AnnouncedSource:
    """A source that a kv_listener announced, as a router asks for it. A broker reads it as an OtherTarget."""

    source: str

    def __str__(self) -> str:
        return f"source:{self.source}"


@dataclass(frozen=True, slots=True)
class OtherTarget:
    """A target that no broker serves: an announced source, or a kind that is not known here."""

    kind: str


Target = ZmqEndpoint | AnnouncedSource | OtherTarget


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Open a stream. `max_stream_buffer_bytes` can only lower what the session has."""

    stream_id: str
    target: Target
    max_stream_buffer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Close a stream, or don't open it; nothing is said back."""

    stream_id: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """The stream's request was answered with 200, and bytes flow."""

    stream_id: str


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """The subscribe became no stream."""

    stream_id: str
    code: str
    retryable: bool
    message: str | None = None

    @classmethod
    def of(cls, stream_id: str, code: RefusalCode, message: str = "") -> StreamRefused:
        """Return the refusal of a code, which says whether it may be tried again."""
        return cls(stream_id, code, code.is_retryable, message[:_MESSAGE_CHARACTERS] or None)


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """An open stream ended by itself; what it carried, in bytes of the publisher and of the router."""

    stream_id: str
    code: str
    bytes_to_router: int
    bytes_to_upstream: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The router wants the broker to leave. A reason that is not known is like maintenance."""

    reason: str
    deadline_ms: int

    @property
    def known_reason(self) -> DrainReason:
        """The reason as one of those that are known."""
        return DrainReason(self.reason) if self.reason in list(DrainReason) else DrainReason.MAINTENANCE


@dataclass(frozen=True, slots=True)
class Draining:
    """The broker leaves: it takes no new streams and lets those that are open finish until the deadline."""

    reason: str
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Error:
    """The sender ends the session after this."""

    code: str
    message: str = ""
    retry_after_ms: int | None = None


Frame = (
    Hello
    | Welcome
    | Heartbeat
    | Subscribe
    | Unsubscribe
    | StreamOpened
    | StreamRefused
    | StreamClosed
    | Drain
    | Draining
    | Error
)


class _TargetKind:
    """A target, whose other fields depend on its kind."""

    _any = Shape(OtherTarget, {"kind": Text(most=64)})
    _zmq = Shape(ZmqEndpoint, {"endpoint": Text(least=0, most=4096), "dynamo_namespace": Text(least=0, most=4096)})

    def read(self, value: object, place: str) -> Target:
        """See Kind."""
        found: OtherTarget = self._any.read(value, place)
        target: Target = self._zmq.read(value, place) if found.kind == ZMQ_ENDPOINT else found
        return target

    def schema(self) -> Json:
        """See Kind."""
        endpoint = self._zmq.schema()
        rest = {"properties": endpoint["properties"], "required": endpoint["required"]}
        return self._any.schema() | {"if": {"properties": {"kind": {"const": ZMQ_ENDPOINT}}}, "then": rest}


_STREAM_ID = Text(most=64, pattern=STREAM_ID_PATTERN)
_CODE = Text(most=64, pattern="[a-z0-9_]{1,64}")
_MESSAGE = Text(least=0, most=_MESSAGE_CHARACTERS)
_NAMESPACES = TextList(Text(most=253), least=1, most=64)
_STREAM_LIMITS: dict[str, Kind] = {
    "max_streams": Integer(1, bounds.STREAMS_MAX),
    "max_stream_buffer_bytes": Integer(bounds.STREAM_BUFFER_BYTES_MIN, bounds.STREAM_BUFFER_BYTES_MAX),
}
_FRAME_BYTES = {"max_frame_bytes": Integer(bounds.FRAME_BYTES_MIN, bounds.FRAME_BYTES_MAX)}
_HELLO = Shape(
    Hello,
    {
        "protocol_min": Integer(1),
        "protocol_max": Integer(1),
        "role": Text(most=32, pattern="[a-z0-9_]{1,32}"),
        "client_id": Text(most=63, pattern=CLIENT_ID_PATTERN),
        "instance_id": Text(most=32, pattern="[0-9a-f]{32}"),
        "kubernetes_namespace": Text(most=63, pattern=LABEL_PATTERN),
        "dynamo_namespaces": _NAMESPACES,
        "limits": Shape(Limits, _STREAM_LIMITS),
        "software": Shape(Software, {"name": Text(most=64), "version": Text(most=64)}),
    },
)
_WELCOME = Shape(
    Welcome,
    {
        "protocol_version": Integer(1),
        # It becomes the value of a header.
        "session_id": Text(most=128, pattern="[!-~]{1,128}"),
        "limits": Shape(WelcomeLimits, {**_STREAM_LIMITS, **_FRAME_BYTES}),
        "heartbeat_interval_ms": Integer(bounds.HEARTBEAT_MS_MIN, bounds.HEARTBEAT_MS_MAX),
        "idle_timeout_ms": Integer(bounds.IDLE_MS_MIN, bounds.IDLE_MS_MAX),
    },
)
_BYTES, _DEADLINE = Integer(), Integer(0, bounds.DRAIN_MS_MAX)
SHAPES: dict[str, tuple[Sender, Shape]] = {
    "hello": (Sender.BROKER, _HELLO),
    "welcome": (Sender.ROUTER, _WELCOME),
    "heartbeat": (Sender.BOTH, Shape(Heartbeat, {"seq": _BYTES}, {"open_streams": _BYTES, "buffered_bytes": _BYTES})),
    "subscribe": (
        Sender.ROUTER,
        Shape(
            Subscribe,
            {"stream_id": _STREAM_ID, "target": _TargetKind()},
            {"max_stream_buffer_bytes": Integer(bounds.STREAM_BUFFER_BYTES_MIN)},
        ),
    ),
    "unsubscribe": (Sender.ROUTER, Shape(Unsubscribe, {"stream_id": _STREAM_ID}, {"reason": _MESSAGE})),
    "stream_opened": (Sender.BROKER, Shape(StreamOpened, {"stream_id": _STREAM_ID})),
    "stream_refused": (
        Sender.BROKER,
        Shape(StreamRefused, {"stream_id": _STREAM_ID, "code": _CODE, "retryable": Flag()}, {"message": _MESSAGE}),
    ),
    "stream_closed": (
        Sender.BROKER,
        Shape(
            StreamClosed,
            {"stream_id": _STREAM_ID, "code": _CODE, "bytes_to_router": _BYTES, "bytes_to_upstream": _BYTES},
        ),
    ),
    "drain": (Sender.ROUTER, Shape(Drain, {"reason": _CODE, "deadline_ms": _DEADLINE})),
    "draining": (Sender.BROKER, Shape(Draining, {"reason": _CODE, "deadline_ms": _DEADLINE})),
    "error": (Sender.BOTH, Shape(Error, {"code": _CODE}, {"message": _MESSAGE, "retry_after_ms": Integer()})),
}
_TYPES: dict[type, str] = {shape.make: name for name, (_, shape) in SHAPES.items() if isinstance(shape.make, type)}


def type_of(frame: Frame) -> str:
    """Return the type of a frame as it is written."""
    return _TYPES[type(frame)]


def sender_of(frame: Frame) -> Sender:
    """Return which end may send a frame."""
    return SHAPES[type_of(frame)][0]


def frame_of(value: Json) -> Frame | None:
    """Return the frame that a JSON object is, None when its type is not known here.

    Raises ProtocolViolationError when a field is missing or is not what it may be.
    """
    kind = value.get("type")
    if not isinstance(kind, str):
        raise ProtocolViolationError("a frame has no type")
    if kind not in SHAPES:
        return None
    frame: Frame = SHAPES[kind][1].read(value, kind)
    if isinstance(frame, Welcome) and frame.idle_timeout_ms < 2 * frame.heartbeat_interval_ms:
        raise ProtocolViolationError("welcome.idle_timeout_ms is below twice the heartbeat_interval_ms")
    if isinstance(frame, Hello) and frame.protocol_min > frame.protocol_max:
        raise ProtocolViolationError("hello.protocol_min is above protocol_max")
    return frame


def object_of(frame: Frame) -> Json:
    """Return a frame as a JSON object. Raises ProtocolViolationError when it could not be read back."""
    made = {"type": type_of(frame), **_object(frame)}
    frame_of(made)
    return made


_KINDS = {ZmqEndpoint: ZMQ_ENDPOINT, AnnouncedSource: ANNOUNCED_SOURCE}


def _object(value: Any) -> Json:
    made: Json = {"kind": _KINDS[type(value)]} if type(value) in _KINDS else {}
    for each in fields(value):
        inner = getattr(value, each.name)
        if inner is not None:
            made[each.name] = _object(inner) if is_dataclass(inner) else inner
    return made
