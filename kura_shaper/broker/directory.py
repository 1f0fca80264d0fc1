"""What is advertised in the watched namespaces, kept current by one list and a watch for each.

A list is taken page by page, with at most one raw page in memory, also of several namespaces, which take turns. It
counts only as a whole: it replaces what was known of its namespace in one step. Until then, and while the API server is
away, what was known stays: a subscribe must not fail because of an outage. Each change of a watch first takes away what
its resource advertised before, so an address that left is refused at once, also when what came instead is too much to
keep.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from kura_shaper.broker.metadata import MetadataEvent, MetadataPage, Publisher, Resource, Skip, parse_event, parse_page
from kura_shaper.log import event as log_event
from kura_shaper.tenants.kubernetes.pace import Backoff
from kura_shaper.tenants.kubernetes.wire import OK, ApiError, GoneError, Kind, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from random import Random

    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Answer, Api

PAGE_RESOURCES, RESOURCES_MAX, REFERENCES_MAX = 32, 16_384, 65_536
_SECOND_NS = 1_000_000_000
_log = logging.getLogger("kura_shaper.broker")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take; see tenants.kubernetes.reflector for what the watch's times mean."""

    page_s: float = 60
    watch_open_s: float = 30
    watch_least_s: int = 240
    watch_most_s: int = 420
    idle_margin_s: float = 15
    shortest_ns: int = _SECOND_NS
    backoff_least_ns: int = _SECOND_NS // 5
    backoff_most_ns: int = 30 * _SECOND_NS


def _zeros(*keys: str) -> dict[str, int]:
    return dict.fromkeys(keys, 0)


@dataclass(slots=True)
class DirectoryCounts:
    """What the directory counts; every key is there from the start."""

    skipped: dict[str, int] = field(default_factory=lambda: _zeros(*Skip))
    lists: dict[str, int] = field(default_factory=lambda: _zeros("ok", "failed"))
    watch_restarts: dict[str, int] = field(default_factory=lambda: _zeros("closed", "expired", "timeout", "error"))

    def note(self, skipped: Counter[Skip]) -> None:
        """Count what was skipped."""
        for reason, number in skipped.items():
            self.skipped[reason] += number

    def add(self, other: DirectoryCounts) -> None:
        """Count what another one counted as well."""
        for mine, others in (
            (self.skipped, other.skipped),
            (self.lists, other.lists),
            (self.watch_restarts, other.watch_restarts),
        ):
            for key, number in others.items():
                mine[key] += number


class _Namespace:
    """What is known of one namespace: the publishers of each resource, and how often each is advertised."""

    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.advertised: Counter[Publisher] = Counter()
        self.references = 0

    def put(self, resource: Resource) -> None:
        """Let a resource advertise what it has, and nothing that it had."""
        self.remove(resource.name)
        self.resources[resource.name] = resource
        self.advertised.update(resource.publishers)
        self.references += len(resource.publishers)

    def remove(self, name: str) -> None:
        """Let a resource advertise nothing, and be gone."""
        former = self.resources.pop(name, Resource(name))
        self.references -= len(former.publishers)
        for publisher in former.publishers:
            self.advertised[publisher] -= 1
            if not self.advertised[publisher]:
                del self.advertised[publisher]


@dataclass(slots=True)
class _Follower:
    """A namespace and where its watch is."""

    name: str
    known: _Namespace = field(default_factory=_Namespace)
    version: str = ""
    is_synced: bool = False
    proven_ns: int = 0
    is_failing: bool = False


