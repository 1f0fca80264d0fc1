"""A tenant is placed once, on the queue that carries least, and nobody else moves for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CLASS_IDS, RATES, tenant, tenants

from kura_shaper.tree.place import place
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kura_shaper.tenants.document import Tenant

QUEUES = st.integers(1, 8)
PLACES = st.dictionaries(st.sampled_from(CLASS_IDS), st.integers(0, 9))
DEMANDS = st.dictionaries(st.sampled_from(CLASS_IDS), st.sampled_from(RATES).map(Rate))


def placed(
    promised: Sequence[Tenant],
    queues: int,
    current: Mapping[int, int] | None = None,
    demand: Mapping[int, Rate] | None = None,
) -> dict[int, int]:
    floors = {t.name: t.floor for t in promised}
    return place(promised, queues, floors=floors, current=current or {}, demand=demand or {})


def loads(promised: Sequence[Tenant], queues: int, found: Mapping[int, int], demand: Mapping[int, Rate]) -> list[int]:
    total = [0] * queues
    for t in promised:
        total[found[t.class_id]] += max(t.floor, demand.get(t.class_id, Rate(0))).bits_per_second
    return total


def test_nobody_is_placed_where_nobody_is() -> None:
    assert placed([], 4, current={0x100: 2}) == {}


def test_one_queue_holds_everyone() -> None:
    assert placed([tenant(0x100), tenant(0x101)], 1, current={0x101: 3}) == {0x100: 0, 0x101: 0}


def test_the_heaviest_goes_first_and_each_to_the_queue_that_carries_least() -> None:
    promised = [tenant(0x100, "30M"), tenant(0x101, "20M"), tenant(0x102, "40M"), tenant(0x103, "20M")]
    assert placed(promised, 2) == {0x102: 0, 0x100: 1, 0x101: 1, 0x103: 0}


def test_demand_above_the_floor_is_what_a_tenant_weighs() -> None:
    promised = [tenant(0x100, "30M"), tenant(0x101, "25M"), tenant(0x102, "25M")]
    assert placed(promised, 2) == {0x100: 0, 0x101: 1, 0x102: 1}
    busy = {0x100: Rate.parse("1M"), 0x102: Rate.parse("200M")}
    assert placed(promised, 2, demand=busy) == {0x102: 0, 0x100: 1, 0x101: 1}


def test_the_allotted_floor_counts_and_not_the_promised_one() -> None:
    promised = [tenant(0x100, "10M"), tenant(0x101, "20M")]
    scaled = {"t100": Rate.parse("5M"), "t101": Rate.parse("4M")}
    assert place(promised, 2, floors=scaled, current={}) == {0x100: 0, 0x101: 1}


def test_of_queues_that_carry_alike_the_one_with_fewer_tenants_is_taken_then_the_first() -> None:
    settled = [tenant(0x100, "10M"), tenant(0x101, "10M"), tenant(0x102, "20M"), tenant(0x103, "20M")]
    current = {0x100: 0, 0x101: 0, 0x102: 1, 0x103: 2}
    assert placed([*settled, tenant(0x104)], 3, current)[0x104] == 1


def test_tenants_just_placed_are_counted_too() -> None:
    promised = [tenant(0x100, "20M"), tenant(0x101, "10M"), tenant(0x102, "10M"), tenant(0x103, "10M")]
    assert placed(promised, 2, current={0x100: 1}) == {0x100: 1, 0x101: 0, 0x102: 0, 0x103: 1}


def test_a_tenant_stays_on_the_most_loaded_queue() -> None:
    promised = [tenant(0x100, "900M"), tenant(0x101, "900M"), tenant(0x102)]
    assert placed(promised, 2, current={0x100: 1, 0x101: 1}) == {0x100: 1, 0x101: 1, 0x102: 0}


@pytest.mark.parametrize("queue", [2, 7, -1])
def test_a_tenant_of_a_queue_that_is_not_there_is_placed_anew(queue: int) -> None:
    assert placed([tenant(0x100), tenant(0x101)], 2, current={0x100: 0, 0x101: queue}) == {0x100: 0, 0x101: 1}


def test_who_left_weighs_nothing() -> None:
    assert placed([tenant(0x101)], 2, current={0x100: 0}) == {0x101: 0}


@given(promised=tenants(), queues=QUEUES, current=PLACES, demand=DEMANDS)
def test_everyone_has_one_queue_and_who_has_one_keeps_it(
    promised: tuple[Tenant, ...], queues: int, current: dict[int, int], demand: dict[int, Rate]
) -> None:
    found = placed(promised, queues, current, demand)
    assert list(found) == [t.class_id for t in promised]
    assert set(found.values()) <= set(range(queues))
    stayed = {class_id for class_id in found if current.get(class_id, queues) < queues}
    assert all(found[class_id] == current[class_id] for class_id in stayed)
    assert placed(promised, queues, found, {}) == found


@given(promised=tenants(), queues=QUEUES, current=PLACES, demand=DEMANDS, data=st.data())
def test_a_tenant_that_comes_or_goes_moves_nobody(
    promised: tuple[Tenant, ...], queues: int, current: dict[int, int], demand: dict[int, Rate], data: st.DataObject
) -> None:
    some = [t for t in promised if data.draw(st.booleans())]
    before = placed(some, queues, current, demand)
    after = placed(promised, queues, before, demand)
    assert {class_id: after[class_id] for class_id in before} == before
    assert placed(some, queues, after, demand) == before


@given(promised=tenants(), queues=QUEUES, demand=DEMANDS, data=st.data())
def test_the_order_of_the_document_does_not_matter(
    promised: tuple[Tenant, ...], queues: int, demand: dict[int, Rate], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(promised))
    assert placed(shuffled, queues, demand=demand) == placed(promised, queues, demand=demand)


@given(promised=tenants(), queues=QUEUES, demand=DEMANDS)
@pytest.mark.case("D3")
def test_loads_differ_by_the_heaviest_tenant_at_most(
    promised: tuple[Tenant, ...], queues: int, demand: dict[int, Rate]
) -> None:
    """Case D3."""
    spread = loads(promised, queues, placed(promised, queues, demand=demand), demand)
    heaviest = max((max(t.floor, demand.get(t.class_id, Rate(0))).bits_per_second for t in promised), default=0)
    assert max(spread) - min(spread) <= heaviest


@given(order=st.permutations(range(0x100, 0x118)), queues=QUEUES)
def test_equal_tenants_that_come_one_by_one_spread_evenly(order: list[int], queues: int) -> None:
    found: dict[int, int] = {}
    for count in range(1, len(order) + 1):
        found = placed([tenant(class_id) for class_id in order[:count]], queues, found)
    counts = [list(found.values()).count(queue) for queue in range(queues)]
    assert max(counts) - min(counts) <= 1
