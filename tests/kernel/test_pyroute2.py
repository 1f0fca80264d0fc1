"""What the general library does wrong, each beside how we are not affected.

The first test of a pair fails when a new version mends the fault: then the guard can go.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from kernel_trees import ACME, GBIT, MBIT, ROOT_HANDLE, htb_class, tenant, wanted
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import plugins, tcmsg

from kura_shaper.clock import FakeClock
from kura_shaper.errors import UsageError
from kura_shaper.kernel import plugins as ours
from kura_shaper.kernel import wire
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.dump import read_snapshot
from kura_shaper.kernel.errors import (
    AlreadyThereError,
    InUseError,
    InvalidError,
    KernelRefusedError,
    NotThereError,
)
from kura_shaper.kernel.plugins import tc
from kura_shaper.tree import params
from kura_shaper.tree.build import root_qdisc
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import ROOT, Bfifo, Device, Handle, HtbQdisc, Leaf, LeafKind, OtherQdisc
from kura_shaper.tree.operations import AddClass, AddRoot, ChangeClass, DeleteClass, DeleteRoot, SetLeaf
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Network

privileged = pytest.mark.privileged
QDISC = HtbQdisc(ROOT_HANDLE, ROOT, 2, 1000)
ROOT_U32, ACME_U32 = ROOT_HANDLE.u32, ACME.u32
_RTNLGRP_TC = 4


@pytest.fixture
def ip(network: Network) -> Iterator[IPRoute]:
    with IPRoute() as opened:
        yield opened


def send(network: Network, *operations: Any) -> list[KernelRefusedError | None]:
    return network.client().send(operations, network.device.ifindex)


# P1, P2: kinds without a plugin.


def test_the_library_has_no_plugin_for_the_kinds_that_we_need() -> None:
    # In a process of its own, since we add to the table in this one.
    show = "from pyroute2.netlink.rtnl.tcmsg import plugins; print(*plugins)"
    known = subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True).stdout.split()
    assert {"fq", "mq", "flower", "bfifo"} & set(known) == set()
    assert {"htb", "fq_codel", "u32", "clsact", "bpf", "fw"} <= set(known)


def test_our_plugins_fill_the_gap_and_replace_nothing() -> None:
    known = dict(plugins)
    ours.register()
    assert {name: plugins[name] for name in known} == known
    assert {"fq", "mq"} <= plugins.keys()


@privileged
def test_the_library_takes_the_whole_tree_away_for_a_kind_that_it_does_not_know(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    ip.tc("replace", "bfifo", network.device.ifindex, handle=0x02A70000, parent=ACME_U32)
    root = network.read().root
    assert isinstance(root, OtherQdisc)
    assert root.kind == "bfifo"


@privileged
@pytest.mark.case("C1")
def test_our_guard_refuses_a_kind_without_a_plugin_and_the_tree_stays(network: Network, ip: IPRoute) -> None:
    """Case C1."""
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    with pytest.raises(UsageError, match="no plugin for the kind 'bfifo'; without one it would become the root"):
        tc(ip, "replace", "bfifo", network.device.ifindex, handle=0x02A70000, parent=ACME_U32)
    after = network.read()
    assert (after.root, after.classes) == (QDISC, {ACME: htb_class(ACME)})


@privileged
@pytest.mark.case("C1")
def test_our_client_puts_any_kind_of_leaf_below_its_class(network: Network) -> None:
    """Case C1."""
    leaf = Leaf(Handle(0x2A7), ACME, Bfifo(1_000_000))
    assert send(network, AddRoot(QDISC), AddClass(htb_class(ACME)), SetLeaf(leaf)) == [None] * 3
    assert network.read().leaves == {ACME: leaf}


@privileged
def test_our_guard_sends_nothing_when_the_library_built_another_parent(
    network: Network, ip: IPRoute, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rewriter:
        parent = ROOT.u32

        @staticmethod
        def fix_request(request: Any) -> None:
            request["parent"] = ROOT.u32

    monkeypatch.setitem(plugins, "bfifo", Rewriter)
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    index = network.device.ifindex
    with pytest.raises(UsageError, match=f"parent 0xffffffff instead of {index}, 0x2002a7; nothing was sent"):
        tc(ip, "replace", "bfifo", network.device.ifindex, parent=ACME)
    assert network.read().root == QDISC


# P3: buckets.


@privileged
@pytest.mark.parametrize(("rate", "bucket_bytes_at_most"), [(GBIT, 1496), (10 * GBIT, 1200), (25 * GBIT, 0)])
def test_the_library_rounds_a_default_bucket_to_less_than_a_frame(
    network: Network, ip: IPRoute, rate: int, bucket_bytes_at_most: int
) -> None:
    send(network, AddRoot(QDISC))
    ip.tc("add-class", "htb", network.device.ifindex, handle=ACME_U32, parent=ROOT_U32, rate=rate // 8)
    assert network.read().classes[ACME].burst_bytes <= bucket_bytes_at_most


@privileged
@pytest.mark.parametrize("rate", [100 * MBIT, GBIT, 10 * GBIT, 25 * GBIT])
@pytest.mark.case("A4")
def test_our_buckets_hold_a_millisecond_and_a_packet_and_are_exact(network: Network, rate: int) -> None:
    """Case A4."""
    spec = params.htb_class(ACME, ROOT_HANDLE, floor=Rate(rate), ceil=Rate(rate), prio=0, device=network.device)
    send(network, AddRoot(QDISC), AddClass(spec))
    found = network.read().classes[ACME]
    assert found.burst_ticks == spec.burst_ticks
    assert found.burst_bytes >= max(rate // 8000, 65_536)


# P4: rates.


@privileged
def test_the_library_takes_neither_a_fraction_nor_bits(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(QDISC))
    with pytest.raises(KeyError):
        ip.tc("add-class", "htb", network.device.ifindex, handle=ACME_U32, parent=ROOT_U32, rate="1.5gbit")
    ip.tc("add-class", "htb", network.device.ifindex, handle=ACME_U32, parent=ROOT_U32, rate=1000)
    assert network.read().classes[ACME].floor == Rate(8000)


@privileged
@pytest.mark.parametrize("name", ["rate", "ceil"])
def test_our_guard_takes_only_whole_bytes_a_second(network: Network, ip: IPRoute, name: str) -> None:
    send(network, AddRoot(QDISC))
    rates: dict[str, Any] = {"rate": 1000, "ceil": 1000} | {name: "1.5gbit"}
    with pytest.raises(UsageError, match=f"{name} '1.5gbit' is not a whole number of bytes a second"):
        tc(ip, "add-class", "htb", network.device.ifindex, handle=ACME, parent=ROOT_HANDLE, **rates)
    assert network.read().classes == {}


# P5: handles.


@privileged
def test_the_library_lets_a_minor_run_over_into_the_major(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(HtbQdisc(Handle(1), ROOT, 2, 1000)))
    parameters = {"parent": 0x10000, "rate": 10**6, "burst": 2000}
    ip.tc("add-class", "htb", network.device.ifindex, handle="1:10000", **parameters)
    # It now has the handle of the qdisc itself.
    assert list(network.read().classes) == [Handle(1, 0)]


@privileged
@pytest.mark.parametrize("handle", ["20:10000", "10000:1", "20:x", 2**32, -1])
def test_our_guard_refuses_a_handle_with_a_half_of_more_than_16_bits(
    network: Network, ip: IPRoute, handle: str | int
) -> None:
    send(network, AddRoot(QDISC))
    with pytest.raises(UsageError, match=r"out of range|is no handle"):
        tc(ip, "add-class", "htb", network.device.ifindex, handle=handle, parent="20:", rate=10**6, burst=2000)
    assert network.read().classes == {}


def test_our_handles_can_not_have_a_half_of_more_than_16_bits() -> None:
    with pytest.raises(UsageError, match="handle 20:10000 is out of range; each half has 16 bits"):
        Handle(0x20, 0x10000)


# P6: removals, and what the kernel says.


@privileged
def test_the_library_wants_a_rate_to_remove_a_class(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    with pytest.raises(TypeError):
        ip.tc("del-class", "htb", network.device.ifindex, handle=ACME_U32)


@privileged
@pytest.mark.case("C3")
def test_our_guard_and_our_client_remove_a_class_by_its_handle(network: Network, ip: IPRoute) -> None:
    """Case C3: nobody asks for what the library answers, and it is done."""
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    tc(ip, "del-class", "htb", network.device.ifindex, handle=ACME)
    assert network.read().classes == {}
    assert send(network, AddClass(htb_class(ACME)), DeleteClass(ACME)) == [None, None]
    tc(ip, "del", "htb", network.device.ifindex, handle=ROOT_HANDLE)
    assert not isinstance(network.read().root, HtbQdisc)


@privileged
@pytest.mark.parametrize(
    ("command", "handle", "number", "kind"),
    [
        ("add-class", ACME, errno.EEXIST, AlreadyThereError),
        ("change-class", Handle(0x20, 0x300), errno.ENOENT, NotThereError),
        ("del-class", Handle(0x20, 0x300), errno.ENOENT, NotThereError),
        ("del-class", Handle(0x20, 0x100), errno.EBUSY, InUseError),
        ("add-class", Handle(0x21, 0x300), errno.EINVAL, InvalidError),
    ],
)
def test_our_guard_types_what_the_library_raises_as_a_number(
    network: Network, ip: IPRoute, command: str, handle: Handle, number: int, kind: type[KernelRefusedError]
) -> None:
    inner = Handle(0x20, 0x100)
    send(network, AddRoot(QDISC), AddClass(htb_class(inner)), AddClass(htb_class(ACME, parent=inner)))
    parameters: dict[str, Any] = {"rate": 10**6, "burst": 2000, "parent": inner} if "del" not in command else {}
    with pytest.raises(kind) as refused:
        tc(ip, command, "htb", network.device.ifindex, handle=handle, **parameters)
    assert refused.value.errno == number
    assert isinstance(refused.value.__cause__, NetlinkError)


# P7: the default class.


@privileged
def test_the_library_chooses_a_default_class_when_none_is_named(network: Network, ip: IPRoute) -> None:
    ip.tc("add", "htb", network.device.ifindex, handle=ROOT_U32)
    root = network.read().root
    assert isinstance(root, HtbQdisc)
    assert root.default_minor == 0x10


@privileged
def test_our_default_class_is_named_and_there(network: Network, capabilities: Any) -> None:
    send(network, *plan(wanted(network.device, capabilities), network.read()).operations)
    after = network.read()
    assert after.root == root_qdisc()
    assert Handle(root_qdisc().handle.major, root_qdisc().default_minor) in after.classes


# P8: the kernel's own words.


@privileged
def test_the_library_keeps_the_kernels_words_to_itself(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(QDISC))
    with pytest.raises(NetlinkError) as refused:
        ip.tc("add", "htb", network.device.ifindex, handle=ROOT_U32, default=2)
    assert "Exclusivity flag" not in str(refused.value)


@privileged
def test_our_client_passes_the_kernels_words_on(network: Network) -> None:
    deep = [AddRoot(QDISC), AddClass(htb_class(ACME)), DeleteRoot(Handle(0x77))]
    refused = send(network, *deep)[-1]
    assert refused is not None
    assert refused.detail == "Invalid handle"
    assert str(refused) == (
        "delete root qdisc 77:: the kernel says EINVAL: Invalid handle; the kernel's own words say which part"
    )


class Listening(TcClient):
    """Keeps the words of every acknowledgement."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def _receive(self) -> memoryview:
        view = super()._receive()
        _, kind, flags, _, _ = wire.HEADER.unpack_from(view)
        if kind == wire.NLMSG_ERROR:
            self.words.append(wire.error_of(view, wire.HEADER.size, flags)[1])
        return view


