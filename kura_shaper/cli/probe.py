"""probe: what a tenant's clients get, asked from outside, once or as a service."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kura_shaper.cli import options, show
from kura_shaper.cli.report import PointProgress
from kura_shaper.clock import SystemClock
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kura_shaper.probe.service import Measure
    from kura_shaper.probe.target import Measured
    from kura_shaper.probe.task import Task

Words = str | None
_WHAT, _HOW, _RUN = "What is asked", "How it is asked", "How it runs"
_LOOPBACK = "127.0.0.1"


def _option(name: str, words: str, metavar: str, panel: str = _HOW) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, help=words, rich_help_panel=panel)
    return option


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: kura-shaper probe --url https://acme.example/object/1000000 --streams 4 --min-rate 100M"
    app.command("probe", epilog=epilog)(probe)


def probe(
    context: typer.Context,
    url: Annotated[
        list[str] | None, _option("url", "Whom to ask; its path is the large object. May be repeated.", "U", _WHAT)
    ] = None,
    targets: Annotated[Path | None, _option("targets", "Or a document of targets, YAML.", "F", _WHAT)] = None,
    small: Annotated[Words, _option("small", "Path that is asked for once, first: times.", "PATH", _WHAT)] = None,
    expect_status: Annotated[Words, _option("expect-status", "Default: 200; for gRPC 0.", "N", _WHAT)] = None,
    min_rate: Annotated[
        Words, _option("min-rate", "The least rate that is fine, bit/s, e.g. 100M.", "R", _WHAT)
    ] = None,
    resource: Annotated[Words, _option("resource", "gRPC: the resource of a ByteStream read.", "NAME", _WHAT)] = None,
    protocol: Annotated[
        Words, _option("protocol", "auto, http1, http2, grpc, or tcp: TLS alone, as on :7443.", "P")
    ] = None,
    streams: Annotated[Words, _option("streams", "Streams at once.", "N")] = None,
    connections: Annotated[
        Words, _option("connections", "HTTP/2: on so many connections. Default: 32 streams on each.", "N")
    ] = None,
    size: Annotated[
        Words, _option("size", "Bytes that each stream reads, e.g. 100M. Default: one object.", "B")
    ] = None,
    duration: Annotated[
        Words, _option("duration", "Seconds that it reads, asking again. Default: one object, 10 s at most.", "S")
    ] = None,
    timeout: Annotated[Words, _option("timeout", "Seconds for each step, and for a pause. Default: 5.", "S")] = None,
    connect_to: Annotated[
        Words, _option("connect-to", "Go there instead; the name in TLS and requests stays.", "HOST:PORT")
    ] = None,
    sni: Annotated[Words, _option("sni", "Another name in TLS than in the request.", "NAME")] = None,
    ipv4: Annotated[bool, typer.Option("-4", "--ipv4", help="IPv4 alone.", rich_help_panel=_HOW)] = False,
    ipv6: Annotated[bool, typer.Option("-6", "--ipv6", help="IPv6 alone.", rich_help_panel=_HOW)] = False,
    ca_file: Annotated[Words, _option("ca-file", "Trust these authorities alone, PEM.", "F")] = None,
    token_file: Annotated[Words, _option("token-file", "A bearer token; it is never shown.", "F")] = None,
    header_file: Annotated[Words, _option("header-file", "`Name: value` lines to send; never shown.", "F")] = None,
    listen: Annotated[
        str, _option("listen", "Run as a service: /metrics, /healthz. A port alone is on loopback.", "IP:PORT", _RUN)
    ] = "",
    interval: Annotated[
        Words, _option("interval", "As a service: seconds between two rounds of a target. Default: 30.", "S", _RUN)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what a tenant's clients get: handshake, first byte, rate. 1: a target failed, or was too slow.

    A rate is payload over the time in which all streams flow. No redirect is followed.
    """
    from kura_shaper.probe.task import load_tasks, tasks_of_urls

    if ipv4 and ipv6:
        raise UsageError("-4 and -6 are both given", remedy="give one of them, or none")
    given = {
        "small": small,
        "expect_status": expect_status,
        "min_rate": min_rate,
        "resource": resource,
        "protocol": protocol,
        "streams": streams,
        "connections": connections,
        "size": size,
        "duration_s": duration,
        "timeout_s": timeout,
        "connect_to": connect_to,
        "sni": sni,
        "family": "4" if ipv4 else "6" if ipv6 else None,
        "ca_file": ca_file,
        "token_file": token_file,
        "header_file": header_file,
    }
    overrides = {key: text for key, text in given.items() if text is not None}
    if (targets is None) == (not url):
        raise UsageError("the probe needs targets", remedy="--url U, which may be repeated, or --targets F")
    tasks = load_tasks(targets, overrides) if targets else tasks_of_urls(url or [], overrides)
    _require_files(tasks)
    if listen:
        if as_json:
            raise UsageError("--json is for one round", remedy="as a service, /statusz has it")
        show.log_by_default(context, logging.INFO)
        _serve(tasks, listen, interval or "30")
        return
    if interval is not None:
        raise UsageError("--interval is for a service", remedy="add --listen IP:PORT")
    raise typer.Exit(_once(tasks, as_json=as_json))


