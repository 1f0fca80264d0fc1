"""Who reads what a broker had when it is gone, and how soon.

Time stands still here unless a test moves it, so nothing that waits for a timer happens: what is asked for,
is asked for in the very turn in which the broker was lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from bus_rig import NAMESPACE, in_a_loop, in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import RouterRig, ZmqPublisher, one_reading, routing

from kura_shaper.broker.protocol.codec import encode
from kura_shaper.broker.protocol.codes import DrainReason
from kura_shaper.broker.protocol.frames import StreamRefused
from kura_shaper.broker.router.faults import Fault, cause
from kura_shaper.broker.router.settings import Subscription

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def is_gone(rig: RouterRig) -> None:
    await rig.kill_broker("a")


async def is_broken_off(rig: RouterRig) -> None:
    cause(Fault.BREAK, rig.bus.by_client["a"])


async def is_superseded(rig: RouterRig) -> None:
    superseded = rig.brokers.pop("a")
    await rig.start_broker("a")
    rig.brokers["before a"] = superseded


async def leaves(rig: RouterRig) -> None:
    rig.brokers["a"][0].stop()


async def is_drained(rig: RouterRig) -> None:
    rig.bus.drain(rig.bus.by_client["a"], DrainReason.MAINTENANCE)


@pytest.mark.parametrize("happens", [is_gone, is_broken_off, is_superseded, leaves, is_drained])
@pytest.mark.case("ER5")
def test_what_a_broker_had_is_asked_of_another_one_in_the_same_turn(
    happens: Callable[[RouterRig], Awaitable[None]],
) -> None:
    @in_a_loop
    async def run() -> None:
        publishers = [ZmqPublisher(number) for number in range(4)]
        async with routing(*publishers) as rig:
            await rig.start_broker("a")
            await rig.read()
            before = rig.bus.by_client["a"]
            await rig.start_broker("b")
            for feed in rig.bus.feeds:
                # None is on its way to the newcomer, so all have to be asked of it now.
                if feed.next is not None:
                    feed.next.close()
                    feed._drop_next()
            asked_before = rig.bus.counts.subscribes
            now_s = loop().time()
            ended = [feed.current for feed in rig.bus.feeds]
            await happens(rig)
            await until(lambda: before.is_over or before.protocol.is_draining)
            # No turn of the loop after that one.
            assert rig.bus.counts.subscribes - asked_before == 4
            assert all(feed.session is not before for feed in rig.bus.feeds)
            await until(lambda: all((feed.next or feed.current) not in (None, *ended) for feed in rig.bus.feeds))
            await until(lambda: all((feed.next or feed.current).is_subscribed for feed in rig.bus.feeds))  # type: ignore[union-attr]
            assert loop().time() == now_s

    run()


@pytest.mark.case("ER6")
def test_with_no_second_broker_reading_goes_on_in_the_turn_in_which_it_comes_back() -> None:
    @in_a_loop
    async def run() -> None:
        publishers = [ZmqPublisher(number) for number in range(4)]
        async with routing(*publishers) as rig:
            broker = await rig.start_broker("a")
            await rig.read()
            await is_broken_off(rig)
            await until(lambda: not rig.bus.by_client)
            await until(lambda: broker.counts.reconnect_wait_s > 0)
            assert all(feed.current is None for feed in rig.bus.feeds)
            asked_before = rig.bus.counts.subscribes
            # One wait of the broker, and nothing after it: the router adds none of its own.
            assert broker.counts.reconnect_wait_s <= 2.0
            await loop().advance(broker.counts.reconnect_wait_s, step_s=2.0)
            now_s = loop().time()
            await until(lambda: "a" in rig.bus.by_client)
            assert rig.bus.counts.subscribes - asked_before == 4
            await rig.read()
            assert loop().time() == now_s

    run()


@pytest.mark.case("ER7")
def test_a_broker_that_refuses_is_not_the_only_one_that_is_asked() -> None:
    @in_a_loop
    async def run() -> None:
        publisher = ZmqPublisher()
        async with routing(publisher) as rig, client(rig) as raw:
            await raw.session(replace(HELLO, client_id="a"))
            (first,) = await raw.asked()
            # This one does nothing for it but refuse, and has the least to do for ever.
            await rig.start_broker("b")
            assert rig.bus.feeds[0].session is rig.bus.by_client["a"]
            raw.send(raw.session_http_id, encode(StreamRefused(first.stream_id, "target_not_advertised", True)))
            await rig.read()
            assert rig.bus.feeds[0].session is rig.bus.by_client["b"]

    run()


@pytest.mark.case("ER7")
@in_flowing_time
async def test_when_all_refuse_each_is_asked_again_later_and_none_at_once() -> None:
    async with routing(subscriptions=(Subscription("tcp://10.0.0.1:5", NAMESPACE, ("x",)),)) as rig:
        brokers = [await rig.start_broker(name) for name in ("a", "b")]
        for _ in range(40):
            await loop().advance(0.25)
            await asyncio.sleep(0.005)
        refused = [each.counts.refusals["target_not_advertised"] for each in brokers]
        assert 2 <= min(refused) <= max(refused) <= min(refused) + 1 <= 10


@pytest.mark.case("ER9")
@in_flowing_time
async def test_a_move_to_a_broker_that_leaves_itself_is_bound_elsewhere() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        for name in ("a", "b", "c"):
            await rig.start_broker(name)
        await rig.read()
        (feed,) = rig.bus.feeds
        for name in ("a", "b"):
            rig.bus.drain(rig.bus.by_client[name], DrainReason.MAINTENANCE)
        assert feed.session is rig.bus.by_client["c"]
        await loop().advance(1.5)
        await rig.read()
        assert [session.moving for session in rig.bus.by_client.values()].count(0) == len(rig.bus.by_client)
        await rig.hear(publisher)


@pytest.mark.case("ER9")
@in_flowing_time
async def test_what_is_to_move_and_is_refused_is_asked_for_again_while_its_broker_is_there() -> None:
    async with one_reading() as (rig, _, _), client(rig) as raw:
        await raw.session(replace(HELLO, client_id="b"))
        rig.bus.drain(rig.bus.by_client["a"], DrainReason.MAINTENANCE)
        (first,) = await raw.asked()
        raw.send(raw.session_http_id, encode(StreamRefused(first.stream_id, "target_not_advertised", True)))
        await until(lambda: rig.bus.feeds[0].next is None)
        assert rig.bus.feeds[0].is_read
        await loop().advance(0.5)
        assert len(await raw.asked(2)) == 2
        assert rig.bus.feeds[0].is_read
