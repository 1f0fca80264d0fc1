"""Numbers and words as a terminal shows them: short, of a known width, and never a control character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.units import Rate

NOT_KNOWN = "-"
_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")
_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = "?"
_SECOND_NS = 1_000_000_000


def plain(text: str) -> str:
    """Return a text that can do nothing to a terminal: what isn't printable ASCII becomes `?`.

    A name of a device or of a program in the kernel is chosen by whoever made it.
    """
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def cut(text: str, width: int) -> str:
    """Return a text of at most so many characters; `~` says that there was more."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"[:width]


def number_text(value: int) -> str:
    """Return a number as people read it, in 6 characters at most: `0`, `950`, `12.3k`, `812.4M`."""
    size = 0
    while size < len(_SUFFIXES) - 1 and _tenths(value, 1000**size) >= 10_000:
        size += 1
    tenths = _tenths(value, 1000**size)
    return f"{tenths // 10}.{tenths % 10}{_SUFFIXES[size]}" if size else str(value)


def _tenths(value: int, unit: int) -> int:
    return (value * 10 + unit // 2) // unit


def rate_text(bits_per_second: int | None) -> str:
    """Return a measured rate."""
    return NOT_KNOWN if bits_per_second is None else number_text(bits_per_second)


def limit_text(rate: Rate) -> str:
    """Return a rate that somebody chose, without a needless digit: `25M`."""
    number = number_text(rate.bits_per_second)
    return number.replace(".0", "")


def bytes_text(count: int) -> str:
    """Return an amount of bytes."""
    return f"{number_text(count)}B"


def per_second_text(count: int | None, interval_ns: int | None) -> str:
    """Return how many of something there were a second, rounded up: one is never shown as none."""
    if count is None or not interval_ns:
        return NOT_KNOWN
    return number_text(-(-count * _SECOND_NS // interval_ns))


def percent_text(permille: int | None) -> str:
    """Return a part as whole percents, rounded down: 100 % is only what is whole."""
    return NOT_KNOWN if permille is None else f"{min(permille, 9990) // 10}%"


def seconds_text(duration_ns: int) -> str:
    """Return a time as people say it: `40 ms`, `1.0 s`, `12 s`, `3 min`."""
    if duration_ns < _SECOND_NS // 10:
        return f"{max(0, duration_ns) // 1_000_000} ms"
    if duration_ns < 10 * _SECOND_NS:
        tenths = _tenths(duration_ns, _SECOND_NS)
        return f"{tenths // 10}.{tenths % 10} s"
    seconds = duration_ns // _SECOND_NS
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


def sparkline(history: Iterable[int | None], most: int) -> str:
    """Return a bar for each rate: the lowest is nothing sent, the highest the ceiling, `?` what isn't known."""
    return "".join(_bar(value, max(1, most)) for value in history)


def _bar(value: int | None, most: int) -> str:
    if value is None:
        return _GAP
    top = len(_LEVELS) - 1
    return _LEVELS[0] if value == 0 else _LEVELS[1 + min(top - 1, value * top // most)]
