"""Faults of other shapers that only traffic at full rate shows, each by its id in tests/README.md."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from kernel_devices import set_link
from kernel_flood import Window, flooding, mean_bits_per_second
from kernel_traffic import FAMILIES, warm_up
from kernel_trees import ACME, GBIT, MBIT, ZETA, tenant, wanted

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.links import read_device
from kura_shaper.tree.build import Capabilities, ShapeChoice
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import LeafKind, ticks_of_bytes
from kura_shaper.tree.operations import ChangeClass

if TYPE_CHECKING:
    from conftest import Network

    from kura_shaper.tree.build import Wanted

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

CEILING, MARK = 400 * MBIT, ACME.minor << 16
BUCKET_BYTES = 65_536  # one packet of the largest size, which is more than the millisecond
SHORT_S, SHORT_WINDOWS = 0.01, 60
SHAPES = [(ShapeChoice.SINGLE, 1), (ShapeChoice.MQ, 1), (ShapeChoice.MQ, 2)]
shapes = pytest.mark.parametrize(("shape", "queues"), SHAPES, ids=["single", "mq", "mq-2"])
_SIOCETHTOOL = 0x8946
_SEGMENTATION = {"tso": 0x1F, "gso": 0x24}  # ETHTOOL_STSO, ETHTOOL_SGSO; each one's question is one below


def put(network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int) -> Wanted:
    device = read_device("nic0")
    tenants = [tenant(ACME, floor=MBIT, ceiling=CEILING), tenant(ZETA, floor=50 * MBIT, ceiling=GBIT)]
    made = wanted(device, capabilities, *tenants, budget=4 * GBIT, shape=shape, shaped_queues=queues)
    outcomes = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} <= {Status.DONE}, outcomes
    return made


def set_segmentation(*, is_on: bool) -> None:
    """Let `nic0` have packets of many segments, or none of more than one (ethtool -K nic0 tso off gso off)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        for command in _SEGMENTATION.values():
            value = bytearray(struct.pack("=II", command, is_on))
            held = (ctypes.c_char * len(value)).from_buffer(value)
            request = struct.pack("=16sQ16x", b"nic0", ctypes.addressof(held))
            fcntl.ioctl(door, _SIOCETHTOOL, request)
            value[:] = struct.pack("=II", command - 1, 2)
            fcntl.ioctl(door, _SIOCETHTOOL, request)
            assert struct.unpack("=II", value)[1] == is_on


def short_windows(network: Network) -> list[Window]:
    """Return windows of some ms in a row; each lasts from before its first reading to after its last."""
    readings = []
    for _ in range(SHORT_WINDOWS + 1):
        before = time.monotonic_ns()
        sent = network.sent_bytes()
        readings.append((before, sent, time.monotonic_ns()))
        time.sleep(SHORT_S)
    return [Window(end - start, after - before) for (start, before, _), (_, after, end) in pairwise(readings)]


@pytest.mark.case("E3")
@pytest.mark.parametrize("is_on", [True, False], ids=["gso", "no-gso"])
@shapes
def test_a_burst_is_one_bucket_in_every_short_window_with_and_without_large_packets(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int, is_on: bool
) -> None:
    """Case E3: packets of 64 KiB make a bucket below their size a brake, and a larger one a burst."""
    set_segmentation(is_on=is_on)
    warm_up(network)
    made = put(network, capabilities, shape, queues)
    acme = next(c for c in made.tree.classes if c.classid.minor == ACME.minor)
    assert acme.cburst_bytes >= network.device.gso_max_bytes
    time.sleep(0.2)  # the bucket fills, and the first window has all of it
    with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=MARK, flows=4):
        found = short_windows(network)
    for window in found:
        assert window.sent_bytes <= window.most_bytes(CEILING, BUCKET_BYTES), window
    assert mean_bits_per_second(found) >= 0.25 * CEILING


@pytest.mark.case("E3")
def test_a_bucket_that_is_many_times_too_large_shows_in_the_short_windows(
    network: Network, capabilities: Capabilities
) -> None:
    """Case E3, the control: it shows that the test above can fail."""
    warm_up(network)
    made = put(network, capabilities, ShapeChoice.SINGLE, 1)
    acme = next(c for c in made.tree.classes if c.classid == ACME)
    big = 8_000_000
    wide = replace(acme, cburst_ticks=ticks_of_bytes(acme.ceil, big), burst_ticks=ticks_of_bytes(acme.floor, big))
    assert not any(network.client().send([ChangeClass(wide)], network.device.ifindex))
    time.sleep(0.5)  # the bucket fills
    with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=MARK, flows=4):
        found = short_windows(network)
    assert any(window.sent_bytes > window.most_bytes(CEILING, BUCKET_BYTES) for window in found)


@pytest.mark.case("E2")
@pytest.mark.parametrize("family", FAMILIES, ids=["ipv4", "ipv6"])
@shapes
def test_a_device_without_a_queue_length_carries_a_tenant_at_its_ceiling(
    network: Network, capabilities: Capabilities, shape: ShapeChoice, queues: int, family: socket.AddressFamily
) -> None:
    """Case E2: the fifo that a class is made with takes nothing there, so its own leaf must be in its place."""
    set_link("nic0", txqlen=0)
    warm_up(network)
    put(network, capabilities, shape, queues)
    with flooding(network, family, socket.SOCK_STREAM, mark=MARK, flows=4):
        time.sleep(0.3)
        found = short_windows(network)
    assert mean_bits_per_second(found) >= 0.25 * CEILING
    for window in found:
        assert window.sent_bytes <= window.most_bytes(CEILING, BUCKET_BYTES), window


@pytest.mark.case("E9")
def test_flows_that_tcp_paces_through_an_fq_leave_their_siblings_their_part(
    network: Network, capabilities: Capabilities
) -> None:
    """Case E9: in an fq every TCP connection is stamped, so a tenant's queue often has nothing to give just now."""
    if LeafKind.FQ not in capabilities.leaves:
        pytest.skip("this kernel lacks fq")
    only = Capabilities(frozenset({LeafKind.FQ}), capabilities.classifiers)
    warm_up(network)
    made = put(network, only, ShapeChoice.SINGLE, 1)
    zeta = next(c for c in made.tree.classes if c.classid == ZETA)
    with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=MARK, flows=8):
        time.sleep(0.3)
        with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=ZETA.minor << 16, flows=1):
            time.sleep(0.3)
            started, before = time.monotonic(), network.read().counters
            time.sleep(1)
            after, elapsed = network.read().counters, time.monotonic() - started
    for classid in (ACME, ZETA):
        rate = (after[classid].sent_bytes - before[classid].sent_bytes) * 8 / elapsed
        assert rate >= 0.5 * zeta.floor.bits_per_second, classid
