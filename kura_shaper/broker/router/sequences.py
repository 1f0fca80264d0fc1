"""What is missing among the events of a publisher, by the numbers that it gives them.

A publisher counts its events of a topic up by one. Each connection delivers in order, so a number that jumps is
a loss, and a lower one is either what two connections both brought while one took over from the
other, or a publisher that began anew under the same id.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

PUBLISHERS_MAX = 256


class Arrival(Enum):
    """What a number says of its event."""

    FIRST = "first"
    NEXT = "next"
    AFTER_A_GAP = "after a gap"
    DUPLICATE = "duplicate"
    RESTARTED = "restarted"


@dataclass(slots=True)
class Sequence:
    """The numbers of one publisher and topic: the last one, and what was counted."""

    last: int
    received: int = 1
    missed: int = 0
    gaps: int = 0
    duplicates: int = 0
    restarts: int = 0


class Sequences:
    """The numbers of every publisher and topic of one subscription; of the longest unheard nothing is kept."""

    def __init__(self, *, most: int = PUBLISHERS_MAX) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, str], Sequence] = OrderedDict()
        self.forgotten = 0

    @property
    def known(self) -> dict[tuple[int, str], Sequence]:
        """By publisher and topic, a copy."""
        return dict(self._known)

    def note(self, publisher_id: int, topic: str, number: int, *, overlaps: bool) -> tuple[Arrival, int]:
        """Return what a number says, and how many before it are missing.

        `overlaps`: two connections bring the same events at the moment.
        """
        key = publisher_id, topic
        found = self._known.get(key)
        if found is None:
            self._known[key] = Sequence(number)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
                self.forgotten += 1
            return Arrival.FIRST, 0
        self._known.move_to_end(key)
        if number <= found.last and (overlaps or number == found.last):
            found.duplicates += 1
            return Arrival.DUPLICATE, 0
        missed = number - found.last - 1
        found.last = number
        found.received += 1
        if missed < 0:
            found.restarts += 1
            return Arrival.RESTARTED, 0
        if missed:
            found.gaps += 1
            found.missed += missed
            return Arrival.AFTER_A_GAP, missed
        return Arrival.NEXT, 0
