"""What could not be connected to is remembered for a second, and never more of it than so much."""

from __future__ import annotations

from kura_shaper.broker.failures import REMEMBERED_NS, TARGETS_MAX, FailedDials
from kura_shaper.clock import FakeClock


def test_a_target_is_remembered_for_a_second_after_it_last_failed() -> None:
    clock = FakeClock()
    failed = FailedDials(now_ns=clock.now_ns)
    failed.note("a")
    clock.wait_ns(REMEMBERED_NS - 1)
    assert (failed.has("a"), failed.has("b")) == (True, False)
    failed.note("a")
    clock.wait_ns(REMEMBERED_NS - 1)
    assert failed.has("a")
    clock.wait_ns(1)
    assert not failed.has("a")
    assert len(failed) == 0


def test_the_newest_are_remembered_and_no_more_than_so_many() -> None:
    failed = FailedDials(now_ns=FakeClock().now_ns)
    for number in range(TARGETS_MAX + 10):
        failed.note(str(number))
    failed.note("10")
    assert len(failed) == TARGETS_MAX
    assert [failed.has(str(number)) for number in (9, 10, 11, TARGETS_MAX + 9)] == [False, True, True, True]
