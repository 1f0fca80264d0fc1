"""Promises that a budget can't hold are scaled, clamped or refused, and always said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import tenant, tenants

from kura_shaper.errors import RefusedError
from kura_shaper.tree.allot import Allotment, allot
from kura_shaper.tree.params import TRICKLE, TRICKLE_MIN
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tenants.document import Tenant

NOTHING = Rate(0)


def allotted(*promised: Tenant, budget: str, reserved: str = "0") -> Allotment:
    return allot(promised, budget=Rate.parse(budget), reserved=Rate.parse(reserved), own_classes=2)


def floors(found: Allotment) -> list[str]:
    return [str(rate) for rate in found.floors.values()]


def codes(found: Allotment) -> list[tuple[str, str]]:
    return [(note.code, note.tenant) for note in found.notes]


def test_promises_that_fit_are_kept_to_the_bit_and_nothing_is_said() -> None:
    found = allotted(tenant(0x100, "25M", "500M"), tenant(0x101, "250.000001M", "1G"), budget="3G")
    assert floors(found) == ["25M", "250000.001k"]
    assert [str(rate) for rate in found.ceilings.values()] == ["500M", "1G"]
    assert (found.trickle, found.notes) == (TRICKLE, ())


def test_a_tenant_without_a_floor_gets_a_trickle() -> None:
    found = allotted(tenant(0x100, "0", "500M"), tenant(0x101, "8", "500M"), budget="3G")
    assert floors(found) == ["1M", "1M"]


def test_a_trickle_stays_within_a_ceiling_below_it() -> None:
    found = allotted(tenant(0x100, "0", "300k"), tenant(0x101, "0", "64k"), budget="3G")
    assert floors(found) == ["300k", "64k"]
    assert [str(rate) for rate in found.ceilings.values()] == ["300k", "64k"]


def test_a_ceiling_that_no_class_could_have_becomes_the_least() -> None:
    found = allotted(tenant(0x100, "0", "8"), budget="3G")
    assert (found.floors["t100"], found.ceilings["t100"]) == (TRICKLE_MIN, TRICKLE_MIN)


def test_floors_above_the_budget_are_scaled_alike_and_noted() -> None:
    found = allotted(tenant(0x100, "2G", "4G"), tenant(0x101, "1G", "4G"), budget="1.5G")
    assert floors(found) == ["999906.248k", "499968.751k"]
    assert codes(found) == [
        ("floors-scaled", ""),
        ("floor-scaled", "t100"),
        ("floor-scaled", "t101"),
        ("ceiling-clamped", "t100"),
        ("ceiling-clamped", "t101"),
    ]
    assert found.notes[0].message == "floors add up to 3G, a budget of 1.5G leaves 1499.875M for them: scaled to fit"
    assert found.notes[1].message == "floor of t100: 999906.248k instead of 2G"
    assert found.notes[3].message == "ceiling of t100: 1.5G instead of 4G"


def test_a_floor_above_the_budget_is_clamped_and_the_ceiling_with_it() -> None:
    # A floor of 2000 on a box of 1000 must not yield a ceiling of 2000.
    found = allotted(tenant(0x100, "2G", "2G"), budget="1G")
    assert found.floors["t100"] < Rate.parse("1G")
    assert found.ceilings["t100"] == Rate.parse("1G")


def test_a_ceiling_above_the_budget_is_clamped_alone() -> None:
    found = allotted(tenant(0x100, "25M", "5G"), tenant(0x101, "25M", "1G"), budget="1G")
    assert [str(rate) for rate in found.ceilings.values()] == ["1G", "1G"]
    assert codes(found) == [("ceiling-clamped", "t100")]


def test_what_is_reserved_beside_the_tenants_is_not_promised_to_them() -> None:
    found = allotted(tenant(0x100, "60M", "100M"), budget="100M", reserved="50M")
    assert floors(found) == ["49.875M"]
    assert found.notes[0].message == "floors add up to 60M, a budget of 100M leaves 49.875M for them: scaled to fit"


def test_a_small_floor_is_kept_where_it_fits_although_the_trickle_is_halved() -> None:
    few = [tenant(0x100 + number, "900k", "10M") for number in range(60)]
    found = allotted(*few, budget="55M")
    assert set(floors(found)) == {"900k"}
    assert (str(found.trickle), found.notes) == ("500k", ())


@pytest.mark.parametrize(
    ("count", "budget", "trickle"),
    [
        (8, "10M", "1M"),
        (9, "10M", "500k"),
        (38, "10M", "250k"),
        (39, "10M", "125k"),
        (78, "10M", "125k"),
        (79, "10M", "62.5k"),
        (158, "10M", "62.5k"),
    ],
)
def test_the_trickle_is_halved_until_everyones_fits(count: int, budget: str, trickle: str) -> None:
    found = allotted(*(tenant(0x100 + number, "0") for number in range(count)), budget=budget)
    assert set(floors(found)) == {trickle}
    assert str(found.trickle) == trickle


@pytest.mark.parametrize(
    ("count", "budget", "reserved", "says"),
    [
        (159, "10M", "0", "a budget of 10M can't hold 159 tenants: each needs at least 62.5k bit/s"),
        (0, "124999", "0", "a budget of 124.999k can't hold 0 tenants: each"),
        (0, "0", "0", "a budget of 0 can't hold 0 tenants: each"),
        (1, "50M", "50M", "a budget of 50M can't hold 1 tenants beside a host reserve of 50M: each"),
        (1, "50M", "1G", "a budget of 50M can't hold 1 tenants beside a host reserve of 1G: each"),
    ],
)
def test_a_budget_below_a_trickle_for_each_is_refused_with_what_to_do(
    count: int, budget: str, reserved: str, says: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        allotted(*(tenant(0x100 + number) for number in range(count)), budget=budget, reserved=reserved)
    assert caught.value.message.startswith(says)
    assert caught.value.remedy == "raise the budget or move tenants to another node"


def test_5000_tenants_fit_and_none_is_forgotten() -> None:
    many = [tenant(0x100 + number, "1M" if number % 2 else "0") for number in range(5_000)]
    found = allotted(*many, budget="3G")
    assert len(found.floors) == len(found.ceilings) == 5_000
    assert sum(rate.bits_per_second for rate in found.floors.values()) + 2 * found.trickle.bits_per_second <= 3 * 10**9
    assert floors(found)[:2] == ["125k", "1M"]


@settings(deadline=None)
@given(tenants(), st.integers(0, 20 * 10**9), st.integers(0, 10**9))
def test_what_is_promised_always_fits_the_budget(promised: tuple[Tenant, ...], budget: int, reserved: int) -> None:
    least = (len(promised) + 2) * TRICKLE_MIN.bits_per_second
    if budget - reserved < least:
        with pytest.raises(RefusedError):
            allot(promised, budget=Rate(budget), reserved=Rate(reserved), own_classes=2)
        return
    found = allot(promised, budget=Rate(budget), reserved=Rate(reserved), own_classes=2)
    total = sum(rate.bits_per_second for rate in found.floors.values()) + 2 * found.trickle.bits_per_second
    assert total + reserved <= budget
    for each in promised:
        floor, ceiling = found.floors[each.name], found.ceilings[each.name]
        assert TRICKLE_MIN <= floor <= ceiling <= min(each.ceiling, Rate(budget))
        noted = {note.code for note in found.notes if note.tenant == each.name}
        assert ("floor-scaled" in noted) == (floor < each.floor)
        assert ("ceiling-clamped" in noted) == (ceiling < each.ceiling)


@settings(deadline=None)
@given(tenants(), st.integers(0, 10**10))
def test_a_tenant_that_comes_changes_others_only_when_the_trickle_is_halved_or_floors_are_scaled(
    promised: tuple[Tenant, ...], spare: int
) -> None:
    promised_bits = sum(max(each.floor.bits_per_second, 62_500) for each in promised)
    budget = Rate(promised_bits + 3 * 62_500 + spare)
    before = allot(promised, budget=budget, reserved=NOTHING, own_classes=2)
    after = allot((*promised, tenant(0xFFFF, "0")), budget=budget, reserved=NOTHING, own_classes=2)
    if after.trickle == before.trickle:
        assert {name: after.floors[name] for name in before.floors} == before.floors
        assert {name: after.ceilings[name] for name in before.ceilings} == before.ceilings
