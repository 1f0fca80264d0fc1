"""What is shown of a frame: numbers of a known width, rows in order, and nothing that a terminal would obey."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from top_readings import ACME, ACME_CLASS, BETA_CLASS, BUDGET, FLEET, HOSTILE, ROOT, UNATTRIBUTED, no_reading, reading

from kura_shaper.top.as_json import to_json
from kura_shaper.top.frame import Frame, TenantRow
from kura_shaper.top.head import Phrase, flowed, head, is_stale
from kura_shaper.top.lines import Lines
from kura_shaper.top.order import Order, matching, ordered
from kura_shaper.top.reading import State
from kura_shaper.top.table import COLUMNS, heading_line, row_line
from kura_shaper.top.text import (
    limit_text,
    number_text,
    per_second_text,
    percent_text,
    plain,
    rate_text,
    seconds_text,
    sparkline,
)
from kura_shaper.top.tracker import Tracker
from kura_shaper.tree.model import Handle
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

SECOND = 10**9


def frame(**also: int) -> Frame:
    """Acme sends a gigabit, beta a quarter of that, for a second."""
    tracker = Tracker("eth0", FLEET.document)
    tracker.take(reading(0, device_bytes=0, retransmits={}))
    counters = {
        ACME_CLASS: ClassCounters(125_000_000, dropped_packets=3, lended=10, borrowed=30),
        BETA_CLASS: ClassCounters(31_250_000, lended=5),
        BUDGET: ClassCounters(156_250_000),
        ROOT: ClassCounters(156_250_000),
        UNATTRIBUTED: ClassCounters(also.get("unattributed", 0)),
    }
    device_bytes = 156_250_000 + also.get("outside", 0)
    direct = also.get("direct", 0)
    return tracker.take(reading(1, counters, device_bytes=device_bytes, retransmits={0x2A7: 4}, direct_packets=direct))


def said(shown: Frame, now_s: float = 2.04) -> str:
    lines = head(shown, int(now_s * SECOND), interval_ns=SECOND)
    return "\n".join("  ".join(phrase.text for phrase in line) for line in lines)


def alarms(shown: Frame, now_s: float = 2.04) -> list[str]:
    lines = head(shown, int(now_s * SECOND), interval_ns=SECOND)
    return [phrase.text for line in lines for phrase in line if phrase.alarms]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.0k"),
        (99_949, "99.9k"),
        (999_949, "999.9k"),
        (999_950, "1.0M"),
        (812_400_000, "812.4M"),
        (3_000_000_000, "3.0G"),
    ],
)
def test_numbers_are_short(value: int, text: str) -> None:
    assert number_text(value) == text


@given(st.integers(0, 10**21 - 10**18))
def test_no_number_is_wider_than_its_column(value: int) -> None:
    assert len(number_text(value)) <= 6


def test_what_is_not_known_is_a_dash_and_never_a_nought() -> None:
    assert {rate_text(None), percent_text(None), per_second_text(None, SECOND), per_second_text(1, None)} == {"-"}
    assert (rate_text(0), percent_text(0), per_second_text(0, SECOND)) == ("0", "0%", "0")


def test_one_drop_in_a_minute_is_not_shown_as_none() -> None:
    assert per_second_text(1, 60 * SECOND) == "1"


def test_limits_have_no_needless_digit() -> None:
    assert [limit_text(Rate.parse(text)) for text in ("25M", "1500M", "0", "24999992")] == ["25M", "1.5G", "0", "25M"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.004, "4 ms"), (0.24, "0.2 s"), (0.997, "1.0 s"), (63, "63 s"), (600, "10 min")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert seconds_text(int(seconds * SECOND)) == text


def test_a_trend_tells_nothing_sent_from_little_and_from_what_is_not_known() -> None:
    assert sparkline((0, 1, 50, 100, 120, None), 100) == "▁▂▅██?"
    assert sparkline((5,), 0) == "█"


@given(st.text())
def test_no_text_can_do_anything_to_a_terminal(text: str) -> None:
    shown = plain(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) == len(text)


def test_the_head_has_the_device_its_budget_and_the_age_of_the_reading() -> None:
    assert said(frame()).splitlines() == [
        "eth0  shape single  1.3G of budget 3G (41%)  floors 125M  device 1.3G  over 1.0 s, read 40 ms ago",
        "host 0  gateway 0  unattributed 0",
    ]
    assert alarms(frame()) == []


def test_what_should_not_be_stands_out() -> None:
    shown = frame(unattributed=1_000, outside=5_000, direct=7)
    assert "outside 40.0k" in said(shown)
    assert alarms(shown) == ["unattributed 8.0k (1.0kB so far)", "direct 7 packets"]


def test_an_old_reading_stands_out() -> None:
    assert not is_stale(frame(), 6 * SECOND, interval_ns=SECOND)
    assert is_stale(frame(), 7 * SECOND, interval_ns=SECOND)
    assert alarms(frame(), 32.0) == ["over 1.0 s, read 30 s ago"]


def test_a_state_without_a_tree_is_words_and_no_numbers() -> None:
    tracker = Tracker("eth0")
    tracker.take(reading(0))
    shown = tracker.take(no_reading(1, State.GONE, "there is no device eth0 now"))
    assert said(shown) == "eth0  there is no device eth0 now  read 1.0 s ago"
    shown = tracker.take(reading(2))
    assert "a tree of ours is back (1.0 s ago)" in alarms(shown, 4.0)
    assert alarms(shown, 70.0)[-1] != "a tree of ours is back (67 s ago)"


def test_a_failed_reading_says_that_what_is_shown_is_old() -> None:
    tracker = Tracker("eth0")
    tracker.take(reading(0))
    shown = tracker.take(no_reading(1, State.UNKNOWN, "it changes"))
    assert "can't be read now, what is shown is old: it changes" in alarms(shown)


def test_faults_of_the_tree_are_told() -> None:
    shown = Tracker("eth0").take(reading(0, faults=("the classifier is missing",)))
    assert "fault: the classifier is missing" in alarms(shown)


def test_floors_that_were_promised_beyond_the_budget_stand_out() -> None:
    tracker = Tracker("eth0", replace(FLEET.document, tenants=(replace(ACME, floor=Rate.parse("4G")),)))
    assert "promised 4G" in alarms(tracker.take(reading(0)))


def test_phrases_break_between_each_other_alone() -> None:
    phrases = [Phrase("a" * 10), Phrase("b" * 10), Phrase("c" * 30)]
    assert [[phrase.text[0] for phrase in line] for line in flowed(phrases, 22)] == [["a", "b"], ["c"]]
    assert [[phrase.text[0] for phrase in line] for line in flowed(phrases, 21)] == [["a"], ["b"], ["c"]]


def row(class_id: int, name: str = "", **known: int | None) -> TenantRow:
    return TenantRow(Handle(0x20, class_id), name, Rate(1_000), Rate(1_000_000), 0, **known)  # type: ignore[arg-type]


A, B, C = (
    row(0x101, "Alpha", bits_per_second=5, dropped_packets=0, retransmits=None),
    row(0x102, "beta", bits_per_second=9, dropped_packets=0, retransmits=2),
    row(0x103, "", bits_per_second=None, dropped_packets=8, retransmits=1),
)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order.RATE, [B, A, C]),
        (Order.DROPS, [C, B, A]),
        (Order.RETRANSMITS, [B, C, A]),
        (Order.NAME, [C, A, B]),
        (Order.BORROWED, [B, A, C]),
    ],
)
def test_the_most_comes_first_and_the_unknown_last(order: Order, expected: list[TenantRow]) -> None:
    assert ordered([A, B, C], order) == expected
    assert ordered([C, B, A], order) == expected


@pytest.mark.parametrize("order", list(Order))
def test_every_order_sorts_what_is_not_known_at_all(order: Order) -> None:
    assert len(ordered([row(0x100), row(0x101), A], order)) == 3


@pytest.mark.parametrize(("text", "expected"), [("", [A, B, C]), ("ALPH", [A]), (" 0x103 ", [C]), ("zeta", [])])
def test_a_filter_is_a_part_of_a_name_or_of_a_class_id(text: str, expected: list[TenantRow]) -> None:
    assert matching([A, B, C], text) == expected


def test_every_column_is_as_wide_as_its_heading_says() -> None:
    assert all(len(column.heading) <= column.width for column in COLUMNS)
    widest = TenantRow(
        Handle(0x20, 0xFFFE),
        "n" * 80,
        Rate(10**12 - 1),
        Rate(10**12 - 1),
        10**12 - 1,
        10**13 - 1,
        1,
        10**9,
        10**9,
        10**9,
    )
    assert len(row_line(widest, SECOND, name_width=20)) == len(heading_line(20))


def test_lines_are_aligned_and_stay_so() -> None:
    writer = Lines()
    first = list(writer.of(frame(), 2 * SECOND, interval_ns=SECOND))
    second = list(writer.of(frame(unattributed=10), 2 * SECOND, interval_ns=SECOND))
    assert first[2:] == second[2:]
    assert first[2:] == [
        "TENANT         CLASS    RATE   FLOOR    CEIL  USED  BORR  DROP/S  RETR/S    QUEUE",
        "t2a7           0x2a7    1.0G     25M    500M  200%   75%       3       4       0B",
        "t2b0           0x2b0  250.0M    100M      1G   25%    0%       0       0       0B",
        "",
    ]


def test_lines_can_be_sorted_and_filtered() -> None:
    lines = list(Lines(order=Order.NAME, wanted="2b0").of(frame(), 0, interval_ns=SECOND))
    assert [line.split()[0] for line in lines[3:-1]] == ["t2b0"]


def test_no_name_reason_or_fault_reaches_a_terminal_as_it_is() -> None:
    rows = tuple(replace(each, name=HOSTILE) for each in frame().tenants)
    known = replace(frame(), device=HOSTILE, tenants=rows, faults=(HOSTILE,), state=State.UNKNOWN, reason=HOSTILE)
    blind = replace(known, totals=None)
    for shown in (known, blind):
        for line in Lines().of(shown, 2 * SECOND, interval_ns=SECOND):
            assert line.isascii()
            assert line.isprintable()


def test_json_is_exact_and_null_where_nothing_is_known() -> None:
    found = json.loads(json.dumps(to_json(frame(unattributed=1_000, outside=5_000), 2_040_000_000)))
    assert (found["device"], found["ours"], found["age_ms"], found["interval_ms"]) == ("eth0", True, 40, 1_000)
    assert (found["bits_per_second"], found["budget_bits_per_second"]) == (1_250_000_000, 3_000_000_000)
    assert (found["floor_sum_bits_per_second"], found["unattributed_sent_bytes"]) == (125_000_000, 1_000)
    assert found["outside_bits_per_second"] == 40_000
    first = found["tenants"][0]
    assert (first["tenant"], first["class"], first["bits_per_second"]) == ("t2a7", "0x2a7", 10**9)
    assert (first["borrowed_share"], first["dropped_packets"], first["retransmits"]) == (0.75, 3, 4)
    blind = json.loads(json.dumps(to_json(Tracker("eth0").take(reading(0)), 10**9)))
    assert blind["interval_ms"] is blind["bits_per_second"] is blind["tenants"][0]["bits_per_second"] is None
    gone = json.loads(json.dumps(to_json(Tracker("eth0").take(no_reading(0, State.NO_TREE, "none")), 10**9)))
    assert (gone["ours"], gone["state"], gone["reason"], gone["tenants"]) == (False, "no_tree", "none", [])
