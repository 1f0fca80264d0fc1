"""What is measured: every form under every load, held to the rate and without a limit, one after the other.

Held to the rate: how exact a tree is and what it costs there. Without a limit: the most packets that
it carries, from one sender and from all at once, which contend for its lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kura_shaper.bench.answer import QUIET_PERMILLE
from kura_shaper.bench.load import FRAME_BYTES_MAX, FRAME_BYTES_MIN, MTU_FRAME_BYTES, Packets, Senders, SenderSpec
from kura_shaper.bench.meter import DeviceMeter, Reading, read_cpu, root_drops
from kura_shaper.bench.points import Machine, MadeOf, Point, Report, windows_of
from kura_shaper.bench.stage import (
    BY_HAND,
    DEFAULT,
    FAR_ADDRESS,
    PLAIN,
    TX_QUEUES,
    Form,
    Promise,
    fresh_device,
    namespaces,
    put,
)
from kura_shaper.clock import SystemClock
from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.kernel.probe import probe
from kura_shaper.tenants.marks import TENANT_CLASS_MAX, TENANT_CLASS_MIN
from kura_shaper.tree import params
from kura_shaper.tree.build import ShapeChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kura_shaper.tree.model import Device
    from kura_shaper.units import Rate

_SHAPES_EXAMPLE, _FRAMES_EXAMPLE = "single,mq,mq:2", "64,1514,65536"
_PEERS = (Form(PLAIN), Form(DEFAULT), Form(BY_HAND))
_SHAPE = re.compile(r"(single)|mq(?::([1-9][0-9]?))?")
_WINDOW_NS, _SETTLE_NS = 100_000_000, 250_000_000
_SENDERS_MAX = 8
_DURATION_MS = (200, 60_000)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What a run measures. forms are ours, without those that they are compared with."""

    rate: Rate
    forms: tuple[Form, ...]
    tenants: int
    streams: int
    duration_ms: int
    packets: tuple[Packets, ...]
    peers: tuple[Form, ...] = _PEERS


@dataclass(frozen=True, slots=True)
class Case:
    """One point to measure."""

    form: Form
    packets: Packets
    senders: int
    limit: Rate | None

    def __str__(self) -> str:
        held = f"held to {self.limit}" if self.limit else "no limit"
        return f"{self.form.name}: {self.packets}, {held}"


def bench_settings(
    *, rate: Rate, shapes: str, tenants: int, streams: int, duration_s: float, packet_bytes: str
) -> BenchSettings:
    """Return the settings that options name. Raises UsageError for what can't be measured."""
    if not 1_000_000 <= rate.bits_per_second <= params.LINE_RATE.bits_per_second:
        raise UsageError(f"--rate {rate}: nothing to measure", remedy=f"choose 1M to {params.LINE_RATE}, in bit/s")
    most = TENANT_CLASS_MAX - TENANT_CLASS_MIN
    if not 1 <= tenants <= most:
        raise UsageError(f"--tenants {tenants} can't be had", remedy=f"choose 1 to {most}")
    if not 1 <= streams <= 1_000:
        raise UsageError(f"--streams {streams} can't be had", remedy="choose 1 to 1000")
    duration_ms = round(duration_s * 1_000) if abs(duration_s) < 10**6 else 0
    if not _DURATION_MS[0] <= duration_ms <= _DURATION_MS[1]:
        raise UsageError(f"--duration {duration_s:g} can't be had", remedy="choose 0.2 to 60 seconds")
    return BenchSettings(rate, _forms(shapes), tenants, streams, duration_ms, _packets(packet_bytes))


