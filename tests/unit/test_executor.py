"""Operations are read back, classes that still send stay, and what was there before us comes back."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from strategies import ETH0, assert_tree, case, kernel_with, tenant

from kura_shaper.clock import FakeClock
from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.kernel.apply import Applied, apply_tree, remove_tree
from kura_shaper.kernel.errors import KernelRefusedError, refusal
from kura_shaper.kernel.executor import QUIET_FOR_NS, Outcome, Status, execute
from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.kernel.journal import Former, Journal
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import ROOT, Handle, HostTraffic, LeafKind, OtherQdisc
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteRoot,
    Operation,
    RestoreQdisc,
    SetLeaf,
)
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kura_shaper.tree.build import Wanted

ACME, BETA = tenant(0x2A7), tenant(0x2B0)
ACME_CLASS, BETA_CLASS = Handle(0x20, 0x2A7), Handle(0x20, 0x2B0)
FW, MS = ClassifierKind.FW, 1_000_000
FQ = OtherQdisc("fq", Handle(0x8001), ROOT, b"\x08\x00\x01\x00\x10\x27\x00\x00")
DEFAULT = OtherQdisc("noqueue", Handle(0), ROOT)


class Wrapped:
    """A kernel that a test stands in front of."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.readings = 0

    def snapshot(self) -> Snapshot | Unknown:
        self.readings += 1
        return self.kernel.snapshot()

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        return [self.one(operation) for operation in operations]

    def one(self, operation: Operation) -> KernelRefusedError | None:
        return self.kernel.send([operation])[0]


class Sending(Wrapped):
    """Every class has sent one more packet at each reading."""

    def snapshot(self) -> Snapshot | Unknown:
        found = super().snapshot()
        assert isinstance(found, Snapshot)
        moved = {c: ClassCounters(sent_bytes=1500 * self.readings) for c in found.classes}
        return replace(found, counters=moved)


class Silent(Wrapped):
    """Accepts one operation and does nothing."""

    def __init__(self, kernel: FakeKernel, ignored: Operation) -> None:
        super().__init__(kernel)
        self.ignored = ignored

    def one(self, operation: Operation) -> KernelRefusedError | None:
        return None if operation == self.ignored else super().one(operation)


class Refusing(Wrapped):
    """Refuses what it is told to."""

    def __init__(self, kernel: FakeKernel, refused: Callable[[Operation], bool]) -> None:
        super().__init__(kernel)
        self.refused = refused

    def one(self, operation: Operation) -> KernelRefusedError | None:
        return refusal(errno.EPERM) if self.refused(operation) else super().one(operation)


class Blind(Wrapped):
    """Can't be read once something was sent."""

    def snapshot(self) -> Snapshot | Unknown:
        return Unknown("the dump was interrupted") if self.kernel.sent else super().snapshot()


class Queueing(Wrapped):
    """Has packets queued in classes until some time, and says when each operation came."""

    def __init__(self, kernel: FakeKernel, clock: FakeClock, until_ns: dict[Handle, int]) -> None:
        super().__init__(kernel)
        self.clock = clock
        self.until_ns = until_ns
        self.sent_at_ns: list[int] = []

    def snapshot(self) -> Snapshot | Unknown:
        self.readings += 1
        now = self.clock.now_ns()
        counters = {c: ClassCounters(backlog_bytes=1514 * (now < until)) for c, until in self.until_ns.items()}
        return replace(self.kernel.snapshot(), counters=counters)

    def one(self, operation: Operation) -> KernelRefusedError | None:
        self.sent_at_ns.append(self.clock.now_ns())
        return super().one(operation)


