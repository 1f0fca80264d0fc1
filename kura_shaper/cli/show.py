"""Plans, outcomes and readings as text for people and JSON for programs."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from kura_shaper.cli.stdout import print_json as print_json
from kura_shaper.cli.stdout import say as say
from kura_shaper.kernel.executor import Status
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.steer import limits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kura_shaper.kernel.apply import Applied
    from kura_shaper.kernel.prove import Proof
    from kura_shaper.tree.diff import Plan
    from kura_shaper.tree.model import Device
    from kura_shaper.tree.observe import Observed, ObservedClass, SteeringState
    from kura_shaper.tree.operations import Operation


def log_by_default(context: typer.Context, level: int) -> None:
    """Log from a level on, unless somebody chose one: a service that says nothing can't be told from a dead one."""
    source = context.find_root().get_parameter_source("log_level")
    if source is None or source.name == "DEFAULT":
        logging.getLogger("kura_shaper").setLevel(level)


def plan(planned: Plan, device: Device, *, as_json: bool) -> None:
    """Print what would be done."""
    if as_json:
        operations = [_operation(op) for op in planned.operations]
        print_json(_plan_head(planned, device) | {"operations": operations})
        return
    for operation in planned.operations:
        say(f"{operation.impact:<12} {operation.describe()}")
    _plan_tail(planned, device)


def applied(result: Applied, device: Device, *, as_json: bool) -> None:
    """Print what was done, an outcome for each operation."""
    if as_json:
        operations = [_operation(o.operation) | {"status": o.status, "detail": o.detail} for o in result.outcomes]
        proof = asdict(result.proof) if result.proof else None
        print_json(_plan_head(result.plan, device) | {"operations": operations, "steering_proof": proof})
        return
    for outcome in result.outcomes:
        detail = f": {outcome.detail}" if outcome.detail else ""
        say(f"{outcome.status:<12} {outcome.operation.describe()}{detail}")
    if result.proof:
        say(f"{'proven' if result.proof.is_proven else 'finding':<12} steering{_because(result.proof)}")
    _plan_tail(result.plan, device)
    failed = sum(outcome.status is not Status.DONE for outcome in result.outcomes)
    if failed:
        typer.echo(f"{failed} of {len(result.outcomes)} operations did not hold", err=True)


def _because(proof: Proof) -> str:
    return "" if proof.is_proven else f" is not proven: {proof.reason}"


def _operation(operation: Operation) -> dict[str, Any]:
    return {
        "operation": type(operation).__name__,
        "impact": operation.impact,
        "describe": operation.describe(),
    }


def _plan_head(planned: Plan, device: Device) -> dict[str, Any]:
    return {
        "device": device.name,
        "impact": planned.impact,
        "unknown": planned.unknown,
        "notes": [asdict(note) for note in planned.notes],
        "refusals": [asdict(refusal) for refusal in planned.refusals],
    }


def _plan_tail(planned: Plan, device: Device) -> None:
    for note in planned.notes:
        say(f"{'finding' if note.weight is Weight.FINDING else 'note':<12} {note.message}")
    for refusal in planned.refusals:
        typer.echo(f"kura-shaper: refused[{refusal.code}]: {refusal}", err=True)
    if planned.unknown:
        typer.echo(f"kura-shaper: unknown: {planned.unknown}", err=True)
    elif not planned.refusals:
        impact = f", worst impact {planned.impact}" if planned.impact else ""
        say(f"{device.name}: {len(planned.operations)} operations{impact}")


