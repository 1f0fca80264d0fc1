"""What the probe's client says of each way to fail, against servers on loopback that fail in it."""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import h2.errors
import pytest
import trustme
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
    no_tls,
    objects,
    read_request,
    reset,
    server_context,
    serving,
    target_of,
    the_failure,
    until_closed,
)

from kura_shaper.clock import FakeClock
from kura_shaper.probe import connection
from kura_shaper.probe.connection import Resolver
from kura_shaper.probe.failures import ClientError, Failure, Phase, Reason, translated
from kura_shaper.probe.target import Protocol, Security, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def looking_up(rows: Callable[[], list[Any]]) -> Resolver:
    return Resolver(lambda *_, **__: rows())


def raising(error: Exception) -> Callable[[], list[Any]]:
    def rows() -> list[Any]:
        raise error

    return rows


def test_a_name_without_an_address_is_dns() -> None:
    target = replace(target_of(Served(1)), connect_to=None, security=Security.PLAIN)
    unknown = raising(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    the_failure(measured(target, resolver=looking_up(unknown)), Reason.DNS, "not known")
    the_failure(measured(target, resolver=looking_up(raising(UnicodeError()))), Reason.DNS, "can't be one")
    the_failure(measured(target, resolver=looking_up(list)), Reason.DNS, "no address")


def test_a_resolver_that_does_not_answer_is_dns_and_is_asked_but_once() -> None:
    asked, answer = [], threading.Event()

    def rows() -> list[Any]:
        asked.append(1)
        answer.wait(PATIENCE_S)
        return []

    resolver = looking_up(rows)
    target = replace(target_of(Served(1)), connect_to=None, security=Security.PLAIN)
    for _ in range(3):
        the_failure(measured(target, resolver=resolver, timeout_ns=SECOND // 50), Reason.DNS, "has not answered")
    assert asked == [1]
    answer.set()


def test_nobody_at_the_address_is_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    the_failure(measured(target_of(Served(port)), streams=3), Reason.CONNECT, "refused")
    assert measured(target_of(Served(port)), streams=3).failures[0].count == 3


def test_silence_at_the_address_is_connect() -> None:
    with ExitStack() as stack:
        # Who comes when this queue is full gets no answer from Linux.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(socket.create_connection(listener.getsockname()))
        target = target_of(Served(listener.getsockname()[1]), security=Security.PLAIN)
        the_failure(measured(target, timeout_ns=SECOND // 10), Reason.CONNECT, "no answer in time")


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (lambda: server_context(ca=trustme.CA()), "unable to get local issuer"),
        (lambda: server_context(name="globex.kura.test"), "Hostname mismatch"),
        (lambda: server_context(not_after=datetime(2020, 1, 1, tzinfo=UTC)), "expired"),
        (lambda: too_old(), "TLS says no"),
    ],
)
def test_a_certificate_or_a_version_that_is_wrong_is_tls(context: Callable[[], ssl.SSLContext], words: str) -> None:
    with serving(objects, context()) as served:
        the_failure(measured(target_of(served)), Reason.TLS, words)


def too_old() -> ssl.SSLContext:
    context = server_context()
    context.set_ciphers("ECDHE-ECDSA-NULL-SHA:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def test_what_speaks_no_tls_is_tls() -> None:
    with serving(no_tls(b"HTTP/1.1 400 Bad\r\n\r\n")) as served:
        the_failure(measured(target_of(served)), Reason.TLS, "does not speak TLS")


@pytest.mark.parametrize("end", [lambda peer: peer.recv(1), reset])
def test_closed_before_tls_is_up_is_handshake(end: Callable[[socket.socket], object]) -> None:
    with serving(end) as served:
        the_failure(measured(target_of(served)), Reason.HANDSHAKE, "closed before TLS was up")


def test_gone_before_tls_has_begun_is_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        reset(listener.accept()[0])
        # The RST is here; whoever looks first gets it.
        poll = select.poll()
        poll.register(client, select.POLLRDHUP)
        assert poll.poll(PATIENCE_S * 1_000)
        with pytest.raises(ClientError) as raised, client:
            connection.shake_hands(connection.secure(client, connection.trust(authority_file(), ()), HOST))
    assert raised.value.reason is Reason.HANDSHAKE


def test_silence_before_tls_is_up_is_handshake() -> None:
    clock = FakeClock(SECOND)

    def handle(peer: socket.socket) -> None:
        peer.recv(1)
        clock.wait_ns(6 * SECOND)
        until_closed(peer)

    with serving(handle) as served:
        the_failure(measured(target_of(served), clock=clock), Reason.HANDSHAKE, "silent for 5 s")


def test_another_protocol_is_alpn() -> None:
    for context in (server_context("http/1.1"), server_context()):
        with serving(until_closed, context) as served:
            result = measured(target_of(served, Protocol.HTTP2))
        assert [failure.reason for failure in result.failures] == [Reason.ALPN]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"421 Misdirected Request", "status 421; expected 200"),
        (b"404 Not Found", "status 404"),
        (b"302 Found\r\nlocation: https://127.0.0.1:1/elsewhere", "a redirect, which is not followed"),
    ],
)
def test_another_status_is_status(line: bytes, words: str) -> None:
    with serving(answering(b"HTTP/1.1 " + line + b"\r\ncontent-length: 0\r\n\r\n"), server_context()) as served:
        result = measured(target_of(served))
        the_failure(result, Reason.STATUS, words)
        assert result.status == int(line[:3])
        expected = measured(target_of(served, expected_status=int(line[:3])))
        assert (expected.failures, expected.verdict) == ((), Verdict.FINE)


def test_another_status_of_http2_and_of_grpc_is_status() -> None:
    def misdirected(peer: H2Peer) -> None:
        peer.answer(peer.next_request()[0], status="421")

    def not_found(peer: H2Peer) -> None:
        stream, _ = peer.next_request()
        peer.h2.send_headers(stream, [(":status", "200"), ("grpc-status", "5")], end_stream=True)
        peer.send()

    with serving(h2_server(misdirected), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2)), Reason.STATUS, "status 421")
        the_failure(measured(target_of(served, Protocol.GRPC)), Reason.STATUS, "status 421")
    with serving(h2_server(not_found), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.GRPC))
        the_failure(result, Reason.STATUS, "gRPC status 5 NOT_FOUND; expected 0 OK")
        assert (result.status, result.grpc_status) == (200, 5)
        assert measured(target_of(served, Protocol.GRPC, expected_status=5)).failures == ()


