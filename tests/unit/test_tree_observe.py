"""A snapshot read back: whose each class is, and what would have to be done to have the document's tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from strategies import (
    CLSACT,
    ETH0,
    FOREIGN_PROGRAM,
    Case,
    case,
    cases,
    kernel_with,
    mq_case,
    mq_cases,
    snapshot_of,
    tenant,
    unshaped,
)

from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.classifier import MARK_PRIORITY, ClassifierKind
from kura_shaper.tree.ebpf import TcxState
from kura_shaper.tree.model import (
    EGRESS,
    HTB_HANDLE,
    ROOT,
    BpfMatch,
    Filter,
    FwMatch,
    Handle,
    HostTraffic,
    LeafKind,
    OtherMatch,
    OtherQdisc,
    Shape,
    SteeringKind,
)
from kura_shaper.tree.observe import Asked, SteeringState, in_force, marks_in_force, observe, shape_in_force
from kura_shaper.tree.operations import DeleteClass, DeleteFilter, SetFilter
from kura_shaper.tree.params import TRICKLE_MIN
from kura_shaper.tree.snapshot import ClassCounters, Snapshot
from kura_shaper.tree.steer import InForce
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
    kernel._root = replace(FLEET.wanted().tree.htbs[0], direct_qlen_packets=2)
    assert drift(kernel)[:2] == ("delete root qdisc 20:", "add root qdisc htb 20: default 12")


def test_a_document_that_the_budget_in_force_cannot_hold_is_drift_not_a_failure() -> None:
    kernel = kernel_with(case(ACME, budget="1M").wanted())
    many = case(*(tenant(0x100 + number) for number in range(20)))
    (line,) = drift(kernel, many)
    assert line.startswith("no tree for this document: a budget of 1M can't hold 20 tenants: each needs")


# Shape mq.

GAMMA = tenant(0x2C0)
ONE, TWO = mq_case(ACME, BETA), mq_case(ACME, BETA, GAMMA, shaped=2, live=5)


def reading(made: Case) -> Snapshot:
    return snapshot_of(made.wanted(), made.device)


def lost(actual: Snapshot, *majors: int) -> Snapshot:
    """A reading after somebody took HTBs away by hand."""
    return replace(
        actual,
        queues={place: qdisc for place, qdisc in actual.queues.items() if qdisc.handle.major not in majors},
        classes={classid: spec for classid, spec in actual.classes.items() if classid.major not in majors},
        leaves={classid: leaf for classid, leaf in actual.leaves.items() if classid.major not in majors},
        filters=tuple(f for f in actual.filters if f.parent.major not in majors),
    )


@pytest.mark.parametrize("kind", SteeringKind)
def test_a_tree_of_shape_mq_is_read_with_its_proofs_and_what_steers(kind: SteeringKind) -> None:
    found = observe(reading(mq_case(ACME, BETA, shaped=2, steering=kind)), TWO.document)
    assert (found.is_ours, found.shape, found.steering) == (True, Shape.MQ, SteeringState(kind))
    assert [(str(c.spec.classid), c.owner) for c in found.classes if c.owner.startswith(("p", "t"))] == [
        ("20:20", "proof"),
        ("20:2a7", "t2a7"),
        ("21:21", "proof"),
        ("21:2b0", "t2b0"),
    ]
    assert [line.split()[2] for line in found.drift if line.startswith("add class")] == ["20:2c0"]


@settings(deadline=None, max_examples=60)
@given(mq_cases())
def test_a_tree_of_shape_mq_as_it_was_made_does_not_drift(made: Case) -> None:
    found = observe(reading(made), made.document)
    assert (found.drift, found.is_fine) == ((), True)
    asked = Asked(
        budget=made.settings.budget,
        shape=Shape.MQ,
        shaped_queues=made.settings.shaped_queues,
        leaf=made.settings.leaf,
        host_traffic=HostTraffic.OUTSIDE,
        host_reserve=max(made.settings.host_reserve, TRICKLE_MIN),
        leaves=made.capabilities.leaves,
    )
    assert observe(reading(made), made.document, asked).drift == ()


def test_a_tree_whose_packets_do_not_come_to_it_is_not_fine() -> None:
    actual = reading(ONE)
    unsteered = replace(actual, filters=tuple(f for f in actual.filters if f.parent != EGRESS))
    found = observe(unsteered, None)
    assert (found.drift, found.is_fine) == ((), False)
    assert found.steering == SteeringState(None, ("nothing steers packets to the shaped queues",))
    # What would mend it is the first way.
    lines = observe(unsteered, ONE.document).drift
    assert [line.split(":")[0] for line in lines] == [f"set filter prio {p} on the egress hook" for p in (11, 13)]
    single = observe(kernel_with(FLEET.wanted()).snapshot(), FLEET.document)
    assert (single.steering, single.is_fine) == (None, True)


@pytest.mark.parametrize(
    ("asked", "begins"),
    [
        (Asked(shape=Shape.SINGLE), "delete root qdisc 1f:"),
        (Asked(shaped_queues=3), "delete root qdisc 1f:"),
        (
            Asked(shaped_queues=8),
            "no tree for this document: shape mq on eth0: it has 5 live tx queues and 8 are to be",
        ),
        (Asked(host_traffic=HostTraffic.INSIDE), "no tree for this document: shape mq can't hold host traffic under"),
        (Asked(budget=Rate(10**9)), "change class 21:11 parent 21:3 floor 1M ceil 1G"),
        (Asked(leaf=LeafKind.FQ, leaves=frozenset(LeafKind)), "delete leaf 40: of 20:2"),
    ],
)
def test_what_is_asked_for_of_shape_mq_counts_for_more_than_what_is_in_force(asked: Asked, begins: str) -> None:
    assert observe(reading(TWO), TWO.document, asked).drift[0].startswith(begins)


def test_shape_mq_that_is_asked_for_where_single_is_in_force_is_drift() -> None:
    actual = replace(kernel_with(FLEET.wanted()).snapshot(), device=TWO.device)
    lines = observe(actual, FLEET.document, Asked(shape=Shape.MQ)).drift
    assert lines[:2] == ("delete root qdisc 20:", "add root qdisc mq 1f:")


def test_queues_that_came_and_that_nobody_has_put_right_are_drift() -> None:
    device = replace(TWO.device, tx_queues=6)
    place = Handle(0x1F, 6)
    actual = replace(reading(TWO), device=device)
    actual = replace(actual, queues={**actual.queues, place: OtherQdisc("pfifo_fast", Handle(0), place)})
    # The qdisc of a new queue, which is the host's, only waits for an occasion: that is no drift.
    (line,) = observe(actual, TWO.document).drift
    assert line.endswith("tx queue 2 to 5, by hash")


def test_shaped_queues_that_are_not_live_any_more_are_said() -> None:
    found = observe(replace(reading(TWO), device=replace(TWO.device, tx_queues=1)), TWO.document)
    assert found.steering
    assert found.steering.faults == ("2 queues are shaped and only 1 are live: the kernel ignores a queue beyond them",)
    assert found.drift == (
        (
            "no tree for this document: shape mq on eth0: it has 1 live tx queue and 2 are to be shaped;"
            " use shape single, or raise the device's channels"
        ),
    )


@pytest.mark.parametrize("tcx", [None, TcxState(supported=False)])
def test_without_tcx_a_foreign_filter_ahead_leaves_no_way_to_steer(tcx: TcxState | None) -> None:
    actual = replace(reading(ONE), tcx=tcx)
    assert observe(actual, ONE.document).is_fine
    ahead = replace(actual, filters=(Filter(EGRESS, 1, 3, 1, OtherMatch("bpf")), *actual.filters))
    (line,) = observe(ahead, ONE.document).drift
    assert "may end the chain before ours, and this kernel has no tcx" in line
    with_tcx = replace(ahead, tcx=TcxState(supported=True))
    assert observe(with_tcx, ONE.document).drift[0].startswith("set first tcx egress program to ks_")


def test_a_part_that_one_of_several_htbs_has_not_is_named_with_its_htb() -> None:
    actual = reading(TWO)
    broken = replace(
        actual,
        classes={c: spec for c, spec in actual.classes.items() if c != Handle(0x21, 2)},
        filters=tuple(f for f in actual.filters if f.parent != Handle(0x21)),
    )
    assert observe(broken, TWO.document).drift == (
        "class 21:2 host is missing; `kura-shaper apply` mends it",
        "the classifier of 21: is missing; `kura-shaper apply` mends it",
    )


def test_a_root_of_ours_without_any_htb_is_drift() -> None:
    found = observe(lost(reading(TWO), 0x20, 0x21), TWO.document).drift
    assert found == tuple(f"HTB {0x20 + q:x}: of tx queue {q} is missing; `kura-shaper apply` mends it" for q in (0, 1))


@pytest.mark.parametrize("major", [0x20, 0x21])
@pytest.mark.parametrize("has_document", [True, False])
def test_an_htb_that_was_taken_away_is_drift(major: int, *, has_document: bool) -> None:
    lines = observe(lost(reading(TWO), major), TWO.document if has_document else None).drift
    assert any(f"htb {major:x}:" in line.lower() for line in lines)


@pytest.mark.parametrize(
    ("actual", "known"),
    [
        (unshaped(TWO.device), InForce()),
        (replace(unshaped(TWO.device), hook=CLSACT, tcx=None), InForce(hook="clsact")),
        (reading(FLEET), InForce(Shape.SINGLE, shares=(Rate(3 * 10**9),), shaped_queues=1)),
        (
            reading(ONE),
            InForce(
                Shape.MQ,
                {0x2A7: 0, 0x2B0: 0},
                shares=(Rate(3 * 10**9),),
                shaped_queues=1,
                steering=SteeringKind.SKBEDIT,
                hook="clsact",
            ),
        ),
        (
            replace(
                reading(mq_case(ACME, BETA, shaped=2, steering=SteeringKind.BPF)),
                tcx=TcxState(
                    supported=True, programs=(FOREIGN_PROGRAM, replace(FOREIGN_PROGRAM, program_id=14, name=""))
                ),
            ),
            InForce(
                Shape.MQ,
                {0x2A7: 0, 0x2B0: 1},
                shares=(Rate(1_500_000_000), Rate(1_500_000_000)),
                shaped_queues=2,
                steering=SteeringKind.BPF,
                hook="clsact",
                foreign_tcx=("cil_to_netdev", "14"),
            ),
        ),
        # Nothing of ours, but something in the way.
        (
            replace(unshaped(TWO.device), hook=CLSACT, filters=(Filter(EGRESS, 1, 3, 1, OtherMatch("bpf")),)),
            InForce(hook="clsact", has_foreign_filter=True),
        ),
    ],
)
def test_what_is_in_force_is_what_a_new_plan_must_not_turn_over(actual: Snapshot, known: InForce) -> None:
    assert in_force(actual) == known
    assert shape_in_force(actual) is known.shape


def test_without_a_budget_class_there_are_no_shares_in_force() -> None:
    actual = reading(TWO)
    classes = {c: spec for c, spec in actual.classes.items() if c != Handle(0x21, 3)}
    assert in_force(replace(actual, classes=classes)).shares == ()


@pytest.mark.parametrize("classifier", ClassifierKind)
@pytest.mark.parametrize("mask", [0xFFFF0000, 0x0FFF0000, 0x0000FFFF])
def test_the_marks_in_force_are_read_from_the_classifier(classifier: ClassifierKind, mask: int) -> None:
    for made in (mq_case(ACME, shaped=2, mask=mask, classifier=classifier), case(classifier=classifier, mask=mask)):
        assert marks_in_force(reading(made)) == MarkLayout(mask)


@pytest.mark.parametrize(
    "match",
    [
        None,
        OtherMatch("u32"),
        BpfMatch(((6, 0, 0, 0),)),
        # A mask that no marks of ours have.
        BpfMatch(((32, 0, 0, 0), (84, 0, 0, 0xF0F))),
        FwMatch(1, 0xFF, Handle(0x20, 2)),
    ],
)
def test_a_classifier_that_is_not_ours_tells_of_no_marks(match: BpfMatch | FwMatch | OtherMatch | None) -> None:
    filters = (Filter(HTB_HANDLE, MARK_PRIORITY, 3, 1, match),) if match else ()
    assert marks_in_force(replace(reading(ONE), filters=filters)) is None
