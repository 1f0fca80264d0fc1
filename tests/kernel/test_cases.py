"""Faults of other shapers that only a kernel shows, each by its id in tests/README.md."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import WORLD
from kernel_devices import add_device, set_link
from kernel_traffic import FAMILIES, counted, read_when_sent, send_datagrams, set_mark, udp_socket, warm_up
from kernel_trees import ACME, DOCUMENT, GBIT, MBIT, ROOT_HANDLE, ZETA, differences, document, htb_class, tenant, wanted
from pyroute2 import IPRoute

from kura_shaper.clock import SystemClock
from kura_shaper.kernel import bpf, wire
from kura_shaper.kernel.apply import apply_document, remove_tree
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.dump import read_snapshot
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.prove import prove_steering, send_frames
from kura_shaper.kernel.watch import ChangeWatch
from kura_shaper.tree import params
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    ROOT,
    Device,
    Fq,
    Handle,
    HtbQdisc,
    Leaf,
    LeafKind,
    OtherQdisc,
    SteeringKind,
)
from kura_shaper.tree.observe import Asked, in_force, observe
from kura_shaper.tree.operations import AddClass, AddRoot, ChangeClass, DeleteClass, SetLeaf
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from conftest import Cli, Ended, Network

    from kura_shaper.tree.build import Wanted

pytestmark = pytest.mark.privileged

SHAPES = [(ShapeChoice.SINGLE, 1), (ShapeChoice.MQ, 1), (ShapeChoice.MQ, 2)]
BOTH = SHAPES[:2]
shapes = pytest.mark.parametrize(("shape", "queues"), SHAPES, ids=["single", "mq", "mq-2"])
both_shapes = pytest.mark.parametrize("shape", [ShapeChoice.SINGLE, ShapeChoice.MQ])
TC_GROUP = 1 << 3  # RTNLGRP_TC
QDISC = HtbQdisc(ROOT_HANDLE, ROOT, 2, 1000)


def tc(command: str) -> None:
    subprocess.run(["tc", *command.split()], check=True, capture_output=True)


def put(network: Network, made: Wanted, device: Device | None = None) -> None:
    with TcClient() as client:
        control = KernelTrafficControl(client, device or network.device, clock=SystemClock())
        actual = control.snapshot()
        assert isinstance(actual, Snapshot)
        outcomes = execute(plan(made, actual).operations, control, clock=SystemClock())
    assert {outcome.status for outcome in outcomes} <= {Status.DONE}, outcomes


def many(count: int) -> list[Any]:
    return [tenant(Handle(0x20, 0x100 + n), floor=0) for n in range(count)]


def home(made: Wanted, classid: Handle) -> Handle:
    return next(c.classid for c in made.tree.classes if c.classid.minor == classid.minor)


# C: netlink.


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.case("C4")
@pytest.mark.parametrize("readings", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_readings_without_end_take_neither_memory_nor_descriptors_nor_addresses(
    network: Network, capabilities: Capabilities, readings: int
) -> None:
    """Case C4: a pool of addresses was used up after 64,000 requests; each reading here has a socket of its own."""
    put(network, wanted(network.device, capabilities))
    control = network.control()

    def read(count: int) -> None:
        for _ in range(count):
            assert isinstance(read_snapshot(control._client, network.device, clock=SystemClock()), Snapshot)

    read(100)
    descriptors = sorted(Path("/proc/self/fd").iterdir())
    read(readings // 10)
    before = resident_bytes()
    read(readings)
    assert resident_bytes() - before < 2_000_000
    assert sorted(Path("/proc/self/fd").iterdir()) == descriptors
    assert len(Path("/proc/self/net/netlink").read_text().splitlines()) < 100


BEAT_S, DUMPED_CLASSES, TRIES = 0.002, 5_000, 5


@dataclass
class Heartbeat:
    """How late a loop's own timer came while something else went on."""

    latest_s: float = 0.0
    beats: int = 0

    async def beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.latest_s = max(self.latest_s, time.monotonic() - due)
            self.beats += 1


@pytest.mark.case("C5")
@pytest.mark.traffic
def test_a_loop_goes_on_while_a_thread_reads_five_thousand_classes(
    network: Network, capabilities: Capabilities
) -> None:
    """Case C5: a reading keeps the interpreter only for as long as its turn is.

    What else the machine does can only make a beat later, so the best of several tries counts. The
    control is the same reading in the loop itself, during which nothing beats at all.
    """
    put(network, wanted(network.device, capabilities, *many(DUMPED_CLASSES), budget=100 * GBIT))
    control = network.control()

    def read() -> None:
        found = control.snapshot()
        assert isinstance(found, Snapshot)
        assert len(found.classes) > DUMPED_CLASSES

    async def measured(*, in_thread: bool) -> Heartbeat:
        heart = Heartbeat()
        beating = asyncio.create_task(heart.beat())
        await asyncio.sleep(5 * BEAT_S)
        heart.latest_s, heart.beats = 0.0, 0
        if in_thread:
            await asyncio.to_thread(in_namespace(read))
        else:
            for _ in range(3):
                read()
        beats = heart.beats
        await asyncio.sleep(2 * BEAT_S)
        beating.cancel()
        heart.beats = beats
        return heart

    read()
    inside = asyncio.run(measured(in_thread=False))
    assert inside.beats == 0
    assert inside.latest_s > 0.05, "three readings take no time: the control says nothing"
    best = min((asyncio.run(measured(in_thread=True)) for _ in range(TRIES)), key=lambda heart: heart.latest_s)
    assert best.latest_s < 0.05
    assert best.beats >= 3


