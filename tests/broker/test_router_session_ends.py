"""Sessions that end while something is under way: once, with words of their own, and no feed is left with nothing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from bus_rig import NAMESPACE, in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import routing

from kura_shaper.broker.protocol.codec import encode
from kura_shaper.broker.protocol.frames import Drain, Draining, Subscribe
from kura_shaper.broker.protocol.limits import STREAMS_MAX, Limits
from kura_shaper.broker.router.settings import Subscription

FIRST, SECOND = replace(HELLO, client_id="a"), replace(HELLO, client_id="b")
WANTED = Subscription("tcp://10.0.0.1:5", NAMESPACE, ("",))


@pytest.mark.case("ER73")
@in_flowing_time
async def test_a_client_that_does_not_end_its_stream_has_its_session_ended_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session(FIRST)
        rig.bus.by_client["a"].drain("shutdown", 1_000)  # type: ignore[arg-type]
        await raw.frame(Drain)
        with caplog.at_level(logging.WARNING):
            # Its last words are framed at once, and its own end does not come.
            rig.bus.by_client["a"].fail("internal_error", "told by a test")  # type: ignore[arg-type]
            await until(lambda: raw.session_http_id in raw.ended)
            await loop().advance(5.0)
            await until(lambda: not next(iter(rig.bus._connections)).link.http.open_bodies)
        assert not caplog.records


@pytest.mark.case("ER73")
@in_flowing_time
async def test_an_answer_that_has_ended_is_not_ended_again() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session(FIRST)
        http = rig.bus.by_client["a"].connection.link.http
        http.finish(raw.session_http_id)
        http.finish(raw.session_http_id)
        rig.bus.by_client["a"].connection.link.stir()
        await until(lambda: raw.session_http_id in raw.ended)
        assert not raw.is_closed


@pytest.mark.case("ER74")
@in_flowing_time
async def test_all_streams_that_may_be_are_asked_for_at_once() -> None:
    namespace = "n" * 60
    wanted = tuple(
        Subscription(f"tcp://{number}.{'worker' * 15}.dynamo.svc:5", namespace, ("",)) for number in range(STREAMS_MAX)
    )
    hello = replace(FIRST, dynamo_namespaces=(namespace,), limits=Limits(max_streams=STREAMS_MAX))
    async with routing(subscriptions=wanted, max_streams=STREAMS_MAX) as rig, client(rig) as raw:
        await raw.session(hello)
        asked = await raw.asked(STREAMS_MAX)
        assert {str(each.target) for each in asked} == {each.endpoint for each in wanted}
        assert rig.bus.by_client["a"].load == STREAMS_MAX


@pytest.mark.case("ER74")
@in_flowing_time
async def test_a_client_that_reads_nothing_is_told_from_one_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
        await raw.session(FIRST)
        session = rig.bus.by_client["a"]
        session.buffer.limit_bytes = 0
        with caplog.at_level(logging.INFO):
            session.say_bytes(b"x")
            assert not session.takes_subscribes
            await until(lambda: not rig.bus.by_client)
        assert rig.bus.counts.session_ends["client_reads_nothing"] == 1
        assert rig.bus.counts.session_ends["connection_lost"] == 0
        (ended,) = [each for each in caplog.records if each.getMessage() == "session_ended"]
        assert ended.fields["code"] == "client_reads_nothing"  # type: ignore[attr-defined]


@pytest.mark.case("ER75")
@in_flowing_time
async def test_a_session_that_ends_by_a_subscribe_leaves_its_feed_to_be_placed_again() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session(FIRST)
        rig.bus.by_client["a"].buffer.limit_bytes = 0
        await rig.bus.want((WANTED,))
        (feed,) = rig.bus.feeds
        await until(lambda: feed.current is not None)
        await until(lambda: not rig.bus.by_client)
        assert feed.current is None
        async with client(rig) as other:
            await other.session(SECOND)
            await other.asked()
            assert feed.session is rig.bus.by_client["b"]


@pytest.mark.case("ER75")
@in_flowing_time
async def test_a_session_that_ends_by_the_subscribe_of_the_next_stream_leaves_the_feed_where_it_was() -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
        await raw.session(FIRST)
        await raw.asked()
        (feed,) = rig.bus.feeds
        async with client(rig) as other:
            await other.session(SECOND)
            rig.bus.by_client["b"].buffer.limit_bytes = 0
            feed.move()
            await until(lambda: feed.next is not None)
            await until(lambda: "b" not in rig.bus.by_client)
        assert feed.next is None
        assert feed.session is rig.bus.by_client["a"]
        assert rig.bus.by_client["a"].moving == 0
        # It moves still, when there is somewhere to move to.
        async with client(rig) as third:
            await third.session(replace(SECOND, client_id="c"))
            raw.send(raw.session_http_id, encode(Draining("shutdown", 1_000)))
            assert isinstance(await third.frame(Subscribe), Subscribe)
        await asyncio.sleep(0)
