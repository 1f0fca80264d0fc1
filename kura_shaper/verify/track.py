"""From samples of a device's counters to what passed in every window. Pure: samples go in, values come out.

A class that did not move between two samples costs nothing: of a run of equal counts only the first
and the last reading are kept, which is all that a window can begin or end at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from kura_shaper.agent.accounting import Outside
from kura_shaper.measure import Reading, Series
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import ROOT
from kura_shaper.verify.observed import Hungry, Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.kernel.device_counters import SentCounters
    from kura_shaper.tree.model import Handle
    from kura_shaper.tree.snapshot import ClassCounters

_NS_PER_S = 1_000_000_000
# A frame's checksum and what a driver may pad or tag it with, which some of them count.
_FRAME_EXTRA_BYTES = 24


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: the device and its root qdisc within [at_ns, read_ns], then every class until done_ns.

    root_bytes is None when the root qdisc could not be read.
    """

    at_ns: int
    read_ns: int
    done_ns: int
    device: SentCounters
    root_bytes: int | None
    counters: Mapping[Handle, ClassCounters]

    @property
    def classes(self) -> tuple[int, int]:
        """The moment that the classes were read at, and how wide it is."""
        spread_ns = self.done_ns - self.read_ns
        return self.read_ns + spread_ns // 2, spread_ns


@dataclass(slots=True)
class _Stretch:
    since: Sample
    sent_bytes: int
    budget_bytes: int


