"""Bytes between a publisher and a router, through a real broker, TLS and HTTP/2."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
from random import Random
from typing import TYPE_CHECKING

import pytest
import zmq
from bus_rig import WIDE, Census, Connection, Peer, Rig, Script, in_a_loop, in_flowing_time, loop, pause, running, until
from long_way import NARROW_BYTES, RTT_S, delaying, long_way, steady_rate

from kura_shaper.broker.protocol.codes import DrainReason
from kura_shaper.broker.protocol.frames import StreamClosed, StreamRefused
from kura_shaper.broker.protocol.limits import CHUNK_OVERHEAD_BYTES, KIB, MIB, SESSION_BUFFER_BYTES
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.broker.session import BusSession

# Nothing is granted on a stream but what a test grants; the connection and the session have room.
NOTHING = 0


def session_of(rig: Rig) -> BusSession:
    assert rig.broker.view.session is not None
    return rig.broker.view.session


def stingy(**changes: int) -> Script:
    """Return the script of a router that grants data streams nothing by itself, but for what is granted at first."""
    return Script(grants=False, stream_window=changes.pop("stream_window", 65_535), **changes)  # type: ignore[arg-type]


@pytest.mark.case("EB12")
@in_a_loop
async def test_ten_mebibytes_come_through_whole_both_ways_at_once() -> None:
    async with running() as rig:
        peer, _, connection, stream_id = await rig.stream()
        stream = peer.streams[stream_id]
        up, down = os.urandom(10 << 20), os.urandom(10 << 20)
        peer.send(stream_id, down)
        sending = asyncio.ensure_future(connection.send(up))
        await until(lambda: len(stream.received) == len(up) or stream.reset is not None)
        await until(lambda: len(connection.received) == len(down))
        await sending
        assert hashlib.sha256(stream.received).digest() == hashlib.sha256(up).digest()
        assert hashlib.sha256(connection.received).digest() == hashlib.sha256(down).digest()
        assert rig.broker.counts.to_router_bytes == rig.broker.counts.to_upstream_bytes == 10 << 20


@pytest.mark.case("EB13")
@in_a_loop
async def test_bytes_of_any_kind_and_size_come_through_as_they_are() -> None:
    random = Random(1)
    async with running(Script(max_frame_size=16_384)) as rig:
        peer, _, connection, stream_id = await rig.stream()
        pieces = [random.randbytes(random.choice([1, 7, 64, 1_500, 16_384, 70_000])) for _ in range(100)]
        for piece in pieces:
            connection.transport.write(piece)
            peer.send(stream_id, piece[::-1])
            await asyncio.sleep(0)
        whole = b"".join(pieces)
        await until(lambda: len(peer.streams[stream_id].received) == len(whole) == len(connection.received))
        assert bytes(peer.streams[stream_id].received) == whole
        assert bytes(connection.received) == b"".join(piece[::-1] for piece in pieces)


@pytest.mark.case("EB13")
@in_a_loop
async def test_zeromq_publishes_and_subscribes_through_the_tunnel() -> None:
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with running() as rig:
            peer = await rig.router.peer()
            rig.directory.advertise(f"tcp://127.0.0.1:{port}")
            stream_id = await peer.opened(f"tcp://127.0.0.1:{port}")
            async with _bridge(peer, stream_id) as local:
                subscriber = context.socket(zmq.SUB)
                subscriber.connect(f"tcp://127.0.0.1:{local}")
                subscriber.subscribe(b"kv-events")
                wanted = [b"kv-events", (42).to_bytes(8, "big"), (1).to_bytes(8, "big"), b"\x01\0\0\0\x05hello"]
                try:
                    got: list[bytes] = []
                    while not got:
                        # A publisher drops what nobody has subscribed to yet.
                        publisher.send_multipart(wanted)
                        await pause()
                        if subscriber.poll(0):
                            got = subscriber.recv_multipart()
                    assert got == wanted
                finally:
                    subscriber.close(0)
    finally:
        publisher.close(0)
        context.destroy(0)


class _bridge:  # noqa: N801 - used like a function
    """A port whose bytes are those of a stream: the router's own client of ZeroMQ."""

    def __init__(self, peer: Peer, stream_id: str) -> None:
        self._peer, self._stream_id = peer, stream_id
        self._sent = 0
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._task = asyncio.ensure_future(self._back())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._task.cancel()
        if self._writer:
            self._writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        while data := await reader.read(65_536):
            self._peer.send(self._stream_id, data)

    async def _back(self) -> None:
        received = self._peer.streams[self._stream_id].received
        while True:
            if self._writer and len(received) > self._sent:
                self._writer.write(bytes(received[self._sent :]))
                self._sent = len(received)
            await pause()


