"""What one look at a device finds: a reading, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.tree.model import Handle
    from kura_shaper.tree.snapshot import Snapshot


class State(StrEnum):
    """What a device was seen to be."""

    TREE = "tree"
    NO_TREE = "no_tree"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reading:
    """A tree of ours and its counters. `faults` says what is wrong with the tree itself, a line each.

    `device_bytes` is what the device has sent (None: can't be read), `roots` what each root class had
    sent at that moment. `retransmits` has segments by class id since counting began (None: not counted).
    """

    snapshot: Snapshot
    faults: tuple[str, ...] = ()
    device_bytes: int | None = None
    roots: Mapping[Handle, int] = field(default_factory=dict)
    retransmits: Mapping[int, int] | None = None

    @property
    def at_ns(self) -> int:
        """When it was taken."""
        return self.snapshot.taken_at_ns


@dataclass(frozen=True, slots=True)
class NoReading:
    """A look that found no tree of ours, and why, as one line."""

    at_ns: int
    state: State
    reason: str
