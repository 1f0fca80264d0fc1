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
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kura_shaper.lab.servers import GRPC_READ_PATH, OBJECT_BYTES_HEADER
from kura_shaper.probe import connection
from kura_shaper.probe.failures import ClientError, Phase, Reason, translated
from kura_shaper.probe.http1 import read_http1
from kura_shaper.probe.http2 import quieten_frames, read_http2
from kura_shaper.probe.request import Method, Request, grpc_message
from kura_shaper.probe.target import Protocol
from kura_shaper.probe.target import Security as Security
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED_STATUS: Final = 1
_CONNECT_TIMEOUT_S = 5.0
# Longer than any pause that a working limit makes; a stream that waits so long counts as failed. With TLS it is the
# measurement that finds nothing came: Python asks again where the kernel has given up.
_STALL_TIMEOUT_S = 10
_RETRY_PAUSE_S = 0.05
_READ_BYTES = 2**20
_MAX_REASONS = 5


class Application(enum.Enum):
    """What is spoken; TCP only connects and reads."""

    HTTP1 = "http1"
    HTTP2 = "http2"
    GRPC = "grpc"
    TCP = "tcp"


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
    """What one stream has read: a Sink. Only its own thread writes to it, so no lock is in the way of the bytes."""

    wants_more: Final = True

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

    def asked(self) -> None:
        """The time runs from before the connection, so a request is nothing new."""

    def answered(self, status: int) -> None:
        """It is what was expected, or the stream ends."""

    def answered_grpc(self, status: int) -> None:
        """The same."""

    def ended(self) -> None:
        """And the next one is asked for."""

    def failed(self, error: ClientError) -> None:
        """Its connection is tried again, whoever else is on it."""
        raise error


def main(arguments: list[str]) -> int:
    """Run the traffic that the arguments name; see the module."""
    spec = TrafficSpec.parse(arguments)
    quieten_frames()
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
    for meter in meters:
        meter.started_s = time.monotonic()
    while True:
        try:
            with _connect(spec) as peer:
                _read(peer, spec, meters=meters)
        except (OSError, ClientError) as error:
            progress.note_failure(str(error))
        time.sleep(_RETRY_PAUSE_S)


def _connect(spec: TrafficSpec) -> socket.socket:
    family = socket.AF_INET6 if ":" in spec.address else socket.AF_INET
    where = connection.Address(family, (spec.address, spec.port))
    peer, _ = connection.connect([where], timeout_s=_CONNECT_TIMEOUT_S)
    if spec.security is Security.TLS:
        alpn = Protocol(spec.application.value).alpn
        trust = connection.trust(Path(spec.ca_file) if spec.ca_file else None, alpn)
        secure = connection.secure(peer, trust, spec.sni or spec.authority)
        connection.shake_hands(secure)
        connection.require_alpn(secure, alpn)
        peer = secure
    # The kernel's own timeouts: a socket with Python's is not blocking, and costs a poll for each read.
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _STALL_TIMEOUT_S, 0))
    return peer


def _read(peer: socket.socket, spec: TrafficSpec, *, meters: Sequence[_Meter]) -> None:
    match spec.application:
        case Application.TCP:
            _read_tcp(peer, meters[0])
        case Application.HTTP1:
            read_http1(peer, _request(spec), meters[0], read_bytes=_READ_BYTES)
        case Application.HTTP2 | Application.GRPC:
            read_http2(peer, _request(spec), meters)


def _read_tcp(peer: socket.socket, meter: _Meter) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    with translated(Phase.READING):
        while size_bytes := peer.recv_into(buffer):
            meter.take(size_bytes)
    raise ClientError(Reason.RESET, "the other side closed the connection")


def _request(spec: TrafficSpec) -> Request:
    is_grpc = spec.application is Application.GRPC
    return Request(
        authority=spec.authority,
        path=GRPC_READ_PATH if is_grpc else f"/object/{spec.object_bytes}",
        scheme="https" if spec.security is Security.TLS else "http",
        method=Method.GRPC if is_grpc else Method.GET,
        headers=((OBJECT_BYTES_HEADER, str(spec.object_bytes)),) if is_grpc else (),
        body=grpc_message("") if is_grpc else b"",
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # At once: the streams are in the middle of reads that nobody waits for any more.
    os._exit(status)
