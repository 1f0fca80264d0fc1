"""render-haproxy: from the tenants document to everything that the gateway reads, and on to the gateway itself."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from kura_shaper.cli import gateway_options as given
from kura_shaper.cli import options, show
from kura_shaper.clock import Clock, SystemClock
from kura_shaper.errors import KuraShaperError, UsageError
from kura_shaper.haproxy.apply import (
    Applied,
    CheckFailedError,
    Emptying,
    Outcome,
    Prepared,
    ReloadPolicy,
    Site,
    alone,
    carry_out,
    prepare,
    refuse_emptying,
)
from kura_shaper.haproxy.binary import HaproxyBinary, HaproxyMissingError, find_haproxy
from kura_shaper.haproxy.check import CheckReport, check_with_haproxy, report_without_haproxy
from kura_shaper.haproxy.decide import Decision
from kura_shaper.haproxy.generation import GatewayConfig, diff_text
from kura_shaper.haproxy.master import MasterSocket, NotRunningError
from kura_shaper.haproxy.metrics import WatchMetrics
from kura_shaper.haproxy.options import BandwidthLimit, Design, GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.running import read_version
from kura_shaper.haproxy.watch import Watch
from kura_shaper.haproxy.write import read_generation, write_generation
from kura_shaper.tenants.check import address_endpoint
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.file import load_tenants

_LEAVE = frozenset({signal.SIGTERM, signal.SIGINT})
_LOOK_EVERY_S = 1.0
_SHOWN_REASONS = 20
_EPILOG = """Example: kura-shaper render-haproxy --tenants tenants.yaml --out /etc/kura-shaper/haproxy --check

In CI: kura-shaper render-haproxy --tenants tenants.yaml --out gateway --haproxy-version 3.0 --diff

Beforehand: kura-shaper render-haproxy --tenants tenants.yaml --out /etc/kura-shaper/haproxy --apply --diff

