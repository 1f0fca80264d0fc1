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


@app.command(epilog="Example: kura-shaper tenants lint tenants.yaml")
def lint(
    file: Annotated[Path, typer.Argument(metavar="F", help="The tenants document.")],
    as_json: options.AsJson = False,
) -> None:
    """Check a document; the first fault is one line with file, line, key path and remedy."""
    document = load_tenants(file)
    overlaps = [user.name for user in document.marks.overlaps()]
    if as_json:
        show.print_json({"file": str(file), "tenants": len(document.tenants), "mark_overlaps": overlaps})
        return
    show.say(f"{file}: {len(document.tenants)} tenants of region {document.region}")
    if overlaps:
        show.say(f"note: mask {document.marks.mask:#x} is also used by {', '.join(overlaps)}, where a node runs it")