def statuses(outcomes: Sequence[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


def first_plan(wanted: Wanted) -> tuple[Operation, ...]:
    return plan(wanted, FakeKernel(ETH0).snapshot()).operations


def test_what_is_accepted_and_shown_again_is_done() -> None:
    wanted = case(ACME, BETA).wanted()
    kernel = FakeKernel(ETH0)
    outcomes = execute(first_plan(wanted), kernel, clock=FakeClock())
    assert outcomes == tuple(Outcome(operation, Status.DONE) for operation in first_plan(wanted))
    assert_tree(kernel.snapshot(), wanted)


def test_nothing_to_do_needs_no_reading_and_sends_nothing() -> None:
    control = Wrapped(FakeKernel(ETH0))
    assert execute((), control, clock=FakeClock()) == ()
    assert (control.readings, control.kernel.sent) == (0, [])


@pytest.mark.parametrize("number", range(len(first_plan(case(ACME, classifier=FW, ports=()).wanted()))))
def test_an_operation_that_was_accepted_but_does_not_hold_is_found(number: int) -> None:
    operations = first_plan(case(ACME, classifier=FW, ports=()).wanted())
    outcomes = execute(operations, Silent(FakeKernel(ETH0), operations[number]), clock=FakeClock())
    assert outcomes[number].status is Status.NOT_HELD
    assert outcomes[number].detail == "accepted, but a reading shows something else"
    assert set(statuses(outcomes[:number])) <= {Status.DONE}


CHANGES = {
    "a tenant that goes": (case(ACME, BETA, classifier=FW), case(BETA, classifier=FW)),
    "a tenant that is raised": (case(ACME), case(tenant(0x2A7, "50M", "1G"))),
    "another program": (case(ACME, ports=(443,)), case(ACME, ports=(8443,))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_was_accepted_but_does_not_hold_is_found(name: str) -> None:
    before, after = (made.wanted() for made in CHANGES[name])
    operations = plan(after, kernel_with(before).snapshot()).operations
    for number, operation in enumerate(operations):
        outcomes = execute(operations, Silent(kernel_with(before), operation), clock=FakeClock())
        assert outcomes[number].status is Status.NOT_HELD


def test_of_two_operations_on_one_object_only_the_last_must_hold() -> None:
    before, after = case(tenant(0x2A7, "25M", "1G")).wanted(), case(tenant(0x2A7, "250M", "500M")).wanted()
    operations = plan(after, kernel_with(before).snapshot()).operations
    assert [type(operation) for operation in operations] == [ChangeClass, ChangeClass, SetLeaf]
    assert statuses(execute(operations, kernel_with(before), clock=FakeClock())) == [Status.DONE] * 3
    outcomes = execute(operations, Silent(kernel_with(before), operations[1]), clock=FakeClock())
    assert statuses(outcomes) == [Status.DONE, Status.NOT_HELD, Status.DONE]


def test_leaves_of_another_kind_are_all_read_back() -> None:
    kernel = kernel_with(case(ACME).wanted())
    after = case(ACME, leaf=LeafKind.BFIFO).wanted()
    outcomes = execute(plan(after, kernel.snapshot()).operations, kernel, clock=FakeClock())
    assert statuses(outcomes) == [Status.DONE] * 10
    assert_tree(kernel.snapshot(), after)


def test_a_leaf_that_was_not_taken_away_is_found() -> None:
    before, after = case(ACME).wanted(), case(ACME, leaf=LeafKind.BFIFO).wanted()
    removal = plan(after, kernel_with(before).snapshot()).operations[0]
    outcomes = execute([removal], Silent(kernel_with(before), removal), clock=FakeClock())
    assert statuses(outcomes) == [Status.NOT_HELD]


def test_one_class_that_is_refused_does_not_stop_the_others() -> None:
    def is_acme(operation: Operation) -> bool:
        return isinstance(operation, AddClass) and operation.spec.classid == ACME_CLASS

    kernel = FakeKernel(ETH0)
    outcomes = execute(first_plan(case(ACME, BETA).wanted()), Refusing(kernel, is_acme), clock=FakeClock())
    refused = [outcome for outcome in outcomes if outcome.status is Status.REFUSED]
    assert [outcome.operation.describe().split(" to ")[0].split(" parent")[0] for outcome in refused] == [
        "add class 20:2a7",
        "set leaf of 20:2a7",
    ]
    assert "the kernel says EPERM" in refused[0].detail
    assert BETA_CLASS in kernel.snapshot().leaves
    assert ACME_CLASS not in kernel.snapshot().classes


@pytest.mark.parametrize("status", [Status.REFUSED, Status.NOT_HELD])
def test_a_root_that_is_not_there_skips_all_the_rest(status: Status) -> None:
    operations = first_plan(case(ACME).wanted())
    kernel = FakeKernel(ETH0)
    control = (
        Silent(kernel, operations[0])
        if status is Status.NOT_HELD
        else Refusing(kernel, lambda operation: isinstance(operation, AddRoot))
    )
    outcomes = execute(operations, control, clock=FakeClock())
    assert statuses(outcomes) == [status, *[Status.SKIPPED] * (len(operations) - 1)]
    assert outcomes[1].detail == "what the tree stands on is not as wanted"
    assert kernel.sent == []


def test_what_can_not_be_read_back_is_unverified_and_a_root_of_that_kind_stops_the_rest() -> None:
    kernel = FakeKernel(ETH0)
    outcomes = execute(first_plan(case(ACME).wanted()), Blind(kernel), clock=FakeClock())
    assert set(statuses(outcomes)) == {Status.UNVERIFIED, Status.SKIPPED}
    assert (outcomes[0].status, outcomes[0].detail) == (Status.UNVERIFIED, "the dump was interrupted")
    assert len(kernel.sent) == 1
    change = ChangeClass(replace(case(ACME).wanted().tree.classes[-1], prio=3))
    assert statuses(execute([change], Blind(kernel_with(case(ACME).wanted())), clock=FakeClock())) == [
        Status.UNVERIFIED
    ]


@pytest.mark.parametrize(
    "until_ns",
    [
        {},
        {ACME_CLASS: 0},
        {ACME_CLASS: 50 * MS},
        {ACME_CLASS: 50 * MS, BETA_CLASS: 130 * MS},
        # A class that stays may queue as much as it likes.
        {Handle(0x20, 2): 10**12},
    ],
)
def test_a_class_whose_owner_left_goes_when_two_readings_show_it_quiet(until_ns: dict[Handle, int]) -> None:
    clock = FakeClock()
    control = Queueing(kernel_with(case(ACME, BETA).wanted()), clock, until_ns)
    operations = plan(case().wanted(), control.kernel.snapshot()).operations
    assert operations == (DeleteClass(BETA_CLASS), DeleteClass(ACME_CLASS))
    assert statuses(execute(operations, control, clock=clock)) == [Status.DONE] * 2
    # What has no counters is not there: nothing to wait for.
    assert control.sent_at_ns == [200 * MS if until_ns.keys() & {ACME_CLASS, BETA_CLASS} else 0] * 2


def test_one_that_still_sends_after_two_seconds_stays_and_the_quiet_one_goes() -> None:
    clock = FakeClock()
    control = Queueing(kernel_with(case(ACME, BETA).wanted()), clock, {ACME_CLASS: 10**12})
    outcomes = execute([DeleteClass(BETA_CLASS), DeleteClass(ACME_CLASS)], control, clock=clock)
    assert statuses(outcomes) == [Status.DONE, Status.BUSY]
    assert "it still sends" in outcomes[1].detail
    assert ACME_CLASS in control.kernel.snapshot().classes
    assert clock.now_ns() == 2_000 * MS


def test_who_may_not_wait_gets_the_quiet_ones_after_two_readings_and_leaves_the_others() -> None:
    clock = FakeClock()
    control = Queueing(kernel_with(case(ACME, BETA).wanted()), clock, {ACME_CLASS: 10**12, BETA_CLASS: 0})
    leaving = [DeleteClass(BETA_CLASS), DeleteClass(ACME_CLASS)]
    outcomes = execute(leaving, control, clock=clock, quiet_within_ns=QUIET_FOR_NS)
    assert statuses(outcomes) == [Status.DONE, Status.BUSY]
    assert clock.now_ns() == QUIET_FOR_NS


def test_one_that_sends_without_ever_queueing_stays_too() -> None:
    clock = FakeClock()
    control = Sending(kernel_with(case(ACME).wanted()))
    assert statuses(execute([DeleteClass(ACME_CLASS)], control, clock=clock)) == [Status.BUSY]


def test_one_that_is_made_anew_elsewhere_is_not_waited_for() -> None:
    clock = FakeClock()
    control = Sending(kernel_with(case(ACME).wanted()))
    wanted = case(ACME, host_traffic=HostTraffic.INSIDE).wanted()
    outcomes = execute(plan(wanted, control.kernel.snapshot()).operations, control, clock=clock)
    assert set(statuses(outcomes)) == {Status.DONE}
    assert_tree(control.kernel.snapshot(), wanted)
    assert clock.now_ns() == 0


def test_many_classes_among_changes_are_waited_for_together_once() -> None:
    many = [tenant(0x100 + number, "25M", "1G") for number in range(16)]
    smaller = [tenant(each.class_id, "10M", "500M") for each in many[::2]]
    clock = FakeClock()
    kernel = kernel_with(case(*many).wanted())
    control = Queueing(kernel, clock, dict.fromkeys(kernel.snapshot().classes, 10**12))
    wanted = case(*smaller).wanted()
    outcomes = execute(plan(wanted, kernel.snapshot()).operations, control, clock=clock)
    assert statuses(outcomes).count(Status.BUSY) == 8
    assert {c.classid for c in wanted.tree.classes} <= set(kernel.snapshot().classes)
    assert clock.now_ns() == 2_000 * MS


def test_nothing_is_deleted_by_what_can_not_be_read() -> None:
    clock = FakeClock()
    control = Blind(kernel_with(case(ACME).wanted()))
    assert statuses(execute([DeleteClass(ACME_CLASS)], control, clock=clock)) == [Status.UNVERIFIED]
    assert ACME_CLASS in control.kernel.snapshot().classes
    assert clock.now_ns() == 0


def test_changes_wait_for_nothing() -> None:
    clock = FakeClock()
    kernel = kernel_with(case(ACME).wanted())
    control = Queueing(kernel, clock, dict.fromkeys(kernel.snapshot().classes, 10**12))
    execute(plan(case(ACME, BETA, budget="5G").wanted(), kernel.snapshot()).operations, control, clock=clock)
    assert clock.now_ns() == 0


WANTED = case(ACME, BETA).wanted()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, ETH0)


def apply(kernel: FakeKernel | Wrapped, journal: Journal, permission: Permission = Permission.NONE) -> Applied:
    return apply_tree(WANTED, kernel, journal, permission=permission, clock=FakeClock())


def remove(kernel: FakeKernel | Wrapped, journal: Journal) -> Applied:
    return remove_tree(kernel, journal, clock=FakeClock())


def codes(applied: Applied) -> list[str]:
    return [note.code for note in applied.plan.notes if note.code != "shape"]


def test_a_second_apply_makes_no_operation(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, DEFAULT)
    assert apply(kernel, journal).exit_code == 0
    assert_tree(kernel.snapshot(), WANTED)
    sent = list(kernel.sent)
    again = apply(kernel, journal)
    assert (again.plan.operations, again.outcomes, again.exit_code) == ((), (), 0)
    assert kernel.sent == sent


def test_a_root_of_somebody_elses_comes_back_byte_for_byte(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, FQ)
    assert apply(kernel, journal, Permission.TAKE_OVER).exit_code == 0
    removed = remove(kernel, journal)
    assert [type(operation) for operation in removed.plan.operations] == [DeleteRoot, RestoreQdisc]
    assert (removed.exit_code, codes(removed), kernel.snapshot().root) == (0, [], FQ)
    assert journal.read() is None


def test_an_mq_comes_back_with_its_children(journal: Journal) -> None:
    mq = OtherQdisc("mq", Handle(0x8001), ROOT)
    children = [OtherQdisc("fq", Handle(0x8002 + n), Handle(0x8001, n + 1), b"\x01") for n in range(4)]
    kernel = FakeKernel(replace(ETH0, tx_queues=4), mq)
    kernel._others = list(children)
    apply(kernel, journal, Permission.TAKE_OVER)
    assert remove(kernel, journal).exit_code == 0
    assert [q for q in kernel.snapshot().verbatim if q.handle.major] == [mq, *children]


def test_what_hung_below_somebodys_classes_does_not_come_back_and_that_is_said(journal: Journal) -> None:
    prio = OtherQdisc("prio", Handle(0x8001), ROOT)
    kernel = FakeKernel(ETH0, prio)
    kernel._others = [OtherQdisc("sfq", Handle(0x8002), Handle(0x8001, 1))]
    apply(kernel, journal, Permission.TAKE_OVER)
    removed = remove(kernel, journal)
    assert (removed.exit_code, codes(removed)) == (0, ["not-restored"])
    assert kernel.snapshot().verbatim == (prio,)


def test_what_the_kernel_chose_by_itself_comes_back_by_itself(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, DEFAULT)
    apply(kernel, journal)
    removed = remove(kernel, journal)
    assert [type(operation) for operation in removed.plan.operations] == [DeleteRoot]
    assert (removed.exit_code, codes(removed), kernel.snapshot().root) == (0, [], DEFAULT)


def test_without_a_journal_the_kernels_default_stays_and_that_is_said(journal: Journal) -> None:
    removed = remove(kernel_with(WANTED), journal)
    assert (removed.exit_code, codes(removed)) == (0, ["no-journal"])


@pytest.mark.parametrize("other", [{"ifindex": 3}, {"boot_id": "x"}, {"network_namespace": 1}, {"version": 2}])
def test_a_journal_of_another_device_boot_or_namespace_is_not_used(journal: Journal, other: dict[str, object]) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    path = journal.path
    path.write_text(json.dumps({**json.loads(path.read_text()), **other}))
    removed = remove(kernel, journal)
    assert (removed.exit_code, codes(removed)) == (0, ["no-journal"])
    assert kernel.snapshot().root != FQ


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1', "\0"])
def test_a_damaged_journal_changes_nothing(journal: Journal, text: str) -> None:
    journal.path.write_text(text)
    ours, bare = kernel_with(WANTED), FakeKernel(ETH0, DEFAULT)
    ours.sent.clear()
    with pytest.raises(StateUnknownError, match=r"can't be read: .*; remove it to uninstall without it"):
        remove(ours, journal)
    with pytest.raises(StateUnknownError, match="can't be read"):
        apply(bare, journal)
    assert (ours.sent, bare.sent) == ([], [])


@pytest.mark.parametrize(
    "qdiscs",
    [
        None,
        [{}],
        [{"kind": "fq"}],
        [{"kind": "fq", "handle": 1, "parent": 0, "options": "g"}],
        [{"kind": "fq", "handle": 1 << 33, "parent": 0, "options": ""}],
    ],
)
def test_a_journal_without_its_qdiscs_is_damaged(journal: Journal, qdiscs: object) -> None:
    journal.write(Former((FQ,)))
    path = journal.path
    path.write_text(json.dumps({**json.loads(path.read_text()), "qdiscs": qdiscs}))
    with pytest.raises(StateUnknownError, match="can't be read"):
        journal.read()


def test_a_removal_that_was_cut_off_half_way_is_finished_by_the_next(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    first = remove(Refusing(kernel, lambda operation: isinstance(operation, RestoreQdisc)), journal)
    assert first.exit_code == 3
    assert kernel.snapshot().root != FQ
    assert journal.read() == Former((FQ,))
    second = remove(kernel, journal)
    assert [type(operation) for operation in second.plan.operations] == [RestoreQdisc]
    assert (second.exit_code, kernel.snapshot().root, journal.read()) == (0, FQ, None)


def test_a_removal_of_nothing_does_nothing(journal: Journal) -> None:
    for root in (None, DEFAULT, FQ):
        kernel = FakeKernel(ETH0, root)
        removed = remove(kernel, journal)
        assert (removed.exit_code, codes(removed), kernel.sent) == (0, ["not-ours"], [])


def test_a_removal_leaves_a_root_alone_that_somebody_put_where_ours_was(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    theirs = OtherQdisc("cake", Handle(0x8009), ROOT)
    kernel._clear(theirs)
    kernel.sent.clear()
    assert remove(kernel, journal).exit_code == 0
    assert (kernel.sent, kernel.snapshot().root) == ([], theirs)


@pytest.mark.parametrize("left", [None, DEFAULT])
def test_a_tree_that_was_deleted_by_hand_and_made_anew_keeps_the_first_former_state(
    journal: Journal, left: OtherQdisc | None
) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    kernel._clear(left)
    assert apply(kernel, journal).exit_code == 0
    assert remove(kernel, journal).exit_code == 0
    assert kernel.snapshot().root == FQ


def test_a_tree_that_is_rebuilt_keeps_the_first_former_state(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    kernel._root = replace(WANTED.tree.htbs[0], direct_qlen_packets=2)
    assert apply(kernel, journal).exit_code == 3
    assert apply(kernel, journal, Permission.DISRUPTION).exit_code == 0
    assert journal.read() == Former((FQ,))


def test_a_refused_plan_touches_neither_kernel_nor_journal(journal: Journal, tmp_path: Path) -> None:
    kernel = FakeKernel(ETH0, FQ)
    applied = apply(kernel, journal)
    assert (applied.exit_code, applied.outcomes, kernel.sent) == (3, (), [])
    assert list(tmp_path.iterdir()) == []


def test_a_former_state_that_can_not_be_kept_stops_the_run_before_it_loses_anything(tmp_path: Path) -> None:
    kernel = FakeKernel(ETH0, FQ)
    with pytest.raises(RefusedError, match="can't be written: No such file or directory; nothing was changed"):
        apply(kernel, Journal(tmp_path / "missing", ETH0), Permission.TAKE_OVER)
    assert kernel.sent == []


def test_an_unknown_state_is_left_as_it_is(journal: Journal) -> None:
    control = Blind(kernel_with(WANTED))
    sent = list(control.kernel.sent)
    for applied in (apply(control, journal), remove(control, journal)):
        assert (applied.exit_code, applied.plan.unknown, applied.outcomes) == (4, "the dump was interrupted", ())
    assert control.kernel.sent == sent


def test_a_removal_that_can_not_be_read_back_keeps_the_journal(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, FQ)
    apply(kernel, journal, Permission.TAKE_OVER)
    kernel.sent.clear()
    assert remove(Blind(kernel), journal).exit_code == 4
    assert journal.read() == Former((FQ,))


def test_a_part_that_did_not_hold_makes_the_run_fail(journal: Journal) -> None:
    kernel = FakeKernel(ETH0, DEFAULT)
    applied = apply(Silent(kernel, first_plan(WANTED)[-1]), journal)
    assert applied.exit_code == 3
    assert apply(kernel, journal).exit_code == 0
    assert_tree(kernel.snapshot(), WANTED)


def test_two_runs_never_program_one_device_at_once(journal: Journal, tmp_path: Path) -> None:
    with journal.locked():
        second = Journal(tmp_path, ETH0)
        with pytest.raises(RefusedError, match="another run is programming this device; wait for it to end"):
            second.locked().__enter__()
    with second.locked():
        pass
