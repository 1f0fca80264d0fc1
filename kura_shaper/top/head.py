"""The lines above the table: the device, its budget, what isn't the tenants', and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.top.reading import State
from kura_shaper.top.text import bytes_text, limit_text, number_text, percent_text, plain, rate_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kura_shaper.top.frame import Frame, Share, Totals

GAP = "  "
EVENT_SHOWN_NS = 60_000_000_000
_LATE_NS = 1_000_000_000
_LATE_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Phrase:
    """A few words, printable ASCII; `alarms` where somebody should look."""

    text: str
    alarms: bool = False


def is_stale(frame: Frame, now_ns: int, *, interval_ns: int) -> bool:
    """Whether what is shown is older than a few of the intervals that readings come in."""
    return frame.read_at_ns is not None and now_ns - frame.read_at_ns > _LATE_INTERVALS * interval_ns + _LATE_NS


def head(frame: Frame, now_ns: int, *, interval_ns: int) -> tuple[tuple[Phrase, ...], ...]:
    """Return the lines, each of phrases. The first is of the device, what went wrong comes after the second."""
    first = [Phrase(plain(frame.device))]
    lines: list[tuple[Phrase, ...]] = []
    totals = frame.totals
    if totals is None:
        first.append(Phrase(plain(frame.reason), alarms=True))
    else:
        first += _budget(totals)
        lines.append(tuple(_beside(totals)))
    age = _age(frame, now_ns, interval_ns=interval_ns)
    if age:
        first.append(age)
    lines.insert(0, tuple(first))
    lines += [(phrase,) for phrase in _troubles(frame, now_ns)]
    return tuple(lines)


def flowed(phrases: Iterable[Phrase], width: int) -> list[list[Phrase]]:
    """Return phrases in lines of so many characters, broken between phrases alone."""
    lines: list[list[Phrase]] = [[]]
    room = width
    for phrase in phrases:
        if lines[-1] and len(phrase.text) > room:
            lines.append([])
            room = width
        lines[-1].append(phrase)
        room -= len(phrase.text) + len(GAP)
    return lines


def _budget(totals: Totals) -> Iterator[Phrase]:
    if totals.shape:
        yield Phrase(f"shape {totals.shape}")
    node, budget = totals.node.bits_per_second, totals.budget.bits_per_second
    part = "" if node is None else f" ({percent_text(node * 1000 // max(1, budget))})"
    yield Phrase(f"{rate_text(node)} of budget {limit_text(totals.budget)}{part}")
    yield Phrase(f"floors {limit_text(totals.floors)}", alarms=totals.floors > totals.budget)
    if totals.promised is not None and totals.promised > totals.budget:
        yield Phrase(f"promised {limit_text(totals.promised)}", alarms=True)
    yield Phrase(f"device {rate_text(totals.device_bits_per_second)}")


def _beside(totals: Totals) -> Iterator[Phrase]:
    yield _share("host", totals.host)
    yield _share("gateway", totals.gateway)
    unattributed = totals.unattributed
    yield _share("unattributed", unattributed, alarms=unattributed.sent_bytes > 0)
    if totals.unknown.sent_bytes:
        yield _share("unknown marks", totals.unknown, alarms=bool(totals.unknown.bits_per_second))
    outside = totals.outside
    if outside is None:
        yield Phrase("outside -")
    elif outside.sent_bytes:
        yield _share("outside", outside)
    if totals.direct_packets:
        words = f"direct {number_text(totals.direct_packets)} packets"
        yield Phrase(words, alarms=bool(totals.new_direct_packets))


def _share(name: str, share: Share, *, alarms: bool = False) -> Phrase:
    so_far = f" ({bytes_text(share.sent_bytes)} so far)" if alarms else ""
    return Phrase(f"{name} {rate_text(share.bits_per_second)}{so_far}", alarms=alarms)


def _age(frame: Frame, now_ns: int, *, interval_ns: int) -> Phrase | None:
    if frame.read_at_ns is None:
        return None
    over = f"over {seconds_text(frame.interval_ns)}, " if frame.interval_ns else ""
    is_late = is_stale(frame, now_ns, interval_ns=interval_ns)
    return Phrase(f"{over}read {seconds_text(now_ns - frame.read_at_ns)} ago", alarms=is_late)


def _troubles(frame: Frame, now_ns: int) -> Iterator[Phrase]:
    if frame.state is State.UNKNOWN and frame.totals is not None:
        yield Phrase(f"can't be read now, what is shown is old: {plain(frame.reason)}", alarms=True)
    for fault in frame.faults:
        yield Phrase(f"fault: {plain(fault)}", alarms=True)
    event = frame.event
    if event is not None and frame.state is State.TREE and now_ns - event.at_ns < EVENT_SHOWN_NS:
        yield Phrase(f"{plain(event.words)} ({seconds_text(now_ns - event.at_ns)} ago)", alarms=True)