def status(observed: Observed, proof: Proof | None, *, age_ms: int, as_json: bool) -> None:
    """Print a reading of the kernel, and the proof of its steering where there is one."""
    if as_json:
        print_json(_status_json(observed, proof, age_ms))
        return
    actual = observed.actual
    if not observed.is_ours:
        say(f"{actual.device.name}: no tree of ours; the root qdisc is {_root(observed)}")
        return
    shape = f"shape {observed.shape}, {len(observed.classes)} classes, {actual.direct_packets} direct packets"
    say(f"{actual.device.name}: {shape}, read {age_ms} ms ago")
    if observed.steering:
        say(_steering_line(observed.steering, proof))
        for caution in observed.steering.cautions:
            say(f"caution: {caution}")
    _table([_HEADINGS, *(_row(c) for c in observed.classes)])
    for line in observed.drift:
        say(f"drift: {line}")


def _steering_line(state: SteeringState, proof: Proof | None) -> str:
    way = state.kind or "nothing"
    if proof and proof.is_proven:
        limits = limits_of(state.kind) if state.kind else ""
        return f"steering by {way}: proven just now{f'; {limits}' if limits else ''}"
    reasons = [proof.reason] if proof else list(state.faults) or ["no classifier of ours says which marks to prove"]
    return f"steering by {way}: NOT proven: {'; '.join(reasons)}"


_HEADINGS = ("CLASS", "OWNER", "FLOOR", "CEIL", "LEAF", "SENT", "PACKETS", "DROPPED", "BACKLOG", "LENDED", "BORROWED")


def _row(found: ObservedClass) -> tuple[str, ...]:
    spec, counters = found.spec, found.counters
    return (
        str(spec.classid),
        found.owner or "-",
        str(spec.floor),
        str(spec.ceil),
        found.leaf or "-",
        f"{counters.sent_bytes}b",
        str(counters.sent_packets),
        str(counters.dropped_packets),
        f"{counters.backlog_bytes}b",
        str(counters.lended),
        str(counters.borrowed),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(_aligned(row, widths)).rstrip())


def _aligned(row: tuple[str, ...], widths: Sequence[int]) -> Iterable[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if column < 2 or column == 4 else cell.rjust(width)


def _root(observed: Observed) -> str:
    root = observed.actual.root
    if root is None:
        return "none"
    return f"{root.kind} {root.handle}"


def _steering_json(state: SteeringState | None, proof: Proof | None) -> dict[str, Any] | None:
    if state is None:
        return None
    is_proven = proof is not None and proof.is_proven
    return {
        "ok": is_proven,
        "way": state.kind,
        "reason": "" if is_proven else _steering_line(state, proof),
        "limits": limits_of(state.kind) if state.kind else "",
        "cautions": list(state.cautions),
    }


def _status_json(observed: Observed, proof: Proof | None, age_ms: int) -> dict[str, Any]:
    actual = observed.actual
    return {
        "device": actual.device.name,
        "ours": observed.is_ours,
        "shape": observed.shape,
        "root": _root(observed),
        "tx_queues": actual.device.tx_queues,
        "steering": _steering_json(observed.steering, proof),
        "age_ms": age_ms,
        "direct_packets": actual.direct_packets,
        "classes": [_class_json(c) for c in observed.classes] if observed.is_ours else [],
        "drift": list(observed.drift),
    }


def _class_json(found: ObservedClass) -> dict[str, Any]:
    spec, counters = found.spec, found.counters
    return {
        "class": f"{spec.classid.minor:#x}",
        "classid": str(spec.classid),
        "parent": str(spec.parent),
        "owner": found.owner,
        "leaf": found.leaf,
        "floor_bits_per_second": spec.floor.bits_per_second,
        "ceil_bits_per_second": spec.ceil.bits_per_second,
        "burst_bytes": spec.burst_bytes,
        "cburst_bytes": spec.cburst_bytes,
        "quantum_bytes": spec.quantum_bytes,
        "prio": spec.prio,
        "sent_bytes": counters.sent_bytes,
        "sent_packets": counters.sent_packets,
        "dropped_packets": counters.dropped_packets,
        "overlimits": counters.overlimits,
        "backlog_bytes": counters.backlog_bytes,
        "backlog_packets": counters.backlog_packets,
        "lended": counters.lended,
        "borrowed": counters.borrowed,
    }
