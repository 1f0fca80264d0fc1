"""A token that is taken out of the file while sessions are there that began with it."""

from __future__ import annotations

import signal
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from bus_rig import NAMESPACE, TOKEN, in_flowing_time, until
from raw_client import client
from router_rig import ZmqPublisher, routing
from test_router_program import broker_of, command
from test_router_requests import Silent

from kura_shaper.broker.protocol.frames import ZmqEndpoint


@pytest.mark.case("ER90")
@in_flowing_time
async def test_a_session_goes_on_opening_streams_when_its_token_is_taken_out() -> None:
    async with routing() as rig, client(rig) as raw, client(rig) as other:
        welcome = await raw.session()
        rig.bus.settings.token_file.write_text("another-token\n")
        rig.bus._credentials.reload(rig.bus.counts)
        for number in range(20):
            rig.bus.by_client["raw"].subscribe(ZmqEndpoint(f"tcp://10.0.0.1:{5_000 + number}", NAMESPACE), Silent())
        for asked in await raw.asked(20):
            await raw.open(asked.stream_id, welcome.session_id)
        assert rig.bus.counts.answers["401"] == 0
        # Nothing else is let in by it: no session, and nobody who knows of no session.
        assert await other.status(other.request()) == 401
        assert await other.status(other.request("/bus/v1/streams/s", x_bus_session="0" * 32)) == 401


@pytest.mark.case("ER90")
@in_flowing_time
async def test_wrong_tokens_of_a_session_that_is_there_are_no_guessing() -> None:
    async with routing() as rig, client(rig) as raw:
        welcome = await raw.session()
        session = {"x-bus-session": welcome.session_id}
        for _ in range(20):
            assert await raw.status(raw.request("/bus/v1/streams/s", authorization="Bearer no", **session)) == 401
        # Any token that is allowed now will do as well as the session's own.
        other = raw.request("/bus/v1/streams/s", authorization="Bearer other-token", **session)
        assert await raw.status(other) == 404
        assert not raw.is_closed


@pytest.mark.case("ER90")
@in_flowing_time
async def test_after_sighup_without_its_token_a_broker_reads_what_is_new_over_the_session_that_it_has() -> None:
    with closing(ZmqPublisher()) as first, closing(ZmqPublisher()) as second, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)

        def wanted(*publishers: ZmqPublisher) -> list[dict[str, object]]:
            return [{"endpoint": each.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]} for each in publishers]

        async with (
            command(scratch, subscriptions=wanted(first)) as router,
            broker_of(router, scratch, first, second) as broker,
        ):
            await first.subscribed()
            session = broker.view.session
            (scratch / "token").write_text("another-token\n")
            router.rewrite(subscriptions=wanted(first, second))
            router.process.send_signal(signal.SIGHUP)
            await router.logged_one("tokens_changed")
            await second.subscribed()
            second.publish()
            await until(lambda: len(router.lines) == 1)
            assert broker.view.session is session
            assert (first.subscribes, first.unsubscribes) == (1, 0)
            assert TOKEN not in str(router.logged)
