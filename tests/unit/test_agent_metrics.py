"""What a scrape shows: every name of the contract, fresh values with bounded labels, and nothing that is not known."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from agent_view import ACME_CLASS, IN_STEP, SECOND, FakeReader, agent_view, device_view, reading
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from strategies import case, tenant

from kura_shaper.agent.keeper import DriftKind, Verdict
from kura_shaper.agent.marker import Disabled
from kura_shaper.agent.metrics import AgentMetrics
from kura_shaper.agent.source import Told
from kura_shaper.clock import FakeClock
from kura_shaper.kernel.prove import Proof
from kura_shaper.tree.model import Handle, Shape
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from kura_shaper.agent.view import AgentView

CLASS, DEVICE = frozenset({"device", "tenant", "class"}), frozenset({"device"})
# Name in a scrape, and its labels. What needs the retransmit counter is not here yet.
CONTRACT: dict[str, set[str] | frozenset[str]] = {
    **dict.fromkeys(
        (
            "class_sent_bytes_total",
            "class_sent_packets_total",
            "class_dropped_packets_total",
            "class_overlimits_total",
            "class_backlog_bytes",
            "class_lended_total",
            "class_borrowed_total",
            "class_rate_bits_per_second",
            "class_ceil_bits_per_second",
            "class_window_max_bits_per_second",
        ),
        CLASS,
    ),
    **dict.fromkeys(
        (
            "device_sent_bytes_total",
            "device_budget_bits_per_second",
            "device_floor_sum_bits_per_second",
            "unattributed_bytes_total",
            "direct_packets_total",
            "outside_bytes_total",
            "config_present",
            "repairs_total",
            "installs_total",
            "steering_ok",
            "snapshot_age_seconds",
        ),
        DEVICE,
    ),
    "drift_total": {"device", "kind"},
    "foreign_owner": {"device", "kind"},
    "shape_info": {"device", "shape", "reason"},
    "reconcile_seconds_sum": set(),
    "reconcile_seconds_count": set(),
    "source_valid": set(),
    "source_age_seconds": set(),
    "disabled": set(),
    "softnet_dropped_total": set(),
    "softnet_squeezed_total": set(),
    "build_info": {"version"},
}


class Scrape:
    """The samples of one scrape."""

    def __init__(self, view: AgentView, clock: FakeClock) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentMetrics(view, clock))
        self.text = generate_latest(registry).decode()
        self.samples = [s for family in text_string_to_metric_families(self.text) for s in family.samples]

    def all(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [(s.labels, s.value) for s in self.samples if s.name == f"kura_shaper_{name}"]

    def one(self, name: str, **labels: str) -> float | None:
        found = [value for has, value in self.all(name) if labels.items() <= has.items()]
        assert len(found) <= 1, (name, labels)
        return found[0] if found else None


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000 * SECOND)


@pytest.fixture
def view(clock: FakeClock) -> AgentView:
    return agent_view(clock)


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract_is_there_with_its_labels(view: AgentView, clock: FakeClock, name: str) -> None:
    view.devices["eth0"].looked = replace(IN_STEP, foreign=("root",))
    found = Scrape(view, clock).all(name)
    assert found
    assert all(labels.keys() == CONTRACT[name] for labels, _ in found)


def test_every_name_has_the_prefix_its_words_and_each_series_stands_once(view: AgentView, clock: FakeClock) -> None:
    scrape = Scrape(view, clock)
    assert {s.name[:12] for s in scrape.samples} == {"kura_shaper_"}
    series = [(s.name, *sorted(s.labels.items())) for s in scrape.samples]
    assert len(series) == len(set(series))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", scrape.text, re.MULTILINE))
    assert all(helps.values())
    types = re.findall(r"^# TYPE (\S+) (\S+)$", scrape.text, re.MULTILINE)
    assert {name for name, kind in types if name.endswith("_total")} == {n for n, k in types if k == "counter"}


def test_a_class_shows_what_the_kernel_counts_and_holds(view: AgentView, clock: FakeClock) -> None:
    scrape = Scrape(view, clock)
    reader: Any = view.devices["eth0"].reader
    counters = reader.found.counters[ACME_CLASS]
    labels = {"device": "eth0", "tenant": "t2a7", "class": "20:2a7"}
    assert scrape.one("class_sent_bytes_total", **labels) == counters.sent_bytes
    assert scrape.one("class_sent_packets_total", **labels) == counters.sent_packets
    assert scrape.one("class_dropped_packets_total", **labels) == counters.dropped_packets
    assert scrape.one("class_overlimits_total", **labels) == counters.overlimits
    assert scrape.one("class_backlog_bytes", **labels) == counters.backlog_bytes
    assert scrape.one("class_lended_total", **labels) == counters.lended
    assert scrape.one("class_borrowed_total", **labels) == counters.borrowed
    assert scrape.one("class_rate_bits_per_second", **labels) == 25_000_000
    assert scrape.one("class_ceil_bits_per_second", **labels) == 500_000_000
    assert scrape.one("class_window_max_bits_per_second", **labels) == 100_000_000


@pytest.mark.case("G11")
def test_inner_classes_and_ours_are_shown_too_under_their_own_names(view: AgentView, clock: FakeClock) -> None:
    """Case G11."""
    owners = {labels["tenant"] for labels, _ in Scrape(view, clock).all("class_sent_bytes_total")}
    assert owners == {"root", "host", "budget", "gateway", "unattributed", "unknown", "t2a7", "t2b0"}


def test_a_device_shows_its_budget_its_floors_and_what_passed_it_by(view: AgentView, clock: FakeClock) -> None:
    scrape = Scrape(view, clock)
    reader: Any = view.devices["eth0"].reader
    assert scrape.one("device_budget_bits_per_second") == 3_000_000_000
    assert scrape.one("device_floor_sum_bits_per_second") == 50_000_000
    assert scrape.one("device_sent_bytes_total") == 12_500_000
    assert scrape.one("direct_packets_total") == 7
    assert scrape.one("unattributed_bytes_total") == reader.found.counters[Handle(0x20, 0x11)].sent_bytes
    assert scrape.one("config_present") == 1
    assert scrape.one("in_step") == 1
    assert scrape.one("pending_operations") == 0


@pytest.mark.case("G10")
def test_series_of_a_tenant_that_left_vanish(view: AgentView, clock: FakeClock) -> None:
    """Case G10."""
    assert "t2a7" in Scrape(view, clock).text
    device = view.devices["eth0"]
    whole, sampler = reading(clock), device.sampler
    classes = {classid: spec for classid, spec in whole.classes.items() if classid != ACME_CLASS}
    device.reader = FakeReader(replace(whole, classes=classes))  # type: ignore[assignment]
    for at in (2, 3):
        sampler.sampled.windows.add(clock.now_ns() + at, {}, 0)
    view.told = replace(view.told, document=case(tenant(0x2B0)).document)
    text = Scrape(view, clock).text
    assert "t2a7" not in text
    assert "20:2a7" not in text


@pytest.mark.case("F42")
def test_a_class_whose_owner_is_nobody_any_more_is_nobodys(view: AgentView, clock: FakeClock) -> None:
    """Case F42: a class that still sends keeps its series, under no tenant's name."""
    view.told = replace(view.told, document=case(tenant(0x2B0)).document)
    scrape = Scrape(view, clock)
    assert "t2a7" not in scrape.text
    assert scrape.one("class_sent_bytes_total", **{"class": "20:2a7", "tenant": ""}) is not None


