"""Asking every broker to come anew, without two of one namespace ever being away at once.

What a broker had is read over others first, so where there are two of each namespace no event is lost. The next one is
asked when the one before it is back and had a moment to take its share. Brokers that have no namespace in common
do not wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.codes import DrainReason, Role
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from kura_shaper.broker.router.counts import RouterCounts
    from kura_shaper.broker.router.session import ClientSession
    from kura_shaper.broker.router.settings import RouterSettings

# Between two that are asked, and from when one is back until the next one of its namespaces may be asked.
_PAUSE_S = (0.5, 1.5)
_SETTLED_S = (2.0, 4.0)
_LOOK_EVERY_S = 0.25
# A broker that was asked twice within a minute stays away for up to a minute.
_BACK_WITHIN_S = 90.0
_log = logging.getLogger("kura_shaper.broker.router")


class Rebalanced(StrEnum):
    """What became of a broker in a round."""

    ASKED = "asked"
    BACK = "back"
    MISSING = "missing"
    LEFT_OUT = "left_out"


class RebalanceOwner(Protocol):
    """Who knows the sessions."""

    settings: RouterSettings
    counts: RouterCounts
    random: Random
    by_client: dict[str, ClientSession]

    def drain(self, session: ClientSession, reason: DrainReason) -> None:
        """Ask one client to leave."""


@dataclass(slots=True)
class _Away:
    """A broker that was asked, until it is back and settled."""

    session: ClientSession
    until_s: float
    settled_s: float | None = None


class Rebalance:
    """One round over the brokers that are there when it begins."""

    def __init__(self, owner: RebalanceOwner) -> None:
        self._owner, self._counts = owner, owner.counts
        self._loop = asyncio.get_running_loop()
        self._waiting = [each for each in owner.by_client.values() if each.role == Role.BROKER]
        owner.random.shuffle(self._waiting)
        self._away: list[_Away] = []

    async def run(self) -> None:
        """Ask one after another, and return when the last one is back, or missed for too long."""
        log_event(_log, "rebalance_began", brokers=len(self._waiting))
        while self._waiting or self._away:
            self._away = [each for each in self._away if self._is_away(each)]
            # One that ended or leaves by itself comes anew as well.
            self._waiting = [each for each in self._waiting if self._is_there(each) and not each.protocol.is_draining]
            session = self._next()
            if session is not None:
                self._ask(session)
                await asyncio.sleep(self._owner.random.uniform(*_PAUSE_S))
            else:
                await asyncio.sleep(_LOOK_EVERY_S)
        log_event(_log, "rebalance_ended")

    def _is_there(self, session: ClientSession) -> bool:
        return self._owner.by_client.get(session.client_id) is session

    def _next(self) -> ClientSession | None:
        """Return one who waits, none of whose namespaces lacks a broker now."""
        leaving = [each for each in self._owner.by_client.values() if each.protocol.is_draining]
        lacking = {*_namespaces(each.session for each in self._away), *_namespaces(leaving)}
        return next((each for each in self._waiting if lacking.isdisjoint(each.namespaces)), None)

    def _ask(self, session: ClientSession) -> None:
        self._waiting.remove(session)
        until_s = self._loop.time() + self._owner.settings.drain_deadline_ms / 1000 + _BACK_WITHIN_S
        self._away.append(_Away(session, until_s))
        self._count(Rebalanced.ASKED, session)
        self._owner.drain(session, DrainReason.REBALANCE)

    def _is_away(self, away: _Away) -> bool:
        """Whether one is still to be waited for."""
        now_s, back = self._loop.time(), self._owner.by_client.get(away.session.client_id)
        if back is None or back is away.session:
            away.settled_s = None
            if now_s < away.until_s:
                return True
            self._miss(away.session)
            return False
        if away.settled_s is None:
            away.settled_s = now_s + self._owner.random.uniform(*_SETTLED_S)
            self._count(Rebalanced.BACK, back)
        return now_s < away.settled_s

    def _miss(self, session: ClientSession) -> None:
        """Leave those alone that have to stand in for one that did not come back."""
        self._count(Rebalanced.MISSING, session, level=logging.WARNING)
        alone = [each for each in self._waiting if not set(session.namespaces).isdisjoint(each.namespaces)]
        for each in alone:
            self._waiting.remove(each)
            self._count(Rebalanced.LEFT_OUT, each, level=logging.WARNING)

    def _count(self, what: Rebalanced, session: ClientSession, *, level: int = logging.INFO) -> None:
        self._counts.rebalanced[what] += 1
        log_event(_log, "rebalance", level=level, client_id=session.client_id, outcome=what)


def _namespaces(sessions: Iterable[ClientSession]) -> set[str]:
    return {name for session in sessions for name in session.namespaces}
