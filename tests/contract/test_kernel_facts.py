"""What the design rests on and no operation can tell: what an operation costs, and what the kernel does in silence.

On the real kernel alone, since the fake carries no packets.
"""

from __future__ import annotations

import select
import socket
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from both_kernels import FIFO, MQ, OTHER_FIFO, Live, Step, has_xps, htb, htb_on, leaf_on, of_major, place
from kernel_devices import set_link, set_live_tx_queues  # both_kernels makes these to be found
from kernel_traffic import send_datagrams, warm_up

from kura_shaper.kernel import wire
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.classifier import ETH_P_ALL, hook_program
from kura_shaper.tree.ebpf import steering_program
from kura_shaper.tree.model import EGRESS, DirectBpf, Filter, Handle, Leaf, MqQdisc
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
    SetFilter,
    SetLeaf,
    SetTcx,
    SetXps,
)
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Network

    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import ClassCounters

pytestmark = pytest.mark.privileged

QUEUES, SLOW = range(4), 5
MAJORS = [0x20 + queue for queue in QUEUES]
RTMGRP_TC = 8
PROGRAM = steering_program(MarkLayout(), [443], placement={}, shaped_queues=1, live_queues=4)
AT_HOOK = Filter(EGRESS, 11, ETH_P_ALL, 1, DirectBpf(PROGRAM.name, PROGRAM))
MATCHING = Filter(Handle(0x20), 100, ETH_P_ALL, 1, hook_program(MarkLayout(), [443], matches_host=False))


def slow(major: int, *, rate: int = 8_000) -> AddClass:
    """Return a class that takes minutes for what a test sends."""
    return AddClass(replace(of_major(major, htb(SLOW)), floor=Rate(rate), ceil=Rate(rate)))


def carry_out(network: Network, *steps: Step) -> None:
    for step in steps:
        if isinstance(step, Live):
            set_live_tx_queues(network, step.count)
        else:
            assert network.control().send([step]) == [None], step


