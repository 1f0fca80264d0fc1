"""A reading is the whole truth about one device, or it is Unknown; and Unknown never writes."""

from __future__ import annotations

import errno
import os
import select
import shlex
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_trees import ACME, BUDGET, MBIT, ROOT_HANDLE, ZETA, differences, htb_class, tenant, wanted
from pyroute2 import IPRoute

from kura_shaper.clock import FakeClock, SystemClock
from kura_shaper.kernel import wire
from kura_shaper.kernel.apply import apply_tree, remove_tree
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.dump import read_snapshot
from kura_shaper.kernel.journal import Former, Journal
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import ROOT, Handle, HtbQdisc, OtherMatch, OtherQdisc
from kura_shaper.tree.operations import AddClass, AddRoot, Operation
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Network

pytestmark = pytest.mark.privileged

QDISC = HtbQdisc(ROOT_HANDLE, ROOT, 2, 1000)
MANY = 1_000  # classes: their dump takes several receives
TC_GROUP = 1 << 3  # RTNLGRP_TC


def tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True, capture_output=True)


def send(network: Network, *operations: Operation) -> None:
    refused = network.client().send(operations, network.device.ifindex)
    assert not any(refused), refused


def put_tree(network: Network, capabilities: Any, *, classes: int = 2) -> Any:
    made = wanted(network.device, capabilities, *(tenant(Handle(0x20, 0x100 + n), floor=0) for n in range(classes)))
    send(network, *plan(made, network.read()).operations)
    return made


# Whose is what.


@pytest.mark.case("C2")
def test_of_two_devices_only_the_one_asked_for_is_read(network: Network, capabilities: Any) -> None:
    """Case C2."""
    made = put_tree(network, capabilities)
    with IPRoute() as ip:
        ip.link("add", ifname="nic1", kind="veth", peer={"ifname": "up1"}, num_tx_queues=4)
    for line in ("qdisc add dev nic1 root handle 20: htb default 9", "class add dev nic1 parent 20: classid 20:9 htb"):
        tc(*line.split(), *(("rate", "1mbit") if "class" in line else ()))
    tc("qdisc", "add", "dev", "nic1", "parent", "20:9", "handle", "9:", "bfifo")
    assert differences(made, network.read()) == []
    assert {q.handle for q in network.read().verbatim}.isdisjoint({Handle(9)})


FOREIGN: list[tuple[str, list[str]]] = [
    (
        "a shaper below a class of ours",
        ["qdisc replace dev nic0 parent 20:2a8 handle 99: tbf rate 1mbit burst 9k limit 9k"],
    ),
    (
        "a filter on our root",
        ["filter add dev nic0 parent 20: prio 7 protocol ip u32 match ip dst 10.0.0.1 classid 20:2a7"],
    ),
    (
        "a program on the egress hook",
        [
            "qdisc add dev nic0 clsact",
            "filter add dev nic0 egress prio 1 protocol all bpf da bytecode '1,6 0 0 4294967295'",
        ],
    ),
    (
        "an ingress qdisc",
        [
            "qdisc add dev nic0 ingress",
            "filter add dev nic0 ingress prio 1 protocol ip u32 match ip dst 10.0.0.1 classid 1:1",
        ],
    ),
    ("another class", ["class add dev nic0 parent 20:1 classid 20:99 htb rate 1mbit"]),
]


@pytest.mark.parametrize("commands", [c for _, c in FOREIGN], ids=[what for what, _ in FOREIGN])
@pytest.mark.case("C10")
def test_what_is_not_ours_stops_no_reading(network: Network, capabilities: Any, commands: list[str]) -> None:
    """Case C10."""
    made = put_tree(network, capabilities, classes=0x1A9)
    for command in commands:
        tc(*shlex.split(command))
    after = network.read()
    assert {c.classid: c for c in made.tree.classes}.items() <= after.classes.items()
    assert after.root == made.tree.root
    assert set(made.tree.filters) <= set(after.filters)
    assert {f.match for f in after.filters} - {f.match for f in made.tree.filters} <= {
        OtherMatch("u32"),
        OtherMatch("bpf"),
    }


def test_an_htb_that_somebody_hung_below_a_class_of_ours_is_not_taken_for_ours(
    network: Network, capabilities: Any
) -> None:
    made = put_tree(network, capabilities, classes=0x1A9)
    tc("qdisc", "replace", "dev", "nic0", "parent", "20:2a7", "handle", "50:", "htb", "default", "200")
    tc("class", "add", "dev", "nic0", "parent", "50:", "classid", "50:200", "htb", "rate", "1mbit")
    after = network.read()
    assert set(after.classes) == {c.classid for c in made.tree.classes}
    leaf = after.leaves[ACME]
    assert isinstance(leaf, OtherQdisc)
    assert (leaf.kind, leaf.handle) == ("htb", Handle(0x50))