# A1, A2: the quantum that the kernel works out is out of bounds at low and high rates, and it warns each time.
@privileged
@pytest.mark.parametrize(
    ("rate", "kernels_own"), [(64_000, "small"), (MBIT, ""), (GBIT, "big"), (25 * GBIT, "big"), (100 * GBIT, "big")]
)
@pytest.mark.case("A1")
@pytest.mark.case("A2")
def test_our_quantum_makes_the_kernel_warn_at_no_rate(network: Network, rate: int, kernels_own: str) -> None:
    """Cases A1, A2."""

    def warnings(quantum_bytes: int) -> list[str]:
        with Listening() as client:
            spec = htb_class(ACME, floor=rate, ceil=rate, quantum_bytes=quantum_bytes)
            client.send([AddClass(spec)], network.device.ifindex)
            client.send([DeleteClass(ACME)], network.device.ifindex)
            return [words for words in client.words if words]

    send(network, AddRoot(QDISC))
    assert warnings(params.quantum_bytes(Rate(rate), network.device)) == []
    # Linux 6.1 warns in its log, later ones in the answer.
    for words in warnings(0):
        assert kernels_own
        assert f"quantum of class 2002A7 is {kernels_own}" in words


# P9: counters.


def class_message(*, sent_bytes: int, packets32: int, packets64: int | None) -> bytes:
    """Return a class as the kernel dumps it; it adds 64 bits of packets when 32 are too few."""
    stats = wire.attribute(1, struct.pack("=QI4x", sent_bytes, packets32))
    if packets64 is not None:
        stats += wire.attribute(8, struct.pack("=Q", packets64))
    data = wire.encode(AddClass(htb_class(ACME)), 7) + wire.attribute(wire.TCA_STATS2, stats)
    return struct.pack("=I", len(data)) + data[4:]


