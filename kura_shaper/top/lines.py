"""A frame as plain lines, for a pipe or a file: no colours, no control characters, columns that stay in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.top.head import GAP, head
from kura_shaper.top.order import Order, matching, ordered
from kura_shaper.top.table import NAME_WIDTH_MAX, NAME_WIDTH_MIN, heading_line, row_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.top.frame import Frame


class Lines:
    """Writes frames one after another. The column of names never gets narrower from one to the next."""

    def __init__(self, *, order: Order = Order.RATE, wanted: str = "") -> None:
        self._order, self._wanted = order, wanted
        self._name_width = NAME_WIDTH_MIN

    def of(self, frame: Frame, now_ns: int, *, interval_ns: int) -> Iterator[str]:
        """Yield the lines of one frame, an empty one at the end."""
        for phrases in head(frame, now_ns, interval_ns=interval_ns):
            yield GAP.join(phrase.text for phrase in phrases)
        rows = ordered(matching(frame.tenants, self._wanted), self._order)
        if frame.totals is not None:
            longest = max((len(row.label) for row in frame.tenants), default=0)
            self._name_width = min(NAME_WIDTH_MAX, max(self._name_width, longest))
            yield heading_line(self._name_width)
        for row in rows:
            yield row_line(row, frame.interval_ns, name_width=self._name_width)
        yield ""
