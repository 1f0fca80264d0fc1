"""A rebalance that an operator asks for: every broker comes anew, and no namespace is ever left to nobody."""

from __future__ import annotations

import asyncio

import pytest
from bus_rig import in_flowing_time, loop, until
from router_rig import Publishing, RouterRig, ZmqPublisher, one_reading, routing

from kura_shaper.broker.protocol.codes import DrainReason


class Watching:
    """Notes who is away, at each look."""

    def __init__(self, rig: RouterRig, *names: str) -> None:
        self._rig = rig
        self.before = {name: rig.bus.by_client[name] for name in names}
        self.most_away: set[frozenset[str]] = set()

    def look(self) -> None:
        there = self._rig.bus.by_client
        away = {name for name in self.before if name not in there or there[name].protocol.is_draining}
        self.most_away.add(frozenset(away))

    @property
    def anew(self) -> set[str]:
        """Who has come anew."""
        there = self._rig.bus.by_client
        return {name for name, session in self.before.items() if there.get(name, session) is not session}

    async def until(self, names: set[str], *, within_s: float = 90.0) -> None:
        """Let time pass until they came anew."""
        for _ in range(int(within_s * 10)):
            if self.anew >= names:
                return
            await loop().advance(0.1)
            self.look()
            await asyncio.sleep(0.002)
            self.look()
        raise AssertionError(f"only {self.anew} came anew")


@pytest.mark.case("ER12")
@in_flowing_time
async def test_every_broker_comes_anew_never_two_of_one_namespace_at_once_and_no_event_is_lost() -> None:
    publishers = [ZmqPublisher(number) for number in range(4)]
    async with routing(*publishers) as rig:
        brokers = {name: await rig.start_broker(name) for name in ("a", "b", "c")}
        other = await rig.start_broker("other", dynamo_namespaces=("other",))
        await rig.read()
        watching = Watching(rig, "a", "b", "c", "other")
        async with Publishing(*publishers):
            await until(lambda: len(rig.output.found) >= 100)
            rig.bus.rebalance()
            await watching.until({"a", "b", "c", "other"})
            before = len(rig.output.found)
            await until(lambda: len(rig.output.found) >= before + 100)
        assert all(len(away - {"other"}) <= 1 for away in watching.most_away)
        assert {name for away in watching.most_away for name in away} == {"a", "b", "c", "other"}
        assert rig.output.missed == 0
        assert {each.counts.reconnects["rebalance"] for each in (*brokers.values(), other)} == {1}
        await loop().advance(5.0)
        assert rig.bus.counts.rebalanced == {"asked": 4, "back": 4, "missing": 0, "left_out": 0}
        # The next one can be asked for.
        rig.bus.rebalance()
        await until(lambda: rig.bus.counts.rebalanced["asked"] > 4)


@pytest.mark.case("ER12")
@in_flowing_time
async def test_a_broker_that_does_not_come_back_leaves_those_alone_who_stand_in_for_it() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher, drain_deadline_ms=0) as rig:
        for name in ("a", "b", "c"):
            await rig.start_broker(name)
        await rig.read()
        rig.bus.rebalance()
        await until(lambda: rig.bus.counts.rebalanced["asked"] == 1)
        (name,) = [name for name, session in rig.bus.by_client.items() if session.protocol.is_draining] or ["?"]
        _, task = rig.brokers.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(100):
            await loop().advance(1.0, step_s=1.0)
        assert rig.bus.counts.rebalanced == {"asked": 1, "back": 0, "missing": 1, "left_out": 2}
        await rig.read()


@pytest.mark.case("ER12")
@in_flowing_time
async def test_one_round_is_under_way_at_most_and_none_begins_when_it_leaves() -> None:
    async with routing() as rig:
        for name in ("a", "b"):
            await rig.start_broker(name)
        for _ in range(5):
            rig.bus.rebalance()
        await until(lambda: rig.bus.counts.rebalanced["asked"] == 1)
        rig.bus.rebalance()
        await loop().advance(0.2)
        assert rig.bus.counts.rebalanced["asked"] == 1
        rig.bus.stop()
        await rig.running
        rig.bus.rebalance()


@pytest.mark.case("ER12")
@in_flowing_time
async def test_a_broker_that_leaves_by_itself_is_waited_for_before_another_is_asked() -> None:
    async with routing() as rig:
        for name in ("a", "b"):
            await rig.start_broker(name)
        # Held by a stream that is open, as a local port's is.
        rig.bus.by_client["a"].protocol.is_draining = True
        rig.bus.rebalance()
        await loop().advance(3.0)
        assert rig.bus.counts.rebalanced["asked"] == 0
        rig.bus.by_client["a"].protocol.is_draining = False
        await until(lambda: rig.bus.counts.rebalanced["asked"] == 0)
        await loop().advance(0.5)
        assert rig.bus.counts.rebalanced["asked"] == 1


@pytest.mark.case("ER29")
@in_flowing_time
async def test_a_broker_alone_is_back_within_a_second() -> None:
    async with one_reading(drain_deadline_ms=0) as (rig, broker, _):
        before = rig.bus.by_client["a"]
        rig.bus.drain(before, DrainReason.REBALANCE)
        await until(lambda: before.is_over)
        await until(lambda: broker.counts.reconnects["rebalance"] == 1)
        await loop().advance(0.6)
        await until(lambda: rig.bus.by_client.get("a", before) is not before)
        await rig.read()
