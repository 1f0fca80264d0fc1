"""top: a device's tenants, live on a terminal, as lines elsewhere."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kura_shaper.cli import options, show
from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.kernel.links import read_device
from kura_shaper.tenants.file import load_tenants
from kura_shaper.top.as_json import to_json
from kura_shaper.top.lines import Lines
from kura_shaper.top.order import Order
from kura_shaper.top.reading import State
from kura_shaper.top.tracker import Tracker
from kura_shaper.top.watch import DeviceWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.top.frame import Frame

_LEAVE = frozenset({signal.SIGTERM, signal.SIGINT})

NamesFrom = Annotated[
    Path | None,
    typer.Option("--tenants", metavar="F", help="Names for the class ids.", envvar="KURA_SHAPER_TENANTS"),
]
Interval = Annotated[
    float, typer.Option("--interval", metavar="S", min=0.1, max=3600, help="Seconds between readings.")
]
Count = Annotated[
    int | None, typer.Option("--count", metavar="N", min=1, help="So many readings as lines, then leave.")
]
Once = Annotated[bool, typer.Option("--once", help="The same as --count 1.")]
Plain = Annotated[bool, typer.Option("--plain", help="Lines, also on a terminal.")]
Sort = Annotated[Order, typer.Option("--sort", help="What comes first; keys change it in the live view.")]
Filter = Annotated[str, typer.Option("--filter", metavar="TEXT", help="Only names and class ids with this in them.")]


def register(app: typer.Typer) -> None:
    """Add this command."""
    epilog = "Example: kura-shaper top --device eth0 --tenants tenants.yaml   (? in the view shows its keys)"
    app.command("top", epilog=epilog)(top)


def top(
    device: options.DeviceName,
    tenants: NamesFrom = None,
    interval_s: Interval = 1.0,
    count: Count = None,
    once: Once = False,
    plain: Plain = False,
    sort: Sort = Order.RATE,
    only: Filter = "",
    as_json: options.AsJson = False,
) -> None:
    """Show tenants by rate: floor, ceiling, what is borrowed, dropped and sent again; and the node's budget.

    Live on a terminal, as plain lines elsewhere. Nothing of the device is changed; while it runs, a program
    in the kernel counts retransmits where privileges allow it. --json takes two readings and prints what
    happened between them. 1: no tree of ours, with --json, --once and --count.
    """
    if as_json and (count or 1) > 1:
        raise UsageError("--json prints one object", remedy="leave out --count, or ask again and again")
    document = load_tenants(tenants) if tenants else None
    read_device(device)
    tracker, interval_ns = Tracker(device, document), int(interval_s * 1e9)
    is_live = not (as_json or once or count or plain) and is_terminal()
    if is_live and find_spec("textual") is None:
        remedy = "pip install 'kura-shaper[top]', or use --plain"
        raise UsageError("the live view needs textual, which is not installed", remedy=remedy)
    with DeviceWatch(device, clock=SystemClock()) as watch:
        if is_live:
            from kura_shaper.top.screen import run_screen

            run_screen(watch, tracker, clock=SystemClock(), interval_ns=interval_ns, order=sort, wanted=only)
            return
        readings = 1 if as_json or once else count
        loop = _frames(watch, tracker, interval_ns=interval_ns)
        if as_json:
            frame = next(loop, None)
            raise typer.Exit(_print_json(frame, watch, order=sort, wanted=only) if frame else 128 + signal.SIGINT)
        raise typer.Exit(_print_lines(loop, watch, Lines(order=sort, wanted=only), interval_ns, readings))


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _frames(watch: DeviceWatch, tracker: Tracker, *, interval_ns: int) -> Iterator[Frame]:
    """Yield a frame after each interval until a signal; the first reading only begins the first of them."""
    # A signal ends the wait for the next reading, and never a reading.
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE)
    clock = SystemClock()
    due_ns = clock.now_ns()
    tracker.take(watch.read())
    while True:
        due_ns = max(due_ns + interval_ns, clock.now_ns())
        if signal.sigtimedwait(_LEAVE, max(0, due_ns - clock.now_ns()) / 1e9):
            return
        yield tracker.take(watch.read())


def _print_json(frame: Frame, watch: DeviceWatch, *, order: Order, wanted: str) -> int:
    if frame.state is State.UNKNOWN:
        raise StateUnknownError(frame.reason)
    found = to_json(frame, SystemClock().now_ns(), order=order, wanted=wanted)
    show.print_json(found | {"retransmits_note": watch.retransmits_note})
    return 0 if frame.state is State.TREE else 1


def _print_lines(
    loop: Iterator[Frame], watch: DeviceWatch, lines: Lines, interval_ns: int, readings: int | None
) -> int:
    clock, noted, state = SystemClock(), "", State.TREE
    for number, frame in enumerate(loop, start=1):
        if watch.retransmits_note != noted:
            noted = watch.retransmits_note
            typer.echo(f"kura-shaper: note: {noted}", err=True)
        text = "\n".join(lines.of(frame, clock.now_ns(), interval_ns=interval_ns))
        state = frame.state
        if not show.say(text) or number == readings:
            break
    if readings is None:
        return 0
    if state is State.UNKNOWN:
        return StateUnknownError.exit_code
    return 0 if state is State.TREE else 1
