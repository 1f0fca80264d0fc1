"""Clients that send what costs them nothing and a router much: they lose the connection, and nobody else waits."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace

import h2.errors
import pytest
from bus_rig import NAMESPACE, in_flowing_time, until
from raw_client import HELLO, RawClient, client
from router_rig import routing

from kura_shaper.broker.protocol.codec import encode
from kura_shaper.broker.protocol.frames import Heartbeat, Subscribe, ZmqEndpoint
from kura_shaper.broker.protocol.limits import KIB, Limits
from kura_shaper.broker.router.frame_guard import BUDGET_UNITS, HEADER_BLOCK_BYTES_MAX, STRANGER_FRAMES_MAX

SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, HEADERS, CONTINUATION = 4, 6, 3, 8, 1, 9
END_HEADERS = 4


def frame(kind: int, payload: bytes = b"", *, http_id: int = 0, flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + http_id.to_bytes(4, "big") + payload


async def loses_the_connection(raw: RawClient, data: bytes) -> None:
    raw.flush()
    raw.writer.write(data)
    await until(lambda: raw.is_closed)


NOTHING = {
    "settings": frame(SETTINGS),
    "ping": frame(PING, bytes(8)),
    "priority": frame(2, bytes(5), http_id=1),
    "credit": frame(WINDOW_UPDATE, b"\0\0\0\1"),
    "goaway": frame(7, bytes(8)),
    "later": frame(0x77),
}


@pytest.mark.case("ER70")
@pytest.mark.parametrize("kind", NOTHING)
def test_a_stranger_that_floods_is_closed_after_a_few_frames_and_told_of_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as honest:
            await honest.session()
            async with AsyncExitStack() as stack:
                floods = [await stack.enter_async_context(client(rig)) for _ in range(3)]
                for each in floods:
                    await loses_the_connection(each, NOTHING[kind] * 10_000)
            assert rig.bus.counts.connection_faults["flood"] == 3
            assert rig.bus.by_client
            await until(lambda: len(rig.bus._connections) == 1)

    with caplog.at_level(logging.WARNING):
        run()
    assert [each.getMessage() for each in caplog.records] == ["client_failed"]


@pytest.mark.case("ER70")
@in_flowing_time
async def test_what_a_stranger_may_say_is_counted_to_the_frame_and_then_it_is_told_to_be_calm() -> None:
    async with routing() as rig, client(rig) as raw:
        # Its preface brought SETTINGS, and it acknowledged ours.
        await until(lambda: raw.h2.remote_settings.max_concurrent_streams < 2**32)
        raw.writer.write(frame(SETTINGS) * (STRANGER_FRAMES_MAX - 3))
        assert await raw.status(raw.request(authorization="")) == 401
        assert not raw.is_closed
        await loses_the_connection(raw, frame(SETTINGS))
        assert raw.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        assert rig.bus.counts.connection_faults["flood"] == 1


@pytest.mark.case("ER70")
@pytest.mark.parametrize("kind", ["settings", "ping", "credit"])
def test_a_broker_that_floods_loses_its_connection(kind: str) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            await raw.session()
            await loses_the_connection(raw, NOTHING[kind] * (BUDGET_UNITS * 2))
            assert rig.bus.counts.connection_faults["flood"] == 1
            await until(lambda: not rig.bus.by_client)

    run()


@pytest.mark.case("ER70")
@in_flowing_time
async def test_a_read_of_many_frames_is_worked_off_in_turns_between_which_others_have_theirs() -> None:
    async with routing() as rig, client(rig) as raw, client(rig) as other:
        await raw.session(replace(HELLO, client_id="many"))
        await other.session()
        beat = encode(Heartbeat(1))
        flood = frame(0, beat, http_id=raw.session_http_id) * 4_000
        raw.writer.write(flood)
        other.send(other.session_http_id, beat)
        (link,) = [each.link for each in rig.bus._connections if each is rig.bus.by_client["many"].connection]
        await until(lambda: link.http.has_unread)
        # All of it arrives in the end, in its order.
        await until(lambda: rig.bus.counts.heartbeats_received == 4_001)
        assert not link.http.has_unread
        assert set(rig.bus.by_client) == {"many", "raw"}
        raw.writer.write(flood)
        await until(lambda: rig.bus.counts.heartbeats_received == 8_001)


class Unheeded:
    """A consumer."""

    def on_open(self) -> None: ...

    def on_bytes(self, data: bytes, credit_bytes: int) -> None: ...

    def on_sent(self) -> None: ...

    def on_over(self, end: object) -> None: ...


@pytest.mark.case("ER70")
@in_flowing_time
async def test_a_broker_that_opens_and_closes_all_of_its_streams_and_gives_credit_is_no_flood() -> None:
    streams = 1_024
    async with routing(max_streams=streams) as rig, client(rig) as raw:
        welcome = await raw.session(replace(HELLO, limits=Limits(max_streams=streams)))
        mine = {"x-bus-session": welcome.session_id, "content-type": "application/octet-stream"}
        for turn in range(1, 4):
            session = rig.bus.by_client["raw"]
            tunnels = [
                session.subscribe(ZmqEndpoint("tcp://10.0.0.1:5", NAMESPACE), Unheeded()) for _ in range(streams)
            ]
            await until(lambda turn=turn: rig.bus.counts.subscribes == streams * turn)  # type: ignore[misc]
            asked = (await raw.asked(streams * turn))[-streams:]
            http_ids = [raw.request(f"/bus/v1/streams/{each.stream_id}", **mine) for each in asked]
            for http_id in http_ids:
                raw.h2.increment_flow_control_window(1_000, http_id)
                raw.h2.increment_flow_control_window(1_000)
            raw.flush()
            await until(lambda turn=turn: rig.bus.counts.answers["200"] == 1 + streams * turn)  # type: ignore[misc]
            for http_id in http_ids:
                raw.h2.reset_stream(http_id, h2.errors.ErrorCodes.CANCEL)
            raw.flush()
            await until(lambda: not session.tunnels)  # noqa: B023 - it is used up in its turn
            assert all(tunnel.http_id for tunnel in tunnels)
            for tunnel in tunnels:
                session.unsubscribe(tunnel)
        assert "raw" in rig.bus.by_client
        assert sum(rig.bus.counts.connection_faults.values()) == 0
        assert all(isinstance(each, Subscribe) for each in asked)


@pytest.mark.case("ER71")
@in_flowing_time
async def test_a_header_block_that_does_not_end_is_refused_when_it_is_longer_than_headers_may_be() -> None:
    async with routing() as rig, client(rig) as raw:
        # A request first, after which nothing of its own is on its way.
        assert await raw.status(raw.request(authorization="")) == 401
        (connection,) = rig.bus._connections
        raw.flush()
        raw.writer.write(frame(HEADERS, bytes(8 * KIB), http_id=3) + frame(CONTINUATION, bytes(8 * KIB), http_id=3))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not raw.is_closed
        await loses_the_connection(raw, frame(CONTINUATION, b"\0", http_id=3))
        assert rig.bus.counts.connection_faults["flood"] == 1
        assert len(connection.link.http._h2.incoming_buffer._data) <= HEADER_BLOCK_BYTES_MAX


@pytest.mark.case("ER71")
@pytest.mark.parametrize("kind", [HEADERS, 0])
def test_a_stranger_may_send_no_frame_that_is_longer_than_headers_may_be(kind: int) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            # Its head is enough.
            await loses_the_connection(raw, frame(kind, bytes(16 * KIB + 1), http_id=1)[:9])
            assert rig.bus.counts.connection_faults["flood"] == 1

    run()


@pytest.mark.case("ER72")
@pytest.mark.parametrize(
    "block",
    [
        b"\x82\x84\x87\x00\x01x\x02\xff\xfe",
        b"\x82\x84\x87\x00\x01\xff\x01y",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x00\x85\xff\xff\xff\xff\xff\x01y",
        b"\xbf",
    ],
)
def test_headers_that_can_not_be_read_cost_a_stranger_its_connection_and_one_line(
    block: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig:
            for _ in range(3):
                async with client(rig) as raw:
                    head = frame(HEADERS, block, http_id=1, flags=END_HEADERS | 1)
                    await loses_the_connection(raw, head)
            assert sum(rig.bus.counts.connection_faults.values()) == 3
            await until(lambda: not rig.bus._connections)

    with caplog.at_level(logging.WARNING):
        run()
    assert [each.getMessage() for each in caplog.records] == ["client_failed"]
    assert not caplog.records[0].exc_info
