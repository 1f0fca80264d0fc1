"""An API server in memory, for tests: what a reflector depends on, held to the real one by a contract.

It keeps every version of its objects, so that a list can go on where it was and a watch
can begin where it was left, and forgets them when it is told to. It also fails in the ways that
a real one does when something is between.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kura_shaper.tenants.kubernetes.wire import OK, ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kura_shaper.tenants.kubernetes.wire import Raw


class FakeAsyncClock:
    """A clock that moves only when somebody waits on it, which takes no time, or moves it."""

    def __init__(self) -> None:
        self._now_ns = 0
        self.slept_ns: list[int] = []

    def now_ns(self) -> int:
        """See AsyncClock."""
        return self._now_ns

    async def sleep_ns(self, duration_ns: int) -> None:
        """Move on at once, and let the others run."""
        self.slept_ns.append(duration_ns)
        self._now_ns += duration_ns
        await asyncio.sleep(0)

    def advance_s(self, seconds: float) -> None:
        """Move on."""
        self._now_ns += int(seconds * 1_000_000_000)


def _status(code: int, message: str) -> Raw:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


@dataclass(slots=True)
class _Watch:
    """A watch that somebody holds. None ends it in good order, an error cuts it."""

    query: Mapping[str, str]
    lines: asyncio.Queue[bytes | ApiError | None] = field(default_factory=asyncio.Queue)


@dataclass(slots=True)
class FakeAnswer:
    """See wire.Answer."""

    status: int
    content: bytes
    retry_after_ns: int = 0
    watch: _Watch | None = None

    async def body(self) -> bytes:
        """See wire.Answer."""
        return self.content

    async def lines(self) -> AsyncIterator[bytes]:
        """See wire.Answer."""
        for line in self.content.splitlines(keepends=True):
            yield line
        while self.watch:
            line_or_end = await self.watch.lines.get()
            if line_or_end is None:
                return
            if isinstance(line_or_end, ApiError):
                raise line_or_end
            yield line_or_end


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that came."""

    path: str
    query: Mapping[str, str]
    idle_s: float

    @property
    def is_watch(self) -> bool:
        """Whether it asks for changes."""
        return "watch" in self.query


class FakeApi:
    """Objects of one path, and the means to break what is said about them.

    `answer` takes a request and returns an answer, or raises ApiError, in place of the usual
    one; None lets the request through. It is a test's way to be any fault.
    """

    def __init__(self, kind: str = "KuraInstanceList") -> None:
        self.kind = kind
        self.version = 1
        self.asked: list[Asked] = []
        self.answer: Callable[[Asked], FakeAnswer | None] = lambda _: None
        self.came = asyncio.Event()
        self.watches: list[_Watch] = []
        self._objects: dict[tuple[str, str], Raw] = {}
        self._past: dict[int, tuple[Raw, ...]] = {1: ()}
        self._log: list[tuple[int, str, Raw]] = []

    # What a cluster does.

    def put(self, name: str, raw: Raw, *, namespace: str = "kura") -> None:
        """Create an object, or replace it."""
        key = (namespace, name)
        kind = "MODIFIED" if key in self._objects else "ADDED"
        self.version += 1
        metadata = dict(raw.get("metadata") or {}) | {"name": name, "resourceVersion": str(self.version)}
        metadata |= {"namespace": namespace} if namespace else {}
        self._objects[key] = {**raw, "metadata": metadata}
        self._happened(kind, self._objects[key])

    def delete(self, name: str, *, namespace: str = "kura") -> None:
        """Delete an object."""
        gone = self._objects.pop((namespace, name))
        self.version += 1
        self._happened("DELETED", {**gone, "metadata": gone["metadata"] | {"resourceVersion": str(self.version)}})

    def forget(self) -> None:
        """Know no version before this one any more: an etcd that was compacted, a server that was restarted."""
        self.version += 1
        self._past = {self.version: tuple(self._sorted())}
        self._log = []

    def bookmark(self) -> None:
        """Say the newest version to every watch that wants to know."""
        self.version += 1
        self._past[self.version] = tuple(self._sorted())
        line = _line("BOOKMARK", {"kind": "KuraInstance", "metadata": {"resourceVersion": str(self.version)}})
        self.say(line)

    def say(self, line: bytes) -> None:
        """Send a line to every watch."""
        for watch in self.watches:
            watch.lines.put_nowait(line)

    def end_watches(self, error: ApiError | None = None) -> None:
        """End every watch in good order, or cut it."""
        for watch in self.watches:
            watch.lines.put_nowait(error)
        self.watches = []

    def _sorted(self) -> list[Raw]:
        return [raw for _, raw in sorted(self._objects.items())]

    def _happened(self, kind: str, raw: Raw) -> None:
        self._past[self.version] = tuple(self._sorted())
        self._log.append((self.version, kind, raw))
        for watch in self.watches:
            if _is_wanted(raw, watch.query):
                watch.lines.put_nowait(_line(kind, raw))

    # What a server does.

    @asynccontextmanager
    async def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AsyncIterator[FakeAnswer]:
        """See wire.Api; `total_s` is for those who wait."""
        asked = Asked(path, dict(query), idle_s if total_s is None else min(idle_s, total_s))
        self.asked.append(asked)
        answer = self.answer(asked) or (self._watch(asked) if asked.is_watch else self._list(asked))
        self.came.set()
        try:
            yield answer
        finally:
            if answer.watch in self.watches:
                self.watches.remove(answer.watch)

    async def until(self, what: Callable[[], bool]) -> None:
        """Return when something about the requests holds."""
        async with asyncio.timeout(10):
            while not what():
                self.came.clear()
                await self.came.wait()

    def _list(self, asked: Asked) -> FakeAnswer:
        version, start = self.version, 0
        if more := asked.query.get("continue"):
            version, start = map(int, more.split("-"))
        if version not in self._past:
            return refusal(410, "The provided continue parameter is too old to display a consistent list result.")
        found = [raw for raw in self._past[version] if _is_wanted(raw, asked.query)]
        limit = int(asked.query.get("limit", 0)) or len(found)
        metadata = {"resourceVersion": str(version)}
        if start + limit < len(found):
            metadata["continue"] = f"{version}-{start + limit}"
        page = {"kind": self.kind, "apiVersion": "v1", "metadata": metadata, "items": found[start : start + limit]}
        return FakeAnswer(OK, json.dumps(page).encode())

    def _watch(self, asked: Asked) -> FakeAnswer:
        since = int(asked.query["resourceVersion"])
        if since < min(self._past):
            # With status 200: the stream has begun when it is found out.
            error = _status(410, f"too old resource version: {since} ({self.version})")
            return FakeAnswer(OK, _line("ERROR", error))
        watch = _Watch(asked.query)
        missed = [_line(kind, raw) for at, kind, raw in self._log if at > since and _is_wanted(raw, asked.query)]
        self.watches.append(watch)
        return FakeAnswer(OK, b"".join(missed), watch=watch)


def refusal(status: int, message: str, *, retry_after_ns: int = 0) -> FakeAnswer:
    """Return the answer of a server that says no."""
    return FakeAnswer(status, json.dumps(_status(status, message)).encode(), retry_after_ns)


def _line(kind: str, raw: Any) -> bytes:
    return json.dumps({"type": kind, "object": raw}).encode() + b"\n"


def _is_wanted(raw: Raw, query: Mapping[str, str]) -> bool:
    _, _, name = query.get("fieldSelector", "").partition("metadata.name=")
    return name in ("", raw["metadata"]["name"])
