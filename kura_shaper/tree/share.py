"""Shares: how a node's budget is divided over its shaped tx queues, and moved by demand.

HTBs on different queues can't borrow from each other, so each gets a share: its budget
class's rate and ceil. A share is the queue's floors and a part of the spare, which is what
the budget holds above all floors. The spare is filled in like water into vessels:

- A queue that is not hungry asks for a quarter more than it uses, and at least for a
  starting room, so that it can show that it wants more. A hungry queue asks for everything.
- Where the queues ask for more than there is, all get as much above their floors, but none
  more than it asks for. No queue's headroom comes out of what a hungry one could use.
- Where they ask for less, the rest goes to those that have least above their floors. So a
  queue that starts finds room, and nothing moves while an even division suits everyone.

Both levels are the same whatever the shares were, hence constant demand comes to rest.
Shares are whole bytes a second, as the kernel holds them, and use the budget up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

# All the starting rooms together are this part of the spare, which a hungry queue misses.
_STARTING_PART = 16
# Smaller moves than these are not worth a write: of the budget in all, and of a hungry queue's
# own share, since with many queues a small part of the budget is a large part of a share.
_MOVED_PART = 50
_GAIN_PART = 16


@dataclass(frozen=True, slots=True)
class QueueDemand:
    """What a queue sent lately, and whether it would have sent more with a larger share."""

    used: Rate
    is_hungry: bool


def is_hungry(used: Rate, share: Rate) -> bool:
    """Return whether a queue uses so much of its share that the share may be what limits it."""
    return used.bits_per_second * 10 >= share.bits_per_second * 9


def shares(
    budget: Rate,
    floors: Sequence[Rate],
    demands: Sequence[QueueDemand] | None = None,
    current: Sequence[Rate] | None = None,
) -> tuple[Rate, ...]:
    """Return each queue's share; floors are the sums of what is promised on each, our own classes included.

    Without demands all queues count as idle. The current shares are kept where they still
    fit and hardly anything would move. Raises RefusedError when the floors exceed the budget.
    """
    promised = Rate(sum(floor.bits_per_second for floor in floors))
    if promised > budget:
        raise RefusedError(
            f"a budget of {budget} can't hold floors of {promised} on {len(floors)} queues",
            remedy="scale the floors to fit, raise the budget or move tenants to another node",
        )
    if demands is None:
        demands = [QueueDemand(Rate(0), is_hungry=False) for _ in floors]
    least = [floor.bytes_per_second for floor in floors]
    spare = budget.bytes_per_second - sum(least)
    asked = [_asked(demand, floor, spare, len(least)) for demand, floor in zip(demands, least, strict=True)]
    wanted = [floor + part for floor, part in zip(least, _filled(asked, spare), strict=True)]
    if current is not None:
        held = [share.bytes_per_second for share in current]
        if _fits(held, least, budget) and not _is_worth_a_write(held, wanted, demands):
            wanted = held
    return tuple(Rate.from_bytes_per_second(share) for share in wanted)


def moves(old: Sequence[Rate], new: Sequence[Rate]) -> tuple[tuple[int, Rate], ...]:
    """Return the queues whose share changes, with the new one, in the order to write them.

    All that shrink come first, so the sum never exceeds that of the old or of the new.
    """
    pairs = [(queue, before, after) for queue, (before, after) in enumerate(zip(old, new, strict=True))]
    shrinking = [(queue, after) for queue, before, after in pairs if after < before]
    growing = [(queue, after) for queue, before, after in pairs if after > before]
    return (*shrinking, *growing)


def _asked(demand: QueueDemand, floor: int, spare: int, queues: int) -> int:
    """Return how much of the spare a queue asks for, in bytes a second."""
    if demand.is_hungry:
        return spare
    # A share of five fourths of the use is used to 80 %, well below what makes a queue hungry:
    # no queue becomes hungry by getting what it asked for.
    return max(demand.used.bytes_per_second * 5 // 4 - floor, spare // (_STARTING_PART * queues))


def _filled(asked: Sequence[int], spare: int) -> list[int]:
    """Divide the spare: up to a common level where more is asked for, else at least to one."""
    is_scarce = sum(asked) > spare
    parts = [0] * len(asked)
    # Whoever is off the level goes first, so that the mean of what is left is the others' level.
    order = sorted(range(len(asked)), key=asked.__getitem__, reverse=not is_scarce)
    left = spare
    for before, queue in enumerate(order):
        level = left // (len(order) - before)
        parts[queue] = min(asked[queue], level) if is_scarce else max(asked[queue], level)
        left -= parts[queue]
    return parts


def _fits(held: Sequence[int], least: Sequence[int], budget: Rate) -> bool:
    """Return whether shares are of these queues, hold their floors, and use up this very budget."""
    return (
        len(held) == len(least)
        and all(share >= floor for share, floor in zip(held, least, strict=True))
        and sum(held) == budget.bytes_per_second
    )


def _is_worth_a_write(held: Sequence[int], wanted: Sequence[int], demands: Sequence[QueueDemand]) -> bool:
    """Return whether enough would move. What some gain others lose, so the gains tell it all."""
    gains = [max(0, after - before) for before, after in zip(held, wanted, strict=True)]
    hungry = [(gain, share) for gain, share, demand in zip(gains, held, demands, strict=True) if demand.is_hungry]
    return sum(gains) * _MOVED_PART > sum(held) or any(gain * _GAIN_PART > share for gain, share in hungry)