def in_namespace(work: Callable[[], None]) -> Callable[[], None]:
    """Return work that a pool's thread does in this thread's network namespace, which it may not be in."""
    import ctypes

    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def there() -> None:
        assert ctypes.CDLL(None).setns(here, 0x40000000) == 0
        os.close(here)
        work()

    return there


@pytest.mark.case("C6")
def test_notifications_that_were_lost_count_as_a_change(network: Network) -> None:
    """Case C6: the kernel says ENOBUFS to a listener that it had no room for, and forgets what it had to say.

    None of what is lost here is about `nic0`, so nothing but the loss itself can tell.
    """
    add_device("other0", "veth", peer={"ifname": "other1"})
    other = read_device("other0").ifindex
    client = network.client()
    changes = [ChangeClass(htb_class(ACME)) for _ in range(256)]
    client.send([AddRoot(QDISC), AddClass(htb_class(ACME))], other)
    with ChangeWatch(network.device.ifindex) as watch:
        assert not any(client.send(changes[:4], other))
        assert not watch.saw_change()
        watch._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        assert not any(client.send(changes, other))
        assert watch.saw_change()
        assert not watch.saw_change()


class Deafened(TcClient):
    """The answer to everything is lost, until it is mended."""

    is_deaf = True

    def _receive(self) -> memoryview:
        view = super()._receive()
        if self.is_deaf:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return view


@pytest.mark.case("C6")
@both_shapes
def test_a_run_that_hears_nothing_of_its_writes_converges_when_it_reads_again(
    network: Network, capabilities: Capabilities, shape: ShapeChoice
) -> None:
    """Case C6: what was sent is known from a reading, never from answers, which may be lost."""
    made = wanted(network.device, capabilities, shape=shape)
    operations = plan(made, network.read()).operations
    with Deafened() as client:
        control = KernelTrafficControl(client, network.device, clock=SystemClock())
        assert isinstance(control.snapshot(), Unknown)
        outcomes = execute(operations, control, clock=SystemClock())
        assert Status.DONE not in {outcome.status for outcome in outcomes}
        client.is_deaf = False
        again = control.snapshot()
        assert isinstance(again, Snapshot)
        rest = execute(plan(made, again).operations, control, clock=SystemClock())
    assert {outcome.status for outcome in rest} <= {Status.DONE}
    assert differences(made, network.read()) == []


@pytest.mark.case("C8")
@both_shapes
@pytest.mark.parametrize("classifier", list(ClassifierKind))
def test_filters_that_go_by_marks_are_for_every_protocol_and_so_ipv6_comes_to_its_class(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, classifier: ClassifierKind
) -> None:
    """Case C8."""
    if classifier not in capabilities.classifiers:
        pytest.skip(f"this kernel lacks the classifier {classifier}")
    only = Capabilities(capabilities.leaves, frozenset({classifier}), capabilities.steering)
    made = wanted(network.device, only, shape=shape)
    warm_up(network)
    put(network, made)
    with IPRoute() as ip:
        places = [ROOT_HANDLE.u32, *([EGRESS.u32] if made.tree.has_hook else [])]
        found = [m for place in places for m in ip.get_filters(network.device.ifindex, parent=place)]
    by_mark = [m for m in found if m.get_attr("TCA_KIND") in ("bpf", "fw")]
    assert by_mark
    assert {socket.ntohs(m["info"] & 0xFFFF) for m in by_mark} == {0x0003}  # ETH_P_ALL
    for family in FAMILIES:
        before = network.read()
        send_datagrams(family, mark=ACME.minor << 16, count=5)
        assert counted(before, read_when_sent(network))[home(made, ACME)][0] == 5


