"""How long to stay away from a router after a session, so that no fleet of brokers hammers one.

Waits double and are never alike. They begin at the least again only after a session that lived
for a minute: a router that welcomes and then drops is not hammered either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.limits import MS_NS, SECOND_NS

if TYPE_CHECKING:
    from random import Random

SETTLED_NS = 60 * SECOND_NS
REBALANCE_GUARD_NS = 60 * SECOND_NS
_REBALANCE_NS = (250 * MS_NS, 500 * MS_NS)


class ReconnectKind(StrEnum):
    """Why a wait is as long as it is."""

    BACKOFF = "backoff"
    REBALANCE = "rebalance"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait, and why."""

    kind: ReconnectKind
    duration_ns: int


class Reconnect:
    """Tells the next wait. `least_ns` and `most_ns` bound every wait but that of a rebalance."""

    def __init__(self, *, least_ns: int, most_ns: int, random: Random) -> None:
        self._least_ns, self._most_ns, self._random = least_ns, most_ns, random
        self._failures = 0
        self._rebalanced_at_ns: int | None = None

    def session_lived(self, duration_ns: int) -> None:
        """Note how long a session was there."""
        if duration_ns >= SETTLED_NS:
            self._failures = 0

    def after_failure(self, *, retry_after_ns: int = 0) -> Wait:
        """Return the wait after a dial or a session that failed; the router may ask for a longer one."""
        wanted_ns = min(retry_after_ns, self._most_ns)
        return Wait(ReconnectKind.BACKOFF, max(self._next_ns(), wanted_ns))

    def after_refusal(self) -> Wait:
        """Return the wait after what time alone will not mend: the longest one at once."""
        most_ns = self._most_ns
        return Wait(ReconnectKind.BACKOFF, self._random.randint(max(self._least_ns, most_ns // 2), most_ns))

    def after_drain(self) -> Wait:
        """Return the wait after a router asked to leave it."""
        return Wait(ReconnectKind.DRAIN, self._next_ns())

    def after_rebalance(self, now_ns: int) -> Wait:
        """Return the wait after a rebalance: short, unless there was another one within a minute."""
        before_ns, self._rebalanced_at_ns = self._rebalanced_at_ns, now_ns
        if before_ns is not None and now_ns - before_ns < REBALANCE_GUARD_NS:
            return Wait(ReconnectKind.BACKOFF, self._next_ns())
        return Wait(ReconnectKind.REBALANCE, self._random.randint(*_REBALANCE_NS))

    def _next_ns(self) -> int:
        # The exponent is bounded before the power is taken, or it would be a large number after a long outage.
        most_ns = min(self._most_ns, self._least_ns << min(self._failures + 1, 40))
        self._failures += 1
        return self._random.randint(max(self._least_ns, most_ns // 2), most_ns)
