"""Shares use the budget up, hold every floor, follow demand in a few steps, and then rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.errors import RefusedError
from kura_shaper.tree.params import TRICKLE_MIN, whole_bytes
from kura_shaper.tree.share import QueueDemand, is_hungry, moves, shares
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of 100 ms each: how long a share may take to follow demand.
STEPS = 5
ENDLESS = Rate(10**15)
IDLE = QueueDemand(Rate(0), is_hungry=False)


def rates(text: str) -> tuple[Rate, ...]:
    return tuple(Rate.parse(word) for word in text.split())


def texts(found: Sequence[Rate]) -> str:
    return " ".join(str(rate) for rate in found)


def demands(text: str) -> list[QueueDemand]:
    """Of `300M 1G!`: the second is hungry."""
    return [QueueDemand(Rate.parse(word.rstrip("!")), is_hungry=word.endswith("!")) for word in text.split()]


def shared(
    budget: str, floors: str, demand: Sequence[QueueDemand] | str | None = None, current: str | None = None
) -> str:
    seen = demands(demand) if isinstance(demand, str) else demand
    return texts(shares(Rate.parse(budget), rates(floors), seen, None if current is None else rates(current)))


def seen_at(offered: Sequence[Rate], current: Sequence[Rate]) -> list[QueueDemand]:
    """What is measured where queues are offered so much: no more than the share passes."""
    used = [min(rate, share) for rate, share in zip(offered, current, strict=True)]
    return [QueueDemand(rate, is_hungry(rate, share)) for rate, share in zip(used, current, strict=True)]


def followed(
    budget: Rate, floors: Sequence[Rate], offered: Sequence[Rate], start: Sequence[Rate]
) -> list[tuple[Rate, ...]]:
    """The shares of two times STEPS steps under constant demand, the first ones among them."""
    history = [tuple(start)]
    for _ in range(2 * STEPS):
        history.append(shares(budget, floors, seen_at(offered, history[-1]), history[-1]))
    return history


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Rate, tuple[Rate, ...]]:
    """A budget, and floors of queues that it holds, up to all of it. Our own classes have one on each queue."""
    floor = st.sampled_from([1_000_003, 25_000_000]) | st.integers(TRICKLE_MIN.bits_per_second, 10**9)
    floors = draw(st.lists(floor, min_size=1, max_size=8))
    spare = draw(st.sampled_from([0, 7, 10**9]) | st.integers(0, 10**10))
    return Rate(sum(floors) + spare), tuple(Rate(floor) for floor in floors)


DEMAND = st.builds(QueueDemand, st.integers(0, 10**10).map(Rate), is_hungry=st.booleans())


def drawn_shares(data: st.DataObject, budget: Rate, floors: Sequence[Rate]) -> tuple[Rate, ...]:
    """Shares that some demand led to."""
    return shares(budget, floors, data.draw(st.lists(DEMAND, min_size=len(floors), max_size=len(floors))))


@pytest.mark.parametrize(
    ("used", "share", "hungry"),
    [("90M", "100M", True), ("89999999", "100M", False), ("0", "1M", False), ("120M", "100M", True)],
)
def test_a_queue_is_hungry_from_nine_tenths_of_its_share_on(used: str, share: str, hungry: bool) -> None:
    assert is_hungry(Rate.parse(used), Rate.parse(share)) is hungry


@pytest.mark.parametrize(
    ("floors", "expected"),
    [("0", "3.2G"), ("100M 100M", "1.6G 1.6G"), ("1.2G 200M", "2.1G 1.1G"), ("3.2G 0", "3.2G 0")],
)
def test_without_demand_the_spare_is_split_evenly(floors: str, expected: str) -> None:
    assert shared("3.2G", floors) == expected
    assert shared("3.2G", floors, [IDLE] * len(floors.split())) == expected


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        # Everyone's need fits an even part: nothing moves.
        ("640M 200M 0 800k", "800M 800M 800M 800M"),
        # One needs more than that: the others share what it leaves.
        ("1.6G 200M 0 0", "2G 400M 400M 400M"),
        # One is hungry: the others keep a quarter above their use, and at least a starting room of 50M.
        ("700M! 400M 0 40M", "2.6G 500M 50M 50M"),
        # Two are hungry: alike.
        ("700M! 1G! 400M 0", "1.325G 1.325G 500M 50M"),
        # One that is not hungry keeps no headroom that a hungry one could use.
        ("700M! 1.4G 0 0", "1.55G 1.55G 50M 50M"),
        # None is hungry, but with a quarter above their use they would not fit: alike, too.
        ("1.4G 1.3G 0 0", "1.55G 1.55G 50M 50M"),
        # A device's bursts can show more than the share.
        ("9G! 9G! 9G! 9G!", "800M 800M 800M 800M"),
    ],
)
def test_shares_follow_demand(demand: str, expected: str) -> None:
    assert shared("3.2G", "0 0 0 0", demand) == expected


def test_hungry_queues_are_alike_above_their_floors_and_idle_ones_have_room_above_theirs() -> None:
    assert shared("4.2G", "100M 400M 100M", "1G! 1G! 0") == "1862.5M 2162.5M 175M"


def test_a_quarter_above_the_use_counts_the_floor_in() -> None:
    assert shared("3.4G", "200M 0", "2G 0") == "2.5G 900M"


def test_floors_above_the_budget_are_refused() -> None:
    with pytest.raises(RefusedError) as refused:
        shared("1G", "600M 600M")
    assert refused.value.message == "a budget of 1G can't hold floors of 1.2G on 2 queues"


def test_a_budget_is_used_up_to_the_last_whole_byte() -> None:
    assert sum(share.bits_per_second for share in shares(Rate(1_000_007), rates("1 2 3"))) == 1_000_000


@pytest.mark.parametrize(
    ("current", "demand"),
    [
        ("1.632G 1.568G", "0 0"),
        ("1.664G 1.536G", "0 0"),
        ("1.6G 1.6G", "1.3G 0"),
        ("1.664G 1.536G", "1.6G! 1.5G!"),
    ],
)
def test_current_shares_stay_where_hardly_anything_would_move(current: str, demand: str) -> None:
    assert shared("3.2G", "0 0", demand, current) == current


@pytest.mark.parametrize(
    ("current", "demand", "expected"),
    [
        ("1.664000008G 1.535999992G", "0 0", "1.6G 1.6G"),
        # Of another budget, of another number of queues, below a floor.
        ("1.6G 1.592G", "0 0", "1.6G 1.6G"),
        ("1.6G 1.608G", "0 0", "1.6G 1.6G"),
        ("3.2G", "0 0", "1.6G 1.6G"),
        ("1G 1.1G 1.1G", "0 0", "1.6G 1.6G"),
    ],
)
def test_current_shares_go_where_they_no_longer_fit(current: str, demand: str, expected: str) -> None:
    assert shared("3.2G", "0 0", demand, current) == expected


def test_a_floor_that_rose_is_held_however_little_moves() -> None:
    assert shared("3.2G", "1.61G 1.59G", "0 0", "1.6G 1.6G") == "1.61G 1.59G"


@pytest.mark.parametrize(("share", "moves_it"), [("185M", True), ("190M", False)])
def test_what_is_little_of_the_budget_can_be_much_of_a_hungry_queues_share(share: str, moves_it: bool) -> None:
    rest = "201M " * 15 if moves_it else "210M " + "200M " * 14
    floors, current, evenly = ("0 " * 16).strip(), f"{share} {rest}".strip(), ("200M " * 16).strip()
    assert shared("3.2G", floors, [IDLE] * 16, current) == current
    assert shared("3.2G", floors, current.replace("M", "M!"), current) == (evenly if moves_it else current)


@given(node=nodes(), data=st.data())
def test_shares_use_the_budget_up_and_hold_every_floor(
    node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject
) -> None:
    budget, floors = node
    count = len(floors)
    demand = data.draw(st.none() | st.lists(DEMAND, min_size=count, max_size=count))
    anything = st.lists(st.integers(0, 10**10).map(Rate), max_size=count + 1).map(tuple)
    current = data.draw(st.none() | anything | st.just(drawn_shares(data, budget, floors)))
    found = shares(budget, floors, demand, current)
    assert sum(share.bits_per_second for share in found) == whole_bytes(budget).bits_per_second
    assert all(share >= whole_bytes(floor) for share, floor in zip(found, floors, strict=True))
    assert all(share == whole_bytes(share) for share in found)


@given(node=nodes(), data=st.data())
def test_a_second_look_at_the_same_demand_writes_nothing(
    node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject
) -> None:
    budget, floors = node
    demand = data.draw(st.lists(DEMAND, min_size=len(floors), max_size=len(floors)))
    once = shares(budget, floors, demand, drawn_shares(data, budget, floors))
    assert shares(budget, floors, demand, once) == once


@given(node=nodes())
def test_an_idle_node_writes_nothing(node: tuple[Rate, tuple[Rate, ...]]) -> None:
    budget, floors = node
    at_first = shares(budget, floors)
    assert shares(budget, floors, [IDLE] * len(floors), at_first) == at_first


@given(node=nodes(), data=st.data())
def test_a_queue_alone_with_its_hunger_gets_nearly_all(
    node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject
) -> None:
    budget, floors = node
    alone = data.draw(st.integers(0, len(floors) - 1))
    offered = [ENDLESS if queue == alone else Rate(0) for queue in range(len(floors))]
    share = followed(budget, floors, offered, drawn_shares(data, budget, floors))[STEPS][alone]
    others = sum(floor.bits_per_second for queue, floor in enumerate(floors) if queue != alone)
    starting_rooms = (budget.bits_per_second - sum(floor.bits_per_second for floor in floors)) // 16
    rest = budget.bits_per_second - others - starting_rooms
    # Floors that are no whole bytes leave a byte here and there.
    assert share.bits_per_second * 100 >= (rest - 8 * (len(floors) + 1)) * 85


@given(node=nodes().filter(lambda node: len(node[1]) > 1), data=st.data())
def test_two_hungry_queues_are_soon_alike_above_their_floors(
    node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject
) -> None:
    budget, floors = node
    offered = [ENDLESS if queue < 2 else Rate(0) for queue in range(len(floors))]
    found = followed(budget, floors, offered, drawn_shares(data, budget, floors))[STEPS]
    first, second = (found[queue].bits_per_second - floors[queue].bits_per_second for queue in (0, 1))
    assert abs(first - second) * 25 <= budget.bits_per_second + 25 * 16


@given(node=nodes(), data=st.data())
def test_constant_demand_comes_to_rest(node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject) -> None:
    budget, floors = node
    offer = st.sampled_from([0, 10**15]) | st.integers(0, 2 * budget.bits_per_second // len(floors))
    offered = [Rate(data.draw(offer)) for _ in floors]
    history = followed(budget, floors, offered, drawn_shares(data, budget, floors))
    assert set(history[STEPS:]) == {history[-1]}


@given(node=nodes(), data=st.data())
def test_a_queue_that_starts_beside_a_hungry_one_has_its_part_within_the_steps(
    node: tuple[Rate, tuple[Rate, ...]], data: st.DataObject
) -> None:
    budget, floors = node
    alone = shares(budget, floors, [QueueDemand(Rate(0), is_hungry=queue == 0) for queue in range(len(floors))])
    found = followed(budget, floors, [ENDLESS] * len(floors), alone)[STEPS]
    evenly = shares(budget, floors)
    # What hysteresis may keep from it: a sixteenth of its own share.
    assert all(
        17 * share.bits_per_second >= 16 * part.bits_per_second for share, part in zip(found, evenly, strict=True)
    )


def test_moves_shrink_before_they_grow_and_leave_out_what_stays() -> None:
    assert moves(rates("10M 20M 30M 40M"), rates("15M 20M 10M 35M")) == (
        (2, Rate.parse("10M")),
        (3, Rate.parse("35M")),
        (0, Rate.parse("15M")),
    )
    assert moves(rates("10M 20M"), rates("10M 20M")) == ()


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**10)), max_size=8))
def test_no_step_of_moves_exceeds_both_sums(pairs: list[tuple[int, int]]) -> None:
    old, new = [Rate(before) for before, _ in pairs], [Rate(after) for _, after in pairs]
    state = [before for before, _ in pairs]
    bound = max(sum(state), sum(after for _, after in pairs))
    for queue, share in moves(old, new):
        state[queue] = share.bits_per_second
        assert sum(state) <= bound
    assert [Rate(share) for share in state] == new
