"""What bytes say about a promise: the fastest window of each class, and bytes that passed outside the tree.

Pure: readings go in, values come out. Counters of the kernel begin again when a class or a
device is made anew; what a counter lost by that is not counted, and never counts as negative.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import HTB_HANDLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.tree.model import Handle

_SECOND_NS = 1_000_000_000
_BUCKETS = 6
# Some drivers fetch a device's counters from its hardware only once a second.
_UNDER_WAY_NS = 2 * _SECOND_NS


@dataclass(slots=True)
class FastestWindow:
    """The highest rate of a few buckets of time, so that a scrape sees a burst that was over long before it.

    The answer covers the last `seconds` at least, and forgets what is older than that and a sixth.
    """

    seconds: int = 60
    _buckets: deque[tuple[int, int]] = field(default_factory=deque)

    def add(self, at_ns: int, bits_per_second: int) -> None:
        """Take in the rate of one window that ended at that time."""
        number = at_ns // (self.seconds * _SECOND_NS // _BUCKETS)
        if self._buckets and self._buckets[-1][0] == number:
            self._buckets[-1] = (number, max(self._buckets[-1][1], bits_per_second))
        else:
            self._buckets.append((number, bits_per_second))
        while self._buckets[0][0] < number - _BUCKETS:
            self._buckets.popleft()

    def highest(self, now_ns: int) -> int | None:
        """Return the highest rate in bit/s, None when nothing was taken in for as long."""
        oldest = now_ns // (self.seconds * _SECOND_NS // _BUCKETS) - _BUCKETS
        return max((rate for number, rate in self._buckets if number >= oldest), default=None)


class Windows:
    """The fastest window of each class and of the device, from one reading to the next."""

    def __init__(self, seconds: int = 60) -> None:
        self._seconds = seconds
        self._last: tuple[int, Mapping[Handle, int], int] | None = None
        self._missing: set[Handle] = set()
        self.classes: dict[Handle, FastestWindow] = {}
        self.device = FastestWindow(seconds)

    def add(self, at_ns: int, sent_bytes: Mapping[Handle, int], device_bytes: int) -> None:
        """Take in a reading of every class's and the device's counter of bytes."""
        before, self._last = self._last, (at_ns, dict(sent_bytes), device_bytes)
        self._forget_gone(sent_bytes)
        if before is None or at_ns <= before[0]:
            return
        elapsed_ns = at_ns - before[0]
        for classid, count in sent_bytes.items():
            earlier = before[1].get(classid)
            if earlier is not None and count >= earlier:
                window = self.classes.setdefault(classid, FastestWindow(self._seconds))
                window.add(at_ns, (count - earlier) * 8 * _SECOND_NS // elapsed_ns)
        if device_bytes >= before[2]:
            self.device.add(at_ns, (device_bytes - before[2]) * 8 * _SECOND_NS // elapsed_ns)

    def _forget_gone(self, sent_bytes: Mapping[Handle, int]) -> None:
        # A dump during which another class came or went may miss one for once, and what it did is not forgotten.
        missing = self.classes.keys() - sent_bytes.keys()
        for gone in missing & self._missing:
            del self.classes[gone]
        self._missing = missing - self._missing


class Outside:
    """Bytes that left the device and passed no class of the tree, since the agent began to count.

    In shape mq these are also the host's on the queues that are not shaped.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._owed_bytes = 0
        self._last: tuple[int, Mapping[Handle, int]] | None = None
        # What passed the tree lately: when, and how much.
        self._passed: deque[tuple[int, int]] = deque()

    def add(self, at_ns: int, device_bytes: int, roots: Mapping[Handle, int]) -> None:
        """Take in the counters of one moment: the device's, and each root class's (none: there is no tree)."""
        before, self._last = self._last, (device_bytes, dict(roots))
        if before is None or before[1].keys() != roots.keys():
            # A tree came or went, or an HTB of it: how much of what its counters show passed since is not known.
            return
        device, parts = device_bytes - before[0], [count - before[1][root] for root, count in roots.items()]
        if device < 0 or any(part < 0 for part in parts):
            # A counter began again: what lies between is not known.
            return
        # The device counts a packet a moment after the tree has, so a single difference may be below zero.
        self._owed_bytes = max(self._owed_bytes + device - sum(parts), -self._most_under_way(at_ns, sum(parts)))
        if self._owed_bytes > 0:
            self.total_bytes += self._owed_bytes
            self._owed_bytes = 0

    def _most_under_way(self, at_ns: int, passed_bytes: int) -> int:
        """Return how much can have passed the tree and not yet be counted by the device.

        A device that counts less than the tree for good (it drops, or leaves headers out) would
        otherwise hide ever more of what passes outside.
        """
        self._passed.append((at_ns, passed_bytes))
        while self._passed[0][0] <= at_ns - _UNDER_WAY_NS:
            self._passed.popleft()
        return sum(count for _, count in self._passed)


def roots_of(sent_bytes: Mapping[Handle, int]) -> dict[Handle, int]:
    """Return what passed each root class of a tree of ours, nothing when there is none."""
    return {
        classid: count
        for classid, count in sent_bytes.items()
        if classid.minor == ReservedClass.ROOT and classid.major >= HTB_HANDLE.major
    }
