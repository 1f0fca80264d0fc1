"""Several brokers for one namespace: who reads what, who takes over, and what is lost meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bus_rig import NAMESPACE, in_flowing_time, loop, until
from router_rig import ANY_PORT, Publishing, RouterRig, ZmqPublisher, one_reading, routing

from kura_shaper.broker.router.settings import Subscription


def spread(rig: RouterRig) -> dict[str, int]:
    return {name: len(session.tunnels) for name, session in rig.bus.by_client.items()}


@pytest.mark.case("ER4")
@in_flowing_time
async def test_two_brokers_share_the_publishers_and_one_takes_all_over_when_the_other_dies() -> None:
    publishers = [ZmqPublisher(number) for number in range(6)]
    async with routing(*publishers) as rig:
        await rig.start_broker("a")
        await rig.read()
        await rig.start_broker("b")
        await loop().advance(1.2)
        await rig.read()
        assert spread(rig) == {"a": 3, "b": 3}
        async with Publishing(*publishers):
            await until(lambda: len(rig.output.found) >= 100)
            await rig.kill_broker("a")
            await until(lambda: "a" not in rig.bus.by_client)
            # In the same turn, and not at some next try.
            assert spread(rig) == {"b": 6}
            await rig.read()
            before = len(rig.output.found)
            await until(lambda: len(rig.output.found) >= before + 100)
        # Three publishers lost their stream; what they said meanwhile is missing, and counted to the number.
        known = {id_: each for feed in rig.bus.feeds for (id_, _), each in feed.sequences.known.items()}
        assert sum(each.gaps for each in known.values()) <= 3
        assert rig.output.missed == sum(each.missed for each in known.values())
        for publisher_id, each in known.items():
            numbers = [event.sequence for event, _, _ in rig.output.found if event.publisher_id == publisher_id]
            missing = set(range(numbers[0], numbers[-1] + 1)) - set(numbers)
            assert len(missing) == each.missed


@pytest.mark.case("ER9")
@in_flowing_time
async def test_a_broker_that_leaves_hands_its_publishers_over_and_no_event_is_lost() -> None:
    publishers = [ZmqPublisher(number) for number in range(4)]
    async with routing(*publishers) as rig:
        await rig.start_broker("a")
        await rig.read()
        async with Publishing(*publishers):
            await until(lambda: len(rig.output.found) >= 100)
            await rig.start_broker("b")
            leaving, task = rig.brokers["a"]
            leaving.stop()
            moving = asyncio.ensure_future(asyncio.wait([task]))
            while not moving.done():
                await loop().advance(0.25)
                await asyncio.sleep(0.01)
            assert task.exception() is None
            assert spread(rig) == {"b": 4}
            before = len(rig.output.found)
            await until(lambda: len(rig.output.found) >= before + 400)
        for each in publishers:
            numbers = [event.sequence for event, _, _ in rig.output.found if event.publisher_id == each.publisher_id]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert rig.output.missed == 0


@pytest.mark.case("ER8")
@in_flowing_time
async def test_a_newcomer_with_the_same_id_supersedes_and_reads_on() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        first = await rig.start_broker("a")
        await rig.read()
        before = rig.bus.by_client["a"]
        old = rig.brokers.pop("a")
        await rig.start_broker("a")
        await until(lambda: first.view.last_end is not None)
        assert first.view.last_end
        assert first.view.last_end.code == "superseded"
        assert before.end_code == "superseded"
        await rig.read()
        await rig.hear(publisher)
        # The one that was superseded stays away for its longest wait: the two do not take turns.
        assert first.counts.reconnect_wait_s >= 30
        old[1].cancel()
        await asyncio.gather(old[1], return_exceptions=True)


@pytest.mark.case("ER11")
@in_flowing_time
async def test_a_router_that_stops_asks_its_clients_to_leave_and_ends() -> None:
    async with one_reading() as (rig, broker, _):
        rig.bus.stop()
        await rig.running
        assert broker.view.last_end is None or broker.view.last_end.code == "drain"
        await until(lambda: broker.view.last_end is not None)
        assert broker.counts.stream_ends["unsubscribed"] == 1


@pytest.mark.case("ER11")
@in_flowing_time
async def test_a_router_that_stops_waits_for_local_readers_until_its_deadline() -> None:
    publisher = ZmqPublisher()
    exposed = Subscription(publisher.endpoint, NAMESPACE, expose=ANY_PORT)
    async with routing(publisher, subscriptions=(exposed,), drain_deadline_ms=5_000) as rig:
        # That there was nobody once does not count when it leaves.
        await rig.start_broker("a")
        await rig.kill_broker("a")
        await until(lambda: not rig.bus.by_client)
        await rig.start_broker("b")
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
        assert await reader.readexactly(10)
        rig.bus.stop()
        await loop().advance(4.5)
        assert not rig.running.done()
        await loop().advance(1.0)
        await rig.running
        writer.close()


@pytest.mark.case("ER10")
@in_flowing_time
async def test_what_no_broker_advertises_is_tried_again_and_then_read() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        rig.directory.known.clear()
        await rig.start_broker("a")
        await until(lambda: rig.bus.counts.refusals["target_not_advertised"] == 1)
        rig.directory.advertise(publisher.endpoint)
        await loop().advance(2.0)
        await rig.read()


@in_flowing_time
async def test_a_kv_listener_is_welcomed_and_never_asked_for_a_publisher() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        broker = await rig.start_broker("a")
        session = rig.bus.by_client["a"]
        hello: Any = session.protocol.hello
        object.__setattr__(hello, "role", "kv_listener")
        assert rig.bus.choose(NAMESPACE) is None
        assert broker.view.session


@pytest.mark.case("ER10")
@in_flowing_time
async def test_another_namespace_is_left_to_who_covers_it() -> None:
    publisher = ZmqPublisher()
    other = Subscription(publisher.endpoint, "other", ("x",))
    async with routing(publisher, subscriptions=(other,)) as rig:
        await rig.start_broker("a")
        assert rig.bus.choose("other") is None
        await rig.start_broker("b", dynamo_namespaces=("other",))
        rig.directory.advertise(publisher.endpoint, "other")
        await loop().advance(3.0)
        await rig.read()
        assert spread(rig) == {"a": 0, "b": 1}
