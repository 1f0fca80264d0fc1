"""What the probe's client measures, against servers on loopback over real TLS."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from probe_rig import (
    HOST,
    OK,
    PATIENCE_S,
    SECOND,
    H2Peer,
    Served,
    answering,
    authority_file,
    h2_server,
    measured,
    objects,
    read_request,
    server_context,
    serving,
    target_of,
    until_closed,
)

from kura_shaper.clock import FakeClock, SystemClock
from kura_shaper.probe.client import measure
from kura_shaper.probe.connection import Resolver
from kura_shaper.probe.request import grpc_message
from kura_shaper.probe.target import Family, Load, Protocol, Security, Verdict
from kura_shaper.tenants.document import Endpoint
from kura_shaper.units import Rate


def test_times_status_and_address_are_told() -> None:
    with serving(objects, server_context("http/1.1")) as served:
        result = measured(target_of(served, small="/7", large="/100000"), size_bytes=5_000_000)
    assert result.failures == ()
    assert (result.status, result.spoken, result.address) == (200, "http/1.1", f"127.0.0.1:{served.port}")
    times = (result.resolve_ns, result.connect_ns, result.handshake_ns, result.first_byte_ns)
    assert all(time_ns is not None and time_ns > 0 for time_ns in times)
    assert result.received_bytes == 5_000_007
    assert result.rate is not None
    assert result.rate > Rate(0)
    assert result.verdict is Verdict.FINE


@pytest.mark.parametrize(("streams", "bytes_each"), [(1, 1_000), (4, 1_000)])
def test_without_a_size_each_stream_reads_one_object(streams: int, bytes_each: int) -> None:
    with serving(objects, server_context()) as served:
        result = measured(target_of(served), streams=streams)
    assert (result.streams, result.received_bytes) == (streams, streams * bytes_each)


def test_auto_takes_what_the_other_side_speaks() -> None:
    def speak_h2(peer: H2Peer) -> None:
        stream, head = peer.next_request()
        assert (head[":authority"], head[":path"], head[":scheme"]) == (HOST, "/1000", "https")
        peer.answer(stream)

    with serving(h2_server(speak_h2), server_context("h2", "http/1.1")) as served:
        assert measured(target_of(served, Protocol.AUTO, port=443)).spoken == "h2"
    for context in (server_context("http/1.1"), server_context()):
        with serving(objects, context) as served:
            assert measured(target_of(served, Protocol.AUTO)).spoken == "http/1.1"


def test_tcp_ends_where_tls_is_up() -> None:
    with serving(until_closed, server_context(name="peer.acme.test")) as served:
        target = target_of(served, Protocol.TCP, host="peer.acme.test", large="")
        result = measured(target)
    assert (result.failures, result.spoken, result.status, result.rate) == ((), "tls", None, None)
    assert result.handshake_ns
    assert result.certificate_ends_at_s


def test_the_end_of_the_certificate_is_told() -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    with serving(objects, server_context(not_after=ends)) as served:
        result = measured(target_of(served))
    assert result.certificate_ends_at_s == int(ends.timestamp())


def test_the_name_in_tls_and_in_the_request_stay_the_tenants() -> None:
    seen: list[Any] = []
    context = server_context()
    context.sni_callback = lambda _peer, name, _context: seen.append(name)

    def handle(peer: socket.socket) -> None:
        seen.append(read_request(peer).decode().splitlines()[1])
        peer.sendall(OK + b"hello")
        until_closed(peer)

    with serving(handle, context) as served:
        assert measured(target_of(served, port=443)).verdict is Verdict.FINE
        assert measured(target_of(served, port=8443)).verdict is Verdict.FINE
    assert seen == [HOST, f"host: {HOST}", HOST, f"host: {HOST}:8443"]


def test_grpc_calls_a_method_and_wants_its_status() -> None:
    heads = []

    def speak(peer: H2Peer) -> None:
        stream, head = peer.next_request()
        heads.append(head)
        peer.h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
        peer.h2.send_data(stream, grpc_message("payload"))
        peer.h2.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        peer.send()

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.GRPC, large="/s/M", resource="blobs/1"))
    assert (result.failures, result.status, result.grpc_status) == ((), 200, 0)
    assert (heads[0][":method"], heads[0]["te"], heads[0]["content-type"]) == ("POST", "trailers", "application/grpc")


def test_a_resource_is_field_1_of_a_message() -> None:
    assert grpc_message("") == b"\0\0\0\0\0"
    assert grpc_message("ab") == b"\0\0\0\0\x04\x0a\x02ab"
    assert grpc_message("x" * 200)[5:8] == b"\x0a\xc8\x01"


def test_streams_share_http2_connections_and_all_flow() -> None:
    connections: list[socket.socket] = []

    def speak(peer: H2Peer) -> None:
        connections.append(peer.peer)
        while True:
            stream, _ = peer.next_request()
            peer.answer(stream, bytes(10_000))

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.HTTP2), streams=6, connections=2, size_bytes=50_000)
    assert (result.failures, result.streams, len(connections)) == ((), 6, 2)
    assert result.received_bytes == 6 * 50_000


def test_a_stream_that_has_enough_is_called_off_and_the_others_go_on() -> None:
    called_off: list[int] = []

    def speak(peer: H2Peer) -> None:
        first, second = (peer.next_request()[0] for _ in range(2))
        for stream in (first, second):
            peer.h2.send_headers(stream, [(":status", "200")])
        peer.h2.send_data(first, bytes(5_000))
        peer.send()
        while not called_off:
            called_off.extend(peer.resets())
        peer.h2.send_data(second, bytes(5_000))
        peer.send()

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.HTTP2), streams=2, size_bytes=5_000)
    assert (result.failures, result.received_bytes, called_off) == ((), 10_000, [1])


def test_a_small_object_tells_no_rate() -> None:
    def handle(peer: socket.socket) -> None:
        read_request(peer)
        for piece in (b"HTTP/1.1 200 OK\r\n\r\n", b"x", b"y", b"z"):
            peer.sendall(piece)

    with serving(handle, server_context()) as served:
        result = measured(target_of(served, small="/up", large=""))
    assert (result.failures, result.received_bytes, result.rate, result.window_ns) == ((), 3, None, 0)


def test_a_goodbye_without_an_error_is_followed_by_another_connection() -> None:
    """As the old worker of a gateway says it when the gateway is loaded anew."""
    connections: list[socket.socket] = []

    def speak(peer: H2Peer) -> None:
        connections.append(peer.peer)
        stream, _ = peer.next_request()
        peer.h2.send_headers(stream, [(":status", "200")])
        peer.h2.send_data(stream, b"1" * 500)
        # By hand: h2 itself would not go on after its goodbye.
        peer.peer.sendall(peer.h2.data_to_send() + b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\0")
        peer.h2.send_data(stream, b"2" * 500, end_stream=True)
        peer.send()

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.HTTP2), size_bytes=3_000)
    assert (result.failures, len(connections), result.received_bytes) == ((), 3, 3_000)


def test_a_server_that_closes_after_each_object_is_connected_to_again() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: Close\r\n\r\nhello"
    with serving(answering(answer, then=lambda peer: None), server_context()) as served:
        result = measured(target_of(served), size_bytes=15)
    assert (result.failures, result.received_bytes) == ((), 15)


def test_an_object_in_chunks_or_until_the_end_is_read() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    until_end = b"HTTP/1.0 200 OK\r\n\r\nhello"
    for answer in (chunked, until_end):
        with serving(answering(answer, then=lambda peer: None), server_context()) as served:
            result = measured(target_of(served))
        assert (result.failures, result.received_bytes) == ((), 5)


def test_the_duration_ends_what_has_no_end() -> None:
    clock = FakeClock(SECOND)

    def drip(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(OSError):
            while True:
                peer.sendall(b"x")
                # The client has to have this one before its time is over.
                threading.Event().wait(0.001)
                clock.wait_ns(SECOND // 100)

    with serving(drip, server_context()) as served:
        result = measured(target_of(served), clock=clock, duration_ns=3 * SECOND)
    assert result.failures == ()
    assert result.rate is not None
    assert result.rate < Rate(10_000)
    assert replace(result, target=replace(result.target, min_rate=Rate(1_000_000))).verdict is Verdict.SLOW


def test_ipv6_is_spoken() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        peer_ended = threading.Thread(target=lambda: until_closed(listener.accept()[0]))
        peer_ended.start()
        target = target_of(Served(listener.getsockname()[1]), Protocol.TCP, large="", security=Security.PLAIN)
        target = replace(target, connect_to=Endpoint("::1", listener.getsockname()[1]), family=Family.IPV6)
        result = measured(target)
        peer_ended.join(PATIENCE_S)
    assert (result.failures, result.address) == ((), f"[::1]:{listener_port(target)}")


def listener_port(target: Any) -> int:
    return int(target.connect_to.port)


def test_cancelling_ends_it_at_once() -> None:
    cancelled = threading.Event()

    def handle(peer: socket.socket) -> None:
        read_request(peer)
        cancelled.set()
        until_closed(peer)

    with serving(handle, server_context()) as served:
        target = replace(target_of(served), ca_file=authority_file())
        # The timeout is longer than this test may take.
        load = Load(timeout_ns=600 * SECOND)
        result = measure(target, load, clock=SystemClock(), resolver=Resolver(), cancelled=cancelled)
    assert result.failures == ()
