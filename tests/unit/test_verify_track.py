"""What passed in every window, from samples: nothing is lost by keeping only where a counter moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.kernel.device_counters import SentCounters
from kura_shaper.measure import Reading, Series
from kura_shaper.tree.model import Handle
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate
from kura_shaper.verify.track import Sample, Tracker

MS = 1_000_000
ACME, SECOND, BUDGET, ROOT = Handle(0x20, 0x2A7), Handle(0x21, 0x2A7), Handle(0x20, 3), Handle(0x20, 1)


def sample(
    at_ms: int, classes: dict[Handle, ClassCounters], *, device: int = 0, root: int | None = 0, packets: int = 0
) -> Sample:
    """A sample that took no time."""
    at_ns = at_ms * MS
    return Sample(at_ns, at_ns, at_ns, SentCounters(device, packets, 0), root, classes)


def of(*counts: int | None) -> Tracker:
    """Track one class that had sent so much every 100 ms; None: the dump did not have it."""
    tracker = Tracker()
    for number, count in enumerate(counts):
        beside = {ROOT: ClassCounters(5)}
        tracker.add(sample(100 * number, beside | ({} if count is None else {ACME: ClassCounters(count)})))
    return tracker


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_every_excess_and_every_fastest_window_is_that_of_all_readings(steps: list[int]) -> None:
    counts = [sum(steps[:number]) * 10_000 for number in range(len(steps))]
    whole = Series("all", tuple(Reading(100 * number * MS, count) for number, count in enumerate(counts)))
    kept = of(*counts).sent()[ACME.minor]
    assert kept.whole() == whole.whole()
    for ceiling in (Rate(0), Rate(500_000), Rate(1_600_000)):
        most = [max(0, each.excess(ceiling, burst_bytes=7).excess_bytes) for each in (kept, whole)]
        assert most[0] == most[1]
    fastest = max(window.rate for window in whole.windows())
    assert max(window.rate for window in kept.windows()) == fastest


def test_a_class_that_never_moves_is_two_readings() -> None:
    assert len(of(*[7] * 1_000).sent()[ACME.minor].readings) == 2


def test_a_tenant_on_two_queues_is_one_tenant() -> None:
    """Or else each of its classes would hold its ceiling, and both together twice of it."""
    tracker = Tracker()
    for number in range(3):
        moved = {ACME: ClassCounters(100 * number), SECOND: ClassCounters(1_000 * number)}
        tracker.add(sample(100 * number, moved))
    assert tracker.sent()[ACME.minor].whole().sent_bytes == 2_200


def test_a_class_that_one_dump_missed_is_no_news_and_one_that_went_is() -> None:
    once = of(0, 10, None, 30)
    assert once.broken == {}
    assert once.sent()[ACME.minor].whole().sent_bytes == 30
    assert [r.at_ns // MS for r in once.sent()[ACME.minor].readings] == [0, 100, 300]
    assert "went away" in of(0, 10, None, None, 30).broken[ACME.minor]


def test_a_counter_that_began_again_is_said() -> None:
    assert "made anew" in of(0, 1_000, 5).broken[ACME.minor]


def test_a_tree_that_is_not_there_twice_in_a_row_has_vanished() -> None:
    tracker = Tracker()
    for number in range(4):
        tracker.add(sample(100 * number, {ROOT: ClassCounters(1)} if number < 2 else {}))
    assert tracker.vanished_at_ns == 300 * MS
    blip = Tracker()
    for number in range(4):
        blip.add(sample(100 * number, {} if number == 2 else {ROOT: ClassCounters(1)}))
    assert blip.vanished_at_ns is None


def waiting(*seen: tuple[int, int]) -> Tracker:
    """Track (bytes sent, packets waiting) every 100 ms, with a budget that sends ten times as much."""
    tracker = Tracker()
    for number, (sent, packets) in enumerate(seen):
        mine = ClassCounters(sent, backlog_packets=packets, backlog_bytes=100 * packets)
        tracker.add(sample(100 * number, {ACME: mine, BUDGET: ClassCounters(10 * sent)}))
    return tracker


def test_a_stretch_of_hunger_is_from_the_first_to_the_last_sample_that_saw_packets_waiting() -> None:
    tracker = waiting((0, 0), (10, 1), (20, 2), (35, 1), (99, 0), (100, 3))
    (stretch,) = tracker.hungry()[ACME.minor]
    assert (stretch.start_ns, stretch.end_ns) == (100 * MS, 300 * MS)
    assert (stretch.sent_bytes, stretch.budget_bytes) == (25, 250)


def test_who_waits_to_the_end_is_counted_to_the_end() -> None:
    tracker = waiting((0, 1), (10, 1), (20, 4))
    (stretch,) = tracker.hungry()[ACME.minor]
    assert (stretch.duration_ns, stretch.sent_bytes) == (200 * MS, 20)
    assert tracker.backlog_bytes == {ACME.minor: 400}


def beside(*pairs: tuple[int, int], packets: int = 0) -> int:
    """Return the bytes outside of (device, root qdisc) every 100 ms."""
    tracker = Tracker()
    for number, (device, root) in enumerate(pairs):
        tracker.add(sample(100 * number, {}, device=device, root=root, packets=packets * number))
    return tracker.outside_bytes()


def test_bytes_that_the_root_qdisc_never_saw_are_outside() -> None:
    assert beside((100, 50), (100, 50), (5_100, 50)) == 5_000, "nothing else moved"
    assert beside((100, 50), (1_100, 1_050), (907_100, 2_050)) == 905_000 - 2 * 65_536, "packets may be under way"


def test_what_counters_of_a_device_differ_by_is_not_outside() -> None:
    assert beside((0, 0), (1_020, 1_000), (2_040, 2_000), packets=10) == 0, "a checksum for each frame"
    assert beside((0, 0), (900, 1_000), (1_800, 2_000)) == 0, "headers that a device leaves out"


def test_a_driver_that_fetches_its_counters_now_and_then_is_late_and_not_outside() -> None:
    late = [(10_000 * (number // 5) * 5, 10_000 * number) for number in range(3, 21)]
    assert beside(*late) == 0


def test_a_packet_that_only_one_of_the_counters_has_yet_is_not_outside() -> None:
    assert beside((0, 40_000), (400_000, 400_000), (800_000, 800_000)) == 0


def test_a_root_qdisc_that_can_not_be_read_tells_nothing() -> None:
    tracker = Tracker()
    for number in range(3):
        tracker.add(sample(100 * number, {}, device=1_000 * number, root=None))
    assert tracker.outside_bytes() == 0
    assert tracker.root().readings == ()


def test_the_longest_window_is_from_before_a_sample_to_after_the_next() -> None:
    tracker = Tracker()
    tracker.add(Sample(0, 1 * MS, 5 * MS, SentCounters(0, 0, 0), 0, {}))
    tracker.add(Sample(100 * MS, 101 * MS, 130 * MS, SentCounters(0, 0, 0), 0, {}))
    assert tracker.longest_window_ns == 130 * MS
