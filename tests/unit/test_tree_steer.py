"""Which way packets are steered, that each way sends them to one and the same queue, and what spoils it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FOREIGN_PROGRAM, OURS_BY_NAME, Case, case, mq_case, mq_cases, snapshot_of, tenant, unshaped
from test_tree_classifier import ACK, IPV4, PUSH, TCP, UDP, ipv4, tcp, udp
from test_tree_classifier import run as run_classic
from test_tree_ebpf import HASH, Packet
from test_tree_ebpf import run as run_ebpf

from kura_shaper.tenants.marks import PROOF_CLASS, TENANT_CLASS_MIN
from kura_shaper.tree.ebpf import TcxProgram, TcxState
from kura_shaper.tree.model import (
    EGRESS,
    HTB_HANDLE,
    INGRESS,
    BpfMatch,
    DirectBpf,
    Filter,
    FwMatch,
    HostTraffic,
    OtherMatch,
    QueueMapping,
    Shape,
    SteeringKind,
)
from kura_shaper.tree.steer import (
    InForce,
    choose_steering,
    has_foreign_filter,
    limits_of,
    steering_cautions,
    steering_faults,
    steering_in_force,
)

if TYPE_CHECKING:
    from kura_shaper.tree.model import Tree
    from kura_shaper.tree.snapshot import Snapshot

SKBEDIT, BPF, TCX = SteeringKind
ALL, NO_TCX = frozenset(SteeringKind), frozenset({SKBEDIT, BPF})
OUTSIDE, INSIDE = HostTraffic.OUTSIDE, HostTraffic.INSIDE
FOREIGN_TCX = InForce(foreign_tcx=("cil_to_netdev", "14"))
FOREIGN_FIRST = InForce(has_foreign_filter=True)
TCX_AHEAD = "tcx program cil_to_netdev, 14 runs ahead of the egress hook"
FILTER_AHEAD = "a filter of somebody else's comes first on the egress hook"


@pytest.mark.parametrize(
    ("proven", "in_force", "host_traffic", "kind", "why"),
    [
        (ALL, InForce(), OUTSIDE, SKBEDIT, "it was seen to reach its queue"),
        (frozenset({BPF, TCX}), InForce(), OUTSIDE, BPF, "this kernel has no act_skbedit"),
        (frozenset({TCX}), InForce(), OUTSIDE, TCX, "this kernel has no act_skbedit"),
        (frozenset(), InForce(), OUTSIDE, None, "no way of steering was proven on this kernel"),
        (ALL, InForce(), INSIDE, None, "host traffic under the budget needs one tree for all queues"),
        # What could end the chain before ours.
        (ALL, FOREIGN_TCX, OUTSIDE, TCX, f"{TCX_AHEAD}, so ours goes first as a tcx link"),
        (
            NO_TCX,
            FOREIGN_TCX,
            OUTSIDE,
            None,
            f"{TCX_AHEAD} and may end the chain before ours, and this kernel has no tcx",
        ),
        (ALL, FOREIGN_FIRST, OUTSIDE, TCX, f"{FILTER_AHEAD}, so ours goes first as a tcx link"),
        (
            NO_TCX,
            FOREIGN_FIRST,
            OUTSIDE,
            None,
            f"{FILTER_AHEAD} and may end the chain before ours, and this kernel has no tcx",
        ),
        (
            ALL,
            InForce(hook="ingress"),
            OUTSIDE,
            TCX,
            "an ingress qdisc holds the hook's place, so ours is a tcx link",
        ),
        (NO_TCX, InForce(hook="ingress"), OUTSIDE, None, "an ingress qdisc holds the place of clsact"),
        (ALL, InForce(hook="clsact"), OUTSIDE, SKBEDIT, "it was seen to reach its queue"),
        # tcx stays, the others give way to a better one.
        (ALL, InForce(steering=TCX), OUTSIDE, TCX, "it is in force"),
        (ALL, replace(FOREIGN_TCX, steering=TCX), OUTSIDE, TCX, "it is in force"),
        (NO_TCX, InForce(steering=TCX), OUTSIDE, SKBEDIT, "it was seen to reach its queue"),
        (ALL, InForce(steering=BPF), OUTSIDE, SKBEDIT, "it was seen to reach its queue"),
        (
            ALL,
            replace(FOREIGN_FIRST, steering=SKBEDIT),
            OUTSIDE,
            TCX,
            f"{FILTER_AHEAD}, so ours goes first as a tcx link",
        ),
        (ALL, InForce(steering=TCX), INSIDE, None, "host traffic under the budget needs one tree for all queues"),
    ],
)
def test_the_best_way_that_nothing_can_get_ahead_of_is_taken(
    proven: frozenset[SteeringKind],
    in_force: InForce,
    host_traffic: HostTraffic,
    kind: SteeringKind | None,
    why: str,
) -> None:
    assert choose_steering(proven, in_force, host_traffic=host_traffic) == (kind, why)


def test_what_a_way_can_not_do_is_said_and_goes_with_the_need_for_no_xps() -> None:
    assert [kind.needs_xps_off for kind in SteeringKind] == [False, True, True]
    assert limits_of(SKBEDIT) == ""
    assert limits_of(BPF) == limits_of(TCX)
    assert limits_of(TCX).endswith("until it is idle or new; XPS must stay off on every queue")


def hook_of(made: Case) -> list[str]:
    """The filters on the egress hook as one line each: priority, handle, what, action."""
    found = [f for f in made.wanted().tree.filters if f.parent == EGRESS]
    return [f"{f.priority} {f.handle:x} {type(f.match).__name__} {f.action}" for f in found]


def test_all_that_is_shaped_goes_to_the_first_queue_then_each_to_its_own_and_the_rest_is_spread() -> None:
    fleet = mq_case(tenant(0x2A7, "100M"), tenant(0x2B0, "90M"), tenant(0x2C0, "80M"), shaped=3, live=8)
    assert hook_of(fleet) == [
        "11 1 BpfMatch QueueMapping(first=0, last=None)",
        "12 210000 FwMatch QueueMapping(first=1, last=None)",
        "12 220000 FwMatch QueueMapping(first=2, last=None)",
        "12 2b00000 FwMatch QueueMapping(first=1, last=None)",
        "12 2c00000 FwMatch QueueMapping(first=2, last=None)",
        "13 1 BpfMatch QueueMapping(first=3, last=7)",
    ]


def test_with_one_shaped_queue_no_tenant_needs_a_filter_of_its_own() -> None:
    assert hook_of(mq_case(tenant(0x2A7), tenant(0x2B0))) == [
        "11 1 BpfMatch QueueMapping(first=0, last=None)",
        "13 1 BpfMatch QueueMapping(first=1, last=3)",
    ]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_where_every_queue_is_shaped_the_host_has_none_to_itself(count: int) -> None:
    tree = mq_case(shaped=count, live=count).wanted(InForce(Shape.MQ)).tree
    assert {f.priority for f in tree.filters if f.parent == EGRESS} <= {11, 12}
    assert len(tree.queues) == len(tree.htbs) == count


def test_a_program_is_one_filter_on_the_hook_or_none_as_a_tcx_link() -> None:
    bpf, link = (mq_case(tenant(0x2A7), steering=kind) for kind in (BPF, TCX))
    assert hook_of(bpf) == ["11 1 DirectBpf None"]
    assert hook_of(link) == []
    trees = [made.wanted().tree for made in (bpf, link)]
    assert [tree.has_hook for tree in trees] == [True, False]
    programs = [tree.steering.program for tree in trees if tree.steering]
    assert programs[0] == programs[1]


def hook_queue(tree: Tree, packet: bytes, mark: int) -> int | None:
    """The queue index that the hook's filters leave; the chain always goes on, so the last match counts."""
    queue = None
    for found in sorted((f for f in tree.filters if f.parent == EGRESS), key=lambda f: f.key):
        assert found.action is not None
        match found.match:
            case BpfMatch(instructions):
                result = run_classic(instructions, packet, mark=mark, ethertype=IPV4)
                assert result in (0, 0xFFFFFFFF)
                is_match = result != 0
            case FwMatch(wanted, mask, classid):
                assert classid is None
                is_match = mark & mask == wanted
            case other:
                raise AssertionError(other)
        if is_match:
            first, last = found.action.first, found.action.last
            queue = first if last is None else first + HASH % (last - first + 1)
    return queue


