"""The outermost parts of a JSON text, found without going down into them.

Every JSON parser has a depth beyond which it gives up, with all of the text. What somebody nests
without end must cost nobody but him, so here brackets are only counted. The text is not checked:
that is left to whoever reads the parts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]', re.DOTALL)
_OPEN, _CLOSE = b"{[", b"}]"
_KEY = re.compile(rb'\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*:', re.DOTALL)
_text = msgspec.json.Decoder(str)


def elements(content: bytes) -> list[bytes]:
    """Return the elements of an array. Raises msgspec.DecodeError when its brackets do not match."""
    return list(_parts(content, b"["))


def members(content: bytes) -> dict[str, bytes]:
    """Return the values of an object. Raises msgspec.DecodeError when its brackets do not match."""
    found = {}
    for part in _parts(content, b"{"):
        key = _KEY.match(part)
        if key is None:
            raise msgspec.DecodeError("a member has no key")
        found[_text.decode(key[1])] = part[key.end() :].strip()
    return found


def _parts(content: bytes, opening: bytes) -> Iterator[bytes]:
    stripped = content.strip()
    if not stripped.startswith(opening):
        raise msgspec.DecodeError("it is something else")
    depth, begin = 0, 1
    for token in _TOKEN.finditer(stripped):
        sign = token[0]
        if sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
        if depth == 0 or (depth == 1 and sign == b","):
            part = stripped[begin : token.start()].strip()
            if part:
                yield part
            begin = token.end()
        if depth == 0:
            return
    raise msgspec.DecodeError("it does not end")