@in_a_loop
async def test_a_stream_that_is_faster_than_its_rate_overflows_alone_and_its_publisher_is_never_held_back() -> None:
    rate = Rate(8_000_000)
    async with running(max_stream_rate=rate) as rig:
        peer, _, loud, loud_id = await rig.stream()
        quiet_publisher = await rig.publisher()
        quiet_id = await peer.opened(quiet_publisher.endpoint)
        await loud.send(bytes(600 * KIB))
        # Time stands still, so no more than the burst has left.
        await until(lambda: len(peer.streams[loud_id].received) > 48 * KIB)
        await (await quiet_publisher.connection()).send(bytes(10 * KIB))
        await until(lambda: len(peer.streams[quiet_id].received) == 10 * KIB)
        await loop().advance(0.1, step_s=0.01)
        assert 48 * KIB + 80_000 <= len(peer.streams[loud_id].received) <= 64 * KIB + 100_000
        await loop().advance(1, step_s=0.01)
        await until(lambda: len(peer.streams[loud_id].received) == 600 * KIB)
        await loud.send(bytes(16 * MIB))
        assert (await peer.closed(loud_id)).code == "buffer_overflow"
        assert list(session_of(rig).relays) == [quiet_id]


@in_a_loop
async def test_what_the_session_says_has_no_rate() -> None:
    async with running(max_stream_rate=Rate(256_000)) as rig:
        peer = await rig.established()
        for refused in range(200, 2_001, 200):
            for _ in range(200):
                peer.subscribe("ipc://x")
            await until(lambda refused=refused: len(peer.frames(StreamRefused)) == refused)  # type: ignore[misc]


@in_a_loop
async def test_the_tail_of_a_stream_with_a_rate_is_sent_in_its_time() -> None:
    async with running(max_stream_rate=Rate(256_000)) as rig:
        peer, _, connection, stream_id = await rig.stream()
        await connection.send(bytes(300 * KIB))
        connection.transport.close()
        await loop().advance(12)
        assert (await peer.closed(stream_id)).code == "upstream_closed"
        assert len(peer.streams[stream_id].received) == 300 * KIB
        assert peer.streams[stream_id].ended


@in_a_loop
async def test_a_stream_whose_publisher_left_the_metadata_is_ended_after_a_while_where_that_is_asked_for() -> None:
    async with running(deauthorise_after_ms=30_000) as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        other = await rig.publisher()
        other_id = await peer.opened(other.endpoint)
        rig.directory.withdraw(publisher.endpoint)
        await loop().advance(29, step_s=1)
        rig.directory.advertise(publisher.endpoint)  # in time
        await loop().advance(30, step_s=1)
        rig.directory.withdraw(publisher.endpoint)
        await loop().advance(10, step_s=1)
        rig.directory.is_current = False  # nobody knows, for longer than it takes
        await loop().advance(60, step_s=1)
        rig.directory.is_current = True
        await loop().advance(30, step_s=1)
        assert set(session_of(rig).relays) == {stream_id, other_id}
        await loop().advance(2, step_s=1)
        assert (await peer.closed(stream_id)).code == "upstream_closed"
        await until(lambda: peer.streams[stream_id].reset is not None and connection.lost)
        assert set(session_of(rig).relays) == {other_id}
        assert rig.broker.counts.stream_ends["deauthorised"] == 1


@in_a_loop
async def test_by_itself_a_stream_outlives_its_metadata() -> None:
    async with running() as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        rig.directory.withdraw(publisher.endpoint)
        await loop().advance(3_600, step_s=5)
        await connection.send(b"x")
        await until(lambda: len(peer.streams[stream_id].received) == 1)


@pytest.mark.case("EP17")
@pytest.mark.slow
@pytest.mark.traffic
@in_flowing_time
async def test_over_a_long_way_the_routers_window_is_the_bound_and_not_the_broker() -> None:
    async def rate(window_bytes: int) -> float:
        async with running(long_way(window_bytes), through=delaying) as rig:
            return await steady_rate(rig)

    narrow, wide = await rate(NARROW_BYTES), await rate(WIDE)
    assert 0.5 * NARROW_BYTES / RTT_S < narrow < 1.1 * NARROW_BYTES / RTT_S
    assert wide > 10 * narrow