def program_queue(tree: Tree, packet: bytes, mark: int) -> int | None:
    assert tree.steering
    assert tree.steering.program
    mapping = run_ebpf(tree.steering.program, Packet(packet, mark=mark))
    return mapping - 1 if mapping else None


def queues_for(made: Case, packet: bytes, mark: int) -> set[int | None]:
    """The queue of a packet by every way of steering."""
    trees = [
        replace(made, capabilities=replace(made.capabilities, steering=frozenset({kind}))).wanted().tree
        for kind in SteeringKind
    ]
    return {hook_queue(trees[0], packet, mark), *(program_queue(tree, packet, mark) for tree in trees[1:])}


HOST_PACKET = ipv4(TCP, tcp(22, PUSH, b"x"))


@settings(deadline=None, max_examples=60)
@given(mq_cases(), st.integers(0, 0xFFFFFFFF), st.data())
@pytest.mark.case("D3")
def test_all_marks_of_one_tenant_map_to_the_one_queue_that_has_its_class(
    made: Case, noise: int, data: st.DataObject
) -> None:
    """Case D3."""
    marks, tree = made.document.marks, made.wanted().tree
    classes = [spec.classid for spec in tree.classes if spec.classid.minor >= TENANT_CLASS_MIN]
    assert sorted(classid.minor for classid in classes) == [t.class_id for t in made.document.tenants]
    for classid in data.draw(st.lists(st.sampled_from(classes), max_size=3)) if classes else []:
        mark = marks.mark(classid.minor) | noise & ~marks.mask
        assert queues_for(made, HOST_PACKET, mark) == {classid.major - HTB_HANDLE.major}


