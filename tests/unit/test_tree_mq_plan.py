"""Plans in shape mq: what loses the device's queue goes together, steering comes last, nobody is moved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import (
    CLSACT,
    FOREIGN_PROGRAM,
    OURS_BY_NAME,
    Case,
    case,
    mq_case,
    mq_cases,
    replayed,
    snapshot_of,
    tenant,
    unshaped,
)

from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import Plan, plan, plan_removal
from kura_shaper.tree.ebpf import TcxState
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    INGRESS,
    MQ_HANDLE,
    ROOT,
    Filter,
    FlowerMatch,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HtbQdisc,
    Leaf,
    LeafKind,
    MqQdisc,
    OtherMatch,
    OtherQdisc,
    QueueMapping,
    Shape,
    SteeringKind,
)
from kura_shaper.tree.observe import in_force, in_force_for
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteRoot,
    Impact,
    RemoveTcx,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.params import TRICKLE_MIN
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.tree.steer import steering_in_force
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.operations import Operation

SKBEDIT, BPF, TCX = SteeringKind
ACME, BETA, GAMMA = tenant(0x2A7, "100M"), tenant(0x2B0, "90M"), tenant(0x2C0, "80M")
ONE, TWO = mq_case(ACME, BETA), mq_case(ACME, BETA, GAMMA, shaped=2, live=5)
NONE, DISRUPTION, TAKE_OVER = Permission.NONE, Permission.DISRUPTION, Permission.TAKE_OVER
BY_MARK_OF_NOBODY = FwMatch(0x10000, 0xFFFF0000)
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def steered_by(made: Case, *kinds: SteeringKind) -> Case:
    return replace(made, capabilities=replace(made.capabilities, steering=frozenset(kinds)))


def reading(made: Case) -> Snapshot:
    """A device that this case was brought onto, from nothing."""
    return snapshot_of(made.wanted(), made.device)


def next_plan(made: Case, actual: Snapshot, permission: Permission = NONE) -> Plan:
    """The plan that an apply makes, which knows what is in force."""
    return plan(made.wanted(in_force_for(actual, made.settings, permission)), actual, permission)


def lines(found: Plan) -> list[str]:
    return [operation.describe() for operation in found.operations]


def names(found: Plan) -> list[str]:
    return [type(operation).__name__ for operation in found.operations]


def notes_of(found: Plan) -> list[str]:
    return [note.message for note in found.notes if note.code not in ("shape", "steering-limits")]


def codes(found: Plan) -> list[str]:
    return [refusal.code for refusal in found.refusals]


def assert_same(actual: Snapshot, wanted: Snapshot) -> None:
    """What is there is what is wanted, but for counters and the kernel's own bytes."""
    for part in ("root", "queues", "classes", "leaves", "filters", "hook", "xps"):
        assert getattr(actual, part) == getattr(wanted, part), part
    assert program_names(actual) == program_names(wanted)


def program_names(actual: Snapshot) -> list[str]:
    return [found.name for found in actual.tcx.programs] if actual.tcx else []


def test_a_first_plan_loses_the_devices_queue_at_once_and_steers_last() -> None:
    found = plan(ONE.wanted(), unshaped(ONE.device))
    foundation = [
        "add root qdisc mq 1f:",
        "set qdisc of tx queue 0 to htb 20: default 12",
        "set qdisc of tx queue 1 to fq limit 10240p flow_limit 1000p",
        "set qdisc of tx queue 2 to fq limit 10240p flow_limit 1000p",
        "set qdisc of tx queue 3 to fq limit 10240p flow_limit 1000p",
        "add qdisc clsact, for the egress hook",
    ]
    assert lines(found)[:6] == foundation
    assert [operation.impact for operation in found.operations[:6]] == [Impact.DEVICE_LOSS] * 6
    assert {operation.impact for operation in found.operations[6:]} == {Impact.HITLESS}
    assert [line.split(" parent")[0].split(" to ")[0] for line in lines(found)[6:]] == [
        "add class 20:1",
        "add class 20:2",
        "set leaf of 20:2",
        "add class 20:3",
        "add class 20:20",
        "add class 20:10",
        "set leaf of 20:10",
        "add class 20:11",
        "set leaf of 20:11",
        "add class 20:2a7",
        "set leaf of 20:2a7",
        "add class 20:2b0",
        "set leaf of 20:2b0",
        "set filter prio 100 on 20:: bpf of 61 instructions: class id from the mark, gateway ports",
        "add class 20:12",
        "set leaf of 20:12",
        "set filter prio 11 on the egress hook: bpf of 59 instructions, tx queue 0",
        "set filter prio 13 on the egress hook: bpf of 59 instructions, tx queue 1",
    ]


