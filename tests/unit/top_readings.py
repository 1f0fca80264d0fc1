"""Readings of a tree whose counters a test chooses, and names that mean harm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from strategies import case, mq_case, snapshot_of, tenant

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.top.reading import NoReading, Reading, State
from kura_shaper.tree.model import Handle
from kura_shaper.tree.snapshot import ClassCounters

if TYPE_CHECKING:
    from strategies import Case

SECOND = 10**9
ACME, BETA = tenant(0x2A7), tenant(0x2B0, floor="100M", ceiling="1G")
FLEET = case(ACME, BETA)
MQ_FLEET = mq_case(ACME, BETA, shaped=2)
ACME_CLASS, BETA_CLASS = Handle(0x20, 0x2A7), Handle(0x20, 0x2B0)
ROOT, BUDGET, UNATTRIBUTED = (
    Handle(0x20, minor) for minor in (ReservedClass.ROOT, ReservedClass.BUDGET, ReservedClass.UNATTRIBUTED)
)
# Clears the screen, moves the cursor, rings, and turns the text round.
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\n\x9b1mevil\u202e\u200b"


def reading(
    seconds: float = 0,
    counters: dict[Handle, ClassCounters] | None = None,
    *,
    of: Case = FLEET,
    ifindex: int = 2,
    device_bytes: int | None = None,
    retransmits: dict[int, int] | None = None,
    direct_packets: int = 0,
    faults: tuple[str, ...] = (),
) -> Reading:
    """A reading so many seconds after the first; classes that aren't named have sent nothing."""
    found = snapshot_of(of.wanted(), of.device)
    every = dict.fromkeys(found.classes, ClassCounters()) | (counters or {})
    snapshot = replace(
        found,
        device=replace(of.device, ifindex=ifindex),
        counters=every,
        direct_packets=direct_packets,
        taken_at_ns=int((1 + seconds) * SECOND),
    )
    roots = {classid: one.sent_bytes for classid, one in every.items() if classid.minor == ReservedClass.ROOT}
    return Reading(snapshot, faults, device_bytes, roots, retransmits)


def no_reading(seconds: float, state: State, reason: str = "because") -> NoReading:
    """A look that found no tree."""
    return NoReading(int((1 + seconds) * SECOND), state, reason)