class Newer(TcClient):
    """A kernel that tells more of everything: attributes that nobody knows yet, also within others."""

    def dump(self, request: bytes, each: Callable[[memoryview, int, int], None]) -> None:
        (kind,) = struct.unpack_from("=H", request, 4)
        nested = (wire.TCA_OPTIONS, wire.TCA_STATS2) if kind != wire.Message.GETTFILTER else (wire.TCA_STATS2,)

        def more(data: memoryview, start: int, end: int) -> None:
            head = bytes(data[: start + wire.TCMSG.size])
            found = wire.spans(data, start + wire.TCMSG.size, end)
            is_ours = wire.TCA_KIND in found and bytes(data[slice(*found[wire.TCA_KIND])]) in (b"htb\0", b"fq_codel\0")
            body = b"".join(
                wire.attribute(number, bytes(data[b:e]) + (UNHEARD_OF if number in nested and is_ours else b""))
                for number, (b, e) in found.items()
            )
            grown = memoryview(bytearray(head + body + UNHEARD_OF))
            each(grown, start, len(grown))

        super().dump(request, lambda data, start, end: more(memoryview(bytes(data[:end])), start, end))


UNHEARD_OF = wire.attribute(0x3F00, b"of a later kernel")


@pytest.mark.case("C10")
@shapes
def test_what_a_later_kernel_tells_beyond_what_we_know_changes_no_reading(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int
) -> None:
    """Case C10."""
    made = wanted(network.device, capabilities, shape=shape, shaped_queues=queues)
    put(network, made)
    with Newer() as client:
        found = KernelTrafficControl(client, network.device, clock=SystemClock()).snapshot()
    assert isinstance(found, Snapshot), found
    assert differences(made, found) == []
    assert plan(made, found).operations == ()


@pytest.mark.case("C10")
def test_counters_of_a_class_that_was_made_again_begin_at_nothing(network: Network, capabilities: Capabilities) -> None:
    """Case C10: less than before is a new class, and never a negative rate."""
    made = wanted(network.device, capabilities)
    warm_up(network)
    put(network, made)
    send_datagrams(socket.AF_INET, mark=ACME.minor << 16, count=5)
    assert read_when_sent(network).counters[ACME].sent_packets == 5
    assert not any(network.client().send([DeleteClass(ACME)], network.device.ifindex))
    put(network, made)
    again = network.read().counters[ACME]
    assert (again.sent_bytes, again.sent_packets, again.dropped_packets) == (0, 0, 0)


# D: queues, links, handles.


@pytest.mark.case("D1")
def test_each_device_gets_a_plan_for_the_queues_that_it_has(network: Network, capabilities: Capabilities) -> None:
    """Case D1."""
    for count in (1, 2, 3, 8):
        name = f"wan{count}"
        add_device(name, "veth", num_tx_queues=count, peer={"ifname": f"far{count}", "num_rx_queues": count})
        for end in (f"far{count}", name):
            set_link(end, state="up")
        device = read_device(name)
        assert device.tx_queues == count
        made = wanted(device, capabilities, shape=ShapeChoice.AUTO)
        if made.tree.queues and {LeafKind.FQ, LeafKind.FQ_CODEL} & capabilities.leaves:
            assert len(made.tree.queues) == count
        spread = [f.action.last for f in made.tree.filters if f.action and f.action.last is not None]
        assert set(spread) <= {count - 1}
        put(network, made, device)
        with TcClient() as client:
            control = KernelTrafficControl(client, device, clock=SystemClock())
            found = control.snapshot()
            assert isinstance(found, Snapshot)
            if count == 1:
                assert isinstance(found.root, HtbQdisc)
                continue
            assert {place.minor for place in found.queues} == set(range(1, count + 1))
            assert prove_steering(control, document().marks, clock=SystemClock()).reason == ""
        before = packets_by_queue(device)
        send_frames(device, mark=0, count=400)
        sent = {queue for queue, packets in packets_by_queue(device).items() if packets > before[queue] + 2}
        assert sent == set(range(2, count + 1)), "the host has all queues but the shaped one"


def packets_by_queue(device: Device) -> dict[int, int]:
    """Return what each tx queue, from 1 on, was given: an mq lists its queues as classes."""
    with IPRoute() as ip:
        found = [m for m in ip.get_classes(device.ifindex) if m["parent"] == ROOT.u32 and m["handle"] >> 16 == 0x1F]
    return {m["handle"] & 0xFFFF: m.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["packets"] for m in found}


@pytest.mark.case("D2")
@shapes
def test_the_last_class_is_one_like_any_other(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int
) -> None:
    """Case D2."""
    last = Handle(0x20, 0xFFFE)
    made = wanted(network.device, capabilities, tenant(last), tenant(ACME), shape=shape, shaped_queues=queues)
    warm_up(network)
    put(network, made)
    assert differences(made, network.read()) == []
    before = network.read()
    send_datagrams(socket.AF_INET, mark=0xFFFE << 16, count=5)
    assert counted(before, read_when_sent(network))[home(made, last)][0] == 5


