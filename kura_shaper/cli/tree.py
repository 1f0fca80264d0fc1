"""plan, apply, status, uninstall: a node's tree by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kura_shaper.cli import options, show
from kura_shaper.clock import SystemClock
from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.kernel.apply import apply_document, remove_tree
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.probe import probe
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.tenants.file import load_tenants
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build, check_settings
from kura_shaper.tree.diff import Plan
from kura_shaper.tree.diff import plan as plan_tree
from kura_shaper.tree.model import HostTraffic, LeafKind, MqQdisc
from kura_shaper.tree.observe import Asked, in_force_for, marks_in_force, observe
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.model import Device

AllowDisruption = Annotated[
    bool, typer.Option("--allow-disruption", help="Rebuild the root where it must be; drops what is queued.")
]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Replace a root qdisc of somebody else's.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what `plan` prints, change nothing.")]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command("plan", epilog="Example: kura-shaper plan --tenants tenants.yaml --device eth0 --budget 3G")(plan)
    app.command("apply", epilog="Example: kura-shaper apply --tenants tenants.yaml --device eth0 --budget 3G")(apply)
    app.command("status", epilog="Example: kura-shaper status --device eth0 --tenants tenants.yaml --json")(status)
    app.command("uninstall", epilog="Example: kura-shaper uninstall --device eth0")(uninstall)


@dataclass(frozen=True, slots=True)
class _Request:
    """What plan and apply were asked for."""

    device: Device
    document: TenantsDocument
    settings: TreeSettings
    capabilities: Capabilities
    permission: Permission


def plan(
    tenants: options.TenantsFile,
    device: options.DeviceName,
    budget: options.Budget,
    shape: options.Shape = ShapeChoice.AUTO,
    shaped_queues: options.ShapedQueues = 1,
    leaf: options.Leaf = LeafKind.FQ_CODEL,
    host_traffic: options.HostTrafficChoice = HostTraffic.OUTSIDE,
    host_reserve: options.HostReserve = options.DEFAULT_RESERVE,
    allow_disruption: AllowDisruption = False,
    take_over: TakeOver = False,
    overlay: options.OverlayFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what `apply` would do: operations in order, each with its impact. 1: there are some."""
    settings = _settings(budget, host_reserve, shape=shape, queues=shaped_queues, leaf=leaf, host_traffic=host_traffic)
    permission = _permission(allow_disruption=allow_disruption, take_over=take_over)
    request = _request(load_tenants(tenants, overlay=overlay), device, settings, permission)
    raise typer.Exit(_print_plan(request, as_json=as_json))