def test_the_small_object_comes_first_and_the_large_one_not_after_its_failure() -> None:
    asked = []

    def handle(peer: socket.socket) -> None:
        asked.append(read_request(peer).split()[1])
        peer.sendall(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
        until_closed(peer)

    with serving(handle, server_context()) as served:
        result = measured(target_of(served, small="/up"))
    assert asked == [b"/up"]
    the_failure(result, Reason.STATUS, "503")
    assert result.rate is None


@pytest.mark.parametrize("then", [lambda peer: None, reset])
def test_an_end_in_the_middle_is_reset(then: Callable[[socket.socket], object]) -> None:
    with serving(answering(OK + b"he", then=then), server_context()) as served:
        the_failure(measured(target_of(served)), Reason.RESET, "clos")


def test_an_end_instead_of_an_answer_is_reset() -> None:
    with serving(read_request, server_context()) as served:
        the_failure(measured(target_of(served)), Reason.RESET, "instead of an answer")


def h2_resets(peer: H2Peer) -> None:
    peer.h2.reset_stream(peer.next_request()[0], h2.errors.ErrorCodes.REFUSED_STREAM)
    peer.send()


def h2_leaves(peer: H2Peer) -> None:
    peer.next_request()
    peer.h2.close_connection(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
    peer.send()


def h2_turns_away(peer: H2Peer) -> None:
    peer.next_request()
    peer.h2.close_connection(last_stream_id=0)
    peer.send()


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        (h2_resets, "reset the stream: REFUSED_STREAM"),
        (h2_leaves, "GOAWAY ENHANCE_YOUR_CALM"),
        (h2_turns_away, "GOAWAY NO_ERROR"),
        (lambda peer: (peer.next_request(), peer.peer.close()), "closed"),
    ],
)
def test_http2_that_is_ended_is_reset(handle: Callable[[H2Peer], object], words: str) -> None:
    with serving(h2_server(handle), server_context("h2")) as served:
        the_failure(measured(target_of(served, Protocol.HTTP2)), Reason.RESET, words)


def test_one_stream_that_fails_is_one_failure() -> None:
    def speak(peer: H2Peer) -> None:
        refused, fine = (peer.next_request()[0] for _ in range(2))
        peer.h2.reset_stream(refused, h2.errors.ErrorCodes.REFUSED_STREAM)
        peer.answer(fine, bytes(1_000))

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(target_of(served, Protocol.HTTP2), streams=2)
    the_failure(result, Reason.RESET, "REFUSED_STREAM")
    assert (result.failures[0].count, result.received_bytes) == (1, 1_000)