@pytest.mark.case("EB27")
@pytest.mark.case("EP16")
@in_a_loop
async def test_a_publisher_that_closes_has_all_of_its_bytes_delivered_to_a_slow_router() -> None:
    async with running(stingy()) as rig:
        peer, _, connection, stream_id = await rig.stream()
        stream = peer.streams[stream_id]
        census = Census(rig)
        sent = os.urandom(MIB - 64 * KIB)
        await connection.send(sent)
        connection.transport.close()
        await until(lambda: connection.lost)
        while len(stream.received) < len(sent):
            assert not stream.ended
            before = len(stream.received)
            # Slower than the flush's own deadline in all, and never silent for as long.
            await loop().advance(4)
            peer.grant_owed(stream_id)
            await until(lambda before=before: len(stream.received) > before)  # type: ignore[misc]
        told = await peer.closed(stream_id)
        await until(lambda: stream.ended)
        assert bytes(stream.received) == sent
        assert (told.code, told.bytes_to_router, told.bytes_to_upstream) == ("upstream_closed", len(sent), 0)
        assert stream.reset is None
        assert census.before[3] == 1
        await until(lambda: census.now()[2:6] == (0, 0, 0, 1))


@pytest.mark.case("EB27")
@in_a_loop
async def test_a_tail_that_the_router_takes_nothing_of_is_given_up_after_five_seconds() -> None:
    async with running(stingy()) as rig:
        peer, _, connection, stream_id = await rig.stream()
        await connection.send(bytes(256 * KIB))
        connection.transport.close()
        await until(lambda: connection.lost)
        await until(lambda: len(peer.streams[stream_id].received) == 65_535)
        await loop().advance(4.5)
        assert not peer.frames(StreamClosed)
        await loop().advance(6)
        assert (await peer.closed(stream_id)).code == "upstream_closed"
        await until(lambda: peer.streams[stream_id].reset == 8)
        assert session_of(rig).budget.used_bytes == 0


@in_a_loop
async def test_a_publisher_that_breaks_off_counts_as_one_that_closes() -> None:
    async with running() as rig:
        peer, _, connection, stream_id = await rig.stream()
        connection.transport.write(b"last words")
        await until(lambda: len(peer.streams[stream_id].received) == 10)
        made = connection.transport.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.transport.abort()
        assert (await peer.closed(stream_id)).code == "upstream_closed"


@pytest.mark.case("EB28")
@in_a_loop
async def test_a_stream_overflows_at_exactly_its_limit_and_alone() -> None:
    async with running(stingy()) as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        other = await peer.opened(publisher.endpoint, max_stream_buffer_bytes=16 * KIB)
        relay = session_of(rig).relays[other]
        small = await publisher.connection(2)
        # The router's window first, which is no buffer of ours.
        await small.send(bytes(65_535))
        await until(lambda: len(peer.streams[other].received) == 65_535)
        for number in range(1, 253):
            small.transport.write(b"x")
            await until(lambda number=number: relay.buffer.charged_bytes == number * (1 + CHUNK_OVERHEAD_BYTES))  # type: ignore[misc]
        assert not peer.frames(StreamClosed)
        small.transport.write(b"x")
        told = await peer.closed(other)
        assert (told.code, told.bytes_to_router) == ("buffer_overflow", 65_535)
        await until(lambda: peer.streams[other].reset == 8)
        await until(lambda: small.lost)
        assert session_of(rig).budget.used_bytes == 0
        # The neighbour has felt nothing, and the router may subscribe again.
        await connection.send(b"y" * 1_000)
        await until(lambda: len(peer.streams[stream_id].received) == 1_000)
        await peer.opened(publisher.endpoint, stream_id=other)


@pytest.mark.case("EB31")
@in_a_loop
async def test_a_publisher_is_read_while_the_router_reads_nothing_until_the_stream_overflows() -> None:
    async with running(stingy()) as rig:
        peer, _, connection, stream_id = await rig.stream()
        fits = MIB - 64 * KIB
        await connection.send(bytes(fits))
        await until(lambda: session_of(rig).relays[stream_id].buffer.length_bytes == fits - 65_535)
        # The publisher's own buffers are empty: it is not held back.
        assert connection.transport.get_write_buffer_size() == 0
        await connection.send(bytes(128 * KIB))
        assert (await peer.closed(stream_id)).code == "buffer_overflow"