@settings(deadline=None, max_examples=30)
@given(mq_cases(), st.integers(1, 0xFFFF), st.integers(0, 15))
def test_a_proof_goes_to_its_queue_and_a_mark_without_a_place_to_the_first(
    made: Case, class_id: int, proof: int
) -> None:
    marks, shaped = made.document.marks, made.settings.shaped_queues
    proven = queues_for(made, HOST_PACKET, marks.mark(PROOF_CLASS + proof))
    assert proven == {proof if proof < shaped else 0}
    class_id = min(class_id, marks.mask >> marks.shift)
    placed = {t.class_id for t in made.document.tenants} | {*range(PROOF_CLASS, PROOF_CLASS + shaped)}
    if class_id not in placed:
        assert queues_for(made, HOST_PACKET, marks.mark(class_id)) == {0}


@settings(deadline=None, max_examples=30)
@given(mq_cases())
def test_unmarked_packets_of_the_gateway_are_shaped_and_the_hosts_are_not(made: Case) -> None:
    shaped, live = made.settings.shaped_queues, made.device.tx_queues
    for port in made.document.gateway.ports:
        for packet in (ipv4(TCP, tcp(port, ACK)), ipv4(TCP, tcp(port, PUSH, b"x")), ipv4(UDP, udp(port))):
            assert queues_for(made, packet, 0) == {0}
    assert queues_for(made, HOST_PACKET, 0) == {shaped + HASH % (live - shaped) if live > shaped else None}


FLEET = mq_case(tenant(0x2A7), tenant(0x2B0), shaped=2)
BY_BPF, BY_TCX = (replace(FLEET, capabilities=replace(FLEET.capabilities, steering=frozenset({k}))) for k in (BPF, TCX))


def reading(made: Case) -> Snapshot:
    return snapshot_of(made.wanted(), made.device)