@pytest.mark.case("D7")
@pytest.mark.parametrize("queues", [1, 2, 4])
def test_every_queue_has_its_qdisc_and_one_that_goes_is_seen(
    network: Network, capabilities: Capabilities, queues: int
) -> None:
    """Case D7: drivers and loops have forgotten all but the first."""
    made = wanted(network.device, capabilities, shape=ShapeChoice.MQ, shaped_queues=queues)
    put(network, made)
    found = network.read()
    assert {q.parent for q in made.tree.queues} <= found.queues.keys()
    assert {place.minor for place in found.queues} == {1, 2, 3, 4}
    assert observe(found, document()).drift == ()
    for planned in made.tree.queues:
        tc(f"qdisc del dev nic0 parent 1f:{planned.parent.minor:x}")
        gone = network.read()
        assert planned.parent not in gone.queues
        assert not observe(gone, document()).is_fine
        drift = observe(gone, document(), Asked(shaped_queues=queues)).drift
        assert any(f"tx queue {planned.parent.minor - 1}" in line for line in drift), planned
        put(network, made)
        assert observe(network.read(), document()).drift == ()


@pytest.mark.case("D7")
def test_a_host_queue_that_drops_everything_is_seen_also_where_the_kernel_has_no_leaf_for_it(
    network: Network, capabilities: Capabilities
) -> None:
    """Case D7."""
    if {LeafKind.FQ, LeafKind.FQ_CODEL} & capabilities.leaves:
        pytest.skip("this kernel has a leaf for host queues")
    put(network, wanted(network.device, capabilities, shape=ShapeChoice.MQ))
    tc("qdisc replace dev nic0 parent 1f:3 handle 99: pfifo")
    tc("qdisc del dev nic0 parent 1f:3")
    assert Handle(0x1F, 3) not in network.read().queues
    assert observe(network.read(), document()).drift


@pytest.mark.case("D10")
@shapes
def test_the_class_of_a_tenant_that_left_goes_and_one_of_somebody_elses_stays_and_is_said(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int
) -> None:
    """Case D10."""
    put(network, wanted(network.device, capabilities, shape=shape, shaped_queues=queues))
    tc("class add dev nic0 parent 20:1 classid 20:99 htb rate 1mbit")
    before = network.read()
    settings = TreeSettings(Rate(10 * GBIT), shape=shape, shaped_queues=queues)
    only_acme = build(
        document(tenant(ACME)),
        before.device,
        settings=settings,
        capabilities=capabilities,
        in_force=in_force(before),
    )
    planned = plan(only_acme, before)
    assert "class 20:99 is not of our making and was left alone" in [note.message for note in planned.notes]
    put(network, only_acme)
    after = network.read()
    assert ZETA.minor not in {classid.minor for classid in after.classes}
    assert Handle(0x20, 0x99) in after.classes


@pytest.mark.case("D13")
@both_shapes
@pytest.mark.parametrize("leaf", list(LeafKind))
def test_the_kernel_takes_every_pair_of_kinds_that_is_planned_and_holds_no_other(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, leaf: LeafKind
) -> None:
    """Case D13: which pairs those are is a matter of tests/unit/test_cases_pure.py."""
    if leaf not in capabilities.leaves:
        pytest.skip(f"this kernel lacks {leaf}")
    settings = TreeSettings(Rate(10 * GBIT), shape=shape, leaf=leaf)
    made = build(document(), network.device, settings=settings, capabilities=capabilities)
    put(network, made)
    found = network.read()
    kinds = {q.handle.major: q.kind for q in found.verbatim if q.handle.major not in (0, HOOK.major)}
    pairs = {(kinds.get(q.parent.major, "device"), q.kind) for q in found.verbatim if q.handle.major}
    assert {("htb", str(leaf)), ("device", "htb" if shape is ShapeChoice.SINGLE else "mq")} <= pairs
    below_mq = {("mq", "htb"), ("mq", "fq"), ("mq", "fq_codel")}
    assert pairs <= {("device", "htb"), ("device", "mq"), ("device", "clsact"), ("htb", str(leaf))} | below_mq
    assert not any("htb" in pair[0] and pair[1] == "htb" for pair in pairs)


