"""What is wanted of publishers, changed while it runs: what stays is not disturbed, what can't be had is refused."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest
from bus_rig import NAMESPACE, in_flowing_time, until
from router_rig import ANY_PORT, Publishing, ZmqPublisher, routing

from kura_shaper.broker.router.settings import Subscription
from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import Endpoint


def of(publisher: ZmqPublisher, *topics: str, expose: Endpoint | None = None) -> Subscription:
    return Subscription(publisher.endpoint, NAMESPACE, topics, expose)


def free_address() -> Endpoint:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Endpoint("127.0.0.1", free.getsockname()[1])


@pytest.mark.case("ER13")
@in_flowing_time
async def test_what_stays_wanted_is_not_disturbed_what_is_new_is_read_and_what_is_not_wanted_ends() -> None:
    stays, goes, comes = publishers = [ZmqPublisher(number) for number in range(3)]
    async with routing(*publishers, subscriptions=(of(stays, "kv-events"), of(goes, "kv-events"))) as rig:
        await rig.start_broker()
        await rig.read()
        for each in (stays, goes):
            await each.subscribed()
        kept = rig.bus.feeds[0], rig.bus.feeds[0].current
        async with Publishing(stays, comes):
            await until(lambda: len(rig.output.found) >= 50)
            await rig.bus.want([of(comes, "kv-events"), of(stays, "kv-events", expose=ANY_PORT)])
            await rig.read()
            await goes.subscribed(unsubscribes=1)
            await comes.subscribed()
            before = len(rig.output.found)
            await until(lambda: len(rig.output.found) >= before + 100)
        assert [feed.wanted.endpoint for feed in rig.bus.feeds] == [comes.endpoint, stays.endpoint]
        assert (rig.bus.feeds[1], rig.bus.feeds[1].current) == kept
        assert rig.output.missed == 0
        assert (stays.subscribes, stays.unsubscribes) == (1, 0)
        assert len(rig.bus.ports) == 1
        await rig.bus.want([])
        await until(lambda: not rig.bus.by_client["gpu-a-1"].tunnels)


@pytest.mark.case("ER13")
@in_flowing_time
async def test_other_topics_of_a_publisher_show_what_was_missed_meanwhile_as_a_gap() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        await rig.start_broker()
        await publisher.subscribed()
        publisher.publish()
        await until(lambda: len(rig.output.found) == 1)
        await rig.bus.want([])
        await publisher.subscribed(unsubscribes=1)
        for _ in range(3):
            publisher.publish()
        # In one change the old feed ends and the new one begins; what is published in between is lost, and told.
        await rig.bus.want([of(publisher, "kv-events")])
        await publisher.subscribed(2)
        publisher.publish()
        await until(lambda: len(rig.output.found) == 2)
        assert rig.output.missed == 0
        await rig.bus.want([of(publisher, "kv-events", "kv_metrics")])
        publisher.publish()
        await publisher.subscribed(4, unsubscribes=2)
        number = publisher.publish()
        await until(lambda: rig.output.numbers()[-1:] == [number])
        assert rig.output.missed == number - rig.output.numbers()[-2] - 1


@pytest.mark.case("ER13")
@in_flowing_time
async def test_an_address_that_can_not_be_had_leaves_everything_as_it_was() -> None:
    publisher = ZmqPublisher()
    exposed = of(publisher, "kv-events", expose=free_address())
    async with routing(publisher, subscriptions=(exposed,)) as rig:
        await rig.start_broker()
        await rig.read()
        feeds, ports, added = rig.bus.feeds, rig.bus.ports, free_address()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            at = Endpoint("127.0.0.1", taken.getsockname()[1])
            with pytest.raises(UsageError, match=r"^expose "):
                await rig.bus.want([of(publisher, expose=added), of(publisher, expose=at)])
        assert (rig.bus.feeds, rig.bus.ports) == (feeds, ports)
        with socket.create_connection((exposed.expose.host, exposed.expose.port)):  # type: ignore[union-attr]
            await until(lambda: len(ports[0].connections) == 1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(added.host, added.port)


@pytest.mark.case("ER13")
@in_flowing_time
async def test_a_port_is_given_another_publisher_and_its_readers_have_to_come_again() -> None:
    before, after = publishers = [ZmqPublisher(number) for number in range(2)]
    exposed = of(before, expose=free_address())
    async with routing(*publishers, subscriptions=(exposed,)) as rig:
        await rig.start_broker()
        (port,) = rig.bus.ports
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        assert await reader.readexactly(10)
        await rig.bus.want([replace(exposed, topics=("x",))])
        assert len(port.connections) == 1
        await rig.bus.want([replace(exposed, endpoint=after.endpoint)])
        await until(lambda: not port.connections)
        writer.transport.abort()
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        assert await reader.readexactly(10)
        (tunnel,) = rig.bus.by_client["gpu-a-1"].tunnels.values()
        assert str(tunnel.target) == after.endpoint
        await rig.bus.want([])
        await until(lambda: not port.connections)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", exposed.expose.port)  # type: ignore[union-attr]
        writer.transport.abort()
