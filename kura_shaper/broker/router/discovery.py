"""Which publishers a router is to read besides those of its settings: those that workers advertise in their metadata.

The metadata is followed as a broker follows it, with the same parser and bounds, so both see the same, at most one
of them a little later. What is advertised now is told as a whole, not change by change: changes that come together are
told together, and what is gone and there again in the blink of an eye goes on being read. While an API server is away
nothing goes and nothing comes.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.credentials import CredentialError
from kura_shaper.broker.directory import DirectoryCounts, MetadataDirectory
from kura_shaper.broker.kubeconfig import read_kubeconfig
from kura_shaper.tenants.kubernetes.access import Access, HttpApi

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AsyncExitStack
    from pathlib import Path
    from random import Random

    from kura_shaper.broker.directory import Timing
    from kura_shaper.broker.metadata import Publisher
    from kura_shaper.broker.router.settings import Discover, RouterSettings
    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Api

_TOGETHER_S = 0.25


class Reader(Protocol):
    """Who reads publishers."""

    def read_discovered(self, advertised: Mapping[Publisher, tuple[str, ...]]) -> None:
        """Read these topics of these besides those of the settings, and nothing else that was discovered before."""


class Discovery:
    """Tells what is to be read, while `run` runs.

    `apis` has the API server of each kubeconfig that is named, None for the one of the pod.
    """

    def __init__(
        self,
        wanted: Sequence[Discover],
        apis: Mapping[Path | None, Api],
        reader: Reader,
        *,
        clock: AsyncClock,
        random: Random,
        timing: Timing | None = None,
    ) -> None:
        self._reader, self._loop = reader, asyncio.get_running_loop()
        self._planned: asyncio.TimerHandle | None = None
        self._told: Mapping[Publisher, tuple[str, ...]] = {}

        def follow(where: Path | None) -> tuple[MetadataDirectory, tuple[Discover, ...]]:
            entries = tuple(each for each in wanted if each.kubeconfig == where)
            namespaces = tuple(dict.fromkeys(each.namespace for each in entries))
            directory = MetadataDirectory(
                apis[where], namespaces, clock=clock, random=random, timing=timing, on_change=self._plan
            )
            return directory, entries

        self._followed = tuple(map(follow, apis))

    @property
    def publishers(self) -> int:
        """How many publishers are advertised that are wanted."""
        return len(self._told)

    @property
    def counts(self) -> DirectoryCounts:
        """What all directories count."""
        made = DirectoryCounts()
        for directory, _ in self._followed:
            made.add(directory.counts)
        return made

    @property
    def namespaces_synced(self) -> int:
        """How many Kubernetes namespaces were listed once."""
        return sum(directory.namespaces_synced for directory, _ in self._followed)

    @property
    def age_s(self) -> float:
        """How long ago it was last proven that nothing is missing, where that is longest."""
        return max((directory.age_s for directory, _ in self._followed), default=0.0)

    async def run(self) -> None:
        """Follow what is advertised, for ever. Cancel it to stop it."""
        try:
            async with asyncio.TaskGroup() as group:
                for directory, _ in self._followed:
                    group.create_task(directory.run())
                await asyncio.Event().wait()
        finally:
            if self._planned is not None:
                self._planned.cancel()

    def _plan(self) -> None:
        if self._planned is None:
            self._planned = self._loop.call_later(_TOGETHER_S, self._compare)

    def _compare(self) -> None:
        self._planned = None
        found = self._advertised()
        if self._told != found:
            self._told = found
            self._reader.read_discovered(found)

    def _advertised(self) -> dict[Publisher, tuple[str, ...]]:
        """Return the publishers that are wanted of those that are advertised, each with the topics that are."""
        found: dict[Publisher, tuple[str, ...]] = {}
        for directory, entries in self._followed:
            for each in entries:
                # There are many publishers, and few topics.
                of_topic: dict[str, tuple[str, ...]] = {}
                for publisher, topic in directory.publishers(each.namespace):
                    if topic not in of_topic:
                        of_topic[topic] = tuple(sorted(filter(topic.startswith, each.topics)))
                    topics = of_topic[topic]
                    if topics and publisher[1] in each.dynamo_namespaces:
                        former = found.get(publisher, topics)
                        found[publisher] = topics if former == topics else tuple(sorted({*former, *topics}))
        return found


async def open_apis(settings: RouterSettings, stack: AsyncExitStack, clock: AsyncClock) -> dict[Path | None, HttpApi]:
    """Return the API server of each kubeconfig that is named, until the stack is closed."""
    found = dict.fromkeys(each.kubeconfig for each in settings.discover)
    return {where: await stack.enter_async_context(HttpApi(Access(where, clock=clock))) for where in found}


def require_kubeconfigs(settings: RouterSettings) -> None:
    """Raise CredentialError for a kubeconfig that is none. Nothing that it names is asked or started."""
    if settings.discover and find_spec("aiohttp") is None:
        remedy = "install kura-shaper[kubernetes]"
        raise CredentialError("discover", "needs the Kubernetes client, which is not installed", remedy=remedy)
    for number, each in enumerate(settings.discover):
        if each.kubeconfig is None:
            continue
        key = f"discover[{number}].kubeconfig"
        found = read_kubeconfig(key, each.kubeconfig)
        if not isinstance(found, dict) or not all(found.get(part) for part in ("clusters", "contexts", "users")):
            raise CredentialError(key, "names no clusters, contexts and users", remedy="write a kubeconfig")