@settings(slow, max_examples=60)
@given(mq_cases())
@pytest.mark.case("D11")
def test_from_nothing_every_plan_is_one_disruption_then_classes_then_steering_and_leaves_nothing_to_do(
    made: Case,
) -> None:
    """Case D11."""
    wanted = made.wanted()
    found = plan(wanted, unshaped(made.device))
    impacts = [operation.impact for operation in found.operations]
    count = impacts.count(Impact.DEVICE_LOSS)
    assert impacts == [Impact.DEVICE_LOSS] * count + [Impact.HITLESS] * (len(impacts) - count)
    assert {type(op) for op in found.operations[:count]} <= {AddRoot, SetQueue, AddHook}
    steering = [is_steering(operation) for operation in found.operations]
    assert steering == sorted(steering)
    defaults = [is_default(operation, wanted.tree.htbs) for operation in found.operations if has_class(operation)]
    assert defaults == sorted(defaults)

    actual = replayed(unshaped(made.device), found.operations)
    assert_same(actual, snapshot_of(wanted, made.device))
    assert plan(wanted, actual) == Plan(notes=wanted.notes)
    assert next_plan(made, actual).operations == ()


def is_steering(operation: Operation) -> bool:
    at_hook = isinstance(operation, SetFilter | DeleteFilter) and operation.filter.parent == EGRESS
    return at_hook or isinstance(operation, SetTcx | SetXps | RemoveTcx)


def has_class(operation: Operation) -> bool:
    return isinstance(operation, AddClass)


def is_default(operation: Operation, htbs: tuple[HtbQdisc, ...]) -> bool:
    assert isinstance(operation, AddClass)
    return operation.spec.classid in {Handle(htb.handle.major, htb.default_minor) for htb in htbs}


@pytest.mark.parametrize("kind", SteeringKind)
def test_a_second_plan_is_empty(kind: SteeringKind) -> None:
    made = steered_by(TWO, kind)
    found = next_plan(made, reading(made))
    assert (found.operations, found.refusals, found.impact, notes_of(found)) == ((), (), None, [])


def test_an_unknown_state_yields_no_operation() -> None:
    wanted = TWO.wanted()
    assert plan(wanted, Unknown("the dump was interrupted"), DISRUPTION).operations == ()


@pytest.mark.parametrize("kind", SteeringKind)
def test_a_tenant_that_comes_changes_its_own_queue_only_and_is_steered_last(kind: SteeringKind) -> None:
    made = steered_by(TWO, kind)
    grown = replace(made, document=mq_case(ACME, BETA, GAMMA, tenant(0x300, "80M"), tenant(0x301, "70M")).document)
    actual = reading(made)
    found = next_plan(grown, actual)
    assert found.impact is Impact.HITLESS
    new = [spec.classid for op in found.operations if isinstance(op, AddClass) for spec in [op.spec]]
    assert {classid.minor for classid in new} == {0x300, 0x301}
    assert names(found)[-1] == ("SetTcx" if kind is TCX else "SetFilter")
    assert not any(isinstance(op, DeleteClass) for op in found.operations)
    assert_same(replayed(actual, found.operations), snapshot_of(grown.wanted(in_force(actual)), grown.device))


@pytest.mark.parametrize("kind", SteeringKind)
def test_what_steers_to_a_tenant_that_goes_stays_as_long_as_its_class(kind: SteeringKind) -> None:
    # Without it, connections that are still open would come to another queue, which has no class for them.
    before = mq_case(ACME, BETA, shaped=2, steering=kind)
    actual, without = reading(before), replace(before, document=mq_case(ACME).document)
    found = next_plan(without, actual)
    assert lines(found) == ["delete class 21:2b0 once it is quiet"]
    gone = replayed(actual, found.operations)
    then = next_plan(without, gone)
    assert len(then.operations) == 1
    assert isinstance(then.operations[0], DeleteFilter if kind is SteeringKind.SKBEDIT else SetFilter | SetTcx)
    assert next_plan(without, replayed(gone, then.operations)).operations == ()


def states(operations: tuple[Operation, ...], actual: Snapshot) -> list[Snapshot]:
    found = [actual]
    for operation in operations:
        found.append(replayed(found[-1], [operation]))
    return found


def shared_out(actual: Snapshot) -> int:
    return sum(spec.ceil.bits_per_second for c, spec in actual.classes.items() if c.minor == ReservedClass.BUDGET)


def assert_safe(actual: Snapshot) -> None:
    for spec in actual.classes.values():
        assert spec.floor <= spec.ceil
    for htb in actual.htbs:
        node = Handle(htb.handle.major, ReservedClass.BUDGET)
        promised = sum(c.floor.bits_per_second for c in actual.classes.values() if c.parent == node)
        assert promised == 0 or promised <= actual.classes[node].floor.bits_per_second


@st.composite
def changes(draw: st.DrawFn) -> tuple[Case, Case]:
    """Two cases on one device: marks, classifier and number of shaped queues have tests of their own."""
    before = draw(mq_cases(shaped_max=4))
    after = draw(mq_cases(shaped_max=4))
    marks = before.document.marks
    kept = tuple(t for t in after.document.tenants if t.class_id <= marks.class_id_max)
    # Each was drawn with a trickle for our classes on its own number of queues, and both are on those of the first.
    ours = 2 * before.settings.shaped_queues * TRICKLE_MIN.bits_per_second
    budget = Rate(max(after.settings.budget, before.settings.budget).bits_per_second + ours)
    # One kernel; the kind of a host queue's leaf has a test of its own, too.
    kernel = replace(before.capabilities, leaves=before.capabilities.leaves | after.capabilities.leaves)
    return replace(before, capabilities=kernel), replace(
        after,
        document=replace(after.document, tenants=kept, marks=marks),
        settings=replace(after.settings, shaped_queues=before.settings.shaped_queues, budget=budget),
        device=before.device,
        capabilities=replace(kernel, steering=after.capabilities.steering),
    )


