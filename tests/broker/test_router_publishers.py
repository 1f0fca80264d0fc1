"""Publishers that are none, or mean harm: each costs its own stream, and is not asked again and again."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest
from bus_rig import NAMESPACE, Publisher, in_flowing_time, loop, pause, until
from router_rig import RouterRig, ZmqPublisher, routing
from zmtp_bytes import GREETING, READY, message

from kura_shaper.broker.router.dynamo import Event, encode_event
from kura_shaper.broker.router.settings import Subscription

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def beside_a_good_one() -> AsyncIterator[tuple[RouterRig, ZmqPublisher, Publisher]]:
    """Run a router and a broker with a publisher that is good, and one that says only what a test has it say."""
    good, bad = ZmqPublisher(), Publisher()
    await bad.start()
    wanted = tuple(Subscription(each.endpoint, NAMESPACE, ("kv-events",)) for each in (good, bad))
    async with routing(good, subscriptions=wanted) as rig:
        rig.directory.advertise(bad.endpoint)
        await rig.start_broker()
        yield rig, good, bad
    await bad.stop()


@asynccontextmanager
async def alone(*topics: str) -> AsyncIterator[tuple[RouterRig, Publisher]]:
    """Run a router and a broker with a publisher that says only what a test has it say, and a feed for each topic."""
    publisher = Publisher()
    await publisher.start()
    wanted = tuple(Subscription(publisher.endpoint, NAMESPACE, (topic,)) for topic in topics)
    async with routing(subscriptions=wanted) as rig:
        rig.directory.advertise(publisher.endpoint)
        await rig.start_broker()
        yield rig, publisher
    await publisher.stop()


@pytest.mark.case("ER46")
@pytest.mark.case("ER47")
@pytest.mark.case("ER50")
@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "greeting"),
        (GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH", "handshake"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "mechanism"),
        (GREETING + READY + b"\x02" + b"\x7f" * 8, "too_large"),
        (GREETING + READY + b"\x01\x00" * 17, "too_many_parts"),
        (GREETING + READY + b"\x80\x00", "frame"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_publisher_that_is_none_costs_its_stream_and_nobody_elses(said: bytes, fault: str) -> None:
    @in_flowing_time
    async def run() -> None:
        async with beside_a_good_one() as (rig, good, bad):
            connection = await bad.connection()
            await until(lambda: bytes(connection.received).startswith(b"\xff"))
            connection.transport.write(said)
            await until(lambda: rig.bus.counts.bad_publishers[fault] == 1)
            await until(lambda: connection.lost)
            await rig.hear(good)
            # It is tried again, but later and later.
            for _ in range(40):
                await loop().advance(0.25)
                for each in bad.connections[1:]:
                    if not each.lost:
                        each.transport.write(said)
                await asyncio.sleep(0.01)
            assert 2 <= rig.bus.counts.bad_publishers[fault] <= 8
            await rig.hear(good)

    run()


@pytest.mark.case("ER52")
@in_flowing_time
async def test_a_publisher_that_never_greets_is_let_go_after_thirty_seconds() -> None:
    async with alone("x") as (rig, silent):
        await silent.connection()
        await until(lambda: rig.bus.feeds[0].current is not None)
        await loop().advance(31)
        await until(lambda: rig.bus.counts.bad_publishers["handshake"] == 1)


@pytest.mark.case("ER52")
@in_flowing_time
async def test_a_publisher_that_answers_no_ping_is_let_go() -> None:
    async with alone("x") as (rig, quiet):
        connection = await quiet.connection()
        connection.transport.write(GREETING + READY)
        await rig.read()
        await loop().advance(29)
        assert b"PING" not in connection.received
        await loop().advance(3)
        await until(lambda: b"PING" in connection.received)
        await loop().advance(100)
        await until(lambda: rig.bus.counts.bad_publishers["silent"] == 1)


@pytest.mark.case("ER51")
@in_flowing_time
async def test_halves_of_messages_of_many_publishers_take_only_so_much_together() -> None:
    async with alone(*(f"t{number}" for number in range(8))) as (rig, hostile):
        rig.bus.kept.limit_bytes = 3_000_000
        await hostile.connection(8)
        for each in hostile.connections:
            each.transport.write(GREETING + READY + b"\x03" + (900_000).to_bytes(8, "big") + bytes(800_000))
        await until(lambda: rig.bus.counts.bad_publishers["flood"] == 5)
        assert rig.bus.kept.used_bytes <= 3_000_000
        for feed in rig.bus.feeds:
            feed.close()
        assert rig.bus.kept.used_bytes == 0


@pytest.mark.case("ER44")
@in_flowing_time
async def test_messages_that_are_no_events_are_counted_and_the_next_event_is_read() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        await rig.start_broker()
        await rig.read()
        await rig.hear(publisher)
        publisher.send(b"kv-events")
        publisher.send(b"kv-events", bytes(8), bytes(8), b"\x02\0\0\0\0")
        publisher.send(b"kv-events", bytes(8), bytes(8), b"\x01\0\0\0\x01\xc1")
        await until(lambda: sum(rig.bus.counts.bad_events.values()) == 3)
        await rig.hear(publisher)
        assert {kind: number for kind, number in rig.bus.counts.bad_events.items() if number} == {
            "parts": 1,
            "version": 1,
            "envelope": 1,
        }


@pytest.mark.case("ER49")
@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_publisher_says_only_its_own_stream_is_lost(seed: int) -> None:
    @in_flowing_time
    async def run() -> None:
        random = Random(seed)
        whole = GREETING + READY + message(*encode_event(Event("kv-events", 1, 1, 1, b"\x80"))) * 3
        async with beside_a_good_one() as (rig, good, bad):
            for number in range(1, 31):
                connection = await bad.connection(number)
                said = bytearray(whole)
                for _ in range(random.randint(1, 8)):
                    said[random.randrange(len(said))] = random.randrange(256)
                connection.transport.write(bytes(said[: random.randint(1, len(said))]))
                await pause()
                connection.transport.close()
                await loop().advance(0.2)
                rig.bus.feeds[1]._failures = 0
                await loop().advance(0.5)
            await rig.hear(good)
            assert rig.bus.kept.used_bytes <= rig.bus.max_message_bytes
            assert rig.bus.by_client

    run()


@pytest.mark.case("ER51")
@in_flowing_time
async def test_a_message_that_never_ends_is_kept_to_a_bound_and_holds_nobody_up() -> None:
    async with beside_a_good_one() as (rig, good, bad):
        connection = await bad.connection()
        # A part as long as may be, a little of it each second.
        connection.transport.write(GREETING + READY + b"\x02" + (1 << 20).to_bytes(8, "big"))
        for _ in range(150):
            connection.transport.write(bytes(1_000))
            await loop().advance(1.0, step_s=1.0)
            await asyncio.sleep(0.002)
        await rig.hear(good)
        assert 0 < rig.bus.kept.used_bytes <= rig.bus.max_message_bytes + 9
        connection.transport.close()
        await until(lambda: rig.bus.kept.used_bytes == 0)
