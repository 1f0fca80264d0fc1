"""Faults of other shapers that can be seen without a kernel, each by its id in tests/README.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ETH0, Case, case, mq_case, tenant, unshaped

from kura_shaper.clock import FakeClock
from kura_shaper.errors import DocumentError, KuraShaperError
from kura_shaper.kernel import wire
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.dump import read_snapshot
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import plan, plan_removal
from kura_shaper.tree.model import (
    HOOK,
    ROOT,
    Fq,
    Handle,
    HostTraffic,
    HtbQdisc,
    Leaf,
    LeafKind,
    OtherQdisc,
    SteeringKind,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteRoot,
    RestoreQdisc,
    SetLeaf,
    SetQueue,
)
from kura_shaper.tree.params import LINE_RATE, htb_class, leaf_parameters
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kura_shaper.tree.model import Tree
    from kura_shaper.tree.operations import Operation

ROOT_QDISC = HtbQdisc(Handle(0x20), ROOT, 0x12, 1000)
SPEC = htb_class(Handle(0x20, 0x2A7), Handle(0x20), floor=Rate(10**6), ceil=Rate(10**9), prio=1, device=ETH0)
FQ = Leaf(Handle(0x2A7), SPEC.classid, leaf_parameters(LeafKind.FQ, Rate(10**9), ETH0))


# Netlink.


@dataclass
class Counting:
    """A netlink socket that keeps what was sent and acknowledges it."""

    sent: list[bytes] = field(default_factory=list)

    def send(self, data: bytes) -> int:
        self.sent.append(bytes(data))
        return len(data)

    def recvmsg_into(self, buffers: list[bytearray]) -> tuple[int, list[Any], int, None]:
        (first,) = buffers
        sequence = [header[3] for header in self.headers(self.sent[-1])][-1]
        wire.HEADER.pack_into(first, 0, 36, wire.NLMSG_ERROR, 0x100, sequence, 0)
        struct.pack_into("=i", first, wire.HEADER.size, 0)
        return 36, [], 0, None

    def headers(self, data: bytes) -> Iterator[tuple[int, ...]]:
        for at in wire.messages(memoryview(data)):
            yield wire.HEADER.unpack_from(data, at)

    @property
    def kinds(self) -> list[int]:
        return [header[1] for data in self.sent for header in self.headers(data)]


OPERATIONS: list[Operation] = [
    AddRoot(ROOT_QDISC),
    AddClass(SPEC),
    ChangeClass(SPEC),
    SetLeaf(FQ),
    DeleteClass(SPEC.classid),
    RestoreQdisc(OtherQdisc("pfifo", Handle(0x99), ROOT)),
    DeleteRoot(Handle(0x20)),
]


@pytest.mark.case("C3")
@pytest.mark.parametrize("count", [1, 255, 256, 257, 1_000])
def test_every_operation_is_sent_once_before_the_call_returns(count: int) -> None:
    """Case C3: a request that is lazy sends nothing until somebody asks for its answer."""
    operations = [OPERATIONS[at % len(OPERATIONS)] for at in range(count)]
    with TcClient() as client:
        client._socket.close()
        fake = Counting()
        client._socket = fake  # type: ignore[assignment]
        client.close = lambda: None  # type: ignore[method-assign]
        client.send(operations, 7)
    expected = [struct.unpack_from("=H", wire.encode(operation, 7), 4)[0] for operation in operations]
    assert fake.kinds == expected
    # A class and its leaf are never parted, so a send may be one longer than the others.
    assert len(fake.sent) <= -(-count // 256)


# Readings.


class Canned(TcClient):
    """Answers each dump with messages made beforehand."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        super().__init__()
        self._answers = answers

    def dump(self, request: bytes, each: Callable[[memoryview, int, int], None]) -> None:
        for data in self._answers.pop(0):
            each(memoryview(data), wire.HEADER.size, len(data))


def reading(qdiscs: Iterable[bytes], classes: Iterable[bytes] = ()) -> Snapshot:
    with Canned([list(qdiscs), list(classes), [], [], []]) as client:
        found = read_snapshot(client, replace(ETH0, ifindex=7), clock=FakeClock())
    assert isinstance(found, Snapshot), found
    return found


def with_attributes(data: bytes, more: bytes) -> bytes:
    grown = data + more
    return struct.pack("=I", len(grown)) + grown[4:]


def foreign(kind: bytes, options: bytes) -> bytes:
    body = wire.attribute(wire.TCA_KIND, kind + b"\0") + wire.attribute(wire.TCA_OPTIONS, options)
    above = SPEC.classid.u32
    message = wire.Message.NEWQDISC
    return wire.message(message, 0, ifindex=7, handle=0x990000, parent=above, info=0, body=body)


# Attribute types that no kernel has yet: those in use end below 64.
UNKNOWN = st.tuples(st.integers(64, 0x3FFF), st.binary(max_size=64)).map(lambda a: wire.attribute(*a))


