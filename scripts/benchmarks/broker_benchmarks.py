"""What a broker and a router take for each byte and each event, beside relays that do less, in the same run.

What is measured is the processor time of one process, so it counts little what else the machine does; latencies
count it, and the relay beside it says how much. The receiver is not our router: see `far_end`.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trustme
from measurement import Measurement, SkippedError, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from far_end import FarEnd, Flow

_HERE = Path(__file__).parent
_AHEAD_ALONE, _AHEAD_EACH = 512 * 1024, 64 * 1024
_WARM_S, _MEASURED_S, _RUNS = 0.5, 2.0, 3
_MESSAGE_BYTES, _MESSAGES_A_SECOND, _SMALL_S = 200, 10_000, 3.0
_STREAMS, _STALLED_BYTES = 256, 700 * 1024
_EVENTS, _EVENTS_A_SECOND, _PAYLOAD = 15_000, 4_000, bytes(1_000)
_START_S = 30.0
_SHOWN = {"broker": "broker", "tls": "TLS-only relay", "tcp": "plain TCP relay"}


@dataclass(slots=True)
class Running:
    """A relay that runs, and both of its far ends."""

    kind: str
    far_end: FarEnd
    pid: int

    @property
    def flows(self) -> Sequence[Flow]:
        """Its streams."""
        return tuple(self.far_end.flows.values())


@contextmanager
def running(kind: str, streams: int, *, granted: Callable[[int], bool] | None = None) -> Iterator[Running]:
    """Run a relay with so many streams. Raises SkippedError when it does not begin."""
    from far_end import FarEnd

    with tempfile.TemporaryDirectory(prefix="kura-shaper-bench-") as name:
        scratch = Path(name)
        far_end = FarEnd(server_context(scratch, kind), is_bus=kind == "broker", granted=granted)
        told = {"sink": far_end.sink_port, "publisher": far_end.publisher_port, "streams": streams, **files(scratch)}
        try:
            with child(kind, told) as process:
                begin(far_end, kind, streams)
                yield Running(kind, far_end, process.pid)
        except TimeoutError as error:
            raise SkippedError(f"the {_SHOWN[kind]} does not begin") from error
        finally:
            far_end.close()


def begin(far_end: FarEnd, kind: str, streams: int) -> None:
    """Return when all streams are there."""
    if kind == "broker":
        far_end.until(lambda: far_end.bus is not None and far_end.bus.is_welcomed)
        assert far_end.bus is not None
        far_end.bus.subscribe(streams, f"tcp://127.0.0.1:{far_end.publisher_port}")
    far_end.until(lambda: len(far_end.flows) == streams)


@contextmanager
def child(kind: str, told: dict[str, object]) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the programs of `relays.py`, which ends with its standard input: with this process at the latest."""
    line = [sys.executable, str(_HERE / "relays.py"), kind, json.dumps(told)]
    environment = os.environ | {"PYTHONPATH": str(_HERE.parents[1])}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def files(scratch: Path) -> dict[str, object]:
    """Return the files that a program is told of."""
    return {"ca": str(scratch / "ca.pem"), "token_file": str(scratch / "token")}


def server_context(scratch: Path, kind: str) -> ssl.SSLContext | None:
    """Return what a receiver serves with, and leave an authority and a token in files."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(scratch / "ca.pem")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    (scratch / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(scratch / "tls.key")
    (scratch / "token").write_text("bench")
    if kind == "tcp":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    if kind == "broker":
        context.set_alpn_protocols(["h2"])
    return context


def processor_s(pid: int) -> float:
    """Return the seconds of a processor that all threads of a process have had."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


# Bytes.


def seconds_a_gigabyte(kind: str, streams: int) -> float:
    """Return how much of a processor a relay takes for 10^9 bytes."""
    ahead_bytes = _AHEAD_ALONE if streams == 1 else _AHEAD_EACH
    with running(kind, streams) as relay:
        relay.far_end.pump(_WARM_S, ahead_bytes=ahead_bytes, flows=relay.flows)
        before_s = processor_s(relay.pid)
        received = relay.far_end.pump(_MEASURED_S, ahead_bytes=ahead_bytes, flows=relay.flows)
        if any(flow.is_broken for flow in relay.flows):
            raise SkippedError("a stream was broken off")
        return (processor_s(relay.pid) - before_s) / received * 1e9


def relaying(name: str, streams: int) -> Iterator[Measurement]:
    """Bytes from publishers to the router, as large as they come."""
    least = dict.fromkeys(_SHOWN, float("inf"))
    for run in range(_RUNS):
        for kind in _SHOWN:
            progress(f"{name}: run {run + 1} of {_RUNS}, {_SHOWN[kind]}")
            least[kind] = min(least[kind], seconds_a_gigabyte(kind, streams))
    rates = {kind: 1_000 / seconds for kind, seconds in least.items()}
    words = f"{rates['broker']:.0f} MB per CPU-second"
    for kind in ("tls", "tcp"):
        note = f"{words}, the peer {rates[kind]:.0f}: {rates['broker'] / rates[kind]:.0%} of it"
        yield Measurement(name, least["broker"], least[kind], _SHOWN[kind], "CPU s/GB", note)


# Latency.


