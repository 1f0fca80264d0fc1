"""Clients and servers of the lab, joined by a socket pair: what is asked for is what arrives."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kura_shaper.lab import servers, traffic
from kura_shaper.lab.servers import ServerSpec, object_size_bytes
from kura_shaper.lab.traffic import Application, Security, TrafficResult, TrafficSpec
from kura_shaper.probe.failures import ClientError
from kura_shaper.units import Rate

OBJECT_BYTES = 3_000_017


def spec(application: Application, *, object_bytes: int = OBJECT_BYTES, streams: int = 1) -> TrafficSpec:
    return TrafficSpec(
        application=application,
        security=Security.PLAIN,
        address="192.0.2.1",
        port=4_000,
        host="acme.test",
        streams_per_connection=streams,
        object_bytes=object_bytes,
    )


@pytest.fixture
def server_end() -> Iterator[socket.socket]:
    """The client's end of a connection that the object port serves."""
    ours, theirs = socket.socketpair()
    source = servers._open_buffer()
    serve = threading.Thread(
        target=servers._serve_to_end, args=(theirs, lambda peer: servers._serve_plain(peer, source))
    )
    serve.start()
    ours.settimeout(10)
    with ours:
        yield ours
    serve.join(timeout=10)
    os.close(source)
    assert not serve.is_alive()


def read_until(peer: socket.socket, wanted: TrafficSpec, *, size_bytes: int) -> traffic._Progress:
    """Run a client until it has so many bytes, then cut its connection."""
    progress = traffic._Progress(wanted.streams)

    def run() -> None:
        with pytest.raises((OSError, ClientError)):
            traffic._read(peer, wanted, meters=progress.meters)

    client = threading.Thread(target=run)
    client.start()
    deadline_s = time.monotonic() + 10
    while progress.received_bytes < size_bytes and time.monotonic() < deadline_s:
        time.sleep(0.005)
    peer.shutdown(socket.SHUT_RDWR)
    client.join(timeout=10)
    return progress


@pytest.mark.parametrize("application", [Application.HTTP1, Application.HTTP2, Application.GRPC])
def test_one_object_after_the_other_arrives(application: Application, server_end: socket.socket) -> None:
    wanted = spec(application)
    progress = read_until(server_end, wanted, size_bytes=3 * OBJECT_BYTES)
    assert progress.received_bytes >= 3 * OBJECT_BYTES
    assert progress.failures == 0
    assert progress.all_flow.is_set()


@pytest.mark.parametrize("application", [Application.HTTP2, Application.GRPC])
def test_streams_of_one_connection_all_flow(application: Application, server_end: socket.socket) -> None:
    wanted = spec(application, streams=8, object_bytes=400_000)
    progress = read_until(server_end, wanted, size_bytes=8 * 1_000_000)
    shares = [meter.received_bytes for meter in progress.meters]
    assert min(shares) > 0.3 * max(shares)


def test_an_object_of_exactly_the_size_asked_for_is_served(server_end: socket.socket) -> None:
    for size_bytes in (0, 1, 16_384, 4 * 2**20, 5 * 2**20 + 3):
        server_end.sendall(f"GET /object/{size_bytes} HTTP/1.1\r\nHost: acme.test\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += server_end.recv(1)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"content-length: {size_bytes}\r\n".encode() in head
        left_bytes = size_bytes
        while left_bytes:
            left_bytes -= len(server_end.recv(min(left_bytes, 65_536)))
    server_end.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
    assert server_end.recv(1_000).endswith(b"content-length: 3\r\n\r\nok\n")


@pytest.mark.parametrize(
    "request_text",
    ["GET /nothing HTTP/1.1\r\n\r\n", "GET /object/-1 HTTP/1.1\r\n\r\n", "POST /object/5 HTTP/1.1\r\n\r\n12345"],
)
def test_anything_else_is_not_found(request_text: str, server_end: socket.socket) -> None:
    server_end.sendall(request_text.encode())
    assert server_end.recv(1_000).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    ("target", "size_bytes"),
    [
        ("/object/0", 0),
        ("/object/17", 17),
        ("/object/", None),
        ("/object/1e3", None),
        ("/x/object/1", None),
        ("/", None),
    ],
)
def test_a_path_names_its_size(target: str, size_bytes: int | None) -> None:
    assert object_size_bytes(target) == size_bytes


def test_a_size_out_of_range_is_no_size() -> None:
    assert object_size_bytes("/object/" + "9" * 30) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 421 Misdirected Request\r\ncontent-length: 0\r\n\r\n", "status 421"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "before the last chunk"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", "closed the connection after 2 of 5"),
        (b"HTTP/1.1 200 " + b"x" * 70_000, "no end"),
    ],
)
def test_a_client_counts_an_answer_that_is_no_object_as_a_failure(answer: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            theirs.sendall(answer)
            theirs.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        meters = traffic._Progress(1).meters
        with pytest.raises(ClientError, match=reason):
            traffic._read(ours, spec(Application.HTTP1), meters=meters)
        sender.join(timeout=10)


def test_the_arguments_of_a_spec_name_it_in_full() -> None:
    wanted = TrafficSpec(
        application=Application.GRPC,
        address="fd00::1",
        port=443,
        security=Security.TLS,
        sni="acme.test",
        host="other.test",
        ca_file="/ca.pem",
        connections=3,
        streams_per_connection=2,
        duration_ms=1_500,
        start_timeout_ms=900,
        object_bytes=77,
    )
    assert TrafficSpec.parse(list(wanted.arguments())) == wanted
    assert wanted.streams == 6
    assert wanted.timeout_s == 2.4 + 5


def test_a_spec_has_defaults_for_all_but_the_place_and_the_protocol() -> None:
    parsed = TrafficSpec.parse(["--application=http1", "--address=192.0.2.1", "--port=443"])
    assert parsed == TrafficSpec(application=Application.HTTP1, address="192.0.2.1", port=443)
    assert parsed.authority == "192.0.2.1"


def test_the_name_in_requests_is_the_host_or_else_the_sni() -> None:
    named = TrafficSpec(application=Application.HTTP1, address="192.0.2.1", port=443, sni="acme.test")
    assert named.authority == "acme.test"
    assert spec(Application.HTTP1).authority == "acme.test"


def test_a_result_tells_its_rate() -> None:
    event = {
        "event": "result",
        "protocol": "http2+tls",
        "streams": 4,
        "received_bytes": 25_000_000,
        "duration_ms": 1_000.0,
        "failures": 1,
        "reasons": ["closed"],
        "first_byte_median_ms": 1.5,
        "first_byte_max_ms": 2.0,
    }
    result = TrafficResult.from_event(event)
    assert result.rate == Rate(200_000_000)
    assert result.reasons == ("closed",)


def test_a_server_is_told_its_ports_and_certificate() -> None:
    wanted = ServerSpec(peer_port=7_443, cert_file=Path("/cert.pem"))
    expected = ("--object-port=4000", "--peer-port=7443", "--stream-port=0", "--cert-file=/cert.pem")
    assert wanted.arguments() == expected


def test_a_peer_port_without_a_certificate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        servers.main(["--peer-port=7443"])
    assert stopped.value.code == 2
    assert "--cert-file" in capsys.readouterr().err
