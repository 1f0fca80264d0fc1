"""Placement: which shaped tx queue each tenant lives on, where there are several.

A tenant lives on exactly one queue, so that its ceiling stays a true aggregate. It is
placed once, when it comes, and stays: a move would drop what waits in its leaf and send
the packets of a running connection out of two queues at once, out of order.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kura_shaper.tenants.document import Tenant

_IDLE = Rate(0)


def place(
    tenants: Sequence[Tenant],
    queues: int,
    *,
    floors: Mapping[str, Rate],
    current: Mapping[int, int],
    demand: Mapping[int, Rate] = {},
) -> dict[int, int]:
    """Return the queue of each tenant, 0 to queues - 1, by class id and in the tenants' order.

    floors are the allotted ones, by tenant name; current and demand go by class id. Whoever
    is on one of the queues stays. The others go, heaviest first, to the queue that carries
    least: the loads of queues filled so differ by at most the heaviest tenant's weight.
    """
    weights = {t.class_id: max(floors[t.name], demand.get(t.class_id, _IDLE)).bits_per_second for t in tenants}
    placed = {class_id: current[class_id] for class_id in weights if current.get(class_id, queues) in range(queues)}
    # The order of these triples is the rule: the least load, then the fewest tenants, then the first queue.
    carried = [_carried(queue, placed, weights) for queue in range(queues)]
    heapify(carried)
    for class_id in sorted(weights.keys() - placed.keys(), key=lambda class_id: (-weights[class_id], class_id)):
        load, count, queue = carried[0]
        heapreplace(carried, (load + weights[class_id], count + 1, queue))
        placed[class_id] = queue
    return {class_id: placed[class_id] for class_id in weights}


def _carried(queue: int, placed: Mapping[int, int], weights: Mapping[int, int]) -> tuple[int, int, int]:
    """Return a queue's load, its number of tenants, and its index."""
    there = [weights[class_id] for class_id, its_queue in placed.items() if its_queue == queue]
    return sum(there), len(there), queue
