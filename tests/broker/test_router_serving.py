"""Events served to other programs: everybody has every event, and who is too slow is cut off and holds nobody up."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import in_flowing_time, until
from router_rig import ANY_PORT, RouterRig, ZmqPublisher, routing

from kura_shaper.broker.router.serving import CLIENTS_MAX, WAITING_BYTES_MAX
from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def reader(rig: RouterRig) -> AsyncIterator[asyncio.StreamReader]:
    """Connect as any other program does, and return when the router has seen it."""
    assert rig.bus.served
    before = rig.bus.counts.served_connections
    found, writer = await asyncio.open_connection("127.0.0.1", rig.bus.served.port)
    await until(lambda: rig.bus.counts.served_connections > before)
    try:
        yield found
    finally:
        writer.transport.abort()


async def lines(found: asyncio.StreamReader, number: int) -> list[dict[str, Any]]:
    return [json.loads(await found.readline()) for _ in range(number)]


@pytest.mark.case("ER17")
@in_flowing_time
async def test_each_program_has_every_event_from_when_it_connected_on() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher, serve=ANY_PORT) as rig:
        await rig.start_broker()
        await rig.read()
        async with reader(rig) as first:
            await publisher.subscribed()
            publisher.publish()
            assert (await lines(first, 1))[0]["sequence"] == 0
            async with reader(rig) as second:
                for _ in range(200):
                    publisher.publish()
                told = await lines(second, 200)
                assert [each["sequence"] for each in told] == list(range(1, 201))
                assert await lines(first, 200) == told
        assert set(told[0]) == {
            *("endpoint", "topic", "publisher_id", "sequence", "published_at_ms", "arrival", "missed_before"),
            *("dropped_before", "payload"),
        }
        assert (told[0]["endpoint"], told[0]["payload"]) == (publisher.endpoint, {"k": 1})
        await until(lambda: not rig.bus.served or not rig.bus.served.clients)


@pytest.mark.case("ER18")
@in_flowing_time
async def test_a_program_that_reads_nothing_is_cut_off_and_counted_and_nobody_lacks_an_event() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher, serve=ANY_PORT) as rig:
        await rig.start_broker()
        await rig.read()
        assert rig.bus.served
        with socket.create_connection(("127.0.0.1", rig.bus.served.port)) as stalled:
            await until(lambda: rig.bus.counts.served_connections == 1)
            async with reader(rig) as other:
                await publisher.subscribed()
                seen, most_bytes = [], 0
                while not rig.bus.counts.served_cut_off["slow"]:
                    publisher.publish(payload=b"\xc5\x40\x00" + bytes(0x4000))
                    seen.append((await lines(other, 1))[0]["sequence"])
                    waiting = [each._transport.get_write_buffer_size() for each in clients(rig)]
                    most_bytes = max(most_bytes, *waiting)
                publisher.publish()
                seen.append((await lines(other, 1))[0]["sequence"])
                assert seen == list(range(len(seen)))
                # It was let wait for so much and a line, and not for less.
                assert WAITING_BYTES_MAX - 65_536 < most_bytes < WAITING_BYTES_MAX + 65_536
                assert len(rig.bus.served.clients) == 1
                assert not sum(rig.bus.counts.dropped.values())
            del stalled


def clients(rig: RouterRig) -> list[Any]:
    assert rig.bus.served
    return [each for each in rig.bus.served.clients if each._transport is not None]


@pytest.mark.case("ER18")
@in_flowing_time
async def test_only_so_many_programs_are_served_and_a_place_that_is_left_is_given_again() -> None:
    async with routing(serve=ANY_PORT) as rig:
        assert rig.bus.served
        port = rig.bus.served.port
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(CLIENTS_MAX)]
        await until(lambda: len(clients(rig)) == CLIENTS_MAX)
        found, writer = await asyncio.open_connection("127.0.0.1", rig.bus.served.port)
        assert await found.read() == b""
        writer.close()
        assert rig.bus.counts.served_cut_off == {"slow": 0, "too_many": 1}
        writers.pop().transport.abort()
        await until(lambda: len(clients(rig)) == CLIENTS_MAX - 1)
        async with reader(rig):
            assert len(clients(rig)) == CLIENTS_MAX
        for each in writers:
            each.transport.abort()


@pytest.mark.case("ER17")
@in_flowing_time
async def test_what_a_program_says_means_nothing_and_its_end_is_its_end() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher, serve=ANY_PORT) as rig:
        await rig.start_broker()
        await rig.read()
        assert rig.bus.served
        found, writer = await asyncio.open_connection("127.0.0.1", rig.bus.served.port)
        await until(lambda: bool(clients(rig)))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(1_000_000))
        await writer.drain()
        await rig.hear(publisher)
        assert (await lines(found, 1))[0]["topic"] == "kv-events"
        writer.write_eof()
        await until(lambda: not clients(rig))
        await rig.hear(publisher)


@pytest.mark.case("ER17")
@in_flowing_time
async def test_a_router_that_ends_closes_what_it_serves() -> None:
    async with routing(serve=ANY_PORT) as rig, reader(rig) as found:
        rig.bus.stop()
        await rig.running
        assert await found.read() == b""


@pytest.mark.case("ER20")
@in_flowing_time
async def test_an_address_that_can_not_be_had_is_said_by_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"^serve 127\.0\.0\.1:\d+: Address already in use;"):
            async with routing(serve=Endpoint("127.0.0.1", taken.getsockname()[1])):
                pass