class FailsAt(TcClient):
    """The receives from one on fail."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__()
        self._number, self._at, self.receives = number, at, 0

    def _receive(self) -> memoryview:
        view = super()._receive()
        self.receives += 1
        if self.receives > self._at:
            raise OSError(self._number, os.strerror(self._number))
        return view


@pytest.mark.case("D14")
@pytest.mark.parametrize("number", [errno.EINTR, errno.ENOBUFS, errno.EPERM], ids=["EINTR", "ENOBUFS", "EPERM"])
@shapes
def test_a_reading_that_fails_anywhere_writes_nothing(
    network: Network, capabilities: Capabilities, tmp_path: Path, shape: ShapeChoice, queues: int, number: int
) -> None:
    """Case D14: at each receive of the reading, in each shape, whatever is allowed."""
    put(network, wanted(network.device, capabilities, shape=shape, shaped_queues=queues))
    before = network.read()
    with FailsAt(number, 10**6) as client:
        KernelTrafficControl(client, network.device, clock=SystemClock()).snapshot()
        receives = client.receives
    assert receives >= 4
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as heard:
        heard.bind((0, TC_GROUP))
        for at in range(receives):
            with FailsAt(number, at) as client:
                control = KernelTrafficControl(client, network.device, clock=SystemClock())
                applied = apply_document(
                    document(tenant(ACME, ceiling=2 * GBIT)),
                    control,
                    Journal(tmp_path, network.device),
                    settings=TreeSettings(Rate(5 * GBIT), shape=shape, shaped_queues=queues),
                    capabilities=capabilities,
                    permission=Permission.DISRUPTION | Permission.TAKE_OVER,
                    clock=SystemClock(),
                )
            with FailsAt(number, at) as client:
                control = KernelTrafficControl(client, network.device, clock=SystemClock())
                removed = remove_tree(control, Journal(tmp_path, network.device), clock=SystemClock())
            assert (applied.exit_code, applied.outcomes) == (4, ())
            assert (removed.exit_code, removed.outcomes) == (4, ())
        assert select.select([heard], [], [], 0)[0] == []
    after = network.read()
    assert (after.root, after.queues, after.classes) == (before.root, before.queues, before.classes)


def tcx_tree(network: Network, capabilities: Capabilities) -> Wanted:
    if SteeringKind.TCX not in capabilities.steering:
        pytest.skip("this kernel lacks tcx")
    only = Capabilities(capabilities.leaves, capabilities.classifiers, frozenset({SteeringKind.TCX}))
    return wanted(network.device, only, shape=ShapeChoice.MQ)


@pytest.mark.case("D14")
def test_programs_that_can_not_be_asked_for_are_not_taken_for_none(
    network: Network, capabilities: Capabilities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D14: the part of a reading that is no netlink dump."""
    put(network, tcx_tree(network, capabilities))
    assert observe(network.read(), document()).drift == ()

    def denied(ifindex: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(bpf, "attached", denied)
    applied = apply_document(
        document(),
        network.control(),
        Journal(tmp_path, network.device),
        settings=TreeSettings(Rate(10 * GBIT), shape=ShapeChoice.MQ),
        capabilities=capabilities,
        clock=SystemClock(),
    )
    assert [outcome.operation.describe() for outcome in applied.outcomes] == []


# E: devices.


@pytest.mark.case("E1")
def test_a_bond_is_shaped_at_its_ports_and_itself_never_has_a_queue(network: Network, cli: Cli, tmp_path: Path) -> None:
    """Case E1: one qdisc on the master and one on each port queued everything twice."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(DOCUMENT)
    master = add_device("bond0", "bond")
    for end in ("b0", "a0"):
        add_device(end, "veth", num_tx_queues=2, peer={"ifname": f"{end}peer"})
        set_link(f"{end}peer", state="up")
        set_link(end, state="down", master=master)
    set_link("bond0", state="up")

    def apply(name: str) -> Ended:
        return cli("apply", "--device", name, "--tenants", str(tenants), "--budget", "10G", "--shape", "single")

    def kinds(name: str) -> set[str]:
        with IPRoute() as ip:
            (index,) = ip.link_lookup(ifname=name)
            return {m.get_attr("TCA_KIND") for m in ip.get_qdiscs(index) if m["parent"] == ROOT.u32}

    refused = apply("bond0")
    assert refused.status == 3
    assert "bond0 is a bond: bytes are queued at its ports, a0, b0" in refused.stderr
    assert "shape its ports: a0, b0" in refused.stderr
    for port in ("a0", "b0"):
        done = apply(port)
        assert done.status == 0, done
        assert kinds(port) == {"htb"}
    assert kinds("bond0") == {"noqueue"}


@pytest.mark.case("E2")
@both_shapes
@pytest.mark.case("A13")
def test_what_goes_past_every_class_is_not_dropped_on_a_device_without_a_queue_length(
    network: Network, capabilities: Capabilities, shape: ShapeChoice
) -> None:
    """Cases A13 and E2: HTB's direct queue is as long as the device's unless it is told, so it was 0."""
    set_link("nic0", txqlen=0)
    device = read_device("nic0")
    made = wanted(device, capabilities, shape=shape)
    assert "txqueuelen-0" in [note.code for note in made.notes]
    warm_up(network)
    put(network, made, device)
    found = network.read()
    assert {htb.direct_qlen_packets for htb in found.htbs} == {params.DIRECT_QLEN_PACKETS}
    for leaf in found.leaves.values():
        assert isinstance(leaf, Leaf)
    # Without a default class everything unknown goes direct.
    default = Handle(found.htbs[0].handle.major, found.htbs[0].default_minor)
    assert not any(network.client().send([DeleteClass(default)], network.device.ifindex))
    with network.in_world():
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with receiver, udp_socket(socket.AF_INET, mark=0x7777 << 16) as sender:
        receiver.bind((WORLD.v4, 0))
        receiver.settimeout(5)
        for number in range(50):
            sender.sendto(bytes([number]), receiver.getsockname())
        # In any order: a sender that is moved to another CPU has its packets come in by that one.
        assert sorted(receiver.recv(10)[0] for _ in range(50)) == list(range(50))
    assert network.read().direct_packets - found.direct_packets >= 50


@pytest.mark.case("E2")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("bridge", {}), ("vlan", {"vlan_id": 7}), ("macvlan", {"macvlan_mode": "bridge"})],
)
def test_a_device_that_never_queues_is_refused_with_the_one_that_does(
    network: Network, cli: Cli, tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    """Case E2."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(DOCUMENT)
    if kind == "bridge":
        index = add_device("top0", kind)
        set_link("nic0", master=index)
    else:
        add_device("top0", kind, link=network.device.ifindex, **options)
    refused = cli("apply", "--device", "top0", "--tenants", str(tenants), "--budget", "10G")
    assert refused.status == 3
    assert "nic0" in refused.stderr


def mq_bytes(network: Network) -> int:
    """Return what all qdiscs of `nic0` together say they sent, as the general library reads it."""
    with IPRoute() as ip:
        (root,) = [m for m in ip.get_qdiscs(network.device.ifindex) if m["parent"] == ROOT.u32]
    return int(root.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])


