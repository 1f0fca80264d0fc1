"""What a view shows at a moment: the device, its tenants, and how sure all of it is.

Rates are whole bits a second over the time between two readings; None is a rate that isn't known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kura_shaper.top.reading import State
    from kura_shaper.tree.model import Handle, Shape
    from kura_shaper.units import Rate

HISTORY = 60


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant's class. `name` is "" where nobody told it; `history` has its last rates, the newest last.

    `lended_packets` and `borrowed_packets` were sent within the floor and beyond it, `dropped_packets`
    dropped, `retransmits` sent again by TCP, all in the interval; a GSO packet counts as one.
    """

    classid: Handle
    name: str
    floor: Rate
    ceiling: Rate
    backlog_bytes: int
    bits_per_second: int | None = None
    lended_packets: int | None = None
    borrowed_packets: int | None = None
    dropped_packets: int | None = None
    retransmits: int | None = None
    history: tuple[int | None, ...] = ()

    @property
    def class_id(self) -> int:
        """The id of the tenants document."""
        return self.classid.minor

    @property
    def label(self) -> str:
        """The name, or else the class id."""
        return self.name or f"{self.class_id:#x}"

    @property
    def ceiling_permille(self) -> int | None:
        """Its rate as a part of its ceiling."""
        if self.bits_per_second is None:
            return None
        return self.bits_per_second * 1000 // max(1, self.ceiling.bits_per_second)

    @property
    def borrowed_permille(self) -> int | None:
        """The part of its packets that went beyond its floor; None where it sent none."""
        if self.lended_packets is None or self.borrowed_packets is None:
            return None
        sent = self.lended_packets + self.borrowed_packets
        return self.borrowed_packets * 1000 // sent if sent else None


@dataclass(frozen=True, slots=True)
class Share:
    """What one of our own classes sends; `sent_bytes` is since it was made (outside: since it was watched)."""

    bits_per_second: int | None
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The device as a whole. `node` is all that counts against the budget.

    `promised` is the sum of the floors in the tenants document, None without one; `floors` what the
    kernel has, where they are scaled to fit. `outside` passed no class of the tree, in shape mq also the
    host's on its own queues; it is None where the device's counter can't be read.
    """

    shape: Shape | None
    budget: Rate
    floors: Rate
    promised: Rate | None
    node: Share
    host: Share
    gateway: Share
    unattributed: Share
    unknown: Share
    device_bits_per_second: int | None = None
    outside: Share | None = None
    direct_packets: int = 0
    new_direct_packets: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the device or its tree while it was watched."""

    at_ns: int
    words: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment of a view. What is shown was read at `read_at_ns`, None when nothing was read yet.

    `reason` is why there is no newer reading. Where the state is unknown, `totals` and `tenants` are
    those of the last reading. `interval_ns` is what the rates are over, None where there are none.
    """

    device: str
    state: State
    reason: str = ""
    read_at_ns: int | None = None
    interval_ns: int | None = None
    totals: Totals | None = None
    tenants: tuple[TenantRow, ...] = ()
    faults: tuple[str, ...] = ()
    event: Event | None = None