@settings(slow, max_examples=60)
@given(changes())
def test_every_step_from_one_tree_to_another_is_safe_steered_and_the_last_ends_there(pair: tuple[Case, Case]) -> None:
    before, after = pair
    start = reading(before)
    wanted = after.wanted(in_force(start))
    found = plan(wanted, start)
    assert not found.refusals
    # A host queue only waits. What hangs on the device's queue stays, unless the hook is missing.
    needs_hook = start.hook is None and wanted.tree.has_hook
    assert (found.impact is Impact.DEVICE_LOSS) == needs_hook
    passed = states(found.operations, start)
    most = max(shared_out(start), shared_out(passed[-1]))
    for actual in passed:
        assert_safe(actual)
        assert shared_out(actual) <= most
        assert steering_in_force(actual) is not None
    ended = passed[-1]
    assert plan(wanted, ended).operations == ()
    settled = plan(wanted, ended, DISRUPTION)
    goal = snapshot_of(wanted, after.device)
    done = replayed(ended, settled.operations)
    assert_same(done, replace(goal, hook=done.hook))
    stayed = in_force(start).placement.items() & in_force(ended).placement.items()
    assert {*stayed} == {(c, q) for c, q in in_force(start).placement.items() if c in in_force(ended).placement}


@settings(slow, max_examples=40)
@given(mq_cases(shaped_max=4), st.integers(0, 200))
def test_a_bootstrap_that_is_cut_off_is_finished_by_the_next_plan(made: Case, cut: int) -> None:
    operations = plan(made.wanted(), unshaped(made.device)).operations
    actual = replayed(unshaped(made.device), operations[: cut % (len(operations) + 1)])
    found = next_plan(made, actual, DISRUPTION)
    assert not found.refusals
    finished = replayed(actual, found.operations)
    # Whoever was placed before the cut stays there, so the rest may be placed otherwise than in one go.
    assert next_plan(made, finished).operations == ()
    homes = [c.minor for c in finished.classes if c.minor >= TENANT_CLASS_MIN]
    assert sorted(homes) == sorted(t.class_id for t in made.document.tenants)


# What is lost, and put back.

SHAPED_0, SHAPED_1, HOST_2, HOST_3, HOST_4 = (Handle(0x1F, minor) for minor in range(1, 6))
NEW_FQ = OtherQdisc("fq", Handle(0x8001), HOST_3)


def without_htb(actual: Snapshot, place: Handle, left: OtherQdisc | None) -> Snapshot:
    """A reading after somebody removed a queue's HTB by hand, with all that hung on it."""
    major = actual.queues[place].handle.major
    queues = {at: qdisc for at, qdisc in actual.queues.items() if at != place}
    return replace(
        actual,
        queues=queues | ({place: left} if left else {}),
        classes={c: spec for c, spec in actual.classes.items() if c.major != major},
        leaves={c: leaf for c, leaf in actual.leaves.items() if c.major != major},
        filters=tuple(f for f in actual.filters if f.parent.major != major),
    )


@pytest.mark.parametrize("left", [None, OtherQdisc("pfifo_fast", Handle(0), SHAPED_0)])
@pytest.mark.parametrize("permission", [NONE, DISRUPTION])
def test_a_shaped_queue_whose_htb_was_removed_is_put_back_without_permission(
    left: OtherQdisc | None, permission: Permission
) -> None:
    broken = without_htb(reading(ONE), SHAPED_0, left)
    found = next_plan(ONE, broken, permission)
    assert lines(found)[0] == "set qdisc of tx queue 0 to htb 20: default 12"
    assert names(found).count("SetQueue") == 1
    assert "AddRoot" not in names(found)
    assert_same(replayed(broken, found.operations), reading(ONE))


def test_host_queues_that_wait_are_put_right_when_a_shaped_one_is() -> None:
    broken = without_htb(reading(TWO), SHAPED_1, None)
    broken = replace(broken, queues={**broken.queues, HOST_3: NEW_FQ})
    found = plan(TWO.wanted(), broken)
    assert lines(found)[:2] == [
        "set qdisc of tx queue 1 to htb 21: default 12",
        "set qdisc of tx queue 3 to fq limit 10240p flow_limit 1000p",
    ]
    assert [name for name in names(found) if name == "SetQueue"] == ["SetQueue"] * 2
    touched = {op.spec.classid.major for op in found.operations if isinstance(op, AddClass | ChangeClass)}
    assert touched == {0x21}
    assert_same(replayed(broken, found.operations), reading(TWO))


