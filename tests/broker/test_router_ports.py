"""A publisher as a local port: an unmodified subscriber of libzmq reads it through the tunnel."""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
import zmq.asyncio
from bus_rig import NAMESPACE, Publisher, in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import ANY_PORT, TOPIC, RouterRig, ZmqPublisher, routing

from kura_shaper.broker.protocol.codec import encode
from kura_shaper.broker.protocol.frames import StreamRefused
from kura_shaper.broker.protocol.limits import KIB
from kura_shaper.broker.router.dynamo import decode_event
from kura_shaper.broker.router.settings import Subscription

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@asynccontextmanager
async def exposing(**changes: Any) -> AsyncIterator[tuple[RouterRig, ZmqPublisher]]:
    """Run a router, without a broker yet, that has a publisher of libzmq as a local port."""
    publisher = ZmqPublisher()
    exposed = Subscription(publisher.endpoint, NAMESPACE, expose=ANY_PORT)
    async with routing(publisher, subscriptions=(exposed,), **changes) as rig:
        yield rig, publisher


@contextmanager
def subscriber(rig: RouterRig, topic: str = TOPIC) -> Iterator[zmq.asyncio.Socket]:
    """Subscribe at the local port as any program does."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as made:
        made.linger = 0
        made.subscribe(topic)
        made.connect(f"tcp://127.0.0.1:{rig.bus.ports[0].port}")
        yield made


@pytest.mark.case("ER62")
@in_flowing_time
async def test_an_unmodified_subscriber_reads_a_publisher_that_it_has_no_route_to() -> None:
    async with exposing() as (rig, publisher):
        await rig.start_broker()
        with subscriber(rig) as reading:
            await publisher.subscribed()
            for _ in range(500):
                publisher.publish()
            found = [decode_event(await reading.recv_multipart()).sequence for _ in range(500)]
            assert found == list(range(500))
        await publisher.subscribed(unsubscribes=1)


@pytest.mark.case("ER65")
@in_flowing_time
async def test_after_its_broker_died_the_subscriber_is_connected_by_another_one() -> None:
    async with exposing() as (rig, publisher):
        await rig.start_broker("a")
        with subscriber(rig) as reading:
            await publisher.subscribed()
            await rig.start_broker("b")
            await rig.kill_broker("a")
            # libzmq repeats its subscriptions only while somebody receives.
            receiving = asyncio.ensure_future(reading.recv_multipart())
            await publisher.subscribed(2, unsubscribes=1)
            publisher.publish()
            assert decode_event(await receiving).sequence == 0


@pytest.mark.case("ER63")
@in_flowing_time
async def test_two_subscribers_at_once_have_a_stream_each_and_all_of_their_topics() -> None:
    async with exposing() as (rig, publisher):
        await rig.start_broker()
        with subscriber(rig) as one, subscriber(rig, "kv_metrics") as other:
            await publisher.subscribed(2)
            for _ in range(100):
                publisher.publish()
                publisher.publish("kv_metrics")
            evens = [decode_event(await one.recv_multipart()).sequence for _ in range(100)]
            odds = [decode_event(await other.recv_multipart()).sequence for _ in range(100)]
            assert (evens, odds) == (list(range(0, 200, 2)), list(range(1, 200, 2)))
            assert len(rig.bus.ports[0].connections) == len(rig.bus.by_client["gpu-a-1"].tunnels) == 2


@pytest.mark.case("ER64")
@in_flowing_time
async def test_a_subscriber_that_leaves_frees_its_stream_and_finds_another_when_it_comes_back() -> None:
    async with exposing() as (rig, publisher):
        await rig.start_broker()
        for times in range(1, 6):
            with subscriber(rig) as reading:
                await publisher.subscribed(times)
                number = publisher.publish()
                assert decode_event(await reading.recv_multipart()).sequence == number
            await publisher.subscribed(times, unsubscribes=times)
            await until(lambda: not rig.bus.by_client["gpu-a-1"].tunnels)
        assert rig.bus.counts.local_connections == rig.bus.counts.tunnel_ends["unsubscribed"] == 5


@pytest.mark.case("ER65")
@in_flowing_time
async def test_what_one_broker_refuses_a_connection_is_asked_of_another_one() -> None:
    async with exposing() as (rig, _), client(rig) as raw:
        await raw.session(replace(HELLO, client_id="a"))
        await rig.start_broker("b")
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        (asked,) = await raw.asked()
        raw.send(raw.session_http_id, encode(StreamRefused(asked.stream_id, "target_not_advertised", True)))
        assert await reader.readexactly(10)
        writer.transport.abort()


@pytest.mark.case("ER66")
@in_flowing_time
async def test_bytes_come_through_whole_both_ways_and_the_end_too() -> None:
    publisher = Publisher()
    await publisher.start()
    exposed = Subscription(publisher.endpoint, NAMESPACE, expose=ANY_PORT)
    # As wide as what is sent: a broker keeps no more than a mebibyte for a router that grants less.
    async with routing(subscriptions=(exposed,), stream_window_bytes=8 << 20) as rig:
        rig.directory.advertise(publisher.endpoint)
        await rig.start_broker()
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        up, down = os.urandom(5 << 20), os.urandom(5 << 20)
        writer.write(down)
        connection = await publisher.connection()
        sending = asyncio.ensure_future(connection.send(up))
        assert hashlib.sha256(await reader.readexactly(len(up))).digest() == hashlib.sha256(up).digest()
        await until(lambda: len(connection.received) == len(down))
        assert hashlib.sha256(connection.received).digest() == hashlib.sha256(down).digest()
        await sending
        connection.transport.close()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not rig.bus.ports[0].connections)
    await publisher.stop()


@pytest.mark.case("ER67")
@in_flowing_time
async def test_a_reader_that_reads_nothing_ends_its_own_stream_and_no_other() -> None:
    publisher = Publisher()
    await publisher.start()
    exposed = Subscription(publisher.endpoint, NAMESPACE, expose=ANY_PORT)
    async with routing(subscriptions=(exposed,), stream_window_bytes=64 * KIB, max_stream_buffer_bytes=64 * KIB) as rig:
        rig.directory.advertise(publisher.endpoint)
        broker = await rig.start_broker()
        _, stalled = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        first = await publisher.connection(1)
        reader, other = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        second = await publisher.connection(2)
        stalled.transport.pause_reading()  # type: ignore[attr-defined]
        sending = asyncio.ensure_future(first.send(bytes(64 << 20)))
        await until(lambda: broker.counts.stream_ends["buffer_overflow"] == 1)
        await second.send(b"still here")
        assert await reader.readexactly(10) == b"still here"
        stalled.transport.abort()
        other.close()
        await sending
    await publisher.stop()


@pytest.mark.case("ER68")
@in_flowing_time
async def test_without_a_broker_a_connection_is_closed_after_a_while_and_not_at_once() -> None:
    exposed = Subscription("tcp://127.0.0.1:9", NAMESPACE, expose=ANY_PORT)
    async with routing(subscriptions=(exposed,)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        await until(lambda: bool(rig.bus.ports[0].connections))
        await loop().advance(0.9)
        assert rig.bus.ports[0].connections
        await loop().advance(0.3)
        assert await reader.read() == b""
        writer.close()