class Loaded:
    """An mq with an HTB on each queue, and a backlog below one of them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        warm_up(network)
        carry_out(network, AddRoot(MQ))
        for queue, major in enumerate(MAJORS):
            below = Leaf(Handle(0x100 + queue), Handle(major, SLOW), FIFO)
            carry_out(network, htb_on(queue, major, default_minor=SLOW), slow(major), SetLeaf(below))

    def load(self) -> None:
        """One flow goes to one queue, whichever it is."""
        send_datagrams(socket.AF_INET, count=60)
        found = self.network.read().counters
        self.major = max(MAJORS, key=lambda major: found[Handle(major, SLOW)].backlog_packets)
        self.queue = MAJORS.index(self.major)
        self.before = self.counters()
        assert self.before.backlog_packets >= 30

    @property
    def other(self) -> int:
        """A live queue that has nothing to do with it."""
        return 1 if self.queue == 0 else 0

    def counters(self) -> ClassCounters:
        return self.network.read().counters[Handle(self.major, SLOW)]


def _class_changes(loaded: Loaded) -> list[Operation]:
    return [ChangeClass(replace(slow(loaded.major, rate=8_800).spec, burst_ticks=99_999, quantum_bytes=2_000))]


def _classes_come_and_go(loaded: Loaded) -> list[Operation]:
    idle = of_major(loaded.major, htb(7))
    below = Leaf(Handle(0x200), idle.classid, FIFO)
    return [AddClass(idle), SetLeaf(below), DeleteClass(idle.classid, only_when_quiet=False)]


def _its_leaf(loaded: Loaded, major: int) -> Leaf:
    return Leaf(Handle(major), Handle(loaded.major, SLOW), OTHER_FIFO)


# What is done before the backlog is there, what is done then, and whether the backlog outlives it.
KEPT: dict[str, tuple[list[Step], Callable[[Loaded], list[Step]]]] = {
    "a class changes": ([], lambda it: [*_class_changes(it)]),
    "idle classes beside it come and go": ([], lambda it: [*_classes_come_and_go(it)]),
    "its leaf changes in place": ([], lambda it: [SetLeaf(_its_leaf(it, 0x100 + it.queue), in_place=True)]),
    "the leaf of another queue's class is replaced": (
        [],
        lambda it: [SetLeaf(Leaf(Handle(0x300), Handle(0x20 + it.other, SLOW), OTHER_FIFO))],
    ),
    "the same mq again": ([], lambda it: [AddRoot(MQ)]),
    "the hook again": ([AddHook()], lambda it: [AddHook()]),
    "filters come and go": (
        [AddHook()],
        lambda it: [SetFilter(MATCHING), SetFilter(AT_HOOK), DeleteFilter(AT_HOOK), DeleteFilter(MATCHING)],
    ),
    "more live queues": ([Live(3)], lambda it: [Live(4)]),
    "fewer live queues": ([Live(2)], lambda it: [Live(3), Live(2)]),
}
LOST: dict[str, tuple[list[Step], Callable[[Loaded], list[Step]]]] = {
    "another queue gets a leaf": ([], lambda it: [leaf_on(it.other)]),
    "another queue gets an HTB": ([], lambda it: [htb_on(it.other, 0x30)]),
    "a queue that is not live gets a leaf": ([Live(2)], lambda it: [leaf_on(3)]),
    "another queue's qdisc is deleted": ([], lambda it: [DeleteLeaf(place(it.other), Handle(0x20 + it.other))]),
    "the first hook": ([], lambda it: [AddHook()]),
    "the hook deleted": ([AddHook()], lambda it: [DeleteHook()]),
    "its leaf replaced": ([], lambda it: [SetLeaf(_its_leaf(it, 0x400))]),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_backlog_and_the_counters_outlive(network: Network, name: str) -> None:
    first, then = KEPT[name]
    loaded = Loaded(network)
    carry_out(network, *first)
    loaded.load()
    carry_out(network, *then(loaded))
    after = loaded.counters()
    assert after.backlog_packets >= loaded.before.backlog_packets - 15  # some have been sent meanwhile
    assert after.sent_packets >= loaded.before.sent_packets > 0
    assert after.dropped_packets == loaded.before.dropped_packets


@pytest.mark.parametrize("name", LOST)
def test_a_backlog_is_lost_uncounted(network: Network, name: str) -> None:
    first, then = LOST[name]
    loaded = Loaded(network)
    carry_out(network, *first)
    loaded.load()
    carry_out(network, *then(loaded))
    after = loaded.counters()
    assert after.backlog_packets == 0
    assert after.dropped_packets == loaded.before.dropped_packets
    # The counters of the class itself stay.
    assert after.sent_packets >= loaded.before.sent_packets > 0


def test_a_child_takes_its_parents_backlog(network: Network) -> None:
    loaded = Loaded(network)
    loaded.load()
    carry_out(network, AddClass(of_major(loaded.major, htb(7, SLOW))))
    after = loaded.counters()
    assert (after.backlog_packets, after.dropped_packets) == (0, loaded.before.dropped_packets)
    assert after.sent_packets >= loaded.before.sent_packets


def test_a_link_that_goes_down_loses_the_backlog_and_keeps_the_tree(network: Network) -> None:
    loaded = Loaded(network)
    loaded.load()
    before = network.read()
    set_link("nic0", state="down")
    set_link("nic0", state="up")
    after = network.read()
    assert loaded.counters().backlog_packets == 0
    assert (after.root, after.queues, after.classes, after.leaves) == (
        before.root,
        before.queues,
        before.classes,
        before.leaves,
    )


def test_a_queue_that_dies_loses_its_backlog_and_keeps_its_tree(network: Network) -> None:
    loaded = Loaded(network)
    for _ in range(50):
        loaded.load()
        if loaded.queue > 0:
            break
    else:
        raise AssertionError("50 flows went to one queue")
    set_live_tx_queues(network, 1)
    assert loaded.counters().backlog_packets == 0
    assert Handle(loaded.major, SLOW) in network.read().classes
    carry_out(network, ChangeClass(slow(loaded.major, rate=16_000).spec))
    set_live_tx_queues(network, 4)
    assert network.read().classes[Handle(loaded.major, SLOW)].floor == Rate(16_000)


def test_another_mq_starts_from_nothing(network: Network) -> None:
    loaded = Loaded(network)
    loaded.load()
    carry_out(network, AddRoot(MqQdisc(Handle(0x1E))))
    found = network.read()
    assert (found.classes, found.htbs) == ({}, ())


def test_tcx_and_xps_cost_nothing(network: Network) -> None:
    found = network.control().snapshot()
    loaded = Loaded(network)
    loaded.load()
    done = False
    if getattr(found, "tcx", None) is not None and found.tcx.supported:  # type: ignore[union-attr]
        carry_out(network, SetTcx(PROGRAM), SetTcx(PROGRAM), RemoveTcx())
        done = True
    if has_xps(network):
        carry_out(network, SetXps(1, 1), SetXps(1, 0))
        done = True
    if not done:
        pytest.skip("this kernel lacks tcx and XPS")
    assert loaded.counters().backlog_packets >= loaded.before.backlog_packets - 15


def test_a_queue_whose_qdisc_was_deleted_drops_everything(network: Network) -> None:
    carry_out(network, AddRoot(MQ), Live(1))
    warm_up(network)
    before = network.sent_bytes()
    send_datagrams(socket.AF_INET, count=10)
    assert network.sent_bytes() - before >= 10 * 100
    carry_out(network, leaf_on(0), DeleteLeaf(place(0), Handle(0xB0)))
    before = network.sent_bytes()
    send_datagrams(socket.AF_INET, count=10)  # the sender is told nothing
    assert network.sent_bytes() == before
    assert place(0) not in network.read().queues


def test_an_mq_lists_as_many_classes_as_queues_were_ever_made(network: Network) -> None:
    carry_out(network, AddRoot(MQ), Live(2))
    listed = subprocess.run(["tc", "class", "show", "dev", "nic0"], check=True, capture_output=True, text=True).stdout
    assert [line.split()[2] for line in listed.splitlines() if line.startswith("class mq")] == [
        str(place(queue)) for queue in QUEUES
    ]
    assert network.control().snapshot().device.tx_queues == 2  # type: ignore[union-attr]


def test_a_root_that_goes_takes_its_children_without_a_word(network: Network) -> None:
    Loaded(network)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as watch:
        watch.bind((0, RTMGRP_TC))
        carry_out(network, DeleteRoot(MQ.handle))
        gone = []
        while select.select([watch], [], [], 0.2)[0]:
            data = memoryview(watch.recv(1 << 20))
            for at in wire.messages(data):
                _, kind, *_ = wire.HEADER.unpack_from(data, at)
                _, _, handle, _, _ = wire.TCMSG.unpack_from(data, at + wire.HEADER.size)
                gone.append((kind, Handle.from_u32(handle)))
    assert [each for each in gone if each[0] in (wire.Message.DELQDISC, wire.Message.DELTCLASS)] == [
        (wire.Message.DELQDISC, MQ.handle)
    ]


def test_a_kernel_that_matches_no_marks_by_u32_matches_all_and_says_nothing(network: Network) -> None:
    warm_up(network)
    carry_out(network, AddRoot(MQ), Live(1), htb_on(0, default_minor=2))
    carry_out(network, AddClass(htb(2)), AddClass(htb(SLOW)))
    match = "filter add dev nic0 parent 20: protocol all prio 5 u32 match mark 0x2a70000 0xffff0000 classid 20:5"
    added = subprocess.run(["tc", *match.split()], check=False, capture_output=True, text=True)
    assert added.returncode == 0, added.stderr
    shown = subprocess.run(
        ["tc", "filter", "show", "dev", "nic0", "parent", "20:"], check=True, capture_output=True, text=True
    ).stdout
    if "mark" in shown:
        pytest.skip("this kernel has u32's match of marks")
    before = network.read().counters[Handle(0x20, SLOW)].sent_packets
    send_datagrams(socket.AF_INET, count=10)
    assert network.read().counters[Handle(0x20, SLOW)].sent_packets - before >= 10


def test_a_filter_for_a_class_that_is_missing_sends_to_the_default(network: Network) -> None:
    warm_up(network)
    carry_out(network, AddRoot(MQ), Live(1), htb_on(0, default_minor=2), AddClass(htb(2)))
    # It returns class 2 of major 0, or all ones: neither is a class here.
    carry_out(network, SetFilter(MATCHING))
    before = network.read().counters[Handle(0x20, 2)].sent_packets
    send_datagrams(socket.AF_INET, mark=0x02A70000, count=10)
    assert network.read().counters[Handle(0x20, 2)].sent_packets - before >= 10


def test_skbedit_to_a_queue_that_is_not_live_is_taken_and_ignored(network: Network) -> None:
    add = "filter add dev nic0 egress protocol all prio 1 matchall action skbedit queue_mapping 7"
    subprocess.run(["tc", "qdisc", "add", "dev", "nic0", "clsact"], check=True)
    added = subprocess.run(["tc", *add.split()], check=False, capture_output=True, text=True)
    if added.returncode != 0:
        pytest.skip(f"this kernel lacks matchall or skbedit: {added.stderr.splitlines()[0]}")
    carry_out(network, AddRoot(MQ), *(htb_on(queue, major) for queue, major in enumerate(MAJORS)))
    carry_out(network, *(AddClass(of_major(major, htb(2))) for major in MAJORS))
    for port in range(20_000, 20_100):
        send_datagrams(socket.AF_INET, source_port=port)
    sent = [network.read().counters[Handle(major, 2)].sent_packets for major in MAJORS]
    assert all(sent)
