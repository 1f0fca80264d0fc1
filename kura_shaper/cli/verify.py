"""verify: whether the ceiling is real on this node, with evidence that somebody else can check."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TextIO

import typer

from kura_shaper.cli import options, show
from kura_shaper.cli.report import WaitProgress, open_archive, open_page
from kura_shaper.clock import SystemClock
from kura_shaper.errors import UsageError
from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.kernel.probe import probe
from kura_shaper.tenants.file import load_tenants
from kura_shaper.tree.observe import Asked

if TYPE_CHECKING:
    from kura_shaper.verify.run import Report

_GATEWAY = "haproxy"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "verify",
        epilog="Example: kura-shaper verify --tenants tenants.yaml --device eth0 --budget 3G --html verify.html",
    )(verify)


def verify(
    tenants: options.TenantsFile,
    device: options.DeviceName,
    budget: options.Budget,
    static: Annotated[bool, typer.Option("--static", help="Only what stands still: do not look at traffic.")] = False,
    duration: Annotated[float, typer.Option("--duration", metavar="S", help="Seconds of looking at traffic.")] = 10.0,
    window: Annotated[int, typer.Option("--window", metavar="MS", help="Length of a window.")] = 100,
    shape: options.WantedShape = None,
    shaped_queues: options.WantedShapedQueues = None,
    leaf: options.WantedLeaf = None,
    host_traffic: options.WantedHostTraffic = None,
    host_reserve: options.WantedHostReserve = None,
    overlay: options.OverlayFile = None,
    master_socket: Annotated[
        Path | None,
        typer.Option("--master-socket", metavar="P", help="The gateway's master socket: ask it too."),
    ] = None,
    gateway: Annotated[
        str, typer.Option("--gateway", metavar="NAME", help="Short name of the gateway's processes.")
    ] = _GATEWAY,
    old_worker: Annotated[
        int, typer.Option("--old-worker", metavar="S", help="How long an old worker may serve on.")
    ] = 1_800,
    accept: Annotated[
        str, typer.Option("--accept", metavar="CODE,CODE", help="Findings that are known and do not count.")
    ] = "",
    require_traffic: Annotated[
        bool, typer.Option("--require-traffic", help="A check that saw no traffic is unknown (4), not skipped.")
    ] = False,
    as_json: options.AsJson = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="P", help="Write JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="P", help="Write a page with plots.")] = None,
    bundle: Annotated[Path | None, typer.Option("--bundle", metavar="P", help="Write all evidence, .tar.gz.")] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace names and addresses in every file and on the output.")
    ] = False,
) -> None:
    """Prove on this node that the ceiling is real: the tree, the ways past it, and the bytes of a while.

    Makes no traffic of its own but the frames that prove the steering. 0: all holds; 1: findings; 4: something
    could not be looked at.
    """
    from kura_shaper.verify.collect import NodeReader
    from kura_shaper.verify.observed import Question
    from kura_shaper.verify.run import Settings, run

    settings = Settings(
        duration_ms=0 if static else round(duration * 1_000),
        window_ms=window,
        accepted=frozenset(part for part in accept.split(",") if part),
        needs_traffic=require_traffic,
    )
    asked = Asked(
        budget=options.rate_option("--budget", budget),
        shape=shape,
        shaped_queues=shaped_queues,
        leaves=probe().leaves if leaf else None,
        leaf=leaf,
        host_traffic=host_traffic,
        host_reserve=options.rate_option("--host-reserve", host_reserve) if host_reserve else None,
    )
    question = Question(load_tenants(tenants, overlay=overlay), asked, gateway=gateway, old_worker_s=old_worker)
    with ExitStack() as stack:
        files = _open_files(stack, junit=junit, html=html, bundle=bundle)
        asks = MasterSocket(master_socket) if master_socket else None
        reader = stack.enter_context(NodeReader(device, clock=SystemClock(), gateway=asks))
        started_at = datetime.now().astimezone().isoformat(timespec="seconds")
        with WaitProgress(settings.duration_ms) as progress:
            report = run(question, reader, settings, started_at=started_at, tell=progress.tell)
        if redact:
            from kura_shaper.verify.report.redact import redacted

            report = redacted(report)
        _write(report, files)
        _print(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the report is written to, beside the output."""

    junit: TextIO | None
    html: TextIO | None
    bundle: BinaryIO | None


def _open_files(stack: ExitStack, *, junit: Path | None, html: Path | None, bundle: Path | None) -> _Files:
    if html and find_spec("plotly") is None:
        raise UsageError("--html needs plotly", remedy="pip install 'kura-shaper[lab]'")
    return _Files(
        stack.enter_context(open_page(junit, "--junit")) if junit else None,
        stack.enter_context(open_page(html)) if html else None,
        stack.enter_context(open_archive(bundle, "--bundle")) if bundle else None,
    )


def _write(report: Report, files: _Files) -> None:
    from kura_shaper.verify.report.bundle import write_bundle
    from kura_shaper.verify.report.machine import to_junit

    page = ""
    if files.html:
        from kura_shaper.verify.report.html import to_html

        page = to_html(report)
        files.html.write(page)
    if files.junit:
        files.junit.write(to_junit(report))
    if files.bundle:
        write_bundle(report, files.bundle, extra={"report.html": page} if page else None)
    for kind, file in (("report", files.html), ("junit", files.junit), ("bundle", files.bundle)):
        if file:
            sys.stderr.write(f"{kind}: {file.name}\n")


def _print(report: Report, *, as_json: bool) -> None:
    from kura_shaper.verify.report.machine import to_json
    from kura_shaper.verify.report.text import to_lines

    if as_json:
        show.print_json(to_json(report))
        return
    for line in to_lines(report):
        show.say(line)
