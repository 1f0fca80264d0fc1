"""render-haproxy: from the tenants document to everything that the gateway reads."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from kura_shaper.cli import options, show
from kura_shaper.errors import UsageError
from kura_shaper.haproxy.binary import HaproxyBinary, find_haproxy
from kura_shaper.haproxy.check import CheckReport, check_with_haproxy
from kura_shaper.haproxy.generation import GatewayConfig, diff_text
from kura_shaper.haproxy.options import BandwidthLimit, GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.write import read_generation, write_generation
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.file import load_tenants

_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?", re.ASCII)
# With only "3.0" given, the branch's patch level does not matter to what is rendered.
_ANY_PATCH = 999

Version = Annotated[
    str, typer.Option("--haproxy-version", metavar="X.Y", help="Render for this version; default: the one found here.")
]
Check = Annotated[bool, typer.Option("--check", help="Let the real `haproxy -c` read the result before it is written.")]
Diff = Annotated[bool, typer.Option("--diff", help="Print what would change and write nothing. 1: something would.")]
ReadFrom = Annotated[
    str, typer.Option("--read-from", metavar="P", help="Where HAProxy will read the files; default: OUT/current.")
]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command(
        "render-haproxy",
        epilog="Example: kura-shaper render-haproxy --tenants tenants.yaml --out /etc/kura-shaper/haproxy --check",
    )(render_haproxy)


def render_haproxy(
    tenants: options.TenantsFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Generations are written here.")],
    check: Check = False,
    diff: Diff = False,
    haproxy_version: Version = "",
    read_from: ReadFrom = "",
    run_dir: Annotated[str, typer.Option(metavar="P", help="Where the gateway's sockets are.")] = (
        "/run/kura-shaper-haproxy"
    ),
    certificate: Annotated[str, typer.Option(metavar="PEM", help="Chain and key for the hostnames.")] = (
        "/etc/kura-shaper/tls/tls.crt"
    ),
    user: Annotated[str, typer.Option(help="The account that the gateway runs as.")] = "haproxy",
    group: Annotated[str, typer.Option(help="And its group.")] = "haproxy",
    bwlim: Annotated[BandwidthLimit, typer.Option(help="Smooth each tenant's payload ahead of the tree.")] = (
        BandwidthLimit.ON
    ),
    as_json: options.AsJson = False,
) -> None:
    """Write the gateway's configuration and maps: all of a generation at once, or nothing."""
    document = load_tenants(tenants)
    binary = None if haproxy_version and not check else find_haproxy()
    gateway = GatewayOptions(
        haproxy_version=_version(haproxy_version, binary),
        directory=PurePosixPath(read_from or out.absolute() / "current"),
        run_directory=PurePosixPath(run_dir),
        certificate=PurePosixPath(certificate),
        user=user,
        group=group,
        bandwidth_limit=bwlim,
    )
    report = check_with_haproxy(document, gateway, binary=binary) if check and binary else None
    new, old = render(document, gateway), read_generation(out)
    is_sound = report is None or report.passed
    if is_sound and not diff:
        write_generation(new, out)
    text = diff_text(old, new) if diff else None
    if as_json:
        show.print_json(
            _as_json(document, new, old, report)
            | {"written": new.generation != old.generation and is_sound and not diff}
        )
    else:
        _print(new, old, report, difference=text)
    if not is_sound:
        raise typer.Exit(3)
    raise typer.Exit(1 if text else 0)


def _version(text: str, binary: HaproxyBinary | None) -> tuple[int, int, int]:
    if not text and binary is not None:
        return binary.version
    match = _VERSION.fullmatch(text)
    if match is None:
        raise UsageError(f"--haproxy-version {text[:32]!r} is no version", remedy='e.g. "3.0" or "3.0.11"')
    return int(match[1]), int(match[2]), int(match[3] or _ANY_PATCH)


def _as_json(
    document: TenantsDocument, new: GatewayConfig, old: GatewayConfig, report: CheckReport | None
) -> dict[str, Any]:
    return {
        "generation": new.generation,
        "changed": new.generation != old.generation,
        "tenants": len(document.tenants),
        "checked": report is not None,
        "notes": list(report.notes) if report else [],
        "findings": [asdict(f) | {"severity": f.severity.value} for f in report.findings] if report else [],
    }


def _print(new: GatewayConfig, old: GatewayConfig, report: CheckReport | None, *, difference: str | None) -> None:
    for line in (*report.findings, *report.notes) if report else ():
        typer.echo(str(line), err=True)
    if difference is not None:
        show.say(difference, newline=False)
    elif report is None or report.passed:
        changed = new.generation != old.generation
        show.say(f"generation {new.generation}: {'written' if changed else 'unchanged'}")
