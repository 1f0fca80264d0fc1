"""lab: the whole system on one machine."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kura_shaper.cli import options, show
from kura_shaper.cli.report import PointProgress, open_page
from kura_shaper.tree.model import Shape

if TYPE_CHECKING:
    from kura_shaper.lab.report import Report

app = typer.Typer(help="The whole system on one machine, in network namespaces.", no_args_is_help=True)

_SCENARIOS = ("today", "shaped", "floors", "foreign")


@app.callback()
def _group() -> None:
    """The whole system on one machine, in network namespaces."""


@app.command(
    epilog="Example: kura-shaper lab run --html report.html   (as root; leaves nothing behind however it ends)"
)
def run(
    scenario: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(_SCENARIOS)}; may be repeated.")
    ] = None,
    ceiling: Annotated[str, typer.Option(metavar="R", help="The first tenant's ceiling.")] = "200M",
    budget: Annotated[str, typer.Option(metavar="R", help="The node's egress budget.")] = "600M",
    shape: Annotated[Shape, typer.Option(help="How the tree sits on the node's NIC.")] = Shape.SINGLE,
    streams: Annotated[str, typer.Option(metavar="N,N", help="Numbers of streams on each path.")] = "1,4,8",
    duration: Annotated[float, typer.Option(metavar="S", help="Seconds that each point is measured.")] = 1.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the lab standing until Ctrl-C.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="P", help="Write a report with plots.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the bypass as it is today, and closed: rates at the device, averages and worst windows. 1: a finding."""
    from kura_shaper.lab.isolation import require_privilege, run_isolated
    from kura_shaper.lab.run import lab_settings, run_lab
    from kura_shaper.lab.scenarios import expected_points

    settings = lab_settings(
        ceiling=options.rate_option("--ceiling", ceiling),
        budget=options.rate_option("--budget", budget),
        streams=streams,
        duration_s=duration,
        scenarios=tuple(scenario or _SCENARIOS),
        shape=shape,
    )
    require_privilege()
    page = open_page(html) if html else None

    caller_pid = os.getpid()

    def work() -> int:
        with PointProgress(expected_points(settings)) as progress:
            report = run_lab(settings, tell=progress.tell, stay=partial(_stay, caller_pid=caller_pid) if keep else None)
        _print(report, as_json=as_json)
        if page:
            from kura_shaper.lab.html import to_html

            page.write(to_html(report))
            page.flush()
            sys.stderr.write(f"report: {html}\n")
        return 1 if report.findings else 0

    raise typer.Exit(run_isolated(work))


def _stay(node: str, *, caller_pid: int) -> None:
    enter = f"nsenter --mount --target $(pgrep -P {caller_pid}) ip netns exec {node} bash"
    sys.stderr.write(f"the lab is standing; enter its node with: {enter}\nCtrl-C takes it down\n")
    try:
        signal.pause()
    except KeyboardInterrupt:
        sys.stderr.write("taking it down\n")


def _print(report: Report, *, as_json: bool) -> None:
    from kura_shaper.lab.report import headline, table, to_json

    if as_json:
        show.print_json(to_json(report))
        return
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("SCENARIO", "PATH"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("STREAMS", "MBIT/S", "WORST 100MS", "LIMIT"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for row in table(report):
        shown.add_row(row.scenario, row.what, row.streams, row.mbps, row.worst_mbps, row.limit_mbps, row.says)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(shown)
    show.say(headline(report))
    for finding in report.findings:
        show.say(f"finding[{finding.code}]: {finding.message}")
    show.say(f"verdict: {report.verdict}")
