"""Brokers that mean harm, or are broken: each costs itself, and what it was asked for is had elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from bus_rig import NAMESPACE, in_flowing_time, loop, until
from raw_client import HELLO, RawClient, client
from router_rig import RouterRig, ZmqPublisher, routing
from zmtp_bytes import GREETING, READY

from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.frames import (
    Draining,
    Error,
    Frame,
    Heartbeat,
    StreamClosed,
    StreamOpened,
    StreamRefused,
    Unsubscribe,
)
from kura_shaper.broker.protocol.limits import KIB
from kura_shaper.broker.router.settings import Subscription

FIRST = replace(HELLO, client_id="a")
WANTED = Subscription("tcp://10.0.0.1:5", NAMESPACE, ("",))


async def fails(raw: RawClient, rig: RouterRig, code: str) -> None:
    """Return when a client was told this code and is gone."""
    error = await raw.frame(Error)
    assert isinstance(error, Error)
    assert error.code == code
    await until(lambda: not rig.bus.by_client)


@pytest.mark.case("ER54")
@pytest.mark.parametrize(
    "frame",
    [
        StreamOpened("s1"),
        StreamClosed("s1", "upstream_closed", 0, 0),
        Unsubscribe("s1"),
        HELLO,
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_a_frame_that_no_order_of_events_explains_ends_the_session(frame: Frame) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
            await raw.session(FIRST)
            await raw.asked()
            raw.send(raw.session_http_id, encode(frame))
            await fails(raw, rig, "protocol_error")
            assert rig.bus.feeds[0].current is None

    run()


@pytest.mark.case("ER54")
@in_flowing_time
async def test_frames_of_streams_that_were_never_asked_for_mean_nothing() -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
        await raw.session(FIRST)
        for number in range(1_000):
            stream_id = f"never-{number}"
            refused = StreamRefused(stream_id, "internal", True)
            raw.send(raw.session_http_id, encode(refused) + encode(StreamClosed(stream_id, "gone", 0, 0)))
            if number % 50 == 0:
                await asyncio.sleep(0.002)
        raw.send(raw.session_http_id, encode(Heartbeat(1)))
        await until(lambda: rig.bus.counts.heartbeats_received == 1)
        assert len(rig.bus.by_client["a"].tunnels) == 1
        assert sum(rig.bus.counts.refusals.values()) == 0


@pytest.mark.case("ER59")
@in_flowing_time
async def test_a_broker_that_answers_no_subscribe_loses_it_to_another_after_thirty_seconds() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig, client(rig) as raw:
        await raw.session(FIRST)
        await raw.asked()
        await rig.start_broker("b")
        for beat in range(1, 32):
            raw.send(raw.session_http_id, encode(Heartbeat(beat)))
            await loop().advance(1.0, step_s=1.0)
        await rig.read()
        assert rig.bus.feeds[0].session is rig.bus.by_client["b"]
        assert rig.bus.counts.tunnel_ends["expired"] == 1
        assert "a" in rig.bus.by_client


@pytest.mark.case("ER59")
@in_flowing_time
async def test_a_broker_that_opens_a_stream_and_brings_nothing_is_given_up_and_asked_again_later_and_later() -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
        welcome = await raw.session(FIRST)
        for _ in range(3):
            number = len(await raw.asked())
            await raw.open((await raw.asked())[-1].stream_id, welcome.session_id)
            for beat in range(31):
                raw.send(raw.session_http_id, encode(Heartbeat(beat)))
                await loop().advance(1.0, step_s=1.0)
            await until(lambda number=number: rig.bus.counts.bad_publishers["handshake"] == number)  # type: ignore[misc]
            await loop().advance(4.0, step_s=1.0)
            await raw.asked(number + 1)


@pytest.mark.case("ER60")
@in_flowing_time
async def test_a_broker_that_sends_beyond_its_window_loses_the_connection() -> None:
    async with routing(subscriptions=(WANTED,), stream_window_bytes=64 * KIB) as rig, client(rig) as raw:
        welcome = await raw.session(FIRST)
        (asked,) = await raw.asked()
        http_id = await raw.open(asked.stream_id, welcome.session_id)
        # As bytes: the library would not.
        head = (16_384).to_bytes(3, "big") + b"\0\0" + http_id.to_bytes(4, "big")
        raw.flush()
        raw.writer.write((head + bytes(16_384)) * 8)
        await until(lambda: raw.is_closed)
        await until(lambda: not rig.bus.by_client)


@pytest.mark.case("ER61")
@in_flowing_time
async def test_the_stream_of_another_session_can_not_be_had() -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw, client(rig) as thief:
        welcome = await raw.session(FIRST)
        (asked,) = await raw.asked()
        other = await thief.session(replace(HELLO, client_id="thief"))
        path, octets = f"/bus/v1/streams/{asked.stream_id}", {"content-type": "application/octet-stream"}
        assert await thief.status(thief.request(path, **octets, x_bus_session=other.session_id)) == 404
        assert await thief.status(thief.request(path, **octets, x_bus_session=welcome.session_id[:-1] + "z")) == 410
        await raw.open(asked.stream_id, welcome.session_id)


@pytest.mark.case("ER57")
@in_flowing_time
async def test_half_a_frame_is_no_sign_of_life_however_often_it_grows() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session(FIRST)
        raw.send(raw.session_http_id, (60_000).to_bytes(4, "big"))
        for _ in range(31):
            raw.send(raw.session_http_id, b'{"a":')
            await loop().advance(1.0, step_s=1.0)
        await fails(raw, rig, "idle_timeout")


@pytest.mark.case("ER53")
@in_flowing_time
async def test_frames_of_no_known_type_without_end_are_counted_and_kept_nowhere() -> None:
    async with routing() as rig, client(rig) as raw:
        await raw.session(FIRST)
        for number in range(2_000):
            raw.send(raw.session_http_id, encode_object({"type": f"later_{number}", "x": "y" * 200}))
            if number % 20 == 0:
                await until(lambda number=number: rig.bus.counts.frames_ignored >= number)  # type: ignore[misc]
        await until(lambda: rig.bus.counts.frames_ignored == 2_000)
        assert "a" in rig.bus.by_client


@pytest.mark.case("ER8")
@in_flowing_time
async def test_a_client_that_takes_a_name_again_and_again_is_one_session_and_leaves_nothing() -> None:
    async with routing(subscriptions=(WANTED,)) as rig, client(rig) as raw:
        for number in range(50):
            raw.frames.clear()
            raw.bodies.clear()
            raw._decoder = type(raw._decoder)()
            await raw.session(FIRST)
            assert rig.bus.counts.sessions == number + 1
            assert set(rig.bus.by_client) == {"a"}
        assert rig.bus.counts.session_ends["superseded"] == 49
        assert len(rig.bus._by_id) == 1
        assert len(rig.bus.by_client["a"].tunnels) == 1


@pytest.mark.case("ER9")
@in_flowing_time
async def test_a_broker_that_says_it_leaves_and_stays_keeps_nobody() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig, client(rig) as raw:
        welcome = await raw.session(FIRST)
        (asked,) = await raw.asked()
        http_id = await raw.open(asked.stream_id, welcome.session_id)
        raw.send(http_id, GREETING + READY)
        await rig.read()
        raw.send(raw.session_http_id, encode(Draining("shutdown", 3_600_000)))
        await until(lambda: rig.bus.by_client["a"].protocol.is_draining)
        await rig.start_broker("b")
        await loop().advance(1.2)
        await rig.read()
        assert rig.bus.feeds[0].session is rig.bus.by_client["b"]


@pytest.mark.case("ER3")
@pytest.mark.parametrize(("least", "most", "agreed"), [(1, 1, True), (1, 7, True), (2, 7, False)])
def test_the_version_is_the_one_that_both_speak_and_without_one_it_ends(least: int, most: int, agreed: bool) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            hello = replace(FIRST, protocol_min=least, protocol_max=most)
            if agreed:
                assert (await raw.session(hello)).protocol_version == 1
                return
            raw.session_http_id = raw.request()
            raw.send(raw.session_http_id, encode(hello))
            await fails(raw, rig, "unsupported_version")
            assert rig.bus.counts.session_ends["unsupported_version"] == 1

    run()


@pytest.mark.case("ER3")
@in_flowing_time
async def test_a_broker_that_shares_no_version_knows_that_only_another_one_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A router of a later version, which this one does not speak.
    monkeypatch.setattr("kura_shaper.broker.protocol.router_session.PROTOCOL_VERSION", 2)
    async with routing() as rig:
        starting = asyncio.ensure_future(rig.start_broker("a"))
        await until(lambda: "a" in rig.brokers and rig.brokers["a"][0].view.last_end is not None)
        broker, _ = rig.brokers["a"]
        assert broker.view.last_end
        assert (broker.view.last_end.code, broker.view.last_end.is_terminal) == ("unsupported_version", True)
        assert broker.counts.terminal_error["unsupported_version"] == 1
        # It comes again after its longest wait, in case the router was replaced, and finds one that it can speak with.
        await until(lambda: broker.counts.reconnect_wait_s >= 30)
        monkeypatch.undo()
        await loop().advance(60.0, step_s=1.0)
        await starting
        assert broker.counts.terminal_error["unsupported_version"] == 0