@pytest.mark.case("F41")
def test_what_can_not_be_read_is_absent_and_never_zero(view: AgentView, clock: FakeClock) -> None:
    """Case F41."""
    view.devices["eth0"].reader = FakeReader(Unknown("the dump was interrupted"))  # type: ignore[assignment]
    view.devices["eth0"].sampler.sampled.newest = None
    scrape = Scrape(view, clock)
    for name in ("class_sent_bytes_total", "class_backlog_bytes", "class_rate_bits_per_second", "config_present"):
        assert scrape.all(name) == []
    for name in ("snapshot_age_seconds", "direct_packets_total", "unattributed_bytes_total"):
        assert scrape.all(name) == []
    assert scrape.all("device_sent_bytes_total") == []
    assert scrape.one("installs_total") == 0


@pytest.mark.case("F45")
def test_a_reading_shows_its_age(view: AgentView, clock: FakeClock) -> None:
    clock.wait_ns(3 * SECOND)
    scrape = Scrape(view, clock)
    assert scrape.one("snapshot_age_seconds") == 3
    assert scrape.one("source_age_seconds") == 3


def test_a_device_that_can_not_be_sampled_any_more_shows_no_counter_that_stands_still(
    view: AgentView, clock: FakeClock
) -> None:
    clock.wait_ns(5 * SECOND)
    assert Scrape(view, clock).one("device_sent_bytes_total") == 12_500_000
    clock.wait_ns(SECOND)
    scrape = Scrape(view, clock)
    assert (scrape.all("device_sent_bytes_total"), scrape.all("outside_bytes_total")) == ([], [])


