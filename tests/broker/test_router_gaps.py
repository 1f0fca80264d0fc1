"""What the numbers of a real publisher's events say, through a broker: lost, doubled, late, begun anew."""

from __future__ import annotations

from contextlib import closing
from random import Random

import pytest
from bus_rig import in_flowing_time, loop, until
from router_rig import RouterRig, ZmqPublisher, one_reading, routing

from kura_shaper.broker.protocol.codes import DrainReason
from kura_shaper.broker.router.discovery import Discovery
from kura_shaper.broker.router.health import RouterHealth
from kura_shaper.broker.router.sequences import PUBLISHERS_MAX, Arrival
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock

LAST = 2**64 - 1


async def told(*numbers: int) -> RouterRig:
    """Publish events with these numbers, and return the rig when the last one was told of."""
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        await rig.start_broker()
        await publisher.subscribed()
        for number in numbers:
            publisher.next = number
            publisher.publish()
        await until(lambda: sum(rig.bus.counts.arrivals.values()) == len(numbers))
        return rig


@pytest.mark.case("ER39")
@in_flowing_time
async def test_events_that_are_lost_are_counted_to_the_number_and_said_with_the_next_one() -> None:
    rig = await told(5, 6, 9, 10, 20)
    assert [missed for _, _, missed in rig.output.found] == [0, 0, 2, 0, 9]
    assert rig.output.arrivals[-1] is Arrival.AFTER_A_GAP
    assert (rig.bus.counts.events, rig.bus.counts.events_missed) == (5, 11)
    assert rig.bus.counts.arrivals["after_a_gap"] == 2


@pytest.mark.case("ER40")
@in_flowing_time
async def test_an_event_that_two_brokers_bring_is_passed_on_once() -> None:
    async with one_reading() as (rig, _, publisher):
        await rig.start_broker("b")
        (feed,) = rig.bus.feeds
        rig.bus.drain(rig.bus.by_client["a"], DrainReason.REBALANCE)
        await publisher.subscribed(2)
        for _ in range(50):
            publisher.publish()
        await until(lambda: len(feed._held) == 50 and len(rig.output.found) == 50)
        await rig.read()
        publisher.publish()
        await until(lambda: rig.output.numbers()[-1] == 50)
        assert rig.output.numbers() == list(range(51))
        assert rig.bus.counts.dropped["duplicate"] == 50


@pytest.mark.case("ER92")
@in_flowing_time
async def test_a_publisher_that_began_anew_soon_after_a_takeover_loses_no_event() -> None:
    async with one_reading() as (rig, _, publisher):
        await rig.start_broker("b")
        for _ in range(10):
            publisher.publish()
        await until(lambda: len(rig.output.found) == 10)
        rig.bus.drain(rig.bus.by_client["a"], DrainReason.REBALANCE)
        await publisher.subscribed(2)
        await rig.read()
        publisher.close()
        await until(lambda: not any(feed.is_read for feed in rig.bus.feeds))
        now_s = loop().time()
        with closing(ZmqPublisher(port=publisher.port)) as again:
            await again.subscribed()
            for _ in range(3):
                again.publish()
            await until(lambda: sum(rig.bus.counts.arrivals.values()) == 13)
        # As long as two streams may bring the same, as far as time goes.
        assert loop().time() - now_s < 10
        assert rig.output.numbers() == [*range(10), 0, 1, 2]
        assert rig.output.arrivals[10:] == [Arrival.RESTARTED, Arrival.NEXT, Arrival.NEXT]


@pytest.mark.case("ER45")
@in_flowing_time
async def test_publishers_whose_numbers_were_forgotten_are_counted_and_are_first_again() -> None:
    async with one_reading() as (rig, _, publisher):
        for publisher_id in (*range(PUBLISHERS_MAX + 2), 0):
            publisher.publisher_id = publisher_id
            publisher.publish()
        await until(lambda: len(rig.output.found) == PUBLISHERS_MAX + 3)
        assert set(rig.output.arrivals) == {Arrival.FIRST}
        # The two that were unheard for longest, and one more for the first of them, who came back.
        assert rig.bus.counts.sequences_forgotten == 3
        health = RouterHealth(rig.bus, Discovery((), {}, rig.bus, clock=SystemAsyncClock(), random=Random(1)))
        (feed,) = health.status()["feeds"]
        assert (feed["publishers"], feed["publishers_forgotten"]) == (PUBLISHERS_MAX, 3)


@pytest.mark.case("ER41")
@in_flowing_time
async def test_an_event_that_comes_late_is_passed_on_as_that_and_no_new_beginning() -> None:
    rig = await told(1, 4, 2, 3, 5)
    assert rig.output.numbers() == [1, 4, 2, 3, 5]
    assert rig.output.arrivals[2:] == [Arrival.LATE, Arrival.LATE, Arrival.NEXT]
    assert (rig.output.missed, rig.bus.counts.arrivals["late"]) == (2, 2)


@pytest.mark.case("ER42")
@in_flowing_time
async def test_a_publisher_that_began_anew_is_told_and_nothing_is_missing_for_it() -> None:
    rig = await told(100, 101, 0, 1)
    assert rig.output.numbers() == [100, 101, 0, 1]
    assert rig.output.arrivals[2:] == [Arrival.RESTARTED, Arrival.NEXT]
    assert rig.output.missed == 0


@pytest.mark.case("ER43")
@in_flowing_time
async def test_after_the_last_number_of_all_comes_the_first_one() -> None:
    rig = await told(LAST - 1, LAST, 0, 3)
    assert rig.output.arrivals == [Arrival.FIRST, Arrival.NEXT, Arrival.NEXT, Arrival.AFTER_A_GAP]
    assert rig.output.missed == 2