def with_programs(actual: Snapshot, *programs: TcxProgram) -> Snapshot:
    return replace(actual, tcx=TcxState(supported=True, programs=programs))


def with_filter(actual: Snapshot, found: Filter) -> Snapshot:
    return replace(actual, filters=(*actual.filters, found))


def with_live(actual: Snapshot, live: int) -> Snapshot:
    return replace(actual, device=replace(actual.device, tx_queues=live))


SOUND, BPF_SOUND, TCX_SOUND = (reading(made) for made in (FLEET, BY_BPF, BY_TCX))
UNSTEERED = replace(SOUND, filters=())
FOREIGN_FILTER = Filter(EGRESS, 10, 3, 1, OtherMatch("matchall"))
MAY_END = "and may end the chain before ours"
XPS_SET = "XPS is set on tx queue 1, 3 and overrides steering"
XPS_UNREAD = "XPS can't be read, and would override steering"
TOO_FEW = "2 queues are shaped and only 1 are live: the kernel ignores a queue beyond them"
BEHIND = "a filter of somebody else's comes before ours on the egress hook and may end the chain"


@pytest.mark.parametrize(
    ("actual", "kind", "faults"),
    [
        (SOUND, SKBEDIT, []),
        (BPF_SOUND, BPF, []),
        (TCX_SOUND, TCX, []),
        (UNSTEERED, None, ["nothing steers packets to the shaped queues"]),
        (replace(UNSTEERED, tcx=None), None, ["nothing steers packets to the shaped queues"]),
        (with_programs(UNSTEERED, FOREIGN_PROGRAM), None, ["nothing steers packets to the shaped queues"]),
        # Others ahead of ours.
        (
            with_programs(SOUND, FOREIGN_PROGRAM, replace(FOREIGN_PROGRAM, program_id=14, name="")),
            SKBEDIT,
            [f"tcx program cil_to_netdev, 14 runs ahead of the egress hook {MAY_END}"],
        ),
        (
            with_programs(BPF_SOUND, FOREIGN_PROGRAM),
            BPF,
            [f"tcx program cil_to_netdev runs ahead of the egress hook {MAY_END}"],
        ),
        (with_filter(SOUND, FOREIGN_FILTER), SKBEDIT, [BEHIND]),
        (with_filter(BPF_SOUND, FOREIGN_FILTER), BPF, [BEHIND]),
        (with_filter(SOUND, replace(FOREIGN_FILTER, priority=14)), SKBEDIT, []),
        (with_filter(SOUND, replace(FOREIGN_FILTER, parent=INGRESS)), SKBEDIT, []),
        (with_filter(TCX_SOUND, FOREIGN_FILTER), TCX, []),
        (with_programs(TCX_SOUND, OURS_BY_NAME, FOREIGN_PROGRAM), TCX, []),
        (
            with_programs(TCX_SOUND, FOREIGN_PROGRAM, OURS_BY_NAME),
            TCX,
            ["tcx program cil_to_netdev comes before ours and may end the chain"],
        ),
        (
            with_programs(TCX_SOUND, replace(FOREIGN_PROGRAM, name=""), OURS_BY_NAME),
            TCX,
            ["tcx program 9 comes before ours and may end the chain"],
        ),
        # D16: XPS overrides what only writes a wish.
        (replace(SOUND, xps={1: 1, 3: 8}), SKBEDIT, []),
        (replace(SOUND, xps=None), SKBEDIT, []),
        (replace(BPF_SOUND, xps={3: 8, 1: 1}), BPF, [XPS_SET]),
        (replace(TCX_SOUND, xps={3: 8, 1: 1}), TCX, [XPS_SET]),
        (replace(TCX_SOUND, xps=None), TCX, [XPS_UNREAD]),
        # Channels that went (D5).
        (with_live(SOUND, 2), SKBEDIT, []),
        (with_live(SOUND, 1), SKBEDIT, [TOO_FEW]),
        (
            replace(with_live(with_filter(BPF_SOUND, FOREIGN_FILTER), 1), xps=None),
            BPF,
            [BEHIND, TOO_FEW, XPS_UNREAD],
        ),
    ],
)
def test_what_speaks_against_steering_is_said_a_line_each(
    actual: Snapshot, kind: SteeringKind | None, faults: list[str]
) -> None:
    assert steering_in_force(actual) is kind
    assert list(steering_faults(actual)) == faults


