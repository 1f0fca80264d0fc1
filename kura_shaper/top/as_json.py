"""A frame as one JSON object. What isn't known is null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kura_shaper.top.order import Order, matching, ordered
from kura_shaper.top.reading import State

if TYPE_CHECKING:
    from kura_shaper.top.frame import Frame, Share, TenantRow, Totals


def to_json(frame: Frame, now_ns: int, *, order: Order = Order.RATE, wanted: str = "") -> dict[str, Any]:
    """Return the object: the device's totals flat, and its tenants in order."""
    read_at_ns = frame.read_at_ns
    return {
        "device": frame.device,
        "state": frame.state,
        "ours": frame.state is State.TREE,
        "reason": frame.reason,
        "age_ms": None if read_at_ns is None else (now_ns - read_at_ns) // 1_000_000,
        "interval_ms": None if frame.interval_ns is None else frame.interval_ns // 1_000_000,
        "event": frame.event.words if frame.event else None,
        "faults": list(frame.faults),
        **(_totals(frame.totals) if frame.totals else {}),
        "tenants": [_tenant(row) for row in ordered(matching(frame.tenants, wanted), order)],
    }


def _totals(totals: Totals) -> dict[str, Any]:
    shares = {
        "": totals.node,
        "host_": totals.host,
        "gateway_": totals.gateway,
        "unattributed_": totals.unattributed,
        "unknown_": totals.unknown,
        "outside_": totals.outside,
    }
    return {
        "shape": totals.shape,
        "budget_bits_per_second": totals.budget.bits_per_second,
        "floor_sum_bits_per_second": totals.floors.bits_per_second,
        "promised_floor_sum_bits_per_second": totals.promised.bits_per_second if totals.promised else None,
        "device_bits_per_second": totals.device_bits_per_second,
        **{key: value for name, share in shares.items() for key, value in _share(name, share).items()},
        "direct_packets": totals.direct_packets,
        "new_direct_packets": totals.new_direct_packets,
    }


def _share(name: str, share: Share | None) -> dict[str, int | None]:
    return {
        f"{name}bits_per_second": share.bits_per_second if share else None,
        f"{name}sent_bytes": share.sent_bytes if share else None,
    }


def _tenant(row: TenantRow) -> dict[str, Any]:
    borrowed = row.borrowed_permille
    return {
        "tenant": row.name,
        "class": f"{row.class_id:#x}",
        "classid": str(row.classid),
        "floor_bits_per_second": row.floor.bits_per_second,
        "ceil_bits_per_second": row.ceiling.bits_per_second,
        "bits_per_second": row.bits_per_second,
        "lended_packets": row.lended_packets,
        "borrowed_packets": row.borrowed_packets,
        "borrowed_share": None if borrowed is None else borrowed / 1000,
        "dropped_packets": row.dropped_packets,
        "retransmits": row.retransmits,
        "backlog_bytes": row.backlog_bytes,
    }
