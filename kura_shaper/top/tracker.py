"""Readings in, frames out: rates from the differences of counters, and what became of the device meanwhile.

Counters begin again when a class, a tree or a device is made anew. A rate over such a moment is
not known, and is None: never negative, never 0. Bytes have 64 bits, so they tell: a class whose
bytes fell was made anew, and a root class whose bytes fell took its whole tree along. (A tree that
has sent more since it was made anew than in all the time before looks as if it had gone on; its
rate is then too low by what it had sent before.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kura_shaper.agent.accounting import Outside, roots_of
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass
from kura_shaper.top.frame import HISTORY, Event, Frame, Share, TenantRow, Totals
from kura_shaper.top.reading import NoReading, Reading, State
from kura_shaper.tree.build import owners_of
from kura_shaper.tree.observe import shape_in_force
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.tree.model import Handle

_SECOND_NS = 1_000_000_000
_WRAP = 1 << 32
_NOTHING = ClassCounters()


class Growth(NamedTuple):
    """What a class's counters grew by."""

    sent_bytes: int
    lended: int
    borrowed: int
    dropped_packets: int


def growth(before: ClassCounters, now: ClassCounters) -> Growth | None:
    """Return what happened between two readings of a class; None when its counters began again.

    All but the bytes have 32 bits in the kernel (struct tc_htb_xstats, gnet_stats_queue) and wrap.
    """
    if now.sent_bytes < before.sent_bytes:
        return None
    grown = [
        (later - earlier) % _WRAP
        for earlier, later in (
            (before.lended, now.lended),
            (before.borrowed, now.borrowed),
            (before.dropped_packets, now.dropped_packets),
        )
    ]
    if max(grown) >= _WRAP // 2:
        return None
    return Growth(now.sent_bytes - before.sent_bytes, *grown)


def rate(grown_bytes: int, interval_ns: int) -> int:
    """Return bits a second."""
    return grown_bytes * 8 * _SECOND_NS // interval_ns


class Tracker:
    """Follows one device. A document gives its tenants names, and tells what was promised."""

    def __init__(self, device: str, document: TenantsDocument | None = None) -> None:
        self._names = owners_of(document or TenantsDocument("", ()))
        self._promised = _sum_of(tenant.floor for tenant in document.tenants) if document else None
        self._last: Reading | None = None
        self._outside = Outside()
        self._frame = Frame(device, State.UNKNOWN, reason="not read yet")

    def take(self, found: Reading | NoReading) -> Frame:
        """Take in the newest look and return what to show."""
        self._frame = self._read(found) if isinstance(found, Reading) else self._not_read(found)
        return self._frame

    def _not_read(self, found: NoReading) -> Frame:
        before = self._frame
        if found.state is State.UNKNOWN:
            # Unknown is not absent: what was read last stays, and grows old.
            rows = tuple(replace(row, history=_grown(row.history, None)) for row in before.tenants)
            return replace(before, state=found.state, reason=found.reason, tenants=rows)
        self._last, self._outside = None, Outside()
        event = before.event
        if before.state is not found.state and before.read_at_ns is not None:
            event = Event(found.at_ns, found.reason)
        return Frame(before.device, found.state, found.reason, before.read_at_ns, event=event)

    def _read(self, found: Reading) -> Frame:
        before, self._last = self._last, found
        interval_ns = found.at_ns - before.at_ns if before else 0
        grown, words = _growths(before, found) if before and interval_ns > 0 else ({}, "")
        event = self._frame.event
        if before is None and self._frame.read_at_ns is not None:
            words = "a tree of ours is back"
        return Frame(
            device=self._frame.device,
            state=State.TREE,
            read_at_ns=found.at_ns,
            interval_ns=interval_ns if grown else None,
            totals=self._totals(before, found, grown, interval_ns),
            tenants=self._tenants(before, found, grown, interval_ns),
            faults=found.faults,
            event=Event(found.at_ns, words) if words else event,
        )

    def _tenants(
        self, before: Reading | None, found: Reading, grown: dict[Handle, Growth], interval_ns: int
    ) -> tuple[TenantRow, ...]:
        resent = _resent(before, found)
        histories = {row.classid: row.history for row in self._frame.tenants}
        rows = []
        for classid, spec in found.snapshot.classes.items():
            if classid.minor < TENANT_CLASS_MIN:
                continue
            one = grown.get(classid)
            bits_per_second = rate(one.sent_bytes, interval_ns) if one else None
            rows.append(
                TenantRow(
                    classid=classid,
                    name=self._names.get(classid.minor, ""),
                    floor=spec.floor,
                    ceiling=spec.ceil,
                    backlog_bytes=found.snapshot.counters.get(classid, _NOTHING).backlog_bytes,
                    bits_per_second=bits_per_second,
                    lended_packets=one.lended if one else None,
                    borrowed_packets=one.borrowed if one else None,
                    dropped_packets=one.dropped_packets if one else None,
                    retransmits=None if resent is None else resent.get(classid.minor, 0),
                    history=_grown(histories[classid], bits_per_second) if classid in histories else (),
                )
            )
        return tuple(rows)

    def _totals(self, before: Reading | None, found: Reading, grown: dict[Handle, Growth], interval_ns: int) -> Totals:
        actual = found.snapshot

        def share(reserved: ReservedClass) -> Share:
            return _share(reserved, found, grown, interval_ns)

        device = _device_growth(before, found)
        went_direct = actual.direct_packets - before.snapshot.direct_packets if before and grown else -1
        specs = actual.classes.values()
        return Totals(
            shape=shape_in_force(actual),
            budget=_sum_of(spec.ceil for spec in specs if spec.classid.minor == ReservedClass.BUDGET),
            floors=_sum_of(spec.floor for spec in specs if spec.classid.minor >= TENANT_CLASS_MIN),
            promised=self._promised,
            node=share(ReservedClass.BUDGET),
            host=share(ReservedClass.HOST),
            gateway=share(ReservedClass.GATEWAY),
            unattributed=share(ReservedClass.UNATTRIBUTED),
            unknown=share(ReservedClass.UNKNOWN),
            device_bits_per_second=None if device is None or interval_ns <= 0 else rate(device, interval_ns),
            outside=self._passed_outside(before, found, interval_ns),
            direct_packets=actual.direct_packets,
            new_direct_packets=went_direct if went_direct >= 0 else None,
        )

    def _passed_outside(self, before: Reading | None, found: Reading, interval_ns: int) -> Share | None:
        if found.device_bytes is None:
            return None
        so_far = self._outside.total_bytes
        self._outside.add(found.at_ns, found.device_bytes, found.roots)
        is_known = before is not None and before.device_bytes is not None and interval_ns > 0
        grown = self._outside.total_bytes - so_far
        return Share(rate(grown, interval_ns) if is_known else None, self._outside.total_bytes)


