"""The live view: what keys do to it, and what it says when there is nothing to show."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from top_readings import ACME_CLASS, BETA_CLASS, BUDGET, FLEET, HOSTILE, ROOT, no_reading, reading

from kura_shaper.clock import FakeClock
from kura_shaper.top.reading import NoReading, Reading, State
from kura_shaper.top.tracker import Tracker
from kura_shaper.tree.snapshot import ClassCounters

pytest.importorskip("textual", reason="needs textual, which the extra `top` brings")

from textual.widgets import Static

from kura_shaper.top.screen import Looked, Reader, TopApp
from kura_shaper.top.widgets import Headings, Help, Tenants

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.pilot import Pilot

    from kura_shaper.top.frame import Frame

SECOND = 10**9
View = tuple[TopApp, "Pilot[None]"]


def frame(*, beta_bytes: int = 31_250_000) -> Frame:
    """Acme sends a tenth of a gigabit, beta a quarter of one unless told else."""
    tracker = Tracker("eth0", FLEET.document)
    tracker.take(reading(0))
    counters = {
        ACME_CLASS: ClassCounters(12_500_000, dropped_packets=3),
        BETA_CLASS: ClassCounters(beta_bytes),
        BUDGET: ClassCounters(12_500_000 + beta_bytes),
        ROOT: ClassCounters(12_500_000 + beta_bytes),
    }
    return tracker.take(reading(1, counters))


def lines(app: TopApp) -> list[str]:
    """The table as it is on the screen."""
    table = app.query_one(Tenants)
    shown = [table.render_line(y).text.rstrip() for y in range(table.size.height)]
    return [line for line in shown if line]


def names(app: TopApp) -> list[str]:
    return [line.split()[0] for line in lines(app)]


def is_helping(app: TopApp) -> bool:
    return isinstance(app.screen, Help)


def words(app: TopApp) -> str:
    """What the head and the foot say."""
    return "\n".join(str(static.visual) for static in app.screen_stack[0].query(Static))


def viewed(
    test: Callable[[TopApp, Pilot[None]], Awaitable[None]],
    *,
    clock: FakeClock | None = None,
    size: tuple[int, int] = (100, 20),
    shown: Frame | None = None,
) -> TopApp:
    """Run a test in a view of a frame, read 40 ms ago."""
    app = TopApp(clock or FakeClock(2_040_000_000), interval_ns=SECOND)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            app.post_message(Looked(shown or frame(), ""))
            await pilot.pause()
            await test(app, pilot)

    asyncio.run(asyncio.wait_for(run(), 30))
    return app


def test_tenants_come_by_rate_with_a_trend_and_the_device_above_them() -> None:
    async def test(app: TopApp, _: Pilot[None]) -> None:
        assert names(app) == ["t2b0", "t2a7"]
        assert "250.0M" in lines(app)[0]
        assert lines(app)[0].endswith("▃")
        assert "eth0  shape single  350.0M of budget 3G (11%)" in words(app)
        assert "read 40 ms ago" in words(app)

    viewed(test)


@pytest.mark.parametrize(("key", "first"), [("r", "t2b0"), ("d", "t2a7"), ("n", "t2a7"), ("c", "t2b0"), ("f", "t2b0")])
def test_a_key_sorts(key: str, first: str) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        assert names(app)[0] == first

    viewed(test)


def test_the_heading_that_is_sorted_by_stands_out() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        reversed_ = [s.text for s in app.query_one(Headings).render_line(0) if s.style and s.style.reverse]
        assert reversed_ == ["DROP/S"]

    viewed(test)


def test_a_filter_is_typed_kept_and_taken_away() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"2b0")
        assert names(app) == ["t2b0"]
        await pilot.press("enter", "d")  # which sorts again, and is not typed
        assert names(app) == ["t2b0"]
        assert "'2b0': 1 of 2" in words(app)
        await pilot.press("escape")
        assert len(names(app)) == 2

    viewed(test)


def test_keys_that_come_all_at_once_are_the_filters_from_the_slash_on() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        from textual.events import Key

        for char in "/dn2a7":
            app.post_message(Key("slash" if char == "/" else char, char))
        await pilot.pause()
        assert "'dn2a7': 0 of 2" in words(app)

    viewed(test)


def test_a_held_view_stays_and_grows_old_until_it_is_let_go() -> None:
    clock = FakeClock(2_040_000_000)

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("space")
        clock.wait_ns(30 * SECOND)
        app.post_message(Looked(frame(beta_bytes=0), ""))
        await pilot.press("r")
        assert names(app) == ["t2b0", "t2a7"]
        assert "HELD" in words(app)
        assert "read 30 s ago" in words(app)
        await pilot.press("space")
        assert names(app) == ["t2a7", "t2b0"]
        assert "HELD" not in words(app)

    viewed(test, clock=clock)


def test_a_device_that_is_gone_leaves_no_row_behind() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        tracker = Tracker("eth0")
        tracker.take(reading(0))
        app.post_message(Looked(tracker.take(no_reading(1, State.GONE, "there is no device eth0 now")), ""))
        await pilot.pause()
        assert lines(app) == []
        assert "there is no device eth0 now" in words(app)

    viewed(test)


def test_what_could_not_be_read_stays_but_dim() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        app.post_message(Looked(replace(frame(), state=State.UNKNOWN, reason="it changes"), ""))
        await pilot.pause()
        first = next(iter(app.query_one(Tenants).render_line(0)))
        assert first.style is not None
        assert first.style.dim
        assert "what is shown is old: it changes" in words(app)

    viewed(test)


def test_help_opens_and_any_key_closes_it_without_a_further_meaning() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        assert is_helping(app)
        app.post_message(Looked(frame(beta_bytes=0), ""))
        await pilot.press("q")
        assert not is_helping(app)
        assert app.is_running
        assert names(app) == ["t2a7", "t2b0"]

    viewed(test)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_a_key_leaves(key: str) -> None:
    async def test(_: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)

    app = viewed(test)
    assert not app.is_running
    assert app.return_code == 0


def test_why_retransmits_are_not_counted_is_said_once() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        for _ in range(3):
            app.post_message(Looked(frame(), f"no privilege{HOSTILE}"))
        await pilot.pause()
        (told,) = app._notifications
        assert told.message.isprintable()
        assert told.message.startswith("no privilege")

    viewed(test)


def test_no_name_does_anything_to_the_terminal() -> None:
    async def test(app: TopApp, _: Pilot[None]) -> None:
        for line in (*lines(app), *words(app).splitlines()):
            assert line.isprintable()

    rows = tuple(replace(row, name=HOSTILE) for row in frame().tenants)
    viewed(test, shown=replace(frame(), device=HOSTILE, tenants=rows, faults=(HOSTILE,)))


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_line_fits_its_terminal_and_the_trend_goes_first(width: int) -> None:
    async def test(app: TopApp, _: Pilot[None]) -> None:
        assert all(len(line) <= width for line in lines(app))
        assert bool(app.query_one(Tenants).trend_width) == (width >= 100)

    viewed(test, size=(width, 20))


def test_thousands_of_tenants_cost_only_the_lines_in_sight() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        assert len(lines(app)) == app.query_one(Tenants).size.height
        app.query_one(Tenants).scroll_end(animate=False)
        await pilot.pause()
        assert names(app)[-1] == "0x1487"

    one = frame().tenants[0]
    rows = tuple(
        replace(one, classid=one.classid._replace(minor=0x100 + n), name="", bits_per_second=9_999 - n)
        for n in range(5_000)
    )
    viewed(test, shown=replace(frame(), tenants=rows))


class Watch:
    """Reads what a test put there; then it fails."""

    retransmits_note = ""

    def __init__(self, *found: Reading | NoReading) -> None:
        self.found = list(found)

    def read(self) -> Reading | NoReading:
        if not self.found:
            raise ZeroDivisionError
        return self.found.pop(0)


def test_the_reader_shows_each_reading_and_a_fault_of_it_ends_the_view() -> None:
    app = TopApp(FakeClock(), interval_ns=SECOND)
    watch = Watch(reading(0), reading(1))
    # The clock stands still, so that the reader waits for as long as it may, which is not at all.
    app.reader = Reader(app, watch, Tracker("eth0"), interval_ns=0, clock=FakeClock())

    async def run() -> None:
        async with app.run_test() as pilot:
            while app.is_running:
                await pilot.pause(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert isinstance(app.reader.fault, ZeroDivisionError)
    assert watch.found == []
    app.reader.stop()
    assert app.reader not in threading.enumerate()
