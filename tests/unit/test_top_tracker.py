"""Rates are what counters grew by, and what isn't known is never a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from top_readings import (
    ACME,
    ACME_CLASS,
    BETA,
    BETA_CLASS,
    BUDGET,
    FLEET,
    MQ_FLEET,
    ROOT,
    UNATTRIBUTED,
    no_reading,
    reading,
)

from kura_shaper.top.frame import HISTORY, Frame, TenantRow
from kura_shaper.top.reading import State
from kura_shaper.top.tracker import Tracker, growth
from kura_shaper.tree.model import Handle, Shape
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.top.reading import NoReading, Reading

MBIT = 10**6
U32_MAX = 2**32 - 1


def frame_of(*looks: Reading | NoReading, document: object = FLEET.document) -> Frame:
    """The frame after these looks."""
    tracker = Tracker("eth0", document)  # type: ignore[arg-type]
    frames = [tracker.take(look) for look in looks]
    return frames[-1]


def row_of(frame: Frame, class_id: int = ACME.class_id) -> TenantRow:
    return next(row for row in frame.tenants if row.class_id == class_id)


def sent(acme: int, root: int = 0, **fields: int) -> dict[Handle, ClassCounters]:
    return {ACME_CLASS: ClassCounters(acme, **fields), ROOT: ClassCounters(root or acme)}


def test_a_rate_is_the_bytes_between_two_readings_over_the_time_between_them() -> None:
    found = frame_of(reading(0, sent(1_000)), reading(2, sent(25_001_000)))
    assert row_of(found).bits_per_second == 100 * MBIT
    assert row_of(found, BETA.class_id).bits_per_second == 0
    assert found.interval_ns == 2 * 10**9
    assert found.read_at_ns == 3 * 10**9


def test_of_one_reading_alone_no_rate_is_known() -> None:
    found = frame_of(reading(0, sent(1_000)))
    assert found.interval_ns is None
    assert {row.bits_per_second for row in found.tenants} == {None}
    assert found.totals is not None
    assert found.totals.node.bits_per_second is None
    assert row_of(found).history == ()


def test_a_row_has_what_the_kernel_has_and_the_name_of_the_document() -> None:
    found = frame_of(reading(0, sent(0, backlog_bytes=7)))
    row = row_of(found, BETA.class_id)
    assert (row.name, row.floor, row.ceiling) == ("t2b0", Rate(100 * MBIT), Rate(1000 * MBIT))
    assert row_of(found).backlog_bytes == 7
    assert {row.class_id for row in found.tenants} == {ACME.class_id, BETA.class_id}  # and none of our own classes


def test_without_a_document_a_row_is_called_by_its_class_id() -> None:
    found = frame_of(reading(), document=None)
    assert row_of(found).label == "0x2a7"
    assert found.totals is not None
    assert found.totals.promised is None


def test_the_borrowed_share_is_of_the_packets_of_the_interval() -> None:
    first, second = sent(1, lended=1_000, borrowed=50), sent(9, lended=1_030, borrowed=60)
    row = row_of(frame_of(reading(0, first), reading(1, second)))
    assert (row.lended_packets, row.borrowed_packets, row.borrowed_permille) == (30, 10, 250)


def test_who_sent_nothing_has_no_borrowed_share() -> None:
    assert row_of(frame_of(reading(0), reading(1))).borrowed_permille is None


def test_the_ceiling_is_used_in_part() -> None:
    assert row_of(frame_of(reading(0, sent(0)), reading(1, sent(31_250_000)))).ceiling_permille == 500


def test_counters_of_32_bits_wrap() -> None:
    before = ClassCounters(5, dropped_packets=U32_MAX, lended=U32_MAX - 1, borrowed=3)
    assert growth(before, ClassCounters(9, dropped_packets=1, lended=0, borrowed=4)) == (4, 2, 1, 2)


@pytest.mark.parametrize("now", [ClassCounters(4), ClassCounters(500, lended=0), ClassCounters(500, dropped_packets=1)])
def test_a_counter_that_fell_began_again(now: ClassCounters) -> None:
    before = ClassCounters(5, dropped_packets=2, lended=10)
    assert growth(before, now) is None


def test_a_tree_that_was_made_anew_has_no_rates_and_says_so() -> None:
    before = {**sent(5_000, root=9_000), BETA_CLASS: ClassCounters(10)}
    # Its other tenant has sent more by now than before: only the root tells.
    after = {**sent(0, root=200), BETA_CLASS: ClassCounters(200)}
    found = frame_of(reading(0), reading(1, before), reading(2, after))
    assert {row.bits_per_second for row in found.tenants} == {None}
    assert row_of(found, BETA.class_id).history == (80, None)
    assert found.interval_ns is None
    assert found.event is not None
    assert "the tree was made anew" in found.event.words
    assert found.totals is not None
    assert found.totals.node.bits_per_second is None


def test_rates_go_on_after_a_tree_was_made_anew_and_the_event_stays_known() -> None:
    found = frame_of(reading(0, sent(9_000)), reading(1, sent(0)), reading(2, sent(1_000)))
    assert row_of(found).bits_per_second == 8_000
    assert found.event is not None
    assert found.event.at_ns == 2 * 10**9


def test_one_class_that_was_made_anew_takes_no_other_along() -> None:
    before = {**sent(5_000, root=9_000), BETA_CLASS: ClassCounters(4_000)}
    after = {**sent(0, root=10_000), BETA_CLASS: ClassCounters(5_000)}
    found = frame_of(reading(0, before), reading(1, after))
    assert row_of(found).bits_per_second is None
    assert row_of(found, BETA.class_id).bits_per_second == 8_000
    assert found.event is not None
    assert "class 20:2a7 was made anew" in found.event.words


def test_a_device_that_was_made_anew_has_no_rates_whatever_its_counters_say() -> None:
    found = frame_of(reading(0, sent(10), device_bytes=5), reading(1, sent(5_000), ifindex=9, device_bytes=9_000))
    assert {row.bits_per_second for row in found.tenants} == {None}
    assert found.totals is not None
    assert found.totals.device_bits_per_second is None
    assert found.event is not None
    assert "the device was made anew" in found.event.words


@pytest.mark.parametrize("state", [State.GONE, State.NO_TREE])
def test_what_is_gone_takes_its_rows_along(state: State) -> None:
    found = frame_of(reading(0, sent(10)), no_reading(1, state, "it went"))
    assert (found.state, found.tenants, found.totals, found.reason) == (state, (), None, "it went")
    assert found.read_at_ns == 10**9
    back = frame_of(reading(0, sent(10)), no_reading(1, state), reading(2, sent(99_999)))
    assert {row.bits_per_second for row in back.tenants} == {None}
    assert back.event is not None
    assert "is back" in back.event.words


def test_what_could_not_be_read_keeps_its_rows_and_the_time_of_their_reading() -> None:
    looks = (reading(0, sent(0)), reading(1, sent(1_000)), no_reading(2, State.UNKNOWN, "it changes"))
    found = frame_of(*looks)
    assert (found.state, found.reason, found.read_at_ns) == (State.UNKNOWN, "it changes", 2 * 10**9)
    assert row_of(found).bits_per_second == 8_000
    assert row_of(found).history == (8_000, None)


def test_after_a_look_that_failed_a_rate_is_over_the_whole_time() -> None:
    looks = (reading(0, sent(0)), no_reading(1, State.UNKNOWN), reading(4, sent(4_000)))
    found = frame_of(*looks)
    assert row_of(found).bits_per_second == 8_000
    assert found.interval_ns == 4 * 10**9
    assert found.event is None


def test_a_first_look_that_finds_no_tree_says_why() -> None:
    found = frame_of(no_reading(0, State.NO_TREE, "the root qdisc is noqueue"))
    assert (found.state, found.reason, found.read_at_ns, found.event) == (
        State.NO_TREE,
        "the root qdisc is noqueue",
        None,
        None,
    )


def test_a_tenant_that_comes_has_a_rate_from_its_second_reading_on() -> None:
    tracker = Tracker("eth0", FLEET.document)
    one = reading(0, sent(0))
    less = {classid: found for classid, found in one.snapshot.classes.items() if classid != ACME_CLASS}
    counters = {classid: found for classid, found in one.snapshot.counters.items() if classid != ACME_CLASS}
    object.__setattr__(one.snapshot, "classes", less)
    object.__setattr__(one.snapshot, "counters", counters)
    tracker.take(one)
    assert row_of(tracker.take(reading(1, sent(500)))).bits_per_second is None
    assert row_of(tracker.take(reading(2, sent(1_500)))).bits_per_second == 8_000


def test_history_is_bounded() -> None:
    tracker = Tracker("eth0")
    for second in range(HISTORY + 5):
        found = tracker.take(reading(second, sent(1_000 * second)))
    assert row_of(found).history == (8_000,) * HISTORY


def test_retransmits_are_those_of_the_interval_and_unknown_where_not_counted() -> None:
    first, second = reading(0, retransmits={0x2A7: 3}), reading(1, retransmits={0x2A7: 5, 0x2B0: 1})
    found = frame_of(first, second)
    assert (row_of(found).retransmits, row_of(found, BETA.class_id).retransmits) == (2, 1)
    assert row_of(frame_of(reading(0), reading(1))).retransmits is None
    assert row_of(frame_of(reading(0), second)).retransmits is None
    assert row_of(frame_of(second, reading(2, retransmits={0x2A7: 1}))).retransmits is None


def test_totals_are_of_all_shaped_queues() -> None:
    budgets = {Handle(0x20, BUDGET.minor): ClassCounters(1_000), Handle(0x21, BUDGET.minor): ClassCounters(3_000)}
    found = frame_of(reading(0, of=MQ_FLEET), reading(1, budgets, of=MQ_FLEET), document=MQ_FLEET.document)
    assert found.totals is not None
    assert found.totals.shape is Shape.MQ
    assert found.totals.node.bits_per_second == 32_000
    assert found.totals.budget == Rate(3_000 * MBIT)
    assert found.totals.floors == found.totals.promised == Rate(125 * MBIT)


def test_unattributed_and_direct_are_told_with_what_they_were_before() -> None:
    first = reading(0, {UNATTRIBUTED: ClassCounters(500)}, direct_packets=4)
    second = reading(1, {UNATTRIBUTED: ClassCounters(1_500)}, direct_packets=6)
    totals = frame_of(first, second).totals
    assert totals is not None
    assert (totals.unattributed.bits_per_second, totals.unattributed.sent_bytes) == (8_000, 1_500)
    assert (totals.direct_packets, totals.new_direct_packets) == (6, 2)


def test_bytes_beside_the_tree_are_what_the_device_sent_and_no_root_class() -> None:
    first = reading(0, sent(0, root=100), device_bytes=10_000)
    second = reading(1, sent(0, root=1_100), device_bytes=13_000)
    totals = frame_of(first, second).totals
    assert totals is not None
    assert totals.outside is not None
    assert (totals.outside.bits_per_second, totals.outside.sent_bytes) == (16_000, 2_000)
    assert totals.device_bits_per_second == 24_000
    blind = frame_of(reading(0), reading(1)).totals
    assert blind is not None
    assert (blind.outside, blind.device_bits_per_second) == (None, None)
