"""Clients: `python -m kura_shaper.lab.traffic --application http2 --security tls ...`.

Each stream asks for one object after the other for a fixed time, and reads as fast as it
can. The process says `flowing` when the first payload byte has come on every stream; the time
that is measured starts there. At its end, or when SIGTERM tells it so, it says `result` and leaves
at once, in the middle of whatever is under way. A broken stream is counted and tried again.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame

from kura_shaper.lab.servers import GRPC_READ_PATH, OBJECT_BYTES_HEADER
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED_STATUS: Final = 1
_CONNECT_TIMEOUT_S = 5.0
# Longer than any pause that a working limit makes; a stream that waits so long counts as failed.
_STALL_TIMEOUT_S = 10
_RETRY_PAUSE_S = 0.05
_READ_BYTES = 2**20
_WINDOW_BYTES = 2**30
_MAX_HEAD_BYTES = 65_536
_MAX_REASONS = 5


class Application(enum.Enum):
    """What is spoken; TCP only connects and reads."""

    HTTP1 = "http1"
    HTTP2 = "http2"
    GRPC = "grpc"
    TCP = "tcp"


class Security(enum.Enum):
    """What it is spoken over."""

    PLAIN = "plain"
    TLS = "tls"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSpec:
    """What a client process does.

    It connects to `address` (IPv4 or IPv6), names `sni` in the handshake and `host` in requests
    (either defaults to the other, then to the address), and trusts `ca_file` alone.
    """

    application: Application
    address: str
    port: int
    security: Security = Security.TLS
    sni: str = ""
    host: str = ""
    ca_file: str = ""
    connections: int = 1
    streams_per_connection: int = 1
    duration_ms: int = 3_000
    start_timeout_ms: int = 10_000
    object_bytes: int = 2**28

    @property
    def authority(self) -> str:
        """The name in requests."""
        return self.host or self.sni or self.address

    @property
    def streams(self) -> int:
        """All streams; only HTTP/2 carries several on a connection."""
        return self.connections * self.streams_per_connection

    @property
    def timeout_s(self) -> float:
        """After so long the process has said `result`, whatever happened."""
        return (self.start_timeout_ms + self.duration_ms) / 1_000 + 5

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments for `python -m kura_shaper.lab.traffic`."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        texts = ((name, value.value if isinstance(value, enum.Enum) else value) for name, value in values)
        return tuple(f"--{name.replace('_', '-')}={text}" for name, text in texts)

    @classmethod
    def parse(cls, arguments: list[str]) -> TrafficSpec:
        """Return the spec that the arguments name; leaves the process with 2 when they name none."""
        parser = argparse.ArgumentParser(prog="kura_shaper.lab.traffic", description=__doc__)
        kinds: dict[str, Any] = {"Application": Application, "Security": Security, "str": str, "int": int}
        for field in fields(cls):
            is_needed = field.name in ("application", "address", "port")
            default = None if is_needed else field.default
            option = f"--{field.name.replace('_', '-')}"
            parser.add_argument(option, type=kinds[str(field.type)], required=is_needed, default=default)
        return cls(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """What a client process read, from `flowing` on. `reasons` are some of the failures' texts."""

    protocol: str
    streams: int
    received_bytes: int
    duration_ms: float
    failures: int
    reasons: tuple[str, ...]
    first_byte_median_ms: float
    first_byte_max_ms: float

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> TrafficResult:
        """Return the result that a `result` event tells."""
        values = {field.name: event[field.name] for field in fields(cls)}
        return cls(**{**values, "reasons": tuple(values["reasons"])})

    @property
    def rate(self) -> Rate:
        """Payload in bit/s, averaged over the time."""
        return Rate(round(self.received_bytes * 8_000 / self.duration_ms))