def _require_files(tasks: Sequence[Task]) -> None:
    """Raise UsageError when a file of a target can't be used: better now than as a failure of the target."""
    from kura_shaper.probe.connection import trust
    from kura_shaper.probe.credentials import headers_of
    from kura_shaper.probe.failures import ClientError

    for task in tasks:
        headers_of(task.target)
    for path in {task.target.ca_file for task in tasks if task.target.ca_file}:
        try:
            trust(path, ())
        except ClientError as error:
            raise UsageError(f"{path} has no authorities that can be read", remedy="PEM, with whole chains") from error


def _measure() -> Measure:
    """Return what measures a task, with what all of them share."""
    from kura_shaper.probe.client import measure
    from kura_shaper.probe.connection import Resolver
    from kura_shaper.probe.http2 import quieten_frames

    quieten_frames()
    clock, resolver = SystemClock(), Resolver()

    def one(task: Task, cancelled: threading.Event) -> Measured:
        return measure(task.target, task.load, clock=clock, resolver=resolver, cancelled=cancelled)

    return one


def _once(tasks: Sequence[Task], *, as_json: bool) -> int:
    from kura_shaper.probe.report import EXIT_STATUS, HEADINGS, remarks, row, to_json, worst

    measure, results = _measure(), []
    with PointProgress(len(tasks)) as progress:
        for task in tasks:
            progress.tell(task.target.name)
            # One after the other: they would share the way.
            results.append(measure(task, threading.Event()))
    verdict = worst(results)
    if as_json:
        show.print_json({"verdict": verdict, "targets": [to_json(measured) for measured in results]})
        return EXIT_STATUS[verdict]
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        is_text = number < 3 or number == len(HEADINGS) - 1
        shown.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for measured in results:
        # Text, so that no name is taken for markup.
        shown.add_row(*map(Text, row(measured)))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    for measured in results:
        for line in remarks(measured):
            show.say(line)
    return EXIT_STATUS[verdict]


def _serve(tasks: Sequence[Task], listen: str, interval: str) -> None:
    from kura_shaper.cli.gateway_options import parse_endpoint
    from kura_shaper.probe.metrics import ProbeMetrics
    from kura_shaper.probe.report import to_json
    from kura_shaper.probe.service import ProbeService
    from kura_shaper.probe.task import duration_ns
    from kura_shaper.web import PageServer, json_page, metrics_page, text_page

    endpoint = parse_endpoint("--listen", f"{_LOOPBACK}:{listen}" if listen.isdecimal() else listen)
    try:
        interval_ns = duration_ns(interval, least_s=Fraction(1), most_s=300)
    except UsageError as error:
        raise UsageError(f"--interval: {error.message}", remedy=error.remedy) from error
    service = ProbeService(tasks, _measure(), interval_ns=interval_ns, clock=SystemClock())
    _end_by_signals(service.stop)
    pages = {
        "/metrics": metrics_page(ProbeMetrics(service)),
        "/healthz": lambda _: text_page(why, status=500) if (why := service.why_dead()) else text_page("ok"),
        "/statusz": lambda _: json_page([to_json(last) for each in service.watched if (last := each.last)]),
    }
    with ExitStack() as stack:
        stack.callback(PageServer(endpoint.host, endpoint.port, pages).close)
        service.run()


def _end_by_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
