"""Promises made feasible: floors and ceilings that a node's budget can hold.

HTB lets a class send at its floor whatever its parent says, so floors that add up to
more than the budget would break the budget, silently. They are scaled to fit, and
every such change is reported as a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError
from kura_shaper.tree.params import TRICKLE, TRICKLE_MIN
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kura_shaper.tenants.document import Tenant


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a person should know about the wanted tree; code is stable."""

    code: str
    message: str
    tenant: str = ""


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
    room = Rate(max(0, budget.bits_per_second - reserved.bits_per_second))
    floored = [t for t in tenants if t.floor >= TRICKLE]
    trickling = len(tenants) - len(floored) + own_classes
    promised = sum(t.floor.bits_per_second for t in floored)
    least = TRICKLE_MIN.bits_per_second
    if (trickling + len(floored)) * least > room.bits_per_second:
        raise RefusedError(
            f"a budget of {budget} can't hold {len(tenants)} tenants: each needs at least {TRICKLE_MIN} bit/s",
            remedy="raise the budget or move tenants to another node",
        )
    trickle = _trickle(room.bits_per_second - promised, trickling)
    available = room.bits_per_second - trickling * trickle.bits_per_second
    floors = {t.name: trickle for t in tenants} | _scaled_floors(floored, Rate(available), least=least)
    ceilings = {t.name: max(min(t.ceiling, budget), floors[t.name]) for t in tenants}
    return Allotment(floors, ceilings, trickle, _notes(tenants, floors, ceilings, budget))


def _trickle(room_bits_per_second: int, classes: int) -> Rate:
    """Halve the trickle until everyone's fits beside the promised floors.

    Halving, since a share worked out anew for each tenant that comes would change all others.
    """
    rate = TRICKLE.bits_per_second
    while rate > TRICKLE_MIN.bits_per_second and rate * classes > room_bits_per_second:
        rate //= 2
    return Rate(rate)


def _scaled_floors(floored: Sequence[Tenant], available: Rate, *, least: int) -> dict[str, Rate]:
    promised = sum(t.floor.bits_per_second for t in floored)
    if promised <= available.bits_per_second:
        return {t.name: t.floor for t in floored}
    # Everyone keeps the least; what is above it is scaled, so the sum stays exact.
    above = promised - least * len(floored)
    room = available.bits_per_second - least * len(floored)
    return {t.name: Rate(least + (t.floor.bits_per_second - least) * room // above) for t in floored}


def _notes(
    tenants: Sequence[Tenant], floors: Mapping[str, Rate], ceilings: Mapping[str, Rate], budget: Rate
) -> tuple[Note, ...]:
    notes = []
    scaled = [t for t in tenants if floors[t.name] < t.floor]
    if scaled:
        total = Rate(sum(t.floor.bits_per_second for t in tenants))
        notes.append(Note("floors-scaled", f"floors add up to {total}, the budget is {budget}: scaled to fit"))
    notes += [Note("floor-scaled", f"floor of {t.name}: {floors[t.name]} instead of {t.floor}", t.name) for t in scaled]
    notes += [
        Note("ceiling-clamped", f"ceiling of {t.name}: {ceilings[t.name]} instead of {t.ceiling}", t.name)
        for t in tenants
        if ceilings[t.name] < t.ceiling
    ]
    return tuple(notes)
