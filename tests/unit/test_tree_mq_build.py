"""Shape mq: when it is taken and why, what its tree is made of, and how tenants and budget are divided."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import ETH0, Case, mq_case, mq_cases, snapshot_of, tenant, tenants

from kura_shaper.errors import RefusedError, UsageError
from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX, TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree.build import ShapeChoice, check_settings, owners_of
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.model import (
    EGRESS,
    HTB_HANDLE,
    Bfifo,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HostTraffic,
    HtbQdisc,
    Leaf,
    LeafKind,
    Shape,
    SteeringKind,
)
from kura_shaper.tree.observe import in_force, in_force_for
from kura_shaper.tree.params import whole_bytes
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.share import shares
from kura_shaper.tree.steer import InForce
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import Tree

SKBEDIT, BPF, TCX = SteeringKind
AUTO, SINGLE, MQ = ShapeChoice
ACME, BETA, GAMMA = tenant(0x2A7, "100M"), tenant(0x2B0, "90M"), tenant(0x2C0, "80M")
PLAIN = mq_case(ACME, shape=AUTO)
IS_SINGLE, IS_MQ = InForce(Shape.SINGLE), InForce(Shape.MQ, shares=(Rate(3 * 10**9),), steering=SKBEDIT)


def made_of(
    made: Case = PLAIN,
    *,
    shape: ShapeChoice = AUTO,
    shaped: int = 1,
    live: int = 4,
    is_up: bool = True,
    proven: frozenset[SteeringKind] = frozenset({SKBEDIT}),
    host_traffic: HostTraffic = HostTraffic.OUTSIDE,
) -> Case:
    return replace(
        made,
        device=replace(ETH0, tx_queues=live, is_up=is_up),
        settings=replace(made.settings, shape=shape, shaped_queues=shaped, host_traffic=host_traffic),
        capabilities=replace(made.capabilities, steering=proven),
    )


def shape_of(wanted: Wanted) -> tuple[Shape, str]:
    (said,) = (note.message for note in wanted.notes if note.code == "shape")
    return wanted.tree.shape, said


NOT_MQ = "shape single: auto did not take mq, since "
BY_SKBEDIT = "steering by skbedit, since it was seen to reach its queue"
NOTHING_PROVEN: frozenset[SteeringKind] = frozenset()


@pytest.mark.parametrize(
    ("made", "present", "shape", "says"),
    [
        (made_of(), InForce(), Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(live=2), InForce(), Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(shaped=4), InForce(), Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(shape=MQ), InForce(), Shape.MQ, f"shape mq: asked for, {BY_SKBEDIT}"),
        (made_of(shape=SINGLE), InForce(), Shape.SINGLE, "shape single: asked for"),
        # One reason against it is enough for auto.
        (made_of(live=1), InForce(), Shape.SINGLE, f"{NOT_MQ}it has a single tx queue"),
        (
            made_of(shaped=5),
            InForce(),
            Shape.SINGLE,
            f"{NOT_MQ}it has 4 live tx queues and 5 are to be shaped",
        ),
        (made_of(is_up=False), InForce(), Shape.SINGLE, f"{NOT_MQ}steering can't be proven while the link is down"),
        (
            made_of(proven=NOTHING_PROVEN),
            InForce(),
            Shape.SINGLE,
            f"{NOT_MQ}no way of steering was proven on this kernel",
        ),
        (
            made_of(host_traffic=HostTraffic.INSIDE),
            InForce(),
            Shape.SINGLE,
            f"{NOT_MQ}host traffic under the budget needs one tree for all queues",
        ),
        (
            made_of(),
            InForce(foreign_tcx=("cil_to_netdev",)),
            Shape.SINGLE,
            (
                f"{NOT_MQ}tcx program cil_to_netdev runs ahead of the egress hook and may end the chain before ours,"
                " and this kernel has no tcx"
            ),
        ),
        # What is in force stays, whichever it is.
        (
            made_of(),
            IS_SINGLE,
            Shape.SINGLE,
            f"{NOT_MQ}single is in force; --shape mq --allow-disruption changes it",
        ),
        (made_of(shape=MQ), IS_SINGLE, Shape.MQ, f"shape mq: asked for, {BY_SKBEDIT}"),
        (made_of(), IS_MQ, Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(is_up=False), IS_MQ, Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(live=1), IS_MQ, Shape.MQ, f"shape mq: auto took it, {BY_SKBEDIT}"),
        (made_of(shape=MQ, live=1), IS_MQ, Shape.MQ, f"shape mq: asked for, {BY_SKBEDIT}"),
        (made_of(shape=SINGLE), IS_MQ, Shape.SINGLE, "shape single: asked for"),
        # A link that is down does not keep from what was asked for.
        (made_of(shape=MQ, is_up=False), InForce(), Shape.MQ, f"shape mq: asked for, {BY_SKBEDIT}"),
    ],
)
def test_the_shape_is_chosen_for_a_reason_that_is_noted(made: Case, present: InForce, shape: Shape, says: str) -> None:
    assert shape_of(made.wanted(present)) == (shape, says)


@pytest.mark.parametrize(
    ("made", "present", "says"),
    [
        # D4: what there is, what is needed, and what to do.
        (made_of(live=1), InForce(), "it has a single tx queue; use shape single"),
        (
            made_of(shaped=8),
            InForce(),
            ("it has 4 live tx queues and 8 are to be shaped; shape at most 4, or raise the device's channels"),
        ),
        (
            made_of(shaped=8),
            IS_MQ,
            ("it has 4 live tx queues and 8 are to be shaped; shape at most 4, or raise the device's channels"),
        ),
        (
            made_of(proven=NOTHING_PROVEN),
            InForce(),
            "no way of steering was proven on this kernel; use shape single, or auto",
        ),
        (
            made_of(),
            InForce(hook="ingress"),
            "an ingress qdisc holds the place of clsact; use shape single, or auto",
        ),
        (
            made_of(proven=frozenset({SKBEDIT, BPF})),
            InForce(has_foreign_filter=True),
            (
                "a filter of somebody else's comes first on the egress hook and may end the chain before ours,"
                " and this kernel has no tcx; use shape single, or auto"
            ),
        ),
        # The first reason is the one that is said.
        (made_of(live=1, proven=NOTHING_PROVEN), InForce(), "it has a single tx queue; use shape single"),
    ],
)
@pytest.mark.case("D4")
def test_shape_mq_that_can_not_be_had_is_refused_with_what_helps(made: Case, present: InForce, says: str) -> None:
    """Case D4."""
    asked = replace(made, settings=replace(made.settings, shape=MQ))
    with pytest.raises(RefusedError) as caught:
        asked.wanted(present)
    assert str(caught.value) == f"shape mq on eth0: {says}"


def test_two_shaped_queues_of_which_one_went_are_refused_with_what_helps() -> None:
    with pytest.raises(RefusedError, match="use shape single, or raise the device's channels"):
        made_of(shape=MQ, shaped=2, live=1).wanted(replace(IS_MQ, shares=(Rate(10**9), Rate(10**9))))


@pytest.mark.parametrize("shaped", [-1, 0, 17])
def test_a_number_of_shaped_queues_that_can_not_be_had_is_refused(shaped: int) -> None:
    with pytest.raises(UsageError) as caught:
        made_of(shaped=shaped).wanted()
    assert str(caught.value) == f"{shaped} shaped queues can't be had; choose 1 to 16"


def test_host_traffic_under_the_budget_and_shape_mq_exclude_each_other() -> None:
    with pytest.raises(UsageError) as caught:
        check_settings(made_of(shape=MQ, host_traffic=HostTraffic.INSIDE).settings)
    assert str(caught.value) == (
        "shape mq can't hold host traffic under the budget: it leaves by other queues;"
        " use host traffic outside, or shape single"
    )


@pytest.mark.parametrize(
    ("proven", "present", "kind"),
    [
        ({SKBEDIT, BPF, TCX}, InForce(), SKBEDIT),
        ({BPF, TCX}, InForce(), BPF),
        ({SKBEDIT, TCX}, InForce(foreign_tcx=("cil_to_netdev",)), TCX),
        ({SKBEDIT, TCX}, InForce(has_foreign_filter=True), TCX),
        ({SKBEDIT, TCX}, InForce(hook="ingress"), TCX),
        ({SKBEDIT, TCX}, replace(IS_MQ, steering=TCX), TCX),
    ],
)
def test_a_way_of_steering_that_has_limits_is_noted_with_them(
    proven: set[SteeringKind], present: InForce, kind: SteeringKind
) -> None:
    wanted = made_of(proven=frozenset(proven)).wanted(present)
    assert wanted.tree.steering
    assert wanted.tree.steering.kind is kind
    assert wanted.tree.has_hook == (kind is not TCX)
    said = [note.message for note in wanted.notes if note.code == "steering-limits"]
    assert len(said) == (kind is not SKBEDIT)
    assert all(
        line.startswith(f"steering by {kind}: what was open before (TCP on kernels up to 6.12, ") for line in said
    )


def test_the_first_queues_are_shaped_and_the_others_are_the_hosts() -> None:
    tree = mq_case(ACME, BETA, GAMMA, shaped=2, live=5).wanted().tree
    assert (tree.shape, str(tree.root.handle)) == (Shape.MQ, "1f:")
    places = [(str(q.parent), str(q.handle), type(q).__name__) for q in tree.queues]
    assert places == [
        ("1f:1", "20:", "HtbQdisc"),
        ("1f:2", "21:", "HtbQdisc"),
        ("1f:3", "b0:", "Leaf"),
        ("1f:4", "b1:", "Leaf"),
        ("1f:5", "b2:", "Leaf"),
    ]
    assert [f"{c.classid} {c.parent} {c.floor} {c.ceil} {c.prio}" for c in tree.classes] == [
        "20:1 20: 1T 1T 0",
        "20:2 20:1 50M 1T 0",
        "20:12 20:1 1M 1T 0",
        "20:3 20:1 1.465G 1.465G 0",
        "20:20 20:1 62.496k 10M 0",
        "20:10 20:3 1M 3G 1",
        "20:11 20:3 1M 3G 2",
        "20:2a7 20:3 100M 500M 1",
        "21:1 21: 1T 1T 0",
        "21:2 21:1 50M 1T 0",
        "21:12 21:1 1M 1T 0",
        "21:3 21:1 1.535G 1.535G 0",
        "21:21 21:1 62.496k 10M 0",
        "21:10 21:3 1M 3G 1",
        "21:11 21:3 1M 3G 2",
        "21:2b0 21:3 90M 500M 1",
        "21:2c0 21:3 80M 500M 1",
    ]
    assert [f"{leaf.parent} {leaf.handle}" for leaf in tree.leaves] == [
        "20:2 40:",
        "20:12 a0:",
        "20:10 60:",
        "20:11 80:",
        "20:2a7 2a7:",
        "21:2 41:",
        "21:12 a1:",
        "21:10 61:",
        "21:11 81:",
        "21:2b0 2b0:",
        "21:2c0 2c0:",
    ]


def test_a_proof_has_a_class_without_a_leaf_and_a_name() -> None:
    tree = mq_case(shaped=16, live=16).wanted().tree
    proofs = [c.classid for c in tree.classes if PROOF_CLASS <= c.classid.minor < PROOF_CLASS + SHAPED_QUEUES_MAX]
    assert [str(classid) for classid in proofs] == [f"{0x20 + queue:x}:{0x20 + queue:x}" for queue in range(16)]
    assert not {leaf.parent for leaf in tree.leaves} & {*proofs}
    owners = owners_of(PLAIN.document)
    assert {owners[classid.minor] for classid in proofs} == {"proof"}


@pytest.mark.parametrize(
    ("kinds", "leaf", "queue"),
    [
        ({LeafKind.FQ_CODEL, LeafKind.FQ, LeafKind.BFIFO}, FqCodel, Fq),
        ({LeafKind.FQ_CODEL, LeafKind.BFIFO}, FqCodel, FqCodel),
        ({LeafKind.BFIFO}, Bfifo, None),
    ],
)
def test_a_queue_of_the_hosts_gets_what_distributions_give_it_or_keeps_the_kernels_default(
    kinds: set[LeafKind], leaf: type, queue: type | None
) -> None:
    made = mq_case(ACME)
    made = replace(made, capabilities=replace(made.capabilities, leaves=frozenset(kinds)))
    tree = made.wanted().tree
    assert {type(found.parameters) for found in tree.leaves} == {leaf}
    hosts = [type(found.parameters) for found in tree.queues if isinstance(found, Leaf)]
    assert hosts == ([queue] * 3 if queue else [])


@settings(deadline=None, max_examples=80)
@given(mq_cases())
@pytest.mark.case("D2")
def test_no_handle_is_twice_on_a_device_and_every_part_hangs_on_another(made: Case) -> None:
    """Case D2."""
    tree = made.wanted().tree
    majors = [qdisc.handle.major for qdisc in (tree.root, *tree.queues, *tree.leaves)]
    assert [major for major, count in Counter(majors).items() if count > 1] == []
    assert all(0 < major < 0xFFFF for major in majors)
    assert {qdisc.handle.major for qdisc in (tree.root, *tree.queues)} <= {*range(1, TENANT_CLASS_MIN)}
    assert len({qdisc.parent for qdisc in tree.queues}) == len(tree.queues)
    known = {htb.handle for htb in tree.htbs}
    for spec in tree.classes:
        assert spec.parent in known
        assert spec.parent.major == spec.classid.major
        known.add(spec.classid)
    for found in tree.filters:
        assert found.parent == EGRESS or found.parent in known
    assert made.wanted() == made.wanted()


@pytest.mark.parametrize("shaped", range(1, SHAPED_QUEUES_MAX + 1))
@pytest.mark.parametrize("live", [16, 143, 144, 145, 160, 300])
def test_the_queues_of_the_largest_devices_have_handles_as_far_as_there_are_some(shaped: int, live: int) -> None:
    many = [tenant(class_id, "0") for class_id in (*range(0x100, 0x140), 0x8001, 0xFFFE)]
    tree = mq_case(*many, shaped=shaped, live=live).wanted().tree
    majors = [qdisc.handle.major for qdisc in (tree.root, *tree.queues, *tree.leaves)]
    assert len(set(majors)) == len(majors)
    # The others keep the kernel's default, in the queues' order.
    assert len(tree.queues) == min(live, shaped + 144)
    assert [str(q.parent) for q in tree.queues] == [f"1f:{queue + 1:x}" for queue in range(len(tree.queues))]


@settings(deadline=None, max_examples=60)
@given(mq_cases())
def test_a_tenant_is_on_exactly_one_queue_with_its_whole_ceiling(made: Case) -> None:
    tree = made.wanted().tree
    found = [c for c in tree.classes if c.classid.minor >= TENANT_CLASS_MIN]
    assert sorted(c.classid.minor for c in found) == [t.class_id for t in made.document.tenants]
    budget = whole_bytes(made.settings.budget)
    for t in made.document.tenants:
        (spec,) = (c for c in found if c.classid.minor == t.class_id)
        assert spec.classid.major - HTB_HANDLE.major in range(made.settings.shaped_queues)
        assert spec.ceil == whole_bytes(max(min(t.ceiling, budget), spec.floor))


@settings(deadline=None, max_examples=60)
@given(mq_cases(shaped_max=6), st.data())
def test_a_tenant_that_comes_or_goes_moves_no_one_and_changes_no_one_elses_queue(
    made: Case, data: st.DataObject
) -> None:
    everyone = made.document.tenants
    some = tuple(t for t in everyone if data.draw(st.booleans()))
    fewer = replace(made, document=replace(made.document, tenants=some))
    settled = fewer.wanted()
    present = in_force(snapshot_of(settled, made.device))
    assert present.placement == placement(settled.tree)
    grown = made.wanted(present)
    assert placement(grown.tree).items() >= present.placement.items()
    left = fewer.wanted(in_force(snapshot_of(grown, made.device)))
    assert placement(left.tree) == present.placement


def placement(tree: Tree) -> dict[int, int]:
    return {
        c.classid.minor: c.classid.major - HTB_HANDLE.major for c in tree.classes if c.classid.minor >= TENANT_CLASS_MIN
    }


def budgets(tree: Tree) -> list[Rate]:
    return [c.ceil for c in tree.classes if c.classid.minor == ReservedClass.BUDGET]


def assert_shares_fit(made: Case, tree: Tree) -> None:
    """No more than the budget in all, and on each queue at least what is promised there."""
    assert sum(rate.bits_per_second for rate in budgets(tree)) <= made.settings.budget.bits_per_second
    for htb in tree.htbs:
        node = Handle(htb.handle.major, ReservedClass.BUDGET)
        promised = sum(c.floor.bits_per_second for c in tree.classes if c.parent == node)
        (share,) = (c for c in tree.classes if c.classid == node)
        assert share.floor == share.ceil
        assert promised <= share.ceil.bits_per_second


@settings(deadline=None, max_examples=80)
@given(mq_cases())
def test_the_shares_of_the_budget_hold_every_floor_and_are_never_more_than_the_budget(made: Case) -> None:
    tree = made.wanted().tree
    assert_shares_fit(made, tree)
    lost = made.settings.budget.bits_per_second - sum(rate.bits_per_second for rate in budgets(tree))
    assert lost < 8, "what is not given out is less than a byte a second"


# Many budgets leave nothing above the floors to move.
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(mq_cases(shaped_max=4), st.integers(0, 10**9))
def test_shares_in_force_are_kept_where_they_fit_and_made_anew_where_the_budget_changed(made: Case, moved: int) -> None:
    assume(made.settings.shaped_queues > 1)
    settled = made.wanted()
    first, second, *others = budgets(settled.tree)
    # Demand has moved a part of the first queue's share to the second.
    floors = [c for c in settled.tree.classes if c.parent == Handle(HTB_HANDLE.major, ReservedClass.BUDGET)]
    # In whole bytes a second, and above what rounding took of the floors.
    free = first.bytes_per_second - sum(c.floor.bytes_per_second + 1 for c in floors)
    assume(free > 0)
    part = moved % free
    held = (
        Rate.from_bytes_per_second(first.bytes_per_second - part),
        Rate.from_bytes_per_second(second.bytes_per_second + part),
        *others,
    )
    present = replace(in_force(snapshot_of(settled, made.device)), shares=held)
    assert tuple(budgets(made.wanted(present).tree)) == held

    raised = replace(made, settings=replace(made.settings, budget=Rate(made.settings.budget.bits_per_second + 10**6)))
    anew = raised.wanted(present).tree
    assert tuple(budgets(anew)) != held
    assert_shares_fit(raised, anew)


def test_shares_in_force_that_a_new_tenants_floor_does_not_fit_are_made_anew() -> None:
    before = mq_case(ACME, BETA, shaped=2, budget="1G")
    present = in_force(snapshot_of(before.wanted(), before.device))
    skewed = replace(present, shares=(Rate.parse("880M"), Rate.parse("120M")))
    assert budgets(before.wanted(skewed).tree) == [*skewed.shares]
    # It comes to the second queue, which carries less.
    after = mq_case(ACME, BETA, tenant(0x300, "40M"), shaped=2, budget="1G")
    tree = after.wanted(skewed).tree
    assert placement(tree)[0x300] == 1
    assert budgets(tree) == [*shares(Rate(10**9), [Rate.parse("102M"), Rate.parse("132M")])]


def test_a_share_of_an_only_shaped_queue_is_the_budget_itself() -> None:
    assert budgets(mq_case(ACME, budget="3G").wanted(replace(IS_MQ, shares=(Rate(10**9),))).tree) == [Rate(3 * 10**9)]


@settings(deadline=None, max_examples=30)
@given(tenants(), st.integers(1, 4), st.integers(1, 4))
def test_with_another_number_of_shaped_queues_everyone_is_placed_as_from_nothing_where_that_is_allowed(
    everyone: tuple[object, ...], before: int, after: int
) -> None:
    cases = [mq_case(*everyone, shaped=count, budget="30G") for count in (before, after)]  # type: ignore[arg-type]
    actual = snapshot_of(cases[0].wanted(), cases[0].device)
    anew = in_force_for(actual, cases[1].settings, Permission.DISRUPTION)
    assert placement(cases[1].wanted(anew).tree) == placement(cases[1].wanted().tree)
    assert in_force_for(actual, cases[1].settings, Permission.NONE) == in_force(actual)


def test_floors_that_do_not_fit_are_scaled_with_room_for_our_classes_on_every_queue() -> None:
    made = mq_case(tenant(0x100, "3G", "3G"), tenant(0x101, "3G", "3G"), shaped=4, budget="3G")
    wanted = made.wanted()
    assert [note.code for note in wanted.notes] == ["shape", "floors-scaled", "floor-scaled", "floor-scaled"]
    assert_shares_fit(made, wanted.tree)


def test_a_budget_without_room_for_our_classes_on_every_queue_is_refused() -> None:
    made = mq_case(ACME, shaped=16, live=16, budget="2M")
    with pytest.raises(RefusedError, match="a budget of 2M can't hold 1 tenants"):
        made.wanted()


def test_with_fw_filters_every_htb_has_those_of_its_tenants_and_the_host_as_default() -> None:
    tree = mq_case(ACME, BETA, GAMMA, shaped=2, classifier=ClassifierKind.FW).wanted().tree
    assert [htb.default_minor for htb in tree.htbs] == [ReservedClass.HOST] * 2
    for htb in tree.htbs:
        classids = [f.match.classid for f in tree.filters if f.parent == htb.handle and isinstance(f.match, FwMatch)]
        own = {c.classid for c in tree.classes if c.classid.major == htb.handle.major}
        assert {classid.minor for classid in classids if classid} >= {
            minor for minor, queue in placement(tree).items() if queue == htb.handle.major - HTB_HANDLE.major
        }
        assert {*classids} <= own


@pytest.mark.parametrize("shaped", [1, 2])
def test_with_fw_filters_the_mark_of_a_proof_leads_to_its_class(shaped: int) -> None:
    made = mq_case(ACME, shaped=shaped, classifier=ClassifierKind.FW)
    tree = made.wanted().tree
    named = {f.match.classid for f in tree.filters if isinstance(f.match, FwMatch)}
    assert {Handle(0x20 + queue, PROOF_CLASS + queue) for queue in range(shaped)} <= named


def test_every_htb_is_like_the_others_but_for_its_place() -> None:
    tree = mq_case(shaped=3).wanted().tree
    first = tree.htbs[0]
    assert tree.htbs == tuple(
        HtbQdisc(Handle(0x20 + queue), Handle(0x1F, queue + 1), first.default_minor, 1000) for queue in range(3)
    )
    assert tree.class_of(ReservedClass.BUDGET) == tree.classes[3]
