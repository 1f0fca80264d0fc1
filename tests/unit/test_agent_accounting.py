"""What counters say of a promise: they begin again, wrap and go, and no burst or byte outside gets lost by that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.agent.accounting import FastestWindow, Outside, Windows, roots_of
from kura_shaper.tree.model import Handle

SECOND = 1_000_000_000
ROOT, OTHER_ROOT, ACME, ZETA = Handle(0x20, 1), Handle(0x21, 1), Handle(0x20, 0x2A7), Handle(0x20, 0x2A8)


# The fastest window.


def test_the_fastest_of_a_minute_is_told_until_the_minute_and_a_sixth_are_over() -> None:
    window = FastestWindow(60)
    window.add(5 * SECOND, 900)
    for second in range(6, 60):
        window.add(second * SECOND, 10)
    assert window.highest(64 * SECOND) == 900
    window.add(69 * SECOND, 10)
    assert window.highest(69 * SECOND) == 900
    assert window.highest(71 * SECOND) == 10


def test_a_window_that_nothing_was_added_to_for_long_says_nothing() -> None:
    window = FastestWindow(60)
    assert window.highest(0) is None
    window.add(SECOND, 5)
    assert window.highest(1000 * SECOND) is None


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**12)), min_size=1, max_size=200))
def test_a_window_keeps_seven_buckets_however_much_is_added(found: list[tuple[int, int]]) -> None:
    window, at_ns = FastestWindow(60), 0
    for step_ns, rate in found:
        at_ns += step_ns * 10
        window.add(at_ns, rate)
    assert len(window._buckets) <= 7
    assert window.highest(at_ns) is not None
    assert window.highest(at_ns) in [rate for _, rate in found]


def windows_of(*readings: tuple[int, dict[Handle, int], int]) -> Windows:
    found = Windows(60)
    for at_ms, sent, device in readings:
        found.add(at_ms * 1_000_000, sent, device)
    return found


def highest(found: Windows, classid: Handle, at_ms: int) -> int | None:
    window = found.classes.get(classid)
    return window.highest(at_ms * 1_000_000) if window else None


def test_each_window_is_the_bytes_between_two_readings_over_their_time() -> None:
    found = windows_of((0, {ACME: 0}, 0), (100, {ACME: 1_250_000}, 2_500_000), (300, {ACME: 1_250_000}, 2_500_000))
    assert highest(found, ACME, 300) == 100_000_000
    assert found.device.highest(300_000_000) == 200_000_000


def test_a_counter_that_began_again_makes_no_window_and_never_one_below_zero() -> None:
    found = windows_of((0, {ACME: 10**9}, 10**9), (100, {ACME: 5}, 7))
    assert highest(found, ACME, 100) is None
    assert found.device.highest(100_000_000) is None
    found.add(200_000_000, {ACME: 1_255}, 1_257)
    assert highest(found, ACME, 200) == found.device.highest(200_000_000) == 100_000


def test_a_counter_of_64_bits_that_wraps_is_one_that_began_again() -> None:
    found = windows_of((0, {ACME: 2**64 - 10}, 0), (100, {ACME: 10}, 0))
    assert highest(found, ACME, 100) is None


def test_two_readings_at_one_time_make_no_window() -> None:
    found = windows_of((100, {ACME: 0}, 0), (100, {ACME: 10}, 10))
    assert highest(found, ACME, 100) is None


def test_a_class_that_went_takes_its_window_along() -> None:
    found = windows_of((0, {ACME: 0, ZETA: 0}, 0), (100, {ACME: 9, ZETA: 9}, 0), (200, {ZETA: 9}, 0), (300, {}, 0))
    assert ACME not in found.classes
    found.add(400_000_000, {}, 0)
    assert found.classes == {}


def test_a_class_that_one_reading_missed_keeps_the_burst_that_it_had() -> None:
    found = windows_of((0, {ACME: 0}, 0), (100, {ACME: 1_250_000}, 0), (200, {}, 0), (300, {ACME: 1_250_000}, 0))
    assert highest(found, ACME, 300) == 100_000_000
    found.add(400_000_000, {}, 0)
    found.add(500_000_000, {ACME: 1_250_000}, 0)
    assert highest(found, ACME, 500) == 100_000_000


# What passes outside the tree.


def outside_of(*readings: tuple[int, dict[Handle, int]], every_ms: int = 100) -> Outside:
    found = Outside()
    for number, (device, roots) in enumerate(readings):
        found.add(number * every_ms * 1_000_000, device, roots)
    return found


def test_what_the_device_counts_beyond_the_tree_is_outside() -> None:
    assert outside_of((0, {ROOT: 0}), (1_500, {ROOT: 1_000})).total_bytes == 500


def test_without_a_tree_everything_is_outside() -> None:
    assert outside_of((100, {}), (1_600, {})).total_bytes == 1_500


def test_what_the_tree_counts_first_is_made_up_for_by_the_device_later() -> None:
    found = outside_of((0, {ROOT: 0}), (0, {ROOT: 3_000}), (3_000, {ROOT: 3_000}))
    assert found.total_bytes == 0
    found.add(300_000_000, 4_000, {ROOT: 3_000})
    assert found.total_bytes == 1_000


def test_a_tree_that_stood_for_long_hides_nothing_when_it_is_first_seen() -> None:
    """At a start the first reading has no tree yet; ten terabytes that the tree then shows are no debt."""
    found = outside_of((10**13, {}), (10**13 + 100, {ROOT: 10**13}), (10**13 + 5_100, {ROOT: 10**13}))
    assert found.total_bytes == 5_000


def test_an_htb_that_one_reading_missed_makes_no_debt() -> None:
    both, one = {ROOT: 10**9, OTHER_ROOT: 10**9}, {ROOT: 10**9}
    found = outside_of((0, both), (0, one), (0, both), (700, both))
    assert found.total_bytes == 700


@pytest.mark.parametrize(
    ("device", "roots"), [(5, {ROOT: 2_000}), (2_000, {ROOT: 5}), (2_000, {ROOT: 2_000, OTHER_ROOT: 0}), (2_000, {})]
)
def test_a_counter_that_began_again_and_a_tree_that_came_or_went_are_not_counted(
    device: int, roots: dict[Handle, int]
) -> None:
    assert outside_of((1_000, {ROOT: 1_000}), (device, roots)).total_bytes == 0


def test_one_htb_that_began_again_does_not_hide_behind_the_growth_of_another() -> None:
    found = outside_of((0, {ROOT: 1_000, OTHER_ROOT: 0}), (9_000, {ROOT: 0, OTHER_ROOT: 9_000}))
    assert found.total_bytes == 0


def test_a_device_that_counts_less_for_good_hides_no_more_than_what_can_be_under_way() -> None:
    """A device that leaves headers out counts four of a hundred less, all day."""
    found, device, tree = Outside(), 0, 0
    for number in range(10_000):
        device, tree = device + 96_000, tree + 100_000
        found.add(number * 100_000_000, device, {ROOT: tree})
    assert found.total_bytes == 0
    found.add(10_000 * 100_000_000, device + 3_000_000, {ROOT: tree})
    assert found.total_bytes >= 1_000_000


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 3)), max_size=60))
def test_the_count_never_falls(steps: list[tuple[int, int, int]]) -> None:
    found, device, tree, before = Outside(), 0, 0, 0
    for number, (sent, passed, fault) in enumerate(steps):
        device, tree = (0 if fault == 1 else device + sent), (0 if fault == 2 else tree + passed)
        found.add(number * 10**8, device, {} if fault == 3 else {ROOT: tree})
        assert found.total_bytes >= before
        before = found.total_bytes


def test_the_roots_are_those_of_our_htbs_alone() -> None:
    foreign = Handle(1, 1)
    assert roots_of({ROOT: 1, OTHER_ROOT: 2, ACME: 3, foreign: 4}) == {ROOT: 1, OTHER_ROOT: 2}