@pytest.mark.case("EB30")
@in_a_loop
async def test_the_session_keeps_64_mebibytes_and_only_the_stream_that_wants_more_is_closed() -> None:
    async with running(stingy()) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        streams = [await peer.opened(publisher.endpoint) for _ in range(72)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        each = MIB - 96 * KIB
        for number, stream_id in enumerate(streams):
            connection = await publisher.connection(number + 1)
            await connection.send(bytes(65_535 + each))
            await until(lambda stream_id=stream_id: _has_settled(rig, peer, stream_id, each))  # type: ignore[misc]
        closed = {told.stream_id for told in peer.frames(StreamClosed)}
        assert {told.code for told in peer.frames(StreamClosed)} == {"buffer_overflow"}
        # Those that came first fit, and they are all still there.
        assert closed == set(streams[-len(closed) :])
        budget = session_of(rig).budget
        assert SESSION_BUFFER_BYTES - MIB < budget.used_bytes <= budget.high_water_bytes <= SESSION_BUFFER_BYTES
        # What the test's own publishers hold is in this process as well, and gone by now.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - before < 2 * SESSION_BUFFER_BYTES


def _has_settled(rig: Rig, peer: Peer, stream_id: str, size: int) -> bool:
    relay = session_of(rig).relays.get(stream_id)
    return relay.buffer.length_bytes == size if relay else bool(peer.streams[stream_id].reset)


@pytest.mark.case("EB32")
@pytest.mark.case("EP1")
@pytest.mark.case("EP12")
@in_a_loop
async def test_publishers_that_read_nothing_are_given_64_kib_ahead_and_hold_nobody_else_up() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        streams = [await peer.opened(publisher.endpoint) for _ in range(64)]
        for number, stream_id in enumerate(streams):
            connection = await publisher.connection(number + 1)
            connection.transport.pause_reading()
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.send(stream_id, bytes(8 * MIB))
        relays = [session_of(rig).relays[stream_id] for stream_id in streams]
        taken = [-1]

        def stands_still() -> bool:
            sent = sum(peer.streams[stream_id].sent for stream_id in streams)
            taken.append(sent)
            return len(taken) > 50 and len(set(taken[-50:])) == 1

        await until(stands_still)
        for relay in relays:
            assert relay._upstream._transport is not None
            # The kernel's own buffers apart, nothing is kept that the router was given credit for.
            assert 0 < relay._upstream._transport.get_write_buffer_size() <= 64 * KIB
        free = await peer.opened(publisher.endpoint)
        peer.send(free, b"z" * (4 * MIB))
        connection = await publisher.connection(65)
        await until(lambda: len(connection.received) == 4 * MIB)
        sent = rig.broker.counts.heartbeats_sent
        await loop().advance(11.5)
        await until(lambda: rig.broker.counts.heartbeats_sent > sent)


@pytest.mark.case("EP12")
@in_a_loop
async def test_streams_that_are_ended_with_bytes_on_their_way_give_the_connections_window_back() -> None:
    async with running(Script(connection_window=WINDOW)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        for number in range(300):
            stream_id = await peer.opened(publisher.endpoint, stream_id=f"n{number}")
            connection = await publisher.connection(number + 1)
            peer.send(stream_id, bytes(100_000))
            connection.transport.write(bytes(100_000))
            if number % 2:
                peer.unsubscribe(stream_id)
            else:
                peer.reset(stream_id)
            await until(lambda connection=connection: connection.lost)  # type: ignore[misc]
        last = await peer.opened(publisher.endpoint)
        connection = await publisher.connection(301)
        peer.send(last, bytes(2 * MIB))
        await connection.send(bytes(512 * KIB))
        await until(lambda: len(connection.received) == 2 * MIB)
        await until(lambda: len(peer.streams[last].received) == 512 * KIB)


WINDOW = 1 << 20


@pytest.mark.case("EP12")
@in_a_loop
async def test_bytes_that_come_with_the_end_of_their_stream_give_the_connections_window_back() -> None:
    # With so few streams there is room for 192 KiB on the connection, the session's own frames among it.
    async with running(max_streams=2) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        for number in range(20):
            stream_id = await peer.opened(publisher.endpoint, stream_id=f"n{number}")
            peer.unsubscribe_and_send(stream_id, bytes(60_000))
            connection = await publisher.connection(number + 1)
            await until(lambda connection=connection: connection.lost)  # type: ignore[misc]
        last = await peer.opened(publisher.endpoint)
        peer.send(last, bytes(MIB))
        connection = await publisher.connection(21)
        await until(lambda: len(connection.received) == MIB)


@pytest.mark.case("EB33")
@in_a_loop
async def test_an_unsubscribe_of_an_open_stream_resets_it_and_says_nothing() -> None:
    async with running() as rig:
        peer, _, connection, stream_id = await rig.stream()
        census = Census(rig)
        peer.unsubscribe(stream_id)
        await until(lambda: connection.lost and peer.streams[stream_id].reset == 8)
        assert not peer.frames(StreamClosed)
        await until(lambda: census.now()[2:6] == (0, 0, 0, 1))
        assert rig.broker.counts.stream_ends["unsubscribed"] == 1


@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_router_that_ends_a_stream_lets_its_publisher_go_and_nothing_is_said(how: str) -> None:
    @in_a_loop
    async def check() -> None:
        async with running() as rig:
            peer, _, connection, stream_id = await rig.stream()
            peer.send(stream_id, b"last words")
            (peer.end if how == "end" else peer.reset)(stream_id)
            await until(lambda: connection.lost)
            await until(lambda: rig.broker.counts.stream_ends["router_closed"] == 1)
            assert not peer.frames(StreamClosed)
            assert session_of(rig).protocol.stream_count == 0
            if how == "end":
                assert bytes(connection.received) == b"last words"

    check()


@pytest.mark.case("EB34")
@in_a_loop
async def test_a_session_that_drops_lets_all_publishers_go() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        for _ in range(10):
            await peer.opened(publisher.endpoint)
        peer.abort()
        await until(lambda: all(each.lost for each in publisher.connections))
        assert rig.broker.counts.stream_ends["session_lost"] == 10
        assert rig.broker.counts.session_ends["connection_lost"] == 1


@pytest.mark.case("EP14")
@in_a_loop
async def test_a_goaway_lets_open_streams_go_on_refuses_new_ones_and_is_followed_by_a_reconnect() -> None:
    async with running() as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        peer.go_away()
        await until(lambda: session_of(rig).protocol.is_draining)
        assert await peer.refusal(publisher.endpoint) == "draining"
        await connection.send(b"u" * 100_000)
        peer.send(stream_id, b"d" * 100_000)
        await until(lambda: len(peer.streams[stream_id].received) == len(connection.received) == 100_000)
        assert not peer.lost
        connection.transport.close()
        await peer.closed(stream_id)
        await until(lambda: peer.lost)
        assert rig.broker.counts.session_ends["goaway"] == 1
        await rig.again()


@pytest.mark.case("EP14")
@in_a_loop
async def test_streams_above_the_last_one_of_a_goaway_are_refused_and_an_error_ends_everything() -> None:
    async with running(Script(answers_streams=False)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        stream_id = peer.subscribe(publisher.endpoint)
        await until(lambda: stream_id in peer.streams)
        peer.go_away(last=1)
        assert (await peer.outcome(stream_id)).code == "stream_rejected"
    async with running() as rig:
        peer, _, connection, _ = await rig.stream()
        peer.go_away(code=2)
        await until(lambda: connection.lost)
        assert rig.broker.counts.session_ends["goaway"] == 1


@pytest.mark.case("EP26")
@pytest.mark.case("EB10")
@in_a_loop
async def test_heartbeats_and_refusals_get_through_while_the_router_grants_data_nothing() -> None:
    # The connection's window is all used by data but for the reserve.
    async with running(Script(grants=False, connection_window=65_535, stream_window=65_535)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        streams = [await peer.opened(publisher.endpoint) for _ in range(8)]
        for number in range(len(streams)):
            await (await publisher.connection(number + 1)).send(bytes(100_000))
        await until(lambda: session_of(rig).link.http.data_room_bytes <= 0)
        peer.subscribe("ipc://x", stream_id="bad")
        assert (await peer.outcome("bad")).code == "invalid_target"
        for beat in range(1, 4):
            await loop().advance(11.2)
            await until(lambda beat=beat: rig.broker.counts.heartbeats_sent >= beat)  # type: ignore[misc]
            await until(lambda beat=beat: sum(type(each).__name__ == "HeartbeatSeen" for each in peer.told) >= beat)  # type: ignore[misc]
        assert len(session_of(rig).relays) == 8


@in_a_loop
async def test_a_router_that_stops_reading_costs_its_streams_and_what_is_held_stays_within_the_budget() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        for _ in range(4):
            await peer.opened(publisher.endpoint)
        peer.stall()
        session = session_of(rig)
        for number in range(4):
            await (await publisher.connection(number + 1)).send(bytes(32 * MIB))
        await until(lambda: rig.broker.counts.stream_ends["buffer_overflow"] == 4)
        assert session.budget.used_bytes == 0
        assert session.budget.high_water_bytes <= 4 * MIB + 256 * KIB
        assert 64 * KIB <= session.buffered_bytes == session.budget.outside_bytes <= 256 * KIB
        # What TLS wrote on and the kernel did not take is told nobody, and never much.
        below = session.link._transport._ssl_protocol._transport  # type: ignore[union-attr]
        assert below.get_write_buffer_size() <= 192 * KIB
        peer.go_on()
        await until(lambda: len(peer.frames(StreamClosed)) == 4)


@in_a_loop
async def test_a_router_that_reads_nothing_and_keeps_asking_is_given_up() -> None:
    async with running() as rig:
        peer = await rig.router.peer()
        session, most_bytes = session_of(rig), 0
        peer.stall()
        while not rig.broker.counts.session_ends["connection_lost"]:
            peer.ping(2_000)
            await asyncio.sleep(0)
            most_bytes = max(most_bytes, session.buffered_bytes)
        # The answers that HTTP/2 itself has are held as well, so they count.
        assert most_bytes > MIB / 2
        assert rig.broker.counts.session_ends["connection_lost"] == 1


@in_a_loop
async def test_a_router_that_grants_its_own_answers_nothing_and_keeps_asking_is_given_up() -> None:
    async with running(stingy(session_window=0)) as rig:
        peer = await rig.established()
        session, most_bytes = session_of(rig), 0
        asked = {"type": "subscribe", "stream_id": "x", "target": {"kind": "other"}}
        while not rig.broker.counts.session_ends["connection_lost"]:
            for _ in range(200):
                peer.say_object(asked)
            await pause()
            most_bytes = max(most_bytes, session.buffered_bytes)
        assert most_bytes > MIB / 2
        # It is told of refusals until its window is used up, and then of nothing: they are not kept without end.
        assert rig.broker.counts.refusals["unsupported_target"] < 30_000


@pytest.mark.case("EB28")
@in_a_loop
async def test_a_window_that_opens_later_lets_what_waited_through_in_order() -> None:
    async with running(stingy(stream_window=NOTHING)) as rig:
        peer, _, connection, stream_id = await rig.stream()
        sent = os.urandom(500_000)
        await connection.send(sent)
        await until(lambda: session_of(rig).relays[stream_id].buffer.length_bytes == len(sent))
        for _ in range(5):
            peer.grant(100_000, stream_id)
        await until(lambda: len(peer.streams[stream_id].received) == len(sent))
        assert bytes(peer.streams[stream_id].received) == sent
        peer.change_settings(initial_window_size=50_000)
        await connection.send(sent[:50_000])
        await until(lambda: len(peer.streams[stream_id].received) == len(sent) + 50_000)


@pytest.mark.case("EB26")
@pytest.mark.case("EP4")
@pytest.mark.slow
@in_a_loop
async def test_ten_thousand_streams_that_come_and_go_leave_nothing() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        census = Census(rig)
        for number in range(10_000 // 50):
            streams = [peer.subscribe(publisher.endpoint, stream_id=f"r{number}-{each}") for each in range(50)]
            for each in streams:
                await peer.outcome(each)
            for at, each in enumerate(streams):
                _end_somehow(peer, publisher.connections[at], each, at)
            await until(lambda: not session_of(rig).relays)
            await until(lambda: all(connection.lost for connection in publisher.connections))
            publisher.connections.clear()
            peer.streams.clear()
            peer.by_http.clear()
            peer.told[1:] = []
        await loop().advance(6)
        await census.is_as_before()
        assert rig.broker.counts.streams_opened == 10_000


def _end_somehow(peer: Peer, connection: Connection, stream_id: str, at: int) -> None:
    match at % 4:
        case 0:
            peer.unsubscribe(stream_id)
        case 1:
            connection.transport.close()
        case 2:
            peer.end(stream_id)
        case _:
            peer.reset(stream_id)


@pytest.mark.case("EB10")
@in_a_loop
async def test_heartbeats_keep_their_interval_while_256_streams_are_busy() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        streams = [await peer.opened(publisher.endpoint) for _ in range(256)]
        for beat in range(1, 4):
            for number in range(256):
                publisher.connections[number].transport.write(bytes(4_000))
            await loop().advance(11.1, step_s=0.5)
            await until(lambda beat=beat: rig.broker.counts.heartbeats_sent >= beat)  # type: ignore[misc]
            assert rig.broker.counts.heartbeats_sent <= beat + 1
        await until(lambda: all(len(peer.streams[each].received) == 12_000 for each in streams))


@pytest.mark.case("EB36")
@in_a_loop
async def test_a_drain_refuses_what_is_new_lets_what_is_open_finish_and_then_reconnects() -> None:
    async with running() as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        peer.session.drain(DrainReason.MAINTENANCE, 20_000)
        peer.flush()
        assert await peer.refusal(publisher.endpoint) == "draining"
        await connection.send(b"x" * 1_000)
        await until(lambda: len(peer.streams[stream_id].received) == 1_000)
        assert not peer.lost
        connection.transport.close()
        await peer.closed(stream_id)
        await until(lambda: peer.lost)
        assert rig.broker.counts.session_ends["drain"] == 1
        await rig.again()
        assert rig.broker.counts.reconnects == {"backoff": 0, "rebalance": 0, "drain": 1}


@pytest.mark.case("EB36")
@in_a_loop
async def test_the_deadline_of_a_drain_cuts_what_is_still_open() -> None:
    async with running() as rig:
        peer, _, connection, _ = await rig.stream()
        peer.session.drain(DrainReason.SHUTDOWN, 20_000)
        peer.flush()
        await until(lambda: session_of(rig).protocol.is_draining)
        await loop().advance(19.5)
        assert not connection.lost
        await loop().advance(1)
        await until(lambda: connection.lost and peer.lost)
        assert rig.broker.counts.stream_ends["drain_deadline"] == 1


def _frame(kind: int, flags: int, http_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + http_id.to_bytes(4, "big") + payload


DATA, RST_STREAM, WINDOW_UPDATE, END_STREAM = 0, 3, 8, 1


@pytest.mark.case("EP18")
@pytest.mark.parametrize("which", ["data", "session"])
@pytest.mark.parametrize("first", [b"", _frame(DATA, END_STREAM, 0), _frame(WINDOW_UPDATE, 0, 0, b"\0\0\1\0")])
def test_a_stream_whose_end_comes_twice_in_one_read_ends_once(which: str, first: bytes) -> None:
    @in_a_loop
    async def check() -> None:
        async with running(stingy(stream_window=1_000)) as rig:
            peer, _, connection, stream_id = await rig.stream()
            await connection.send(bytes(5_000))
            await until(lambda: session_of(rig).relays[stream_id].buffer.length_bytes == 4_000)
            http_id = (peer.streams[stream_id].http_id if which == "data" else peer.session_http_id).to_bytes(4, "big")
            begun = first[:5] + http_id + first[9:] if first else b""
            peer.write_raw(begun + b"\0\0\4\3\0" + http_id + bytes(4))
            await until(lambda: connection.lost)
            if which == "session":
                await until(lambda: rig.broker.counts.session_ends["connection_lost"] == 1)
            else:
                await until(lambda: rig.broker.counts.stream_ends["router_closed"] == 1)
                assert not peer.lost

    check()


@pytest.mark.parametrize(
    "junk", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(9), b"\xff" * 100, _frame(DATA, 0, 99, b"x")]
)
def test_a_router_that_does_not_speak_http_2_ends_the_session_and_nothing_else(junk: bytes) -> None:
    @in_a_loop
    async def check() -> None:
        async with running() as rig:
            peer, _, connection, _ = await rig.stream()
            peer.write_raw(junk)
            await until(lambda: connection.lost and peer.lost)
            await rig.again()

    check()
