"""bench: what each shape costs on this machine, before one is chosen."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table

from kura_shaper.cli import options, show
from kura_shaper.cli.report import PointProgress, open_page
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from kura_shaper.bench.points import Report

_DEFAULT_SHAPES, _DEFAULT_FRAMES = "single,mq,mq:2", "64,1514,65536"


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: kura-shaper bench --rate 3G --html bench.html   (as root; leaves nothing behind)"
    app.command("bench", epilog=epilog)(bench)


def bench(
    rate: Annotated[str, typer.Option("--rate", metavar="R", help="The rate in question, bit/s, e.g. 3G.")],
    shapes: Annotated[
        str, typer.Option("--shapes", metavar="S,S", help="Shapes to measure; mq:N shapes N tx queues.")
    ] = _DEFAULT_SHAPES,
    tenants: Annotated[int, typer.Option("--tenants", metavar="N", help="Tenants in each tree.")] = 20,
    streams: Annotated[int, typer.Option("--streams", metavar="N", help="Flows at once, each of another tenant.")] = 8,
    duration: Annotated[
        float, typer.Option("--duration", metavar="S", help="Seconds that each point is measured.")
    ] = 1.0,
    packet_bytes: Annotated[
        str, typer.Option("--packet-bytes", metavar="N,N", help="Frame sizes; above 1514 is sent as GSO.")
    ] = _DEFAULT_FRAMES,
    html: Annotated[Path | None, typer.Option("--html", metavar="P", help="Write a report with plots.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure if one classful root is CPU-bound at a rate here, and what the shapes cost, in one run.

    Beside a bare device, the kernel's default and a tree made with tc, in network namespaces of its own.
    """
    from kura_shaper.bench.cases import bench_settings, expected_points, run_bench

    settings = bench_settings(
        rate=options.rate_option("--rate", rate),
        shapes=shapes,
        tenants=tenants,
        streams=streams,
        duration_s=duration,
        packet_bytes=packet_bytes,
    )
    page = _opened(html) if html else None
    with PointProgress(expected_points(settings), width=36) as progress:
        report = run_bench(settings, tell=progress.tell)
    _print(report, as_json=as_json)
    if page:
        from kura_shaper.bench.html import to_html

        with page:
            page.write(to_html(report))
        sys.stderr.write(f"report: {html}\n")


def _opened(path: Path) -> TextIO:
    if find_spec("plotly") is None:
        raise UsageError("--html needs plotly", remedy="pip install 'kura-shaper[lab]'")
    return open_page(path)


def _print(report: Report, *, as_json: bool) -> None:
    from kura_shaper.bench.answer import caveats, evidence_of, words
    from kura_shaper.bench.report import HEADINGS, table, to_json

    if as_json:
        show.print_json(to_json(report))
        return
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in table(report):
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    for made in report.made_of:
        show.say(f"{made.form}: {'' if made.is_measured else 'left out: '}{made.words}")
    show.say("")
    for sentence in (*words(evidence_of(report)), *caveats(report)):
        show.say(sentence)
