"""A measurement as text for people and JSON for programs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kura_shaper.probe.request import grpc_name
from kura_shaper.probe.target import Measured, Protocol, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEADINGS = ("TARGET", "SPOKEN", "STATUS", "CONNECT", "TLS", "FIRST BYTE", "MBIT/S", "STREAMS", "VERDICT")
_MS_NS = 1_000_000
# The worst first: a target that fails is a finding, whatever else could not be told.
_WORST_FIRST = (Verdict.FAILED, Verdict.SLOW, Verdict.REFUSED, Verdict.UNKNOWN, Verdict.FINE)
EXIT_STATUS = {Verdict.FAILED: 1, Verdict.SLOW: 1, Verdict.REFUSED: 3, Verdict.UNKNOWN: 4, Verdict.FINE: 0}


def worst(results: Sequence[Measured]) -> Verdict:
    """Return the verdict of them all."""
    found = {measured.verdict for measured in results}
    return next((verdict for verdict in _WORST_FIRST if verdict in found), Verdict.FINE)


def row(measured: Measured) -> tuple[str, ...]:
    """Return a line of the table, a cell for each of HEADINGS."""
    target, rate = measured.target, measured.rate
    return (
        target.name,
        measured.spoken or "-",
        _status(measured),
        _ms(measured.connect_ns),
        _ms(measured.handshake_ns),
        _ms(measured.first_byte_ns),
        f"{rate.mbps:.1f}" if rate else "-",
        str(measured.streams) if measured.streams else "-",
        str(measured.verdict),
    )


def remarks(measured: Measured) -> Iterator[str]:
    """Yield what else there is to say of it, a line each."""
    name, wanted = measured.target.name, measured.target.min_rate
    for failure in measured.failures:
        yield (
            f"failure[{failure.reason}]: {name}: {failure.count} times: {failure.detail}"
            if (failure.count > 1)
            else f"failure[{failure.reason}]: {name}: {failure.detail}"
        )
    if measured.failures or wanted is None:
        return
    if measured.rate is None:
        yield f"unknown: {name}: too little came to tell a rate; read something larger, or for longer"
    elif measured.rate < wanted:
        kind = "unknown" if measured.is_bound_by_us else "slow"
        why = f"; the probe itself was busy {measured.busy_percent} % of a processor" if measured.is_bound_by_us else ""
        yield f"{kind}: {name}: {measured.rate.mbps:.1f} Mbit/s, at least {wanted} wanted{why}"


def to_json(measured: Measured) -> dict[str, Any]:
    """Return all of it. None is what was not reached, or can't be told."""
    target, ends_at_s = measured.target, measured.certificate_ends_at_s
    return {
        "name": target.name,
        "tenant": target.tenant,
        "host": target.host,
        "protocol": target.protocol,
        "verdict": measured.verdict,
        "address": measured.address or None,
        "spoken": measured.spoken or None,
        "status": measured.status,
        "grpc_status": measured.grpc_status,
        "resolve_ms": _number(measured.resolve_ns),
        "connect_ms": _number(measured.connect_ns),
        "handshake_ms": _number(measured.handshake_ns),
        "first_byte_ms": _number(measured.first_byte_ns),
        "first_byte_max_ms": _number(measured.first_byte_max_ns),
        "rate_bits_per_second": measured.rate.bits_per_second if measured.rate else None,
        "min_rate_bits_per_second": target.min_rate.bits_per_second if target.min_rate else None,
        "window_ms": _number(measured.window_ns),
        "received_bytes": measured.received_bytes,
        "streams": measured.streams,
        "busy_percent": measured.busy_percent,
        "certificate_ends_at": datetime.fromtimestamp(ends_at_s, UTC).isoformat() if ends_at_s else None,
        "failures": [
            {"reason": failure.reason, "detail": failure.detail, "count": failure.count}
            for failure in measured.failures
        ],
    }


def _status(measured: Measured) -> str:
    if measured.target.protocol is Protocol.GRPC and measured.grpc_status is not None:
        return grpc_name(measured.grpc_status)
    return str(measured.status) if measured.status is not None else "-"


def _ms(duration_ns: int | None) -> str:
    return f"{duration_ns / _MS_NS:.1f} ms" if duration_ns is not None else "-"


def _number(duration_ns: int | None) -> float | None:
    return round(duration_ns / _MS_NS, 3) if duration_ns is not None else None
