"""What a router reads because it is advertised: it comes and goes, and is never more than may be."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from bus_rig import NAMESPACE, FakeDirectory, in_a_loop, in_flowing_time, loop, until
from router_rig import ANY_PORT, RouterRig, ZmqPublisher, routing

from kura_shaper.broker.directory import MetadataDirectory
from kura_shaper.broker.router.discovery import Discovery
from kura_shaper.broker.router.health import RouterHealth
from kura_shaper.broker.router.metrics import RouterMetrics
from kura_shaper.broker.router.settings import SUBSCRIPTIONS_MAX, Discover, Subscription
from kura_shaper.tenants.kubernetes.fake import FakeApi, FakeAsyncClock, refusal
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.wire import ApiError

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import channel, resource

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import pytest

    from kura_shaper.broker.metadata import Publisher
    from kura_shaper.tenants.kubernetes.wire import Api

UNCOVERED = "covered-by-no-broker"
GPU = Discover("gpu", (NAMESPACE, UNCOVERED), ("kv-events", "kv_metrics"))
OTHER = Path("/etc/other-cluster")


def endpoint(number: int = 1) -> str:
    return f"tcp://10.0.0.{number}:41235"


def put(api: FakeApi, *channels: Any, name: str = "w0", namespace: str = "gpu") -> None:
    made = resource({f"k{number}": each for number, each in enumerate(channels)}, name=name, namespace=namespace)
    api.put(name, made, namespace=namespace)


def metadata_api() -> FakeApi:
    return FakeApi("DynamoWorkerMetadataList")


class Reading:
    """Reads nothing, and keeps what it was told to read, each time."""

    def __init__(self) -> None:
        self.told: list[Mapping[Publisher, tuple[str, ...]]] = []

    def read_discovered(self, advertised: Mapping[Publisher, tuple[str, ...]]) -> None:
        """See discovery.Reader."""
        self.told.append(advertised)

    @property
    def now(self) -> dict[str, tuple[str, ...]]:
        """What is read at last: topics by endpoint."""
        return {endpoint: topics for (endpoint, _), topics in self.told[-1].items()} if self.told else {}


class Discovering:
    """A discovery that runs."""

    def __init__(self, wanted: tuple[Discover, ...], apis: dict[Path | None, Api]) -> None:
        self.reading = Reading()
        self.found = Discovery(wanted, apis, self.reading, clock=FakeAsyncClock(), random=Random(1))

    async def settle(self) -> dict[str, tuple[str, ...]]:
        """Let everything that came be compared, and return what is read then."""
        await loop().advance(0.5)
        return self.reading.now


@asynccontextmanager
async def discovering(apis: dict[Path | None, Api], *wanted: Discover) -> AsyncIterator[Discovering]:
    made = Discovering(wanted or (GPU,), apis)
    running = asyncio.ensure_future(made.found.run())
    try:
        await until(lambda: made.found.namespaces_synced > 0)
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@in_a_loop
async def test_a_publisher_of_a_wanted_topic_and_dynamo_namespace_is_read_and_no_other() -> None:
    api = metadata_api()
    put(
        api,
        channel(endpoint(1)),
        channel(endpoint(2), topic="kv_metrics.v2"),
        channel(endpoint(3), topic="logs"),
        channel(endpoint(4), namespace="another"),
        channel(endpoint(5), topic=None),
    )
    async with discovering({None: api}) as made:
        # A topic is a prefix, as it is in ZeroMQ.
        assert await made.settle() == {endpoint(1): ("kv-events",), endpoint(2): ("kv_metrics",)}
        assert made.found.publishers == 2


@in_a_loop
async def test_every_topic_is_wanted_also_of_a_publisher_that_names_none() -> None:
    api = metadata_api()
    put(api, channel(endpoint(1), topic="logs"), channel(endpoint(2), topic=None))
    async with discovering({None: api}, Discover("gpu", (NAMESPACE,), ("",))) as made:
        assert await made.settle() == {endpoint(1): ("",), endpoint(2): ("",)}


@in_a_loop
async def test_what_comes_and_goes_is_read_and_is_not_and_what_stays_is_told_alike() -> None:
    api = metadata_api()
    put(api, channel(endpoint(1)), name="w1")
    async with discovering({None: api}) as made:
        await made.settle()
        await api.until(lambda: bool(api.watches))
        put(api, channel(endpoint(2)), name="w2")
        assert set(await made.settle()) == {endpoint(1), endpoint(2)}
        api.delete("w1", namespace="gpu")
        assert set(await made.settle()) == {endpoint(2)}
        told = len(made.reading.told)
        # Gone and there again within one comparison: nothing happened.
        api.delete("w2", namespace="gpu")
        put(api, channel(endpoint(2)), name="w3")
        assert set(await made.settle()) == {endpoint(2)}
        assert len(made.reading.told) == told


@in_a_loop
async def test_two_topics_at_one_address_are_one_feed() -> None:
    api = metadata_api()
    put(api, channel(endpoint(1)), name="w1")
    put(api, channel(endpoint(1), topic="kv_metrics"), name="w2")
    async with discovering({None: api}) as made:
        assert await made.settle() == {endpoint(1): ("kv-events", "kv_metrics")}


@in_a_loop
async def test_an_outage_ends_nothing_and_what_went_meanwhile_goes_with_the_next_list() -> None:
    api = metadata_api()
    put(api, channel(endpoint(1)), name="w1")
    put(api, channel(endpoint(2)), name="w2")
    async with discovering({None: api}) as made:
        both = await made.settle()
        away = True
        api.answer = lambda _: refusal(503, "away") if away else None
        api.end_watches(ApiError("reset"))
        await api.until(lambda: len(api.asked) > 20)
        api.delete("w1", namespace="gpu")
        api.forget()
        assert await made.settle() == both
        assert len(made.reading.told) == 1
        away = False
        await until(lambda: made.found.counts.lists["ok"] == 2)
        assert set(await made.settle()) == {endpoint(2)}


@in_a_loop
async def test_each_cluster_is_asked_for_its_own_namespaces() -> None:
    here, elsewhere = metadata_api(), metadata_api()
    put(here, channel(endpoint(1)))
    put(elsewhere, channel(endpoint(2), topic="x"))
    there = Discover("gpu", (NAMESPACE,), ("x",), OTHER)
    async with discovering({None: here, OTHER: elsewhere}, GPU, there) as made:
        await until(lambda: made.found.namespaces_synced == 2)
        assert await made.settle() == {endpoint(1): ("kv-events",), endpoint(2): ("x",)}


# What a router makes of it.


def of(*numbers: int, topics: tuple[str, ...] = ("kv-events",)) -> list[Subscription]:
    return [Subscription(endpoint(number), NAMESPACE, topics) for number in numbers]


def told(*numbers: int, topics: tuple[str, ...] = ("kv-events",)) -> dict[Publisher, tuple[str, ...]]:
    return {(endpoint(number), NAMESPACE): topics for number in numbers}


@in_flowing_time
async def test_a_publisher_of_the_settings_is_not_read_twice_and_goes_on_when_the_settings_leave_it_out() -> None:
    exposed = Subscription(endpoint(2), NAMESPACE, expose=ANY_PORT)
    another = Subscription(endpoint(3), "another", ("x",))
    own = (*of(1, topics=("x",)), exposed, another)
    async with routing(subscriptions=own) as rig:
        rig.bus.read_discovered(told(1, 2, 3))
        # A port of its own is no reading of events, and another Dynamo namespace is another publisher.
        assert [feed.wanted for feed in rig.bus.feeds] == [own[0], another, *of(2, 3)]
        kept = rig.bus.feeds[2:]
        await rig.bus.want([exposed])
        assert rig.bus.feeds[:2] == kept
        assert [feed.wanted for feed in rig.bus.feeds[2:]] == of(1)
        await rig.bus.want(of(2, topics=("x",)))
        assert [feed.wanted for feed in rig.bus.feeds] == [*of(2, topics=("x",)), *of(3, 1)]


@in_flowing_time
async def test_other_topics_of_a_publisher_are_a_feed_of_their_own() -> None:
    async with routing() as rig:
        rig.bus.read_discovered(told(1, 2))
        stays = rig.bus.feeds[1]
        rig.bus.read_discovered(told(1, topics=("kv-events", "kv_metrics")) | told(2))
        assert [feed.wanted for feed in rig.bus.feeds] == [*of(2), *of(1, topics=("kv-events", "kv_metrics"))]
        assert rig.bus.feeds[0] is stays


@in_flowing_time
async def test_beyond_the_most_that_is_read_the_rest_is_counted_told_once_and_takes_no_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kura_shaper.broker.router")
    many = {
        (f"tcp://10.1.{number >> 8}.{number & 255}:1", NAMESPACE): ("kv-events",) for number in range(SUBSCRIPTIONS_MAX)
    }
    async with routing(subscriptions=of(9)) as rig:
        rig.bus.read_discovered(many)
        before = rig.bus.feeds
        assert (len(before), rig.bus.feeds_beyond) == (SUBSCRIPTIONS_MAX, 1)
        # It comes before all others, and still it does not take the place of one that is read.
        rig.bus.read_discovered(told(1) | many)
        assert (rig.bus.feeds, rig.bus.feeds_beyond) == (before, 2)
        rig.bus.read_discovered(told(1) | dict(list(many.items())[2:]))
        assert of(1)[0] in [feed.wanted for feed in rig.bus.feeds]
        assert rig.bus.feeds_beyond == 0
        # More of the settings' own leave less room.
        rig.bus.read_discovered(told(1) | many)
        await rig.bus.want(of(*range(20, 30)))
        assert (len(rig.bus.feeds), rig.bus.feeds_beyond) == (SUBSCRIPTIONS_MAX, 11)
    said = [record.message for record in caplog.records]
    assert (said.count("too_many_publishers"), said.count("all_publishers_read")) == (2, 1)


# With brokers and publishers.


@asynccontextmanager
async def reading(
    api: FakeApi, *, broker_knows: FakeDirectory | None = None
) -> AsyncIterator[tuple[RouterRig, Discovery]]:
    """Run a router that discovers, and a broker that follows the same metadata unless a test says what it knows."""
    async with routing() as rig:
        clock = SystemAsyncClock()
        discovery = Discovery((GPU,), {None: api}, rig.bus, clock=clock, random=Random(1))
        directory = MetadataDirectory(api, ("gpu",), clock=clock, random=Random(2))
        rig.directory = broker_knows or cast("FakeDirectory", directory)
        tasks = [asyncio.ensure_future(each) for each in (discovery.run(), directory.run())]
        try:
            await rig.start_broker()
            yield rig, discovery
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@in_flowing_time
async def test_the_events_of_a_publisher_come_when_it_is_advertised_and_its_stream_ends_when_it_is_not() -> None:
    api, first, second = metadata_api(), ZmqPublisher(1), ZmqPublisher(2)
    try:
        async with reading(api) as (rig, discovery):
            assert not rig.bus.feeds
            put(api, channel(first.endpoint), name="w1")
            await first.subscribed()
            await rig.hear(first)
            put(api, channel(second.endpoint), name="w2")
            await second.subscribed()
            await rig.hear(second)
            kept = next(feed for feed in rig.bus.feeds if feed.wanted.endpoint == second.endpoint)
            api.delete("w1", namespace="gpu")
            await first.subscribed(unsubscribes=1)
            assert rig.bus.counts.tunnel_ends["unsubscribed"] == 1
            await until(lambda: rig.bus.feeds == (kept,))
            # Whoever stays is not disturbed, and whoever comes back is another one, with numbers of its own.
            put(api, channel(first.endpoint), name="w3")
            await first.subscribed(2, unsubscribes=1)
            await rig.hear(first)
            assert (rig.bus.counts.subscribes, rig.output.missed) == (3, 0)
            assert kept in rig.bus.feeds
            told = {
                sample.name: sample.value
                for each in RouterMetrics(rig.bus, discovery).collect()
                for sample in each.samples
            }
            assert told["continuum_event_bus_publishers_discovered"] == told["continuum_event_bus_feeds_read"] == 2
            shown = RouterHealth(rig.bus, discovery).status()
            assert shown["discovery"]["namespaces_synced"] == 1
            assert shown["discovery"]["publishers"] == len(shown["feeds"]) == 2
            json.dumps(shown)
    finally:
        first.close()
        second.close()


@in_flowing_time
async def test_streams_outlive_an_outage_of_the_api_server() -> None:
    api, publisher = metadata_api(), ZmqPublisher()
    try:
        async with reading(api) as (rig, _):
            put(api, channel(publisher.endpoint))
            await rig.hear(publisher)
            api.answer = lambda _: refusal(503, "away")
            api.end_watches(ApiError("reset"))
            asked = len(api.asked)
            await until(lambda: len(api.asked) > asked + 4)
            await rig.hear(publisher)
            assert rig.bus.counts.subscribes == 1
    finally:
        publisher.close()


@in_flowing_time
async def test_a_broker_that_learns_of_a_publisher_later_is_asked_again_and_not_at_once() -> None:
    api, publisher, lagging = metadata_api(), ZmqPublisher(), FakeDirectory()
    try:
        async with reading(api, broker_knows=lagging) as (rig, _):
            put(api, channel(publisher.endpoint))
            for number in range(40):
                # Others that come and go meanwhile are no reason to ask any sooner.
                put(api, channel(endpoint(number), namespace=UNCOVERED), name="other")
                await loop().advance(0.3)
            refused = rig.bus.counts.refusals["target_not_advertised"]
            # Within twelve seconds: after a half, a whole, two and four.
            assert 2 <= refused <= 8
            lagging.advertise(publisher.endpoint)
            for _ in range(60):
                await loop().advance(0.5)
                if any(feed.is_read for feed in rig.bus.feeds):
                    break
            await rig.hear(publisher)
    finally:
        publisher.close()


@in_flowing_time
async def test_a_feed_that_goes_while_it_moves_leaves_no_broker_burdened() -> None:
    api, publisher = metadata_api(), ZmqPublisher()
    try:
        async with reading(api) as (rig, _):
            put(api, channel(publisher.endpoint))
            await rig.hear(publisher)
            await rig.start_broker("gpu-a-2")
            (feed,) = rig.bus.feeds
            feed.move()
            assert feed.next is not None
            api.delete("w0", namespace="gpu")
            await until(lambda: not rig.bus.feeds)
            await until(lambda: all(session.load == 0 for session in rig.bus.by_client.values()))
            assert [session.moving for session in rig.bus.by_client.values()] == [0, 0]
    finally:
        publisher.close()


@in_flowing_time
async def test_a_router_that_leaves_reads_nothing_new() -> None:
    api, publisher = metadata_api(), ZmqPublisher()
    try:
        async with reading(api) as (rig, discovery):
            rig.bus.stop()
            put(api, channel(publisher.endpoint))
            await until(lambda: discovery.publishers == 1)
            assert not rig.bus.feeds
    finally:
        publisher.close()