@pytest.mark.case("E4")
@both_shapes
def test_bytes_that_go_past_the_tree_are_what_the_device_counts_beyond_it(
    network: Network, capabilities: Capabilities, shape: ShapeChoice
) -> None:
    """Case E4: with hardware's help flows pass the qdisc by; PACKET_QDISC_BYPASS does the same."""
    put(network, wanted(network.device, capabilities, shape=shape))
    warm_up(network)
    payload, count = 1_000, 50

    def grown(send: Callable[[], None]) -> int:
        read_when_sent(network)
        device, tree = network.sent_bytes(), mq_bytes(network)
        send()
        read_when_sent(network)
        tree, device = mq_bytes(network) - tree, network.sent_bytes() - device
        return device - tree

    def through() -> None:
        for family in FAMILIES:
            for mark in (ACME.minor << 16, ZETA.minor << 16, 0):
                send_datagrams(family, mark=mark, payload=payload, count=count)

    def past() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B5)) as raw:
            raw.setsockopt(263, 20, 1)  # SOL_PACKET, PACKET_QDISC_BYPASS
            raw.bind((network.device.name, 0x88B5))
            for _ in range(count):
                raw.send(b"\xff" * 6 + b"\2" * 6 + b"\x88\xb5" + bytes(payload))

    # The kernel's own packets may come in between the readings.
    assert abs(grown(through)) < 1_000
    assert abs(grown(past) - count * (14 + payload)) < 1_000


def need(capabilities: Capabilities, kind: LeafKind) -> None:
    if kind not in capabilities.leaves:
        pytest.skip(f"this kernel lacks {kind}")


def put_leaf(network: Network, capabilities: Capabilities, kind: LeafKind, *, ceil: int = 1_500 * MBIT) -> Wanted:
    need(capabilities, kind)
    only = Capabilities(frozenset({kind}), capabilities.classifiers)
    made = wanted(network.device, only, tenant(ACME, ceiling=ceil), tenant(ZETA))
    warm_up(network)
    put(network, made)
    return made


@pytest.mark.case("E6")
def test_a_flow_may_have_more_than_a_hundred_packets_waiting_in_an_fq(
    network: Network, capabilities: Capabilities
) -> None:
    """Case E6: by its own default the kernel drops what a flow has beyond a hundred."""
    made = put_leaf(network, capabilities, LeafKind.FQ, ceil=4 * MBIT)
    (leaf,) = (one for one in made.tree.leaves if one.parent == ACME)

    def dropped() -> int:
        before = network.read().counters[ACME].dropped_packets
        with udp_socket(socket.AF_INET, mark=ACME.minor << 16) as sender:
            sender.setsockopt(socket.SOL_SOCKET, 32, 8_000_000)  # SO_SNDBUFFORCE
            for _ in range(400):
                sender.sendto(bytes(1_000), (WORLD.v4, 9))
        return network.read().counters[ACME].dropped_packets - before

    assert dropped() == 0
    assert isinstance(leaf.parameters, Fq)
    kernels_own = Fq(10_240, 100, 3_028, 15_140, 10_000_000)
    assert not any(network.client().send([SetLeaf(Leaf(leaf.handle, ACME, kernels_own))], network.device.ifindex))
    # How many depends on how fast this machine can send.
    assert dropped() > 0


@dataclass
class Stamped:
    """A datagram socket of a tenant whose packets say when they may leave."""

    made: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    def __enter__(self) -> Stamped:
        set_mark(self.made, ACME.minor << 16)
        self.made.setsockopt(socket.SOL_SOCKET, 61, struct.pack("=iI", time.CLOCK_MONOTONIC, 0))  # SO_TXTIME
        return self

    def __exit__(self, *error: object) -> None:
        self.made.close()

    def send(self, payload: bytes, to: tuple[str, int], *, in_s: float) -> None:
        at_ns = time.monotonic_ns() + int(in_s * 1e9)
        self.made.sendmsg([payload], [(socket.SOL_SOCKET, 61, struct.pack("=Q", at_ns))], 0, to)


