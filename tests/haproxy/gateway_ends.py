"""The two ends of the gateway in its tests: small servers as threads, and a client that does what a test says."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions

_FORWARDING = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
_BLOCK = bytes(65_536)
_FRAME_BYTES = 16_384


class _Http1(BaseHTTPRequestHandler):
    """Answers who it is and what it was asked; /endless never ends, /bytes/N is N bytes.

    A POST is answered with the SHA-256 of its body, which /slow/N begins to read after N seconds.
    """

    protocol_version = "HTTP/1.1"
    name = ""

    def do_GET(self) -> None:
        if self.path == "/endless":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(OSError):
                while True:
                    self.wfile.write(_BLOCK)
            return
        if self.path.startswith("/bytes/"):
            self._answer(bytes(int(self.path.removeprefix("/bytes/"))))
            return
        forwarded = sorted(f"{k}={v}" for k, v in self.headers.items() if k.lower() in _FORWARDING)
        self._answer(" ".join((self.name, "http1", self.path, *forwarded)).encode())

    def do_POST(self) -> None:
        if self.path.startswith("/slow/"):
            time.sleep(float(self.path.removeprefix("/slow/")))
        left, digest = int(self.headers["Content-Length"]), hashlib.sha256()
        while left and (part := self.rfile.read(min(left, 65_536))):
            digest.update(part)
            left -= len(part)
        self._answer(digest.hexdigest().encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


class QuietServer(ThreadingHTTPServer):
    """A server whose clients leave when they please."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients here leave when they please."""


def serve_http1(stack: ExitStack, listener: socket.socket, name: str) -> None:
    handler = type("Handler", (_Http1,), {"name": name})
    server = QuietServer(("", 0), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)


def serve(stack: ExitStack, listener: socket.socket, answer: Any) -> None:
    """Give each connection to a thread, until the listener is closed."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=guarded, args=(connection,), daemon=True).start()

    def guarded(connection: socket.socket) -> None:
        with suppress(OSError, h2.exceptions.ProtocolError), connection:
            connection.settimeout(20)
            answer(connection)

    threading.Thread(target=accept, daemon=True).start()
    stack.callback(_end, listener)


def _end(listener: socket.socket) -> None:
    with suppress(OSError), listener:
        listener.shutdown(socket.SHUT_RDWR)


def serve_h2c(connection: socket.socket, name: str) -> None:
    """Speak HTTP/2 from the first byte, as a gRPC server does: no upgrade, no TLS."""
    h2c = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    h2c.initiate_connection()
    connection.sendall(h2c.data_to_send())
    while data := connection.recv(65_536):
        for event in h2c.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                path = dict(event.headers)[b":path"].decode()
                h2c.send_headers(event.stream_id, [(":status", "200")])
                h2c.send_data(event.stream_id, f"{name} grpc {path}".encode(), end_stream=True)
        connection.sendall(h2c.data_to_send())


def serve_peer(connection: socket.socket, context: ssl.SSLContext, name: str) -> None:
    """End TLS itself, say who it is, then send until the other side leaves when it is asked to."""
    with context.wrap_socket(connection, server_side=True) as tls:
        wanted = tls.recv(100)
        tls.sendall(f"{name} peer".encode())
        while wanted == b"endless":
            tls.sendall(_BLOCK)
        tls.recv(100)


def receive_all(connection: socket.socket) -> bytes:
    """Return everything until the other side closes."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def say_hello_in_pieces(context: ssl.SSLContext, connection: socket.socket, name: str, *, piece_bytes: int) -> None:
    """Begin TLS for a name, its first message in small segments."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(hello), piece_bytes):
        connection.sendall(hello[start : start + piece_bytes])
        time.sleep(0.005)


class H2Client:
    """One HTTP/2 connection that does exactly what a test says."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        assert connection.selected_alpn_protocol() == "h2"
        self.connection = connection
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration())
        self._h2.initiate_connection()
        self.connection.sendall(self._h2.data_to_send())
        self.received: dict[int, int] = {}
        self._statuses: dict[int, str] = {}

    def get(self, authority: str, path: str = "/", *more: tuple[str, str]) -> int:
        stream = self._h2.get_next_available_stream_id()
        headers = [(":method", "GET"), (":scheme", "https"), (":authority", authority), (":path", path), *more]
        self._h2.send_headers(stream, headers, end_stream=True)
        self.connection.sendall(self._h2.data_to_send())
        return stream

    def post_until_stuck(self, authority: str, path: str, *, size: int) -> int:
        """Upload zeros until the gateway gives no more room for some time."""
        stream = self._h2.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "https"), (":authority", authority), (":path", path)]
        self._h2.send_headers(stream, [*headers, ("content-length", str(size))])
        timeout = self.connection.gettimeout()
        for _ in range(size // _FRAME_BYTES):
            self.connection.settimeout(0.2)
            with suppress(TimeoutError):
                while self._h2.local_flow_control_window(stream) < _FRAME_BYTES:
                    self.read()
            self.connection.settimeout(timeout)
            if self._h2.local_flow_control_window(stream) < _FRAME_BYTES:
                break
            self._h2.send_data(stream, bytes(_FRAME_BYTES))
            self.connection.sendall(self._h2.data_to_send())
        return stream

    def status(self, stream: int) -> str:
        while stream not in self._statuses:
            self.read()
        return self._statuses[stream]

    def read(self) -> None:
        data = self.connection.recv(65_536)
        assert data, "the gateway closed the connection"
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self._statuses[event.stream_id] = dict(event.headers)[b":status"].decode()
            elif isinstance(event, h2.events.DataReceived):
                self.received[event.stream_id] = self.received.get(event.stream_id, 0) + len(event.data)
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.connection.sendall(self._h2.data_to_send())
