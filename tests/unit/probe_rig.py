"""Servers for a probe: threads of this process on loopback that do exactly what a test says, over real TLS."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import ssl
import struct
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trustme

from kura_shaper.clock import SystemClock
from kura_shaper.probe.client import measure
from kura_shaper.probe.connection import Resolver
from kura_shaper.probe.target import Load, Measured, Protocol, Security, Target
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kura_shaper.clock import Clock
    from kura_shaper.probe.failures import Reason

    Handler = Callable[[socket.socket], object]

SECOND = 1_000_000_000
HOST = "acme.kura.test"
PATIENCE_S = 10.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


@functools.cache
def authority() -> trustme.CA:
    """Return the CA that the servers' certificates are of."""
    return trustme.CA()


@functools.cache
def authority_file() -> Path:
    """Return the file of that CA, which is gone when this process is."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    path = Path(directory, "ca.pem")
    authority().cert_pem.write_to_path(path)
    return path


def server_context(*alpn: str, name: str = HOST, ca: trustme.CA | None = None, **changes: Any) -> ssl.SSLContext:
    """Return TLS of a server with this name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (ca or authority()).issue_cert(name, **changes).configure_cert(context)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


@dataclass
class Served:
    """A server of a test: where it is, and what it was asked."""

    port: int
    asked: list[bytes] = field(default_factory=list)


@contextmanager
def serving(handler: Handler, context: ssl.SSLContext | None = None) -> Iterator[Served]:
    """Yield a server that gives each connection to the handler, and is gone with all of its threads afterwards."""
    threads: list[threading.Thread] = []
    open_peers: list[socket.socket] = []

    def serve(peer: socket.socket) -> None:
        with suppress(OSError, h2.exceptions.ProtocolError), peer:
            peer.settimeout(PATIENCE_S)
            if context is None:
                handler(peer)
                return
            with context.wrap_socket(peer, server_side=True) as secure:
                handler(secure)

    def accept() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                open_peers.append(peer)
                threads.append(threading.Thread(target=serve, args=(peer,), daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield Served(listener.getsockname()[1])
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join(PATIENCE_S)
            for thread in threads:
                thread.join(PATIENCE_S)
            assert not any(thread.is_alive() for thread in threads)


def until_closed(peer: socket.socket) -> None:
    """Wait for the client to leave, however it does."""
    with suppress(OSError):
        while peer.recv(65_536):
            pass


def reset(peer: socket.socket) -> None:
    """End a connection with a RST, once something came."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket.socket.close(peer)


def read_request(peer: socket.socket) -> bytes:
    """Return the head of an HTTP/1.1 request."""
    head = b""
    while b"\r\n\r\n" not in head:
        if not (piece := peer.recv(65_536)):
            raise ConnectionResetError
        head += piece
    return head


def no_tls(answer: bytes) -> Handler:
    """Return a handler that answers the first message of TLS with something else."""

    def handle(peer: socket.socket) -> None:
        peer.recv(10)
        peer.sendall(answer)

    return handle


def answering(answer: bytes, *, then: Callable[[socket.socket], object] = until_closed) -> Handler:
    """Return a handler that sends the same bytes after each request, and then does something."""

    def handle(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(answer)
        then(peer)

    return handle


def objects(peer: socket.socket) -> None:
    """Answer /N with N bytes for as long as the client asks."""
    while True:
        path = read_request(peer).split()[1].decode()
        size_bytes = int(path.removeprefix("/"))
        peer.sendall(f"HTTP/1.1 200 OK\r\ncontent-length: {size_bytes}\r\n\r\n".encode() + bytes(size_bytes))


class H2Peer:
    """The server's end of an HTTP/2 connection that does what a test says."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self._heads: dict[int, dict[str, str]] = {}
        self._whole: list[int] = []
        self.send()

    def send(self) -> None:
        """Send what waits to be."""
        self.peer.sendall(self.h2.data_to_send())

    def next_request(self) -> tuple[int, dict[str, str]]:
        """Return the stream and the head of the next request that is whole."""
        while not self._whole:
            data = self.peer.recv(65_536)
            if not data:
                raise ConnectionResetError
            for event in self.h2.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    self._heads[event.stream_id] = {str(name): str(value) for name, value in event.headers or ()}
                elif isinstance(event, h2.events.StreamEnded):
                    self._whole.append(event.stream_id)
            self.send()
        stream = self._whole.pop(0)
        return stream, self._heads.pop(stream)

    def resets(self) -> list[int]:
        """Wait for what comes next, and return the streams that it ends."""
        data = self.peer.recv(65_536)
        if not data:
            raise ConnectionResetError
        return [each.stream_id for each in self.h2.receive_data(data) if isinstance(each, h2.events.StreamReset)]

    def answer(self, stream: int, body: bytes = b"x", *, status: str = "200", **fields: str) -> None:
        """Answer a request whole."""
        self.h2.send_headers(stream, [(":status", status), *fields.items()])
        self.h2.send_data(stream, body, end_stream=True)
        self.send()


def target_of(served: Served, protocol: Protocol = Protocol.HTTP1, **changes: Any) -> Target:
    """Return a target at the server, over TLS."""
    made = Target(name="it", host=HOST, protocol=protocol, large="/1000", connect_to=Endpoint("127.0.0.1", served.port))
    return replace(made, **changes)


def measured(target: Target, *, clock: Clock | None = None, resolver: Resolver | None = None, **load: Any) -> Measured:
    """Return what comes of it. Who is trusted is the servers' CA; afterwards no thread of the probe is left."""
    if target.security is Security.TLS and target.ca_file is None:
        target = replace(target, ca_file=authority_file())
    result = measure(target, Load(**load), clock=clock or SystemClock(), resolver=resolver or Resolver())
    for thread in [thread for thread in threading.enumerate() if thread.name == "probe"]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return result


def the_failure(result: Measured, reason: Reason, words: str) -> None:
    """Fail unless there is one kind of failure, which is this one."""
    assert [failure.reason for failure in result.failures] == [reason], result.failures
    assert words in result.failures[0].detail


def h2_server(handle: Callable[[H2Peer], object]) -> Handler:
    """Return a server of HTTP/2 that does what the handler says and then waits for the client to leave."""

    def run(peer: socket.socket) -> None:
        handle(H2Peer(peer))
        until_closed(peer)

    return run
