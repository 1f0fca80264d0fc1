"""The live view on a terminal: keys sort, filter and hold it."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Input, Static

from kura_shaper.errors import StateUnknownError
from kura_shaper.top.head import GAP, Phrase, flowed, head, is_stale
from kura_shaper.top.order import Order, matching, ordered
from kura_shaper.top.reading import State
from kura_shaper.top.text import plain
from kura_shaper.top.widgets import ALARM, Ages, Headings, Help, Tenants

if TYPE_CHECKING:
    from typing import Protocol

    from textual.app import ComposeResult

    from kura_shaper.clock import Clock
    from kura_shaper.top.frame import Frame
    from kura_shaper.top.reading import NoReading, Reading
    from kura_shaper.top.tracker import Tracker

    class Watch(Protocol):
        """What reads the device."""

        retransmits_note: str

        def read(self) -> Reading | NoReading:
            """Return what is there now."""
            ...


_AGE_EVERY_S, _NOTE_S = 0.5, 10
_SORT_KEYS = {
    "r": Order.RATE,
    "u": Order.USE,
    "b": Order.BORROWED,
    "d": Order.DROPS,
    "t": Order.RETRANSMITS,
    "k": Order.BACKLOG,
    "f": Order.FLOOR,
    "c": Order.CEILING,
    "n": Order.NAME,
}
# 80 characters, so that all of it is seen on the smallest terminal.
_KEYS = (
    ("r", "rate"),
    ("u", "used"),
    ("b", "borr"),
    ("d", "drop"),
    ("t", "retr"),
    ("n", "name "),
    ("/", "filter "),
    ("space", "hold "),
    ("?", "help "),
    ("q", "leave"),
)


def run_screen(
    watch: Watch, tracker: Tracker, *, clock: Clock, interval_ns: int, order: Order = Order.RATE, wanted: str = ""
) -> None:
    """Show a device until somebody leaves, or SIGTERM.

    What the reading thread failed of is raised here; StateUnknownError for a fault of the view itself.
    """
    app = TopApp(clock, interval_ns=interval_ns, order=order, wanted=wanted)
    app.reader = Reader(app, watch, tracker, interval_ns=interval_ns, clock=clock)
    # Without the mouse the terminal's own selection works, and names can be copied from it.
    app.run(mouse=False)
    app.reader.stop()
    if app.reader.fault is not None:
        raise app.reader.fault
    if app.return_code:
        raise StateUnknownError("the live view failed; the lines above say where", remedy="--plain goes on without it")


class Looked(Message):
    """The newest look at the device, as a frame, and what is to be said of retransmits."""

    def __init__(self, frame: Frame, note: str) -> None:
        super().__init__()
        self.frame, self.note = frame, note


class Reader(threading.Thread):
    """Reads until it is stopped and posts each frame to the app, which a fault of its own ends.

    In a thread, so that a kernel that takes its time never holds up the keys.
    """

    def __init__(self, app: TopApp, watch: Watch, tracker: Tracker, *, interval_ns: int, clock: Clock) -> None:
        # A daemon, so that a kernel that does not answer can't keep anybody from leaving.
        super().__init__(name="top-reader", daemon=True)
        self.fault: Exception | None = None
        self._app, self._watch, self._tracker = app, watch, tracker
        self._interval_ns, self._clock = interval_ns, clock
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End, and wait a little for a look that is under way."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=1)

    def run(self) -> None:
        """See Thread."""
        due_ns = self._clock.now_ns()
        try:
            while not self._stopping.is_set():
                frame = self._tracker.take(self._watch.read())
                self._app.post_message(Looked(frame, self._watch.retransmits_note))
                due_ns = max(due_ns + self._interval_ns, self._clock.now_ns())
                self._stopping.wait((due_ns - self._clock.now_ns()) / 1e9)
        except Exception as error:  # whatever it is, a view that no longer reads must not go on
            self.fault = error
            self._app.call_later(self._app.exit)


class TopApp(App[None]):
    """The whole view."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; }
    Input { height: 1; border: none; padding: 0; display: none; }
    Input:focus { border: none; }
    Headings { height: 1; }
    Tenants { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    Help { align: center middle; }
    Help > VerticalScroll { width: 74; height: auto; max-height: 100%; border: round; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "leave", priority=True),
        Binding("ctrl+z", "suspend_process", "suspend", priority=True),
        Binding("q", "quit", "leave"),
        # Ahead of the table, so that on a slow line, where keys come together, the next ones are already the filter's.
        Binding("slash", "filter", "filter", priority=True),
        Binding("escape", "unfilter", "no filter"),
        Binding("space", "hold", "hold"),
        Binding("question_mark", "help", "help"),
        *(Binding(key, f"sort('{order}')", f"sort by {order}") for key, order in _SORT_KEYS.items()),
    ]

    def __init__(self, clock: Clock, *, interval_ns: int, order: Order = Order.RATE, wanted: str = "") -> None:
        super().__init__(ansi_color=True)
        self.reader: Reader | None = None
        self._clock, self._interval_ns = clock, interval_ns
        self._order, self._wanted = order, wanted
        self._newest: Frame | None = None
        self._held: Frame | None = None
        self._note = ""
        self._head, self._foot = Static(markup=False), Static(markup=False)
        self._headings, self._table = Headings(), Tenants()
        self._entry = Input(wanted, placeholder="a part of a name or of a class id")

    def compose(self) -> ComposeResult:
        """See App."""
        yield from (self._head, self._headings, self._table, self._entry, self._foot)

    def on_mount(self) -> None:
        """Begin to read."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self._table.focus()
        self.set_interval(_AGE_EVERY_S, self._show_head)
        self._show()
        if self.reader is not None:
            self.reader.start()

    def on_looked(self, looked: Looked) -> None:
        """Show the newest frame."""
        self._newest = looked.frame
        if looked.note and looked.note != self._note:
            self.notify(plain(looked.note), title="retransmits", timeout=_NOTE_S, markup=False)
        self._note = looked.note
        if self._held is None:
            self._show()

    def on_resize(self) -> None:
        """Fit the lines to the terminal."""
        self.call_after_refresh(self._show)

    def on_input_changed(self, changed: Input.Changed) -> None:
        """Filter while somebody types."""
        self._wanted = changed.value
        self._show()

    def on_input_submitted(self) -> None:
        """Keep the filter and go back to the table."""
        self._close_entry()

    def action_filter(self) -> None:
        """Ask for a filter."""
        self._entry.display = True
        self.screen.set_focus(self._entry)

    def action_unfilter(self) -> None:
        """Show all tenants again."""
        self._entry.value = ""
        self._close_entry()

    def action_hold(self) -> None:
        """Hold what is shown, or go on."""
        self._held = None if self._held else self._newest
        self._show()

    def action_sort(self, order: str) -> None:
        """Sort by another column, and begin at its top."""
        self._order = Order(order)
        self._table.scroll_home(animate=False)
        self._show()

    def action_help(self) -> None:
        """Say what the columns mean."""
        self.push_screen(Help())

    def _close_entry(self) -> None:
        self._entry.display = False
        self.screen.set_focus(self._table)

    def _show(self) -> None:
        frame = self._held or self._newest
        rows = ordered(matching(frame.tenants, self._wanted), self._order) if frame else []
        if frame is not None:
            is_old = frame.state is not State.TREE or is_stale(
                frame, self._clock.now_ns(), interval_ns=self._interval_ns
            )
            self._table.show(frame, rows, ages=Ages.OLD if is_old else Ages.NEW)
        self._headings.show(self._order, name_width=self._table.name_width, trend_width=self._table.trend_width)
        self._foot.update(self._foot_text(len(rows)))
        self._show_head()

    def _show_head(self) -> None:
        frame = self._held or self._newest
        if frame is None:
            self._head.update(Text("reading ..."))
            return
        lines = head(frame, self._clock.now_ns(), interval_ns=self._interval_ns)
        shown = [line for phrases in lines for line in flowed(phrases, self.size.width)]
        self._head.update(Text("\n").join(_text(line) for line in shown))

    def _foot_text(self, count: int) -> Text:
        text = Text(GAP.join(f"{key} {word}" for key, word in _KEYS), no_wrap=True)
        frame = self._held or self._newest
        if self._wanted.strip():
            text = Text(f"{plain(self._wanted.strip())!r}: {count} of {len(frame.tenants) if frame else 0}{GAP}") + text
        return Text.assemble(("HELD", ALARM), GAP, text) if self._held else text


def _text(phrases: list[Phrase]) -> Text:
    return Text(GAP).join(Text(phrase.text, ALARM if phrase.alarms else "") for phrase in phrases)
