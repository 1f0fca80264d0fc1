"""What a router does wrong on purpose, at set times after each session's welcome, so that a broker can be tested.

Everything here is what a real router, a proxy or a network does on a bad day.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.codes import DrainReason, SessionCode
from kura_shaper.broker.protocol.limits import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.router.session import ClientSession

_DRAIN_MS = 10_000
_INTERNAL_ERROR = 2
_SERVICE_UNAVAILABLE = 503


class Fault(StrEnum):
    """One of them."""

    WITHHOLD = "withhold"
    """Give no credit for data any more."""
    GRANT = "grant"
    """Give credit again, and what was withheld."""
    STALL = "stall"
    """Read nothing from the connection."""
    RESUME = "resume"
    """Read from it again."""
    SILENCE = "silence"
    """Send no heartbeats any more."""
    GOAWAY = "goaway"
    """Say in HTTP/2 that no further streams are served."""
    GOAWAY_ERROR = "goaway-error"
    """The same, with an error."""
    DRAIN = "drain"
    """Ask the client to leave, for maintenance, within 10 s."""
    REBALANCE = "rebalance"
    """Ask it to come back at once."""
    BAD_FRAME = "bad-frame"
    """Send a frame that is no JSON."""
    HUGE_FRAME = "huge-frame"
    """Begin a frame that is longer than any may be."""
    UNKNOWN_FRAME = "unknown-frame"
    """Send a frame of a later version, which is to be ignored."""
    RESET_STREAMS = "reset-streams"
    """Break every data stream off."""
    REFUSE_STREAMS = "refuse-streams"
    """Answer data streams with 503 from now on."""
    IGNORE_STREAMS = "ignore-streams"
    """Do not answer data streams from now on."""
    ACCEPT_STREAMS = "accept-streams"
    """Answer them as they should be again."""
    ERROR = "error"
    """End the session with an error frame."""
    BREAK = "break"
    """Break the connection off."""


@dataclass(frozen=True, slots=True)
class FaultStep:
    """A fault, so many milliseconds after the welcome."""

    after_ms: int
    fault: Fault


def plan_faults(steps: tuple[FaultStep, ...], session: ClientSession) -> None:
    """Let the steps happen to a session, if it is still there then."""
    loop = asyncio.get_running_loop()
    for step in steps:
        loop.call_later(step.after_ms / 1000, cause, step.fault, session)


def cause(fault: Fault, session: ClientSession) -> None:
    """Let one fault happen to a session."""
    if not session.is_over:
        _FAULTS[fault](session)
        session.connection.link.stir()


def _grant(session: ClientSession) -> None:
    session.grants = True
    for tunnel in tuple(session.tunnels.values()):
        tunnel.give_owed()


def _reset_streams(session: ClientSession) -> None:
    for tunnel in tuple(session.tunnels.values()):
        tunnel.reset()


def _set(name: str, value: object) -> Callable[[ClientSession], None]:
    return lambda session: setattr(session, name, value)


_FAULTS: dict[Fault, Callable[[ClientSession], None]] = {
    Fault.WITHHOLD: _set("grants", False),  # noqa: FBT003 - a value, not a choice of the call
    Fault.GRANT: _grant,
    Fault.STALL: lambda session: session.connection.link.pause(),
    Fault.RESUME: lambda session: session.connection.link.resume(),
    Fault.SILENCE: _set("beats", False),  # noqa: FBT003 - a value, not a choice of the call
    Fault.GOAWAY: lambda session: session.connection.link.http.go_away(),
    Fault.GOAWAY_ERROR: lambda session: session.connection.link.http.go_away(_INTERNAL_ERROR),
    Fault.DRAIN: lambda session: session.drain(DrainReason.MAINTENANCE, _DRAIN_MS),
    Fault.REBALANCE: lambda session: session.drain(DrainReason.REBALANCE, _DRAIN_MS),
    Fault.BAD_FRAME: lambda session: session.say_bytes(b"\0\0\0\x02{]"),
    Fault.HUGE_FRAME: lambda session: session.say_bytes((FRAME_BYTES_MAX + 1).to_bytes(4, "big")),
    Fault.UNKNOWN_FRAME: lambda session: session.say_bytes(b'\0\0\0\x10{"type":"later"}'),
    Fault.RESET_STREAMS: _reset_streams,
    Fault.REFUSE_STREAMS: _set("stream_status", _SERVICE_UNAVAILABLE),
    Fault.IGNORE_STREAMS: _set("stream_status", 0),
    Fault.ACCEPT_STREAMS: _set("stream_status", None),
    Fault.ERROR: lambda session: session.fail(SessionCode.INTERNAL, "a fault that was asked for"),
    Fault.BREAK: lambda session: session.connection.link.abort(),
}
