"""Lines and sections of an HAProxy configuration as values, and the only place that turns them into text.

Every word passes `quote`, so no value can end its word, its line or its section,
whatever a tenants document carries. There is no template language: the phrase that
begins a line is written in this package, everything after it is one word each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import LiteralString

# HAProxy's own limits on one line (MAX_LINE_ARGS and LINESIZE).
MAX_WORDS = 64
MAX_LINE_CHARS = 2048

_BARE_CHARS = r"[A-Za-z0-9_.,:;/@%+=*()\[\]{}<>!?|&^~-]+"
_BARE = re.compile(_BARE_CHARS, re.ASCII)
_BARE_LINE = re.compile(f"{_BARE_CHARS}(?: {_BARE_CHARS})*", re.ASCII)
_BARE_LINES = re.compile(f"{_BARE_CHARS}(?:[ \\n]{_BARE_CHARS})*", re.ASCII)
# Within single quotes HAProxy takes every character as it is, except the quote and the line's end.
_QUOTABLE = re.compile(r"[ -&(-~]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)


class WordError(UsageError):
    """A value that can't stand in a configuration without changing its meaning."""

    code = "haproxy_word"


def quote(word: str) -> str:
    """Return the word as HAProxy reads it back: bare where that is safe, else in single quotes.

    Raises WordError for a quote, a control character, a line's end, NUL or anything beyond ASCII.
    """
    if _BARE.fullmatch(word):
        return word
    if not _QUOTABLE.fullmatch(word):
        raise WordError(f"{word[:64]!r} can't be written in a configuration", remedy="use printable ASCII, no quotes")
    return f"'{word}'"


@dataclass(frozen=True, slots=True)
class Line:
    """One directive: its words, unquoted."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        if not 0 < len(self.words) <= MAX_WORDS:
            raise WordError(f"a line of {len(self.words)} words", remedy=f"HAProxy reads 1 to {MAX_WORDS}")
        text = " ".join(self.words)
        # Nearly every line is bare, and seen to be so at once: a word with a blank in it adds to their count.
        if not (_BARE_LINE.fullmatch(text) and text.count(" ") == len(self.words) - 1):
            text = " ".join(map(quote, self.words))
        if len(text) > MAX_LINE_CHARS:
            raise WordError(
                f"a line of {len(text)} characters: {text[:64]!r}", remedy=f"HAProxy reads {MAX_LINE_CHARS}"
            )
        return text


def line(phrase: LiteralString, *words: str) -> Line:
    """Return a line of the phrase's own words, then one word for each further argument."""
    return Line(_split(phrase) + words)


@lru_cache(maxsize=1024)
def _split(phrase: str) -> tuple[str, ...]:
    return tuple(phrase.split())


@dataclass(frozen=True, slots=True)
class Section:
    """One section: keyword, name ("" for `global`), the defaults section that it starts from, and its lines."""

    keyword: LiteralString
    name: str
    lines: tuple[Line, ...]
    base: str = ""

    def header(self) -> str:
        """Return the section's first line. Raises WordError for a name that HAProxy would not read as one."""
        words: list[str] = [self.keyword]
        for name in filter(None, (self.name, self.base)):
            if not _NAME.fullmatch(name):
                raise WordError(f"{name[:64]!r} is no section name", remedy="use letters, digits, . _ : and -")
        if self.name:
            words.append(self.name)
        if self.base:
            words += ("from", self.base)
        text = " ".join(words)
        return text if len(text) <= MAX_LINE_CHARS else str(Line(tuple(words)))


def to_bytes(sections: Iterable[Section]) -> bytes:
    """Return the sections as a configuration file, which ends with a line feed. Raises WordError."""
    return ("\n\n".join(map(_block, sections)) + "\n").encode("ascii")


def _block(section: Section) -> str:
    """Return a section's text: at once where every word of it is bare, else line by line."""
    rows = [" ".join(line.words) for line in section.lines]
    text = "\n".join(rows)
    # A blank or a line feed within a word would add to their count, an empty word would be no match.
    words = [len(line.words) for line in section.lines]
    is_bare = (
        _BARE_LINES.fullmatch(text)
        and text.count(" ") == sum(words) - len(words)
        and text.count("\n") == len(words) - 1
        and max(words) <= MAX_WORDS
        and len(max(rows, key=len)) <= MAX_LINE_CHARS
    )
    return "\n    ".join((section.header(), *(rows if is_bare else map(str, section.lines))))
