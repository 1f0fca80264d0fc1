"""A snapshot read back: whose each class is, and what would have to be done to have the document's tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import ETH0, Case, case, cases, kernel_with, tenant

from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.model import ROOT, Filter, Handle, HostTraffic, LeafKind, OtherMatch, OtherQdisc, Shape
from kura_shaper.tree.observe import Asked, observe
from kura_shaper.tree.operations import DeleteClass, DeleteFilter, SetFilter
from kura_shaper.tree.params import TRICKLE_MIN
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

ACME, BETA = tenant(0x2A7), tenant(0x2B0)
FLEET = case(ACME, BETA)
HOST, BUDGET, ACME_CLASS = (Handle(0x20, minor) for minor in (2, 3, 0x2A7))


def drift(kernel: FakeKernel, made: Case = FLEET, budget: Rate | None = None) -> tuple[str, ...]:
    return observe(kernel.snapshot(), made.document, Asked(budget=budget)).drift


def test_every_class_is_named_after_its_owner_with_its_leaf_and_counters() -> None:
    kernel = kernel_with(FLEET.wanted())
    actual = kernel.snapshot()
    counters = ClassCounters(sent_bytes=7)
    stray = replace(actual.classes[ACME_CLASS], classid=Handle(0x20, 0x999))
    actual = replace(
        actual,
        classes={stray.classid: stray, **actual.classes},
        counters={ACME_CLASS: counters},
        leaves={**actual.leaves, stray.classid: OtherQdisc("sfq", Handle(0), stray.classid)},
    )
    found = observe(actual, FLEET.document)
    assert (found.is_ours, found.shape) == (True, Shape.SINGLE)
    assert [(str(c.spec.classid), c.owner, c.leaf) for c in found.classes] == [
        ("20:1", "root", ""),
        ("20:2", "host", "fq_codel"),
        ("20:3", "budget", ""),
        ("20:10", "gateway", "fq_codel"),
        ("20:11", "unattributed", "fq_codel"),
        ("20:12", "unknown", "fq_codel"),
        ("20:2a7", "t2a7", "fq_codel"),
        ("20:2b0", "t2b0", "fq_codel"),
        ("20:999", "", "sfq"),
    ]
    assert [c.counters.sent_bytes for c in found.classes] == [0, 0, 0, 0, 0, 0, 7, 0, 0]


def test_without_a_document_tenants_have_no_name_and_nothing_drifts() -> None:
    found = observe(kernel_with(FLEET.wanted()).snapshot(), None)
    assert [c.owner for c in found.classes][-3:] == ["unknown", "", ""]
    assert found.drift == ()


@pytest.mark.parametrize("root", [None, OtherQdisc("mq", Handle(0), ROOT)])
def test_a_device_without_a_tree_of_ours_has_no_shape_and_no_drift(root: OtherQdisc | None) -> None:
    found = observe(FakeKernel(ETH0, root).snapshot(), FLEET.document)
    assert (found.is_ours, found.shape, found.classes, found.drift) == (False, None, (), ())


@settings(deadline=None, max_examples=60)
@given(cases())
def test_a_tree_as_it_was_made_does_not_drift_whatever_its_settings(made: Case) -> None:
    kernel = kernel_with(made.wanted(), made.device)
    found = observe(kernel.snapshot(), made.document)
    assert found.drift == ()
    asked = Asked(
        budget=made.settings.budget,
        leaf=made.settings.leaf,
        host_traffic=made.settings.host_traffic,
        host_reserve=max(made.settings.host_reserve, TRICKLE_MIN),
    )
    assert observe(kernel.snapshot(), made.document, asked).drift == ()


@pytest.mark.parametrize(
    "made",
    [
        case(ACME, host_traffic=HostTraffic.INSIDE),
        case(ACME, leaf=LeafKind.BFIFO),
        case(ACME, classifier=ClassifierKind.FW),
    ],
)
def test_the_settings_of_a_tree_are_read_from_the_tree(made: Case) -> None:
    kernel = kernel_with(made.wanted())
    assert drift(kernel, made) == ()
    assert drift(kernel, replace(made, document=FLEET.document))[0].startswith("add class 20:2b0 ")


def test_a_tenant_that_came_or_went_or_changed_is_drift() -> None:
    kernel = kernel_with(case(ACME).wanted())
    assert [line[:16] for line in drift(kernel)] == ["add class 20:2b0", "set leaf of 20:2"]
    assert drift(kernel_with(FLEET.wanted()), case(ACME)) == ("delete class 20:2b0 once it is quiet",)
    raised = case(tenant(0x2A7, "25M", "1G"), BETA)
    assert [line[:19] for line in drift(kernel_with(FLEET.wanted()), raised)] == [
        "change class 20:2a7",
        "set leaf of 20:2a7 ",
    ]


def test_a_class_or_filter_that_was_taken_away_by_hand_is_drift() -> None:
    kernel = kernel_with(FLEET.wanted())
    kernel.send([DeleteClass(ACME_CLASS)])
    assert [line.split(":")[0] for line in drift(kernel)] == ["add class 20", "set leaf of 20"]
    kernel.send([DeleteFilter(kernel.snapshot().filters[0])])
    assert drift(kernel) == ("the classifier is missing; `kura-shaper apply` mends it",)


@pytest.mark.parametrize(
    ("missing", "budget", "line"),
    [
        (HOST, None, "class 20:2 host is missing; `kura-shaper apply` mends it"),
        (HOST, Rate(3 * 10**9), "class 20:2 host is missing; `kura-shaper apply` mends it"),
        (Handle(0x20, 0x12), None, "class 20:12 unknown is missing; `kura-shaper apply` mends it"),
        (BUDGET, None, "class 20:3 budget is missing; `kura-shaper apply` mends it"),
    ],
)
def test_a_class_that_the_settings_stand_in_is_drift_by_itself(missing: Handle, budget: Rate | None, line: str) -> None:
    kernel = kernel_with(FLEET.wanted())
    del kernel._classes[missing]
    assert drift(kernel, budget=budget) == (line,)
    # Every tree of ours has it, so nobody needs a document to miss it.
    assert observe(kernel.snapshot(), None).drift == (line,)


@pytest.mark.parametrize(
    ("asked", "begins"),
    [
        (Asked(host_reserve=Rate(10**8)), "change class 20:2 parent 20:1 floor 100M"),
        (Asked(host_traffic=HostTraffic.INSIDE), "delete class 20:12"),
        (Asked(budget=Rate(10**9)), "change class 20:11 parent 20:3 floor 1M ceil 1G"),
    ],
)
def test_what_is_asked_for_counts_for_more_than_what_is_in_force(asked: Asked, begins: str) -> None:
    kernel = kernel_with(FLEET.wanted())
    assert observe(kernel.snapshot(), FLEET.document, asked).drift[0].startswith(begins)


def test_a_foreign_filter_ahead_of_ours_is_drift() -> None:
    kernel = kernel_with(FLEET.wanted())
    kernel.send([SetFilter(Filter(Handle(0x20), 1, 3, 1, OtherMatch("u32")))])
    (line,) = drift(kernel)
    assert "it comes before ours" in line


def test_a_budget_that_is_told_is_the_wanted_one() -> None:
    lines = drift(kernel_with(FLEET.wanted()), budget=Rate(5 * 10**9))
    assert lines[0].startswith("change class 20:3 parent 20:1 floor 5G ceil 5G")


def test_a_leaf_of_the_wrong_kind_is_drift() -> None:
    kernel = kernel_with(FLEET.wanted())
    kernel._leaves[ACME_CLASS] = OtherQdisc("sfq", Handle(0x8001), ACME_CLASS)
    assert drift(kernel) == ("set leaf of 20:2a7 to fq_codel limit 2064p target 5000us",)


def test_a_tree_without_any_leaf_of_ours_wants_the_best_kind() -> None:
    kernel = kernel_with(FLEET.wanted())
    for classid in list(kernel._leaves):
        kernel._leaves[classid] = OtherQdisc("pfifo", Handle(0), classid)
    assert len(drift(kernel)) == 6
    assert {line.split(" to ")[1].split()[0] for line in drift(kernel)} == {"fq_codel"}


def test_a_root_that_must_be_rebuilt_is_drift() -> None:
    kernel = kernel_with(FLEET.wanted())
    kernel._root = replace(FLEET.wanted().tree.root, direct_qlen_packets=2)
    assert drift(kernel)[:2] == ("delete root qdisc 20:", "add root qdisc htb 20: default 12")


def test_a_document_that_the_budget_in_force_cannot_hold_is_drift_not_a_failure() -> None:
    kernel = kernel_with(case(ACME, budget="1M").wanted())
    many = case(*(tenant(0x100 + number) for number in range(20)))
    (line,) = drift(kernel, many)
    assert line.startswith("no tree for this document: a budget of 1M can't hold 20 tenants: each needs")