def _growths(before: Reading, found: Reading) -> tuple[dict[Handle, Growth], str]:
    """Return what each class's counters grew by, those left out that began again, and words for that."""
    if before.snapshot.device.ifindex != found.snapshot.device.ifindex:
        return {}, "the device was made anew: its counters began again"
    counters = found.snapshot.counters
    found_roots = roots_of({classid: one.sent_bytes for classid, one in counters.items()})
    old = before.snapshot.counters
    anew = {root.major for root, count in found_roots.items() if root in old and count < old[root].sent_bytes}
    grown: dict[Handle, Growth] = {}
    restarted: list[Handle] = []
    for classid, now in counters.items():
        earlier = old.get(classid)
        if earlier is None or classid.major in anew:
            continue
        one = growth(earlier, now)
        if one is None:
            restarted.append(classid)
        else:
            grown[classid] = one
    if anew:
        return grown, "the tree was made anew: its counters began again"
    if restarted:
        shown = ", ".join(str(classid) for classid in sorted(restarted)[:3])
        more = f" and {len(restarted) - 3} more" if len(restarted) > 3 else ""
        return grown, f"class {shown}{more} was made anew: its counters began again"
    return grown, ""


def _share(reserved: ReservedClass, found: Reading, grown: dict[Handle, Growth], interval_ns: int) -> Share:
    """Return what a class of ours sends, over all HTBs: known only where it is known of each."""
    counters = {classid: one for classid, one in found.snapshot.counters.items() if classid.minor == reserved}
    sent = sum(one.sent_bytes for one in counters.values())
    if not counters or not counters.keys() <= grown.keys():
        return Share(None, sent)
    return Share(rate(sum(grown[classid].sent_bytes for classid in counters), interval_ns), sent)


def _device_growth(before: Reading | None, found: Reading) -> int | None:
    if before is None or before.device_bytes is None or found.device_bytes is None:
        return None
    if before.snapshot.device.ifindex != found.snapshot.device.ifindex:
        return None
    grown = found.device_bytes - before.device_bytes
    return grown if grown >= 0 else None


def _resent(before: Reading | None, found: Reading) -> dict[int, int] | None:
    """Return the segments that each class id sent again in the interval; None where that isn't known."""
    if before is None or before.retransmits is None or found.retransmits is None:
        return None
    resent = {class_id: count - before.retransmits.get(class_id, 0) for class_id, count in found.retransmits.items()}
    # Counts never fall, unless counting itself began anew, by other marks.
    return None if min(resent.values(), default=0) < 0 else resent


def _grown(history: tuple[int | None, ...], newest: int | None) -> tuple[int | None, ...]:
    return (*history[1 - HISTORY :], newest)


def _sum_of(rates: Iterable[Rate]) -> Rate:
    return Rate(sum(each.bits_per_second for each in rates))
