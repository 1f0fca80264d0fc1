"""Measures a target: Target and Load in, Measured out, within a time that both sides know.

A thread reads each connection, and blocks in the kernel for as long as it takes: it knows no
time. The one that called looks at the clock, and cuts connections that are silent for too
long, or when the time is over. So whatever the other side does, drips or sends without end,
the end comes, and nothing of what was sent is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.probe import connection
from kura_shaper.probe.credentials import headers_of
from kura_shaper.probe.failures import ClientError, Failure, Phase, Reason
from kura_shaper.probe.http1 import read_http1
from kura_shaper.probe.http2 import read_http2
from kura_shaper.probe.progress import Progress
from kura_shaper.probe.request import Method, Request, grpc_message
from kura_shaper.probe.target import Load, Measured, Protocol, Security

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Iterable, Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.probe.progress import Meter
    from kura_shaper.probe.target import Target

_LOG = logging.getLogger("kura_shaper.probe")
_SECOND_NS = 1_000_000_000
_TICK_S = 0.02
_JOIN_S = 0.5


def measure(
    target: Target,
    load: Load,
    *,
    clock: Clock,
    resolver: connection.Resolver,
    cancelled: threading.Event | None = None,
) -> Measured:
    """Return what came of one measurement. It raises nothing: what went wrong is in the result.

    It takes at most nine times the load's timeout and its duration; less when `cancelled` is set meanwhile.
    """
    cancelled = cancelled or threading.Event()
    try:
        way = _prepare(target, load, resolver=resolver, clock=clock)
    except UsageError as error:
        return Measured(target=target, failures=(Failure(Reason.LOCAL, str(error)),))
    except ClientError as error:
        return Measured(target=target, failures=(error.failure,))
    runs: list[_Run] = []
    if target.small:
        # One object, whole, and soon.
        short = replace(load, streams=1, connections=0, size_bytes=None, duration_ns=load.timeout_ns)
        runs.append(_Run(way, target.small, load=short, clock=clock))
        runs[-1].run(cancelled)
        if runs[-1].is_unfinished and not cancelled.is_set():
            runs[-1].fail(Reason.TIMEOUT, f"the small object has no end within {_seconds(load.timeout_ns)}")
    if not any(run.failures for run in runs) and not cancelled.is_set() and (target.large or not target.small):
        runs.append(_Run(way, target.large, load=load, clock=clock))
        runs[-1].run(cancelled)
    return replace(_combined(target, runs), resolve_ns=way.resolve_ns)


@dataclass(frozen=True, slots=True)
class _Way:
    """All that the connections of a measurement share."""

    target: Target
    addresses: tuple[connection.Address, ...]
    resolve_ns: int
    trust: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...]

    def request(self, path: str) -> Request:
        target = self.target
        is_grpc = target.protocol is Protocol.GRPC
        return Request(
            authority=target.authority,
            path=path,
            scheme="https" if target.security is Security.TLS else "http",
            method=Method.GRPC if is_grpc else Method.GET,
            headers=self.headers,
            body=grpc_message(target.resource) if is_grpc else b"",
            expected=target.expected_status,
        )


def _prepare(target: Target, load: Load, *, resolver: connection.Resolver, clock: Clock) -> _Way:
    headers = headers_of(target)
    trust = connection.trust(target.ca_file, target.protocol.alpn) if target.security is Security.TLS else None
    goes_to = target.connect_to
    host, port = (goes_to.host, goes_to.port) if goes_to else (target.host, target.port)
    began_ns = clock.now_ns()
    addresses = resolver.addresses(host, port, family=target.family, timeout_s=load.timeout_ns / _SECOND_NS)
    return _Way(target, addresses, clock.now_ns() - began_ns, trust, headers)


class _Run:
    """One object asked for over as many connections as the load says."""

    def __init__(self, way: _Way, path: str, *, load: Load, clock: Clock) -> None:
        self._load, self._clock = load, clock
        self.progress = Progress(load.streams, clock=clock, size_bytes=load.size_bytes)
        self.lines: list[_Line] = []
        first = 0
        for streams in load.streams_of(way.target.protocol):
            meters = self.progress.meters[first : first + streams]
            self.lines.append(_Line(way, way.request(path), meters=meters, clock=clock, timeout_ns=load.timeout_ns))
            first += streams
        self.is_unfinished = False
        self._more_failures: list[Failure] = []

    def run(self, cancelled: threading.Event) -> None:
        """Read until all is read, or the time is over."""
        progress = self.progress
        try:
            for line in self.lines:
                line.start()
            while not progress.is_over and not cancelled.is_set() and not self._is_time_over():
                progress.changed.wait(_TICK_S)
                progress.changed.clear()
                for line in self.lines:
                    line.look_at_the_clock()
        except RuntimeError as error:  # no more threads
            self.fail(Reason.LOCAL, f"this machine could not try: {error}")
        finally:
            progress.close()
            self.is_unfinished = not progress.is_over
            for line in self.lines:
                line.cut()
            # All of them are at their end but for one that still connects, which has its own.
            patience_s = time.monotonic() + _JOIN_S
            for line in self.lines:
                line.join(max(patience_s - time.monotonic(), 0))

    def fail(self, reason: Reason, detail: str) -> None:
        """Add what went wrong with all of it."""
        self._more_failures.append(Failure(reason, detail))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Why streams failed, each reason once, in the words of the first."""
        found: dict[Reason, Failure] = {}
        for failure in (*(meter.failure for meter in self.progress.meters), *self._more_failures):
            if failure is not None:
                before = found.get(failure.reason)
                found[failure.reason] = replace(before, count=before.count + 1) if before else failure
        return tuple(found.values())

    def _is_time_over(self) -> bool:
        progress, now_ns = self.progress, self._clock.now_ns()
        if progress.start is not None:
            return now_ns - progress.start.at_ns >= self._load.duration_ns
        # Some streams are through or flow, and others have not begun: they get their time to.
        first_ns = progress.first_flow_ns
        return first_ns is not None and now_ns - first_ns >= self._load.duration_ns + self._load.timeout_ns