@pytest.fixture
def receiver(network: Network) -> Iterator[socket.socket]:
    with network.in_world():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with made:
        made.bind((WORLD.v4, 0))
        made.settimeout(5)
        yield made


@pytest.mark.case("E7")
def test_a_packet_stamped_beyond_the_horizon_is_dropped_and_counted(
    network: Network, capabilities: Capabilities, receiver: socket.socket
) -> None:
    """Case E7: with another choice it would be held, and its flow with it."""
    put_leaf(network, capabilities, LeafKind.FQ)
    before = network.read().counters[ACME]
    with Stamped() as sender:
        sender.send(b"beyond", receiver.getsockname(), in_s=60)
        sender.send(b"within", receiver.getsockname(), in_s=0.3)
        started = time.monotonic()
        assert receiver.recv(10) == b"within"
    assert time.monotonic() - started > 0.1
    after = network.read().counters[ACME]
    assert after.dropped_packets - before.dropped_packets == 1
    assert after.backlog_packets == 0


@pytest.mark.case("E8")
def test_an_fq_that_somebody_gave_a_rate_is_not_taken_for_ours(network: Network, capabilities: Capabilities) -> None:
    """Case E8: it limits each flow, so a tenant with many would pass its ceiling and one with few not reach it."""
    made = put_leaf(network, capabilities, LeafKind.FQ)
    assert observe(network.read(), document(tenant(ACME, ceiling=1_500 * MBIT), tenant(ZETA))).drift == ()
    tc("qdisc change dev nic0 parent 20:2a7 handle 2a7: fq maxrate 1mbit")
    assert isinstance(network.read().leaves[ACME], OtherQdisc)
    put(network, made)
    assert network.read().leaves[ACME] == next(leaf for leaf in made.tree.leaves if leaf.parent == ACME)


@pytest.mark.case("E9")
def test_a_flow_that_waits_for_its_time_in_an_fq_holds_up_no_other(
    network: Network, capabilities: Capabilities, receiver: socket.socket
) -> None:
    """Case E9: HTB finds the class without a packet to give, and must go on to the others and come back."""
    put_leaf(network, capabilities, LeafKind.FQ)
    with Stamped() as late:
        late.send(b"late", receiver.getsockname(), in_s=1.5)
        stamped = time.monotonic()
        for mark in (ACME.minor << 16, ZETA.minor << 16, 0) * 20:
            with udp_socket(socket.AF_INET, mark=mark) as prompt:
                prompt.sendto(b"prompt", receiver.getsockname())
                assert receiver.recv(10) == b"prompt"
        assert time.monotonic() - stamped < 1.2
        assert receiver.recv(10) == b"late"
        assert time.monotonic() - stamped > 1.2


@pytest.mark.case("E10")
def test_what_the_probe_says_of_a_leaf_is_what_the_kernel_does(network: Network, capabilities: Capabilities) -> None:
    """Case E10."""
    client = network.client()
    assert not any(client.send([AddRoot(QDISC), AddClass(htb_class(ACME))], network.device.ifindex))
    for number, kind in enumerate(LeafKind, start=0x300):
        leaf = Leaf(Handle(number), ACME, params.leaf_parameters(kind, Rate(GBIT), network.device))
        (refused,) = client.send([SetLeaf(leaf)], network.device.ifindex)
        assert (refused is None) is (kind in capabilities.leaves), kind


@pytest.mark.case("E10")
@pytest.mark.parametrize("kind", list(LeafKind))
@both_shapes
def test_a_leaf_that_the_kernel_lacks_is_named_with_what_comes_instead_and_the_tree_is_made(
    network: Network, cli: Cli, tmp_path: Path, capabilities: Capabilities, shape: ShapeChoice, kind: LeafKind
) -> None:
    """Case E10: elsewhere the whole node stayed unshaped."""
    if kind in capabilities.leaves:
        pytest.skip(f"this kernel has {kind}")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(DOCUMENT)
    fixed = ["--device", "nic0", "--tenants", str(tenants), "--budget", "10G", "--shape", shape, "--leaf", kind]
    done = cli("apply", *fixed)
    assert done.status == 0, done
    assert f"note         the kernel has no {kind}: leaves are " in done.stdout
    assert ACME in network.read().classes


def sysctls() -> dict[str, bytes]:
    found = {}
    for path in Path("/proc/sys/net").rglob("*"):
        try:
            if path.is_file():
                found[str(path)] = path.read_bytes()
        except OSError:
            continue  # one that can only be written
    return found


