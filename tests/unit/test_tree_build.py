"""From a document and a device to the wanted tree: its form, its degradations, its refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import ETH0, Case, case, cases, document, tenant

from kura_shaper.errors import RefusedError, UsageError
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build, owners_of
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.model import BpfMatch, FlowerMatch, FwMatch, Handle, HostTraffic, LeafKind, Shape
from kura_shaper.units import Rate

FLEET = case(tenant(0x2A7, "25M", "500M"), tenant(0x2B0, "250M", "2G"))


def drawn(made: Case) -> list[str]:
    """The classes as one line each: class, parent, floor, ceil, prio."""
    classes = made.wanted().tree.classes
    return [f"{c.classid} {c.parent} {c.floor} {c.ceil} {c.prio}" for c in classes]


def with_settings(**changes: object) -> Case:
    return replace(FLEET, settings=replace(FLEET.settings, **changes))  # type: ignore[arg-type]


def with_kinds(leaves: set[LeafKind], classifiers: set[ClassifierKind]) -> Case:
    return replace(FLEET, capabilities=Capabilities(frozenset(leaves), frozenset(classifiers)))


def test_host_traffic_stands_beside_the_budget() -> None:
    assert drawn(FLEET) == [
        "20:1 20: 1T 1T 0",
        "20:2 20:1 50M 1T 0",
        "20:12 20:1 1M 1T 0",
        "20:3 20:1 3G 3G 0",
        "20:10 20:3 1M 3G 1",
        "20:11 20:3 1M 3G 2",
        "20:2a7 20:3 25M 500M 1",
        "20:2b0 20:3 250M 2G 1",
    ]


def test_host_traffic_can_be_put_under_the_budget() -> None:
    assert drawn(with_settings(host_traffic=HostTraffic.INSIDE))[:5] == [
        "20:1 20: 1T 1T 0",
        "20:3 20:1 3G 3G 0",
        "20:2 20:3 50M 3G 0",
        "20:12 20:3 1M 3G 0",
        "20:10 20:3 1M 3G 1",
    ]


def test_a_host_without_a_reserve_still_gets_a_trickle() -> None:
    # A rate of 0 is refused by the kernel. 62,500 bit/s is no whole number of bytes.
    assert drawn(with_settings(host_reserve=Rate(0)))[1] == "20:2 20:1 62.496k 1T 0"


def test_the_reserve_of_a_host_inside_is_taken_from_what_tenants_are_promised() -> None:
    promised = case(tenant(0x100, "3G", "3G"), host_traffic=HostTraffic.INSIDE).wanted()
    assert [note.code for note in promised.notes] == ["shape", "floors-scaled", "floor-scaled"]
    children = [c for c in promised.tree.classes if c.parent == Handle(0x20, 3)]
    assert sum(c.floor.bits_per_second for c in children) <= 3 * 10**9


def test_a_tree_knows_its_root_its_default_and_its_owners() -> None:
    tree = FLEET.wanted().tree
    assert tree.shape is Shape.SINGLE
    assert (str(tree.root.handle), tree.htbs[0].default_minor, tree.htbs[0].direct_qlen_packets) == ("20:", 0x12, 1000)
    proofs = {0x20 + queue: "proof" for queue in range(16)}
    assert owners_of(FLEET.document) == proofs | {
        1: "root",
        2: "host",
        3: "budget",
        0x10: "gateway",
        0x11: "unattributed",
        0x12: "unknown",
        0x2A7: "t2a7",
        0x2B0: "t2b0",
    }
    budget = tree.class_of(3)
    assert budget is not None
    assert str(budget.classid) == "20:3"
    assert tree.class_of(0x100) is None


def test_every_class_without_children_has_a_leaf_whose_handle_says_whose_it_is() -> None:
    leaves = [f"{leaf.parent} {leaf.handle}" for leaf in FLEET.wanted().tree.leaves]
    assert leaves == ["20:2 40:", "20:12 a0:", "20:10 60:", "20:11 80:", "20:2a7 2a7:", "20:2b0 2b0:"]


@settings(deadline=None)
@given(cases())
@pytest.mark.case("D2")
def test_handles_never_collide_and_every_part_hangs_on_another(made: Case) -> None:
    """Case D2."""
    tree = made.wanted().tree
    majors = [tree.root.handle.major, *(leaf.handle.major for leaf in tree.leaves)]
    assert len(set(majors)) == len(majors)
    known = {tree.root.handle}
    for spec in tree.classes:
        assert spec.parent in known
        known.add(spec.classid)
    inner = {spec.parent for spec in tree.classes} - {tree.root.handle}
    assert {leaf.parent for leaf in tree.leaves} == known - inner - {tree.root.handle}
    for found in tree.filters:
        if isinstance(found.match, FwMatch | FlowerMatch):
            assert found.match.classid in known
    assert build(made.document, made.device, settings=made.settings, capabilities=made.capabilities) == made.wanted()


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (ShapeChoice.AUTO, "shape single: auto did not take mq, since it has a single tx queue"),
        (ShapeChoice.SINGLE, "shape single: asked for"),
    ],
)
def test_the_shape_and_its_reason_are_always_noted(choice: ShapeChoice, says: str) -> None:
    assert [note.message for note in with_settings(shape=choice).wanted().notes] == [says]


def test_shape_mq_is_refused_not_replaced_in_silence() -> None:
    with pytest.raises(RefusedError, match="shape mq on eth0: it has a single tx queue; use shape single"):
        with_settings(shape=ShapeChoice.MQ).wanted()


@pytest.mark.parametrize(
    ("asked", "has", "kind", "says"),
    [
        (LeafKind.FQ_CODEL, {LeafKind.FQ_CODEL}, LeafKind.FQ_CODEL, None),
        (LeafKind.FQ, set(LeafKind), LeafKind.FQ, None),
        (LeafKind.FQ_CODEL, {LeafKind.FQ, LeafKind.BFIFO}, LeafKind.FQ, "the kernel has no fq_codel: leaves are fq"),
        (LeafKind.FQ, set(LeafKind) - {LeafKind.FQ}, LeafKind.FQ_CODEL, "the kernel has no fq: leaves are fq_codel"),
        (
            LeafKind.FQ_CODEL,
            {LeafKind.BFIFO},
            LeafKind.BFIFO,
            "the kernel has no fq_codel: leaves are bfifo, so flows within a tenant share one queue",
        ),
        (LeafKind.BFIFO, {LeafKind.FQ}, LeafKind.FQ, "the kernel has no bfifo: leaves are fq"),
    ],
)
@pytest.mark.case("E10")
def test_a_leaf_that_the_kernel_lacks_becomes_the_next_best_and_is_noted(
    asked: LeafKind, has: set[LeafKind], kind: LeafKind, says: str | None
) -> None:
    """Case E10."""
    made = replace(with_kinds(has, {ClassifierKind.BPF}), settings=replace(FLEET.settings, leaf=asked))
    wanted = made.wanted()
    assert {leaf.parameters.kind for leaf in wanted.tree.leaves} == {kind}
    assert [note.message for note in wanted.notes if note.code == "leaf-degraded"] == ([says] if says else [])


def test_a_classifier_that_the_kernel_lacks_becomes_a_filter_for_each_tenant_and_is_noted() -> None:
    wanted = with_kinds(set(LeafKind), {ClassifierKind.FW}).wanted()
    assert [note.code for note in wanted.notes] == ["shape", "classifier-degraded"]
    kinds = [type(found.match) for found in wanted.tree.filters]
    assert kinds == [FwMatch] * 3 + [FlowerMatch] * 8
    assert [type(found.match) for found in FLEET.wanted().tree.filters] == [BpfMatch]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (with_kinds(set(), set(ClassifierKind)), "the kernel has no usable leaf qdisc; load sch_fq_codel"),
        (
            with_kinds(set(LeafKind), set()),
            "the kernel has neither cls_bpf nor cls_fw with cls_flower; load the module",
        ),
    ],
)
def test_a_kernel_that_lacks_every_alternative_is_refused_with_what_to_load(made: Case, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        made.wanted()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": Rate(2 * 10**12)}, "a budget of 2T bit/s is above 1T; rates are in bit/s"),
        ({"host_reserve": Rate(10**13)}, "a host reserve of 10T bit/s is above 1T; rates are in bit/s"),
    ],
)
def test_a_rate_above_the_root_class_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_settings(**changes).wanted()
    assert str(caught.value) == says


def test_more_ports_than_a_program_can_tell_apart_are_refused() -> None:
    assert case(ports=tuple(range(1, 41))).wanted()
    with pytest.raises(UsageError, match="41 gateway ports are more than a program can tell apart; keep to 40 ports"):
        case(ports=tuple(range(1, 42))).wanted()


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(RefusedError, match="a budget of 0 can't hold 2 tenants"):
        with_settings(budget=Rate(7)).wanted()


def test_the_least_that_must_be_said_is_the_budget() -> None:
    wanted = build(document(), ETH0, settings=TreeSettings(Rate(10**9)), capabilities=Capabilities())
    assert [str(spec.classid) for spec in wanted.tree.classes] == ["20:1", "20:2", "20:12", "20:3", "20:10", "20:11"]