class _Line:
    """One connection and the thread that reads it; a further one when the other side wants that."""

    def __init__(self, way: _Way, request: Request, *, meters: Sequence[Meter], clock: Clock, timeout_ns: int) -> None:
        self._way, self._request, self._meters, self._clock = way, request, meters, clock
        self._timeout_ns = timeout_ns
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._phase, self._since_ns = Phase.CONNECTING, clock.now_ns()
        self._is_cut = False
        self._cut_for: Failure | None = None
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self.address = ""
        self.spoken = ""
        self.connect_ns: int | None = None
        self.handshake_ns: int | None = None
        self.certificate_ends_at_s: int | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def cut(self, failure: Failure | None = None) -> None:
        """End the connection, for a reason or because it is time."""
        with self._lock:
            if self._is_cut:
                return
            self._is_cut, self._cut_for = True, failure
            if self._peer is not None:
                connection.cut(self._peer)

    def look_at_the_clock(self) -> None:
        """Cut what has been silent for too long."""
        now_ns, limit = self._clock.now_ns(), _seconds(self._timeout_ns)
        if self._phase is Phase.SECURING and now_ns - self._since_ns > self._timeout_ns:
            self.cut(Failure(Reason.HANDSHAKE, f"silent for {limit} before TLS was up"))
        if self._phase is not Phase.READING:
            return
        for meter in self._meters:
            if not meter.is_over and now_ns - max(meter.last_ns, self._since_ns) > self._timeout_ns:
                words = f"no byte for {limit}" if meter.flows else f"no byte of an answer within {limit}"
                meter.finish(Failure(Reason.STALL if meter.flows else Reason.TIMEOUT, words))
        if all(meter.is_over for meter in self._meters):
            self.cut()

    def _run(self) -> None:
        failure = None
        try:
            while not self._is_cut and any(meter.wants_more for meter in self._meters):
                self._connect_and_read()
        except ClientError as error:
            failure = error.failure
        except Exception as error:
            # Whoever waits for these streams must hear of their end.
            _LOG.exception("stream_failed")
            failure = Failure(Reason.LOCAL, f"a fault of the probe itself, see its log: {type(error).__name__}")
        with self._lock:
            failure = self._cut_for if self._is_cut else failure
        for meter in self._meters:
            meter.finish(failure)

    def _connect_and_read(self) -> None:
        began_ns, is_first = self._enter(Phase.CONNECTING), self.connect_ns is None
        peer, address = connection.connect(self._way.addresses, timeout_s=self._timeout_ns / _SECOND_NS)
        try:
            self._adopt(peer)
            if is_first:
                self.address, self.connect_ns = str(address), self._clock.now_ns() - began_ns
            spoken = ""
            if self._way.trust is not None:
                peer = connection.secure(peer, self._way.trust, self._way.target.server_name)
                self._adopt(peer)
                spoken = self._shake_hands(peer)
            self._enter(Phase.READING)
            self._read(peer, spoken)
        finally:
            with self._lock:
                self._peer = None
            peer.close()

    def _adopt(self, peer: socket.socket) -> None:
        """From now on this is what a cut ends."""
        with self._lock:
            self._peer = peer
            if self._is_cut:
                connection.cut(peer)

    def _shake_hands(self, peer: ssl.SSLSocket) -> str:
        began_ns, is_first = self._enter(Phase.SECURING), self.handshake_ns is None
        connection.shake_hands(peer)
        if is_first:
            self.handshake_ns = self._clock.now_ns() - began_ns
            self.certificate_ends_at_s = connection.ends_at_s(peer)
        return connection.require_alpn(peer, self._way.target.protocol.alpn)

    def _read(self, peer: socket.socket, agreed: str) -> None:
        match self._way.target.protocol:
            case Protocol.TCP:
                self.spoken = "tls" if self._way.trust else "tcp"
                for meter in self._meters:
                    meter.finish()
            case Protocol.HTTP2 | Protocol.GRPC:
                self.spoken = "h2"
                read_http2(peer, self._request, self._meters)
            case Protocol.AUTO if agreed == "h2":
                self.spoken = "h2"
                read_http2(peer, self._request, self._meters)
            case _:
                self.spoken = "http/1.1"
                (meter,) = self._meters
                read_http1(peer, self._request, meter)

    def _enter(self, phase: Phase) -> int:
        self._since_ns = self._clock.now_ns()
        self._phase = phase
        return self._since_ns


