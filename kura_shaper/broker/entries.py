"""A file of settings, read entry by entry: everything that is wrong is noted with its key path, and told at once."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kura_shaper.broker.protocol.frames import CLIENT_ID_PATTERN
from kura_shaper.broker.protocol.limits import KIB, MIB
from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.tenants import check
from kura_shaper.tenants.check import Claims, Mapping, Value
from kura_shaper.tenants.file import read_document
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from enum import StrEnum

T = TypeVar("T")

NAMESPACES_MAX, DYNAMO_NAMESPACE_CHARACTERS_MAX = 64, 253
_DURATION = re.compile(r"([0-9]{1,7})(ms|s|m)", re.ASCII)
_DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000}
_SIZE = re.compile(r"([0-9]{1,10})(KiB|MiB|)", re.ASCII)
_SIZE_BYTES = {"": 1, "KiB": KIB, "MiB": MIB}
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(kbit|Mbit|Gbit)", re.ASCII)
_RATE_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_RATE_BITS_MIN, _RATE_BITS_MAX = 256 * 10**3, 100 * 10**9
_PATH_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*", re.ASCII)


class SettingsError(UsageError):
    """Settings that can't be used; `problems` are all that is wrong with them, one line each."""

    code = "settings"

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SeveralError(DocumentError):
    """What is wrong with several parts of one value; `errors` has each, with its own place."""

    def __init__(self, errors: Sequence[DocumentError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)


class Parts:
    """The parts of one value while they are read, so that all that is wrong with it is said at once."""

    def __init__(self) -> None:
        self._errors: list[DocumentError] = []

    def read(self, reader: Callable[[Value], T], value: Value | None) -> T | None:
        """Return what a reader makes of a part, None where there is none or it is refused."""
        if value is None:
            return None
        try:
            return reader(value)
        except SeveralError as error:
            self._errors.extend(error.errors)
        except DocumentError as error:
            self._errors.append(error)
        return None

    def add(self, error: DocumentError) -> None:
        """Note what is wrong with several parts, or with none of them alone."""
        self._errors.append(error)

    def raise_if_wrong(self) -> None:
        """Raise what was refused."""
        if self._errors:
            raise SeveralError(self._errors)


class Entries:
    """The entries of a file while they are read, and what was wrong with them."""

    def __init__(self, entries: dict[str, Value], file: str) -> None:
        self._entries, self._file = entries, file
        self.problems: list[str] = []

    @classmethod
    def of_file(cls, path: Path, known: Sequence[str]) -> Entries:
        """Return the entries of a file, with each key noted that is not known. Raises SettingsError for no mapping."""
        try:
            root = read_document(path, remedy=f"start with {known[0]}:")
            # Only that it is a mapping: what it may not have is said beside everything else.
            entries = check.mapping(root, optional=root.entries if isinstance(root, Mapping) else ())
        except DocumentError as error:
            raise SettingsError((str(error),)) from error
        made = cls(entries, str(path))
        for key, value in entries.items():
            made._require_known(key, value, known)
        return made

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def read(self, key: str, reader: Callable[[Value], T]) -> T | None:
        """Return what a reader makes of an entry, None where there is none or it is refused."""
        if key not in self._entries:
            return None
        try:
            return reader(self._entries[key])
        except SeveralError as error:
            self.problems.extend(map(str, error.errors))
        except DocumentError as error:
            self.problems.append(str(error))
        return None

    def require(self, *keys: str) -> None:
        """Note each of these that is missing."""
        for key in keys:
            if key not in self._entries:
                self.refuse(key, "is missing", remedy=f"add {key}:")

    def refuse(self, key: str, message: str, *, remedy: str) -> None:
        """Note what is wrong with an entry, or with an item of it such as KEY[1].expose, or that it is not there."""
        entry = self._entries.get(key.partition("[")[0])
        line = entry.line if entry else 0
        self.problems.append(str(DocumentError(message, file=self._file, line=line, path=key, remedy=remedy)))

    def raise_if_wrong(self) -> None:
        """Raise SettingsError when anything was noted."""
        if self.problems:
            raise SettingsError(tuple(self.problems))

    def _require_known(self, key: str, value: Value, known: Sequence[str]) -> None:
        try:
            check.mapping(Mapping(self._file, value.line, "", {key: value}), optional=known)
        except DocumentError as error:
            self.problems.append(str(error))


# What one entry may be.


def client_id(content: str) -> str:
    """Return the id of a client of the bus."""
    if not re.fullmatch(CLIENT_ID_PATTERN, content):
        remedy = "use at most 63 of letters, digits, . _ and -, first and last a letter or digit"
        raise UsageError(f"{check.quoted(content)} is no client id", remedy=remedy)
    return content


def dynamo_namespace(content: str) -> str:
    """Return the name of a Dynamo namespace."""
    if not content or len(content) > DYNAMO_NAMESPACE_CHARACTERS_MAX or not content.isprintable():
        raise UsageError(f"{check.quoted(content)} is no Dynamo namespace", remedy="use 1 to 253 characters")
    return content


def file_path(content: str) -> Path:
    """Return the path of a file, which may not be there yet."""
    if not content or not content.isprintable():
        raise UsageError(f"{check.quoted(content)} is no path", remedy="write the path of a file")
    return Path(content)


def url_prefix(content: str) -> str:
    """Return what comes before the paths of the bus, without a / at its end."""
    prefix = content.rstrip("/")
    if not _PATH_PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
        raise UsageError("has a path that is none", remedy="write /prefix, of letters, digits, . _ ~ and -")
    return prefix


def text(reader: Callable[[str], T]) -> Callable[[Value], T]:
    """Return a reader of values of a reader of texts."""
    return lambda value: check.literal(value, reader)


def listed(what: str, reader: Callable[[str], T], most: int) -> Callable[[Value], tuple[T, ...]]:
    """Return a reader of 1 to so many different things, or of none where that means something."""

    def read(value: Value) -> tuple[T, ...]:
        items = check.sequence(value)
        if not 1 <= len(items) <= most and not (what == "network" and not items):
            raise value.refused(f"has {len(items)} items", remedy=f"give 1 to {most}")
        return check.distinct(value, reader, claims=Claims(what), read=check.literal)

    return read


def whole(least: int, most: int) -> Callable[[Value], int]:
    """Return a reader of whole numbers."""

    def read(content: str) -> int:
        number = check.integer(content)
        if not least <= number <= most:
            raise UsageError(f"{number} is out of range", remedy=f"use {least} to {most}")
        return number

    return text(read)


def duration_ms(least_ms: int, most_ms: int) -> Callable[[Value], int]:
    """Return a reader of durations such as 250ms, 5s and 1m, in milliseconds."""

    def read(content: str) -> int:
        match = _DURATION.fullmatch(content)
        if match is None:
            raise UsageError(f"{check.quoted(content)} is no duration", remedy="write e.g. 250ms, 5s or 1m")
        found_ms = int(match[1]) * _DURATION_MS[match[2]]
        if not least_ms <= found_ms <= most_ms:
            raise UsageError(f"{content} is out of range", remedy=f"use {least_ms}ms to {most_ms}ms")
        return found_ms

    return text(read)


def size_bytes(least_bytes: int, most_bytes: int) -> Callable[[Value], int]:
    """Return a reader of sizes such as 65536, 256KiB and 1MiB, in bytes."""

    def read(content: str) -> int:
        match = _SIZE.fullmatch(content)
        found_bytes = int(match[1]) * _SIZE_BYTES[match[2]] if match else -1
        if not least_bytes <= found_bytes <= most_bytes:
            bounds = f"{_shown(least_bytes)} to {_shown(most_bytes)}"
            raise UsageError(f"{check.quoted(content)} is no size from {bounds}", remedy="write e.g. 256KiB")
        return found_bytes

    return text(read)


def rate(content: str) -> Rate:
    """Return a rate such as 500kbit, 200Mbit and 2.5Gbit."""
    match = _RATE.fullmatch(content)
    found = int(Decimal(match[1]) * _RATE_BITS[match[2]]) if match else 0
    if not _RATE_BITS_MIN <= found <= _RATE_BITS_MAX:
        raise UsageError(f"{check.quoted(content)} is no rate from 256kbit to 100Gbit", remedy="write e.g. 200Mbit")
    return Rate(found)


def choice(kind: type[StrEnum]) -> Callable[[Value], Any]:
    """Return a reader of one of a few words."""

    def read(content: str) -> StrEnum:
        if content not in list(kind):
            raise UsageError(f"{check.quoted(content)} is not known", remedy=f"use {', '.join(kind)}")
        return kind(content)

    return text(read)


def _shown(size: int) -> str:
    for unit in ("MiB", "KiB"):
        if size and size % _SIZE_BYTES[unit] == 0:
            return f"{size // _SIZE_BYTES[unit]}{unit}"
    return str(size)
