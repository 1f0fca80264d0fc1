"""Which tenants are shown, and in which order."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kura_shaper.top.frame import TenantRow


class Order(StrEnum):
    """What tenants are sorted by: the most first, names from A."""

    RATE = "rate"
    USE = "use"
    BORROWED = "borrowed"
    DROPS = "drops"
    RETRANSMITS = "retransmits"
    BACKLOG = "backlog"
    FLOOR = "floor"
    CEILING = "ceiling"
    NAME = "name"


_VALUES: dict[Order, Callable[[TenantRow], int | None]] = {
    Order.RATE: lambda row: row.bits_per_second,
    Order.USE: lambda row: row.ceiling_permille,
    Order.BORROWED: lambda row: row.borrowed_permille,
    Order.DROPS: lambda row: row.dropped_packets,
    Order.RETRANSMITS: lambda row: row.retransmits,
    Order.BACKLOG: lambda row: row.backlog_bytes,
    Order.FLOOR: lambda row: row.floor.bits_per_second,
    Order.CEILING: lambda row: row.ceiling.bits_per_second,
}


def ordered(rows: Iterable[TenantRow], order: Order) -> list[TenantRow]:
    """Return the rows by an order. What isn't known comes last, and equals stand by rate, then by name."""
    by_name = sorted(rows, key=lambda row: (row.label, row.classid))
    if order is Order.NAME:
        return by_name
    by_rate = sorted(by_name, key=lambda row: _most_first(row.bits_per_second))
    value = _VALUES[order]
    return by_rate if order is Order.RATE else sorted(by_rate, key=lambda row: _most_first(value(row)))


def matching(rows: Iterable[TenantRow], text: str) -> list[TenantRow]:
    """Return the rows whose name or class id (`0x2a7`) has the text in it, whatever its case."""
    wanted = text.strip().lower()
    return [row for row in rows if wanted in row.name.lower() or wanted in f"{row.class_id:#x}"]


def _most_first(value: int | None) -> int:
    return 1 if value is None else -value
