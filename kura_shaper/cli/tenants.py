"""tenants: look after the tenants document."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kura_shaper.cli import options, show
from kura_shaper.tenants.allocate import DEFAULT_QUARANTINE, Allocation
from kura_shaper.tenants.allocate import allocate as allocate_classes
from kura_shaper.tenants.file import load_tenants
from kura_shaper.tenants.ledger import ledger_path, ledger_text, read_ledger, read_text, replace_file

if TYPE_CHECKING:
    from kura_shaper.tenants.kubernetes.instances import Compiled, RegionSettings

app = typer.Typer(help="Look after the tenants document.", no_args_is_help=True)

TenantsFile = Annotated[Path, typer.Argument(metavar="F", help="The tenants document.")]


@app.callback()
def _group() -> None:
    """Look after the tenants document."""


@app.command(epilog="Example: kura-shaper tenants lint tenants.yaml --overlay side-by-side.yaml")
def lint(
    file: TenantsFile,
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


@app.command(epilog="Example: kura-shaper tenants allocate tenants.yaml")
def allocate(
    file: TenantsFile,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a class is missing.")] = False,
    quarantine_days: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=3650, help="How long a freed id is nobody else's."),
    ] = DEFAULT_QUARANTINE.days,
    as_json: options.AsJson = False,
) -> int:
    """Give a class id to every tenant that has none, and leave the rest of the file as it is.

    Ids never change, and those of tenants that are gone are kept back for some days: a ledger beside the file knows.
    """
    text, beside = read_text(file), ledger_path(file)
    before = read_ledger(beside)
    days = timedelta(days=quarantine_days)
    made = allocate_classes(text, before, file=str(file), now=datetime.now(UTC), quarantine=days)
    if not check:
        # The ledger first: an id that is written down as freed is not given away, whatever happens next.
        if made.ledger != before:
            replace_file(beside, ledger_text(made.ledger, document=file.name))
        if made.text != text:
            replace_file(file, made.text)
    for line in made.early:
        typer.echo(f"kura-shaper: problem: {file}: {line}", err=True)
    _say_allocated(file, made, is_written=not check, as_json=as_json)
    return 1 if made.early or (check and made.missing) else 0


def _say_allocated(file: Path, made: Allocation, *, is_written: bool, as_json: bool) -> None:
    if as_json:
        assigned = {name: f"{class_id:#x}" for name, class_id in made.assigned.items()}
        show.print_json({"file": str(file), "written": is_written, "assigned": assigned, "early": list(made.early)})
        return
    for missing in made.missing:
        word = "has" if is_written else "has no class; it would be"
        show.say(f"{file}:{missing.line}: {missing.tenant} {word} {made.assigned[missing.tenant]:#x}")
    if not made.missing:
        show.say(f"{file}: every tenant has a class")


@app.command(epilog="Example: kura-shaper tenants export --region us-east > tenants.yaml")
def export(
    region: Annotated[str, typer.Option("--region", metavar="R", help="The region.", envvar="KURA_SHAPER_REGION")],
    namespace: Annotated[
        str,
        typer.Option(metavar="N", help="Where the KuraInstances are; '' is all.", envvar="KURA_SHAPER_NAMESPACE"),
    ] = "kura",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(metavar="P", help="How to reach the cluster from outside.", envvar="KURA_SHAPER_KUBECONFIG"),
    ] = None,
    cluster_domain: Annotated[
        str, typer.Option(metavar="D", help="The domain of Services.", envvar="KURA_SHAPER_CLUSTER_DOMAIN")
    ] = "cluster.local",
    as_json: options.AsJson = False,
) -> int:
    """Print the document that the KuraInstances of a region come to.

    What is wrong with an instance goes to stderr, and the exit code is 1 when something is left out for it.
    """
    # The client is not for those who have no cluster: importing it takes half a second.
    from kura_shaper.tenants.kubernetes.instances import RegionSettings
    from kura_shaper.tenants.text import document_text

    found = _compiled(RegionSettings(region=region, cluster_domain=cluster_domain), namespace, kubeconfig)
    text = document_text(found.document)
    for problem in found.problems:
        typer.echo(f"kura-shaper: problem: {problem}", err=True)
    if as_json:
        problems = [
            {"namespace": p.namespace, "name": p.name, "path": p.path, "message": p.message} for p in found.problems
        ]
        show.print_json({"region": region, "document": text, "problems": problems})
    else:
        show.say(text, newline=False)
    return 1 if any(problem.is_loss for problem in found.problems) else 0


def _compiled(settings: RegionSettings, namespace: str, kubeconfig: Path | None) -> Compiled:
    import asyncio
    from random import Random

    from kura_shaper.tenants.kubernetes.access import Access, HttpApi
    from kura_shaper.tenants.kubernetes.instances import compile_region
    from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
    from kura_shaper.tenants.kubernetes.reflector import Reflector
    from kura_shaper.tenants.kubernetes.source import instances_resource

    async def read() -> Compiled:
        clock = SystemAsyncClock()
        resource = instances_resource(namespace, marks=settings.marks)
        async with HttpApi(Access(kubeconfig, clock=clock)) as api:
            listing = await Reflector(api, resource, clock=clock, random=Random()).read()  # noqa: S311
        return compile_region(listing.objects.values(), settings)

    return asyncio.run(read())
