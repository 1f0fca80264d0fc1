"""The cluster as the source of one node's document and budget, kept current.

What it tells is one frozen value, put in place whole, so it may be asked from any thread
while the event loop that runs it goes on. When everything fails, that value stays, and its
age grows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kura_shaper.tenants.kubernetes.instances import compile_region
from kura_shaper.tenants.kubernetes.objects import Effect, Problem, read_instance, read_node
from kura_shaper.tenants.kubernetes.reflector import Reflector, Resource

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tenants.kubernetes.instances import RegionSettings
    from kura_shaper.tenants.kubernetes.objects import Instance, NodeFacts
    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.reflector import Timing
    from kura_shaper.tenants.kubernetes.wire import Api
    from kura_shaper.tenants.marks import MarkLayout
    from kura_shaper.units import Rate

DEFAULT_NAMESPACE = "kura"
_API = "/apis/kura.tuist.dev/v1alpha1"
# Many changes that come together, such as a list or a rollout, are one change.
_SETTLE_NS = 200_000_000
_IDLE_PARTS = 4


def instances_resource(namespace: str, *, marks: MarkLayout) -> Resource[Instance]:
    """Return what to list and watch for KuraInstances; namespace "" means all of them."""
    path = f"{_API}/namespaces/{namespace}/kurainstances" if namespace else f"{_API}/kurainstances"
    return Resource("kurainstances", path, partial(read_instance, marks=marks))


def node_resource(name: str) -> Resource[NodeFacts]:
    """Return what to list and watch for one node."""
    query = (("fieldSelector", f"metadata.name={name}"),)
    return Resource("nodes", "/api/v1/nodes", lambda _namespace, found, raw: read_node(found, raw), query)


@dataclass(frozen=True, slots=True)
class LastGood:
    """What was in force before, from an earlier run: where to begin until the cluster answers."""

    document: TenantsDocument | None = None
    budget: Rate | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the cluster says, or said when it could last be asked.

    `document` is None before there ever was one. `budget` is None where the node has none, and
    the last good one while it says something that can't be read. `synced` is whether this run has read
    everything at least once; before that, document and budget are those of an earlier run. `failure` is why the
    cluster can't be asked now, empty while it can. `annotations` are the node's.
    """

    document: TenantsDocument | None
    budget: Rate | None
    problems: tuple[Problem, ...] = ()
    synced: bool = False
    current_at_ns: int = 0
    failure: str = ""
    annotations: tuple[tuple[str, str], ...] = ()

    def age_ns(self, now_ns: int) -> int:
        """Return how long ago it was last proven that nothing is missing."""
        return max(0, now_ns - self.current_at_ns)


@dataclass(slots=True)
class _Parts:
    """The two copies that a snapshot is made of; without a node's name there is only one."""

    instances: Reflector[Instance]
    node: Reflector[NodeFacts] | None = None

    @property
    def all(self) -> tuple[Reflector[Instance] | Reflector[NodeFacts], ...]:
        return (self.instances, self.node) if self.node else (self.instances,)


class ClusterSource:
    """Tells of the tenants of a region and the budget of a node while `run` runs.

    `on_change` is called in the event loop, and `changed` is set, each time that document,
    budget, problems or annotations are others than before; whoever waits on it clears it.
    """

    def __init__(
        self,
        api: Api,
        region: RegionSettings,
        *,
        clock: AsyncClock,
        random: Random,
        namespace: str = DEFAULT_NAMESPACE,
        node: str = "",
        last_good: LastGood | None = None,
        timing: Timing | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._region, self._node, self._clock, self._on_change = region, node, clock, on_change
        self._stirred = asyncio.Event()
        self.changed = asyncio.Event()
        self._parts = _Parts(
            Reflector(
                api,
                instances_resource(namespace, marks=region.marks),
                clock=clock,
                random=random,
                timing=timing,
                on_change=self._stirred.set,
            )
        )
        if node:
            self._parts.node = Reflector(
                api, node_resource(node), clock=clock, random=random, timing=timing, on_change=self._stirred.set
            )
        last = last_good or LastGood()
        self._said = Snapshot(last.document, last.budget, current_at_ns=clock.now_ns())

    def snapshot(self) -> Snapshot:
        """Return what is known now; never waits, never raises, and may be called from any thread."""
        states = [part.state for part in self._parts.all]
        return replace(
            self._said,
            current_at_ns=min(state.current_at_ns for state in states),
            failure="; ".join(state.failure for state in states if state.failure),
        )

    async def run(self) -> None:
        """Keep it current, for ever. Cancel it to stop it; what it said last stays."""
        async with asyncio.TaskGroup() as group:
            for part in self._parts.all:
                group.create_task(part.run())
            group.create_task(self._follow())

    async def _follow(self) -> None:
        settle_ns = _SETTLE_NS
        while True:
            await self._stirred.wait()
            await self._clock.sleep_ns(settle_ns)
            self._stirred.clear()
            if self._parts.instances.state.synced:
                began_ns = self._clock.now_ns()
                self._say(self._compiled())
                # Thousands of tenants that change all the time take a fifth of a processor, not a whole one.
                settle_ns = max(_SETTLE_NS, _IDLE_PARTS * (self._clock.now_ns() - began_ns))

    def _compiled(self) -> Snapshot:
        former = self._said
        objects = self._parts.instances.listing.objects
        made = compile_region(objects.values(), self._region, previous=former.document)
        synced = all(part.state.synced for part in self._parts.all)
        said = replace(former, document=made.document, problems=made.problems, synced=synced)
        if self._parts.node is None or not self._parts.node.state.synced:
            return said
        facts = self._parts.node.listing.objects.get(("", self._node))
        if facts is None:
            remedy = "is this the name of a node, and may it be read?"
            problem = Problem("", self._node, "metadata.name", "there is no such node", remedy, Effect.LAST_GOOD)
            return replace(said, problems=(*made.problems, problem))
        return replace(
            said,
            budget=former.budget if facts.problems else facts.budget,
            problems=made.problems + facts.problems,
            annotations=facts.annotations,
        )

    def _say(self, said: Snapshot) -> None:
        former, self._said = self._said, said
        if former != said:
            self.changed.set()
            self._on_change()
