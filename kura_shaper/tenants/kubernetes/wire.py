"""What an API server says, as values: pages of a list, events of a watch, refusals.

No answer is believed by its status alone. Something between may answer 200 with a page of
HTML, and a server that starts answers 404 and 503 in plain text; neither is an empty list.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kura_shaper.errors import StateUnknownError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

Raw = dict[str, Any]
Key = tuple[str, str]

OK = 200
GONE = 410
_SHOWN_CHARACTERS = 200
_REMEDIES = {
    401: "check the credentials",
    403: "grant get, list and watch",
    404: "is the custom resource definition installed?",
}


class ApiError(StateUnknownError):
    """The API server could not be asked, or did not say what was asked. Nothing follows from it.

    `status` is that of HTTP, 0 where there was no answer.
    """

    code: ClassVar[str] = "api"

    def __init__(self, message: str, *, status: int = 0, remedy: str = "", retry_after_ns: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.retry_after_ns = retry_after_ns


class GoneError(ApiError):
    """The version that was asked for is too old: only a new list tells what is."""

    code: ClassVar[str] = "api_gone"


class Answer(Protocol):
    """An answer whose body is still to be read."""

    @property
    def status(self) -> int:
        """The status of HTTP."""
        ...

    @property
    def retry_after_ns(self) -> int:
        """How long the server wants to be left alone; 0 where it does not say."""
        ...

    async def body(self) -> bytes:
        """Return all of it."""
        ...

    def lines(self) -> AsyncIterator[bytes]:
        """Return each line when it comes."""
        ...


class Api(Protocol):
    """An API server that can be asked."""

    def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AbstractAsyncContextManager[Answer]:
        """Ask, and be given up on after so long without a byte, or so long in all.

        Raises ApiError for everything that comes between; also while the answer is read.
        """
        ...


class Kind(StrEnum):
    """What an event of a watch says of its object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class Item:
    """One object: its key, its version, and all of it."""

    key: Key
    version: str
    raw: Raw


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list. `more` asks for the next one; it is empty on the last."""

    items: tuple[Item, ...]
    version: str
    more: str


@dataclass(frozen=True, slots=True)
class Event:
    """A change, or a bookmark, whose item has nothing but a version."""

    kind: Kind
    item: Item


def refused(status: int, body: bytes, *, retry_after_ns: int = 0) -> ApiError:
    """Return the error that an answer other than 200 is."""
    words = body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", errors="replace")
    with suppress(ValueError, RecursionError):
        told = json.loads(body)
        if isinstance(told, dict) and isinstance(told.get("message"), str):
            words = told["message"]
    kind = GoneError if status == GONE else ApiError
    remedy = _REMEDIES.get(status, "")
    return kind(f"{status}: {_one_line(words)}", status=status, remedy=remedy, retry_after_ns=retry_after_ns)


def _one_line(words: str) -> str:
    line = " ".join(words.split())[:_SHOWN_CHARACTERS]
    return line if line.isprintable() else repr(line)[1:-1]


def _mapping(value: object, what: str) -> Raw:
    if not isinstance(value, dict):
        raise ApiError(f"the answer is no {what}", remedy="is this the address of an API server?")
    return value


def _decoded(text: bytes, what: str) -> Raw:
    try:
        return _mapping(json.loads(text), what)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the answer is no {what}: {_one_line(str(error))}") from error


def _word(found: Mapping[str, Any], key: str, what: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{what} has no {key}")
    return value


def _item(value: object) -> Item:
    raw = _mapping(value, "object")
    metadata = _mapping(raw.get("metadata"), "object")
    namespace = metadata.get("namespace")
    key = (namespace if isinstance(namespace, str) else "", _word(metadata, "name", "an object"))
    return Item(key, _word(metadata, "resourceVersion", "an object"), raw)


def parse_page(body: bytes) -> Page:
    """Return the page of a list. Raises ApiError when it is none, or has an object without a name."""
    found = _decoded(body, "list")
    metadata = _mapping(found.get("metadata"), "list")
    items = found.get("items")
    if not _word(found, "kind", "the answer").endswith("List") or not isinstance(items, list):
        raise ApiError("the answer is no list")
    more = metadata.get("continue")
    return Page(
        items=tuple(map(_item, items)),
        version=_word(metadata, "resourceVersion", "a list"),
        more=more if isinstance(more, str) else "",
    )


def parse_event(line: bytes) -> Event:
    """Return an event of a watch.

    Raises GoneError for the event that ends a watch of too old a version, which comes with
    status 200, and ApiError for every other that is no change.
    """
    found = _decoded(line, "event")
    kind, value = found.get("type"), _mapping(found.get("object"), "event")
    if kind == "ERROR":
        code = value.get("code")
        raise refused(code if isinstance(code, int) else 0, json.dumps(value).encode())
    if kind == Kind.BOOKMARK:
        version = _word(_mapping(value.get("metadata"), "bookmark"), "resourceVersion", "a bookmark")
        return Event(Kind.BOOKMARK, Item(("", ""), version, value))
    if kind not in tuple(Kind):
        raise ApiError(f"{_one_line(str(kind))!r} is no kind of event")
    return Event(Kind(kind), _item(value))