def test_a_hook_that_was_removed_is_put_back_with_its_filters_and_host_queues_that_wait() -> None:
    actual = reading(TWO)
    broken = replace(
        actual,
        hook=None,
        filters=tuple(f for f in actual.filters if f.parent != EGRESS),
        queues={**actual.queues, HOST_3: NEW_FQ},
    )
    found = next_plan(TWO, broken)
    assert lines(found)[:2] == [
        "set qdisc of tx queue 3 to fq limit 10240p flow_limit 1000p",
        "add qdisc clsact, for the egress hook",
    ]
    assert {*names(found)[2:]} == {"SetFilter"}
    assert_same(replayed(broken, found.operations), actual)


def test_a_host_queue_with_another_qdisc_only_waits_and_is_noted() -> None:
    actual = reading(TWO)
    other = replace(actual, queues={**actual.queues, HOST_2: replace(NEW_FQ, parent=HOST_2), HOST_4: NEW_FQ})
    found = next_plan(TWO, other)
    assert found.operations == ()
    assert notes_of(found) == [
        (
            "tx queue 2, 4 has another qdisc than planned; it carries host traffic only,"
            " so it is changed only with --allow-disruption"
        )
    ]
    allowed = next_plan(TWO, other, DISRUPTION)
    assert lines(allowed) == [f"set qdisc of tx queue {queue} to fq limit 10240p flow_limit 1000p" for queue in (2, 4)]
    assert notes_of(allowed) == []
    assert_same(replayed(other, allowed.operations), actual)


def test_a_host_queue_that_has_nothing_drops_everything_so_it_is_put_right() -> None:
    actual = reading(TWO)
    broken = replace(actual, queues={place: q for place, q in actual.queues.items() if place != HOST_3})
    assert lines(next_plan(TWO, broken)) == ["set qdisc of tx queue 3 to fq limit 10240p flow_limit 1000p"]


@pytest.mark.parametrize("lost", [SHAPED_0, SHAPED_1])
def test_no_tenant_of_a_queue_that_stands_is_moved_when_another_queues_htb_was_removed(lost: Handle) -> None:
    # Everyone came one by one, so that from nothing they would be placed otherwise.
    made, settled = TWO, reading(mq_case(ACME, shaped=2, live=5))
    for everyone in ((ACME, BETA), (tenant(0x100, "300M"), ACME, BETA), (tenant(0x100, "300M"), ACME, BETA, GAMMA)):
        made = mq_case(*everyone, shaped=2, live=5)
        settled = replayed(settled, next_plan(made, settled).operations)
    assert in_force(settled).placement != in_force(reading(made)).placement
    major = settled.queues[lost].handle.major
    stands = {c for c in settled.classes if c.major != major and c.minor >= TENANT_CLASS_MIN}
    found = next_plan(made, without_htb(settled, lost, None))
    assert not {op.classid for op in found.operations if isinstance(op, DeleteClass)} & stands


# Channels.


@pytest.mark.parametrize(("live", "last"), [(9, 8), (2, None), (3, 2), (6, 5)])
def test_another_number_of_live_queues_changes_the_hosts_range_only(live: int, last: int | None) -> None:
    actual = reading(TWO)
    device = replace(TWO.device, tx_queues=live)
    new = {Handle(0x1F, q + 1): OtherQdisc("fq_codel", Handle(0), Handle(0x1F, q + 1)) for q in range(5, live)}
    actual = replace(actual, device=device, queues={**actual.queues, **new})
    found = next_plan(replace(TWO, device=device), actual)
    assert found.impact is Impact.HITLESS
    host = [f for f in reading(TWO).filters if f.priority == 13]
    if last is None:
        assert found.operations == tuple(DeleteFilter(f) for f in host)
    else:
        assert found.operations == tuple(SetFilter(replace(f, action=QueueMapping(2, last))) for f in host)
    waiting = ", ".join(str(queue) for queue in range(5, live))
    assert notes_of(found) == (
        [
            (
                f"tx queue {waiting} has another qdisc than planned; it carries host traffic only,"
                " so it is changed only with --allow-disruption"
            )
        ]
        if waiting
        else []
    )


def test_the_one_queue_that_is_left_goes_on_being_shaped() -> None:
    device = replace(ONE.device, tx_queues=1)
    left = replace(ONE, device=device, settings=replace(ONE.settings, shape=ShapeChoice.AUTO))
    found = next_plan(left, replace(reading(ONE), device=device))
    assert lines(found) == [
        "delete filter prio 13 on the egress hook: bpf of 59 instructions, tx queue 1 to 3, by hash"
    ]
    assert not found.refusals


# Refusals.

FOREIGN_MQ = MqQdisc(Handle(0x8001))
QDISC_FQ = OtherQdisc("fq", Handle(0x8001), SHAPED_1)


