"""What a router answers to requests of HTTP/2 that are right, wrong, and meant to hurt it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from random import Random

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
from bus_rig import NAMESPACE, TOKEN, in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import routing

from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.frames import (
    Error,
    Heartbeat,
    StreamOpened,
    Subscribe,
    ZmqEndpoint,
)
from kura_shaper.broker.router.discovery import Discovery
from kura_shaper.broker.router.health import RouterHealth
from kura_shaper.broker.router.metrics import RouterMetrics
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock


@pytest.mark.case("ER2")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"authorization": f"bearer {TOKEN}"}, 200),
        ({"authorization": ""}, 401),
        ({"authorization": TOKEN}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic eDp5"}, 401),
        ({"path": "/"}, 404),
        ({"path": "/bus/v1/sessions"}, 404),
        ({"path": "/bus/v2/session"}, 404),
        ({":method": "GET"}, 405),
        ({"content-type": "application/json"}, 415),
        ({"x-bus-protocol": "2"}, 426),
        ({"path": "/bus/v1/streams/s1"}, 410),
        ({"path": "/bus/v1/streams/s1", "x-bus-session": "none"}, 410),
    ],
)
def test_each_refusal_has_its_status(headers: dict[str, str], status: int) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            assert await raw.status(raw.request(**headers)) == status

    run()


@pytest.mark.case("ER2")
@in_flowing_time
async def test_a_stream_is_claimed_once_and_only_by_its_own_session() -> None:
    async with routing() as rig, client(rig) as raw:
        welcome = await raw.session()
        mine = {"x-bus-session": welcome.session_id, "content-type": "application/octet-stream"}
        unknown = raw.request("/bus/v1/streams/nobody", **mine)
        assert await raw.status(unknown) == 404
        await until(lambda: unknown in raw.ended)
        assert json.loads(raw.bodies[unknown]) == {"code": "unknown_stream"}
        consumer = Silent()
        rig.bus.by_client["raw"].subscribe(ZmqEndpoint("tcp://10.0.0.1:5", NAMESPACE), consumer)
        asked = await raw.frame(Subscribe)
        assert isinstance(asked, Subscribe)
        first = raw.request(f"/bus/v1/streams/{asked.stream_id}", **mine)
        assert await raw.status(first) == 200
        assert await raw.status(raw.request(f"/bus/v1/streams/{asked.stream_id}", **mine)) == 409
        raw.send(raw.session_http_id, encode(StreamOpened(asked.stream_id)))
        raw.send(first, b"hello", end=True)
        await until(lambda: consumer.said == [b"hello", "upstream_closed"])
        await until(lambda: first in raw.ended)


class Silent:
    """A consumer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[bytes | str] = []

    def on_open(self) -> None:
        pass

    def on_bytes(self, data: bytes, credit_bytes: int) -> None:
        self.said.append(data)

    def on_sent(self) -> None:
        pass

    def on_over(self, end: object) -> None:
        self.said.append(str(end.ending))  # type: ignore[attr-defined]


@pytest.mark.case("ER1")
@in_flowing_time
async def test_without_http2_nothing_is_served() -> None:
    async with routing() as rig, client(rig, alpn=("http/1.1",)) as raw:
        await until(lambda: raw.is_closed)
        assert rig.bus.counts.connections == 0


@pytest.mark.case("ER55")
@in_flowing_time
async def test_a_client_that_guesses_tokens_is_not_served_for_long() -> None:
    async with routing() as rig, client(rig) as raw:
        for _ in range(20):
            if not raw.is_closed:
                raw.request(authorization="Bearer guess")
                await asyncio.sleep(0.01)
        await until(lambda: raw.is_closed)
        assert rig.bus.counts.answers["401"] == 16


@pytest.mark.case("ER57")
@in_flowing_time
async def test_a_connection_on_which_nothing_happens_is_closed() -> None:
    async with routing() as rig, client(rig) as raw:
        await until(lambda: bool(rig.bus._connections))
        await loop().advance(10.5)
        await until(lambda: raw.is_closed)
        await until(lambda: not rig.bus._connections)


