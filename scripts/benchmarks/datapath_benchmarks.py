"""What the bytes themselves pay: our trees beside one that an operator makes with tc, in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_benchmarks import require_privilege
from measurement import Measurement, SkippedError, progress, require

from kura_shaper.bench.cases import BenchSettings, run_bench
from kura_shaper.bench.load import MTU_FRAME_BYTES, Packets
from kura_shaper.bench.stage import BY_HAND, Form
from kura_shaper.errors import KuraShaperError
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kura_shaper.bench.points import Point

# Low enough that the timer that HTB sets for each packet does not fill a processor: above that, what a
# Gbit costs is whatever time there is.
RATE, RUNS, DURATION_MS, TENANTS, STREAMS = Rate.parse("100M"), 3, 500, 20, 8
OURS = (Form("single", ShapeChoice.SINGLE), Form("mq", ShapeChoice.MQ))


def datapath() -> Iterator[Measurement]:
    """CPU seconds for a Gbit of full frames, held to a rate, and at what one processor carries."""
    require_privilege()
    require("tc")
    points = [point for run in range(1, RUNS + 1) for point in measure(run)]
    for form in OURS:
        for what, is_held in ((f"held to {RATE}bit/s", True), ("no limit, one sender", False)):
            mine, theirs = (least(points, name, is_held=is_held) for name in (form.name, BY_HAND))
            if mine is not None and theirs is not None:
                note = f"{form.name}, frames of {MTU_FRAME_BYTES} bytes, {what}; the least of {RUNS} runs"
                yield Measurement("datapath", mine, theirs, "htb made with tc", "CPU s/Gbit", note)


def measure(run: int) -> tuple[Point, ...]:
    """Return the points of one run of all forms."""
    settings = BenchSettings(
        RATE, OURS, TENANTS, STREAMS, DURATION_MS, packets=(Packets(MTU_FRAME_BYTES),), peers=(Form(BY_HAND),)
    )
    tell: Callable[[str], None] = lambda text: progress(f"datapath: run {run} of {RUNS}, {text}")  # noqa: E731
    try:
        report = run_bench(settings, tell=tell)
    except KuraShaperError as error:
        raise SkippedError(str(error)) from error
    return report.points


def least(points: list[Point], form: str, *, is_held: bool) -> float | None:
    """Return the least that a Gbit cost, None when the form could not be had."""
    costs = [
        point.cpu_seconds_per_gbit
        for point in points
        if point.form == form and (point.limit is not None) is is_held and (is_held or point.senders == 1)
    ]
    return min(costs, default=None)


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {"datapath": datapath}