@pytest.mark.parametrize(
    ("actual", "permission", "says"),
    [
        (
            Snapshot(TWO.device, FOREIGN_MQ),
            DISRUPTION,
            [
                (
                    "eth0 has a root qdisc of somebody else's: mq 8001:;"
                    " find its owner first, then --take-over replaces it"
                )
            ],
        ),
        (Snapshot(TWO.device, FOREIGN_MQ), TAKE_OVER, []),
        (unshaped(TWO.device), NONE, []),
        (
            replace(reading(TWO), queues={**reading(TWO).queues, SHAPED_1: QDISC_FQ}),
            TAKE_OVER,
            [("tx queue 1 of eth0 has fq 8001:, not our HTB; --allow-disruption rebuilds it and drops what is queued")],
        ),
        (replace(reading(TWO), queues={**reading(TWO).queues, SHAPED_1: QDISC_FQ}), DISRUPTION, []),
        (
            replace(
                reading(TWO),
                queues={
                    **reading(TWO).queues,
                    SHAPED_0: replace(TWO.wanted().tree.htbs[0], direct_qlen_packets=2),
                    SHAPED_1: Leaf(Handle(0xB0), SHAPED_1, Fq(1, 1, 1, 1, 1)),
                },
            ),
            NONE,
            [
                (
                    f"tx queue {queue} of eth0 has {what}, not our HTB;"
                    " --allow-disruption rebuilds it and drops what is queued"
                )
                for queue, what in ((0, "htb 20:"), (1, "fq b0:"))
            ],
        ),
        (
            reading(case(ACME, BETA)),
            TAKE_OVER,
            [
                (
                    "the tree of ours on eth0 has another shape, which can't be changed in place;"
                    " --allow-disruption rebuilds it and drops what is queued"
                )
            ],
        ),
        (reading(case(ACME, BETA)), DISRUPTION, []),
        (
            replace(unshaped(TWO.device), hook=OtherQdisc("ingress", Handle(0xFFFF), HOOK)),
            DISRUPTION,
            [
                (
                    "eth0 has a qdisc ingress, which excludes the clsact that steering needs;"
                    " remove it (tc qdisc del dev eth0 ingress), or use shape single"
                )
            ],
        ),
        (
            replace(
                unshaped(TWO.device),
                hook=CLSACT,
                filters=tuple(Filter(EGRESS, priority, 3, 1, OtherMatch("u32")) for priority in (13, 11, 12, 14, 10)),
            ),
            DISRUPTION,
            [
                (
                    f"filter prio {priority} on the egress hook of eth0 is somebody else's;"
                    " find its owner; steering needs the priorities 11 to 13"
                )
                for priority in (11, 12, 13)
            ],
        ),
        (
            replace(unshaped(TWO.device), hook=CLSACT, filters=(Filter(INGRESS, 11, 3, 1, OtherMatch("u32")),)),
            NONE,
            [],
        ),
    ],
)
def test_what_is_in_the_way_is_refused_with_what_to_do(
    actual: Snapshot, permission: Permission, says: list[str]
) -> None:
    found = plan(TWO.wanted(), actual, permission)
    assert [str(refusal) for refusal in found.refusals] == says
    assert bool(found.operations) == (not says)


def test_a_tcx_link_needs_no_hook_so_whatever_is_there_does_not_matter() -> None:
    wanted = steered_by(TWO, TCX).wanted()
    taken = replace(unshaped(TWO.device), hook=OtherQdisc("ingress", Handle(0xFFFF), HOOK))
    found = plan(wanted, taken)
    assert codes(found) == []
    assert "AddHook" not in names(found)
    assert lines(found)[-1].startswith("set first tcx egress program to ks_")


@pytest.mark.parametrize(
    "match",
    [
        FlowerMatch(0x0800, 6, 443, Handle(0)),
        FwMatch(0x1, 0xFF, Handle(1, 1)),
    ],
)
@pytest.mark.parametrize("priority", [11, 13])
def test_a_filter_of_another_kind_at_our_priority_on_the_hook_is_refused(
    match: FlowerMatch | FwMatch, priority: int
) -> None:
    ethertype = 0x0800 if isinstance(match, FlowerMatch) else 3
    taken = Filter(EGRESS, priority, ethertype, 1, match)
    actual = replace(unshaped(TWO.device), hook=CLSACT, filters=(taken,))
    assert codes(plan(TWO.wanted(), actual)) == ["hook-taken"]


# Roots and shapes.

REBUILT = replace(reading(TWO), queues={**reading(TWO).queues, SHAPED_1: QDISC_FQ})


def test_a_rebuild_is_the_deletion_of_the_root_and_a_plan_from_nothing() -> None:
    found = next_plan(TWO, REBUILT, DISRUPTION)
    from_nothing = plan(TWO.wanted(in_force(REBUILT)), replace(unshaped(TWO.device), hook=CLSACT))
    kept = {f for f in reading(TWO).filters if f.parent == EGRESS}
    assert found.operations == (
        DeleteRoot(MQ_HANDLE),
        *(op for op in from_nothing.operations if not (isinstance(op, SetFilter) and op.filter in kept)),
    )
    assert_same(replayed(REBUILT, found.operations), reading(TWO))


@pytest.mark.parametrize(
    ("before", "after"),
    [(case(ACME, BETA), ONE), (case(ACME, BETA), steered_by(TWO, TCX)), (case(ACME), steered_by(TWO, BPF))],
)
def test_another_shape_is_a_rebuild_that_must_be_allowed_in_both_directions(before: Case, after: Case) -> None:
    single = replace(before, device=after.device, settings=replace(before.settings, shape=ShapeChoice.SINGLE))
    for old, new in ((single, after), (after, single)):
        actual = reading(old)
        assert codes(next_plan(new, actual)) == ["rebuild-needed"]
        found = next_plan(new, actual, DISRUPTION)
        assert names(found)[:2] == ["DeleteRoot", "AddRoot"]
        ended = replayed(actual, found.operations)
        goal = reading(new)
        assert_same(ended, replace(goal, hook=ended.hook))
        # No filter of ours stays behind at a hook, and no program.
        assert next_plan(new, ended).operations == ()