class _Progress:
    """What the streams tell the one that waits for them."""

    def __init__(self, streams: int) -> None:
        self.meters = tuple(_Meter(self) for _ in range(streams))
        self.failures = 0
        self.reasons: list[str] = []
        self.all_flow = threading.Event()
        self._lock = threading.Lock()

    @property
    def received_bytes(self) -> int:
        return sum(meter.received_bytes for meter in self.meters)

    @property
    def first_byte_ms(self) -> list[float]:
        return sorted(meter.first_byte_ms for meter in self.meters if meter.first_byte_ms is not None)

    def note_first_byte(self) -> None:
        if all(meter.first_byte_ms is not None for meter in self.meters):
            self.all_flow.set()

    def note_failure(self, reason: str) -> None:
        with self._lock:
            self.failures += 1
            if reason not in self.reasons and len(self.reasons) < _MAX_REASONS:
                self.reasons.append(reason)


class _Meter:
    """What one stream has read. Only its own thread writes to it, so no lock is in the way of the bytes."""

    def __init__(self, progress: _Progress) -> None:
        self.received_bytes = 0
        self.first_byte_ms: float | None = None
        self.started_s = 0.0
        self._progress = progress

    def take(self, size_bytes: int) -> None:
        self.received_bytes += size_bytes
        if self.first_byte_ms is None and size_bytes:
            self.first_byte_ms = round((time.monotonic() - self.started_s) * 1_000, 2)
            self._progress.note_first_byte()


class _StreamError(Exception):
    """The other side answered something else than an object."""


def main(arguments: list[str]) -> int:
    """Run the traffic that the arguments name; see the module."""
    spec = TrafficSpec.parse(arguments)
    # h2 spells out each frame that it receives for a trace that nobody reads: 40 % of this process's time.
    hyperframe.frame.DataFrame.__repr__ = object.__repr__  # type: ignore[method-assign]
    # Blocked before any thread starts, so that it waits for the one place that looks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    progress = _Progress(spec.streams)
    for first in range(0, spec.streams, spec.streams_per_connection):
        meters = progress.meters[first : first + spec.streams_per_connection]
        threading.Thread(target=_keep_reading, args=(spec, progress), kwargs={"meters": meters}, daemon=True).start()
    progress.all_flow.wait(spec.start_timeout_ms / 1_000)
    started_s, before_bytes = time.monotonic(), progress.received_bytes
    times_ms = progress.first_byte_ms
    _say("flowing", streams=len(times_ms), wanted=spec.streams)
    if times_ms:
        # Clients that run beside each other start to flow one after the other, but are to end together.
        signal.sigtimedwait([signal.SIGTERM], spec.duration_ms / 1_000)
    received_bytes = progress.received_bytes - before_bytes
    result = TrafficResult(
        protocol=f"{spec.application.value}+{spec.security.value}",
        streams=len(times_ms),
        received_bytes=received_bytes,
        duration_ms=round((time.monotonic() - started_s) * 1_000, 3),
        failures=progress.failures,
        reasons=tuple(progress.reasons),
        first_byte_median_ms=times_ms[len(times_ms) // 2] if times_ms else 0.0,
        first_byte_max_ms=times_ms[-1] if times_ms else 0.0,
    )
    _say("result", **asdict(result))
    return 0 if len(times_ms) == spec.streams else FAILED_STATUS


def _say(event: str, **values: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def _keep_reading(spec: TrafficSpec, progress: _Progress, *, meters: Sequence[_Meter]) -> None:
    read = {Application.HTTP1: _read_http1, Application.TCP: _read_tcp}.get(spec.application, _read_http2)
    for meter in meters:
        meter.started_s = time.monotonic()
    while True:
        try:
            with _connect(spec) as peer:
                read(peer, spec, meters=meters)
        except (OSError, h2.exceptions.ProtocolError, _StreamError) as error:
            progress.note_failure(f"{type(error).__name__}: {error}"[:200])
        time.sleep(_RETRY_PAUSE_S)


def _connect(spec: TrafficSpec) -> socket.socket:
    peer = socket.create_connection((spec.address, spec.port), timeout=_CONNECT_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if spec.security is Security.TLS:
        context = ssl.create_default_context(cafile=spec.ca_file or None)
        is_http2 = spec.application in (Application.HTTP2, Application.GRPC)
        context.set_alpn_protocols(["h2"] if is_http2 else ["http/1.1"])
        secure = context.wrap_socket(peer, server_hostname=spec.sni or spec.authority)
        if is_http2 and secure.selected_alpn_protocol() != "h2":
            raise _StreamError("the other side does not speak HTTP/2")
        peer = secure
    # The kernel's own timeouts: a socket with Python's is not blocking, and costs a poll for each read.
    peer.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _STALL_TIMEOUT_S, 0))
    return peer


def _receive(peer: socket.socket, into: memoryview) -> int:
    size_bytes = peer.recv_into(into)
    if not size_bytes:
        raise _StreamError("the other side closed the connection")
    return size_bytes


def _read_tcp(peer: socket.socket, _spec: TrafficSpec, *, meters: Sequence[_Meter]) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    while True:
        meters[0].take(_receive(peer, buffer))


def _read_http1(peer: socket.socket, spec: TrafficSpec, *, meters: Sequence[_Meter]) -> None:
    meter = meters[0]
    buffer = memoryview(bytearray(_READ_BYTES))
    request = f"GET /object/{spec.object_bytes} HTTP/1.1\r\nhost: {spec.authority}\r\n\r\n".encode()
    while True:
        peer.sendall(request)
        body_bytes, left_bytes = _read_head(peer, buffer)
        meter.take(body_bytes)
        while left_bytes > 0:
            size_bytes = _receive(peer, buffer[:left_bytes])
            meter.take(size_bytes)
            left_bytes -= size_bytes


def _read_head(peer: socket.socket, buffer: memoryview) -> tuple[int, int]:
    """Read a response's head; return how much of the body came with it, and how much is left."""
    filled_bytes, end = 0, -1
    while end < 0:
        if filled_bytes >= _MAX_HEAD_BYTES:
            raise _StreamError("the head of the response is too long")
        filled_bytes += _receive(peer, buffer[filled_bytes:_MAX_HEAD_BYTES])
        end = bytes(buffer[:filled_bytes]).find(b"\r\n\r\n")
    status, *lines = bytes(buffer[:end]).decode("latin-1").lower().split("\r\n")
    lengths = [line.partition(":")[2].strip() for line in lines if line.startswith("content-length:")]
    if status.split()[1:2] != ["200"] or not lengths:
        raise _StreamError(f"answer {status!r}")
    body_bytes = filled_bytes - end - 4
    return body_bytes, int(lengths[0]) - body_bytes


def _read_http2(peer: socket.socket, spec: TrafficSpec, *, meters: Sequence[_Meter]) -> None:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES})
    connection.increment_flow_control_window(_WINDOW_BYTES)
    reading = {_request(connection, spec): meter for meter in meters}
    buffer = memoryview(bytearray(_READ_BYTES))
    while True:
        if out := connection.data_to_send():
            peer.sendall(out)
        for event in connection.receive_data(bytes(buffer[: _receive(peer, buffer)])):
            if isinstance(event, h2.events.DataReceived):
                reading[event.stream_id].take(len(event.data))
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                reading[_request(connection, spec)] = reading.pop(event.stream_id)
            else:
                _refuse_failure(event)


