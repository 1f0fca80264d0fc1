"""Promises made feasible: floors and ceilings that a node's budget can hold.

HTB lets a class send at its floor whatever its parent says, so floors that add up to
more than the budget would break the budget, silently. They are scaled to fit, and
every such change is reported as a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError
from kura_shaper.tree.notes import Note
from kura_shaper.tree.params import TRICKLE, TRICKLE_MIN
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kura_shaper.tenants.document import Tenant

_LEAST = TRICKLE_MIN.bits_per_second


@dataclass(frozen=True, slots=True)
class Allotment:
    """The rates that the tree enforces: floors and ceilings by tenant name, and their trickle."""

    floors: Mapping[str, Rate]
    ceilings: Mapping[str, Rate]
    trickle: Rate
    notes: tuple[Note, ...] = ()


def allot(tenants: Sequence[Tenant], *, budget: Rate, reserved: Rate, own_classes: int) -> Allotment:
    """Fit the tenants' promises into the budget less what is reserved beside them.

    own_classes is how many classes of ours take a trickle from the same budget.
    Raises RefusedError when not even a trickle for everyone fits.
    """
    room = max(0, budget.bits_per_second - reserved.bits_per_second)
    if (len(tenants) + own_classes) * _LEAST > room:
        beside = f" beside a host reserve of {reserved}" if reserved.bits_per_second else ""
        fitting = max(0, room // _LEAST - own_classes)
        left_out = f", nothing is left from tenant {tenants[fitting].name} on" if fitting < len(tenants) else ""
        raise RefusedError(
            f"a budget of {budget} can't hold {len(tenants)} tenants{beside}:"
            f" each needs at least {TRICKLE_MIN} bit/s{left_out}",
            remedy="raise the budget or move tenants to another node",
        )
    trickle = _trickle(tenants, room, own_classes)
    available = room - own_classes * trickle
    floors = _fitting([_at_least(t, trickle) for t in tenants], available)
    by_name = {t.name: Rate(floor) for t, floor in zip(tenants, floors, strict=True)}
    ceilings = {t.name: max(min(t.ceiling, budget), by_name[t.name]) for t in tenants}
    return Allotment(by_name, ceilings, Rate(trickle), _notes(tenants, by_name, ceilings, budget, Rate(available)))


def _at_least(tenant: Tenant, trickle: int) -> int:
    """Return a tenant's floor, or the trickle where that is more and within the ceiling."""
    return max(tenant.floor.bits_per_second, min(trickle, tenant.ceiling.bits_per_second), _LEAST)


def _trickle(tenants: Sequence[Tenant], room: int, own_classes: int) -> int:
    """Halve the trickle until everyone's fits beside the promised floors.

    Halving, since a share worked out anew for each tenant that comes would change all others.
    """
    trickle = TRICKLE.bits_per_second
    while trickle > _LEAST and own_classes * trickle + sum(_at_least(t, trickle) for t in tenants) > room:
        trickle //= 2
    return trickle


def _fitting(floors: Sequence[int], available: int) -> Sequence[int]:
    """Scale floors down to what is available: each keeps the least, what is above it shrinks alike."""
    if sum(floors) <= available:
        return floors
    above = sum(floors) - _LEAST * len(floors)
    room = available - _LEAST * len(floors)
    return [_LEAST + (floor - _LEAST) * room // above for floor in floors]


def _notes(
    tenants: Sequence[Tenant],
    floors: Mapping[str, Rate],
    ceilings: Mapping[str, Rate],
    budget: Rate,
    available: Rate,
) -> tuple[Note, ...]:
    notes = []
    scaled = [t for t in tenants if floors[t.name] < t.floor]
    if scaled:
        total = Rate(sum(max(t.floor.bits_per_second, _LEAST) for t in tenants))
        message = f"floors add up to {total}, a budget of {budget} leaves {available} for them: scaled to fit"
        notes.append(Note("floors-scaled", message))
    notes += [Note("floor-scaled", f"floor of {t.name}: {floors[t.name]} instead of {t.floor}", t.name) for t in scaled]
    notes += [
        Note("ceiling-clamped", f"ceiling of {t.name}: {ceilings[t.name]} instead of {t.ceiling}", t.name)
        for t in tenants
        if ceilings[t.name] < t.ceiling
    ]
    return tuple(notes)