def test_a_root_that_was_deleted_by_hand_is_seen_to_be_gone(network: Network, capabilities: Any) -> None:
    put_tree(network, capabilities)
    tc("qdisc", "del", "dev", "nic0", "root")
    after = network.read()
    assert after.root == OtherQdisc("noqueue", Handle(0), ROOT)
    assert (after.classes, after.leaves, after.filters) == ({}, {}, ())


def test_reading_needs_no_privilege(
    network: Network,
    capabilities: Any,
    in_child: Callable[[Callable[[], None]], Any],
    drop_capabilities: Callable[[], None],
) -> None:
    made = put_tree(network, capabilities, classes=MANY)

    def unprivileged() -> None:
        drop_capabilities()
        with TcClient() as client:
            found = read_snapshot(client, network.device, clock=SystemClock())
        assert isinstance(found, Snapshot), found
        print(differences(made, found))

    ended = in_child(unprivileged)
    assert ended.stdout == "[]\n", ended.stderr


@pytest.mark.case("C4")
def test_a_thousand_readings_open_nothing_that_stays_open(network: Network, capabilities: Any) -> None:
    """Case C4."""
    put_tree(network, capabilities)
    control = network.control()
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(1_000):
        assert isinstance(control.snapshot(), Snapshot)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


# Faults, injected where the socket is read.


Fault = Callable[[memoryview], memoryview]
ALWAYS = 1_000_000


class Faulty(TcClient):
    """Something goes wrong at one receive or several, until it is mended."""

    def __init__(self, fault: Fault, *, at: int = 0, times: int = 1) -> None:
        super().__init__()
        self._fault, self._at, self.times = fault, at, times

    def _receive(self) -> memoryview:
        view = super()._receive()
        self._at -= 1
        if self._at >= 0 or self.times == 0:
            return view
        self.times -= 1
        return self._fault(view)


def lost(_view: memoryview) -> memoryview:
    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


def silent(_view: memoryview) -> memoryview:
    raise TimeoutError


def denied(_view: memoryview) -> memoryview:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def signalled(_view: memoryview) -> memoryview:
    raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))


def interrupted(view: memoryview) -> memoryview:
    """The kernel's own mark of a dump that a change ran through."""
    length, kind, flags, sequence, port = wire.HEADER.unpack_from(view)
    wire.HEADER.pack_into(view, 0, length, kind, flags | wire.NLM_F_DUMP_INTR, sequence, port)
    return view


def refused(view: memoryview) -> memoryview:
    _, _, _, sequence, _ = wire.HEADER.unpack_from(view)
    length = wire.HEADER.size + 4 + wire.HEADER.size
    wire.HEADER.pack_into(view, 0, length, wire.NLMSG_ERROR, 0x100, sequence, 0)
    struct.pack_into("=i", view, wire.HEADER.size, -errno.EPERM)
    return view[:length]


def broken_off(view: memoryview) -> memoryview:
    """The end of a dump that says it failed."""
    _, _, _, sequence, _ = wire.HEADER.unpack_from(view)
    length = wire.HEADER.size + 4
    wire.HEADER.pack_into(view, 0, length, wire.NLMSG_DONE, 0, sequence, 0)
    struct.pack_into("=i", view, wire.HEADER.size, -errno.EIO)
    return view[:length]


def garbled(view: memoryview) -> memoryview:
    struct.pack_into("=I", view, 0, 3)
    return view


PASSING = [lost, interrupted, broken_off]
LASTING: list[tuple[Fault, str]] = [
    (lost, "the tree changed during every reading of it, or answers were lost"),
    (interrupted, "the tree changed during every reading of it, or answers were lost"),
    (broken_off, "the tree changed during every reading of it, or answers were lost"),
    (silent, "the kernel did not answer a dump"),
    (denied, "a dump failed: Operation not permitted"),
    (signalled, "a dump failed: Interrupted system call"),
    (refused, "reading the tree: the kernel says EPERM"),
    (garbled, "a netlink message is malformed"),
]


@pytest.fixture
def faulty() -> Iterator[Callable[..., Faulty]]:
    opened: list[Faulty] = []

    def make(fault: Fault, **when: int) -> Faulty:
        opened.append(Faulty(fault, **when))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