@dataclass(slots=True)
class Tracker:
    """Takes in samples in order of time. packet_bytes is the largest packet that may be under way between counters."""

    packet_bytes: int = 65_536
    readings: int = 0
    longest_window_ns: int = 0
    vanished_at_ns: int | None = None
    broken: dict[int, str] = field(default_factory=dict)
    backlog_bytes: dict[int, int] = field(default_factory=dict)
    dropped_packets: Counter[int] = field(default_factory=Counter)
    _last: Sample | None = None
    _first: Sample | None = None
    _previous: dict[Handle, ClassCounters] = field(default_factory=dict)
    _totals: Counter[int] = field(default_factory=Counter)
    _tracks: dict[int, list[Reading]] = field(default_factory=dict)
    _missing: set[Handle] = field(default_factory=set)
    _hungry: dict[int, _Stretch] = field(default_factory=dict)
    _stretches: defaultdict[int, list[Hungry]] = field(default_factory=lambda: defaultdict(list))
    _device: list[Reading] = field(default_factory=list)
    _root: list[Reading] = field(default_factory=list)
    _outside: Outside = field(default_factory=Outside)
    # What each class that waits, and the budget, had sent by the last sample.
    _ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    _empty: int = 0

    def add(self, sample: Sample) -> None:
        """Take in a sample."""
        self.readings += 1
        if self._last is not None:
            self.longest_window_ns = max(self.longest_window_ns, sample.done_ns - self._last.at_ns)
        self._count_device(sample)
        self._note_vanished(sample)
        self._count_classes(sample)
        self._note_hungry(sample)
        self._first = self._first or sample
        self._last = sample

    def traffic(self, start_ns: int, end_ns: int, window_ns: int) -> Traffic:
        """Return all that was seen, but for what no counter tells."""
        return Traffic(
            start_ns=start_ns,
            end_ns=end_ns,
            window_ns=window_ns,
            readings=self.readings,
            sent=self.sent(),
            device=self.device(),
            root=self.root(),
            device_packets=self.device_packets,
            outside_bytes=self.outside_bytes(),
            longest_window_ns=self.longest_window_ns,
            vanished_at_ns=self.vanished_at_ns,
            hungry=self.hungry(),
            broken=self.broken,
            backlog_bytes=self.backlog_bytes,
            dropped_packets=self.dropped_packets,
        )

    def sent(self) -> dict[int, Series]:
        """Return the readings of each class id, up to the last sample."""
        if self._last is None:
            return {}
        at_ns, spread_ns = self._last.classes
        found = {}
        for minor, track in self._tracks.items():
            readings = track
            if track[-1].at_ns != at_ns and minor not in self.broken:
                readings = [*track, Reading(at_ns, track[-1].count_bytes, spread_ns)]
            found[minor] = Series(f"class {minor:x}", tuple(readings))
        return found

    def hungry(self) -> dict[int, tuple[Hungry, ...]]:
        """Return the stretches during which classes always had packets waiting."""
        if self._last is not None:
            for minor in list(self._hungry):
                self._end_stretch(minor, self._last)
        return {minor: tuple(stretches) for minor, stretches in self._stretches.items()}

    def device(self) -> Series:
        """Return the readings of the device's counter of bytes."""
        return Series("device", tuple(self._device))

    def root(self) -> Series:
        """Return the readings of the root qdisc's."""
        return Series("root qdisc", tuple(self._root))

    def outside_bytes(self) -> int:
        """Return what the device sent beyond its root qdisc, less all that the moments of reading may explain."""
        if self._first is None or self._last is None or len(self._root) < 2:
            return 0
        total = self.device().whole().sent_bytes - self.root().whole().sent_bytes
        return max(0, max(total, self._outside.total_bytes) - self._slack_bytes())

    @property
    def device_packets(self) -> int:
        """Packets that the device sent meanwhile."""
        if self._first is None or self._last is None:
            return 0
        return max(0, self._last.device.packets - self._first.device.packets)

    def _slack_bytes(self) -> int:
        """What the two counters may differ by: frames' extras, and what passed while one of them was not up to date.

        Some drivers fetch the device's counters only now and then: as long as they stood still while the
        root qdisc moved, as much may have been counted late.
        """
        stalled_ns = stall_ns = spread_ns = fastest = 0
        for (d0, d1), (r0, r1) in zip(pairwise(self._device), pairwise(self._root), strict=True):
            spread_ns = max(spread_ns, d1.spread_ns)
            elapsed_ns = max(1, r1.at_ns - r0.at_ns)
            moved = r1.count_bytes - r0.count_bytes
            fastest = max(fastest, moved * _NS_PER_S // elapsed_ns)
            stalled_ns = stalled_ns + elapsed_ns if moved > 0 and d1.count_bytes == d0.count_bytes else 0
            stall_ns = max(stall_ns, stalled_ns + elapsed_ns if stalled_ns else 0)
        late = fastest * (stall_ns + 2 * spread_ns) // _NS_PER_S
        # At either end a packet may be counted by the one and not yet by the other.
        under_way = 2 * self.packet_bytes if fastest else 0
        return _FRAME_EXTRA_BYTES * self.device_packets + late + under_way

    def _count_device(self, sample: Sample) -> None:
        if sample.root_bytes is None:
            return
        spread_ns = sample.read_ns - sample.at_ns
        at_ns = sample.at_ns + spread_ns // 2
        if self._root and sample.root_bytes < self._root[-1].count_bytes:
            self.broken[0] = "the root qdisc was made anew meanwhile"
        self._device.append(Reading(at_ns, sample.device.bytes, spread_ns))
        self._root.append(Reading(at_ns, sample.root_bytes, spread_ns))
        self._outside.add(at_ns, sample.device.bytes, {ROOT: sample.root_bytes})

    def _note_vanished(self, sample: Sample) -> None:
        # A dump beside a change may come empty for once.
        self._empty = 0 if sample.counters else self._empty + 1
        if self._empty == 2 and self._first is not None and self._first.counters and self.vanished_at_ns is None:
            self.vanished_at_ns = sample.at_ns

    def _count_classes(self, sample: Sample) -> None:
        moved: set[int] = set()
        fresh: set[int] = set()
        for handle, found in sample.counters.items():
            before = self._previous.get(handle)
            if before == found:
                continue
            self._previous[handle] = found
            minor = handle.minor
            if before is None:
                (moved if minor in self._tracks else fresh).add(minor)
                self._totals[minor] += found.sent_bytes
                continue
            self.dropped_packets[minor] += max(0, found.dropped_packets - before.dropped_packets)
            if found.sent_bytes < before.sent_bytes:
                self.broken[minor] = "its counter began again: the class was made anew meanwhile"
            elif found.sent_bytes > before.sent_bytes:
                self._totals[minor] += found.sent_bytes - before.sent_bytes
                moved.add(minor)
        at_ns, spread_ns = sample.classes
        for minor in fresh:
            self._tracks[minor] = [Reading(at_ns, self._totals[minor], spread_ns)]
        for minor in moved - fresh - self.broken.keys():
            self._append(minor, at_ns, spread_ns)
        self._note_missing(sample)

    def _append(self, minor: int, at_ns: int, spread_ns: int) -> None:
        track = self._tracks[minor]
        is_sure = self._last is not None and not any(handle.minor == minor for handle in self._missing)
        if self._last is not None and is_sure and track[-1].at_ns < self._last.classes[0]:
            # It stood still until the sample before this one.
            track.append(Reading(self._last.classes[0], track[-1].count_bytes, self._last.classes[1]))
        track.append(Reading(at_ns, self._totals[minor], spread_ns))

    def _note_missing(self, sample: Sample) -> None:
        missing = self._previous.keys() - sample.counters.keys()
        for handle in missing & self._missing:
            self.broken.setdefault(handle.minor, "its class went away meanwhile")
            del self._previous[handle]
        self._missing = missing - self._missing

    def _note_hungry(self, sample: Sample) -> None:
        waiting: Counter[int] = Counter()
        backlog: Counter[int] = Counter()
        for handle, found in sample.counters.items():
            if found.backlog_packets:
                waiting[handle.minor] += found.backlog_packets
                backlog[handle.minor] += found.backlog_bytes
        self.backlog_bytes = dict(backlog)
        budget = self._totals[ReservedClass.BUDGET]
        for minor in self._hungry.keys() - waiting.keys():
            if self._last is not None:
                self._end_stretch(minor, self._last)
        for minor in waiting.keys() - self._hungry.keys():
            self._hungry[minor] = _Stretch(sample, self._totals[minor], budget)
        self._ends = {minor: (self._totals[minor], budget) for minor in self._hungry}

    def _end_stretch(self, minor: int, last: Sample) -> None:
        """End a stretch at the last sample that still saw packets waiting."""
        stretch = self._hungry.pop(minor)
        sent, budget = self._ends[minor]
        if last is not stretch.since:
            # As long as it can't have been shorter than: what is short of a floor is so beyond doubt.
            start_ns, end_ns = stretch.since.done_ns, last.read_ns
            if end_ns > start_ns:
                found = Hungry(start_ns, end_ns, sent - stretch.sent_bytes, budget - stretch.budget_bytes)
                self._stretches[minor].append(found)
