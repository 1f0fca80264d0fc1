"""What a router counts. Every key of every set is there from the start, and no other ever comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.codes import UNKNOWN, CloseCode, DrainReason, RefusalCode, SessionCode
from kura_shaper.broker.router.dynamo import EventFault
from kura_shaper.broker.router.rebalance import Rebalanced
from kura_shaper.broker.router.sequences import Arrival
from kura_shaper.broker.router.serving import CutOff
from kura_shaper.broker.router.zmtp import ZmtpFault

if TYPE_CHECKING:
    from collections.abc import Iterable

ANSWERS = (200, 401, 403, 404, 405, 409, 410, 415, 426, 429, 503)
# Ends of sessions that are none of the protocol.
CONNECTION_LOST, CLIENT_READS_NOTHING = "connection_lost", "client_reads_nothing"
# The client left: by itself, or since this router asked for it and why. `shutdown` is a code of error frames as well.
DRAINED = "drained"
SESSION_ENDS = (
    *SessionCode,
    CONNECTION_LOST,
    CLIENT_READS_NOTHING,
    DRAINED,
    DrainReason.REBALANCE,
    DrainReason.MAINTENANCE,
    UNKNOWN,
)


class TunnelEnding(StrEnum):
    """How a subscribe that was asked for came to its end."""

    REFUSED = "refused"
    EXPIRED = "expired"
    UPSTREAM_CLOSED = "upstream_closed"
    BUFFER_OVERFLOW = "buffer_overflow"
    RESET = "reset"
    SESSION_LOST = "session_lost"
    UNSUBSCRIBED = "unsubscribed"


class Dropped(StrEnum):
    """Why an event was not passed on."""

    DUPLICATE = "duplicate"
    OUTPUT_FULL = "output_full"


class ConnectionFault(StrEnum):
    """What a client did that ended its connection."""

    PROTOCOL = "protocol"
    FLOOD = "flood"
    UNREADABLE = "unreadable"


def _zeros(keys: Iterable[object]) -> dict[str, int]:
    return {str(key): 0 for key in keys}


@dataclass(slots=True)
class RouterCounts:
    """The counters of a router, over all of its clients."""

    connections: int = 0
    connections_refused: int = 0
    connection_faults: dict[str, int] = field(default_factory=lambda: _zeros(ConnectionFault))
    answers: dict[str, int] = field(default_factory=lambda: _zeros([*ANSWERS, UNKNOWN]))
    sessions: int = 0
    session_ends: dict[str, int] = field(default_factory=lambda: _zeros(SESSION_ENDS))
    subscribes: int = 0
    refusals: dict[str, int] = field(default_factory=lambda: _zeros([*RefusalCode, UNKNOWN]))
    closes: dict[str, int] = field(default_factory=lambda: _zeros([*CloseCode, UNKNOWN]))
    tunnel_ends: dict[str, int] = field(default_factory=lambda: _zeros(TunnelEnding))
    from_broker_bytes: int = 0
    to_broker_bytes: int = 0
    frames_ignored: int = 0
    heartbeats_received: int = 0
    events: int = 0
    events_missed: int = 0
    sequences_forgotten: int = 0
    arrivals: dict[str, int] = field(default_factory=lambda: _zeros([each.value.replace(" ", "_") for each in Arrival]))
    dropped: dict[str, int] = field(default_factory=lambda: _zeros(Dropped))
    bad_events: dict[str, int] = field(default_factory=lambda: _zeros(EventFault))
    bad_publishers: dict[str, int] = field(default_factory=lambda: _zeros(ZmtpFault))
    local_connections: int = 0
    served_connections: int = 0
    served_cut_off: dict[str, int] = field(default_factory=lambda: _zeros(CutOff))
    credential_reloads: dict[str, int] = field(default_factory=lambda: _zeros(["ok", "failed"]))
    settings_reloads: dict[str, int] = field(default_factory=lambda: _zeros(["ok", "failed"]))
    rebalanced: dict[str, int] = field(default_factory=lambda: _zeros(Rebalanced))
    loop_lag_s: float = 0.0
