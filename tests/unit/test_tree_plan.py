"""Single plans: what they say, what they cost, in which order, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ETH0, Case, assert_tree, bring, case, kernel_with, tenant

from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.tree.build import root_qdisc
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import Plan, plan, plan_removal
from kura_shaper.tree.model import (
    ROOT,
    Device,
    Filter,
    Fq,
    FqCodel,
    Handle,
    HostTraffic,
    HtbQdisc,
    Leaf,
    LeafKind,
    OtherMatch,
    OtherQdisc,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteLeaf,
    DeleteRoot,
    Impact,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
)
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown

ACME, BETA = tenant(0x2A7), tenant(0x2B0)
BETA_CLASS = Handle(0x20, 0x2B0)
FW = ClassifierKind.FW
FOREIGN_FILTER = Filter(Handle(0x20), 50, 3, 0x800, OtherMatch("u32"))


def from_to(before: Case, after: Case) -> Plan:
    return plan(after.wanted(), kernel_with(before.wanted()).snapshot())


def lines(found: Plan) -> list[str]:
    return [operation.describe() for operation in found.operations]


def shape_of(found: Plan) -> list[tuple[str, str]]:
    return [(type(operation).__name__, str(operation.impact)) for operation in found.operations]


def notes_of(found: Plan) -> list[tuple[str, str]]:
    return [(note.code, note.message) for note in found.notes if note.code != "shape"]


@pytest.mark.case("D11")
def test_a_first_plan_builds_everything_class_leaf_filter_and_last_the_default_class() -> None:
    """Case D11."""
    found = plan(case(ACME).wanted(), FakeKernel(ETH0).snapshot())
    assert lines(found) == [
        "add root qdisc htb 20: default 12",
        "add class 20:1 parent 20: floor 1T ceil 1T burst 125000000b cburst 125000000b quantum 60000b prio 0",
        "add class 20:2 parent 20:1 floor 50M ceil 1T burst 65536b cburst 125000000b quantum 60000b prio 0",
        "set leaf of 20:2 to fq_codel limit 10240p target 5000us",
        "add class 20:3 parent 20:1 floor 3G ceil 3G burst 375000b cburst 375000b quantum 60000b prio 0",
        "add class 20:10 parent 20:3 floor 1M ceil 3G burst 65536b cburst 375000b quantum 12500b prio 1",
        "set leaf of 20:10 to fq_codel limit 10240p target 5000us",
        "add class 20:11 parent 20:3 floor 1M ceil 3G burst 65536b cburst 375000b quantum 12500b prio 2",
        "set leaf of 20:11 to fq_codel limit 10240p target 5000us",
        "add class 20:2a7 parent 20:3 floor 25M ceil 500M burst 65536b cburst 65536b quantum 60000b prio 1",
        "set leaf of 20:2a7 to fq_codel limit 2064p target 5000us",
        "set filter prio 100 on 20:: bpf of 61 instructions: class id from the mark, gateway ports",
        "add class 20:12 parent 20:1 floor 1M ceil 1T burst 65536b cburst 125000000b quantum 12500b prio 0",
        "set leaf of 20:12 to fq_codel limit 10240p target 5000us",
    ]
    assert found.impact is Impact.DEVICE_LOSS
    assert [operation.impact for operation in found.operations[1:]] == [Impact.HITLESS] * 13


def test_a_second_plan_is_empty_and_costs_nothing() -> None:
    found = from_to(case(ACME, BETA), case(ACME, BETA))
    assert (found.operations, found.impact, found.refusals, found.unknown) == ((), None, (), "")


def test_an_unknown_state_yields_no_operation_and_says_why() -> None:
    wanted = case(ACME).wanted()
    found = plan(wanted, Unknown("the dump was interrupted"))
    assert found == Plan(notes=wanted.notes, unknown="the dump was interrupted")
    assert plan_removal(Unknown("no")) == Plan(unknown="no")


def test_a_tenant_that_comes_touches_nobody_else() -> None:
    assert lines(from_to(case(ACME), case(ACME, BETA))) == [
        "add class 20:2b0 parent 20:3 floor 25M ceil 500M burst 65536b cburst 65536b quantum 60000b prio 1",
        "set leaf of 20:2b0 to fq_codel limit 2064p target 5000us",
    ]


@pytest.mark.case("F20")
def test_a_tenant_that_comes_has_its_filter_last() -> None:
    found = from_to(case(ACME, classifier=FW), case(ACME, BETA, classifier=FW))
    assert shape_of(found) == [("AddClass", "hitless"), ("SetLeaf", "hitless"), ("SetFilter", "hitless")]
    assert lines(found)[2] == "set filter prio 100 on 20:: fw mark 0x2b00000/0xffff0000 to 20:2b0"


@pytest.mark.case("F20")
def test_a_tenant_that_goes_loses_its_filter_first() -> None:
    found = from_to(case(ACME, BETA, classifier=FW), case(BETA, classifier=FW))
    assert shape_of(found) == [("DeleteFilter", "hitless"), ("DeleteClass", "leaf-loss")]
    assert lines(found) == [
        "delete filter prio 100 on 20:: fw mark 0x2a70000/0xffff0000 to 20:2a7",
        "delete class 20:2a7 once it is quiet",
    ]


def test_children_are_deleted_before_their_parents() -> None:
    kernel = kernel_with(case(ACME).wanted())
    child = kernel._classes[Handle(0x20, 0x2A7)]
    kernel.send(
        [
            AddClass(replace(child, classid=Handle(0x20, 0x300), parent=Handle(0x20, 3))),
            AddClass(replace(child, classid=Handle(0x20, 0x200), parent=Handle(0x20, 0x300))),
            AddClass(replace(child, classid=Handle(0x20, 0x400), parent=Handle(0x20, 0x200))),
        ]
    )
    found = plan(case(ACME).wanted(), kernel.snapshot())
    assert lines(found) == [
        "delete class 20:400 once it is quiet",
        "delete class 20:200 once it is quiet",
        "delete class 20:300 once it is quiet",
    ]


def test_all_that_goes_goes_in_one_run_so_that_it_is_drained_once() -> None:
    many = [tenant(0x100 + number, "25M", "1G") for number in range(8)]
    smaller = [tenant(each.class_id, "10M", "500M") for each in many[::2]]
    found = from_to(case(*many), case(*smaller))
    assert [name for name, _ in shape_of(found)] == ["DeleteClass"] * 4 + ["ChangeClass"] * 4 + ["SetLeaf"] * 4


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Falling: children before parents.
        (
            case(tenant(0x2A7, "1G", "3G"), budget="3G"),
            case(tenant(0x2A7, "500M", "1G"), budget="1G"),
            ["20:2a7 floor 500M ceil 1G", "20:11 floor 1M ceil 1G", "20:10 floor 1M ceil 1G", "20:3 floor 1G ceil 1G"],
        ),
        # Rising: parents before children.
        (
            case(tenant(0x2A7, "500M", "1G"), budget="1G"),
            case(tenant(0x2A7, "1G", "3G"), budget="3G"),
            ["20:3 floor 3G ceil 3G", "20:10 floor 1M ceil 3G", "20:11 floor 1M ceil 3G", "20:2a7 floor 1G ceil 3G"],
        ),
        # A floor that rises where the ceil falls goes in two steps.
        (
            case(tenant(0x2A7, "25M", "1G")),
            case(tenant(0x2A7, "250M", "500M")),
            ["20:2a7 floor 25M ceil 500M", "20:2a7 floor 250M ceil 500M"],
        ),
        # One tenant's floor falls before another's rises.
        (
            case(tenant(0x2A7, "1G", "3G"), tenant(0x2B0, "25M", "3G")),
            case(tenant(0x2A7, "25M", "3G"), tenant(0x2B0, "2G", "3G")),
            ["20:2a7 floor 25M ceil 3G", "20:2b0 floor 2G ceil 3G"],
        ),
        (
            case(tenant(0x2A7, "25M", "3G"), tenant(0x2B0, "2G", "3G")),
            case(tenant(0x2A7, "2G", "3G"), tenant(0x2B0, "25M", "3G")),
            ["20:2b0 floor 25M ceil 3G", "20:2a7 floor 2G ceil 3G"],
        ),
    ],
)
def test_what_falls_falls_before_what_rises_rises(before: Case, after: Case, expected: list[str]) -> None:
    changes = [op.spec for op in from_to(before, after).operations if isinstance(op, ChangeClass)]
    assert [f"{spec.classid} floor {spec.floor} ceil {spec.ceil}" for spec in changes] == expected


def test_a_changed_budget_changes_classes_in_place_and_loses_nothing() -> None:
    found = from_to(case(ACME, budget="3G"), case(ACME, budget="5G"))
    assert {name for name, _ in shape_of(found)} == {"ChangeClass"}
    assert found.impact is Impact.HITLESS


def test_a_new_mtu_changes_quanta_and_leaves_in_place() -> None:
    found = from_to(case(ACME), case(ACME, device=Device("eth0", 2, mtu_bytes=9000)))
    assert found.impact is Impact.HITLESS
    assert all(op.in_place for op in found.operations if isinstance(op, SetLeaf))


def test_a_leaf_of_another_kind_is_taken_away_first_for_the_kernel_refuses_to_swap_it() -> None:
    found = from_to(case(ACME), case(ACME, leaf=LeafKind.FQ))
    assert shape_of(found) == [("DeleteLeaf", "leaf-loss"), ("SetLeaf", "leaf-loss")] * 5
    assert lines(found)[-4:-2] == [
        "delete leaf 2a7: of 20:2a7",
        "set leaf of 20:2a7 to fq limit 10240p flow_limit 1000p",
    ]


@pytest.mark.parametrize(
    ("left", "costs"),
    [
        (None, ["SetLeaf"]),
        (OtherQdisc("pfifo", Handle(0), Handle(0x20, 0x2A7)), ["SetLeaf"]),
        (OtherQdisc("sfq", Handle(0x8001), Handle(0x20, 0x2A7)), ["SetLeaf"]),
        (OtherQdisc("sfq", Handle(0x2A7), Handle(0x20, 0x2A7)), ["DeleteLeaf", "SetLeaf"]),
    ],
)
def test_a_leaf_that_was_swapped_by_hand_is_put_back(left: OtherQdisc | None, costs: list[str]) -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    actual = kernel.snapshot()
    leaves = {**actual.leaves, Handle(0x20, 0x2A7): left} if left else dict(list(actual.leaves.items())[:-1])
    found = plan(wanted, replace(actual, leaves=leaves))
    assert shape_of(found) == [(name, "leaf-loss") for name in costs]


def test_an_fq_codel_with_another_number_of_flows_cannot_be_changed_in_place() -> None:
    wanted = case(ACME).wanted()
    leaf = wanted.tree.leaves[-1]
    assert isinstance(leaf.parameters, FqCodel)
    fewer_flows, fewer_packets = replace(leaf.parameters, flows=64), replace(leaf.parameters, limit_packets=64)
    for parameters, names in ((fewer_flows, ["DeleteLeaf", "SetLeaf"]), (fewer_packets, ["SetLeaf"])):
        kernel = kernel_with(wanted)
        kernel._leaves[leaf.parent] = replace(leaf, parameters=parameters)
        found = plan(wanted, kernel.snapshot())
        assert [name for name, _ in shape_of(found)] == names
        bring(kernel, wanted)


def test_a_mask_that_changes_takes_all_fw_filters_away_first_for_they_share_it() -> None:
    before, after = (case(ACME, classifier=FW, mask=mask, ports=()) for mask in (0xFFFF0000, 0x0FFF0000))
    names = [name for name, _ in shape_of(from_to(before, after))]
    assert names == ["DeleteFilter", "DeleteFilter", "SetFilter", "SetFilter"]
    bring(kernel_with(before.wanted()), after.wanted())


def test_a_program_is_replaced_in_one_step() -> None:
    found = from_to(case(ACME, ports=(443,)), case(ACME, ports=(443, 8443)))
    assert shape_of(found) == [("SetFilter", "hitless")]


@pytest.mark.parametrize("kinds", [(ClassifierKind.BPF, FW), (FW, ClassifierKind.BPF)])
def test_the_other_kind_of_classifier_has_another_default_class_so_the_root_must_be_rebuilt(
    kinds: tuple[ClassifierKind, ClassifierKind],
) -> None:
    before, after = (case(ACME, classifier=kind).wanted() for kind in kinds)
    kernel = kernel_with(before)
    assert [refusal.code for refusal in plan(after, kernel.snapshot()).refusals] == ["rebuild-needed"]
    rebuild = plan(after, kernel.snapshot(), Permission.DISRUPTION)
    assert {*kernel.send(rebuild.operations)} == {None}
    assert_tree(kernel.snapshot(), after)


def test_a_gateway_port_before_another_moves_no_filter_onto_one_that_matches_alike() -> None:
    before, after = (case(ACME, classifier=FW, ports=ports) for ports in ((400, 443), (443, 7443)))
    kernel = kernel_with(before.wanted())
    first = next(f for f in kernel.snapshot().filters if f.priority == 110)
    kernel.send([DeleteFilter(first)])
    bring(kernel, after.wanted())


@pytest.mark.parametrize(
    ("minor", "filters"),
    [(0x2A7, 1), (0x10, 1), (0x11, 8)],
)
def test_a_class_below_the_wrong_parent_is_moved_with_its_filters(minor: int, filters: int) -> None:
    # A change of parent is taken by the kernel without a word, and ignored.
    wanted = case(ACME, classifier=FW).wanted()
    kernel = kernel_with(wanted)
    spec = kernel._classes[Handle(0x20, minor)]
    kernel._classes[spec.classid] = replace(spec, parent=Handle(0x20, 1))
    found = plan(wanted, kernel.snapshot())
    move = ["DeleteClass", "AddClass", "SetLeaf"]
    assert [name for name, _ in shape_of(found)] == ["DeleteFilter"] * filters + move + ["SetFilter"] * filters
    bring(kernel, wanted)


def test_the_host_moves_under_the_budget_and_back_with_its_leaf() -> None:
    outside, inside = case(ACME), case(ACME, host_traffic=HostTraffic.INSIDE)
    found = from_to(outside, inside)
    move = [("AddClass", "hitless"), ("SetLeaf", "hitless")]
    assert shape_of(found) == [("DeleteClass", "leaf-loss")] * 2 + move * 2
    kernel = kernel_with(inside.wanted())
    bring(kernel, outside.wanted())


@pytest.mark.case("D10")
def test_a_stale_class_goes_and_a_foreign_one_stays_and_is_noted() -> None:
    """Case D10."""
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    spec = kernel._classes[Handle(0x20, 0x2A7)]
    kernel.send([AddClass(replace(spec, classid=Handle(0x20, minor))) for minor in (0x2B0, 0x42)])
    found = plan(wanted, kernel.snapshot())
    assert lines(found) == ["delete class 20:2b0 once it is quiet"]
    assert notes_of(found) == [
        ("foreign-class", "class 20:42 is not of our making and was left alone"),
        ("foreign-leaf", "qdisc pfifo below 20:42 is not of our making and was left alone"),
    ]


def test_a_leaf_of_a_foreign_class_that_has_a_handle_of_ours_goes_and_that_is_said() -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    spec, ours = kernel._classes[Handle(0x20, 0x2A7)], kernel.snapshot().leaves[Handle(0x20, 0x2A7)]
    assert isinstance(ours, Leaf)
    foreign = Handle(0x20, 0x42)
    kernel.send([DeleteLeaf(ours.parent, ours.handle), AddClass(replace(spec, classid=foreign))])
    kernel._leaves[foreign] = OtherQdisc("sfq", ours.handle, foreign)
    found = plan(wanted, kernel.snapshot())
    assert lines(found)[0] == "delete leaf 2a7: of 20:42"
    said = "qdisc sfq below 20:42 is not of our making and goes, since it has the handle of a leaf of ours"
    assert ("foreign-leaf", said) in notes_of(found)


def test_a_foreign_class_below_a_tenant_goes_for_it_sends_the_tenant_to_the_default_class() -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    spec = kernel._classes[Handle(0x20, 0x2A7)]
    kernel.send([AddClass(replace(spec, classid=Handle(0x20, 0x42), parent=spec.classid))])
    found = plan(wanted, kernel.snapshot())
    assert shape_of(found) == [("DeleteClass", "leaf-loss"), ("SetLeaf", "leaf-loss")]
    assert notes_of(found) == [
        ("foreign-class", "class 20:42 is not of our making and goes, since its parent goes or must be a leaf")
    ]
    bring(kernel, wanted)


def test_a_foreign_class_below_one_that_goes_goes_first() -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(case(ACME, BETA).wanted())
    spec = kernel._classes[BETA_CLASS]
    kernel.send([AddClass(replace(spec, classid=Handle(0x20, 0x42), parent=BETA_CLASS))])
    assert lines(plan(wanted, kernel.snapshot())) == [
        "delete class 20:42 once it is quiet",
        "delete class 20:2b0 once it is quiet",
    ]
    bring(kernel, wanted)


def test_a_filter_at_a_priority_of_ours_goes_and_any_other_stays_and_is_noted() -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    in_the_way = Filter(Handle(0x20), 110, 3, 7, OtherMatch("matchall"))
    kernel.send([SetFilter(in_the_way), SetFilter(FOREIGN_FILTER)])
    found = plan(wanted, kernel.snapshot())
    assert lines(found) == ["delete filter prio 110 on 20:: matchall"]
    assert notes_of(found) == [
        (
            "foreign-filter",
            (
                "filter prio 50 on 20: is not of our making and was left alone"
                "; it comes before ours and may take tenants' packets: find its owner"
            ),
        )
    ]


def test_a_root_of_ours_with_other_parameters_is_rebuilt_only_when_that_is_allowed() -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    kernel._root = replace(wanted.tree.htbs[0], direct_qlen_packets=2)
    assert plan(wanted, kernel.snapshot()).operations == ()
    found = plan(wanted, kernel.snapshot(), Permission.DISRUPTION)
    assert shape_of(found)[:2] == [("DeleteRoot", "device-loss"), ("AddRoot", "device-loss")]
    assert not any(kernel.send(found.operations))
    assert_tree(kernel.snapshot(), wanted)


@pytest.mark.parametrize(
    ("root", "first"),
    [
        (OtherQdisc("fq", Handle(0x8001), ROOT), ["AddRoot"]),
        (OtherQdisc("fq", Handle(0x20), ROOT), ["DeleteRoot", "AddRoot"]),
        (OtherQdisc("noqueue", Handle(0), ROOT), ["AddRoot"]),
        (None, ["AddRoot"]),
    ],
)
def test_a_root_is_taken_over_in_one_step_unless_it_has_our_handle(root: OtherQdisc | None, first: list[str]) -> None:
    wanted = case(ACME).wanted()
    kernel = FakeKernel(ETH0, root)
    found = plan(wanted, kernel.snapshot(), Permission.TAKE_OVER)
    names = [name for name, _ in shape_of(found)]
    assert names[: len(first) + 1] == [*first, "AddClass"]
    assert not any(kernel.send(found.operations))
    assert_tree(kernel.snapshot(), wanted)


def test_a_removal_deletes_the_root_of_ours_and_nothing_else() -> None:
    found = plan_removal(kernel_with(case(ACME).wanted()).snapshot())
    assert shape_of(found) == [("DeleteRoot", "device-loss")]
    assert lines(found) == ["delete root qdisc 20:"]


@pytest.mark.parametrize(
    "root",
    [
        None,
        OtherQdisc("fq", Handle(0x8001), ROOT),
        HtbQdisc(Handle(1), ROOT, 0x10, 1000),
        replace(root_qdisc(), default_minor=9),
    ],
)
def test_a_removal_leaves_what_is_not_ours_and_says_so(root: HtbQdisc | OtherQdisc | None) -> None:
    found = plan_removal(Snapshot(ETH0, root))
    assert found.operations == ()
    assert notes_of(found) == [("not-ours", "the root qdisc of eth0 is not of our making: nothing to remove")]


def test_the_worst_impact_of_a_plan_is_its_impact() -> None:
    harmless, costly = DeleteFilter(FOREIGN_FILTER), DeleteClass(Handle(0x20, 0x2A7))
    assert Plan((harmless,)).impact is Impact.HITLESS
    assert Plan((harmless, costly, harmless)).impact is Impact.LEAF_LOSS
    assert Plan((costly, DeleteRoot(Handle(0x20)), harmless)).impact is Impact.DEVICE_LOSS


SPEC = case(ACME).wanted().tree.classes[-1]
LEAF = case(ACME, leaf=LeafKind.BFIFO).wanted().tree.leaves[-1]


@pytest.mark.parametrize(
    ("operation", "impact", "line"),
    [
        (AddRoot(root_qdisc()), Impact.DEVICE_LOSS, "add root qdisc htb 20: default 12"),
        (DeleteRoot(Handle(0x20)), Impact.DEVICE_LOSS, "delete root qdisc 20:"),
        (
            RestoreQdisc(OtherQdisc("mq", Handle(0x8001), ROOT)),
            Impact.DEVICE_LOSS,
            "restore qdisc mq 8001: parent root",
        ),
        (
            RestoreQdisc(OtherQdisc("fq", Handle(0x8002), Handle(0x8001, 1))),
            Impact.DEVICE_LOSS,
            "restore qdisc fq 8002: parent 8001:1",
        ),
        (
            ChangeClass(SPEC),
            Impact.HITLESS,
            "change class 20:2a7 parent 20:3 floor 25M ceil 500M burst 65536b cburst 65536b quantum 60000b prio 1",
        ),
        (DeleteClass(SPEC.classid), Impact.LEAF_LOSS, "delete class 20:2a7 once it is quiet"),
        (DeleteLeaf(SPEC.classid, Handle(0x2A7)), Impact.LEAF_LOSS, "delete leaf 2a7: of 20:2a7"),
        (SetLeaf(LEAF), Impact.HITLESS, "set leaf of 20:2a7 to bfifo limit 3125000b"),
        (
            SetLeaf(Leaf(Handle(0x2A7), SPEC.classid, Fq(10_240, 1_000, 3_028, 15_140, 10_000_000)), Impact.LEAF_LOSS),
            Impact.LEAF_LOSS,
            "set leaf of 20:2a7 to fq limit 10240p flow_limit 1000p",
        ),
        (
            SetFilter(case(ACME, classifier=FW).wanted().tree.filters[-1]),
            Impact.HITLESS,
            "set filter prio 111 on 20:: flower ip protocol 17 source port 7443 to 20:11",
        ),
        (DeleteFilter(FOREIGN_FILTER), Impact.HITLESS, "delete filter prio 50 on 20:: u32"),
    ],
)
def test_an_operation_says_what_it_does_and_what_it_costs(
    operation: AddRoot | DeleteRoot | RestoreQdisc | ChangeClass | DeleteClass | SetLeaf | SetFilter | DeleteFilter,
    impact: Impact,
    line: str,
) -> None:
    assert operation.impact is impact
    assert operation.describe() == line


def test_a_budget_that_crosses_every_bound_changes_inner_classes_only_in_what_the_kernel_takes() -> None:
    # Of a class with children the kernel ignores quantum and prio, so a plan that asked for them never ended.
    for before, after in (("4M", "3G"), ("3G", "4M")):
        found = from_to(case(ACME, budget=before), case(ACME, budget=after))
        inner = [op.spec for op in found.operations if isinstance(op, ChangeClass) and op.spec.classid.minor == 3]
        assert {(spec.quantum_bytes, spec.prio) for spec in inner} == {(60_000, 0)}


def test_a_class_whose_owner_left_waits_until_it_is_quiet_and_one_that_moves_does_not() -> None:
    left = from_to(case(ACME, BETA), case(ACME))
    assert [op.only_when_quiet for op in left.operations if isinstance(op, DeleteClass)] == [True]
    moved = from_to(case(ACME), case(ACME, host_traffic=HostTraffic.INSIDE))
    assert [op.only_when_quiet for op in moved.operations if isinstance(op, DeleteClass)] == [False] * 2


@pytest.mark.parametrize(("priority", "is_finding"), [(1, True), (50, True), (120, False)])
def test_a_foreign_filter_is_a_finding_when_it_comes_before_ours(priority: int, *, is_finding: bool) -> None:
    wanted = case(ACME).wanted()
    kernel = kernel_with(wanted)
    kernel.send([SetFilter(replace(FOREIGN_FILTER, priority=priority))])
    found = plan(wanted, kernel.snapshot())
    assert (found.operations, found.has_findings) == ((), is_finding)


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (OtherQdisc("prio", Handle(7), ROOT), "may not be able to bring it back"),
        (HtbQdisc(Handle(7), ROOT, 1, 1000), "may not be able to bring it back"),
        (OtherQdisc("mq", Handle(7), ROOT), "brings it back with its options"),
        (OtherQdisc("fq", Handle(7), ROOT), "brings it back with its options"),
        (OtherQdisc("pfifo_fast", Handle(0), ROOT), ""),
    ],
)
def test_what_a_take_over_can_not_bring_back_is_said_before_it_goes(root: HtbQdisc | OtherQdisc, says: str) -> None:
    actual = Snapshot(device=ETH0, root=root)
    found = plan(case(ACME).wanted(), actual, Permission.TAKE_OVER)
    said = [note.message for note in found.notes if note.code == "take-over"]
    assert [says in message for message in said] == ([True] if says else [])


def test_a_handle_that_is_taken_below_the_foreign_root_does_not_stop_a_take_over() -> None:
    root = OtherQdisc("prio", Handle(1), ROOT)
    child = OtherQdisc("pfifo", Handle(0x20), Handle(1, 2))
    found = plan(case().wanted(), Snapshot(device=ETH0, root=root, verbatim=(root, child)), Permission.TAKE_OVER)
    assert lines(found)[:2] == ["delete root qdisc 1:", "add root qdisc htb 20: default 12"]


def test_leaves_that_swapped_their_handles_are_put_right() -> None:
    wanted = case(ACME, BETA).wanted()
    kernel = kernel_with(wanted)
    leaves = kernel.snapshot().leaves
    acme, beta = leaves[Handle(0x20, 0x2A7)], leaves[BETA_CLASS]
    assert isinstance(acme, Leaf)
    assert isinstance(beta, Leaf)
    kernel.send([DeleteLeaf(acme.parent, acme.handle), DeleteLeaf(beta.parent, beta.handle)])
    kernel.send([SetLeaf(replace(acme, handle=beta.handle)), SetLeaf(replace(beta, handle=acme.handle))])
    found = plan(wanted, kernel.snapshot())
    assert {type(operation) for operation in found.operations} == {DeleteLeaf, SetLeaf}
    assert kernel.send(found.operations) == [None] * 4
    assert_tree(kernel.snapshot(), wanted)


def test_a_device_without_a_queue_length_is_noted() -> None:
    device = replace(ETH0, tx_queue_len_packets=0)
    assert "txqueuelen-0" in {note.code for note in replace(case(ACME), device=device).wanted().notes}


@pytest.mark.parametrize("classifier", ClassifierKind)
@pytest.mark.parametrize("host_traffic", HostTraffic)
def test_the_default_class_comes_last_of_all_that_is_added(
    classifier: ClassifierKind, host_traffic: HostTraffic
) -> None:
    found = plan(case(ACME, classifier=classifier, host_traffic=host_traffic).wanted(), FakeKernel(ETH0).snapshot())
    minor = 0x12 if classifier is ClassifierKind.BPF else 2
    assert found.operations[0] == AddRoot(root_qdisc(classifier))
    assert root_qdisc(classifier).default_minor == minor
    *_, last_filter, add, leaf = found.operations
    assert isinstance(last_filter, SetFilter)
    assert isinstance(add, AddClass)
    assert isinstance(leaf, SetLeaf)
    assert add.spec.classid == leaf.leaf.parent == Handle(0x20, minor)


@pytest.mark.parametrize("classifier", ClassifierKind)
def test_the_default_class_comes_last_of_all_that_grows(classifier: ClassifierKind) -> None:
    before, after = case(ACME, classifier=classifier), case(ACME, BETA, classifier=classifier, ports=(443, 8443))
    kernel = kernel_with(before.wanted())
    default = Handle(0x20, 0x12 if classifier is ClassifierKind.BPF else 2)
    kernel._classes[default] = replace(kernel._classes[default], quantum_bytes=1_600)
    found = plan(after.wanted(), kernel.snapshot())
    names = [name for name, _ in shape_of(found)]
    assert names.count("AddClass") == names.count("SetLeaf") == 1
    assert names[-2:] == ["SetFilter", "ChangeClass"]
    assert isinstance(found.operations[-1], ChangeClass)
    assert found.operations[-1].spec.classid == default


@pytest.mark.parametrize("classifier", ClassifierKind)
@pytest.mark.parametrize("host_traffic", HostTraffic)
def test_a_rebuild_is_the_deletion_of_the_root_and_a_plan_from_nothing(
    classifier: ClassifierKind, host_traffic: HostTraffic
) -> None:
    wanted = case(ACME, BETA, classifier=classifier, host_traffic=host_traffic).wanted()
    kernel = kernel_with(wanted)
    kernel._root = replace(wanted.tree.htbs[0], direct_qlen_packets=2)
    from_nothing = plan(wanted, FakeKernel(ETH0).snapshot())
    rebuild = plan(wanted, kernel.snapshot(), Permission.DISRUPTION)
    assert rebuild.operations == (DeleteRoot(Handle(0x20)), *from_nothing.operations)


@pytest.mark.parametrize("permission", [Permission.NONE, Permission.DISRUPTION, Permission.TAKE_OVER])
def test_an_unknown_state_yields_no_operation_whatever_is_allowed(permission: Permission) -> None:
    found = plan(case(ACME).wanted(), Unknown("ENOBUFS"), permission)
    assert (found.operations, found.refusals, found.unknown) == ((), (), "ENOBUFS")


TAKEN = [Handle(major) for major in (0x40, 0x60, 0x80, 0xA0, 0x100, 0x2A7, 0x8001, 0xB0)]


@settings(deadline=None)
@given(st.permutations(TAKEN), st.booleans())
def test_leaves_that_have_each_others_handles_are_renumbered_without_a_collision(
    handles: list[Handle], is_wrong_kind: bool
) -> None:
    wanted = case(tenant(0x100), ACME, tenant(0x8001)).wanted()
    kernel = kernel_with(wanted)
    stray = Handle(0x20, 0x42)
    kernel.send([AddClass(replace(SPEC, classid=stray))])
    for place, handle in zip([*(leaf.parent for leaf in wanted.tree.leaves), stray], handles, strict=True):
        leaf = kernel._leaves[place]
        if is_wrong_kind or not isinstance(leaf, Leaf):
            kernel._leaves[place] = OtherQdisc("sfq", handle, place)
        else:
            kernel._leaves[place] = replace(leaf, handle=handle)
    found = plan(wanted, kernel.snapshot())
    assert not any(kernel.send(found.operations))
    assert plan(wanted, kernel.snapshot()).operations == ()
    assert {type(op) for op in found.operations} <= {DeleteLeaf, SetLeaf}


@pytest.mark.parametrize("made", [case(ACME), case(ACME, classifier=FW)])
def test_filters_of_another_kind_at_our_priorities_go_before_ours_are_set(made: Case) -> None:
    wanted = made.wanted()
    kernel = kernel_with(wanted)
    odd = [Filter(Handle(0x20), priority, 3, 0x800, OtherMatch("u32")) for priority in (100, 110, 111)]
    kernel._filters = {found.key: found for found in odd}
    found = plan(wanted, kernel.snapshot())
    deletions = [name == "SetFilter" for name, _ in shape_of(found)]
    assert deletions == sorted(deletions)
    assert found.operations[:3] == tuple(DeleteFilter(replace(each, handle=0)) for each in odd)
    assert found.operations[3:] == tuple(SetFilter(each) for each in wanted.tree.filters)
    bring(kernel, wanted)


@pytest.mark.parametrize("kinds", [(ClassifierKind.BPF, FW), (FW, ClassifierKind.BPF)])
def test_filters_of_the_other_classifier_go_before_ours_are_set(kinds: tuple[ClassifierKind, ClassifierKind]) -> None:
    before, after = (case(ACME, classifier=kind).wanted() for kind in kinds)
    kernel = kernel_with(after)
    kernel._filters = {found.key: found for found in before.tree.filters}
    found = plan(after, kernel.snapshot())
    assert found.operations == (
        *(DeleteFilter(each) for each in sorted(before.tree.filters, key=lambda f: f.key)),
        *(SetFilter(each) for each in after.tree.filters),
    )
    bring(kernel, after)