def _forms(text: str) -> tuple[Form, ...]:
    forms = []
    for word in dict.fromkeys(part.strip() for part in text.split(",")):
        match = _SHAPE.fullmatch(word)
        queues = int(match[2] or 1) if match else 0
        if match is None or queues > TX_QUEUES:
            remedy = f"choose single, mq, or mq:N with N up to {TX_QUEUES}, e.g. {_SHAPES_EXAMPLE}"
            raise UsageError(f"--shapes: no shape {word!r}", remedy=remedy)
        name = "single" if match[1] else "mq" if queues == 1 else f"mq:{queues}"
        forms.append(Form(name, ShapeChoice.SINGLE if match[1] else ShapeChoice.MQ, queues))
    return tuple(dict.fromkeys(forms))


def _packets(text: str) -> tuple[Packets, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isascii() and size.isdecimal() and len(size) < 6 for size in sizes):
        raise UsageError(f"--packet-bytes {text!r} is no list of sizes", remedy=f"write e.g. {_FRAMES_EXAMPLE}")
    if not all(FRAME_BYTES_MIN <= int(size) <= FRAME_BYTES_MAX for size in sizes):
        remedy = f"choose {FRAME_BYTES_MIN} to {FRAME_BYTES_MAX}; above {MTU_FRAME_BYTES} is sent as GSO"
        raise UsageError(f"--packet-bytes {text!r} can't be sent", remedy=remedy)
    return tuple(Packets(size) for size in sorted({int(size) for size in sizes}))


def cases(settings: BenchSettings, *, many: int) -> tuple[Case, ...]:
    """Return every point of a run in order: those of a form with the same limit side by side."""
    return tuple(
        case
        for form in (*settings.peers, *settings.forms)
        for limit in ((settings.rate, None) if form.has_limit else (None,))
        for case in _cases_of(form, limit, settings.packets, many=many)
    )


def expected_points(settings: BenchSettings) -> int:
    """Return how many points a run has, when nothing is left out."""
    return len(cases(settings, many=2))


def _cases_of(form: Form, limit: Rate | None, packets: Sequence[Packets], *, many: int) -> Iterator[Case]:
    smallest = min(packets, key=lambda each: each.frame_bytes)
    for each in packets:
        # So many packets smaller than a frame make no such rate, and nobody sends them at it.
        if limit is None or each.frame_bytes >= MTU_FRAME_BYTES or len(packets) == 1:
            yield Case(form, each, many, limit)
    if limit is None:
        yield Case(form, smallest, 1, limit)


def many_senders(cpus: int) -> int:
    """Return how many senders push at once: a CPU is left to the rest where there are some."""
    return min(_SENDERS_MAX, max(2, cpus - 1))


