"""One device kept over a fake kernel: what is done, what is left alone, and what each thing counts as."""

from __future__ import annotations

import errno
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from strategies import ETH0, assert_tree, case, mq_case, tenant

from kura_shaper.agent.keeper import (
    REBUILDS_AN_HOUR,
    DeviceKeeper,
    DriftKind,
    Looked,
    Verdict,
    drift_of,
)
from kura_shaper.clock import FakeClock
from kura_shaper.kernel.errors import KernelRefusedError, refusal
from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.prove import Proof
from kura_shaper.tree.model import ROOT, Handle, HtbQdisc, MqQdisc, OtherQdisc, Shape, SteeringKind
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteHook,
    DeleteLeaf,
    DeleteRoot,
    Impact,
    RestoreQdisc,
    SetLeaf,
    SetXps,
)
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from strategies import Case

    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.tree.operations import Operation

ACME, BETA, GAMMA = tenant(0x2A7), tenant(0x2B0), tenant(0x2C0)
FLEET = case(ACME, BETA)
ACME_CLASS, BETA_CLASS, BUDGET_CLASS = Handle(0x20, 0x2A7), Handle(0x20, 0x2B0), Handle(0x20, 3)
SECOND, HOUR = 10**9, 3600 * 10**9
FOREIGN = OtherQdisc("fq", Handle(0x8001), ROOT, b"\x08\x00\x01\x00\x10\x27\x00\x00")


