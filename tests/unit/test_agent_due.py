"""When the next look is due: a burst is one look, drift never waits for long, and nothing starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.agent.due import QUIET_NS, UNREST_MAX_NS, Due

MS, SECOND = 10**6, 10**9


def test_without_a_reason_the_next_look_is_when_it_was_said_to_be() -> None:
    due = Due(5)
    assert due.at_ns == 5
    due.began(120 * SECOND)
    assert due.at_ns == 120 * SECOND


def test_an_event_is_looked_at_after_a_moment_of_quiet() -> None:
    due = Due(120 * SECOND)
    due.heard(SECOND)
    assert due.at_ns == SECOND + QUIET_NS


def test_each_further_event_puts_the_look_off_until_a_second_of_unrest() -> None:
    due, looks = Due(120 * SECOND), 0
    for now in range(0, 2000, 20):
        if now * MS >= due.at_ns:
            looks += 1
            due.began(120 * SECOND)
        due.heard(now * MS)
    assert looks == 1
    assert due.at_ns <= 2 * SECOND


@pytest.mark.case("F33")
def test_fifty_pods_that_come_within_a_second_are_one_look() -> None:
    """Case F33."""
    due = Due(120 * SECOND)
    for pod in range(50):
        assert due.at_ns > pod * 15 * MS
        due.heard(pod * 15 * MS)
    assert due.at_ns == 49 * 15 * MS + QUIET_NS


def test_a_look_that_begins_has_seen_all_that_was_heard() -> None:
    due = Due(120 * SECOND)
    due.heard(SECOND)
    due.began(200 * SECOND)
    assert due.at_ns == 200 * SECOND
    due.heard(100 * SECOND)
    assert due.at_ns == 100 * SECOND + QUIET_NS


def test_an_earlier_need_is_never_put_off() -> None:
    due = Due(120 * SECOND)
    due.no_later(SECOND)
    due.no_later(2 * SECOND)
    due.heard(SECOND - 1)
    assert due.at_ns == SECOND


@given(st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=50).map(sorted))
def test_no_event_waits_for_more_than_a_second(times: list[int]) -> None:
    due = Due(10_000 * SECOND)
    first = None
    for now in times:
        if first is not None and now >= due.at_ns:
            due.began(10_000 * SECOND)
            first = None
        due.heard(now)
        first = now if first is None else first
        assert due.at_ns <= first + UNREST_MAX_NS