def test_the_library_does_not_know_packets_of_64_bits() -> None:
    message = tcmsg(class_message(sent_bytes=5 << 30, packets32=7, packets64=(1 << 32) + 7))
    message.decode()
    stats = message.get_attr("TCA_STATS2")
    assert stats.get_attr("TCA_STATS_BASIC")["packets"] == 7
    assert stats.get_attr("TCA_STATS_PKT64") is None


class Canned(TcClient):
    """Answers each dump with messages made beforehand."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        super().__init__()
        self._answers = answers

    def dump(self, request: bytes, each: Callable[[memoryview, int, int], None]) -> None:
        for data in self._answers.pop(0):
            each(memoryview(data), wire.HEADER.size, len(data))


@pytest.mark.parametrize(
    ("sent_bytes", "packets32", "packets64", "packets"),
    [
        (100, 1, None, 1),
        (5 << 30, 7, (1 << 32) + 7, (1 << 32) + 7),
        ((1 << 64) - 1, 0xFFFFFFFF, None, 0xFFFFFFFF),
    ],
)
@pytest.mark.case("C11")
def test_our_counters_have_64_bits(sent_bytes: int, packets32: int, packets64: int | None, packets: int) -> None:
    """Case C11: more than 4 GiB of bytes, and packets beyond 32 bits."""
    root = wire.encode(AddRoot(QDISC), 7)
    found = class_message(sent_bytes=sent_bytes, packets32=packets32, packets64=packets64)
    with Canned([[root], [found], []]) as client:
        snapshot = read_snapshot(client, Device("nic0", 7), clock=FakeClock())
    assert isinstance(snapshot, Snapshot)
    assert snapshot.counters[ACME].sent_bytes == sent_bytes
    assert snapshot.counters[ACME].sent_packets == packets


# P10: notifications.


@privileged
def test_a_root_that_goes_takes_its_classes_without_a_word(network: Network) -> None:
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as heard:
        heard.bind((0, 1 << _RTNLGRP_TC - 1))
        send(network, ChangeClass(htb_class(ACME, floor=MBIT)), DeleteRoot(ROOT_HANDLE))
        assert heard_kinds(heard) == [wire.Message.NEWTCLASS, wire.Message.DELQDISC]
    assert network.read().classes == {}


def heard_kinds(heard: socket.socket) -> list[int]:
    """Return the types of what is waiting: a change is told before the call that made it returns."""
    kinds = []
    while select.select([heard], [], [], 0)[0]:
        kinds.append(wire.HEADER.unpack_from(heard.recv(65_536))[1])
    return kinds


# The plugins themselves.


@privileged
def test_mq_is_set_up_with_a_qdisc_for_each_queue(network: Network, ip: IPRoute) -> None:
    tc(ip, "add", "mq", network.device.ifindex, handle="1:")
    tc(ip, "add", "htb", network.device.ifindex, handle="30:", parent="1:3", default=2)
    found = {(q.kind, q.parent) for q in network.read().verbatim}
    assert {("mq", ROOT), ("htb", Handle(1, 3))} <= found
    assert len(found) == 1 + network.device.tx_queues


@privileged
def test_a_filter_of_the_library_needs_its_parent(network: Network, ip: IPRoute) -> None:
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    parameters: dict[str, Any] = {
        "prio": 1,
        "protocol": 0x0800,
        "target": ACME_U32,
        "keys": ["0x0a000000/0xff000000+12"],
    }
    with pytest.raises(UsageError, match="add-filter needs a parent"):
        tc(ip, "add-filter", "u32", network.device.ifindex, **parameters)
    tc(ip, "add-filter", "u32", network.device.ifindex, parent=ROOT_HANDLE, **parameters)
    assert [f.priority for f in network.read().filters if f.handle & 0xFFF] == [1]


def test_our_guard_knows_only_the_commands_that_it_checks() -> None:
    with pytest.raises(UsageError, match="'del-filter' is no command of tc here"):
        tc(None, "del-filter", "u32", 7)


def fq_built(**parameters: int) -> bytes:
    ours.register()
    message = tcmsg()
    message["attrs"] = [["TCA_KIND", "fq"], ["TCA_OPTIONS", ours.Fq.get_parameters(parameters)]]
    message.encode()
    return bytes(message.data[wire.HEADER.size + wire.TCMSG.size :])


def test_the_fq_plugin_builds_what_our_own_encoder_builds() -> None:
    leaf = Leaf(Handle(0x2A7), ACME, params.leaf_parameters(LeafKind.FQ, Rate(GBIT), Device("nic0", 7)))
    data = wire.encode(SetLeaf(leaf), 7)
    built = fq_built(
        plimit=10_240,
        flow_plimit=1_000,
        quantum=2 * 1514,
        initial_quantum=10 * 1514,
        horizon=10_000_000,
        horizon_drop=1,
    )
    assert built == data[wire.HEADER.size + wire.TCMSG.size :]


@privileged
def test_fq_is_set_up_and_read_back(network: Network, ip: IPRoute, capabilities: Any) -> None:
    if LeafKind.FQ not in capabilities.leaves:
        pytest.skip("this kernel has no fq")
    send(network, AddRoot(QDISC), AddClass(htb_class(ACME)))
    tc(ip, "add", "fq", network.device.ifindex, handle="2a7:", parent=ACME, plimit=5000, flow_plimit=500)
    leaf = network.read().leaves[ACME]
    assert isinstance(leaf, Leaf)
    assert (leaf.handle, leaf.parameters.kind) == (Handle(0x2A7), LeafKind.FQ)
    (message,) = [m for m in ip.get_qdiscs(network.device.ifindex) if m.get_attr("TCA_KIND") == "fq"]
    assert message.get_attr("TCA_OPTIONS").get_attr("TCA_FQ_PLIMIT") == 5000


@privileged
def test_a_tree_of_ours_is_plain_reading_for_the_library(network: Network, ip: IPRoute, capabilities: Any) -> None:
    send(network, *plan(wanted(network.device, capabilities, tenant(ACME)), network.read()).operations)
    tree = network.read()
    # An fq_codel shows each of its flows as a class too.
    found = {m["handle"] for m in ip.get_classes(network.device.ifindex)}
    assert {handle for handle in found if handle >> 16 == ROOT_HANDLE.major} == {c.u32 for c in tree.classes}
    assert next(m.get_attr("TCA_KIND") for m in ip.get_qdiscs(network.device.ifindex)) == "htb"