def control_of(client: TcClient, network: Network) -> KernelTrafficControl:
    return KernelTrafficControl(client, network.device, clock=SystemClock())


# Receive 0 is the qdiscs, 1 the end of that dump or classes, and so on; 6 is amid the classes.
@pytest.mark.parametrize("at", [0, 1, 3, 6])
@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.case("C6")
def test_a_dump_that_broke_off_is_read_again_and_nothing_is_seen_twice_or_missed(
    network: Network,
    capabilities: Any,
    faulty: Callable[..., Faulty],
    fault: Fault,
    at: int,
) -> None:
    """Case C6."""
    made = put_tree(network, capabilities, classes=MANY)
    found = control_of(faulty(fault, at=at), network).snapshot()
    assert isinstance(found, Snapshot), found
    assert differences(made, found) == []


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize(("fault", "reason"), LASTING)
def test_what_can_not_be_read_whole_is_unknown_and_the_next_reading_is_right(
    network: Network,
    capabilities: Any,
    faulty: Callable[..., Faulty],
    fault: Fault,
    reason: str,
    at: int,
) -> None:
    made = put_tree(network, capabilities, classes=MANY)
    client = faulty(fault, at=at, times=ALWAYS)
    control = control_of(client, network)
    found = control.snapshot()
    assert isinstance(found, Unknown), "a reading that failed looked like one"
    assert reason in found.reason
    # The same socket goes on: what a broken dump left behind must not spoil what follows.
    client.times = 0
    later = control.snapshot()
    assert isinstance(later, Snapshot), later
    assert differences(made, later) == []


@pytest.mark.parametrize(("fault", "_reason"), LASTING)
@pytest.mark.case("D14")
def test_unknown_never_leads_to_a_write(
    network: Network,
    capabilities: Any,
    faulty: Callable[..., Faulty],
    tmp_path: Path,
    fault: Fault,
    _reason: str,
) -> None:
    """Case D14."""
    made = put_tree(network, capabilities)
    other = wanted(network.device, capabilities, tenant(ACME), budget=5_000 * MBIT)
    journal = Journal(tmp_path, network.device)
    journal.write(Former((OtherQdisc("pfifo", Handle(0x99), ROOT),)))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as heard:
        heard.bind((0, TC_GROUP))
        control = control_of(faulty(fault, times=ALWAYS), network)
        everything = Permission.DISRUPTION | Permission.TAKE_OVER
        applied = apply_tree(other, control, journal, permission=everything, clock=FakeClock())
        removed = remove_tree(control, journal, clock=FakeClock())
        assert select.select([heard], [], [], 0)[0] == []
    assert (applied.exit_code, removed.exit_code) == (4, 4)
    assert (applied.outcomes, removed.outcomes) == ((), ())
    assert differences(made, network.read()) == []
    assert journal.read() is not None


class ReadsOnce(KernelTrafficControl):
    """Reads the tree before the operations, and can't after them."""

    readings = 0

    def snapshot(self) -> Snapshot | Unknown:
        self.readings += 1
        return super().snapshot() if self.readings == 1 else Unknown("no more")


def test_what_was_sent_but_could_not_be_read_back_is_unverified_and_nothing_follows_it(
    network: Network, capabilities: Any, tmp_path: Path
) -> None:
    made = wanted(network.device, capabilities)
    control = ReadsOnce(network.client(), network.device, clock=SystemClock())
    journal = Journal(tmp_path, network.device)
    applied = apply_tree(made, control, journal, permission=Permission.NONE, clock=FakeClock())
    assert applied.exit_code == 4
    assert [outcome.status for outcome in applied.outcomes] == [
        "unverified",
        *["skipped"] * (len(applied.outcomes) - 1),
    ]
    after = network.read()
    assert (after.root, after.classes) == (made.tree.root, {})


def test_two_writers_on_one_socket_do_not_take_each_others_answers(network: Network) -> None:
    send(network, AddRoot(QDISC))
    first, second = network.client(), network.client()
    assert first.send([AddClass(htb_class(ACME))], network.device.ifindex) == [None]
    assert type(second.send([AddClass(htb_class(ACME))], network.device.ifindex)[0]).__name__ == "AlreadyThereError"
    assert first.send([AddClass(htb_class(ZETA))], network.device.ifindex) == [None]
    assert network.read().classes.keys() == {ACME, ZETA}
    assert BUDGET not in network.read().classes
