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
from kura_shaper.cli.verify_after import Around, restart_asked
from kura_shaper.clock import SystemClock
from kura_shaper.errors import UsageError
from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.kernel.probe import probe
from kura_shaper.tenants.file import load_tenants
from kura_shaper.tree.observe import Asked
from kura_shaper.verify.active import LoadRun, Where
from kura_shaper.verify.checks import CHECKS
from kura_shaper.verify.collect import NodeReader
from kura_shaper.verify.deployments import read_deployments
from kura_shaper.verify.observed import Question
from kura_shaper.verify.report.bundle import write_bundle
from kura_shaper.verify.report.machine import to_json, to_junit
from kura_shaper.verify.report.redact import redacted
from kura_shaper.verify.report.text import to_lines
from kura_shaper.verify.restart import Part
from kura_shaper.verify.run import Settings, run

if TYPE_CHECKING:
    from kura_shaper.verify.after import Facts
    from kura_shaper.verify.run import Report

_GATEWAY = "haproxy"
_STREAMS_MAX = 1_024
_AGENT_PORT = 9469
_PROTOCOLS = frozenset({"http1", "http2", "grpc"})


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "verify",
        epilog="Example: kura-shaper verify --tenants tenants.yaml --device eth0 --budget 3G --html verify.html",
    )(verify)


def _list_findings(wanted: bool) -> None:
    if not wanted:
        return
    for check in CHECKS:
        for code in check.codes:
            show.say(f"{code.severity:<8} {code.name:<22} {code.meaning}")
    raise typer.Exit


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
    deployments: Annotated[
        Path | None,
        typer.Option("--deployments", metavar="F", help="The cluster's, by `kubectl get deployments -A -o json`."),
    ] = None,
    accept: Annotated[
        str, typer.Option("--accept", metavar="CODE,CODE", help="Findings that are known and do not count.")
    ] = "",
    require_traffic: Annotated[
        bool, typer.Option("--require-traffic", help="A check that saw no traffic is unknown (4), not skipped.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="P", help="An earlier --json of this node: did a restart change anything?"),
    ] = None,
    after: Annotated[
        Part | None,
        typer.Option("--after", help="Run, wait for the restart of this part or make it, run again and compare."),
    ] = None,
    restart: Annotated[
        str, typer.Option("--restart", metavar="CMD", help="With --after: what restarts it; no shell is asked.")
    ] = "",
    within: Annotated[
        float, typer.Option("--within", metavar="S", help="With --after: how long the restart may take.")
    ] = 600.0,
    agent_port: Annotated[
        int, typer.Option("--agent-port", metavar="N", help="With --after agent: where it listens.")
    ] = _AGENT_PORT,
    live: Annotated[
        bool, typer.Option("--live", help="With load from outside, --duration seconds for each number of streams.")
    ] = False,
    url: Annotated[str, typer.Option("--url", metavar="U", help="With --live: what to ask the gateway for.")] = "",
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N", help="With --live: numbers of streams.")
    ] = "1,4,8",
    live_from: Annotated[
        str, typer.Option("--live-from", metavar="CMD", help="With --live: what starts the client elsewhere, e.g. ssh.")
    ] = "",
    connect_to: Annotated[
        str, typer.Option("--connect-to", metavar="A,A", help="With --live: the gateway's addresses, e.g. v4 and v6.")
    ] = "",
    protocols: Annotated[
        str, typer.Option("--protocols", metavar="P,P", help="With --live: of http1, http2, grpc.")
    ] = "http1",
    control: Annotated[
        list[str] | None,
        typer.Option("--control", metavar="U", help="With --live: a URL of another way, shown beside, not judged."),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", metavar="F", help="With --live: whom the client trusts.")
    ] = None,
    _findings: Annotated[
        bool,
        typer.Option(
            "--findings", help="List every finding there is, and leave.", callback=_list_findings, is_eager=True
        ),
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

    Makes no traffic of its own but the frames that prove the steering, unless --live asks for it. 0: all holds;
    1: findings; 4: something could not be looked at.
    """
    if live and (static or not url):
        raise UsageError("--live needs --url, and can't be --static", remedy="e.g. --live --url https://HOST/object/N")
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
    question = Question(
        load_tenants(tenants, overlay=overlay),
        asked,
        gateway=gateway,
        old_worker_s=old_worker,
        deployments=read_deployments(deployments) if deployments else None,
    )
    asked_restart = restart_asked(after, restart, baseline=baseline, within_s=within)
    counts = _streams(streams) if live else (1,)
    with ExitStack() as stack:
        addresses = tuple(part for part in connect_to.split(",") if part)
        where = Where(url, launcher=live_from, connect_to=addresses, ca_file=ca_file)
        matrix = _Matrix(counts, _protocols(protocols), tuple(control or ()))
        load, steps = _load(stack, where, matrix, question, settings) if live else (None, 1)
        files = _open_files(stack, junit=junit, html=html, bundle=bundle)
        asks = MasterSocket(master_socket) if master_socket else None
        reader = stack.enter_context(NodeReader(device, clock=SystemClock(), gateway=asks))
        with WaitProgress(settings.duration_ms * steps) as progress:

            def once(earlier: Facts | None, with_load: LoadRun | None) -> Report:
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                return run(
                    question, reader, settings, started_at=now, tell=progress.tell, load=with_load, earlier=earlier
                )

            around = Around(asked_restart, baseline, question.document.gateway, agent_port, tell=progress.tell)
            report = around.report(once, load)
        if redact:
            report = redacted(report)
        _write(report, files)
        _print(report, as_json=as_json)
    raise typer.Exit(report.exit_code)


def _streams(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= _STREAMS_MAX for part in parts):
        remedy = f"e.g. 1,4,8, each up to {_STREAMS_MAX}"
        raise UsageError(f"--streams {text[:64]!r} is no list of numbers", remedy=remedy)
    return tuple(int(part) for part in parts)


def _protocols(text: str) -> tuple[str, ...]:
    parts = tuple(dict.fromkeys(text.split(",")))
    if not set(parts) <= _PROTOCOLS:
        raise UsageError(f"--protocols {text[:64]!r} is no list of them", remedy="of http1, http2, grpc")
    return parts


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What load is made over: numbers of streams, protocols, and ways to compare with."""

    streams: tuple[int, ...]
    protocols: tuple[str, ...]
    controls: tuple[str, ...]


def _load(
    stack: ExitStack, where: Where, matrix: _Matrix, question: Question, settings: Settings
) -> tuple[LoadRun, int]:
    """Return the load, and of how many steps it is."""
    from kura_shaper.cli.verify_live import TrafficClient, ways_of
    from kura_shaper.lab.traffic import Application

    applications = tuple(map(Application, matrix.protocols))
    tenant, ways = ways_of(question.document, where, protocols=applications, controls=matrix.controls)
    clients = [TrafficClient(tenant, w, ca_file=where.ca_file, duration_ms=settings.duration_ms) for w in ways]
    for client in clients:
        stack.callback(client.close)
    return LoadRun(clients, matrix.streams), len(clients) * len(matrix.streams)


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
    if as_json:
        show.print_json(to_json(report))
        return
    for line in to_lines(report):
        show.say(line)