def test_a_window_of_long_ago_is_no_window_of_the_last_minute(view: AgentView, clock: FakeClock) -> None:
    clock.wait_ns(200 * SECOND)
    assert Scrape(view, clock).all("class_window_max_bits_per_second") == []


def test_without_a_document_there_is_no_age_and_no_device(clock: FakeClock) -> None:
    view = agent_view(clock)
    view.told, view.devices = Told(), {}
    scrape = Scrape(view, clock)
    assert scrape.one("source_valid") == 0
    assert scrape.all("source_age_seconds") == []
    assert scrape.one("budget_known") == 0
    assert scrape.all("device_budget_bits_per_second") == []


def test_a_device_that_was_not_looked_at_yet_is_neither_in_step_nor_not(clock: FakeClock) -> None:
    scrape = Scrape(agent_view(clock, eth0=device_view(clock, looked=None)), clock)
    for name in ("in_step", "shape_info", "steering_ok", "pending_operations"):
        assert scrape.all(name) == []


@pytest.mark.parametrize(
    ("verdict", "in_step"), [(v, float(v.is_well)) for v in Verdict], ids=[str(v) for v in Verdict]
)
def test_a_device_is_in_step_by_what_its_last_look_came_to(
    view: AgentView, clock: FakeClock, verdict: Verdict, in_step: float
) -> None:
    view.devices["eth0"].looked = replace(IN_STEP, verdict=verdict, pending=2)
    scrape = Scrape(view, clock)
    assert scrape.one("in_step") == in_step
    assert scrape.one("pending_operations") == 2


def test_counts_of_drift_are_there_from_the_start_for_every_kind(view: AgentView, clock: FakeClock) -> None:
    """A counter that begins with its first event has no rate of it."""
    view.devices["eth0"].keeper.tally.drift[DriftKind.LEAF] = 2
    found = {labels["kind"]: value for labels, value in Scrape(view, clock).all("drift_total")}
    assert found == dict.fromkeys(map(str, DriftKind), 0) | {"leaf": 2}


def test_steering_is_ok_when_it_was_proven_or_none_is_needed(view: AgentView, clock: FakeClock) -> None:
    device = view.devices["eth0"]
    assert Scrape(view, clock).one("steering_ok") == 1
    for proof, is_ok in ((None, 0), (Proof(is_proven=False), 0), (Proof(is_proven=True), 1)):
        device.looked = replace(IN_STEP, shape=Shape.MQ, proof=proof)
        assert Scrape(view, clock).one("steering_ok") == is_ok


def test_a_tree_with_a_part_missing_is_not_present(view: AgentView, clock: FakeClock) -> None:
    device = view.devices["eth0"]
    whole = reading(clock)
    device.reader = FakeReader(replace(whole, filters=()))  # type: ignore[assignment]
    assert Scrape(view, clock).one("config_present") == 0
    device.reader = FakeReader(replace(whole, root=None, classes={}, counters={}))  # type: ignore[assignment]
    scrape = Scrape(view, clock)
    assert scrape.one("config_present") == 0
    assert scrape.all("direct_packets_total") == []


def test_a_marker_a_bad_source_and_other_shapers_are_told(view: AgentView, clock: FakeClock) -> None:
    view.disabled = Disabled("incident\n4711 " + "x" * 1000)
    view.told = replace(view.told, is_valid=False, problems=("a", "b"))
    view.other_shapers = ("egress-tree-agent",)
    scrape = Scrape(view, clock)
    assert (scrape.one("disabled"), scrape.one("source_valid"), scrape.one("source_problems")) == (1, 0, 2)
    assert scrape.one("foreign_owner", kind="egress-tree-agent") == 1
    assert "incident" not in scrape.text


def test_labels_are_bounded_whatever_reasons_say(view: AgentView, clock: FakeClock) -> None:
    hostile = 'x"} 1\nkura_shaper_in_step{device="eth9"} 0\n' + "y" * 10_000
    view.devices["eth0"].looked = replace(
        IN_STEP, why_shape=hostile, reasons=(hostile,) * 50, findings=(hostile,), operations=(hostile,)
    )
    view.problems = (hostile,)
    scrape = Scrape(view, clock)
    assert max(len(value) for s in scrape.samples for value in s.labels.values()) <= 120
    assert scrape.one("in_step", device="eth9") is None


def test_two_devices_stand_side_by_side(clock: FakeClock) -> None:
    view = agent_view(clock, eth0=device_view(clock), eth1=device_view(clock, name="eth1"))
    scrape = Scrape(view, clock)
    for name in ("config_present", "installs_total", "outside_bytes_total", "device_sent_bytes_total"):
        assert {labels["device"] for labels, _ in scrape.all(name)} == {"eth0", "eth1"}