def test_a_root_that_is_taken_over_is_named_and_what_of_it_comes_back_is_said() -> None:
    actual = Snapshot(TWO.device, FOREIGN_MQ, verbatim=(OtherQdisc("mq", Handle(0x8001), ROOT),))
    found = plan(TWO.wanted(), actual, TAKE_OVER)
    assert names(found)[:2] == ["AddRoot", "SetQueue"]
    assert notes_of(found) == [
        (
            "mq 8001: goes: `uninstall` brings it back with its options, and not its classes, filters and size"
            " tables; keep a copy of what you need"
        )
    ]


def test_a_foreign_root_that_has_our_handles_below_it_is_deleted_first() -> None:
    taken = OtherQdisc("fq", Handle(0x21), Handle(0x8001, 1))
    actual = Snapshot(TWO.device, FOREIGN_MQ, verbatim=(OtherQdisc("mq", Handle(0x8001), ROOT), taken))
    assert lines(plan(TWO.wanted(), actual, TAKE_OVER))[:2] == ["delete root qdisc 8001:", "add root qdisc mq 1f:"]


@pytest.mark.parametrize("kind", SteeringKind)
def test_a_removal_takes_the_root_and_what_steers_away(kind: SteeringKind) -> None:
    made = steered_by(TWO, kind)
    actual = reading(made)
    found = plan_removal(actual)
    assert found.operations[0] == DeleteRoot(MQ_HANDLE)
    ended = replayed(actual, found.operations)
    assert (ended.filters, steering_in_force(ended)) == ((), None)
    assert {*names(found)[1:]} == {"RemoveTcx" if kind is TCX else "DeleteFilter"}
    assert plan_removal(Unknown("no")).operations == ()


def test_a_removal_leaves_what_others_hung_on_the_hook() -> None:
    foreign = Filter(EGRESS, 50, 3, 1, OtherMatch("bpf"))
    actual = reading(TWO)
    actual = replace(
        actual, filters=(*actual.filters, foreign), tcx=TcxState(supported=True, programs=(FOREIGN_PROGRAM,))
    )
    ended = replayed(actual, plan_removal(actual).operations)
    assert ended.filters == (foreign,)
    assert ended.tcx
    assert ended.tcx.programs == (FOREIGN_PROGRAM,)


@pytest.mark.parametrize("kind", SteeringKind)
def test_what_steers_goes_too_where_somebody_else_replaced_our_root(kind: SteeringKind) -> None:
    actual = reading(steered_by(TWO, kind))
    replaced = replace(actual, root=OtherQdisc("fq", Handle(0x8001), ROOT), queues={}, classes={}, leaves={})
    replaced = replace(replaced, filters=tuple(f for f in actual.filters if f.parent == EGRESS))
    found = plan_removal(replaced)
    assert notes_of(found) == ["the root qdisc of eth0 is not of our making: nothing to remove"]
    assert {*names(found)} == {"RemoveTcx" if kind is TCX else "DeleteFilter"}
    assert steering_in_force(replayed(replaced, found.operations)) is None


# Steering.


@pytest.mark.parametrize(
    ("old", "new", "sets"),
    [
        (SKBEDIT, BPF, ["SetFilter"]),
        (SKBEDIT, TCX, ["SetTcx"]),
        (BPF, SKBEDIT, ["SetFilter"]),
        (BPF, TCX, ["SetTcx"]),
        (TCX, SKBEDIT, ["AddHook", "SetFilter"]),
        (TCX, BPF, ["AddHook", "SetFilter"]),
    ],
)
def test_another_way_of_steering_is_there_before_the_old_one_goes(
    old: SteeringKind, new: SteeringKind, sets: list[str]
) -> None:
    before, after = steered_by(TWO, old), steered_by(TWO, new)
    actual = reading(before)
    found = next_plan(after, actual)
    done = names(found)
    removal = [name in ("DeleteFilter", "RemoveTcx") for name in done]
    assert removal == sorted(removal)
    assert [name for name, _ in pairwise([*dict.fromkeys(done), ""])][: len(sets)] == sets
    assert all(steering_in_force(state) for state in states(found.operations, actual))
    ended = replayed(actual, found.operations)
    assert_same(ended, replace(reading(after), hook=ended.hook))
    assert steering_in_force(ended) is new


