"""What answers in a tenant's pod: `python -m kura_shaper.lab.servers --object-port 4000 ...`.

One port speaks HTTP/1.1 and HTTP/2 in cleartext, told apart by the first bytes, as the cache
itself does. `GET /ready` answers `ok`, `GET /object/N` answers N bytes, and a POST under
`/google.bytestream.` streams as many bytes in gRPC messages as its header `x-object-bytes`
says. The peer plane serves the same over TLS. The stream port belongs to a foreign program: it
knows no tenant and no mark, and sends without end to whoever connects.

Objects come from one buffer in memory, by sendfile where nothing has to be encrypted or framed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import ssl
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

import h2.config
import h2.connection
import h2.events
import h2.exceptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GRPC_PREFIX: Final = "/google.bytestream."
GRPC_READ_PATH: Final = "/google.bytestream.ByteStream/Read"
OBJECT_BYTES_HEADER: Final = "x-object-bytes"
_MAX_OBJECT_BYTES = 2**40
_BUFFER_BYTES = 4 * 2**20
_TLS_WRITE_BYTES = 2**18
_FRAME_BYTES = 16_384
_HANDSHAKE_TIMEOUT_S = 10.0
# How much is framed before it is written; small enough that window updates are seen in time.
_H2_WRITE_BYTES = 2**18
_MAX_H2_STREAMS = 1_000

_buffer = os.urandom(2**16) * (_BUFFER_BYTES // 2**16)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What a server process offers; port 0 leaves that part out. `cert_file` is PEM with chain and key."""

    object_port: int = 4_000
    peer_port: int = 0
    cert_file: Path | None = None
    stream_port: int = 0

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments for `python -m kura_shaper.lab.servers`; it says `ready` when it listens."""
        cert = () if self.cert_file is None else (f"--cert-file={self.cert_file}",)
        ports = {"object": self.object_port, "peer": self.peer_port, "stream": self.stream_port}
        return (*(f"--{name}-port={port}" for name, port in ports.items()), *cert)


def main(arguments: list[str]) -> int:
    """Listen on the wanted ports, say so, and serve until killed."""
    parser = argparse.ArgumentParser(prog="kura_shaper.lab.servers", description=__doc__)
    for name in ("object", "peer", "stream"):
        parser.add_argument(f"--{name}-port", type=int, default=0, metavar="PORT")
    parser.add_argument("--cert-file", metavar="PEM")
    options = parser.parse_args(arguments)
    if options.peer_port and not options.cert_file:
        parser.error("--peer-port needs --cert-file")
    source = _open_buffer()
    listening: dict[int, Callable[[socket.socket], None]] = {}
    if options.object_port:
        listening[options.object_port] = lambda peer: _serve_plain(peer, source)
    if options.stream_port:
        listening[options.stream_port] = lambda peer: _send_file(peer, source, size_bytes=_MAX_OBJECT_BYTES)
    if options.peer_port:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.cert_file)
        listening[options.peer_port] = lambda peer: _serve_tls(peer, context)
    for port, serve in listening.items():
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1_024)
        threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()
    sys.stdout.write(json.dumps({"event": "ready", "ports": sorted(listening)}) + "\n")
    sys.stdout.flush()
    threading.Event().wait()
    return 0


def _open_buffer() -> int:
    source = os.memfd_create("objects")
    os.write(source, _buffer)
    return source


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_serve_to_end, args=(peer, serve), daemon=True).start()


def _serve_to_end(peer: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    # A client that goes away in the middle is what the lab does all the time, not news.
    with contextlib.suppress(OSError, h2.exceptions.ProtocolError), peer:
        serve(peer)


def _serve_plain(peer: socket.socket, source: int) -> None:
    if peer.recv(3, socket.MSG_PEEK | socket.MSG_WAITALL) == b"PRI":
        _Http2Session(peer).run()
    else:
        _serve_http1(peer, lambda size_bytes: _send_file(peer, source, size_bytes=size_bytes))


def _serve_tls(peer: socket.socket, context: ssl.SSLContext) -> None:
    peer.settimeout(_HANDSHAKE_TIMEOUT_S)
    with context.wrap_socket(peer, server_side=True) as secure:
        secure.settimeout(None)
        _serve_http1(secure, lambda size_bytes: _send_buffer(secure, size_bytes))


def _send_file(peer: socket.socket, source: int, *, size_bytes: int) -> None:
    left_bytes = size_bytes
    while left_bytes > 0:
        offset = (size_bytes - left_bytes) % _BUFFER_BYTES
        left_bytes -= os.sendfile(peer.fileno(), source, offset, min(left_bytes, _BUFFER_BYTES - offset))


def _send_buffer(peer: socket.socket, size_bytes: int) -> None:
    piece = memoryview(_buffer)[:_TLS_WRITE_BYTES]
    for _ in range(size_bytes // _TLS_WRITE_BYTES):
        peer.sendall(piece)
    peer.sendall(piece[: size_bytes % _TLS_WRITE_BYTES])


def _serve_http1(peer: socket.socket, send_object: Callable[[int], None]) -> None:
    with peer.makefile("rb") as requests:
        while request := _read_head(requests):
            method, target, *_ = *request[0].split(), "", ""
            size_bytes = object_size_bytes(target) if method == "GET" else None
            body = b"ok\n" if (method, target) == ("GET", "/ready") else b""
            status = "200 OK" if body or size_bytes is not None else "404 Not Found"
            head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body) if size_bytes is None else size_bytes}\r\n\r\n"
            peer.sendall(head.encode() + body)
            if size_bytes is not None:
                send_object(size_bytes)
            # Only a GET has no body that would have to be read before the next request.
            if method != "GET" or "connection: close" in request[1:]:
                return


def _read_head(requests: BinaryIO) -> tuple[str, ...]:
    """Return the request line and the headers in lower case; () when the client is done."""
    head: list[str] = []
    while line := requests.readline(8_192):
        text = line.decode("latin-1").strip()
        if not text:
            return tuple(head)
        head.append(text.lower() if head else text)
    return ()


def object_size_bytes(target: str) -> int | None:
    """Return how many bytes `/object/N` asks for, or None when it is another path or no fit number."""
    _, _, digits = target.partition("/object/")
    if target != f"/object/{digits}" or not digits.isascii() or not digits.isdigit() or len(digits) > 13:
        return None
    return int(digits)


class _Body:
    """The rest of one answer, taken out as the window allows."""

    def __init__(self, pieces: Iterator[memoryview], *, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        self._pieces = pieces
        self._piece = next(pieces, memoryview(b""))
        self.trailers = trailers

    @property
    def is_finished(self) -> bool:
        return not self._piece

    def take(self, max_bytes: int) -> memoryview:
        taken, self._piece = self._piece[:max_bytes], self._piece[max_bytes:]
        if not self._piece:
            self._piece = next(self._pieces, self._piece)
        return taken


def _object_pieces(size_bytes: int) -> Iterator[memoryview]:
    view = memoryview(_buffer)[:_FRAME_BYTES]
    for _ in range(size_bytes // _FRAME_BYTES):
        yield view
    if size_bytes % _FRAME_BYTES:
        yield view[: size_bytes % _FRAME_BYTES]


def _grpc_pieces(size_bytes: int) -> Iterator[memoryview]:
    """Messages of a length prefix and payload, each as long as a frame, so that frames stay full."""
    for payload in range(0, size_bytes, _FRAME_BYTES - 5):
        length = min(_FRAME_BYTES - 5, size_bytes - payload)
        yield memoryview(b"\0" + length.to_bytes(4, "big") + _buffer[:length])


class _Http2Session:
    """One HTTP/2 connection in cleartext: its streams take turns, a frame each."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._bodies: dict[int, _Body] = {}
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))

    def run(self) -> None:
        self._h2.initiate_connection()
        poll = select.poll()
        poll.register(self._peer, select.POLLIN)
        while True:
            sendable = self._frame_some()
            if out := self._h2.data_to_send():
                self._peer.sendall(out)
            if sendable and not poll.poll(0):
                continue
            data = self._peer.recv(65_536)
            if not data:
                return
            for event in self._h2.receive_data(data):
                self._handle(event)

    def _frame_some(self) -> bool:
        """Frame up to _H2_WRITE_BYTES; say whether there is more that the windows allow."""
        framed_bytes = 0
        sendable = [stream for stream in self._bodies if self._h2.local_flow_control_window(stream) > 0]
        while sendable and framed_bytes < _H2_WRITE_BYTES:
            for stream in tuple(sendable):
                framed_bytes += self._send_frame(stream)
                if stream not in self._bodies or self._h2.local_flow_control_window(stream) <= 0:
                    sendable.remove(stream)
        return bool(sendable)

    def _send_frame(self, stream: int) -> int:
        body = self._bodies[stream]
        room_bytes = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
        data = body.take(min(room_bytes, _FRAME_BYTES))
        is_last = body.is_finished
        if data:
            self._h2.send_data(stream, data, end_stream=is_last and not body.trailers)
        if is_last:
            del self._bodies[stream]
            if body.trailers:
                self._h2.send_headers(stream, body.trailers, end_stream=True)
        return len(data)

    def _handle(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._answer(event.stream_id, {os.fsdecode(name): os.fsdecode(value) for name, value in event.headers})
        elif isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self._bodies.pop(event.stream_id, None)

    def _answer(self, stream: int, headers: dict[str, str]) -> None:
        path = headers.get(":path", "")
        if path.startswith(GRPC_PREFIX):
            size_bytes = object_size_bytes(f"/object/{headers.get(OBJECT_BYTES_HEADER, '')}") or 0
            self._h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            self._bodies[stream] = _Body(_grpc_pieces(size_bytes), trailers=(("grpc-status", "0"),))
            return
        wanted_bytes = object_size_bytes(path)
        body = _Body(iter((memoryview(b"ok\n"),)) if path == "/ready" else _object_pieces(wanted_bytes or 0))
        status = "404" if wanted_bytes is None and path != "/ready" else "200"
        self._h2.send_headers(stream, [(":status", status)], end_stream=body.is_finished)
        if not body.is_finished:
            self._bodies[stream] = body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
