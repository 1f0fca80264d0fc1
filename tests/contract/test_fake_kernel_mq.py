"""The fake kernel against the real one, in all that shape mq is made of: queues, hooks, steering.

As in test_fake_kernel.py: every sequence goes to both; errnos and readings must be the same.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from both_kernels import (
    FIFO,
    FQ_CODEL,
    MQ,
    OTHER_FIFO,
    ROOT_QDISC,
    Live,
    Step,
    assert_same,
    at,
    bpf,
    fake_of,
    fifo_root,
    fw,
    has_xps,
    htb,
    htb_on,
    leaf,
    leaf_on,
    of_major,
    place,
    skip_where_lacking,
)
from kernel_devices import add_device

from kura_shaper.clock import SystemClock
from kura_shaper.kernel import bpf as bpf_door
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.kernel.links import read_device
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.classifier import ETH_P_ALL, ETH_P_IP, ClassifierKind, hook_program
from kura_shaper.tree.ebpf import EbpfProgram, steering_program
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    INGRESS,
    ROOT,
    Bfifo,
    DirectBpf,
    Filter,
    Fq,
    FwMatch,
    Handle,
    HtbQdisc,
    Leaf,
    LeafKind,
    MqQdisc,
    OtherQdisc,
    QueueMapping,
    SteeringKind,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteHook,
    DeleteLeaf,
    DeleteRoot,
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Network

    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.tree.build import Capabilities

pytestmark = pytest.mark.privileged

MARKS = MarkLayout()
OTHER_MQ = MqQdisc(Handle(0x1E))
INGRESS_QDISC = OtherQdisc("ingress", Handle(HOOK.major), HOOK)
# r0 = TCX_PASS; exit
PASS = ((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0))
FQ = Fq(10_000, 100, 3_028, 15_140, 10_000_000)


def program(ports: tuple[int, ...] = (443,)) -> EbpfProgram:
    return steering_program(MARKS, ports, placement={0x2A7: 0}, shaped_queues=1, live_queues=4)


def direct(priority: int = 11, *, ports: tuple[int, ...] = (443,), ethertype: int = ETH_P_ALL) -> Filter:
    made = program(ports)
    return Filter(EGRESS, priority, ethertype, 1, DirectBpf(made.name, made))


def steer(first: int, last: int | None = None, *, priority: int = 11, handle: int = 1) -> Filter:
    match = hook_program(MARKS, [443], matches_host=last is not None)
    return Filter(EGRESS, priority, ETH_P_ALL, handle, match, QueueMapping(first, last))


def steer_mark(minor: int, queue: int, *, mask: int = MARKS.mask, priority: int = 12) -> Filter:
    mark = MARKS.mark(minor)
    return Filter(EGRESS, priority, ETH_P_ALL, mark, FwMatch(mark, mask), QueueMapping(queue))


def fifo_on(queue: int, handle: int, limit_packets: int, *, mq: int = 0x1F) -> RestoreQdisc:
    return RestoreQdisc(replace(fifo_root(handle, limit_packets), parent=place(queue, mq=mq)))


SEQUENCES: dict[str, list[Step]] = {
    # The same mq again keeps everything below it.
    "an mq again": [
        AddRoot(MQ),
        AddRoot(MQ),
        htb_on(0),
        AddClass(htb(5)),
        SetFilter(bpf()),
        leaf_on(1),
        AddRoot(MQ),
        RestoreQdisc(OtherQdisc("mq", MQ.handle, ROOT)),
        AddRoot(OTHER_MQ),
        DeleteRoot(MQ.handle),
        DeleteRoot(OTHER_MQ.handle),
        DeleteRoot(OTHER_MQ.handle),
    ],
    "a root of another kind": [
        AddRoot(ROOT_QDISC),
        AddClass(htb(5)),
        AddRoot(MqQdisc(ROOT_QDISC.handle)),
        SetLeaf(leaf(5, 0x1F)),
        AddRoot(MQ),
        SetLeaf(leaf(5, 0x100)),
        AddRoot(MQ),
        htb_on(0),
        AddRoot(ROOT_QDISC),
        AddRoot(MqQdisc(ROOT_QDISC.handle)),
        AddRoot(HtbQdisc(Handle(0x21), ROOT, 2, 1000)),
        AddRoot(MQ),
        RestoreQdisc(fifo_root(0x1F, 7)),
        RestoreQdisc(fifo_root(7, 7)),
        AddRoot(HtbQdisc(Handle(7), ROOT, 2, 1000)),
        AddRoot(MQ),
    ],
    "queues without an mq": [
        htb_on(0),
        leaf_on(0),
        DeleteLeaf(place(0), Handle(0xB0)),
        AddRoot(ROOT_QDISC),
        htb_on(0, 0x21),
        leaf_on(0),
        AddClass(htb(5)),
        SetLeaf(leaf(5, 0x1F)),
        leaf_on(1),
        DeleteLeaf(place(1), Handle(0xB0)),
        RestoreQdisc(fifo_root(7, 7)),
        leaf_on(0, mq=7),
    ],
    "queues": [
        AddRoot(MQ),
        htb_on(0),
        htb_on(0),
        htb_on(0, default_minor=3),
        htb_on(0, 0x21),
        htb_on(1, 0x22),
        htb_on(2, 0x22),
        leaf_on(2),
        leaf_on(3),
        leaf_on(2, parameters=OTHER_FIFO),
        leaf_on(4),
        leaf_on(3, 0x1F),
        htb_on(3, 0x1F),
        leaf_on(2, 0x21),
        htb_on(2, 0xB0),
        leaf_on(0, 0xB5, mq=0x2F),
        SetLeaf(Leaf(Handle(0xB7), place(3), FIFO)),
        SetLeaf(Leaf(Handle(0xB8), Handle(0xB7, 1), FIFO)),
        fifo_on(3, 0xB9, 7),
        fifo_on(3, 0xB9, 8),
        fifo_on(2, 0xB9, 8),
        fifo_on(9, 0xBA, 8),
        leaf_on(3, 0xB9),
        fifo_on(0, 0xBB, 8, mq=0x2F),
    ],
    # Nothing takes its place: the queue drops every packet, and no dump shows it.
    "what hangs below an mq deleted": [
        AddRoot(MQ),
        DeleteLeaf(place(0), Handle(0)),
        DeleteLeaf(place(0), Handle(7)),
        leaf_on(0),
        DeleteLeaf(place(0), Handle(7)),
        DeleteLeaf(place(0), Handle(0xB0)),
        DeleteLeaf(place(0), Handle(0xB0)),
        DeleteLeaf(place(0), Handle(0)),
        AddRoot(MQ),
        Live(1),
        Live(4),
        leaf_on(0),
        DeleteLeaf(place(0), Handle(0)),
        htb_on(1),
        AddClass(htb(5)),
        SetLeaf(leaf(5, 0x100)),
        DeleteLeaf(at(5), Handle(0)),
        DeleteLeaf(at(5), Handle(0)),
        SetLeaf(leaf(5, 0x100)),
        SetFilter(bpf()),
        DeleteLeaf(place(1), Handle(0x20)),
        AddClass(htb(5)),
        SetFilter(bpf()),
        htb_on(1),
        SetLeaf(leaf(5, 0x100)),
        DeleteLeaf(place(9), Handle(0x20)),
        leaf_on(2, 0x100),
    ],
    "several HTBs": [
        AddRoot(MQ),
        htb_on(0),
        htb_on(1, 0x21),
        AddClass(htb(5)),
        AddClass(of_major(0x21, htb(5))),
        AddClass(of_major(0x21, htb(5))),
        AddClass(of_major(0x21, htb(6, 5))),
        AddClass(replace(htb(6), parent=Handle(0x21, 5))),
        ChangeClass(of_major(0x21, htb(5, ceil=10**8))),
        SetLeaf(leaf(5, 0x100)),
        SetLeaf(Leaf(Handle(0x100), Handle(0x21, 6), FIFO)),
        SetLeaf(Leaf(Handle(0x101), Handle(0x21, 6), FIFO)),
        SetFilter(bpf()),
        SetFilter(bpf(on=Handle(0x21), ethertype=ETH_P_IP)),
        SetFilter(bpf(on=Handle(0x22))),
        DeleteFilter(bpf(on=Handle(0x21))),
        DeleteFilter(bpf()),
        SetFilter(bpf()),
        # A handle below another queue is taken still; one below the HTB that goes is not.
        leaf_on(0, 0x101),
        leaf_on(0, 0x100),
        leaf_on(0, 0xB0),
        htb_on(2),
        AddClass(htb(5)),
        DeleteClass(Handle(0x21, 5)),
        DeleteClass(Handle(0x21, 6)),
        DeleteClass(Handle(0x21, 5)),
    ],
    # An mq's classes are its queues: they can't be made, changed or deleted.
    "classes and filters of an mq": [
        AddRoot(MQ),
        AddClass(of_major(0x1F, htb(1))),
        ChangeClass(of_major(0x1F, htb(1))),
        DeleteClass(place(0)),
        AddClass(of_major(0x1F, htb(9))),
        ChangeClass(of_major(0x1F, htb(9))),
        DeleteClass(place(8)),
        leaf_on(1),
        AddClass(of_major(0xB0, htb(1))),
        ChangeClass(of_major(0xB0, htb(1))),
        DeleteClass(Handle(0xB0, 1)),
        AddClass(of_major(0x77, htb(1))),
        SetFilter(bpf(on=MQ.handle)),
        DeleteFilter(bpf(on=MQ.handle)),
        SetFilter(bpf(on=Handle(0xB0))),
        DeleteFilter(bpf(on=Handle(0xB0))),
        SetFilter(bpf(on=Handle(0x77))),
    ],
    # What was chosen for a dead queue stays, works, and can be replaced. The kernel's own is only hidden.
    "fewer live queues, and more": [
        AddRoot(MQ),
        htb_on(0),
        htb_on(3, 0x21),
        leaf_on(2),
        AddClass(of_major(0x21, htb(5))),
        Live(2),
        AddClass(of_major(0x21, htb(6))),
        SetFilter(bpf(on=Handle(0x21))),
        leaf_on(2, 0xB1),
        leaf_on(1, 0xB2),
        DeleteLeaf(place(2), Handle(0xB1)),
        Live(4),
        Live(1),
        leaf_on(0, 0xB3),
        AddRoot(OTHER_MQ),
        Live(3),
        leaf_on(3, 0xB0, mq=0x1E),
        Live(4),
        AddRoot(MQ),
        Live(2),
        AddRoot(ROOT_QDISC),
        Live(4),
        DeleteRoot(ROOT_QDISC.handle),
        Live(1),
        AddRoot(MQ),
        Live(4),
    ],
    "the hook": [
        SetFilter(bpf(on=EGRESS)),
        DeleteFilter(bpf(on=EGRESS)),
        DeleteHook(),
        AddHook(),
        AddHook(),
        SetFilter(bpf(on=EGRESS)),
        SetFilter(bpf(on=INGRESS, ethertype=ETH_P_IP)),
        AddRoot(MQ),
        htb_on(0),
        SetFilter(bpf(ethertype=ETH_P_IP)),
        DeleteRoot(MQ.handle),
        SetFilter(bpf(on=EGRESS, ethertype=ETH_P_IP)),
        DeleteFilter(bpf(on=EGRESS, priority=120)),
        DeleteFilter(bpf(on=EGRESS)),
        DeleteFilter(bpf(on=EGRESS)),
        SetFilter(bpf(on=EGRESS)),
        AddHook(),
        DeleteHook(),
        DeleteHook(),
        SetFilter(bpf(on=EGRESS)),
        AddHook(),
    ],
    "an ingress qdisc in the hook's place": [
        RestoreQdisc(INGRESS_QDISC),
        AddHook(),
        RestoreQdisc(INGRESS_QDISC),
        # A deletion names no kind.
        DeleteHook(),
        DeleteHook(),
        AddHook(),
        RestoreQdisc(INGRESS_QDISC),
        SetFilter(bpf(on=EGRESS)),
    ],
    # It takes filters for egress without a word, and runs them on what arrives.
    "filters for egress on an ingress qdisc": [
        RestoreQdisc(INGRESS_QDISC),
        SetFilter(bpf(on=EGRESS)),
        SetFilter(bpf(on=INGRESS, ethertype=ETH_P_IP)),
        SetFilter(bpf(110, on=INGRESS)),
        DeleteFilter(bpf(110, on=EGRESS)),
        DeleteFilter(bpf(on=INGRESS)),
        DeleteHook(),
        AddHook(),
    ],
    "the hook's handle is taken": [
        AddRoot(MqQdisc(Handle(0xFFFF))),
        AddHook(),
        DeleteHook(),
        AddRoot(MQ),
        leaf_on(0, 0xFFFF),
        AddHook(),
        DeleteHook(),
        leaf_on(0),
        AddHook(),
        leaf_on(0, 0xFFFF),
        AddRoot(MqQdisc(Handle(0xFFFF))),
    ],
    "eBPF at the hook": [
        SetFilter(direct()),
        AddHook(),
        SetFilter(direct()),
        SetFilter(direct()),
        SetFilter(direct(ports=(443, 444))),
        SetFilter(direct(ethertype=ETH_P_IP)),
        SetFilter(bpf(11, on=EGRESS)),
        SetFilter(direct()),
        SetFilter(direct(12)),
        DeleteFilter(direct(13)),
        DeleteFilter(direct(ports=(445,))),
        DeleteFilter(direct()),
        DeleteFilter(direct(12)),
    ],
    "skbedit": [
        AddRoot(MQ),
        SetFilter(steer(0)),
        AddHook(),
        SetFilter(steer(0)),
        SetFilter(steer(1)),
        SetFilter(steer_mark(0x2A7, 1)),
        SetFilter(steer_mark(0x2A8, 2)),
        SetFilter(steer_mark(0x2A8, 3)),
        SetFilter(steer_mark(0x2A9, 2, mask=0xFF0000)),
        SetFilter(steer_mark(0x2A9, 2, priority=11)),
        SetFilter(steer(1, 3, priority=13)),
        DeleteFilter(steer_mark(0x2A9, 2)),
        DeleteFilter(steer_mark(0x2A8, 2)),
        DeleteFilter(steer(0)),
        DeleteFilter(steer(0)),
    ],
    # Neither the kernel's filter nor its action knows how many queues are live, or were ever made.
    "skbedit to a queue that is not live": [
        AddRoot(MQ),
        AddHook(),
        Live(2),
        SetFilter(steer(3)),
        SetFilter(steer(700)),
        SetFilter(steer(1, 900, priority=13)),
        SetFilter(steer_mark(0x2A7, 70)),
    ],
    "tcx": [
        RemoveTcx(),
        SetTcx(program()),
        SetTcx(program()),
        SetTcx(program((444,))),
        AddRoot(MQ),
        AddHook(),
        DeleteHook(),
        DeleteRoot(MQ.handle),
        RemoveTcx(),
        RemoveTcx(),
    ],
    "XPS": [
        SetXps(0, 1),
        AddRoot(MQ),
        SetXps(0, 3),
        SetXps(3, 2),
        SetXps(4, 1),
        SetXps(0, 0),
        SetXps(0, 0),
        Live(2),
        SetXps(3, 1),
        SetXps(3, 0),
        SetXps(1, 1),
        Live(4),
        SetXps(3, 2),
        DeleteRoot(MQ.handle),
        Live(3),
        Live(4),
    ],
    "fq_codel below an mq": [
        AddRoot(MQ),
        leaf_on(0, parameters=FQ_CODEL),
        leaf_on(0, parameters=FQ_CODEL),
        leaf_on(0),
        htb_on(1),
        leaf_on(1, 0xB1, FQ_CODEL),
        DeleteLeaf(place(1), Handle(0xB1)),
    ],
    "fq below an mq": [
        AddRoot(MQ),
        leaf_on(0, parameters=FQ),
        leaf_on(0, parameters=replace(FQ, limit_packets=5_000)),
        leaf_on(0),
        leaf_on(1, 0xB1, FQ),
        AddRoot(MQ),
        DeleteRoot(MQ.handle),
    ],
    "fw filters in several HTBs": [
        AddRoot(MQ),
        htb_on(0),
        htb_on(1, 0x21),
        AddClass(htb(5)),
        AddClass(of_major(0x21, htb(5))),
        SetFilter(fw(5)),
        SetFilter(replace(fw(5), parent=Handle(0x21), match=FwMatch(5 << 16, 0xFF0000, Handle(0x21, 5)))),
        DeleteClass(at(5)),
        DeleteClass(Handle(0x21, 5)),
        leaf_on(0),
        htb_on(2),
        AddClass(htb(5)),
        DeleteClass(at(5)),
    ],
}

# What was measured, by sequence and step; None is taken without a word.
FACTS: list[tuple[str, int, int | None]] = [
    ("an mq again", 6, None),
    ("a root of another kind", 2, errno.EINVAL),
    ("queues without an mq", 0, errno.ENOENT),
    ("queues", 2, errno.EINVAL),  # an HTB's default can't be changed
    ("queues", 3, errno.EINVAL),
    ("queues", 6, errno.EINVAL),  # the same major twice
    ("queues", 10, errno.ENOENT),  # a queue that was never made
    ("what hangs below an mq deleted", 1, errno.ENOENT),
    ("what hangs below an mq deleted", 6, errno.EINVAL),
    ("several HTBs", 5, errno.EEXIST),
    ("several HTBs", 7, errno.EINVAL),
    ("classes and filters of an mq", 1, errno.EEXIST),
    ("classes and filters of an mq", 2, errno.EOPNOTSUPP),
    ("classes and filters of an mq", 12, errno.EOPNOTSUPP),
    ("fewer live queues, and more", 6, None),
    ("fewer live queues, and more", 8, None),  # a queue that is not live
    ("the hook", 0, errno.EINVAL),
    ("the hook", 2, errno.ENOENT),
    ("the hook", 4, None),
    ("the hook", 11, errno.EINVAL),
    ("the hook", 18, errno.EINVAL),
    ("an ingress qdisc in the hook's place", 1, errno.EINVAL),
    ("an ingress qdisc in the hook's place", 3, None),
    ("an ingress qdisc in the hook's place", 6, errno.EINVAL),
    ("filters for egress on an ingress qdisc", 1, None),
    ("filters for egress on an ingress qdisc", 2, errno.EINVAL),
    ("skbedit to a queue that is not live", 3, None),
    ("skbedit to a queue that is not live", 4, None),
    ("XPS", 4, errno.ENOENT),
    ("XPS", 8, errno.ENOENT),
]


@pytest.mark.parametrize("name", SEQUENCES)
def test_both_kernels_answer_and_hold_the_same(network: Network, capabilities: Capabilities, name: str) -> None:
    steps = SEQUENCES[name]
    skip_where_lacking(steps, network, capabilities)
    try:
        answers = assert_same(network, steps)
    finally:
        network.control().send([RemoveTcx()])  # its pin would outlive the device
    for sequence, number, answer in FACTS:
        if sequence == name:
            assert answers[number] == answer, steps[number]


def any_step(chosen: random.Random, capabilities: Capabilities, *, xps: bool) -> Step:
    """Return a step from a small world, so that many of them meet."""
    pick = chosen.choice
    roots: list[HtbQdisc | MqQdisc] = [MQ, MQ, OTHER_MQ, ROOT_QDISC]
    kinds: list[Bfifo | Fq] = [FIFO, OTHER_FIFO, *([FQ] if LeafKind.FQ in capabilities.leaves else [])]
    queue, major, minor = chosen.randint(0, 4), pick([0x20, 0x21]), chosen.randint(1, 4)
    spec = of_major(major, htb(minor, chosen.randint(0, 3), ceil=pick([10**7, 10**8])))
    below = Leaf(Handle(chosen.randint(0x100, 0x102)), spec.classid, pick([FIFO, OTHER_FIFO]))
    some_bpf = bpf(
        pick([100, 110]),
        ethertype=pick([ETH_P_ALL, ETH_P_ALL, ETH_P_IP]),
        handle=chosen.randint(1, 2),
        on=pick([Handle(0x20), Handle(0x21), EGRESS, EGRESS, INGRESS, MQ.handle]),
    )
    some_direct = direct(pick([100, 110]), ports=pick([(443,), (444,)]))
    parameters = pick(kinds)
    makers: list[tuple[int, Callable[[], Step]]] = [
        (1, lambda: AddRoot(pick(roots))),
        (1, lambda: DeleteRoot(pick([MQ.handle, OTHER_MQ.handle, Handle(0x20)]))),
        (8, lambda: htb_on(queue, pick([0x20, 0x21, 0x22]), default_minor=pick([2, 3]))),
        (6, lambda: leaf_on(queue, pick([0xB0, 0xB1, 0xB2, 0x20, 0x100]), parameters)),
        (3, lambda: fifo_on(queue, pick([0xB0, 0xB3]), 7)),
        (3, lambda: DeleteLeaf(place(queue), Handle(pick([0xB0, 0xB1, 0x20, 0x21, 0])))),
        (4, lambda: Live(chosen.randint(1, 4))),
        (10, lambda: AddClass(spec)),
        (4, lambda: ChangeClass(spec)),
        (4, lambda: DeleteClass(spec.classid)),
        (8, lambda: SetLeaf(below, in_place=chosen.random() < 0.5)),
        (2, lambda: DeleteLeaf(spec.classid, below.handle)),
        (3, AddHook),
        (2, DeleteHook),
        (1, lambda: RestoreQdisc(INGRESS_QDISC)),
        (6, lambda: SetFilter(some_bpf)),
        (3, lambda: DeleteFilter(some_bpf)),
        (3, lambda: SetFilter(some_direct)),
        (1, lambda: DeleteFilter(some_direct)),
    ]
    if SteeringKind.SKBEDIT in capabilities.steering:
        skbedit = pick([steer(queue), steer(1, 3, priority=13), steer_mark(minor, queue)])
        makers += [(4, lambda: SetFilter(skbedit)), (2, lambda: DeleteFilter(skbedit))]
    if ClassifierKind.FW in capabilities.classifiers:
        some_fw = fw(minor)
        makers += [(4, lambda: SetFilter(some_fw)), (2, lambda: DeleteFilter(some_fw))]
    if xps:
        makers.append((3, lambda: SetXps(queue, chosen.randint(0, 1))))
    make: Callable[[], Step]
    weights, functions = zip(*makers, strict=True)
    (make,) = chosen.choices(functions, weights)
    return make()


@pytest.mark.parametrize("seed", range(60))
def test_both_kernels_go_through_any_sequence_alike(network: Network, capabilities: Capabilities, seed: int) -> None:
    chosen, xps = random.Random(seed), has_xps(network)
    assert_same(network, [AddRoot(MQ), *(any_step(chosen, capabilities, xps=xps) for _ in range(60))])


def test_a_device_that_was_made_with_one_queue_takes_no_mq(network: Network) -> None:
    add_device("one0", "veth", num_tx_queues=1, peer={"ifname": "one1"})
    device = read_device("one0")
    for control in (KernelTrafficControl(network.client(), device, clock=SystemClock()), FakeKernel(device)):
        (refused,) = control.send([AddRoot(MQ)])
        assert refused is not None
        assert refused.errno == errno.EOPNOTSUPP


def tcx_names(control: TrafficControl) -> list[str]:
    found = control.snapshot()
    assert isinstance(found, Snapshot), found
    assert found.tcx is not None
    return [each.name for each in found.tcx.programs]


def test_our_program_overtakes_somebody_elses_that_came_first(network: Network, capabilities: Capabilities) -> None:
    steps: list[Step] = [SetTcx(program()), RemoveTcx()]
    skip_where_lacking(steps, network, capabilities)
    real, fake = network.control(), fake_of(network)
    real.send([SetTcx(program())])
    fake.send([SetTcx(program())])
    loaded = bpf_door.load_steering(EbpfProgram(PASS))
    links = [bpf_door.attach_first(loaded, network.device.ifindex)]
    os.close(loaded)
    fake.attach_foreign_tcx(EbpfProgram(PASS).name)
    try:
        assert tcx_names(real) == tcx_names(fake) == [EbpfProgram(PASS).name, program().name]
        for step in (SetTcx(program((444,))), RemoveTcx()):
            assert real.send([step]) == fake.send([step]) == [None]
            assert tcx_names(real) == tcx_names(fake)
    finally:
        real.send([RemoveTcx()])
        os.close(links[0])