@pytest.mark.case("ER53")
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff\xff\xff\xff", "protocol_error"),
        (b"\0\0\0\x02{]", "protocol_error"),
        (encode(Heartbeat(1)), "protocol_error"),
        (encode(HELLO) * 2, "protocol_error"),
        (encode_object({"type": "hello"}), "protocol_error"),
    ],
)
def test_frames_that_are_none_end_the_session_and_the_client_is_told(data: bytes, code: str) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            raw.session_http_id = raw.request()
            raw.send(raw.session_http_id, data)
            error = await raw.frame(Error)
            assert isinstance(error, Error)
            assert error.code == code
            await until(lambda: raw.session_http_id in raw.ended)
            assert not rig.bus.by_client
            assert rig.bus.counts.session_ends[code] == 1

    run()


@pytest.mark.case("ER57")
@in_flowing_time
async def test_a_hello_that_does_not_come_ends_it_after_ten_seconds() -> None:
    async with routing() as rig, client(rig) as raw:
        raw.session_http_id = raw.request()
        assert await raw.status(raw.session_http_id) == 200
        await loop().advance(10.5)
        error = await raw.frame(Error)
        assert isinstance(error, Error)
        assert error.code == "idle_timeout"


@pytest.mark.case("ER1")
@in_flowing_time
async def test_a_role_that_there_is_none_of_is_refused_and_a_listener_is_welcomed() -> None:
    async with routing() as rig:
        async with client(rig) as raw:
            await raw.session(replace(HELLO, role="kv_listener"))
            raw.send(raw.session_http_id, encode_object({"type": "announce", "source": "b0"}))
            await until(lambda: rig.bus.counts.frames_ignored == 1)
            assert rig.bus.choose(NAMESPACE) is None
        async with client(rig) as raw:
            raw.session_http_id = raw.request()
            raw.send(raw.session_http_id, encode(replace(HELLO, role="other")))
            error = await raw.frame(Error)
            assert isinstance(error, Error)
            assert error.code == "invalid_hello"


@pytest.mark.case("ER58")
@in_flowing_time
async def test_more_clients_than_may_be_are_told_to_come_later() -> None:
    async with routing(max_sessions=1) as rig, client(rig) as first, client(rig) as second:
        await first.session()
        second.session_http_id = second.request()
        second.send(second.session_http_id, encode(replace(HELLO, client_id="two")))
        error = await second.frame(Error)
        assert isinstance(error, Error)
        assert (error.code, error.retry_after_ms) == ("overloaded", 5_000)


@pytest.mark.case("ER56")
@in_flowing_time
async def test_streams_that_are_reset_as_fast_as_they_are_opened_leave_nothing() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session()
        for _ in range(500):
            http_id = raw.request("/bus/v1/streams/x", x_bus_session="none")
            raw.h2.reset_stream(http_id, h2.errors.ErrorCodes.CANCEL)
            raw.flush()
        await until(lambda: rig.bus.counts.answers["410"] >= 400)
        (connection,) = rig.bus._connections
        assert connection.link.http.open_bodies == 1
        assert rig.bus.by_client


@pytest.mark.case("ER21")
@in_flowing_time
async def test_a_token_is_in_no_status() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session()
        discovery = Discovery((), {}, rig.bus, clock=SystemAsyncClock(), random=Random(1))
        assert TOKEN not in json.dumps(RouterHealth(rig.bus, discovery).status(), default=str)


@pytest.mark.case("ER78")
@in_flowing_time
async def test_a_router_whose_loop_stands_still_is_late_at_a_scrape_that_comes_meanwhile() -> None:
    async with routing() as rig:
        discovery = Discovery((), {}, rig.bus, clock=SystemAsyncClock(), random=Random(1))
        for since_s, least_s in ((0.0, 0.02), (30.5, 30.0)):
            rig.bus.counts.loop_lag_s = 0.02
            metrics = RouterMetrics(rig.bus, discovery, now_s=lambda since_s=since_s: rig.bus.turned_s + since_s)  # type: ignore[misc]
            told = {each.name: each.samples for each in metrics.collect()}
            assert told["continuum_event_bus_event_loop_lag_seconds"][0].value == pytest.approx(least_s)
