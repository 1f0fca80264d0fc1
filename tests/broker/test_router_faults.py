"""What the reference router does wrong on purpose, and what comes of it at a broker: each fault of `faults`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from bus_rig import in_flowing_time, loop, until
from router_rig import RouterRig, ZmqPublisher, one_reading, routing

from kura_shaper.broker.protocol.limits import KIB
from kura_shaper.broker.router.faults import Fault, FaultStep, cause

if TYPE_CHECKING:
    from kura_shaper.broker.router.session import ClientSession
    from kura_shaper.broker.service import Broker

BIG = b"\xc5\xff\x00" + bytes(0xFF00)


async def comes_anew(rig: RouterRig, before: ClientSession, publisher: ZmqPublisher) -> None:
    """Return when a broker has another session than before, and its publisher is heard over that."""
    await until(lambda: before.is_over)
    for _ in range(40):
        await loop().advance(0.1)
        await asyncio.sleep(0.005)
    await until(lambda: rig.bus.by_client.get("a", before) is not before)
    await rig.read()
    await rig.hear(publisher)


async def ended_by(fault: Fault, code: str, *, within_s: float = 0.0) -> None:
    """Cause a fault that ends the session at the broker, by this code, and see that reading goes on afterwards."""
    async with one_reading() as (rig, broker, publisher):
        before = rig.bus.by_client["a"]
        cause(fault, before)
        if within_s:
            await loop().advance(within_s - 1.0, step_s=1.0)
            assert broker.view.last_end is None
            await loop().advance(2.0, step_s=1.0)
        await until(lambda: broker.view.last_end is not None)
        assert broker.view.last_end
        assert broker.view.last_end.code == code
        await comes_anew(rig, before, publisher)


@pytest.mark.case("ER37")
@in_flowing_time
async def test_a_connection_that_breaks_is_made_anew() -> None:
    await ended_by(Fault.BREAK, "connection_lost")


@pytest.mark.case("ER36")
@in_flowing_time
async def test_an_error_frame_ends_the_session_by_its_code() -> None:
    await ended_by(Fault.ERROR, "internal")


@pytest.mark.case("ER30")
@in_flowing_time
async def test_a_frame_that_is_no_json_ends_the_session() -> None:
    await ended_by(Fault.BAD_FRAME, "protocol_error")


@pytest.mark.case("ER31")
@in_flowing_time
async def test_a_frame_that_is_too_long_ends_the_session_by_its_head() -> None:
    await ended_by(Fault.HUGE_FRAME, "protocol_error")


@pytest.mark.case("ER27")
@in_flowing_time
async def test_a_goaway_with_an_error_ends_the_session() -> None:
    await ended_by(Fault.GOAWAY_ERROR, "goaway")


@pytest.mark.case("ER25")
@in_flowing_time
async def test_a_router_that_sends_no_heartbeats_is_left_after_the_timeout() -> None:
    await ended_by(Fault.SILENCE, "idle_timeout", within_s=30.0)


@pytest.mark.case("ER28")
@in_flowing_time
async def test_a_broker_that_is_asked_to_leave_comes_again_after_a_wait() -> None:
    await ended_by(Fault.DRAIN, "drain", within_s=10.0)


@pytest.mark.case("ER29")
@in_flowing_time
async def test_a_broker_that_is_asked_to_rebalance_comes_again_at_once() -> None:
    async with one_reading() as (rig, broker, _):
        before = rig.bus.by_client["a"]
        cause(Fault.REBALANCE, before)
        rig.bus.feeds[0].close()
        await until(lambda: broker.counts.reconnects["rebalance"] == 1)
        assert 0.25 <= broker.counts.reconnect_wait_s <= 0.5
        await loop().advance(0.5)
        await until(lambda: rig.bus.by_client.get("a", before) is not before)


@pytest.mark.case("ER26")
@pytest.mark.case("ER32")
@in_flowing_time
async def test_a_frame_of_a_later_version_and_a_goaway_change_nothing_for_open_streams() -> None:
    async with one_reading() as (rig, broker, publisher):
        session = rig.bus.by_client["a"]
        cause(Fault.UNKNOWN_FRAME, session)
        cause(Fault.GOAWAY, session)
        await publisher.subscribed()
        for _ in range(100):
            publisher.publish()
        await until(lambda: len(rig.output.found) == 100)
        assert broker.counts.frames_ignored == 1
        assert not session.is_over


async def overflows(rig: RouterRig, broker: Broker, publisher: ZmqPublisher) -> None:
    """Publish until the broker may keep no more."""
    for _ in range(200):
        publisher.publish(payload=BIG)
    await until(lambda: broker.counts.stream_ends["buffer_overflow"] == 1)


@pytest.mark.case("ER23")
@in_flowing_time
async def test_a_router_that_withholds_credit_makes_its_stream_overflow_and_is_read_again() -> None:
    async with one_reading(stream_window_bytes=64 * KIB, max_stream_buffer_bytes=64 * KIB) as (rig, broker, publisher):
        session = rig.bus.by_client["a"]
        cause(Fault.WITHHOLD, session)
        await overflows(rig, broker, publisher)
        await until(lambda: rig.bus.counts.closes["buffer_overflow"] == 1)
        cause(Fault.GRANT, session)
        await loop().advance(1.0)
        await rig.read()
        await rig.hear(publisher)
        assert not session.is_over


@pytest.mark.case("ER23")
@in_flowing_time
async def test_credit_that_was_withheld_is_given_in_time_and_nothing_is_lost() -> None:
    async with one_reading(stream_window_bytes=64 * KIB) as (rig, _, publisher):
        session = rig.bus.by_client["a"]
        cause(Fault.WITHHOLD, session)
        for _ in range(6):
            publisher.publish(payload=BIG)
        (tunnel,) = session.tunnels.values()
        # All but what the handshake took, whose credit is only given when it is worth a frame.
        await until(lambda: tunnel.owed_bytes > 63 * KIB)
        # What fits the window comes, and no more.
        assert rig.output.numbers() == [0]
        cause(Fault.GRANT, session)
        await until(lambda: rig.output.numbers() == list(range(6)))


@pytest.mark.case("ER24")
@in_flowing_time
async def test_a_router_that_reads_nothing_makes_streams_overflow_and_hears_of_it_when_it_reads_again() -> None:
    async with one_reading(max_stream_buffer_bytes=64 * KIB) as (rig, broker, publisher):
        session = rig.bus.by_client["a"]
        cause(Fault.STALL, session)
        await overflows(rig, broker, publisher)
        assert rig.bus.counts.closes["buffer_overflow"] == 0
        cause(Fault.RESUME, session)
        await until(lambda: rig.bus.counts.closes["buffer_overflow"] == 1)
        await loop().advance(1.0)
        await rig.read()
        await rig.hear(publisher)
        assert not session.is_over


@pytest.mark.case("ER33")
@in_flowing_time
async def test_streams_that_are_broken_off_are_asked_for_again() -> None:
    async with one_reading() as (rig, _, _):
        stream = rig.bus.feeds[0].current
        cause(Fault.RESET_STREAMS, rig.bus.by_client["a"])
        assert rig.bus.feeds[0].current is None
        await loop().advance(1.0)
        await rig.read()
        assert rig.bus.feeds[0].current is not stream
        assert rig.bus.feeds[0].last_failure == ""


async def not_opened(fault: Fault, code: str, *, within_s: float) -> None:
    """Cause a fault that keeps streams from being opened, and see that it ends with its opposite."""
    async with one_reading() as (rig, broker, publisher):
        session = rig.bus.by_client["a"]
        cause(fault, session)
        cause(Fault.RESET_STREAMS, session)
        await loop().advance(0.5)
        await until(lambda: rig.bus.feeds[0].current is not None)
        await loop().advance(within_s)
        await until(lambda: broker.counts.refusals[code] >= 1)
        await until(lambda: rig.bus.counts.refusals[code] >= 1)
        assert not session.is_over
        cause(Fault.ACCEPT_STREAMS, session)
        for _ in range(20):
            await loop().advance(1.0, step_s=1.0)
            await asyncio.sleep(0.01)
        await rig.read()
        await rig.hear(publisher)


@pytest.mark.case("ER34")
@in_flowing_time
async def test_streams_that_are_answered_with_503_are_refused_and_asked_for_again() -> None:
    await not_opened(Fault.REFUSE_STREAMS, "stream_rejected", within_s=0.0)


@pytest.mark.case("ER35")
@in_flowing_time
async def test_streams_that_are_not_answered_are_given_up_after_ten_seconds_and_asked_for_again() -> None:
    await not_opened(Fault.IGNORE_STREAMS, "open_timeout", within_s=10.5)


@pytest.mark.case("ER38")
@in_flowing_time
async def test_faults_of_the_settings_happen_at_their_times_after_the_welcome() -> None:
    async with routing(faults=(FaultStep(500, Fault.SILENCE), FaultStep(1_000, Fault.ERROR))) as rig:
        await rig.start_broker("a")
        session = rig.bus.by_client["a"]
        await loop().advance(0.75)
        assert not session.beats
        assert not session.is_over
        await loop().advance(0.5)
        assert session.end_code == "internal"