def test_without_an_mq_of_ours_there_is_nothing_to_speak_against() -> None:
    assert steering_faults(reading(case(tenant(0x2A7)))) == ()
    assert steering_faults(unshaped(FLEET.device)) == ()


@pytest.mark.parametrize(
    "found",
    [
        Filter(EGRESS, 11, 3, 1, BpfMatch(((6, 0, 0, 0),))),
        Filter(EGRESS, 11, 3, 1, OtherMatch("bpf")),
        Filter(EGRESS, 12, 3, 1, FwMatch(1, 0xFFFF0000), QueueMapping(1)),
        Filter(EGRESS, 12, 3, 1, DirectBpf("ks_0123456789ab")),
        Filter(INGRESS, 11, 3, 1, DirectBpf("ks_0123456789ab")),
    ],
)
def test_a_filter_that_only_resembles_ours_steers_nothing(found: Filter) -> None:
    assert steering_in_force(with_filter(UNSTEERED, found)) is None


def test_what_hangs_behind_ours_or_elsewhere_is_not_ahead() -> None:
    assert has_foreign_filter(with_filter(SOUND, FOREIGN_FILTER))
    for found in (replace(FOREIGN_FILTER, priority=11), replace(FOREIGN_FILTER, parent=INGRESS)):
        assert not has_foreign_filter(with_filter(SOUND, found))


@pytest.mark.parametrize("kind", SteeringKind)
def test_what_steers_already_stays_when_a_probe_proves_nothing(kind: SteeringKind) -> None:
    in_force = InForce(Shape.MQ, shaped_queues=1, steering=kind)
    chosen, why = choose_steering((), in_force, host_traffic=HostTraffic.OUTSIDE)
    assert (chosen, why) == (kind, "it is in force, though nothing was proven on this kernel just now")


def test_xps_by_rx_queue_overrides_what_only_wishes_for_a_queue() -> None:
    for kind, faulty in ((SKBEDIT, False), (BPF, True), (TCX, True)):
        actual = replace(reading(mq_case(tenant(0x2A7), steering=kind)), xps_rxqs=frozenset({2, 1}))
        said = ("XPS by rx queue (xps_rxqs) is set on tx queue 1, 2 and overrides steering: write 0 to it",)
        assert steering_faults(actual) == (said if faulty else ())


@pytest.mark.parametrize("kind", SteeringKind)
def test_what_comes_after_ours_is_no_fault_and_is_said(kind: SteeringKind) -> None:
    actual = reading(mq_case(tenant(0x2A7), steering=kind))
    assert steering_cautions(actual) == ()
    after = Filter(EGRESS, 20, 3, 1, OtherMatch("bpf"))
    programs = (*(actual.tcx.programs if actual.tcx else ()), TcxProgram(9, "cil_to_netdev", is_ours=False))
    odd = replace(actual, filters=(*actual.filters, after), tcx=TcxState(supported=True, programs=programs))
    said = steering_cautions(odd)
    assert said[-1].startswith("filter prio 20 of somebody else's runs after ours on the egress hook and could choose")
    assert (len(said) == 2) is (kind is TCX)
    assert steering_cautions(replace(odd, root=None, filters=(), tcx=None)) == ()


def test_a_second_program_of_ours_is_a_fault() -> None:
    actual = reading(mq_case(tenant(0x2A7), steering=TCX))
    assert actual.tcx is not None
    twice = TcxState(supported=True, programs=(*actual.tcx.programs, *actual.tcx.programs))
    assert "left over from another run" in steering_faults(replace(actual, tcx=twice))[0]