def percentile_ms(values: Sequence[float], percent: int) -> float:
    """Return a percentile of seconds, in milliseconds."""
    return statistics.quantiles(values, n=100)[percent - 1] * 1_000


def latencies(kind: str, *, stalled: int = 0) -> list[float]:
    """Return the seconds that small messages take over 256 streams, of which some take nothing any more."""
    with running(kind, _STREAMS, granted=lambda number: number >= stalled) as relay:
        far_end, flows = relay.far_end, relay.flows
        far_end.pump(0.1, ahead_bytes=1, flows=flows)
        if stalled and far_end.bus is not None:
            bus = far_end.bus
            far_end.until(lambda: len(bus.stuck) == stalled)
            fill(bus.stuck)
            flows = [flow for flow in flows if flow not in bus.stuck]
        far_end.until(lambda: all(flow.received == flow.sent for flow in flows))
        far_end.message_bytes = _MESSAGE_BYTES
        far_end.send_at(_MESSAGES_A_SECOND, _WARM_S, flows=flows)
        far_end.unmeasured()
        found = far_end.send_at(_MESSAGES_A_SECOND, _SMALL_S, flows=flows)
        if stalled and any(flow.is_broken for flow in relay.flows):
            raise SkippedError("the stream that was to stall was broken off")
        return found


def fill(stuck: Sequence[Flow]) -> None:
    """Send on streams that are granted nothing, as much as nearly fills what a broker keeps of each."""
    for flow in stuck:
        flow.publisher.settimeout(None)
        flow.publisher.sendall(bytes(_STALLED_BYTES))


def best_ms(name: str, *contenders: Callable[[], list[float]]) -> list[float]:
    """Return the least 99th percentile of each contender, in milliseconds."""
    least = [float("inf")] * len(contenders)
    for run in range(_RUNS):
        for number, contender in enumerate(contenders):
            progress(f"{name}: run {run + 1} of {_RUNS}, contender {number + 1} of {len(contenders)}")
            least[number] = min(least[number], percentile_ms(contender(), 99))
    return least


def small() -> Iterator[Measurement]:
    """Small messages, 10,000 a second over 256 streams."""
    ours, tcp = best_ms("broker-small", lambda: latencies("broker"), lambda: latencies("tcp"))
    note = f"99th percentile of {_MESSAGE_BYTES} bytes, 10,000/s over 256 streams; {ours - tcp:.2f} ms added"
    yield Measurement("broker-small", ours, tcp, "plain TCP relay", "ms", note)


def stalled() -> Iterator[Measurement]:
    """The same, with one stream that the router grants nothing, and whose queue is nearly full."""
    ours, without = best_ms("broker-stalled", lambda: latencies("broker", stalled=1), lambda: latencies("broker"))
    note = f"99th percentile of the other 255 streams; {ours - without:.2f} ms added"
    yield Measurement("broker-stalled", ours, without, "broker, no stream stalled", "ms", note)


# The router.


def receiving() -> Iterator[Measurement]:
    """Events to the router through a broker, beside a subscriber of libzmq that reads them directly, without TLS."""
    import zmq

    from kura_shaper.broker.router.dynamo import Event, encode_event

    with tempfile.TemporaryDirectory(prefix="kura-shaper-bench-") as name, zmq.Context() as context:
        scratch = Path(name)
        server_context(scratch, "router")
        with context.socket(zmq.XPUB) as publisher:
            publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
            publisher.setsockopt(zmq.SNDHWM, 100_000)
            publisher.linger = 0
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            sink = free_port()
            told = {"sink": sink, "publisher": port, **files(scratch), "scratch": name}
            with child("router", told) as router, child("broker", told), child("subscriber", told) as subscriber:
                for _ in range(2):
                    if not publisher.poll(int(_START_S * 1_000)):
                        raise SkippedError("nobody subscribes")
                    publisher.recv()
                progress("router-receive")
                events = [encode_event(Event("kv-events", 1, number, 0, _PAYLOAD)) for number in range(_EVENTS)]
                before = [processor_s(each.pid) for each in (router, subscriber)]
                start = time.monotonic()
                for number, parts in enumerate(events):
                    publisher.send_multipart(parts)
                    if number % 40 == 0:
                        time.sleep(max(0.0, start + number / _EVENTS_A_SECOND - time.monotonic()))
                time.sleep(1.0)
                spent = [processor_s(each.pid) - was for each, was in zip((router, subscriber), before, strict=True)]
                require_all(router, subscriber)
    ours, theirs = (each / _EVENTS * 1e6 for each in spent)
    note = f"1 kB events at {_EVENTS_A_SECOND}/s; ours ends TLS, HTTP/2 and ZMTP and counts gaps"
    yield Measurement("router-receive", ours, theirs, "pyzmq SUB, direct, no TLS", "CPU us/event", note)


def require_all(*readers: subprocess.Popen[bytes]) -> None:
    """Raise SkippedError unless each of them has read every event."""
    for reader in readers:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.close()
        read = int(reader.stdout.readline() or 0)
        if read != _EVENTS:
            raise SkippedError(f"{read} of {_EVENTS} events were read")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    "broker-relay": lambda: relaying("broker-relay", 1),
    "broker-relay-256": lambda: relaying("broker-relay-256", _STREAMS),
    "broker-stalled": stalled,
    "broker-small": small,
    "router-receive": receiving,
}
