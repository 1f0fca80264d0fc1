"""The parts of the live view: the table, of which only the lines in sight are ever made, and its headings.

So thousands of tenants cost what fifty do.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from kura_shaper.top.order import Order
from kura_shaper.top.table import COLUMNS, GAP, NAME_WIDTH_MAX, NAME_WIDTH_MIN, NUMBERS_WIDTH, row_line
from kura_shaper.top.text import sparkline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from textual.app import ComposeResult
    from textual.events import Key

    from kura_shaper.top.frame import Frame, TenantRow

_TREND_WIDTH_MIN, _TREND_WIDTH_MAX = 6, 60
_NEAR_CEILING_PERMILLE = 950
ALARM = Style(color="red", bold=True)
_HEADING, _SORTED = Style(bold=True), Style(bold=True, reverse=True)
_NEAR, _OLD, _PLAIN = Style(color="yellow"), Style(dim=True), Style()
_HELP = """\
TENANT  its name, or its class id where nobody tells the name
RATE    bit/s over the last interval, at its class; - is not known
FLOOR   what it may always send, as the kernel has it
CEIL    what it may never exceed
USED    its rate as a part of its ceiling
BORR    the part of its packets that went beyond its floor
DROP/S  packets that its queue dropped, a second
RETR/S  TCP segments of its sockets that were sent again, a second
QUEUE   bytes that wait in its queue now
TREND   its last rates: the lowest bar is nothing, the highest the
        ceiling, ? a moment that isn't known

red: drops   yellow: retransmits, or near its ceiling   dim: old

device        what the device itself counts
unattributed  payload from gateway ports without a mark
outside       bytes that left the device and passed no class
              (in shape mq also the host's on its own queues)
direct        packets that passed the tree by

sort: r u b d t n, f floor, c ceiling, k queue; / filters by name or
class id, escape ends that; space holds the view; arrows scroll
"""


class Ages(Enum):
    """Whether what is shown is of a moment ago."""

    NEW = "new"
    OLD = "old"


class Tenants(ScrollView, can_focus=True):
    """The table's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.name_width = NAME_WIDTH_MIN
        self._rows: Sequence[TenantRow] = ()
        self._frame: Frame | None = None
        self._ages = Ages.NEW

    @property
    def trend_width(self) -> int:
        """How many bars fit beside the numbers; 0 where they would be too few."""
        room = self.scrollable_content_region.width - self.name_width - NUMBERS_WIDTH - len(GAP)
        return min(room, _TREND_WIDTH_MAX) if room >= _TREND_WIDTH_MIN else 0

    def show(self, frame: Frame, rows: Sequence[TenantRow], *, ages: Ages) -> None:
        """Show these rows of a frame."""
        self._frame, self._rows, self._ages = frame, rows, ages
        longest = max((len(row.label) for row in frame.tenants), default=0)
        room = self.size.width - NUMBERS_WIDTH - len(GAP) - _TREND_WIDTH_MIN
        self.name_width = max(NAME_WIDTH_MIN, min(longest, NAME_WIDTH_MAX, room))
        self.virtual_size = Size(self.size.width, len(rows))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """See Widget."""
        at, width = y + self.scroll_offset.y, self.size.width
        if self._frame is None or at >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        row = self._rows[at]
        line = row_line(row, self._frame.interval_ns, name_width=self.name_width)
        bars = self.trend_width
        if bars:
            line += GAP + sparkline(row.history[-bars:], row.ceiling.bits_per_second).rjust(bars)
        strip = Strip([Segment(line, self.rich_style + self._style(row))], len(line))
        return strip.adjust_cell_length(width, self.rich_style)

    def _style(self, row: TenantRow) -> Style:
        if self._ages is Ages.OLD:
            return _OLD
        if row.dropped_packets:
            return ALARM
        is_near = (row.ceiling_permille or 0) >= _NEAR_CEILING_PERMILLE
        return _NEAR if row.retransmits or is_near else _PLAIN


class Headings(Widget):
    """The line above the table; what it is sorted by stands out."""

    def __init__(self) -> None:
        super().__init__()
        self._order, self._name_width, self._trend_width = Order.RATE, NAME_WIDTH_MIN, 0

    def show(self, order: Order, *, name_width: int, trend_width: int) -> None:
        """Show the headings of a table of these widths."""
        self._order, self._name_width, self._trend_width = order, name_width, trend_width
        self.refresh()

    def render_line(self, y: int) -> Strip:  # noqa: ARG002 - there is one line
        """See Widget."""
        return Strip(self._segments()).adjust_cell_length(self.size.width, self.rich_style)

    def _segments(self) -> Iterator[Segment]:
        for text, order in self._cells():
            style = _SORTED if order is self._order else _HEADING
            padding = len(text) - len(text.lstrip())
            yield Segment(text[:padding], self.rich_style)
            yield Segment(text[padding:], self.rich_style + style)

    def _cells(self) -> Iterator[tuple[str, Order | None]]:
        yield "TENANT", Order.NAME
        yield " " * (self._name_width - len("TENANT")), None
        for column in COLUMNS:
            yield GAP + column.heading.rjust(column.width), column.order
        if self._trend_width:
            yield GAP + "TREND".rjust(self._trend_width), None


class Help(ModalScreen[None]):
    """What the columns and keys mean, until a key is pressed."""

    def compose(self) -> ComposeResult:
        """See Screen."""
        yield VerticalScroll(Static(_HELP, markup=False))

    def on_key(self, key: Key) -> None:
        """Leave."""
        key.stop()
        if self.is_current:  # else a key before this one has closed it
            self.dismiss()
