"""What can be said to have happened: the closed sets of codes of event bus v1.

A code that a peer sends may be of a later version. It is kept as the text that it is, and
is `unknown` only where a bounded set is needed, as in the label of a metric.
"""

from __future__ import annotations

from enum import StrEnum

UNKNOWN = "unknown"


class Role(StrEnum):
    """What a client of the bus is."""

    BROKER = "broker"
    KV_LISTENER = "kv_listener"


class RefusalCode(StrEnum):
    """Why a subscribe did not become a stream, in the order in which it is found out."""

    DRAINING = "draining"
    DUPLICATE_STREAM = "duplicate_stream"
    STREAM_LIMIT = "stream_limit"
    UNSUPPORTED_TARGET = "unsupported_target"
    INVALID_TARGET = "invalid_target"
    NAMESPACE_NOT_COVERED = "namespace_not_covered"
    TARGET_NOT_ADVERTISED = "target_not_advertised"
    RESOLVE_FAILED = "resolve_failed"
    ADDRESS_NOT_ALLOWED = "address_not_allowed"
    CONNECT_FAILED = "connect_failed"
    STREAM_SLOT_TIMEOUT = "stream_slot_timeout"
    OPEN_TIMEOUT = "open_timeout"
    STREAM_REJECTED = "stream_rejected"
    UNKNOWN_STREAM = "unknown_stream"
    INTERNAL = "internal"

    @property
    def is_retryable(self) -> bool:
        """Whether the same subscribe may succeed later, when nothing but time has changed."""
        return self in _RETRYABLE

    @property
    def words(self) -> str:
        """What it means, for a person who reads a log; no value of anybody's is in it."""
        return _WORDS[self]


_RETRYABLE = frozenset(
    {
        RefusalCode.DRAINING,
        RefusalCode.STREAM_LIMIT,
        RefusalCode.TARGET_NOT_ADVERTISED,
        RefusalCode.RESOLVE_FAILED,
        RefusalCode.CONNECT_FAILED,
        RefusalCode.STREAM_SLOT_TIMEOUT,
        RefusalCode.OPEN_TIMEOUT,
        RefusalCode.UNKNOWN_STREAM,
        RefusalCode.INTERNAL,
    }
)

_WORDS = {
    RefusalCode.DRAINING: "this broker takes no new streams, since it or the router leaves",
    RefusalCode.DUPLICATE_STREAM: "there is a stream of this id",
    RefusalCode.STREAM_LIMIT: "there are as many streams as max_streams allows",
    RefusalCode.UNSUPPORTED_TARGET: "the target is of a kind that is not served",
    RefusalCode.INVALID_TARGET: "the target is no address of a publisher",
    RefusalCode.NAMESPACE_NOT_COVERED: "the Dynamo namespace is not one of dynamo_namespaces",
    RefusalCode.TARGET_NOT_ADVERTISED: "no DynamoWorkerMetadata that is watched advertises the endpoint there",
    RefusalCode.RESOLVE_FAILED: "the publisher's name has no address",
    RefusalCode.ADDRESS_NOT_ALLOWED: "the publisher's address is a special one or outside of allowed_cidrs",
    RefusalCode.CONNECT_FAILED: "the publisher could not be connected to",
    RefusalCode.STREAM_SLOT_TIMEOUT: "HTTP/2 had no place for the stream in time",
    RefusalCode.OPEN_TIMEOUT: "the router did not answer the stream in time",
    RefusalCode.STREAM_REJECTED: "the router did not take the stream",
    RefusalCode.UNKNOWN_STREAM: "the router does not know the stream",
    RefusalCode.INTERNAL: "something went wrong in the broker",
}


class CloseCode(StrEnum):
    """Why an open stream ended by itself."""

    UPSTREAM_CLOSED = "upstream_closed"
    BUFFER_OVERFLOW = "buffer_overflow"


class SessionCode(StrEnum):
    """Why a session is ended by an error frame."""

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    UNSUPPORTED_VERSION = "unsupported_version"
    INVALID_HELLO = "invalid_hello"
    SUPERSEDED = "superseded"
    IDLE_TIMEOUT = "idle_timeout"
    PROTOCOL_ERROR = "protocol_error"
    FRAME_TOO_LARGE = "frame_too_large"
    OVERLOADED = "overloaded"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class DrainReason(StrEnum):
    """Why a router wants its brokers to leave."""

    SHUTDOWN = "shutdown"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"


def label_of(code: str, known: type[StrEnum]) -> str:
    """Return a code as one of a closed set: itself where it is known, else `unknown`."""
    return code if code in list(known) else UNKNOWN