def test_failures_of_one_kind_are_told_once() -> None:
    lengths = iter(range(100, 200))

    def handle(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nab" % next(lengths))

    with serving(handle, server_context()) as served:
        result = measured(target_of(served), streams=5)
    the_failure(result, Reason.RESET, "closed the connection after 2 of 10")
    assert result.failures[0].count == 5


def silent_after(clock: FakeClock, answer: bytes) -> Callable[[socket.socket], None]:
    """Send something, and then nothing: the clock goes on a little whenever the client has not left meanwhile."""

    def handle(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(answer)
        peer.settimeout(0.005)
        while True:
            try:
                peer.recv(1)
            except TimeoutError:
                clock.wait_ns(SECOND // 2)
            else:
                return

    return handle


def test_bytes_that_stop_are_a_stall() -> None:
    clock = FakeClock(SECOND)
    with serving(silent_after(clock, OK + b"he"), server_context()) as served:
        result = measured(target_of(served), clock=clock)
    the_failure(result, Reason.STALL, "no byte for 5 s")
    assert result.received_bytes == 2


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", OK])
def test_no_byte_of_payload_in_time_is_timeout(answer: bytes) -> None:
    clock = FakeClock(SECOND)
    with serving(silent_after(clock, answer), server_context()) as served:
        the_failure(measured(target_of(served), clock=clock), Reason.TIMEOUT, "no byte of an answer")


def test_a_small_object_without_an_end_is_timeout() -> None:
    clock = FakeClock(SECOND)

    def drip(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(OK.replace(b"5", b"9999"))
        with suppress(OSError):
            while True:
                peer.sendall(b"x")
                threading.Event().wait(0.001)
                clock.wait_ns(SECOND // 10)

    with serving(drip, server_context()) as served:
        result = measured(target_of(served, small="/up", large=""), clock=clock)
    the_failure(result, Reason.TIMEOUT, "has no end within 5 s")


def test_one_stream_that_starves_does_not_hide_behind_another() -> None:
    clock = FakeClock(SECOND)

    def speak(peer: H2Peer) -> None:
        first, _ = peer.next_request()
        peer.h2.send_headers(first, [(":status", "200")])
        with suppress(OSError):
            while True:
                peer.h2.send_data(first, b"x")
                peer.send()
                threading.Event().wait(0.001)
                clock.wait_ns(SECOND // 10)

    with serving(h2_server(speak), server_context("h2")) as served:
        result = measured(
            target_of(served, Protocol.HTTP2), clock=clock, streams=2, duration_ns=SECOND, size_bytes=10**9
        )
    the_failure(result, Reason.TIMEOUT, "no byte of an answer")
    assert result.failures[0].count == 1


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] says no")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "phase", "reason"),
    [
        (OSError(errno.EPERM, "Operation not permitted"), Phase.CONNECTING, Reason.REFUSED),
        (OSError(errno.EACCES, "Permission denied"), Phase.CONNECTING, Reason.REFUSED),
        (OSError(errno.EMFILE, "Too many open files"), Phase.CONNECTING, Reason.LOCAL),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), Phase.CONNECTING, Reason.LOCAL),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), Phase.CONNECTING, Reason.CONNECT),
        (OSError(errno.EHOSTUNREACH, "No route to host"), Phase.CONNECTING, Reason.CONNECT),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Phase.CONNECTING, Reason.HANDSHAKE),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Phase.SECURING, Reason.HANDSHAKE),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Phase.READING, Reason.RESET),
        (ssl.SSLEOFError("EOF"), Phase.SECURING, Reason.HANDSHAKE),
        (ssl.SSLEOFError("EOF"), Phase.READING, Reason.RESET),
        (alert("NO_APPLICATION_PROTOCOL"), Phase.SECURING, Reason.ALPN),
        (alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), Phase.READING, Reason.TLS),
    ],
)
def test_what_the_system_says_is_read_by_how_far_it_came(error: Exception, phase: Phase, reason: Reason) -> None:
    with pytest.raises(ClientError) as raised, translated(phase):
        raise error
    assert raised.value.reason is reason


def test_what_came_from_elsewhere_is_one_line_that_can_be_printed() -> None:
    shown = Failure(Reason.TLS, ClientError(Reason.TLS, "\x1b[31m\r\n\u202e" + "x" * 1_000).message)
    assert str(shown).isprintable()
    assert len(str(shown)) < 220
    assert str(replace(shown, count=3)).startswith("tls: 3 times: ?[31m???x")


def test_what_this_machine_lacks_says_nothing_of_the_target(tmp_path: Path) -> None:
    missing = replace(target_of(Served(1)), ca_file=tmp_path / "none.pem")
    result = measured(missing)
    the_failure(result, Reason.LOCAL, "this machine could not try")
    assert result.verdict is Verdict.UNKNOWN
    the_failure(measured(replace(missing, ca_file=None, token_file=tmp_path / "none")), Reason.LOCAL, "can't be read")