class MetadataDirectory:
    """Knows what is advertised, while `run` runs."""

    def __init__(
        self,
        api: Api,
        namespaces: tuple[str, ...],
        *,
        clock: AsyncClock,
        random: Random,
        timing: Timing | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is told when what is advertised may have changed."""
        self._on_change = on_change
        self._api, self._clock, self._random = api, clock, random
        self._timing = timing or Timing()
        self._followers = tuple(_Follower(name, proven_ns=clock.now_ns()) for name in namespaces)
        self._synced = asyncio.Event()
        self._page_turn = asyncio.Lock()
        self.counts = DirectoryCounts()

    def is_advertised(self, endpoint: str, dynamo_namespace: str) -> bool:
        """See Advertised."""
        wanted = (endpoint, dynamo_namespace)
        return self._synced.is_set() and any(wanted in each.known.advertised for each in self._followers)

    def publishers(self, namespace: str) -> Iterator[tuple[Publisher, str]]:
        """Yield what is advertised in one of the namespaces, and its topic, as often as it is."""
        for each in self._followers:
            if each.name == namespace:
                for resource in each.known.resources.values():
                    yield from zip(resource.publishers, resource.topics, strict=True)

    @property
    def is_current(self) -> bool:
        """Whether what is not advertised is known not to be: no namespace is failing, or silent for too long."""
        late_s = self._timing.watch_most_s + self._timing.idle_margin_s
        return self._synced.is_set() and not any(each.is_failing for each in self._followers) and self.age_s <= late_s

    async def synced(self) -> None:
        """Return when every namespace was listed once."""
        await self._synced.wait()

    @property
    def resources(self) -> int:
        """How many resources are known."""
        return sum(len(each.known.resources) for each in self._followers)

    @property
    def references(self) -> int:
        """How many publishers are advertised, as often as they are."""
        return sum(each.known.references for each in self._followers)

    @property
    def namespaces_synced(self) -> int:
        """How many namespaces were listed once."""
        return sum(each.is_synced for each in self._followers)

    @property
    def age_s(self) -> float:
        """How long ago it was last proven that nothing is missing, in the namespace where that is longest."""
        return (self._clock.now_ns() - min(each.proven_ns for each in self._followers)) / _SECOND_NS

    async def run(self) -> None:
        """Keep it current, for ever. Cancel it to stop it."""
        async with asyncio.TaskGroup() as group:
            for each in self._followers:
                group.create_task(self._follow(each))

    async def _follow(self, follower: _Follower) -> NoReturn:
        timing = self._timing
        backoff = Backoff(least_ns=timing.backoff_least_ns, most_ns=timing.backoff_most_ns, random=self._random)
        while True:
            try:
                if not follower.version:
                    await self._read(follower)
                await self._watch(follower, backoff)
            except ApiError as error:
                if isinstance(error, GoneError):
                    follower.version = ""
                if not follower.is_failing:
                    follower.is_failing = True
                    log_event(
                        _log, "metadata_failed", level=logging.WARNING, namespace=follower.name, reason=str(error)
                    )
                # Added, since a server that was away tells every namespace, and every broker, to wait equally long.
                await self._clock.sleep_ns(error.retry_after_ns + backoff.next_ns())

    # The list.

    async def _read(self, follower: _Follower) -> None:
        try:
            found, version = await self._list(follower)
        except ApiError:
            self.counts.lists["failed"] += 1
            raise
        self.counts.lists["ok"] += 1
        self._fit(follower, found)
        follower.known, follower.version, follower.is_synced = found, version, True
        self._prove(follower)
        if all(each.is_synced for each in self._followers):
            self._synced.set()
        self._on_change()

    async def _list(self, follower: _Follower) -> tuple[_Namespace, str]:
        """Return all of a namespace, and its version. Raises ApiError; then nothing has changed."""
        found, version = _Namespace(), ""
        query = {"limit": str(PAGE_RESOURCES)}
        while True:
            page = await self._page(follower, query)
            if version not in ("", page.version):
                raise ApiError("a list goes on with another version")
            version = page.version
            self.counts.note(page.skipped)
            for resource in page.resources:
                self._put(follower, found, resource)
            if not page.more:
                return found, version
            query["continue"] = page.more

    async def _page(self, follower: _Follower, query: Mapping[str, str]) -> MetadataPage:
        """Return a page. What it was read from is let go with this call, before there is another."""
        limit_s = self._timing.page_s
        async with (
            self._page_turn,
            self._api.get(_path(follower.name), query, idle_s=limit_s, total_s=limit_s) as answer,
        ):
            await _require_ok(answer)
            # Handed over whole: a thread may keep its arguments for a while after it has answered.
            held = [await answer.body()]
            # In a thread, so that heartbeats keep their time beside a page of many megabytes.
            return await asyncio.to_thread(lambda: parse_page(held.pop()))

    def _put(self, follower: _Follower, found: _Namespace, resource: Resource) -> None:
        if len(found.resources) >= RESOURCES_MAX:
            self.counts.skipped[Skip.RESOURCE_CAP] += 1
        elif self._others(follower) + found.references + len(resource.publishers) > REFERENCES_MAX:
            self.counts.skipped[Skip.TOTAL_CAP] += 1
            found.put(Resource(resource.name))
        else:
            found.put(resource)

    def _fit(self, follower: _Follower, found: _Namespace) -> None:
        """Keep the cap of all namespaces, another of which may have grown while this one was listed."""
        for resource in reversed(tuple(found.resources.values())):
            if self._others(follower) + found.references <= REFERENCES_MAX:
                return
            if resource.publishers:
                found.put(Resource(resource.name))
                self.counts.skipped[Skip.TOTAL_CAP] += 1

    def _others(self, follower: _Follower) -> int:
        return sum(each.known.references for each in self._followers if each is not follower)

    # The watch.

    async def _watch(self, follower: _Follower, backoff: Backoff) -> None:
        timing = self._timing
        seconds = self._random.randint(timing.watch_least_s, timing.watch_most_s)
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": follower.version,
            "timeoutSeconds": str(seconds),
        }
        began_ns = self._clock.now_ns()
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(timing.watch_open_s):
                    opened = self._api.get(_path(follower.name), query, idle_s=seconds + timing.idle_margin_s)
                    answer = await stack.enter_async_context(opened)
                    await _require_ok(answer)
                async for line in answer.lines():
                    if line.strip():
                        self._take(follower, parse_event(line))
                        backoff.reset()
        except TimeoutError as error:
            self.counts.watch_restarts["timeout"] += 1
            raise ApiError("a watch did not open in time") from error
        except ApiError as error:
            self.counts.watch_restarts["expired" if isinstance(error, GoneError) else "error"] += 1
            raise
        self.counts.watch_restarts["closed"] += 1
        if self._clock.now_ns() - began_ns < timing.shortest_ns:
            raise ApiError("a watch ended at once")
        if self._clock.now_ns() - began_ns >= (seconds - 1) * _SECOND_NS:
            # It was kept for as long as it was asked for, so there was nothing else to say.
            self._prove(follower)

    def _take(self, follower: _Follower, event: MetadataEvent) -> None:
        follower.version = event.version
        self._prove(follower)
        if event.kind is Kind.BOOKMARK:
            return
        follower.known.remove(event.resource.name)
        self.counts.note(event.skipped)
        if event.kind is not Kind.DELETED:
            self._put(follower, follower.known, event.resource)
        self._on_change()

    def _prove(self, follower: _Follower) -> None:
        follower.proven_ns = self._clock.now_ns()
        if follower.is_failing:
            follower.is_failing = False
            log_event(_log, "metadata_current_again", namespace=follower.name)


def _path(namespace: str) -> str:
    return f"/apis/nvidia.com/v1alpha1/namespaces/{namespace}/dynamoworkermetadatas"


async def _require_ok(answer: Answer) -> None:
    if answer.status != OK:
        raise refused(answer.status, await answer.body(), retry_after_ns=answer.retry_after_ns)
