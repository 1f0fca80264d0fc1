"""The table of tenants as cells of known widths, the same for a terminal and for lines in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.top.order import Order
from kura_shaper.top.text import (
    bytes_text,
    cut,
    limit_text,
    per_second_text,
    percent_text,
    plain,
    rate_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.top.frame import TenantRow

NAME_WIDTH_MIN, NAME_WIDTH_MAX = 12, 63
GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers. `order` is what sorts by it."""

    heading: str
    width: int
    cell: Callable[[TenantRow, int | None], str]
    order: Order | None = None


# The cells take the interval of the frame too, in nanoseconds.
COLUMNS = (
    Column("CLASS", 6, lambda row, _: f"{row.class_id:#x}"),
    Column("RATE", 6, lambda row, _: rate_text(row.bits_per_second), Order.RATE),
    Column("FLOOR", 6, lambda row, _: limit_text(row.floor), Order.FLOOR),
    Column("CEIL", 6, lambda row, _: limit_text(row.ceiling), Order.CEILING),
    Column("USED", 4, lambda row, _: percent_text(row.ceiling_permille), Order.USE),
    Column("BORR", 4, lambda row, _: percent_text(row.borrowed_permille), Order.BORROWED),
    Column("DROP/S", 6, lambda row, ns: per_second_text(row.dropped_packets, ns), Order.DROPS),
    Column("RETR/S", 6, lambda row, ns: per_second_text(row.retransmits, ns), Order.RETRANSMITS),
    Column("QUEUE", 7, lambda row, _: bytes_text(row.backlog_bytes), Order.BACKLOG),
)
NUMBERS_WIDTH = sum(len(GAP) + column.width for column in COLUMNS)


def heading_line(name_width: int) -> str:
    """Return the headings."""
    cells = (column.heading.rjust(column.width) for column in COLUMNS)
    return GAP.join(("TENANT".ljust(name_width), *cells))


def row_line(row: TenantRow, interval_ns: int | None, *, name_width: int) -> str:
    """Return one tenant's line, without a trend."""
    cells = (column.cell(row, interval_ns).rjust(column.width) for column in COLUMNS)
    return GAP.join((cut(plain(row.label), name_width).ljust(name_width), *cells))
