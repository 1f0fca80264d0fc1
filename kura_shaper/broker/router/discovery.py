"""Which publishers a router reads besides those of its settings: those that workers advertise in their metadata.

The metadata is followed as a broker follows it, with the same parser and bounds, so both see the same, at most one
of them a little later. What is advertised now is compared with what is read now, not change by change: many changes
that come together are one comparison, and a worker that is replaced in the blink of an eye goes on being read.
While an API server is away nothing goes and nothing comes.
"""

from __future__ import annotations

import asyncio
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import yaml

from kura_shaper.broker.credentials import CredentialError, read_file
from kura_shaper.broker.directory import DirectoryCounts, MetadataDirectory
from kura_shaper.broker.router.settings import SUBSCRIPTIONS_MAX, Subscription
from kura_shaper.log import event as log_event
from kura_shaper.tenants.kubernetes.access import Access, HttpApi

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AsyncExitStack
    from pathlib import Path
    from random import Random

    from kura_shaper.broker.directory import Timing
    from kura_shaper.broker.metadata import Publisher
    from kura_shaper.broker.router.settings import Discover, RouterSettings
    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Api

_TOGETHER_S = 0.25
_KUBECONFIG_BYTES_MAX = 1 << 20
_log = logging.getLogger("kura_shaper.broker.router")


class Reader(Protocol):
    """Who reads publishers."""

    def read_discovered(self, wanted: Iterable[Subscription]) -> None:
        """Read these besides those of the settings, and no others that were discovered before."""


class Discovery:
    """Keeps what is read in step with what is advertised, while `run` runs.

    `apis` has the API server of each kubeconfig that the settings name, None for the one of the pod.
    """

    def __init__(
        self,
        settings: RouterSettings,
        apis: Mapping[Path | None, Api],
        reader: Reader,
        *,
        clock: AsyncClock,
        random: Random,
        timing: Timing | None = None,
    ) -> None:
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        of_settings = [each for each in settings.subscriptions if each.topics]
        self._of_settings = {(each.endpoint, each.dynamo_namespace) for each in of_settings}
        self._room = SUBSCRIPTIONS_MAX - len(of_settings)
        self._read: dict[Publisher, Subscription] = {}
        self._planned: asyncio.TimerHandle | None = None
        self.beyond = 0
        entries = {where: tuple(each for each in settings.discover if each.kubeconfig == where) for where in apis}
        self._followed: tuple[tuple[MetadataDirectory, tuple[Discover, ...]], ...] = tuple(
            (
                MetadataDirectory(
                    apis[where],
                    tuple(dict.fromkeys(each.namespace for each in found)),
                    clock=clock,
                    random=random,
                    timing=timing,
                    on_change=self._plan,
                ),
                found,
            )
            for where, found in entries.items()
        )

    @property
    def discovered(self) -> int:
        """How many publishers are read because they are advertised."""
        return len(self._read)

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
        found = self._wanted()
        # Who is read stays, whoever else comes.
        kept = [each for each in found if each in self._read]
        new = sorted(each for each in found if each not in self._read)
        taken = [*kept, *new][: self._room]
        before, self._read = self._read, {each: Subscription(*each, found[each]) for each in taken}
        if self._read != before:
            self._reader.read_discovered(self._read.values())
            began, ended = self._read.keys() - before.keys(), before.keys() - self._read.keys()
            log_event(_log, "publishers_discovered", read=len(taken), began=len(began), ended=len(ended))
        self._note_beyond(len(found) - len(taken))

    def _wanted(self) -> dict[Publisher, tuple[str, ...]]:
        """Return which of the topics that are wanted each publisher has."""
        found: dict[Publisher, set[str]] = {}
        for directory, entries in self._followed:
            for each in entries:
                for publisher, topic in directory.publishers(each.namespace):
                    if publisher[1] in each.dynamo_namespaces and publisher not in self._of_settings:
                        topics = {prefix for prefix in each.topics if topic.startswith(prefix)}
                        if topics:
                            found.setdefault(publisher, set()).update(topics)
        return {publisher: tuple(sorted(topics)) for publisher, topics in found.items()}

    def _note_beyond(self, beyond: int) -> None:
        if beyond and not self.beyond:
            log_event(_log, "too_many_publishers", level=logging.WARNING, read=len(self._read), not_read=beyond)
        elif self.beyond and not beyond:
            log_event(_log, "all_publishers_read", read=len(self._read))
        self.beyond = beyond


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
        content = read_file(key, each.kubeconfig, _KUBECONFIG_BYTES_MAX)
        try:
            found = yaml.safe_load(content)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise CredentialError(key, "is no YAML", remedy="write a kubeconfig") from error
        if not isinstance(found, dict) or not all(found.get(part) for part in ("clusters", "contexts", "users")):
            raise CredentialError(key, "names no clusters, contexts and users", remedy="write a kubeconfig")
