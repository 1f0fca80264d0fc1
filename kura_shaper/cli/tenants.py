"""tenants: look after the tenants document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kura_shaper.cli import options, show
from kura_shaper.tenants.file import load_tenants

app = typer.Typer(help="Look after the tenants document.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Look after the tenants document."""


@app.command(epilog="Example: kura-shaper tenants lint tenants.yaml --overlay side-by-side.yaml")
def lint(
    file: Annotated[Path, typer.Argument(metavar="F", help="The tenants document.")],
    overlay: options.OverlayFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a document, and an overlay over it; the first fault is one line with file, line, key path and remedy."""
    document = load_tenants(file, overlay=overlay)
    overlaps = [user.name for user in document.marks.overlaps()]
    if as_json:
        head = {"file": str(file), "overlay": str(overlay) if overlay else None, "tenants": len(document.tenants)}
        show.print_json(head | {"mark_overlaps": overlaps})
        return
    show.say(f"{file}: {len(document.tenants)} tenants of region {document.region}")
    if overlay:
        named = sum(bool(tenant.hosts or tenant.peer_hosts) for tenant in document.tenants)
        ports = ", ".join(map(str, document.gateway.ports)) or "none"
        show.say(f"{overlay}: names for {named} of {len(document.tenants)} tenants, ports {ports}")
    if overlaps:
        show.say(f"note: mask {document.marks.mask:#x} is also used by {', '.join(overlaps)}, where a node runs it")