@pytest.mark.case("E11")
@pytest.mark.parametrize("shape", ["single", "mq"])
def test_no_sysctl_is_ever_written_and_what_was_at_the_root_comes_back(
    network: Network, cli: Cli, tmp_path: Path, shape: str
) -> None:
    """Case E11: qdiscs and sysctls were left behind by what had set them."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(DOCUMENT)
    tc("qdisc add dev nic0 root handle 77: pfifo limit 321")
    before, written_to = (network.read(), sysctls()), tmp_path / "written"

    def watch_files() -> None:
        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith("/proc/sys") and arguments[2] & os.O_ACCMODE:
                os.write(log, f"{arguments[0]}\n".encode())

        log = os.open(written_to, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(note)

    fixed = ["--device", "nic0", "--tenants", str(tenants), "--budget", "10G", "--shape", shape, "--take-over"]
    assert cli("apply", *fixed, before=watch_files).status == 0
    assert sysctls() == before[1]
    assert cli("uninstall", "--device", "nic0", before=watch_files).status == 0
    assert sysctls() == before[1]
    assert written_to.read_text() == ""
    after = network.read()
    assert (after.root, after.hook, after.filters) == (before[0].root, before[0].hook, ())
    assert set(after.verbatim) == set(before[0].verbatim)


# G: running it.


class Counting(TcClient):
    """Counts what goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[int] = []

    def _transact(self, messages: Sequence[bytes]) -> dict[int, tuple[int, str]]:
        self.sends.append(len(messages))
        return super()._transact(messages)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process be started."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    for module, names in ((os, ("fork", "posix_spawn", "posix_spawnp", "system")), (subprocess, ("Popen",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


@pytest.mark.case("G5")
@shapes
def test_a_thousand_tenants_take_a_few_sends_and_no_process_and_one_more_change_takes_one(
    network: Network, capabilities: Capabilities, no_process: None, shape: ShapeChoice, queues: int
) -> None:
    """Case G5: one process for each command took minutes; how long it takes is a matter of scripts/bench."""
    tenants = many(1_000)
    made = wanted(network.device, capabilities, *tenants, shape=shape, shaped_queues=queues)
    planned = plan(made, network.read()).operations
    with Counting() as client:
        control = KernelTrafficControl(client, network.device, clock=SystemClock())
        outcomes = execute(planned, control, clock=SystemClock())
        assert {outcome.status for outcome in outcomes} == {Status.DONE}
        # What the tree stands on goes before, and what steers does not go by netlink, or alone.
        assert len(client.sends) <= math.ceil(len(planned) / 256) + 4
        client.sends.clear()
        tenants[500] = tenant(Handle(0x20, tenants[500].class_id), floor=0, ceiling=77 * MBIT)
        one = wanted(network.device, capabilities, *tenants, shape=shape, shaped_queues=queues)
        execute(plan(one, network.read()).operations, control, clock=SystemClock())
        changed = [c for c in one.tree.classes if c not in made.tree.classes]
        assert client.sends == [len(plan_of(changed, one, made))]
    assert differences(one, network.read()) == []


def plan_of(changed: list[Any], one: Wanted, made: Wanted) -> list[object]:
    """Return what one tenant's change takes: its class, and its leaf where that is as long as the ceiling is high."""
    leaves = [leaf for leaf in one.tree.leaves if leaf not in made.tree.leaves]
    assert len(changed) == 1
    assert len(leaves) <= 1
    return [*changed, *leaves]


@pytest.mark.case("G7")
@shapes
def test_a_process_that_comes_later_takes_every_id_and_place_from_the_kernel_and_does_nothing(
    network: Network, cli: Cli, tmp_path: Path, shape: ShapeChoice, queues: int
) -> None:
    """Case G7: also without the first one's files, and where it would place the tenants elsewhere by itself."""
    tenants = tmp_path / "tenants.yaml"
    fixed = ["--device", "nic0", "--tenants", str(tenants), "--budget", "10G", "--shape", shape]
    fixed += ["--shaped-queues", str(queues)]
    head, _, _ = DOCUMENT.partition("  - ")
    light = "  - {name: light, class: 0x100, floor: 1M, ceiling: 1G}\n"
    heavy = "  - {name: heavy, class: 0x101, floor: 900M, ceiling: 1G}\n"
    for text in (head + light, head + light + heavy):
        tenants.write_text(text)
        assert cli("apply", *fixed).status == 0
    before = network.read()
    if queues == 2:
        assert {Handle(0x20, 0x100), Handle(0x21, 0x101)} <= before.classes.keys(), "a fresh start would do the same"
    for state in (cli, type(cli)(tmp_path / "another")):
        again = state("apply", *fixed)
        assert (again.status, again.stdout.endswith("nic0: 0 operations\n")) == (0, True), again
    after = network.read()
    assert (after.root, after.queues, after.classes) == (before.root, before.queues, before.classes)
    assert (after.leaves, after.filters) == (before.leaves, before.filters)
