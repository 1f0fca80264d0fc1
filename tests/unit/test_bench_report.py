"""bench's judgement: the answer in words follows from the numbers, and the table and the JSON have all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kura_shaper.bench.answer import Answer, Evidence, OtherShape, answer, caveats, evidence_of, words
from kura_shaper.bench.cases import bench_settings, cases, many_senders
from kura_shaper.bench.html import to_html
from kura_shaper.bench.load import Packets
from kura_shaper.bench.meter import CpuReading, read_cpu
from kura_shaper.bench.points import Machine, MadeOf, Point, Report, windows_of
from kura_shaper.bench.report import HEADINGS, table, to_json
from kura_shaper.errors import UsageError
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from pathlib import Path

RATE = Rate(3_000_000_000)
MTU, GSO = Packets(1514), Packets(65_536)
# What 3 Gbit/s needs, by the design's own sums.
NEEDED_AT_MTU, NEEDED_AT_GSO = 247_689, 5_630


def evidence(carried: int, **changes: object) -> Evidence:
    """Evidence of a tree that carried so many packets a second where the senders reach ten times that."""
    made = Evidence(RATE, MTU.wire_bytes, GSO.wire_bytes, carried=carried, alone=carried, plain=10 * carried)
    return replace(made, tree_ns=1_000, **changes)  # type: ignore[arg-type]


def test_a_packet_is_on_the_wire_what_its_frames_are() -> None:
    assert (MTU.payload_bytes, MTU.segments, MTU.wire_bytes) == (1_472, 1, 1_514)
    assert (GSO.payload_bytes, GSO.segments, GSO.wire_bytes) == (64_768, 44, 66_616)
    assert (Packets(64).payload_bytes, Packets(64).wire_bytes, str(Packets(64))) == (22, 64, "64 B")


def test_what_a_rate_needs_is_packets_a_second() -> None:
    found = evidence(1)
    assert (found.mtu_needed, found.gso_needed) == (247_689, 5_630)


@pytest.mark.parametrize(
    ("carried", "changes", "expected"),
    [
        (0, {}, Answer.UNKNOWN),
        (2_000_000, {}, Answer.NOT_BOUND),
        (2 * NEEDED_AT_MTU, {}, Answer.NOT_BOUND),
        (2 * NEEDED_AT_MTU - 1_000, {}, Answer.CLOSE_AT_MTU),
        (300_000, {}, Answer.BOUND_AT_MTU),
        (300_000, {"mtu_held_permille": 969}, Answer.BOUND_AT_MTU),
        (300_000, {"mtu_held_permille": 970}, Answer.CLOSE_AT_MTU),
        (100_000, {"gso_held_permille": 999}, Answer.BOUND_AT_MTU),
        (NEEDED_AT_GSO, {}, Answer.BOUND),
        (NEEDED_AT_GSO, {"gso_held_permille": 1_000}, Answer.BOUND_AT_MTU),
        # A run at the rate that took every CPU leaves nothing for the gateway.
        (2_000_000, {"cpus": 2, "mtu_cores_permille": 1_950}, Answer.CLOSE_AT_MTU),
        (2_000_000, {"cpus": 2, "mtu_cores_permille": 1_850}, Answer.NOT_BOUND),
        (300_000, {"cpus": 2, "mtu_cores_permille": 1_950}, Answer.BOUND_AT_MTU),
        # The senders reach no more without a tree: it carries at least what was seen.
        (300_000, {"plain": 310_000}, Answer.OPEN_AT_MTU),
        (400_000, {"plain": 410_000}, Answer.NOT_BOUND),
        (NEEDED_AT_GSO, {"plain": NEEDED_AT_GSO}, Answer.UNKNOWN),
        # So it does where other processes had the machine.
        (200_000, {"others_permille": 500}, Answer.OPEN_AT_MTU),
        (400_000, {"others_permille": 500}, Answer.NOT_BOUND),
        (200_000, {"others_permille": 100}, Answer.BOUND_AT_MTU),
        # What the senders reach without a tree is not known: what was seen is all that there is.
        (300_000, {"plain": 0}, Answer.BOUND_AT_MTU),
    ],
)
def test_the_answer_follows_from_what_was_needed_and_carried(
    carried: int, changes: dict[str, int], expected: Answer
) -> None:
    assert answer(evidence(carried, **changes)) is expected


@pytest.mark.parametrize(
    ("carried", "start"),
    [
        (2_000_000, "No: one classful root is not CPU-bound at 3Gbit/s"),
        (400_000, "No, but with little to spare: at 3Gbit/s"),
        (300_000, "Only without large buffers: one classful root is CPU-bound at 3Gbit/s"),
        (6_000, "Yes: one classful root is CPU-bound at 3Gbit/s"),
        (0, "Not answered: shape single was not measured"),
    ],
)
def test_the_first_sentence_answers_the_question(carried: int, start: str) -> None:
    assert words(evidence(carried))[0].startswith(start)


def test_the_words_have_the_numbers() -> None:
    found = evidence(
        1_000_000,
        mtu_held_permille=985,
        gso_held_permille=1_000,
        mtu_cores_permille=1_250,
        packet_ns=3_000,
        mq=(OtherShape("mq", 1_100_000, 2_900), OtherShape("mq:2", 1_900_000, 3_300)),
    )
    said = " ".join(words(found))
    for number in ("248k packets/s at MTU and 5.6k at 64 KB", "1.00M small packets/s", "24.7 %", "0.5 % at 64 KB"):
        assert number in said
    assert "1000 ns of CPU a packet" in said
    assert "24.7 % of a core at MTU" in said
    assert "reached 100.0 % of it at 64 KB with 0.00 cores and 98.5 % of it at MTU with 1.25 cores" in said
    assert "mq carried 1.10M packets/s, 1.10 times single, with 2900 ns of CPU a packet in all beside 3000." in said
    assert "host traffic is off it" in said
    assert "mq:2 carried 1.90M packets/s, 1.90 times single, with 3300 ns" in said
    assert "Each shaped queue has a lock of its own" in said


def test_packets_a_second_are_not_compared_where_others_had_the_machine() -> None:
    disturbed = OtherShape("mq:2", 100_000, 3_300, others_permille=600)
    said = words(evidence(1_000_000, packet_ns=3_000, mq=(disturbed,)))[-1]
    assert said.startswith("mq:2 takes 3300 ns of CPU a packet in all beside 3000 in single; others took up to 60.0 %")
    assert "times single" not in said


def test_what_the_senders_could_not_reach_is_not_blamed_on_the_tree() -> None:
    said = " ".join(words(evidence(400_000, plain=410_000, mtu_held_permille=700, plain_mtu_permille=900)))
    assert "carries at least that" in said
    assert "The rate takes at most 61.9 %" in said
    assert "The senders themselves reach only 90.0 % of the rate at MTU" in said


def test_a_cost_near_or_below_the_noise_is_said_as_such() -> None:
    assert "costs roughly 1000 ns" in " ".join(words(evidence(1_000_000, is_cost_rough=True)))
    assert "too small to tell" in " ".join(words(replace(evidence(1_000_000), tree_ns=-3)))


def point(
    form: str,
    packets: Packets,
    pps: int,
    *,
    senders: int = 2,
    limit: Rate | None = None,
    ns: int = 2_000,
    others: int = 0,
) -> Point:
    """A second of a steady load."""
    readings = [(n * 100_000_000, n * pps * packets.wire_bytes // 10) for n in range(11)]
    return Point(
        form, str(packets), packets.wire_bytes, packets.segments, senders, limit, pps, windows_of(readings), ns * pps,
        others, 0,
    )  # fmt: skip


def report(*, cpus: int = 8, others: int = 0) -> Report:
    """A run of a tree that is bound at MTU."""
    small = Packets(64)
    points = (
        point("plain", MTU, 400_000),
        point("plain", small, 900_000),
        point("plain", small, 500_000, senders=1),
        point("single", MTU, 200_000, limit=RATE),
        point("single", GSO, NEEDED_AT_GSO, limit=RATE),
        point("single", small, 250_000, others=others),
        point("single", small, 300_000, senders=1, ns=2_800),
        point("mq:2", small, 480_000),
    )
    made_of = (
        MadeOf("plain", "no qdisc", is_measured=True),
        MadeOf("tc", "the command tc is missing", is_measured=False),
        MadeOf("single", "htb, fq_codel leaves", is_measured=True),
        MadeOf("mq:2", "mq, 2 of 4 queues shaped", is_measured=True),
    )
    return Report(RATE, 20, 8, 1_000, Machine("6.12.1", cpus, 2), MTU.wire_bytes, GSO.wire_bytes, made_of, points)


def test_the_evidence_comes_out_of_the_points() -> None:
    found = evidence_of(report(others=20))
    assert (found.carried, found.alone, found.plain, found.tree_ns) == (250_000, 300_000, 900_000, 800)
    assert (found.mtu_held_permille, found.gso_held_permille) == (807, 1_000)
    assert (found.mtu_cores_permille, found.gso_cores_permille) == (400, 11)
    assert not found.is_cost_rough
    assert (found.mq, found.others_permille) == ((OtherShape("mq:2", 480_000, 2_000),), 20)
    assert found.plain_mtu_permille == 1_614
    assert answer(found) is Answer.BOUND_AT_MTU


def test_a_run_without_single_answers_nothing() -> None:
    empty = replace(report(), points=(), made_of=())
    assert answer(evidence_of(empty)) is Answer.UNKNOWN
    assert len(words(evidence_of(empty))) == 1


def test_the_table_has_a_row_a_point_and_a_cell_a_heading() -> None:
    rows = table(report())
    assert len(rows) == len(report().points)
    assert {len(row) for row in rows} == {len(HEADINGS)}
    assert rows[0] == (
        "single", "63 KB GSO", "2", "3G", "3000", "5.6", "0.004", "2000", "100.0 %", "100.0 %", "0",
    )  # fmt: skip
    assert ("plain", "64 B", "1", "-", "256", "500.0", "3.906", "2000", "-", "-", "0") in rows


def test_the_json_has_every_point_and_the_answer() -> None:
    found = json.loads(json.dumps(to_json(report())))
    assert (found["answer"], found["rate_mbps"], found["cpus"], found["senders"]) == ("bound-at-mtu", 3_000.0, 8, 2)
    assert found["needed_packets_per_second"] == {"mtu": NEEDED_AT_MTU, "gso": NEEDED_AT_GSO}
    assert found["used"] == {"mtu": 0.99, "gso": 0.022}
    assert found["shapes"]["tc"] == {"measured": False, "says": "the command tc is missing"}
    assert found["words"] == list(words(evidence_of(report())))
    held = next(p for p in found["points"] if p["shape"] == "single" and p["wire_bytes_per_packet"] == 1_514)
    assert held == {
        "shape": "single",
        "packets": "1514 B",
        "wire_bytes_per_packet": 1_514,
        "senders": 2,
        "limit_mbps": 3_000.0,
        "mbps": 2_422.4,
        "packets_per_second": 200_000,
        "segments_per_second": 200_000,
        "cpu_seconds_per_gbit": 0.16513,
        "cpu_ns_per_packet": 2_000,
        "accuracy": 0.807,
        "worst_window": {"ms": 100, "mbps": 2_422.4, "accuracy": 0.807},
        "dropped_packets": 0,
        "others_share": 0.0,
    }


def test_a_machine_with_too_few_cpus_or_other_work_is_said_to_be_one() -> None:
    assert caveats(report()) == ()
    (few,) = caveats(report(cpus=2))
    assert "2 CPUs and 2 senders" in few
    (busy,) = caveats(report(others=200))
    assert "20.0 % of the machine" in busy


def test_the_page_has_the_answer_the_table_and_its_plots_and_needs_no_network() -> None:
    page = to_html(report())
    assert "Only without large buffers" in page
    assert "left out: the command tc is missing" in page
    assert page.count("<td>single</td>") == 4
    assert page.count("Plotly.newPlot(") >= 4
    assert 'src="http' not in page


def test_cpu_time_is_the_machines_less_the_others(tmp_path: Path) -> None:
    def process(pid: int, name: str, *ticks: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = " ".join(map(str, (*[0] * 10, *ticks)))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {fields} 0 0\n")

    (tmp_path / "stat").write_text("cpu 10 0 20 100 5 0 3 2 0 0\ncpu0 1\ncpu1 1\nintr 7\n")
    process(1, "a) b (c", 10, 20, 1, 2)
    process(14, "ksoftirqd/0", 500, 500, 0, 0)
    process(99, "sender", 70, 70, 0, 0)
    found = read_cpu({99}, tmp_path)
    tick_ns = 10_000_000
    assert (found.cpus, found.unused_ns, found.others_ns) == (2, 107 * tick_ns, 33 * tick_ns)


def test_cpu_use_is_what_others_did_not_take() -> None:
    before, after = CpuReading(0, 2, 0, 0), CpuReading(1_000_000_000, 2, 500_000_000, 300_000_000)
    use = after.since(before)
    assert (use.load_ns, use.others_permille) == (1_200_000_000, 150)


def options(**changes: object) -> dict[str, object]:
    given: dict[str, object] = {
        "rate": RATE, "shapes": "single,mq,mq:2", "tenants": 20, "streams": 8, "duration_s": 1.0,
        "packet_bytes": "64,1514,65536",
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rate": Rate(1)}, "--rate 1"),
        ({"shapes": "single,auto"}, "no shape 'auto'"),
        ({"shapes": "mq:5"}, "N up to 4"),
        ({"shapes": ""}, "no shape ''"),
        ({"tenants": 0}, "--tenants 0"),
        ({"tenants": 10**6}, "--tenants 1000000"),
        ({"streams": 0}, "--streams 0"),
        ({"duration_s": 0.0}, "--duration 0"),
        ({"duration_s": float("nan")}, "--duration nan"),
        ({"duration_s": float("inf")}, "--duration inf"),
        ({"packet_bytes": "63"}, "choose 64 to 65536"),
        ({"packet_bytes": "1514,"}, "no list of sizes"),
        ({"packet_bytes": "x"}, "no list of sizes"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bench_settings(**options(**changes))  # type: ignore[arg-type]


def test_every_form_is_measured_under_every_load() -> None:
    settings = bench_settings(**options())  # type: ignore[arg-type]
    found = cases(settings, many=2)
    assert [form.name for form in settings.forms] == ["single", "mq", "mq:2"]
    assert len(found) == 6 * 4 + 4 * 2
    assert len(set(found)) == len(found)
    assert not any(case.limit for case in found if case.form.name in ("plain", "default"))
    assert all(case.packets.frame_bytes >= 1_514 for case in found if case.limit)


def test_a_single_size_is_measured_at_the_limit_whatever_it_is() -> None:
    settings = bench_settings(**options(packet_bytes="64", shapes="single,single"))  # type: ignore[arg-type]
    assert [(c.limit, c.senders) for c in cases(settings, many=2) if c.form.name == "single"] == [
        (RATE, 2),
        (None, 2),
        (None, 1),
    ]


@pytest.mark.parametrize(("cpus", "senders"), [(1, 2), (2, 2), (4, 3), (64, 8)])
def test_a_cpu_is_left_to_the_rest_where_there_are_some(cpus: int, senders: int) -> None:
    assert many_senders(cpus) == senders
