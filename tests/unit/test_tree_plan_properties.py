"""Between any two trees, and from any damage, every plan is safe at each step and ends where it should."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Case, assert_tree, cases, fork, kernel_with

from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree.classifier import ETH_P_ALL, MARK_PRIORITY
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import (
    HTB_HANDLE,
    Filter,
    FlowerMatch,
    FqCodel,
    FwMatch,
    Handle,
    HtbClass,
    Leaf,
    OtherMatch,
    OtherQdisc,
)
from kura_shaper.tree.operations import (
    AddClass,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteLeaf,
    Impact,
    SetFilter,
    SetLeaf,
)
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.kernel.fake import FakeKernel
    from kura_shaper.tree.model import Tree
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """Two cases on one kernel: another kind of classifier is another root, which has a test of its own."""
    before, after = draw(cases()), draw(cases())
    kinds = replace(after.capabilities, classifiers=before.capabilities.classifiers)
    return before, replace(after, capabilities=kinds)


planned = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

QDISC, ROOT_CLASS, HOST, BUDGET = (Handle(HTB_HANDLE.major, minor) for minor in (0, *sorted(ReservedClass)[:3]))


def named_class(found: Filter) -> Handle | None:
    """The class that a filter sends to; a program names none, it returns a number."""
    return found.match.classid if isinstance(found.match, FwMatch | FlowerMatch) else None


def touched_class(operation: Operation) -> Handle | None:
    match operation:
        case AddClass(spec) | ChangeClass(spec):
            return spec.classid
        case DeleteClass(classid):
            return classid
        case SetLeaf(leaf):
            return leaf.parent
        case DeleteLeaf(parent):
            return parent
        case SetFilter(filter_) | DeleteFilter(filter_):
            return named_class(filter_)
    return None


def assert_safe(actual: Snapshot) -> None:
    """What must hold between any two operations, for it is what a crash leaves behind."""
    classes = actual.classes
    for spec in classes.values():
        assert spec.floor <= spec.ceil, spec
        if spec.parent != QDISC:
            assert spec.ceil <= classes[spec.parent].ceil, spec
    promised = sum(spec.floor.bits_per_second for spec in classes.values() if spec.parent == BUDGET)
    assert promised == 0 or promised <= classes[BUDGET].floor.bits_per_second
    # Unmatched packets go to the default class when it is a leaf, else past all classes: never nowhere.
    assert HOST not in classes or HOST in actual.leaves
    assert {named_class(f) for f in actual.filters} - {None} <= classes.keys()


def parts_by_class(tree: Tree) -> dict[Handle, tuple[HtbClass, Leaf | None, frozenset[Filter]]]:
    leaves = {leaf.parent: leaf for leaf in tree.leaves}
    return {
        spec.classid: (
            spec,
            leaves.get(spec.classid),
            frozenset(f for f in tree.filters if named_class(f) == spec.classid),
        )
        for spec in tree.classes
    }


def carry_out(kernel: FakeKernel, operation: Operation) -> None:
    (refused,) = kernel.send([operation])
    assert refused is None, refused


def finish(kernel: FakeKernel, case: Case) -> None:
    """Plan again from wherever the kernel is, carry it out, and have the wanted tree."""
    wanted = case.wanted()
    for operation in plan(wanted, kernel.snapshot()).operations:
        carry_out(kernel, operation)
    assert_tree(kernel.snapshot(), wanted)
    assert plan(wanted, kernel.snapshot()).operations == ()


@settings(planned, max_examples=100)
@given(pairs(), st.integers(0, 80))
def test_every_step_from_one_tree_to_another_is_safe_and_the_last_ends_there(pair: tuple[Case, Case], cut: int) -> None:
    before, after = pair
    kernel = kernel_with(before.wanted(), before.device)
    wanted = after.wanted()
    operations = plan(wanted, kernel.snapshot()).operations
    cut %= len(operations) + 1
    for number, operation in enumerate(operations):
        if number == cut:
            finish(fork(kernel), after)
        carry_out(kernel, operation)
        assert_safe(kernel.snapshot())
    assert_tree(kernel.snapshot(), wanted)
    assert plan(wanted, kernel.snapshot()).operations == ()


@settings(planned, max_examples=40)
@given(cases())
def test_every_step_from_nothing_is_safe(case: Case) -> None:
    wanted = case.wanted()
    kernel = kernel_with(wanted)
    kernel._clear(None)
    for operation in plan(wanted, kernel.snapshot()).operations:
        carry_out(kernel, operation)
        assert_safe(kernel.snapshot())
    finish(kernel, case)


@settings(planned, max_examples=60)
@given(pairs())
def test_what_is_equal_in_both_trees_is_not_touched(pair: tuple[Case, Case]) -> None:
    before, after = pair
    kernel = kernel_with(before.wanted(), before.device)
    old, new = (parts_by_class(case.wanted().tree) for case in (before, after))
    equal = {classid for classid in old.keys() & new.keys() if old[classid] == new[classid]}
    operations = plan(after.wanted(), kernel.snapshot()).operations
    assert {touched_class(operation) for operation in operations}.isdisjoint(equal)
    assert Impact.DEVICE_LOSS not in {operation.impact for operation in operations}


@dataclass(frozen=True)
class Damage:
    """What somebody did to a tree by hand."""

    act: Callable[..., None]
    arguments: tuple[object, ...]

    def __call__(self, kernel: FakeKernel) -> None:
        self.act(kernel, *self.arguments)


ANYWHERE = (QDISC, ROOT_CLASS, HOST, BUDGET, *(Handle(HTB_HANDLE.major, TENANT_CLASS_MIN + n) for n in range(3)))
FOREIGN_MINORS = [0x04, 0x0F, 0x13, 0x40, 0xFF]
FOREIGN_FILTER = Filter(QDISC, 50, ETH_P_ALL, 1, OtherMatch("u32"))


def send(kernel: FakeKernel, *operations: Operation) -> None:
    """What the kernel refuses to have damaged stays whole."""
    kernel.send(operations)


def lose_class(kernel: FakeKernel, classid: Handle) -> None:
    send(kernel, *(DeleteFilter(f) for f in kernel.snapshot().filters if named_class(f) == classid))
    send(kernel, DeleteClass(classid))


def misplace_class(kernel: FakeKernel, classid: Handle, parent: Handle) -> None:
    """The filters stay, so that the kernel calls the class busy when it is to be moved back."""
    spec, filters = kernel._classes.get(classid), dict(kernel._filters)
    lose_class(kernel, classid)
    if spec is not None and classid not in kernel._classes:
        send(kernel, AddClass(replace(spec, parent=parent)))
        kernel._filters = filters


def lose_leaf(kernel: FakeKernel, classid: Handle) -> None:
    if classid in kernel._leaves:
        kernel._leaves[classid] = OtherQdisc("pfifo", Handle(0), classid)


def swap_leaf(kernel: FakeKernel, classid: Handle, kind: str) -> None:
    leaf = kernel._leaves.get(classid)
    if leaf is not None:
        kernel._leaves[classid] = OtherQdisc(kind, leaf.handle, classid)


def resize_leaf(kernel: FakeKernel, classid: Handle) -> None:
    leaf = kernel._leaves.get(classid)
    if isinstance(leaf, Leaf) and isinstance(leaf.parameters, FqCodel):
        kernel._leaves[classid] = replace(leaf, parameters=replace(leaf.parameters, flows=64, limit_packets=9))


def renumber_leaf(kernel: FakeKernel, classid: Handle) -> None:
    leaf = kernel._leaves.get(classid)
    if leaf is not None:
        kernel._leaves[classid] = replace(leaf, handle=Handle(0xB0))


def edit_class(kernel: FakeKernel, classid: Handle, floor: Rate, ceil: Rate) -> None:
    spec = kernel._classes.get(classid)
    if spec is not None:
        send(kernel, ChangeClass(replace(spec, floor=floor, ceil=ceil, prio=spec.prio + 1)))


def lose_filter(kernel: FakeKernel, number: int) -> None:
    filters = kernel.snapshot().filters
    if filters:
        send(kernel, DeleteFilter(filters[number % len(filters)]))


def misdirect_filter(kernel: FakeKernel, number: int, classid: Handle) -> None:
    filters = [f for f in kernel.snapshot().filters if isinstance(f.match, FwMatch | FlowerMatch)]
    if filters and classid in kernel._classes:
        found = filters[number % len(filters)]
        assert isinstance(found.match, FwMatch | FlowerMatch)
        send(kernel, SetFilter(replace(found, match=replace(found.match, classid=classid))))


def add_class(kernel: FakeKernel, classid: Handle, parent: Handle) -> None:
    rate = Rate(8_000_000)
    send(kernel, AddClass(HtbClass(classid, parent, rate, rate, 15_625, 15_625, 1514, 3)))


def add_filter(kernel: FakeKernel, filter_: Filter) -> None:
    send(kernel, SetFilter(filter_))


OUR_CLASSES = st.sampled_from(
    [Handle(HTB_HANDLE.major, m) for m in (*ReservedClass, *range(0x100, 0x106), 0x200, 0xFFFE)]
)
SPARE_CLASSES = st.sampled_from([Handle(HTB_HANDLE.major, m) for m in (*FOREIGN_MINORS, 0x101, 0x1AB, 0xABCD)])
PARENTS, NUMBERS = st.sampled_from(ANYWHERE), st.integers(0, 40)
ODD_FILTERS = st.sampled_from(
    [
        FOREIGN_FILTER,
        Filter(QDISC, MARK_PRIORITY, ETH_P_ALL, 7, OtherMatch("u32")),
        Filter(QDISC, MARK_PRIORITY, ETH_P_ALL, 0x7, FwMatch(0x7, 0xFFFFFFFF, HOST)),
        Filter(QDISC, 110, ETH_P_ALL, 1, OtherMatch("matchall")),
    ]
)
FLOORS = st.sampled_from([8, 1_000_000, 10**12]).map(Rate)


def done(act: Callable[..., None], *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Damage]:
    return st.builds(Damage, st.just(act), st.tuples(*arguments))


DAMAGES = st.lists(
    st.one_of(
        done(lose_class, OUR_CLASSES),
        done(misplace_class, OUR_CLASSES, PARENTS),
        done(lose_leaf, OUR_CLASSES),
        done(swap_leaf, OUR_CLASSES, st.sampled_from(["sfq", "pfifo"])),
        done(resize_leaf, OUR_CLASSES),
        done(renumber_leaf, OUR_CLASSES),
        done(edit_class, OUR_CLASSES, FLOORS, FLOORS),
        done(lose_filter, NUMBERS),
        done(misdirect_filter, NUMBERS, OUR_CLASSES),
        done(add_class, SPARE_CLASSES, PARENTS),
        done(add_filter, ODD_FILTERS),
    ),
    min_size=1,
    max_size=8,
)


def is_foreign(classid: Handle) -> bool:
    return classid.minor < TENANT_CLASS_MIN and classid.minor not in frozenset(ReservedClass)


@settings(planned, max_examples=100)
@given(pairs(), DAMAGES)
def test_any_damage_is_mended_and_what_is_foreign_is_left_alone_and_noted(
    pair: tuple[Case, Case], damages: list[Damage]
) -> None:
    before, after = pair
    kernel = kernel_with(before.wanted(), before.device)
    for damage in damages:
        damage(kernel)
    damaged, wanted = kernel.snapshot(), after.wanted()
    repair = plan(wanted, damaged)
    for operation in repair.operations:
        carry_out(kernel, operation)
    assert plan(wanted, kernel.snapshot()).operations == ()

    foreign = {classid: spec for classid, spec in kernel.snapshot().classes.items() if is_foreign(classid)}
    deleted = {operation.classid for operation in repair.operations if isinstance(operation, DeleteClass)}
    inner = {leaf.parent for leaf in wanted.tree.leaves} | deleted
    for classid, spec in damaged.classes.items():
        if is_foreign(classid):
            assert (classid in foreign) == (spec.parent not in inner)
            assert foreign.get(classid, spec) == spec
    noted = [note.message for note in repair.notes if note.code == "foreign-class"]
    left = [f"class {classid} is not of our making and was left alone" for classid in foreign]
    assert [message for message in noted if message.endswith("was left alone")] == left
    assert (FOREIGN_FILTER in damaged.filters) == ("foreign-filter" in {note.code for note in repair.notes})
    assert (FOREIGN_FILTER in damaged.filters) == (FOREIGN_FILTER in kernel.snapshot().filters)

    for classid in sorted(foreign, reverse=True):
        send(kernel, DeleteClass(classid))
    kernel._filters.pop(FOREIGN_FILTER.key, None)
    assert_tree(kernel.snapshot(), wanted)


@settings(planned, max_examples=40)
@given(cases(), DAMAGES, st.integers(0, 80))
def test_a_repair_that_is_cut_off_is_finished_by_the_next_plan(case: Case, damages: list[Damage], cut: int) -> None:
    wanted = case.wanted()
    kernel = kernel_with(wanted, case.device)
    for damage in damages:
        damage(kernel)
    operations = plan(wanted, kernel.snapshot()).operations
    for operation in operations[: cut % (len(operations) + 1)]:
        carry_out(kernel, operation)
    for operation in plan(wanted, kernel.snapshot()).operations:
        carry_out(kernel, operation)
    assert plan(wanted, kernel.snapshot()).operations == ()
