"""What is missing among the events of a publisher, by the numbers that it gives them.

A publisher counts its events of a topic up by one, and after 2**64 - 1 comes 0. Each connection delivers in order, so
a number that jumps is a loss. One that is not higher is one of those that were missing and came late; or what the
connection before has brought already, which only the one that took over from it may bring, as long as it lives and has
not come beyond the number that was the last one then; or, and that at any other time, a publisher that began anew under
the same id, if only with the number that it had before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

PUBLISHERS_MAX = 256
_NUMBERS = 2**64
# Only a jump as short as this, over the end of all numbers, is one; any other is a publisher that began anew.
_WRAP_WITHIN = 2**20
# So many of the last gaps are known, to tell an event that comes late from one that was there.
_GAPS_KNOWN = 8


class Arrival(Enum):
    """What a number says of its event."""

    FIRST = "first"
    NEXT = "next"
    AFTER_A_GAP = "after a gap"
    LATE = "late"
    DUPLICATE = "duplicate"
    RESTARTED = "restarted"


@dataclass(slots=True)
class Sequence:
    """The numbers of one publisher and topic: the last one, and what was counted. `missed` counts late ones as well."""

    last: int
    received: int = 1
    missed: int = 0
    gaps: int = 0
    late: int = 0
    duplicates: int = 0
    restarts: int = 0
    # What the connection that took over may repeat: numbers up to this one.
    repeats_to: int | None = None
    open_gaps: deque[range] = field(default_factory=lambda: deque(maxlen=_GAPS_KNOWN))

    def note(self, number: int) -> tuple[Arrival, int]:
        """See Sequences."""
        step = _step(self.last, number)
        if step <= 0:
            return self._not_higher(number), 0
        self.repeats_to = None
        self.received += 1
        missed = step - 1
        if not missed:
            self.last = number
            return Arrival.NEXT, 0
        self.open_gaps.append(range(self.last + 1, self.last + step))
        self.last = number
        self.gaps += 1
        self.missed += missed
        return Arrival.AFTER_A_GAP, missed

    def _not_higher(self, number: int) -> Arrival:
        if self._fills_a_gap(number):
            self.received += 1
            self.late += 1
            return Arrival.LATE
        if self.repeats_to is not None and _step(self.repeats_to, number) <= 0:
            self.duplicates += 1
            return Arrival.DUPLICATE
        self.last, self.repeats_to = number, None
        self.received += 1
        self.restarts += 1
        self.open_gaps.clear()
        return Arrival.RESTARTED

    def _fills_a_gap(self, number: int) -> bool:
        for gap in self.open_gaps:
            # A gap over the end of all numbers goes on beyond it.
            for at in (number, number + _NUMBERS):
                if at in gap:
                    self.open_gaps.remove(gap)
                    self.open_gaps.extend(part for part in (range(gap.start, at), range(at + 1, gap.stop)) if part)
                    return True
        return False


def _step(last: int, number: int) -> int:
    """Return how far a number is after the last one, over the end of all numbers where that is near."""
    step = number - last
    if step + _NUMBERS <= _WRAP_WITHIN:
        return step + _NUMBERS
    if step - _NUMBERS >= -_WRAP_WITHIN:
        return step - _NUMBERS
    return step


class Sequences:
    """The numbers of every publisher and topic of one subscription.

    Of the longest unheard nothing is kept, so one that comes back is `first` again; `forgotten` counts them.
    """

    def __init__(self, *, most: int = PUBLISHERS_MAX) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, str], Sequence] = OrderedDict()
        self.forgotten = 0

    @property
    def known(self) -> dict[tuple[int, str], Sequence]:
        """By publisher and topic, a copy."""
        return dict(self._known)

    def begin_repeats(self) -> None:
        """Another connection brings the events from now on, and may repeat what has come so far."""
        for each in self._known.values():
            each.repeats_to = each.last

    def end_repeats(self) -> None:
        """Nothing can come twice any more."""
        for each in self._known.values():
            each.repeats_to = None

    def note(self, publisher_id: int, topic: str, number: int) -> tuple[Arrival, int]:
        """Return what a number says, and how many before it are missing."""
        key = publisher_id, topic
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            return found.note(number)
        self._known[key] = Sequence(number)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
            self.forgotten += 1
        return Arrival.FIRST, 0
