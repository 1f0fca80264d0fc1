"""A copy of the objects of one kind, kept current: one list, and a watch from its version on.

What it knows is never less than what it knew because something failed. It forgets an
object when an event says that it is gone, or when a whole list does without it, and a list
counts only when all of its pages came and were of one version. Everything else that can
happen between here and an API server is a failure: it is waited out, longer each time, and
only the age of what is known shows it.

A watch ends often, and in good order, by the time that it was asked for; the next begins at
the last version seen, so nothing is missed. When the server no longer knows that version (410), what was
missed shows as the difference of a new list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from kura_shaper.log import event as log_event
from kura_shaper.tenants.kubernetes.pace import Backoff
from kura_shaper.tenants.kubernetes.wire import OK, ApiError, GoneError, Kind, parse_event, parse_page, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Answer, Api, Event, Key, Page, Raw

T = TypeVar("T")

_log = logging.getLogger(__name__)
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """What is listed and watched, and what is kept of each object: `keep` never fails."""

    name: str
    path: str
    keep: Callable[[str, str, Raw], T]
    query: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take.

    A watch is asked to last between a half of `watch_s` and the whole, and may be silent that
    long, so `idle_margin_s` later than that a connection is given up as hung. One that ended
    sooner than `shortest_ns` counts as failed even when it ended in good order.
    """

    page_objects: int = 500
    list_s: float = 60
    watch_s: int = 120
    idle_margin_s: float = 15
    shortest_ns: int = _SECOND_NS
    backoff_least_ns: int = _SECOND_NS // 5
    backoff_most_ns: int = 30 * _SECOND_NS


@dataclass(frozen=True, slots=True)
class State:
    """How current a copy is.

    `synced` is whether there was ever a whole list; without one, nothing follows from what is
    not there. `current_at_ns` is when an event, a bookmark, a list, or a watch that lasted its
    time last proved that nothing is missing. `failure` is why it is not current, empty while it is.
    """

    synced: bool
    current_at_ns: int
    failure: str = ""

    def age_ns(self, now_ns: int) -> int:
        """Return how long ago it was last proven that nothing is missing."""
        return max(0, now_ns - self.current_at_ns)


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """The objects as they are known, by namespace and name."""

    objects: Mapping[Key, T]
    state: State


class Reflector(Generic[T]):
    """Keeps a copy of the objects of one kind while `run` runs. `on_change` is told when what is kept changes."""

    def __init__(
        self,
        api: Api,
        resource: Resource[T],
        *,
        clock: AsyncClock,
        random: Random,
        timing: Timing | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._api, self._resource, self._clock, self._random = api, resource, clock, random
        self._timing = timing or Timing()
        self._on_change = on_change
        self._backoff = Backoff(
            least_ns=self._timing.backoff_least_ns, most_ns=self._timing.backoff_most_ns, random=random
        )
        self._objects: dict[Key, T] = {}
        self._shared: Mapping[Key, T] | None = None
        self._version = ""  # empty: only a list can tell what is
        self._synced = False
        self._current_at_ns = clock.now_ns()
        self._failure = ""

    @property
    def listing(self) -> Listing[T]:
        """What is known now. It never changes; ask again for what is known later."""
        if self._shared is None:
            self._shared = MappingProxyType(dict(self._objects))
        return Listing(self._shared, self.state)

    @property
    def state(self) -> State:
        """How current it is, which costs nothing to ask."""
        return State(self._synced, self._current_at_ns, self._failure)

    async def run(self) -> NoReturn:
        """List, then watch, for ever. Cancel it to stop it."""
        while True:
            try:
                if not self._version:
                    await self.read()
                await self._watch()
            except ApiError as error:
                if isinstance(error, GoneError):
                    self._version = ""
                self._fail(error)
                # Added, since a server that was away tells all of a fleet to wait equally long.
                await self._clock.sleep_ns(error.retry_after_ns + self._backoff.next_ns())

    async def read(self) -> Listing[T]:
        """Take a whole list, once. Raises ApiError, and then what is known stays as it was."""
        try:
            found, version = await self._list(self._timing.page_objects)
        except GoneError:
            # It took longer than the server keeps a version; in one piece it can't.
            found, version = await self._list(0)
        former, self._objects, self._version = self._objects, found, version
        is_first, self._synced = not self._synced, True
        self._proven()
        if is_first or former != found:
            self._changed()
        return self.listing

    async def _list(self, limit: int) -> tuple[dict[Key, T], str]:
        found: dict[Key, T] = {}
        query = dict(self._resource.query) | ({"limit": str(limit)} if limit else {})
        version = ""
        while True:
            page = await self._page(query)
            if version not in ("", page.version):
                raise ApiError(f"a list of version {version} goes on with {page.version}")
            version = page.version
            found.update({item.key: self._resource.keep(*item.key, item.raw) for item in page.items})
            if not page.more:
                return found, version
            query["continue"] = page.more

    async def _page(self, query: Mapping[str, str]) -> Page:
        limit_s = self._timing.list_s
        async with self._api.get(self._resource.path, query, idle_s=limit_s, total_s=limit_s) as answer:
            await self._require_ok(answer)
            return parse_page(await answer.body())

    async def _watch(self) -> None:
        timing = self._timing
        seconds = self._random.randint(max(1, timing.watch_s // 2), timing.watch_s)
        query = dict(self._resource.query) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        began_ns = self._clock.now_ns()
        async with self._api.get(self._resource.path, query, idle_s=seconds + timing.idle_margin_s) as answer:
            await self._require_ok(answer)
            async for line in answer.lines():
                if line.strip():
                    self._take(parse_event(line))
        lasted_ns = self._clock.now_ns() - began_ns
        if lasted_ns < timing.shortest_ns:
            raise ApiError("a watch ended at once")
        # Where nothing changes, older servers send no bookmark either. But one that kept the watch for
        # as long as it was asked to, and then ended it, had nothing else to say.
        if lasted_ns >= (seconds - 1) * _SECOND_NS:
            self._went_well()

    async def _require_ok(self, answer: Answer) -> None:
        if answer.status != OK:
            raise refused(answer.status, await answer.body(), retry_after_ns=answer.retry_after_ns)

    def _take(self, event: Event) -> None:
        self._version = event.item.version
        self._went_well()
        key = event.item.key
        if event.kind is Kind.BOOKMARK:
            return
        if event.kind is Kind.DELETED:
            if self._objects.pop(key, None) is not None:
                self._changed()
            return
        kept = self._resource.keep(*key, event.item.raw)
        if self._objects.get(key) != kept:
            self._objects[key] = kept
            self._changed()

    def _changed(self) -> None:
        self._shared = None
        self._on_change()

    def _went_well(self) -> None:
        self._backoff.reset()
        self._proven()

    def _proven(self) -> None:
        self._current_at_ns = self._clock.now_ns()
        if self._failure:
            log_event(_log, "api_answers_again", resource=self._resource.name, objects=len(self._objects))
            self._failure = ""

    def _fail(self, error: ApiError) -> None:
        if not self._failure:
            log_event(_log, "api_failed", level=logging.WARNING, resource=self._resource.name, reason=str(error))
        self._failure = str(error)
