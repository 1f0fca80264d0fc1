"""A broker on a node with a tree: its bytes leave by the class of its mark, and a wire that is cut is noticed."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import ssl
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import WIDE, RouterRig, authority, in_a_loop, in_flowing_time, loop, running, until
from long_way import NARROW_BYTES, RTT_S, long_way, steady_rate
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.broker.dial import MarkRefusedError, require_mark
from kura_shaper.broker.settings import BusUrl
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.diff import plan
from kura_shaper.units import Rate

sys.path.append(str(Path(__file__).parents[1] / "kernel"))
from kernel_traffic import WORLD, counted, read_when_sent, warm_up
from kernel_trees import ACME, GBIT, HOST, document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bus_rig import Script
    from conftest import Ended, Network

pytestmark = pytest.mark.privileged


@functools.cache
def world_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert(WORLD[socket.AF_INET]).configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


@asynccontextmanager
async def through_wire(network: Network, script: Script | None = None, **changes: Any) -> AsyncIterator[Any]:
    """Run a broker on the node, whose router is in the world."""
    outside = RouterRig(script)
    with network.in_world():
        await outside.start(host=WORLD[socket.AF_INET], context=world_context())
    async with running(bus_url=BusUrl(WORLD[socket.AF_INET], outside.port), **changes) as rig:
        inside, rig.router = rig.router, outside
        yield rig
        rig.router = inside
    await outside.stop()


@pytest.fixture
def tree(network: Network, capabilities: Capabilities) -> Network:
    """Put a tree on the node's device."""
    made = build(
        document(),
        network.device,
        settings=TreeSettings(Rate(10 * GBIT), shape=ShapeChoice.SINGLE),
        capabilities=capabilities,
    )
    refused = [
        each for each in network.client().send(plan(made, network.read()).operations, network.device.ifindex) if each
    ]
    assert not refused, refused
    warm_up(network)
    return network


@in_a_loop
async def test_what_a_broker_relays_is_counted_in_the_class_of_its_mark(tree: Network) -> None:
    async with through_wire(tree, so_mark=ACME.minor << 16) as rig:
        peer, _, connection, stream_id = await rig.stream()
        before, size = await asyncio.to_thread(read_when_sent, tree), 5_000_000
        await connection.send(bytes(size))
        await until(lambda: len(peer.streams[stream_id].received) == size)
        spent = counted(before, await asyncio.to_thread(read_when_sent, tree))
        assert spent[ACME][1] > size
        assert spent.get(HOST, (0, 0))[1] < size / 100


def set_link(network: Network, state: str) -> None:
    with IPRoute() as ip:
        ip.link("set", index=network.device.ifindex, state=state)


@pytest.mark.case("EP9")
@pytest.mark.case("EP10")
@in_a_loop
async def test_a_wire_that_is_cut_ends_the_session_at_the_timeout_and_is_found_again(network: Network) -> None:
    async with through_wire(network) as rig:
        peer, _, connection, _ = await rig.stream()
        await asyncio.to_thread(set_link, network, "down")
        await loop().advance(31)
        await until(lambda: connection.lost)
        assert rig.broker.counts.session_ends["idle_timeout"] == 1
        await loop().advance(300, step_s=1)
        await asyncio.to_thread(set_link, network, "up")
        for _ in range(61):
            await loop().advance(1)
            if len(rig.router.peers) == 2:
                break
        await rig.router.peer(2)
        peer.abort()


def delay(interface: str) -> None:
    """Let what leaves an interface of this namespace take half of the way's time."""
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=interface)
        try:
            ip.tc("add", "netem", index, "1:", delay=int(RTT_S / 2 * 1_000_000), limit=100_000)
        except NetlinkError as error:
            if error.code != errno.ENOENT:
                raise
            pytest.skip("this kernel has no netem")


@pytest.fixture
def long_wire(network: Network) -> Network:
    """Let every packet between node and world take its time."""
    delay(network.device.name)
    with network.in_world():
        delay("up0")
    return network


@pytest.mark.case("EP17")
@pytest.mark.slow
@pytest.mark.traffic
@in_flowing_time
async def test_over_a_long_wire_the_routers_window_is_the_bound_and_not_the_broker(long_wire: Network) -> None:
    async def rate(window: int) -> float:
        async with through_wire(long_wire, long_way(window)) as rig:
            return await steady_rate(rig)

    narrow, wide = await rate(NARROW_BYTES), await rate(WIDE)
    assert 0.5 * NARROW_BYTES / RTT_S < narrow < 1.1 * NARROW_BYTES / RTT_S
    assert wide > 10 * narrow


def test_a_mark_that_may_not_be_set_is_an_error_before_anything_is_dialled(
    in_child: Callable[[Callable[[], int | None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    def work() -> int:
        require_mark(1)
        drop_capabilities()
        require_mark(None)
        try:
            require_mark(1)
        except MarkRefusedError as error:
            return 0 if "CAP_NET_ADMIN" in str(error) else 2
        return 3

    assert in_child(work).status == 0