@pytest.mark.case("C10")
@settings(deadline=None)
@given(
    more=st.lists(UNKNOWN, max_size=4).map(b"".join),
    kind=st.sampled_from([b"cake", b"fq_pie", b"dualpi2", b"fq_codel", b"bfifo", b"fq", b"mqprio", b"\xff\xfe"]),
    options=st.binary(max_size=80),
)
def test_attributes_and_kinds_of_no_known_meaning_stop_no_reading(more: bytes, kind: bytes, options: bytes) -> None:
    """Case C10: a newer kernel tells more, and what others hung below our class is theirs."""
    root, one = (wire.encode(operation, 7) for operation in (AddRoot(ROOT_QDISC), AddClass(SPEC)))
    found = reading([with_attributes(root, more), foreign(kind, options)], [with_attributes(one, more)])
    assert (found.root, found.classes) == (ROOT_QDISC, {SPEC.classid: SPEC})
    assert SPEC.classid in found.leaves


@pytest.mark.case("C10")
@pytest.mark.parametrize("size", [0, 1, 11])
def test_counters_that_a_kernel_does_not_tell_are_none_and_stop_no_reading(size: int) -> None:
    """Case C10: statistics of another kind, or none."""
    stats = wire.attribute(wire.TCA_STATS2, wire.attribute(77, bytes(size))) if size else b""
    one = with_attributes(wire.encode(AddClass(SPEC), 7), stats)
    assert reading([wire.encode(AddRoot(ROOT_QDISC), 7)], [one]).counters[SPEC.classid].sent_bytes == 0


# Handles.


@pytest.mark.case("D2")
@pytest.mark.parametrize("class_id", [0xFFFF, 0x10000, 65544, 0xFF])
def test_a_tenant_beyond_the_last_class_is_refused_by_name(class_id: int) -> None:
    """Case D2: 65544 was a minor that ran over into the major."""
    text = (
        "apiVersion: kura-shaper/v1\nkind: Tenants\nregion: r\n"
        f"tenants:\n  - {{name: acme, class: 0x2a7}}\n  - {{name: zeta, class: {class_id:#x}}}\n"
    )
    with pytest.raises(DocumentError, match=rf"class {class_id:#x} is out of range") as refused:
        parse_tenants(text, file="t.yaml")
    assert "zeta" in str(refused.value) or ":6:" in str(refused.value)
    assert "0x100 to 0xfffe" in refused.value.remedy


@pytest.mark.case("D2")
@pytest.mark.parametrize("made", [case(tenant(0xFFFE)), mq_case(tenant(0xFFFE), shaped=2)])
def test_the_last_class_has_its_place_and_its_leaf_a_major_of_its_own(made: Case) -> None:
    """Case D2: one major on two parents is what the kernel refuses."""
    tree = made.wanted().tree
    (last,) = (c for c in tree.classes if c.classid.minor == 0xFFFE)
    (leaf,) = (one for one in tree.leaves if one.parent == last.classid)
    assert leaf.handle == Handle(0xFFFE)
    majors = [tree.root.handle.major, *(q.handle.major for q in tree.queues), *(q.handle.major for q in tree.leaves)]
    assert len(majors) == len(set(majors))


# Kinds.


HTB_LEAVES = {("htb", str(kind)) for kind in LeafKind}
# What stands at the device, or below an mq, or below a class: no other pair was ever tried by anyone here.
PAIRS = {("device", "htb"), ("device", "mq"), ("mq", "htb"), ("mq", "fq"), ("mq", "fq_codel")} | HTB_LEAVES
HOOK_PAIR = ("device", "clsact")


def every_case() -> Iterator[Case]:
    """Every choice that decides on a kind of qdisc."""
    leaf_sets = [set(c) for size in (1, 2, 3) for c in combinations(LeafKind, size)]
    for leaf, leaves, classifier in product(LeafKind, leaf_sets, ClassifierKind):
        for made in (
            *(case(tenant(0x2A7), leaf=leaf, classifier=classifier, host_traffic=place) for place in HostTraffic),
            *(
                mq_case(tenant(0x2A7), tenant(0x2A8), shaped=shaped, steering=steering, classifier=classifier)
                for shaped in (1, 2, 4)
                for steering in SteeringKind
            ),
        ):
            capable = replace(made.capabilities, leaves=frozenset(leaves))
            yield replace(made, settings=replace(made.settings, leaf=leaf), capabilities=capable)