Beside HAProxy: kura-shaper render-haproxy --tenants tenants.yaml --out /etc/kura-shaper/haproxy --watch"""


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command("render-haproxy", epilog=_EPILOG)(render_haproxy)


def render_haproxy(
    context: typer.Context,
    tenants: options.TenantsFile,
    out: given.Out,
    overlay: options.OverlayFile = None,
    check: given.Check = False,
    diff: given.Diff = False,
    apply: given.Apply = False,
    watch: given.Watch = False,
    as_json: options.AsJson = False,
    haproxy_version: given.Version = "",
    read_from: given.ReadFrom = "",
    run_dir: given.RunDirectory = "/run/kura-shaper-haproxy",
    certificate: given.Certificate = "",
    certificate_dir: given.CertificateDirectory = "",
    user: given.User = "haproxy",
    group: given.Group = "haproxy",
    design: given.DesignChoice = Design.EDGE,
    bwlim: given.Bwlim = BandwidthLimit.ON,
    wire_overhead_percent: given.WireOverhead = 0,
    bind: given.Bind = None,
    resolver: given.Resolver = None,
    dns_servers: given.DnsServers = 3,
    metrics: given.MetricsBind = "127.0.0.1:8405",
    nbthread: given.Threads = None,
    maxconn: given.Maxconn = 10_000,
    nofile: given.Nofile = None,
    h2_window_bytes: given.Http2Window = None,
    h2_streams: given.Http2Streams = 32,
    hard_stop_after_s: given.HardStop = 1_800,
    master_socket: given.MasterSocketPath = "",
    reload_interval_s: given.ReloadInterval = 30,
    old_workers_max: given.OldWorkersMax = 8,
    allow_empty: given.AllowEmpty = False,
    listen: given.Listen = "",
    resync_s: given.Resync = 60,
) -> None:
    """Write the gateway's configuration and maps: all of a generation at once, or nothing.

    With --apply the running gateway is brought in step: not at all, while it runs, or by a reload,
    with the reasons. --watch does that whenever the document changes.
    """
    place = given.Place(out, read_from, run_dir, certificate, certificate_dir, master_socket)
    as_options = partial(
        place.options,
        user=user,
        group=group,
        design=design,
        bandwidth_limit=bwlim,
        wire_overhead_percent=wire_overhead_percent,
        addresses=given.parse_addresses(bind),
        resolvers=tuple(given.parse_endpoint("--resolver", text, address_endpoint) for text in resolver or ()),
        dns_servers=dns_servers,
        metrics_bind=given.parse_endpoint("--metrics", metrics),
        nbthread=nbthread,
        maxconn=maxconn,
        nofile=nofile,
        h2_window_bytes=h2_window_bytes,
        h2_streams=h2_streams,
        hard_stop_after_s=hard_stop_after_s,
    )
    load = partial(load_tenants, tenants, overlay=overlay)
    emptying = Emptying.ALLOWED if allow_empty else Emptying.REFUSED
    if not (apply or watch):
        binary = None if haproxy_version and not check else find_haproxy()
        version = given.parse_version(haproxy_version) if haproxy_version else _running_or(binary, place)
        _render(load(), as_options(version), out, binary if check else None, emptying, diff=diff, as_json=as_json)
        return
    site = partial(
        _site,
        as_options,
        place,
        wanted_version=haproxy_version,
        policy=ReloadPolicy(reload_interval_s, old_workers_max),
        emptying=emptying,
    )
    if watch and diff:
        raise UsageError("--watch and --diff are both given", remedy="look at what would change with --apply --diff")
    if watch:
        # Before any thread is there, since each takes over what its maker keeps from itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE)
        clock = SystemClock()
        files = [tenants, *((overlay,) if overlay else ())]
        watcher = Watch(load, site, sources=partial(_sources, files, place), clock=clock, resync_s=resync_s)
        if listen:
            _serve_metrics(WatchMetrics(watcher.state, MasterSocket(place.master), clock), listen)
        show.log_by_default(context, logging.INFO)
        _watch(watcher)
        return
    _apply(load, site, diff=diff, as_json=as_json)


def _render(
    document: TenantsDocument,
    gateway: GatewayOptions,
    out: Path,
    binary: HaproxyBinary | None,
    emptying: Emptying,
    *,
    diff: bool,
    as_json: bool,
) -> None:
    """Write a generation, or show what it would change."""
    new, old = render(document, gateway), read_generation(out)
    if binary is None:
        report = report_without_haproxy(document, gateway)
    else:
        report = check_with_haproxy(document, gateway, binary=binary)
    if emptying is Emptying.REFUSED:
        refuse_emptying(new, old, None)
    if report.passed and not diff:
        write_generation(new, out)
    changed, text = new.generation != old.generation, diff_text(old, new)
    if as_json:
        written = {"written": changed and report.passed and not diff}
        show.print_json(_as_json(document, new, report, changed=changed, checked=binary is not None) | written)
    else:
        _print_report(report)
        if diff:
            show.say(text, newline=False)
        elif report.passed:
            show.say(f"generation {new.generation}: {'written' if changed else 'unchanged'}")
    if not report.passed:
        raise typer.Exit(3)
    raise typer.Exit(1 if report.cautions or (diff and text) else 0)


def _site(
    as_options: Callable[[tuple[int, int, int]], GatewayOptions],
    place: given.Place,
    *,
    wanted_version: str,
    policy: ReloadPolicy,
    emptying: Emptying,
) -> Site:
    """Return the gateway as it is now: rendered for the version that runs, or for the one found here."""
    master = MasterSocket(place.master)
    try:
        binary: HaproxyBinary | None = find_haproxy()
    except HaproxyMissingError:
        binary = None
    if wanted_version:
        version = given.parse_version(wanted_version)
    else:
        try:
            version = read_version(master)
        except NotRunningError:
            # Nothing runs yet: what is here is what will.
            version = (binary or find_haproxy()).version
    return Site(as_options(version), place.out, master, binary, policy, emptying)


def _running_or(binary: HaproxyBinary | None, place: given.Place) -> tuple[int, int, int]:
    """Return the version that runs here, which is the one that will read the files; else that of the program."""
    with suppress(KuraShaperError):
        return read_version(MasterSocket(place.master))
    return (binary or find_haproxy()).version


def _apply(load: Callable[[], TenantsDocument], site: Callable[[], Site], *, diff: bool, as_json: bool) -> None:
    """Bring a running gateway in step, or show what that would take."""
    # First of all, so that a bad document says so before anything else is asked.
    document, found, clock = load(), site(), SystemClock()
    if diff:
        _show_prepared(document, prepare(document, found), as_json=as_json)
    try:
        document, prepared, applied = _once(load, found, clock)
        if applied.outcome is Outcome.DEFERRED and applied.wait_s <= found.policy.interval_s:
            typer.echo(f"waiting {applied.wait_s} s: {'; '.join(applied.notes)}", err=True)
            clock.wait_ns(applied.wait_s * 1_000_000_000)
            document, prepared, applied = _once(load, found, clock)
    except CheckFailedError as error:
        if as_json:
            raise
        _print_report(error.report)
        raise typer.Exit(3) from error
    report = prepared.report
    if as_json:
        show.print_json(_prepared_json(document, prepared) | _applied_json(applied))
    else:
        _print_report(report)
        _print_decision(prepared)
        for note in applied.notes:
            show.say(f"note       {note}")
        show.say(f"generation {applied.generation}: {applied.outcome}{_workers_words(applied)}")
    is_well = applied.outcome in {Outcome.APPLIED, Outcome.UNCHANGED} and not report.cautions
    raise typer.Exit(0 if is_well else 1)


def _once(load: Callable[[], TenantsDocument], site: Site, clock: Clock) -> tuple[TenantsDocument, Prepared, Applied]:
    """Apply the document as it is when it is our turn: it may be another one than when we began to wait."""
    with alone(site.directory, clock):
        document = load()
        prepared = prepare(document, site)
        return document, prepared, carry_out(prepared, site)


def _show_prepared(document: TenantsDocument, prepared: Prepared, *, as_json: bool) -> NoReturn:
    report = prepared.report
    if as_json:
        show.print_json(_prepared_json(document, prepared) | _decision_json(prepared.decision))
    else:
        _print_report(report)
        show.say(prepared.difference, newline=False)
        _print_decision(prepared)
    if not report.passed:
        raise typer.Exit(3)
    raise typer.Exit(1 if prepared.changes or report.cautions else 0)


def _watch(watcher: Watch) -> None:
    # A signal ends the wait for the next look, and never a change that is under way.
    while True:
        watcher.step()
        if signal.sigtimedwait(_LEAVE, _LOOK_EVERY_S):
            return


def _sources(files: list[Path], place: given.Place) -> Iterator[Path]:
    """Yield the files whose change counts: the document's, and the certificates with their keys."""
    yield from files
    certificate = Path(place.certificate_directory or place.certificate or given.DEFAULT_CERTIFICATE)
    yield certificate
    yield certificate.with_suffix(".key")
    if place.certificate_directory:
        with suppress(OSError):
            yield from sorted(certificate.iterdir())