def run_bench(settings: BenchSettings, *, tell: Callable[[str], None]) -> Report:
    """Measure all of it. tell is called with each point ahead of it.

    Raises KernelRefusedError without privilege, RefusedError when none of our shapes can be had.
    """
    cpus = sorted(os.sched_getaffinity(0))
    many = many_senders(len(cpus))
    made_of: dict[str, MadeOf] = {}
    points: list[Point] = []

    def measure(case: Case, device: Device, promise: Promise) -> Point:
        return _measure(case, device, _specs(case, settings, promise, cpus), duration_ms=settings.duration_ms)

    with namespaces() as far:
        capabilities = probe()
        todo = cases(settings, many=many)
        patience = _Patience(len(todo) // 2)
        for form, limit in dict.fromkeys((case.form, case.limit) for case in todo):
            of_form = [case for case in todo if (case.form, case.limit) == (form, limit)]
            tell(str(of_form[0]))
            promise = Promise(settings.tenants, limit)
            try:
                with fresh_device(far) as device:
                    words = put(form, device, promise, capabilities=capabilities, clock=SystemClock())
                    made_of[form.name] = MadeOf(form.name, words, is_measured=True)
                    for number, case in enumerate(of_form):
                        if number:
                            tell(str(case))
                        points.append(patience.least_disturbed(partial(measure, case, device, promise)))
            except (RefusedError, UsageError) as error:
                made_of[form.name] = MadeOf(form.name, str(error), is_measured=False)
    _check_any(settings, made_of)
    mtu, gso = Packets(MTU_FRAME_BYTES), Packets(FRAME_BYTES_MAX)
    return Report(
        rate=settings.rate,
        tenants=settings.tenants,
        streams=settings.streams,
        duration_ms=settings.duration_ms,
        machine=Machine.here(cpus=len(cpus), many=many),
        mtu_bytes=mtu.wire_bytes,
        gso_bytes=gso.wire_bytes,
        made_of=tuple(made_of.values()),
        points=tuple(points),
    )


def _check_any(settings: BenchSettings, made_of: dict[str, MadeOf]) -> None:
    ours = [made_of[form.name] for form in settings.forms]
    if ours and not any(made.is_measured for made in ours):
        raise RefusedError("; ".join(f"{made.form} can't be measured: {made.words}" for made in ours))


def _specs(case: Case, settings: BenchSettings, promise: Promise, cpus: Sequence[int]) -> list[SenderSpec]:
    """Return the senders of a case. Neighbouring streams are one sender's, so each sends to several queues."""
    marks = promise.marks
    streams = max(settings.streams, case.senders) if case.senders > 1 else 1
    shares = [range(n * streams // case.senders, (n + 1) * streams // case.senders) for n in range(case.senders)]
    return [
        SenderSpec(
            address=FAR_ADDRESS,
            marks=tuple(marks[stream % len(marks)] for stream in share),
            frame_bytes=case.packets.frame_bytes,
            cpu=cpus[number % len(cpus)],
            parent=os.getpid(),
        )
        for number, share in enumerate(shares)
    ]


class _Patience:
    """Measures again what other processes disturbed, so many times in all."""

    def __init__(self, tries: int) -> None:
        self._tries = tries

    def least_disturbed(self, measure: Callable[[], Point]) -> Point:
        """Return the best of at most three tries."""
        best = measure()
        for _ in range(2):
            if best.others_permille <= QUIET_PERMILLE or not self._tries:
                break
            self._tries -= 1
            best = min(best, measure(), key=lambda point: point.others_permille)
        return best


def _measure(case: Case, device: Device, specs: Sequence[SenderSpec], *, duration_ms: int) -> Point:
    """Raises StateUnknownError when a sender ends before its time."""
    clock = SystemClock()
    with DeviceMeter(device.ifindex) as meter, Senders(specs) as senders, _first_in_line():
        senders.wait_until_ready()
        clock.wait_ns(_SETTLE_NS)
        drops = root_drops(device.ifindex)
        cpu = read_cpu(senders.pids)
        readings = [meter.read()]
        while readings[-1].at_ns < readings[0].at_ns + duration_ms * 1_000_000:
            clock.wait_ns(_WINDOW_NS)
            readings.append(meter.read())
        use = read_cpu(senders.pids).since(cpu)
        dropped = root_drops(device.ifindex) - drops
        if not senders.are_alive:
            raise StateUnknownError(f"{case}: a sender ended before its time")
    return _point(case, readings, use.load_ns, use.others_permille, dropped)


def _point(case: Case, readings: Sequence[Reading], load_ns: int, others_permille: int, dropped: int) -> Point:
    first, last = readings[0], readings[-1]
    # A device counts a large buffer as one packet with one header; on the wire each of its frames has its own.
    unseen = (
        (case.packets.segments - 1) * (case.packets.wire_bytes - case.packets.payload_bytes) // case.packets.segments
    )
    counted = [(reading.at_ns, reading.sent_bytes + reading.sent_packets * unseen) for reading in readings]
    return Point(
        form=case.form.name,
        load=str(case.packets),
        wire_bytes=case.packets.wire_bytes,
        segments=case.packets.segments,
        senders=case.senders,
        limit=case.limit,
        packets=last.sent_packets - first.sent_packets,
        windows=windows_of(counted),
        load_ns=load_ns,
        others_permille=others_permille,
        dropped_packets=dropped + last.dropped_packets - first.dropped_packets,
    )


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """Let this thread run ahead of the senders, which compete with it for the CPUs, for the length of the block."""
    thread, former = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, -15)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, former)
