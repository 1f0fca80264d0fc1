"""How a session ended, and what follows: when to come back, and whether to come back at all by itself."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from kura_shaper.broker.counts import CONNECTION_LOST, DRAIN, GOAWAY, DialOutcome
from kura_shaper.broker.protocol.codes import UNKNOWN, DrainReason, SessionCode
from kura_shaper.broker.protocol.limits import MS_NS, SECOND_NS


class Reaction(Enum):
    """What follows the end of a session."""

    BACK_OFF = "back off"
    STAY_AWAY = "stay away"
    """Time will hardly mend it: another holder of our name, a version that is not spoken."""
    LOG_IN_AGAIN = "log in again"
    LEAVE = "leave"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session, or of an attempt to have one.

    `code` is of the closed set of session ends. `dial` says what the attempt came to where there was no welcome,
    None for one that we gave up ourselves, and `is_terminal` that no settings but other ones will do.
    """

    code: str
    reaction: Reaction
    message: str = ""
    retry_after_ns: int = 0
    dial: DialOutcome | None = DialOutcome.REJECTED
    is_terminal: bool = False


_LOG_IN = (SessionCode.UNAUTHORIZED, SessionCode.FORBIDDEN)
_TERMINAL = (SessionCode.UNSUPPORTED_VERSION, SessionCode.INVALID_HELLO)
_BY_STATUS = {
    400: SessionCode.INVALID_HELLO,
    401: SessionCode.UNAUTHORIZED,
    403: SessionCode.FORBIDDEN,
    404: SessionCode.UNSUPPORTED_VERSION,
    405: SessionCode.UNSUPPORTED_VERSION,
    409: SessionCode.SUPERSEDED,
    415: SessionCode.UNSUPPORTED_VERSION,
    426: SessionCode.UNSUPPORTED_VERSION,
    429: SessionCode.OVERLOADED,
    503: SessionCode.OVERLOADED,
    505: SessionCode.UNSUPPORTED_VERSION,
}
_RETRY_AFTER_DIGITS = 6


def of_code(
    code: str, message: str = "", *, retry_after_ns: int = 0, dial: DialOutcome = DialOutcome.REJECTED
) -> SessionEnd:
    """Return the end that a code of a session means."""
    if code in _LOG_IN:
        reaction = Reaction.LOG_IN_AGAIN
    elif code in _TERMINAL or code == SessionCode.SUPERSEDED:
        reaction = Reaction.STAY_AWAY
    else:
        reaction = Reaction.BACK_OFF
    known = code if code in list(SessionCode) else UNKNOWN
    return SessionEnd(known, reaction, message, retry_after_ns, dial, is_terminal=code in _TERMINAL)


def of_status(status: int, *, retry_after: str, body: bytes) -> SessionEnd:
    """Return the end that an answer other than 200 to the session's request means; a code in its body counts more."""
    code = str(_BY_STATUS.get(status, UNKNOWN))
    with suppress(ValueError, RecursionError, AttributeError):
        said = json.loads(body).get("code")
        code = said if said in list(SessionCode) else code
    dial = DialOutcome.AUTH_FAILED if code in _LOG_IN else DialOutcome.REJECTED
    seconds = int(retry_after) if retry_after.isdecimal() and len(retry_after) <= _RETRY_AFTER_DIGITS else 0
    return of_code(code, f"the router answered {status}", retry_after_ns=seconds * SECOND_NS, dial=dial)


def of_error(code: str, message: str, retry_after_ms: int | None) -> SessionEnd:
    """Return the end that an error frame of the router means."""
    dial = DialOutcome.AUTH_FAILED if code in _LOG_IN else DialOutcome.REJECTED
    return of_code(code, message, retry_after_ns=(retry_after_ms or 0) * MS_NS, dial=dial)


def of_drain(reason: DrainReason) -> SessionEnd:
    """Return the end after a drain of the router."""
    reaction = Reaction.MOVE if reason is DrainReason.REBALANCE else Reaction.LEAVE
    return SessionEnd(DRAIN, reaction, f"the router drains: {reason}")


def stopped() -> SessionEnd:
    """Return the end of a session, or of an attempt to have one, because this broker was told to stop."""
    return SessionEnd(DRAIN, Reaction.LEAVE, "this broker was told to stop", dial=None)


def lost(message: str, *, is_goaway: bool = False) -> SessionEnd:
    """Return the end of a session whose connection is gone."""
    return SessionEnd(GOAWAY if is_goaway else CONNECTION_LOST, Reaction.BACK_OFF, message)


def not_dialled(dial: DialOutcome, message: str) -> SessionEnd:
    """Return the end of an attempt that came to no session."""
    return SessionEnd(CONNECTION_LOST, Reaction.BACK_OFF, message, dial=dial)