@pytest.mark.parametrize(
    ("kind", "xps", "cleared"),
    [
        (SKBEDIT, {1: 1, 0: 3}, []),
        (SKBEDIT, None, []),
        (BPF, {1: 1, 0: 3}, ["clear XPS of tx queue 0", "clear XPS of tx queue 1"]),
        (TCX, {4: 0xF0}, ["clear XPS of tx queue 4"]),
        (TCX, None, []),
        (BPF, {}, []),
    ],
)
def test_xps_is_cleared_where_it_would_override_steering_and_nowhere_else(
    kind: SteeringKind, xps: dict[int, int] | None, cleared: list[str]
) -> None:
    made = steered_by(TWO, kind)
    actual = replace(reading(made), xps=xps)
    found = next_plan(made, actual)
    assert lines(found) == cleared
    assert replayed(actual, found.operations).xps == ((xps or {}) if kind is SKBEDIT else {})


def test_a_program_that_others_got_ahead_of_goes_first_again() -> None:
    made = steered_by(TWO, TCX)
    actual = reading(made)
    assert actual.tcx
    (ours,) = actual.tcx.programs
    for programs in ((FOREIGN_PROGRAM, ours), (FOREIGN_PROGRAM,), (), (OURS_BY_NAME, FOREIGN_PROGRAM)):
        pushed = replace(actual, tcx=TcxState(supported=True, programs=programs))
        found = next_plan(made, pushed)
        assert names(found) == ["SetTcx"]
        others = [program.name for program in programs if not program.is_ours]
        assert program_names(replayed(pushed, found.operations)) == [ours.name, *others]
    behind = replace(actual, tcx=TcxState(supported=True, programs=(ours, FOREIGN_PROGRAM)))
    assert next_plan(made, behind).operations == ()


def test_a_filter_at_the_hook_that_was_changed_or_added_by_hand_is_put_right() -> None:
    actual = reading(TWO)
    host = next(f for f in actual.filters if f.priority == 13)
    stale = Filter(EGRESS, 12, 3, 0x10000, BY_MARK_OF_NOBODY, QueueMapping(1))
    odd = replace(actual, filters=(*(f for f in actual.filters if f != host), replace(host, action=None), stale))
    found = next_plan(TWO, odd)
    # One without our action is not ours to change: somebody put it there.
    assert [refusal.code for refusal in found.refusals] == ["hook-taken"]
    found = next_plan(TWO, replace(odd, filters=tuple(f for f in odd.filters if f.priority != 13)))
    assert found.operations == (SetFilter(host), DeleteFilter(stale))


def test_foreign_filters_on_the_hook_are_noted_and_left_alone() -> None:
    actual = reading(TWO)
    foreign = (Filter(EGRESS, 50, 3, 1, OtherMatch("bpf")), Filter(INGRESS, 1, 3, 1, OtherMatch("bpf")))
    found = next_plan(TWO, replace(actual, filters=(*actual.filters, *foreign)))
    assert found.operations == ()
    assert notes_of(found) == ["filter prio 50 on the egress hook is not of our making and was left alone"]
    assert not found.has_findings


def test_another_mask_takes_the_fw_filters_of_the_hook_away_first() -> None:
    made, masked = (mq_case(ACME, BETA, shaped=2, mask=mask) for mask in (0xFFFF0000, 0x0FFF0000))
    actual = reading(made)
    found = next_plan(masked, actual)
    assert_same(replayed(actual, found.operations), reading(masked))


# Another number of shaped queues.


def test_fewer_shaped_queues_are_a_rebuild_that_must_be_allowed() -> None:
    fewer = replace(TWO, settings=replace(TWO.settings, shaped_queues=1))
    actual = reading(TWO)
    assert codes(next_plan(fewer, actual)) == ["rebuild-needed"]
    found = next_plan(fewer, actual, DISRUPTION)
    assert not [op for op in found.operations if isinstance(op, DeleteClass) and op.only_when_quiet]
    assert_same(replayed(actual, found.operations), reading(fewer))


def test_more_shaped_queues_are_a_rebuild_that_must_be_allowed() -> None:
    more = replace(TWO, settings=replace(TWO.settings, shaped_queues=3))
    actual = reading(TWO)
    assert codes(next_plan(more, actual)) == ["rebuild-needed"]
    found = next_plan(more, actual, DISRUPTION)
    assert names(found)[:2] == ["DeleteRoot", "AddRoot"]
    assert_same(replayed(actual, found.operations), reading(more))


def test_a_tenant_that_moves_to_a_new_shaped_queue_is_not_waited_for() -> None:
    before, after = (mq_case(ACME, BETA, GAMMA, shaped=shaped) for shaped in (1, 2))
    actual = reading(before)
    default = OtherQdisc("pfifo_fast", Handle(0), SHAPED_1)
    found = next_plan(after, replace(actual, queues={**actual.queues, SHAPED_1: default}))
    moved = {op.spec.classid.minor for op in found.operations if isinstance(op, AddClass)}
    waits = {op.classid.minor for op in found.operations if isinstance(op, DeleteClass) and op.only_when_quiet}
    assert not moved & waits


# Handles that somebody took.


def test_a_host_queue_whose_qdisc_has_the_handle_of_a_tenants_leaf_does_not_keep_the_tenant_out() -> None:
    # tc gives the first qdisc that is made without a handle 8001:, which is also a tenant's.
    actual = reading(ONE)
    taken = replace(actual, queues={**actual.queues, HOST_3: NEW_FQ})
    found = next_plan(mq_case(ACME, BETA, tenant(0x8001)), taken)
    assert found.refusals or replayed(taken, found.operations)