def _combined(target: Target, runs: Sequence[_Run]) -> Measured:
    """Return one result: times of the first run, which had the way to itself, and the rate of the last."""
    if not runs:
        return Measured(target=target)
    first, last = runs[0], runs[-1]
    statuses = [meter for run in reversed(runs) for meter in run.progress.meters if meter.status is not None]
    reads_large = last is not first or not target.small
    rate, window_ns, busy_percent = last.progress.rate() if reads_large else (None, 0, 0)
    first_bytes = [meter.first_byte_ns for meter in first.progress.meters]
    all_first_bytes = [meter.first_byte_ns for run in runs for meter in run.progress.meters]
    lines = [line for run in runs for line in run.lines]
    return Measured(
        target=target,
        address=next((line.address for line in lines if line.address), ""),
        spoken=next((line.spoken for line in lines if line.spoken), ""),
        status=statuses[0].status if statuses else None,
        grpc_status=next((meter.grpc_status for meter in statuses if meter.grpc_status is not None), None),
        connect_ns=_median(line.connect_ns for line in first.lines),
        handshake_ns=_median(line.handshake_ns for line in first.lines),
        first_byte_ns=_median(first_bytes),
        first_byte_max_ns=max((each for each in all_first_bytes if each is not None), default=None),
        certificate_ends_at_s=min((each for line in lines if (each := line.certificate_ends_at_s)), default=None),
        streams=sum(meter.flows for meter in last.progress.meters),
        received_bytes=sum(run.progress.received_bytes for run in runs),
        rate=rate,
        window_ns=window_ns,
        busy_percent=busy_percent,
        failures=tuple(failure for run in runs for failure in run.failures),
    )


def _median(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / _SECOND_NS:g} s"
