"""Both far ends of a relay in one loop: publishers that send, and a receiver that takes everything at once.

The receiver of the bus is none of ours: it reads the frames of HTTP/2 by their heads, grants windows as wide as
there are, looks at no payload, and knows of the bus only what a session needs. A publisher's stream begins with a
number of four bytes, by which both of its ends are known; it sends at most so far ahead of what was received.
"""

from __future__ import annotations

import json
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import hpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WIDE = 2**31 - 1
_WIDEN_AFTER = 1 << 28
_PREFACE = 24
_READ = 1 << 18
_MEDIA_TYPE = b"application/vnd.continuum.bus.v1"
_BLOCK = memoryview(bytes(1 << 16))
STAMP = struct.Struct(">Qd")


@dataclass(slots=True)
class Flow:
    """One stream from its publisher to the receiver. A message's stamp is its number and when it was sent."""

    number: int
    publisher: socket.socket
    sent: int = 0
    received: int = 0
    is_broken: bool = False
    latencies: list[float] = field(default_factory=list)
    left: bytes = b""

    def note(self, data: bytes, message_bytes: int) -> None:
        """Take what was received of stamped messages."""
        data = self.left + data if self.left else data
        now = time.perf_counter()
        whole = len(data) // message_bytes * message_bytes
        for at in range(0, whole, message_bytes):
            self.latencies.append(now - STAMP.unpack_from(data, at)[1])
        self.left = data[whole:]