def _request(connection: h2.connection.H2Connection, spec: TrafficSpec) -> int:
    stream = connection.get_next_available_stream_id()
    head = [(":scheme", "https" if spec.security is Security.TLS else "http"), (":authority", spec.authority)]
    if spec.application is Application.GRPC:
        head += [(":method", "POST"), (":path", GRPC_READ_PATH), ("content-type", "application/grpc")]
        head += [("te", "trailers"), (OBJECT_BYTES_HEADER, str(spec.object_bytes))]
        connection.send_headers(stream, head)
        connection.send_data(stream, b"\0\0\0\0\0", end_stream=True)
    else:
        head += [(":method", "GET"), (":path", f"/object/{spec.object_bytes}")]
        connection.send_headers(stream, head, end_stream=True)
    return stream


def _refuse_failure(event: h2.events.Event) -> None:
    if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
        headers = {os.fsdecode(name): os.fsdecode(value) for name, value in event.headers}
        if headers.get(":status", "200") != "200" or headers.get("grpc-status", "0") != "0":
            raise _StreamError(f"answer {headers.get(':status', '')} grpc-status {headers.get('grpc-status', '-')}")
    elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
        raise _StreamError(f"{type(event).__name__} {event.error_code}")


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # At once: the streams are in the middle of reads that nobody waits for any more.
    os._exit(status)