def apply(
    tenants: options.TenantsFile,
    device: options.DeviceName,
    budget: options.Budget,
    shape: options.Shape = ShapeChoice.AUTO,
    shaped_queues: options.ShapedQueues = 1,
    leaf: options.Leaf = LeafKind.FQ_CODEL,
    host_traffic: options.HostTrafficChoice = HostTraffic.OUTSIDE,
    host_reserve: options.HostReserve = options.DEFAULT_RESERVE,
    dry_run: DryRun = False,
    allow_disruption: AllowDisruption = False,
    take_over: TakeOver = False,
    state_dir: options.StateDirectory = options.DEFAULT_STATE,
    overlay: options.OverlayFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Bring the device to the wanted tree and read every operation back. A second run makes none."""
    settings = _settings(budget, host_reserve, shape=shape, queues=shaped_queues, leaf=leaf, host_traffic=host_traffic)
    permission = _permission(allow_disruption=allow_disruption, take_over=take_over)
    request = _request(load_tenants(tenants, overlay=overlay), device, settings, permission)
    if dry_run:
        raise typer.Exit(_print_plan(request, as_json=as_json))
    clock = SystemClock()
    with TcClient() as client:
        control = KernelTrafficControl(client, request.device, clock=clock)
        journal = Journal(state_dir, request.device)
        with journal.locked():
            applied = apply_document(
                request.document,
                control,
                journal,
                settings=request.settings,
                capabilities=request.capabilities,
                permission=request.permission,
                clock=clock,
            )
    show.applied(applied, request.device, as_json=as_json)
    raise typer.Exit(applied.exit_code)


def status(
    device: options.DeviceName,
    tenants: options.WantedTenants = None,
    budget: options.WantedBudget = None,
    shape: options.WantedShape = None,
    shaped_queues: options.WantedShapedQueues = None,
    leaf: options.WantedLeaf = None,
    host_traffic: options.WantedHostTraffic = None,
    host_reserve: options.WantedHostReserve = None,
    overlay: options.OverlayFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what the kernel has: shape, steering, classes, counters, and drift.

    In shape mq a few frames of its own prove the steering. 1: no tree of ours, drift, or no proof.
    """
    if overlay and not tenants:
        raise UsageError("--overlay has no document to lie over", remedy="give --tenants too")
    document = load_tenants(tenants, overlay=overlay) if tenants else None
    found = read_device(device)
    clock = SystemClock()
    with TcClient() as client:
        control = KernelTrafficControl(client, found, clock=clock)
        actual = control.snapshot()
        if isinstance(actual, Unknown):
            raise StateUnknownError(actual.reason)
        marks = marks_in_force(actual)
        is_steered = isinstance(actual.root, MqQdisc)
        proof = prove_steering(control, marks, clock=clock) if is_steered and marks else None
    asked = Asked(
        shape=shape,
        shaped_queues=shaped_queues,
        leaves=probe().leaves if leaf else None,
        budget=options.rate_option("--budget", budget) if budget else None,
        leaf=leaf,
        host_traffic=host_traffic,
        host_reserve=options.rate_option("--host-reserve", host_reserve) if host_reserve else None,
    )
    observed = observe(actual, document, asked)
    age_ms = (clock.now_ns() - actual.taken_at_ns) // 1_000_000
    show.status(observed, proof, age_ms=age_ms, as_json=as_json)
    raise typer.Exit(0 if observed.is_fine and (proof is None or proof.is_proven) else 1)


def uninstall(
    device: options.DeviceName,
    state_dir: options.StateDirectory = options.DEFAULT_STATE,
    as_json: options.AsJson = False,
) -> None:
    """Take away what is ours and bring back what was there before."""
    found = read_device(device)
    clock = SystemClock()
    with TcClient() as client:
        control = KernelTrafficControl(client, found, clock=clock)
        journal = Journal(state_dir, found)
        with journal.locked():
            applied = remove_tree(control, journal, clock=clock)
    show.applied(applied, found, as_json=as_json)
    raise typer.Exit(applied.exit_code)


def _settings(
    budget: str, host_reserve: str, *, shape: ShapeChoice, queues: int, leaf: LeafKind, host_traffic: HostTraffic
) -> TreeSettings:
    return TreeSettings(
        budget=options.rate_option("--budget", budget),
        shape=shape,
        shaped_queues=queues,
        leaf=leaf,
        host_traffic=host_traffic,
        host_reserve=options.rate_option("--host-reserve", host_reserve),
    )


def _permission(*, allow_disruption: bool, take_over: bool) -> Permission:
    permission = Permission.NONE
    if allow_disruption:
        permission |= Permission.DISRUPTION
    if take_over:
        permission |= Permission.TAKE_OVER
    return permission


def _request(document: TenantsDocument, device: str, settings: TreeSettings, permission: Permission) -> _Request:
    # The document and the settings first: what is wrong there must not need a privilege to be said.
    check_settings(settings)
    return _Request(read_device(device), document, settings, probe(), permission)


def _print_plan(request: _Request, *, as_json: bool) -> int:
    """Print what would be done and return the exit code."""
    with TcClient() as client:
        actual = KernelTrafficControl(client, request.device, clock=SystemClock()).snapshot()
    planned = _planned(request, actual)
    show.plan(planned, request.device, as_json=as_json)
    if planned.unknown:
        return StateUnknownError.exit_code
    if planned.refusals:
        return RefusedError.exit_code
    return 1 if planned.operations or planned.has_findings else 0


def _planned(request: _Request, actual: Snapshot | Unknown) -> Plan:
    if isinstance(actual, Unknown):
        return Plan(unknown=actual.reason)
    wanted = build(
        request.document,
        actual.device,
        settings=request.settings,
        capabilities=request.capabilities,
        in_force=in_force_for(actual, request.settings, request.permission),
    )
    return plan_tree(wanted, actual, request.permission)