class FarEnd:
    """Listens for publishers' and receivers' connections. `is_bus` decides what a receiver's connection speaks."""

    def __init__(
        self, context: ssl.SSLContext | None, *, is_bus: bool, granted: Callable[[int], bool] | None = None
    ) -> None:
        self._context, self._is_bus = context, is_bus
        # Which streams, in the order in which they are asked for, are granted windows; all without this.
        self.granted = granted or (lambda _: True)
        self._selector = selectors.DefaultSelector()
        self.flows: dict[int, Flow] = {}
        self.message_bytes = 0
        self._publishers, self._sinks = _listener(), _listener()
        self._selector.register(self._publishers, selectors.EVENT_READ, self._accept_publisher)
        self._selector.register(self._sinks, selectors.EVENT_READ, self._accept_sink)
        self.bus: BusReceiver | None = None
        self._open: list[socket.socket] = []

    @property
    def publisher_port(self) -> int:
        """Where publishers are."""
        return int(self._publishers.getsockname()[1])

    @property
    def sink_port(self) -> int:
        """Where the receiver is."""
        return int(self._sinks.getsockname()[1])

    def turn(self, timeout_s: float = 0.0) -> None:
        """Handle what has come."""
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fileobj)

    def until(self, done: Callable[[], bool], *, within_s: float = 30.0) -> None:
        """Take turns until something holds."""
        deadline = time.monotonic() + within_s
        while not done():
            self.turn(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError

    def pump(self, seconds: float, *, ahead_bytes: int, flows: Sequence[Flow]) -> int:
        """Have publishers send as fast as it is received, each so far ahead; return how much was received."""
        before = sum(flow.received for flow in flows)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for flow in flows:
                while flow.sent - flow.received < ahead_bytes:
                    try:
                        flow.sent += flow.publisher.send(_BLOCK)
                    except BlockingIOError:
                        break
            self.turn(0.0)
        return sum(flow.received for flow in flows) - before

    def send_at(self, rate: int, seconds: float, *, flows: Sequence[Flow]) -> list[float]:
        """Send small stamped messages at a rate, in turns over all flows; return their latencies in seconds."""
        start, sent, total = time.perf_counter(), 0, int(rate * seconds)
        padding = bytes(self.message_bytes - STAMP.size)
        while sent < total:
            due = min(total, int((time.perf_counter() - start) * rate))
            while sent < due:
                flows[sent % len(flows)].publisher.send(STAMP.pack(sent, time.perf_counter()) + padding)
                sent += 1
                if sent % 16 == 0:
                    self.turn(0.0)
            self.turn(0.0005)
        self.until(lambda: sum(len(flow.latencies) for flow in flows) >= total)
        return [each for flow in flows for each in flow.latencies]

    def close(self) -> None:
        """Close everything."""
        for each in (self._publishers, self._sinks, *self._open):
            each.close()
        self._selector.close()

    def _accept_publisher(self, listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.append(accepted)
        number = len(self.flows)
        self.flows[number] = Flow(number, accepted)
        accepted.sendall(number.to_bytes(4, "big"))
        accepted.settimeout(0)

    def _accept_sink(self, listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            accepted = self._context.wrap_socket(accepted, server_side=True)
        accepted.settimeout(0)
        self._open.append(accepted)
        if self._is_bus:
            self.bus = BusReceiver(accepted, self)
            self._selector.register(accepted, selectors.EVENT_READ, lambda _: self.bus and self.bus.read())
        else:
            sink = Sink(self)
            self._selector.register(accepted, selectors.EVENT_READ, lambda made: sink.take(read_all(made)))

    def unmeasured(self) -> None:
        """Forget the latencies that were noted so far."""
        for flow in self.flows.values():
            flow.latencies.clear()

    def flow_of(self, head: bytes) -> Flow:
        """Return the flow that begins so."""
        return self.flows[int.from_bytes(head, "big")]


class Sink:
    """The receiving end of one stream."""

    def __init__(self, far_end: FarEnd) -> None:
        self._far_end = far_end
        self._head = b""
        self.flow: Flow | None = None

    def take(self, data: bytes | memoryview) -> None:
        """Count what came; the first four bytes say of which flow it is."""
        if self.flow is None:
            self._head += bytes(data)
            if len(self._head) < 4:
                return
            self.flow = self._far_end.flow_of(self._head[:4])
            data = self._head[4:]
        self.flow.received += len(data)
        if self._far_end.message_bytes:
            self.flow.note(bytes(data), self._far_end.message_bytes)


def read_all(made: socket.socket) -> bytes:
    """Return what can be read of a socket at once; TLS may hold more than the kernel tells of."""
    parts = []
    try:
        while part := made.recv(_READ):
            parts.append(part)
            if not isinstance(made, ssl.SSLSocket):
                break
    except (BlockingIOError, ssl.SSLWantReadError):
        pass
    except OSError:
        return b""
    return b"".join(parts)


class BusReceiver:
    """The router's end, as little as it takes."""

    def __init__(self, made: ssl.SSLSocket | socket.socket, far_end: FarEnd) -> None:
        self._socket, self._far_end = made, far_end
        self._hpack = hpack.Decoder()
        self._waiting = b""
        self._skip = _PREFACE
        self._out: deque[bytes] = deque()
        self._session = 0
        self._sinks: dict[int, Sink] = {}
        self._left = 0
        self._stream = 0
        self._owed: dict[int, int] = {}
        self._order: list[str] = []
        self._not_granted: list[Sink] = []
        self.is_welcomed = False
        self.refused: list[str] = []
        self.resets = 0
        self._session_in = b""
        self._say(_frame(_SETTINGS, 0, 0, struct.pack(">HIHI", 3, 4096, 5, 1 << 16)) + _widened(0))

    def subscribe(self, streams: int, endpoint: str) -> None:
        """Ask for so many streams."""
        self._order = [f"s{number}" for number in range(streams)]
        for stream_id in self._order:
            target = {"kind": "zmq_endpoint", "endpoint": endpoint, "dynamo_namespace": "bench"}
            self._say_frame({"type": "subscribe", "stream_id": stream_id, "target": target})

    @property
    def stuck(self) -> list[Flow]:
        """The flows that are granted no more than every stream is at first."""
        return [sink.flow for sink in self._not_granted if sink.flow is not None]

    def read(self) -> None:
        """Take what came."""
        data = read_all(self._socket)
        view = memoryview(self._waiting + data if self._waiting else data)
        self._waiting = b""
        at = min(self._skip, len(view))
        self._skip -= at
        size = len(view)
        while at < size:
            if self._left:
                # The rest of a DATA frame, passed on as it comes.
                part = view[at : at + self._left]
                at += len(part)
                self._left -= len(part)
                self._data(self._stream, part)
                continue
            if size < at + 9:
                break
            length, kind, flags = int.from_bytes(view[at : at + 3], "big"), view[at + 3], view[at + 4]
            stream = int.from_bytes(view[at + 5 : at + 9], "big")
            if kind == _DATA and stream != self._session:
                at += 9
                self._left, self._stream = length, stream
                continue
            if size < at + 9 + length:
                break
            self._take(kind, flags, stream, bytes(view[at + 9 : at + 9 + length]))
            at += 9 + length
        self._waiting = bytes(view[at:])

    def _data(self, stream: int, part: memoryview) -> None:
        self._sinks[stream].take(part)
        for key in (0, stream):
            owed = self._owed.get(key, 0) + len(part)
            if owed >= _WIDEN_AFTER:
                self._say(_frame(_WINDOW, 0, key, owed.to_bytes(4, "big")))
                owed = 0
            self._owed[key] = owed

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._say(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._say(_frame(_PING, _ACK, 0, body))
        elif kind == _HEADERS:
            self._request(stream, dict(self._hpack.decode(body)))
        elif kind == _DATA:
            self._frames(body)
        elif kind == _RST:
            self.resets += 1
            if stream in self._sinks and (flow := self._sinks[stream].flow):
                flow.is_broken = True

    def _request(self, stream: int, headers: dict[str, str]) -> None:
        if headers[":path"].endswith("/session"):
            self._session = stream
            head = b"\x88\x0f\x10" + bytes((len(_MEDIA_TYPE),)) + _MEDIA_TYPE
            self._say(_frame(_HEADERS, _END_HEADERS, stream, head) + _widened(stream))
            return
        number = self._order.index(headers[":path"].rpartition("/")[2])
        self._sinks[stream] = Sink(self._far_end)
        widened = _widened(stream)
        if not self._far_end.granted(number):
            self._not_granted.append(self._sinks[stream])
            widened = b""
        self._say(_frame(_HEADERS, _END_HEADERS, stream, b"\x88") + widened)

    def _frames(self, body: bytes) -> None:
        self._session_in += body
        while len(self._session_in) >= 4:
            length = int.from_bytes(self._session_in[:4], "big")
            if len(self._session_in) < 4 + length:
                break
            told = json.loads(self._session_in[4 : 4 + length])
            self._session_in = self._session_in[4 + length :]
            if told["type"] == "hello":
                limits = {"max_streams": 4096, "max_stream_buffer_bytes": 1 << 20, "max_frame_bytes": 1 << 16}
                welcome = {"type": "welcome", "protocol_version": 1, "session_id": "bench", "limits": limits}
                self._say_frame(welcome | {"heartbeat_interval_ms": 60_000, "idle_timeout_ms": 300_000})
                self.is_welcomed = True
            elif told["type"] == "stream_refused":
                self.refused.append(told["code"])

    def _say_frame(self, told: dict[str, object]) -> None:
        data = json.dumps(told).encode()
        data = len(data).to_bytes(4, "big") + data
        self._say(_frame(_DATA, 0, self._session, data))

    def _say(self, data: bytes) -> None:
        if data:
            self._socket.settimeout(None)
            self._socket.sendall(data)
            self._socket.settimeout(0)


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _widened(stream: int) -> bytes:
    """Return what makes a window as wide as one can be."""
    return _frame(_WINDOW, 0, stream, (_WIDE - 65_535).to_bytes(4, "big"))


def _listener() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen(512)
    return made