def pairs_made(tree: Tree, operations: Iterable[Operation]) -> Iterator[tuple[str, str]]:
    """Yield the kinds of parent and child of every qdisc that the operations make."""
    kinds = {tree.root.handle.major: tree.root.kind}
    kinds |= {htb.handle.major: "htb" for htb in tree.htbs}

    def above(parent: Handle) -> str:
        return "device" if parent in (ROOT, HOOK) else str(kinds[parent.major])

    for operation in operations:
        match operation:
            case AddRoot(qdisc):
                yield above(qdisc.parent), qdisc.kind
            case SetQueue(qdisc):
                yield above(qdisc.parent), qdisc.kind if isinstance(qdisc, HtbQdisc) else str(qdisc.parameters.kind)
            case SetLeaf(leaf):
                yield above(leaf.parent), str(leaf.parameters.kind)
            case AddHook():
                yield above(HOOK), "clsact"


@pytest.mark.case("D13")
def test_no_other_pair_of_parent_and_child_is_ever_made() -> None:
    """Case D13: odd pairs have crashed and stalled kernels."""
    made: set[tuple[str, str]] = set()
    for each in every_case():
        wanted = each.wanted()
        made.update(pairs_made(wanted.tree, plan(wanted, unshaped(each.device)).operations))
    assert made == PAIRS | {HOOK_PAIR}


@pytest.mark.case("D13")
@pytest.mark.case("A11")
def test_a_tree_is_never_deeper_than_the_kernel_allows() -> None:
    """Cases A11 and D13: HTB has 8 levels; ours use 3, whatever the document says."""
    for each in every_case():
        above = {c.classid: c.parent for c in each.wanted().tree.classes}
        for classid in above:
            depth, place = 0, classid
            while place in above:
                depth, place = depth + 1, above[place]
            assert depth <= 3


@pytest.mark.case("D14")
def test_a_removal_without_a_reading_removes_nothing() -> None:
    """Case D14: the reading that failed was taken for an empty kernel elsewhere."""
    assert plan_removal(Unknown("no answer")).operations == ()
    assert plan(case(tenant(0x2A7)).wanted(), Unknown("no answer")).operations == ()


# fq.


CEILINGS = [Rate(64_000), Rate(10**8), Rate(25 * 10**9), LINE_RATE]
FQ_LOW_RATE, FQ_DEFAULT_RATE, FQ_MAX_RATE = 11, 6, 7


def fqs() -> Iterator[Fq]:
    for each in every_case():
        tree = each.wanted().tree
        for leaf in (*tree.leaves, *tree.queues):
            if isinstance(leaf, Leaf) and isinstance(leaf.parameters, Fq):
                yield leaf.parameters


@pytest.mark.case("E6")
@pytest.mark.case("E7")
def test_every_fq_has_limits_quanta_and_a_horizon_that_are_chosen_and_bounded() -> None:
    """Cases E6 and E7: 100 packets a flow dropped within single connections; a huge quantum locked up."""
    found = {*fqs(), *(p for rate in CEILINGS if isinstance(p := leaf_parameters(LeafKind.FQ, rate, ETH0), Fq))}
    assert found
    for fq in found:
        assert 1_000 <= fq.flow_limit_packets <= fq.limit_packets <= 10_240
        assert ETH0.frame_bytes <= fq.quantum_bytes <= fq.initial_quantum_bytes <= 64 * ETH0.frame_bytes
        assert 1_000_000 <= fq.horizon_us <= 60_000_000
        assert fq.horizon_drop


@pytest.mark.case("E8")
def test_no_rate_is_ever_given_to_an_fq() -> None:
    """Case E8: its maxrate is one flow's, so it would be no tenant's ceiling."""
    assert not [name for name in Fq.__slots__ if "rate" in name]
    for fq in fqs():
        for operation in (
            SetLeaf(Leaf(Handle(0x2A7), SPEC.classid, fq)),
            SetQueue(Leaf(Handle(0xB0), SPEC.classid, fq)),
        ):
            data = memoryview(wire.encode(operation, 7))
            attributes = wire.spans(data, wire.HEADER.size + wire.TCMSG.size, len(data))
            options = wire.spans(data, *attributes[wire.TCA_OPTIONS])
            assert options.keys().isdisjoint({FQ_DEFAULT_RATE, FQ_MAX_RATE, FQ_LOW_RATE})


@pytest.mark.case("E10")
@pytest.mark.parametrize("wanted", list(LeafKind))
def test_a_kernel_that_lacks_a_kind_of_leaf_is_said_to_by_name(wanted: LeafKind) -> None:
    """Case E10: in either shape, and in the words of what comes instead."""
    for made in (case(tenant(0x2A7), leaf=wanted), mq_case(tenant(0x2A7))):
        lacking = replace(
            made,
            settings=replace(made.settings, leaf=wanted),
            capabilities=replace(made.capabilities, leaves=frozenset(LeafKind) - {wanted}),
        )
        (note,) = (n for n in lacking.wanted().notes if n.code == "leaf-degraded")
        assert note.message.startswith(f"the kernel has no {wanted}: leaves are ")
    with pytest.raises(KuraShaperError, match="no usable leaf qdisc"):
        replace(made, capabilities=replace(made.capabilities, leaves=frozenset())).wanted()
