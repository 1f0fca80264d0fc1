"""What a broker counts. Every key of every set is there from the start, and no other ever comes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.codes import UNKNOWN, RefusalCode, SessionCode
from kura_shaper.broker.protocol.reconnect import ReconnectKind

if TYPE_CHECKING:
    from collections.abc import Iterable

# Upper bounds of the times that stages of an opening take, in seconds; the last is the deadline of all.
STAGE_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 28.0)
_RECENT_MAX = 100


class StreamEnd(StrEnum):
    """How an open stream ended."""

    UPSTREAM_CLOSED = "upstream_closed"
    BUFFER_OVERFLOW = "buffer_overflow"
    UNSUBSCRIBED = "unsubscribed"
    ROUTER_CLOSED = "router_closed"
    SESSION_LOST = "session_lost"
    DRAIN_DEADLINE = "drain_deadline"
    DEAUTHORISED = "deauthorised"


class DialOutcome(StrEnum):
    """What an attempt to have a session came to."""

    ESTABLISHED = "established"
    DIAL_FAILED = "dial_failed"
    TLS_FAILED = "tls_failed"
    AUTH_FAILED = "auth_failed"
    REJECTED = "rejected"
    HANDSHAKE_TIMEOUT = "handshake_timeout"


class Stage(StrEnum):
    """What opening a stream waits for."""

    RESOLVE = "resolve"
    CONNECT = "connect"
    SLOT = "slot"
    HEAD = "head"
    TOTAL = "total"


CONNECTION_LOST, GOAWAY, DRAIN = "connection_lost", "goaway", "drain"
SESSION_ENDS = (*SessionCode, CONNECTION_LOST, GOAWAY, DRAIN, UNKNOWN)


def _zeros(keys: Iterable[str]) -> dict[str, int]:
    return {str(key): 0 for key in keys}


@dataclass(slots=True)
class Times:
    """How long something took, as a histogram: how many were within each bound, and the sum."""

    within: list[int] = field(default_factory=lambda: [0] * len(STAGE_BUCKETS_S))
    count: int = 0
    sum_s: float = 0.0

    def note(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.sum_s += seconds
        for at, bound_s in enumerate(STAGE_BUCKETS_S):
            if seconds <= bound_s:
                self.within[at] += 1


@dataclass(slots=True)
class Counts:
    """The counters of a broker, over all of its sessions."""

    refusals: dict[str, int] = field(default_factory=lambda: _zeros([*RefusalCode, UNKNOWN]))
    stream_ends: dict[str, int] = field(default_factory=lambda: _zeros([*StreamEnd, UNKNOWN]))
    streams_opened: int = 0
    stages: dict[str, Times] = field(default_factory=lambda: {str(stage): Times() for stage in Stage})
    to_router_bytes: int = 0
    to_upstream_bytes: int = 0
    dials: dict[str, int] = field(default_factory=lambda: _zeros(DialOutcome))
    session_ends: dict[str, int] = field(default_factory=lambda: _zeros(SESSION_ENDS))
    reconnects: dict[str, int] = field(default_factory=lambda: _zeros(ReconnectKind))
    reconnect_wait_s: float = 0.0
    errors_sent: dict[str, int] = field(default_factory=lambda: _zeros([*SessionCode, UNKNOWN]))
    errors_received: dict[str, int] = field(default_factory=lambda: _zeros([*SessionCode, UNKNOWN]))
    terminal_error: dict[str, int] = field(default_factory=lambda: _zeros([*SessionCode, UNKNOWN]))
    heartbeats_sent: int = 0
    heartbeats_received: int = 0
    frames_ignored: int = 0
    credential_reloads: dict[str, int] = field(default_factory=lambda: _zeros(["ok", "failed"]))
    loop_lag_s: float = 0.0
    # The last ones by name, for a person who looks; a label would grow without end.
    recent_closes: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=_RECENT_MAX))
    recent_refusals: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=_RECENT_MAX))


def count(counter: dict[str, int], key: str) -> None:
    """Count under a key of a closed set; what is none of it counts as unknown."""
    counter[key if key in counter else UNKNOWN] += 1
