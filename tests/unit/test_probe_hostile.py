"""Servers that want the probe to wait, or to take their word or their bytes without end: it ends, and says why."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from probe_rig import (
    PATIENCE_S,
    SECOND,
    H2Peer,
    h2_server,
    measured,
    no_tls,
    objects,
    read_request,
    server_context,
    serving,
    target_of,
    the_failure,
    until_closed,
)

from kura_shaper.clock import FakeClock
from kura_shaper.probe.failures import Reason
from kura_shaper.probe.target import Protocol, Security

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail when more than a few MiB were held at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    finally:
        tracemalloc.stop()


def flood(first: bytes, again: bytes) -> Callable[[socket.socket], None]:
    """Return a server that sends without end once it was asked."""

    def handle(peer: socket.socket) -> None:
        read_request(peer)
        with suppress(OSError):
            peer.sendall(first)
            while again:
                peer.sendall(again)
        until_closed(peer)

    return handle


@pytest.mark.parametrize(
    ("first", "again", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"y" * 16_000 + b"\r\n", "no end within 65536"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 16_384, "no end within 65536"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello" + b"more", b"", "more than"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50, "status 100 instead of an answer"),
        (b"", b"\0" * 16_384, "no HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", b"\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"0" * 16_384, "line of a chunk"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 2_000, "trailers"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nabc\r\n", "a chunk"),
    ],
)
def test_http1_that_breaks_the_rules_is_protocol(first: bytes, again: bytes, words: str) -> None:
    with bounded_memory(), serving(flood(first, again), server_context()) as served:
        the_failure(measured(target_of(served)), Reason.PROTOCOL, words)


def frame(kind: int, payload: bytes, *, stream: int = 1, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def raw_h2(first: bytes, again: bytes = b"") -> Callable[[socket.socket], None]:
    """Return a server that sends frames of its own making once it was asked."""

    def handle(peer: socket.socket) -> None:
        H2Peer(peer).next_request()
        with suppress(OSError):
            peer.sendall(first)
            while again:
                peer.sendall(again)
        until_closed(peer)

    return handle


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (frame(0, b"x" * 10, stream=7), b""),  # DATA on a stream that nobody opened
        (frame(1, b"\xff" * 40, flags=4), b""),  # HEADERS that no HPACK is
        (frame(1, b"\x88", flags=0), frame(9, b"\x00" * 100) * 50),  # CONTINUATION without end
        (frame(0, b"", stream=0), b""),
        (b"\xff\xff\xff\0\0\0\0\0\1", b""),  # the head of a frame of 16 MiB
        (frame(5, b"\0\0\0\2\x88", flags=4), b""),  # a push, which was refused
        (frame(1, b"\x88", flags=4) + frame(8, b"\0\0\0\0"), b""),  # a window that grows by nothing
    ],
)
def test_http2_that_breaks_the_rules_is_protocol(first: bytes, again: bytes) -> None:
    with bounded_memory(), serving(raw_h2(first, again), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2)), Reason.PROTOCOL, "HTTP/2")


def test_an_answer_of_http1_to_http2_is_protocol() -> None:
    with serving(no_tls(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as served:
        result = measured(target_of(served, Protocol.HTTP2, security=Security.PLAIN))
    the_failure(result, Reason.PROTOCOL, "no HTTP/2")


def test_heads_of_http2_that_are_huge_are_refused() -> None:
    def speak(peer: H2Peer) -> None:
        stream, _ = peer.next_request()
        peer.h2.send_headers(stream, [(":status", "200"), *((f"x-{number}", "y" * 4_000) for number in range(40))])
        peer.send()

    with serving(h2_server(speak), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2)), Reason.PROTOCOL, "HTTP/2")


def test_a_status_that_is_none_is_protocol() -> None:
    # ":status: 2\xff0", literal and never indexed.
    strange = frame(1, b"\x08\x032\xff0", flags=4)
    with serving(raw_h2(strange), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2)), Reason.PROTOCOL, "status")


def test_an_end_of_grpc_without_a_status_is_protocol() -> None:
    with serving(h2_server(lambda peer: peer.answer(peer.next_request()[0])), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.GRPC)), Reason.PROTOCOL, "without a status")


def test_frames_that_carry_nothing_do_not_keep_it() -> None:
    clock = FakeClock(SECOND)

    def ping(peer: socket.socket) -> None:
        H2Peer(peer).next_request()
        reader = threading.Thread(target=until_closed, args=(peer,), daemon=True)
        reader.start()
        with suppress(OSError):
            while True:
                peer.sendall(frame(6, b"\0" * 8, stream=0) * 20)
                clock.wait_ns(SECOND // 50)
        reader.join(PATIENCE_S)

    with bounded_memory(), serving(ping, server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2), clock=clock), Reason.TIMEOUT, "no byte")


def test_an_empty_object_is_not_asked_for_without_end() -> None:
    with serving(objects, server_context()) as served:
        result = measured(target_of(served, large="/0"), size_bytes=10)
        the_failure(result, Reason.PROTOCOL, "empty")
        assert measured(target_of(served, large="/0")).failures == ()


def test_a_body_without_end_takes_no_memory() -> None:
    with bounded_memory(), serving(flood(b"HTTP/1.1 200 OK\r\n\r\n", bytes(65_536)), server_context()) as served:
        result = measured(target_of(served), size_bytes=50_000_000)
    assert result.failures == ()
