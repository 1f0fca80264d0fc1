"""What a router's log says of clients that are refused, of sessions that end, and of publishers that can't be read."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import NAMESPACE, TOKEN, in_flowing_time, loop, until
from raw_client import client
from router_rig import ZmqPublisher, one_reading, routing

from kura_shaper.broker.protocol.codes import DrainReason
from kura_shaper.broker.protocol.frames import Error
from kura_shaper.broker.router.settings import Subscription

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from router_rig import RouterRig


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the log reach the test, whatever a command before it had done."""
    monkeypatch.setattr(logging.getLogger("kura_shaper"), "handlers", [])


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of each line with an event."""
    return [each.fields for each in caplog.records if each.message == event]  # type: ignore[attr-defined]


async def is_rebalanced(rig: RouterRig) -> None:
    rig.bus.drain(rig.bus.by_client["a"], DrainReason.REBALANCE)


async def is_in_maintenance(rig: RouterRig) -> None:
    rig.bus.drain(rig.bus.by_client["a"], DrainReason.MAINTENANCE)


async def leaves(rig: RouterRig) -> None:
    rig.brokers["a"][0].stop()
    await until(lambda: rig.bus.by_client["a"].protocol.is_draining)
    # Its streams have as long as it gives them.
    await loop().advance(26.0, step_s=1.0)


async def is_killed(rig: RouterRig) -> None:
    await rig.kill_broker("a")


async def router_ends(rig: RouterRig) -> None:
    rig.bus.stop()


@pytest.mark.case("ER93")
@pytest.mark.parametrize(
    ("happens", "code", "reason"),
    [
        (is_rebalanced, "rebalance", "it was asked to leave"),
        (is_in_maintenance, "maintenance", "it was asked to leave"),
        (leaves, "drained", "it left by itself"),
        (is_killed, "connection_lost", "the connection was closed"),
        (router_ends, "shutdown", "it was asked to leave"),
    ],
)
def test_the_end_of_a_session_says_why(
    happens: Callable[[RouterRig], Awaitable[None]], code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kura_shaper")

    @in_flowing_time
    async def run() -> None:
        async with one_reading(drain_deadline_ms=1_000) as (rig, _, _):
            (began,) = [each for each in said(caplog, "session_began") if "peer" in each]
            assert began["peer"].startswith("127.0.0.1:")
            assert began["instance_id"] == rig.bus.by_client["a"].protocol.hello.instance_id  # type: ignore[union-attr]
            await happens(rig)
            await until(lambda: rig.bus.counts.session_ends[code] == 1)
            (ended,) = [each for each in said(caplog, "session_ended") if "peer" in each]
            assert (ended["code"], ended["client_id"], ended["peer"]) == (code, "a", began["peer"])
            assert ended["reason"].startswith(reason)
            assert ended["instance_id"] == began["instance_id"]

    run()


@pytest.mark.case("ER93")
@in_flowing_time
async def test_a_session_that_breaks_the_rules_ends_with_what_its_client_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kura_shaper")
    async with routing() as rig, client(rig) as raw, client(rig) as early:
        await raw.session()
        raw.send(raw.session_http_id, b"\0\0\0\x02{}")
        error = await raw.frame(Error)
        assert isinstance(error, Error)
        (ended,) = said(caplog, "session_ended")
        assert (ended["code"], ended["reason"]) == ("protocol_error", error.message)
        early.session_http_id = early.request()
        early.send(early.session_http_id, b"\0\0\0\x02{}")
        await early.frame(Error)
        assert said(caplog, "session_refused")[0]["code"] == "protocol_error"


@pytest.mark.case("ER93")
@in_flowing_time
async def test_who_is_refused_is_told_once_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    async with routing() as rig, client(rig) as raw:
        for _ in range(3):
            assert await raw.status(raw.request(authorization="Bearer guess")) == 401
        (told,) = said(caplog, "request_refused")
        assert told["status"] == 401
        assert told["peer"] == "{}:{}".format(*raw.writer.get_extra_info("sockname"))
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", rig.bus.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: rig.bus.counts.connections_refused > 0)
            writer.close()
        (told,) = said(caplog, "tls_failed")
        assert told["reason"] == "HTTP_REQUEST"
        assert "guess" not in caplog.text + TOKEN


@pytest.mark.case("ER93")
@in_flowing_time
async def test_a_stream_that_is_refused_and_a_publisher_that_is_none_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    wanted = (Subscription(endpoint, NAMESPACE, ("x",)), Subscription("tcp://10.0.0.1:5", NAMESPACE, ("x",)))
    async with routing(subscriptions=wanted) as rig:
        rig.directory.advertise(endpoint)
        await rig.start_broker("a")
        await until(
            lambda: (
                len(said(caplog, "publisher_not_read")) == 1 and rig.bus.counts.refusals["target_not_advertised"] > 0
            )
        )
        (told,) = said(caplog, "publisher_not_read")
        assert (told["endpoint"], told["over"]) == (endpoint, "a")
        refused = next(each for each in said(caplog, "stream_refused") if "client_id" in each)
        assert (refused["code"], refused["endpoint"]) == ("target_not_advertised", "tcp://10.0.0.1:5")
    server.close()


@pytest.mark.case("ER93")
@in_flowing_time
async def test_a_namespace_that_no_broker_covers_is_told_until_one_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kura_shaper")
    with closing(ZmqPublisher()) as publisher:
        async with routing(publisher) as rig:
            await rig.start_broker("b", dynamo_namespaces=("other",))
            await loop().advance(25.0)
            assert said(caplog, "no_broker") == [{"dynamo_namespace": NAMESPACE, "role": "broker"}]
            await rig.start_broker("a")
            await loop().advance(11.0)
            assert len(said(caplog, "broker_there_again")) == 1
            assert len(said(caplog, "no_broker")) == 1