def _serve_metrics(metrics: WatchMetrics, listen: str) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    endpoint = given.parse_endpoint("--listen", listen)
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        start_http_server(endpoint.port, addr=endpoint.host, registry=registry)
    except OSError as error:
        raise UsageError(f"--listen {listen}: {error.strerror}", remedy="choose another port") from error


def _as_json(
    document: TenantsDocument, new: GatewayConfig, report: CheckReport, *, changed: bool, checked: bool
) -> dict[str, Any]:
    return {
        "generation": new.generation,
        "changed": changed,
        "tenants": len(document.tenants),
        "checked": checked,
        "notes": list(report.notes),
        "findings": [asdict(f) | {"severity": f.severity.value} for f in report.findings],
    }


def _prepared_json(document: TenantsDocument, prepared: Prepared) -> dict[str, Any]:
    return _as_json(document, prepared.wanted, prepared.report, changed=prepared.changes, checked=prepared.is_checked)


def _decision_json(decision: Decision) -> dict[str, Any]:
    return {
        "decision": decision.kind,
        "reasons": list(decision.reasons),
        "decision_notes": list(decision.notes),
    }


def _applied_json(applied: Applied) -> dict[str, Any]:
    workers = applied.workers
    return {
        **_decision_json(applied.decision),
        "outcome": applied.outcome,
        "outcome_notes": list(applied.notes),
        "wait_s": applied.wait_s,
        "workers": {"current": asdict(workers.current), "old": [asdict(w) for w in workers.old]} if workers else None,
    }


def _print_report(report: CheckReport) -> None:
    for line in (*report.findings, *report.notes):
        typer.echo(str(line), err=True)


def _print_decision(prepared: Prepared) -> None:
    decision = prepared.decision
    show.say(f"decision   {decision.kind}")
    for reason in decision.reasons[:_SHOWN_REASONS]:
        show.say(f"reason     {reason}")
    if len(decision.reasons) > _SHOWN_REASONS:
        show.say(f"reason     and {len(decision.reasons) - _SHOWN_REASONS} more")
    for note in decision.notes:
        show.say(f"note       {note}")


def _workers_words(applied: Applied) -> str:
    if applied.workers is None:
        return ""
    return f"; worker {applied.workers.current.pid}, {len(applied.workers.old)} old workers"