def test_a_leaf_that_has_the_handle_of_a_host_queues_qdisc_makes_room_for_it() -> None:
    actual = reading(TWO)
    acme = Handle(0x20, 0x2A7)
    odd = replace(
        actual,
        queues={**actual.queues, HOST_3: OtherQdisc("pfifo", Handle(0), HOST_3)},
        leaves={**actual.leaves, acme: OtherQdisc("sfq", actual.queues[HOST_3].handle, acme)},
    )
    assert_same(replayed(odd, next_plan(TWO, odd, DISRUPTION).operations), actual)


def with_htb_of_somebody_else(actual: Snapshot) -> Snapshot:
    """A reading after somebody put an HTB onto a host queue; its classes and filters are not read."""
    return replace(actual, queues={**actual.queues, HOST_3: HtbQdisc(Handle(0x8001), HOST_3, 0x10, 1000)})


def test_an_htb_of_somebody_elses_on_a_host_queue_is_not_in_force() -> None:
    assert in_force(with_htb_of_somebody_else(reading(TWO))) == in_force(reading(TWO))


def test_an_htb_of_somebody_elses_on_a_host_queue_is_left_alone() -> None:
    odd = with_htb_of_somebody_else(reading(TWO))
    assert lines(plan(TWO.wanted(in_force(reading(TWO))), odd)) == []


def test_an_htb_of_somebody_elses_on_a_host_queue_goes_as_a_whole_when_that_is_allowed() -> None:
    odd = with_htb_of_somebody_else(reading(TWO))
    found = plan(TWO.wanted(in_force(reading(TWO))), odd, DISRUPTION)
    assert lines(found) == ["set qdisc of tx queue 3 to fq limit 10240p flow_limit 1000p"]
    assert_same(replayed(odd, found.operations), reading(TWO))


def test_a_host_queue_that_can_not_be_put_right_does_not_keep_a_shaped_one_from_being_so() -> None:
    actual = without_htb(reading(WITHOUT_FQ), SHAPED_0, None)
    leaf = actual.queues[HOST_2]
    assert isinstance(leaf, Leaf)
    assert isinstance(leaf.parameters, FqCodel)
    tuned = replace(leaf, parameters=replace(leaf.parameters, limit_packets=9))
    odd = replace(actual, queues={**actual.queues, HOST_2: tuned})
    replayed(odd, plan(WITHOUT_FQ.wanted(), odd).operations)


WITHOUT_FQ = replace(TWO, capabilities=replace(TWO.capabilities, leaves=frozenset({LeafKind.FQ_CODEL})))


@pytest.mark.parametrize(("before", "after"), [(WITHOUT_FQ, TWO), (TWO, WITHOUT_FQ), (WITHOUT_FQ, WITHOUT_FQ)])
def test_a_host_queue_with_other_parameters_under_our_handle_is_put_right_when_that_is_allowed(
    before: Case, after: Case
) -> None:
    actual = reading(before)
    leaf = actual.queues[HOST_2]
    assert isinstance(leaf, Leaf)
    assert isinstance(leaf.parameters, Fq | FqCodel)
    tuned = replace(leaf, parameters=replace(leaf.parameters, limit_packets=9))
    odd = replace(actual, queues={**actual.queues, HOST_2: tuned})
    assert_same(replayed(odd, next_plan(after, odd, DISRUPTION).operations), reading(after))


@pytest.mark.parametrize("classifier", ClassifierKind)
def test_the_default_class_of_every_htb_comes_last_whether_it_is_added_or_grows(classifier: ClassifierKind) -> None:
    made = mq_case(ACME, BETA, shaped=2, classifier=classifier)
    default = ReservedClass.UNKNOWN if classifier is ClassifierKind.BPF else ReservedClass.HOST
    actual = reading(made)
    smaller = {c: replace(spec, quantum_bytes=1514) for c, spec in actual.classes.items() if c.minor == default}
    lost = {c: spec for c, spec in actual.classes.items() if c.minor not in (0x2A7, 0x2B0)} | smaller
    leaves = {c: leaf for c, leaf in actual.leaves.items() if c.minor not in (0x2A7, 0x2B0)}
    filters = tuple(f for f in actual.filters if not (isinstance(f.match, FwMatch) and f.match.classid))
    found = plan(made.wanted(), replace(actual, classes=lost, leaves=leaves, filters=filters))
    steps = [op for op in found.operations if isinstance(op, AddClass | ChangeClass | SetLeaf | SetFilter)]
    changed = [op.spec.classid for op in steps if isinstance(op, ChangeClass)]
    assert changed == [Handle(0x20, default), Handle(0x21, default)]
    assert steps[-2:] == [op for op in steps if isinstance(op, ChangeClass)]
    assert {type(op) for op in steps[:-2]} >= {AddClass, SetLeaf}


def test_the_shape_in_force_is_read_from_the_root() -> None:
    assert [in_force(reading(made)).shape for made in (case(ACME), ONE, TWO)] == [Shape.SINGLE, Shape.MQ, Shape.MQ]