class Kernel:
    """A fake kernel that a test stands in front of: it can be blind, refuse, and have classes that still send."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.readings = 0
        self.blind = ""
        self.refused: Callable[[Operation], bool] = lambda _: False
        self.sending: set[Handle] = set()

    def snapshot(self) -> Snapshot | Unknown:
        self.readings += 1
        if self.blind:
            return Unknown(self.blind)
        found = self.kernel.snapshot()
        moving = {c: ClassCounters(sent_bytes=1500 * self.readings) for c in self.sending if c in found.classes}
        return replace(found, counters={**found.counters, **moving})

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        return [refusal(errno.EPERM) if self.refused(op) else self.kernel.send([op])[0] for op in operations]


class Prover:
    """Proves what it is told to, and counts how often it was asked."""

    def __init__(self) -> None:
        self.proof, self.asked = Proof(is_proven=True), 0

    def __call__(self, control: TrafficControl, marks: object, *, clock: object) -> Proof:
        self.asked += 1
        return self.proof


class Rig:
    """A keeper, its kernel and its clock."""

    def __init__(self, state: Path, made: Case = FLEET, kernel: FakeKernel | None = None) -> None:
        self.state, self.case, self.clock = state, made, FakeClock(HOUR)
        self.kernel = kernel or FakeKernel(made.device)
        self.control, self.prover = Kernel(self.kernel), Prover()
        self.keeper = self.another()

    def another(self) -> DeviceKeeper:
        """A keeper that knows nothing yet, as after a restart."""
        journal = Journal(self.state, self.case.device)
        self.keeper = DeviceKeeper(self.control, journal, self.case.capabilities, clock=self.clock, prove=self.prover)
        return self.keeper

    def look(self, made: Case | None = None, **options: object) -> Looked:
        self.case = made or self.case
        self.kernel.sent.clear()
        return self.keeper.look(self.case.document, self.case.settings, **options)  # type: ignore[arg-type]

    @property
    def sent(self) -> list[Operation]:
        return self.kernel.sent

    @property
    def counts(self) -> tuple[int, int, int, dict[DriftKind, int]]:
        tally = self.keeper.tally
        return tally.installs, tally.changes, tally.repairs, dict(tally.drift)

    def hand(self, *operations: Operation) -> None:
        """Somebody else does something."""
        assert not any(self.kernel.send(operations)), operations


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def kept(rig: Rig) -> Rig:
    """A rig whose tree was installed."""
    assert rig.look().verdict is Verdict.INSTALLED
    return rig


# The ordinary life of a tree.


@pytest.mark.case("F40")
def test_the_first_tree_is_an_install_and_neither_drift_nor_a_change(rig: Rig) -> None:
    """Case F40."""
    looked = rig.look()
    assert (looked.verdict, looked.reasons, looked.drift) == (Verdict.INSTALLED, (), ())
    assert len(looked.operations) == len(rig.sent) > 0
    assert (looked.shape, looked.shaped_queues, looked.pending) == (Shape.SINGLE, 1, 0)
    assert rig.counts == (1, 0, 0, {})
    assert_tree(rig.kernel.snapshot(), FLEET.wanted())


@pytest.mark.case("F32")
def test_a_look_at_what_is_in_step_sends_nothing(kept: Rig) -> None:
    """Case F32."""
    for _ in range(3):
        assert kept.look().verdict is Verdict.IN_STEP
        assert kept.sent == []
    assert kept.counts == (1, 0, 0, {})


@pytest.mark.case("F28")
def test_a_keeper_that_comes_later_adopts_what_is_there_without_a_write_or_a_count(kept: Rig) -> None:
    """Case F28."""
    kept.another()
    looked = kept.look()
    assert (looked.verdict, kept.sent, kept.counts) == (Verdict.IN_STEP, [], (0, 0, 0, {}))


def test_what_differs_when_a_keeper_comes_is_a_change_since_nobody_knows_who_asked(kept: Rig) -> None:
    kept.another()
    assert kept.look(case(ACME)).verdict is Verdict.CHANGED
    assert kept.counts == (0, 1, 0, {})


def leaf_or_class(rig: Rig) -> list[ChangeClass | SetLeaf]:
    """What was sent, which must be these and cost no packet."""
    assert {op.impact for op in rig.sent} == {Impact.HITLESS}
    return [op for op in rig.sent if isinstance(op, ChangeClass | SetLeaf)]


def test_a_change_of_the_document_touches_only_what_it_is_about(kept: Rig) -> None:
    looked = kept.look(case(replace(ACME, ceiling=Rate.parse("900M")), BETA))
    assert looked.verdict is Verdict.CHANGED
    assert {op.spec.classid if isinstance(op, ChangeClass) else op.leaf.parent for op in leaf_or_class(kept)} == {
        ACME_CLASS
    }
    assert kept.counts == (1, 1, 0, {})


@pytest.mark.case("F07")
def test_another_budget_changes_classes_in_place_and_no_leaf(kept: Rig) -> None:
    """Cases F07 and F08."""
    for budget in ("5G", "1G", "600M", "3G"):
        assert kept.look(case(ACME, BETA, budget=budget)).verdict is Verdict.CHANGED
        assert len(leaf_or_class(kept)) == len(kept.sent)
        assert not [op for op in kept.sent if isinstance(op, SetLeaf) and op.leaf.parent in (ACME_CLASS, BETA_CLASS)]
        assert kept.kernel.snapshot().classes[BUDGET_CLASS].ceil == Rate.parse(budget)
    assert kept.counts == (1, 4, 0, {})


@pytest.mark.case("F27")
def test_a_tenant_that_left_is_pruned_and_what_is_not_ours_stays(kept: Rig) -> None:
    """Case F27."""
    assert kept.look(case(BETA)).verdict is Verdict.CHANGED
    assert ACME_CLASS not in kept.kernel.snapshot().classes
    assert kept.look().verdict is Verdict.IN_STEP


# Drift.


DRIFT: dict[str, tuple[tuple[Operation, ...], DriftKind]] = {
    "class edited": ((ChangeClass(replace(FLEET.wanted().tree.classes[-1], ceil=Rate(10**6))),), DriftKind.CLASS),
    "class removed": ((DeleteClass(BETA_CLASS),), DriftKind.CLASS),
    "class of nobody": (
        (AddClass(replace(FLEET.wanted().tree.classes[-1], classid=Handle(0x20, 0x999))),),
        DriftKind.CLASS,
    ),
    "leaf removed": (
        tuple(DeleteLeaf(leaf.parent, leaf.handle) for leaf in FLEET.wanted().tree.leaves if leaf.parent == ACME_CLASS),
        DriftKind.LEAF,
    ),
    "filter removed": ((DeleteFilter(FLEET.wanted().tree.filters[0]),), DriftKind.FILTER),
    "root removed": ((DeleteRoot(Handle(0x20)),), DriftKind.ROOT),
}


@pytest.mark.case("F25")
@pytest.mark.parametrize(("done", "kind"), DRIFT.values(), ids=DRIFT.keys())
def test_each_kind_of_drift_is_mended_at_once_and_counted_once(
    kept: Rig, done: tuple[Operation, ...], kind: DriftKind
) -> None:
    """Case F25."""
    kept.hand(*done)
    looked = kept.look()
    assert (looked.verdict, looked.reasons) == (Verdict.REPAIRED, ())
    assert kind in dict(looked.drift)
    assert kept.keeper.tally.drift[kind] == 1
    assert_tree(kept.kernel.snapshot(), FLEET.wanted())
    again = kept.look()
    assert (again.verdict, kept.sent) == (Verdict.IN_STEP, [])
    installs, changes, repairs, _ = kept.counts
    assert (installs, changes, repairs) == (1, 0, 1)


def test_a_root_that_went_is_one_drift_and_not_one_of_every_part(kept: Rig) -> None:
    kept.hand(DeleteRoot(Handle(0x20)))
    assert kept.look().drift == ((DriftKind.ROOT, 1),)
    assert kept.counts == (1, 0, 1, {DriftKind.ROOT: 1})


def test_drift_and_a_change_at_once_count_as_both_and_the_change_as_no_drift(kept: Rig) -> None:
    kept.hand(DeleteFilter(FLEET.wanted().tree.filters[0]))
    looked = kept.look(case(ACME, BETA, GAMMA))
    assert (looked.verdict, looked.drift) == (Verdict.CHANGED, ((DriftKind.FILTER, 1),))
    assert kept.counts == (1, 1, 1, {DriftKind.FILTER: 1})
    assert_tree(kept.kernel.snapshot(), case(ACME, BETA, GAMMA).wanted())


def test_a_root_that_went_while_the_document_changed_is_drift_and_no_install(kept: Rig) -> None:
    kept.hand(DeleteRoot(Handle(0x20)))
    assert kept.look(case(BETA)).verdict is Verdict.CHANGED
    assert kept.counts == (1, 1, 1, {DriftKind.ROOT: 1})


def test_a_change_alone_is_never_drift(kept: Rig) -> None:
    for fleet in (case(ACME), case(ACME, BETA, GAMMA), case(GAMMA, budget="1G"), FLEET):
        assert kept.look(fleet).drift == ()
    assert kept.counts == (1, 4, 0, {})


def test_a_device_that_becomes_another_changes_the_tree_and_that_is_no_drift(kept: Rig) -> None:
    kept.kernel.device = replace(ETH0, mtu_bytes=9000, gso_max_bytes=200_000)
    looked = kept.look()
    assert (looked.verdict, looked.drift) == (Verdict.CHANGED, ())
    assert kept.counts == (1, 1, 0, {})
    kept.kernel.device = replace(ETH0, is_up=False)
    kept.look()
    kept.hand(DeleteFilter(FLEET.wanted().tree.filters[0]))
    kept.kernel.device = ETH0
    assert kept.look().verdict is Verdict.REPAIRED


def test_a_tenant_that_left_and_still_sends_is_no_drift_however_often_it_is_looked_at(kept: Rig) -> None:
    kept.control.sending = {ACME_CLASS}
    looked = kept.look(case(BETA))
    assert (looked.verdict, looked.pending) == (Verdict.DRAINING, 1)
    assert "still sends" in " ".join(looked.reasons)
    for _ in range(5):
        looked = kept.look()
        assert (looked.verdict, looked.pending, looked.drift, looked.operations) == (Verdict.DRAINING, 1, (), ())
        assert looked.verdict.is_well
        assert looked.again_in_ns > 0
    assert kept.counts[2:] == (0, {})
    kept.hand(DeleteFilter(FLEET.wanted().tree.filters[0]))
    assert kept.look().drift == ((DriftKind.FILTER, 1),)
    kept.control.sending = set()
    assert kept.look().verdict is Verdict.CHANGED
    assert kept.look().verdict is Verdict.IN_STEP
    assert kept.counts[2:] == (1, {DriftKind.FILTER: 1})


def test_what_others_did_while_we_were_held_off_is_no_drift(kept: Rig) -> None:
    """Somebody held the agent off, took the tree away and let it work again."""
    kept.hand(DeleteRoot(Handle(0x20)))
    assert kept.look(observe=True).verdict is Verdict.WOULD_CHANGE
    assert kept.look().verdict is Verdict.INSTALLED
    assert kept.counts == (2, 0, 0, {})


# What is not done.


def test_observing_says_what_would_be_done_and_does_none_of_it(rig: Rig) -> None:
    before = rig.kernel.snapshot()
    looked = rig.look(observe=True)
    assert (looked.verdict, rig.sent) == (Verdict.WOULD_CHANGE, [])
    assert looked.pending == len(looked.operations) > 0
    assert looked.operations[0].startswith("add root qdisc htb")
    assert rig.kernel.snapshot() == before
    assert rig.counts == (0, 0, 0, {})
    assert list(rig.state.iterdir()) == []


def test_observing_a_tree_in_step_says_so(kept: Rig) -> None:
    assert kept.look(observe=True).verdict is Verdict.IN_STEP


@pytest.mark.case("F21")
def test_what_can_not_be_read_is_left_alone(kept: Rig) -> None:
    """Case F21."""
    kept.hand(DeleteRoot(Handle(0x20)))
    kept.control.blind = "the dump was interrupted"
    looked = kept.look(case(BETA))
    assert (looked.verdict, looked.reasons, kept.sent) == (Verdict.UNKNOWN, ("the dump was interrupted",), [])
    assert kept.counts == (1, 0, 0, {})
    kept.control.blind = ""
    assert kept.look().verdict is Verdict.CHANGED


def test_a_root_of_somebody_elses_is_waited_for_and_never_replaced(rig: Rig) -> None:
    kernel = FakeKernel(ETH0, FOREIGN)
    rig = Rig(rig.state, kernel=kernel)
    for permission in (Permission.NONE, Permission.DISRUPTION):
        looked = rig.look(permission=permission)
        assert (looked.verdict, rig.sent, looked.foreign) == (Verdict.WAITS, [], ("root",))
        assert "somebody else" in looked.reasons[0]
    kernel._clear(OtherQdisc("noqueue", Handle(0), ROOT))
    assert rig.look().verdict is Verdict.INSTALLED


def test_a_root_that_somebody_puts_over_ours_is_waited_for_and_drift_when_it_went(kept: Rig) -> None:
    kept.kernel._clear(FOREIGN)
    assert kept.look().verdict is Verdict.WAITS
    assert kept.sent == []
    kept.kernel._clear(OtherQdisc("noqueue", Handle(0), ROOT))
    assert kept.look().verdict is Verdict.REPAIRED
    assert kept.counts == (1, 0, 1, {DriftKind.ROOT: 1})


def test_a_tree_that_somebody_takes_away_comes_back_three_times_an_hour_and_again_after_it(rig: Rig) -> None:
    rig.look()
    rebuilt = 1
    while rebuilt < REBUILDS_AN_HOUR:
        rig.clock.wait_ns(60 * SECOND)
        rig.hand(DeleteRoot(Handle(0x20)))
        assert rig.look().verdict is Verdict.REPAIRED
        rebuilt += 1
    rig.hand(DeleteRoot(Handle(0x20)))
    for _ in range(3):
        looked = rig.look()
        assert (looked.verdict, rig.sent) == (Verdict.WAITS, [])
        assert "somebody takes it away" in looked.reasons[0]
    rig.clock.wait_ns(HOUR - 60 * SECOND * (REBUILDS_AN_HOUR - 1) - 1)
    assert rig.look().verdict is Verdict.WAITS
    rig.clock.wait_ns(1)
    assert rig.look().verdict is Verdict.REPAIRED
    assert rig.counts == (1, 0, 3, {DriftKind.ROOT: 3})


def test_changes_without_loss_go_on_when_the_tree_may_not_be_rebuilt(rig: Rig) -> None:
    rig.look()
    for _ in range(REBUILDS_AN_HOUR - 1):
        rig.hand(DeleteRoot(Handle(0x20)))
        rig.look()
    assert rig.look(case(ACME)).verdict is Verdict.CHANGED


@pytest.mark.case("F22")
def test_a_class_that_the_kernel_refuses_costs_the_others_nothing(rig: Rig) -> None:
    """Case F22."""
    rig.control.refused = lambda op: isinstance(op, AddClass) and op.spec.classid == ACME_CLASS
    looked = rig.look()
    assert looked.verdict is Verdict.FAILED
    assert any("2a7" in reason for reason in looked.reasons)
    assert BETA_CLASS in rig.kernel.snapshot().classes
    assert rig.counts == (1, 0, 0, {})
    for _ in range(4):
        assert rig.look().verdict is Verdict.FAILED
    assert rig.counts == (1, 0, 0, {})
    rig.hand(DeleteFilter(FLEET.wanted().tree.filters[0]))
    rig.look()
    assert rig.counts == (1, 0, 1, {DriftKind.FILTER: 1})
    rig.control.refused = lambda _: False
    assert rig.look().verdict is Verdict.CHANGED
    assert_tree(rig.kernel.snapshot(), FLEET.wanted())
    assert rig.counts == (1, 0, 1, {DriftKind.FILTER: 1})


def test_a_root_that_is_refused_is_no_install_until_it_is_taken(rig: Rig) -> None:
    rig.control.refused = lambda op: isinstance(op, AddRoot)
    for _ in range(2):
        assert rig.look().verdict is Verdict.FAILED
    assert rig.counts == (0, 0, 0, {})
    rig.control.refused = lambda _: False
    assert rig.look().verdict is Verdict.INSTALLED
    assert rig.counts == (1, 0, 0, {})


def test_drift_that_can_not_be_mended_counts_once(kept: Rig) -> None:
    kept.hand(DeleteFilter(FLEET.wanted().tree.filters[0]))
    kept.control.refused = lambda _: True
    for _ in range(4):
        looked = kept.look()
        assert (looked.verdict, looked.operations, looked.pending) == (Verdict.FAILED, (), 1)
    assert kept.counts == (1, 0, 0, {DriftKind.FILTER: 1})


def test_a_document_that_no_tree_can_hold_is_said_and_what_stands_stands(kept: Rig) -> None:
    looked = kept.look(case(ACME, BETA, budget="1k"))
    assert looked.verdict in {Verdict.WAITS, Verdict.FAILED}
    assert "budget" in looked.reasons[0]
    assert kept.sent == []


def test_maintenance_allows_what_loses_the_queue(kept: Rig) -> None:
    root = FLEET.wanted().tree.root
    assert isinstance(root, HtbQdisc)
    direct = replace(root, direct_qlen_packets=5)
    kept.hand(DeleteRoot(Handle(0x20)), AddRoot(direct))
    assert kept.look().verdict is Verdict.WAITS
    assert kept.sent == []
    assert kept.look(permission=Permission.DISRUPTION).verdict is Verdict.REPAIRED
    assert_tree(kept.kernel.snapshot(), FLEET.wanted())
    kept.look()
    assert kept.counts[1] == 0


# The lock.


def test_a_device_that_another_run_programs_is_waited_for_a_moment(kept: Rig) -> None:
    held = Journal(kept.state, FLEET.device).locked()
    held.__enter__()
    began_ns = kept.clock.now_ns()
    looked = kept.look(case(ACME))
    assert (looked.verdict, kept.sent) == (Verdict.WAITS, [])
    assert "another run" in looked.reasons[0]
    assert kept.clock.now_ns() - began_ns >= SECOND // 2
    held.__exit__(None, None, None)
    assert kept.look().verdict is Verdict.CHANGED


def test_a_lock_that_is_held_for_milliseconds_delays_and_does_not_fail(
    kept: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Journal(kept.state, FLEET.device).locked()
    held.__enter__()
    waits: list[int] = []

    def wait(duration_ns: int) -> None:
        waits.append(duration_ns)
        held.__exit__(None, None, None)

    monkeypatch.setattr(kept.clock, "wait_ns", wait)
    assert kept.look(case(ACME, BETA, GAMMA)).verdict is Verdict.CHANGED
    assert len(waits) == 1


def test_a_state_directory_that_can_not_be_had_is_said(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rig = Rig(tmp_path / "file" / "state")
    looked = rig.look()
    assert (looked.verdict, rig.sent) == (Verdict.WAITS, [])
    assert "the lock" in looked.reasons[0]


# Following another keeper of the same device.


def test_a_keeper_that_follows_another_goes_on_with_its_counts_and_takes_nothing_for_new(kept: Rig) -> None:
    before = kept.keeper
    kept.another().follow(before)
    assert kept.counts == (1, 0, 0, {})
    kept.hand(DeleteRoot(Handle(0x20)))
    assert kept.look().verdict is Verdict.REPAIRED
    assert kept.counts == (1, 0, 1, {DriftKind.ROOT: 1})
    before = kept.keeper
    kept.another().follow(before)
    for _ in range(REBUILDS_AN_HOUR):
        kept.hand(DeleteRoot(Handle(0x20)))
        looked = kept.look()
        if looked.verdict is Verdict.WAITS:
            break
    assert looked.verdict is Verdict.WAITS


# Shape mq.


@pytest.fixture
def steered(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path, mq_case(ACME, BETA))
    assert rig.look().verdict is Verdict.INSTALLED
    return rig


def test_steering_is_proven_when_the_tree_is_made_and_then_now_and_then(steered: Rig) -> None:
    assert steered.prover.asked == 1
    for _ in range(5):
        looked = steered.look()
        assert (looked.verdict, looked.proof) == (Verdict.IN_STEP, Proof(is_proven=True))
        assert looked.again_in_ns > 0
    assert steered.prover.asked == 1
    steered.clock.wait_ns(looked.again_in_ns)
    assert steered.look().again_in_ns == 0
    assert steered.prover.asked == 2


def test_steering_that_is_not_proven_is_a_failure_until_it_is(steered: Rig) -> None:
    steered.clock.wait_ns(10 * SECOND)
    steered.prover.proof = Proof(is_proven=False, reason="3 of 16 frames did not come")
    for _ in range(2):
        looked = steered.look()
        assert (looked.verdict, looked.operations) == (Verdict.FAILED, ())
        assert "3 of 16" in looked.reasons[0]
    steered.prover.proof = Proof(is_proven=True)
    steered.clock.wait_ns(10 * SECOND)
    assert steered.look().verdict is Verdict.IN_STEP
    assert steered.counts == (1, 0, 0, {})


@pytest.mark.parametrize(
    ("kind", "done", "drift"),
    [
        (SteeringKind.SKBEDIT, (DeleteHook(),), DriftKind.HOOK),
        (SteeringKind.SKBEDIT, (DeleteLeaf(Handle(0x1F, 1), Handle(0x20)),), DriftKind.QUEUE),
        (SteeringKind.TCX, (SetXps(1, 3),), DriftKind.STEERING),
    ],
    ids=["hook", "queue", "XPS"],
)
def test_each_part_that_steers_is_mended_and_counted_as_what_it_is(
    tmp_path: Path, kind: SteeringKind, done: tuple[Operation, ...], drift: DriftKind
) -> None:
    rig = Rig(tmp_path, mq_case(ACME, BETA, steering=kind))
    rig.look()
    root = rig.kernel.snapshot().root
    assert isinstance(root, MqQdisc)
    done = tuple(DeleteLeaf(root.child(0), op.handle) if isinstance(op, DeleteLeaf) else op for op in done)
    rig.hand(*done)
    looked = rig.look()
    assert (looked.verdict, looked.reasons) == (Verdict.REPAIRED, ())
    assert drift in dict(looked.drift)
    assert rig.look().verdict is Verdict.IN_STEP


def test_a_program_that_somebody_puts_before_ours_is_put_behind_it_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, mq_case(ACME, steering=SteeringKind.TCX))
    rig.look()
    rig.kernel.attach_foreign_tcx("cil_to_netdev")
    looked = rig.look()
    assert (looked.verdict, looked.drift, looked.foreign) == (
        Verdict.REPAIRED,
        ((DriftKind.STEERING, 1),),
        ("tcx",),
    )


# Whoever else has a hand on the device.


def test_drift_of_everything_is_one_of_each_kind_and_of_a_root_only_that() -> None:
    tree = FLEET.wanted().tree
    parts: list[Operation] = [
        SetLeaf(tree.leaves[0]),
        DeleteClass(ACME_CLASS),
        DeleteFilter(tree.filters[0]),
        SetXps(0, 0),
    ]
    kinds = {DriftKind.LEAF: 1, DriftKind.CLASS: 1, DriftKind.FILTER: 1, DriftKind.STEERING: 1}
    assert drift_of([*parts, *parts]) == kinds
    assert drift_of([*parts, RestoreQdisc(FOREIGN)]) == {DriftKind.ROOT: 1}
    assert drift_of([]) == {}


# Everything at once.


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_together_each_thing_counts_once_and_as_what_it_is(tmp_path: Path, seed: int) -> None:
    chosen, fleets = Random(seed), [FLEET, case(ACME), case(ACME, BETA, GAMMA), case(GAMMA, budget="1G")]
    rig, present = Rig(tmp_path), FLEET
    rig.look()
    drifts = changes = 0
    for _ in range(12):
        found = rig.kernel.snapshot()
        wanted = chosen.choice(fleets) if chosen.random() < 0.3 else present
        budget = found.classes[BUDGET_CLASS]
        ways: list[list[Operation]] = [
            [],
            [DeleteRoot(Handle(0x20))],
            [DeleteFilter(found.filters[0])],
            [DeleteClass(ACME_CLASS)] if ACME_CLASS in found.classes else [],
            [ChangeClass(replace(budget, ceil=Rate(8 * 10**8)))],
        ]
        meddling = chosen.choice(ways)
        rig.hand(*meddling)
        rig.keeper._rebuilds_ns.clear()
        rig.look(wanted)
        drifts, changes = drifts + bool(meddling), changes + (wanted is not present)
        assert rig.look(wanted).verdict is Verdict.IN_STEP
        tally = rig.keeper.tally
        assert (tally.installs, tally.changes, sum(tally.drift.values()), tally.repairs) == (1, changes, drifts, drifts)
        present = wanted
