"""The source tells the last good document and budget, how old they are, and of changes once each."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes_rig import LIMIT_S, in_a_loop

from kura_shaper.tenants.document import Tenant, TenantsDocument
from kura_shaper.tenants.kubernetes.fake import FakeApi, FakeAsyncClock, refusal
from kura_shaper.tenants.kubernetes.instances import RegionSettings
from kura_shaper.tenants.kubernetes.objects import Effect
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.reflector import Timing
from kura_shaper.tenants.kubernetes.source import ClusterSource, LastGood, instances_resource
from kura_shaper.tenants.kubernetes.thread import FollowedCluster
from kura_shaper.tenants.kubernetes.wire import ApiError
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from kura_shaper.tenants.kubernetes.fake import FakeAnswer
    from kura_shaper.tenants.kubernetes.source import Snapshot

CLASS = "kura.tuist.dev/egress-class-id"
US_EAST = RegionSettings(region="us-east")
SECOND_NS = 1_000_000_000


class Cluster:
    """Two paths of one server."""

    def __init__(self) -> None:
        self.instances, self.nodes = FakeApi(), FakeApi("NodeList")
        self.clock = FakeAsyncClock()
        self.told = 0

    def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AbstractAsyncContextManager[FakeAnswer]:
        api = self.nodes if path == "/api/v1/nodes" else self.instances
        return api.get(path, query, idle_s=idle_s, total_s=total_s)

    def account(self, name: str, class_id: int, **spec: Any) -> None:
        whole = {"accountHandle": name, "region": "us-east", **spec}
        self.instances.put(f"kura-{name}", {"metadata": {"annotations": {CLASS: f"1:{class_id:x}"}}, "spec": whole})

    def node(self, name: str, capacity: str | None) -> None:
        status = {"capacity": {"tuist.dev/egress-mbps": capacity} if capacity else {}}
        self.nodes.put(name, {"status": status, "metadata": {"annotations": {"n": name}}}, namespace="")

    def _on_change(self) -> None:
        self.told += 1

    @asynccontextmanager
    async def followed(self, *, node: str = "box-1", last_good: LastGood | None = None) -> AsyncIterator[ClusterSource]:
        source = ClusterSource(
            self,
            US_EAST,
            clock=self.clock,
            random=Random(1),
            node=node,
            last_good=last_good,
            timing=Timing(watch_s=2),
            on_change=self._on_change,
        )
        task = asyncio.create_task(source.run())
        try:
            yield source
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def until(source: ClusterSource, what: Callable[[Snapshot], bool]) -> Snapshot:
    async with asyncio.timeout(LIMIT_S):
        while not what(source.snapshot()):
            source.changed.clear()
            await source.changed.wait()
    return source.snapshot()


def names(snapshot: Snapshot) -> list[str]:
    return [tenant.name for tenant in snapshot.document.tenants] if snapshot.document else []


@in_a_loop
async def test_document_and_budget_follow_the_cluster() -> None:
    cluster = Cluster()
    cluster.account("acme", 0x100)
    cluster.node("box-1", "3k")
    cluster.node("box-2", "1k")
    async with cluster.followed() as source:
        assert source.snapshot() == type(source.snapshot())(None, None)
        found = await until(source, lambda snapshot: snapshot.synced)
        assert (names(found), found.budget, found.problems, found.failure) == (["acme"], Rate(3_000_000_000), (), "")
        assert found.annotations == (("n", "box-1"),)
        cluster.account("beta", 0x101)
        await until(source, lambda snapshot: names(snapshot) == ["acme", "beta"])
        cluster.node("box-1", "5k")
        await until(source, lambda snapshot: snapshot.budget == Rate(5_000_000_000))
        cluster.node("box-1", None)
        await until(source, lambda snapshot: snapshot.budget is None)
        cluster.instances.delete("kura-acme")
        await until(source, lambda snapshot: names(snapshot) == ["beta"])
    assert cluster.instances.asked[0].query == {"limit": "500"}
    assert cluster.nodes.asked[0].query == {"fieldSelector": "metadata.name=box-1", "limit": "500"}


@in_a_loop
async def test_changes_that_come_together_are_told_once_and_what_changes_nothing_never() -> None:
    cluster = Cluster()
    cluster.node("box-1", "3k")
    async with cluster.followed() as source:
        await until(source, lambda snapshot: snapshot.synced)
        await cluster.instances.until(lambda: bool(cluster.instances.watches))
        told = cluster.told
        for number in range(50):
            cluster.account(f"a{number}", 0x100 + number)
        await until(source, lambda snapshot: len(names(snapshot)) == 50)
        assert cluster.told == told + 1
        # Heartbeats, states and other regions.
        cluster.nodes.put(
            "box-1",
            {
                "status": {"capacity": {"tuist.dev/egress-mbps": "3000"}, "conditions": [1]},
                "metadata": {"annotations": {"n": "box-1"}},
            },
            namespace="",
        )
        cluster.node("box-2", "1k")
        settled = len(cluster.clock.slept_ns)
        cluster.account("far", 0x900, region="eu-west")
        while len(cluster.clock.slept_ns) < settled + 1:
            await asyncio.sleep(0)
        cluster.account("near", 0x901)
        await until(source, lambda snapshot: "near" in names(snapshot))
        assert cluster.told == told + 2


@in_a_loop
async def test_without_a_node_there_is_no_budget_and_nodes_are_not_asked_for() -> None:
    cluster = Cluster()
    cluster.account("acme", 0x100)
    async with cluster.followed(node="") as source:
        found = await until(source, lambda snapshot: snapshot.synced)
        assert (names(found), found.budget) == (["acme"], None)
    assert cluster.nodes.asked == []


@in_a_loop
async def test_when_everything_fails_the_last_good_stays_and_grows_old() -> None:
    cluster = Cluster()
    cluster.account("acme", 0x100)
    cluster.node("box-1", "3k")
    async with cluster.followed() as source:
        good = await until(source, lambda snapshot: snapshot.synced)
        for api in (cluster.instances, cluster.nodes):
            await api.until(lambda api=api: bool(api.watches))  # type: ignore[misc]
            api.answer = lambda _: refusal(403, "forbidden")
            api.end_watches(ApiError("cut"))
        await cluster.nodes.until(lambda: len(cluster.nodes.asked) > 9)
        found = source.snapshot()
        assert (found.document, found.budget, found.synced) == (good.document, good.budget, True)
        assert found.failure.count("403: forbidden") == 2
        assert found.age_ns(cluster.clock.now_ns()) > 10 * SECOND_NS
        for api in (cluster.instances, cluster.nodes):
            api.answer = lambda _: None
        cluster.account("beta", 0x101)
        found = await until(source, lambda snapshot: "beta" in names(snapshot))


@in_a_loop
async def test_until_the_cluster_answers_what_was_in_force_before_counts() -> None:
    cluster = Cluster()
    acme = Tenant("acme", 0x100, Rate(0), Rate(10**9))
    before = LastGood(TenantsDocument("us-east", (acme,)), Rate(10**9))
    cluster.account("acme", 0x100, egressGuaranteedMbps=-1)
    cluster.nodes.answer = lambda _: refusal(403, "nodes is forbidden")
    async with cluster.followed(last_good=before) as source:
        found = source.snapshot()
        assert (found.document, found.budget, found.synced) == (before.document, before.budget, False)
        found = await until(source, lambda snapshot: bool(snapshot.problems))
        # The tenants are known, the node is not: nothing follows for the budget.
        assert (found.document, found.budget, found.synced) == (before.document, before.budget, False)
        assert [problem.effect for problem in found.problems] == [Effect.LAST_GOOD]


@in_a_loop
async def test_a_node_alone_makes_no_document() -> None:
    cluster = Cluster()
    cluster.node("box-1", "3k")
    cluster.instances.answer = lambda _: refusal(403, "kurainstances is forbidden")
    async with cluster.followed() as source:
        await cluster.instances.until(lambda: len(cluster.instances.asked) > 5)
        found = source.snapshot()
        assert (found.document, found.synced) == (None, False)
        cluster.instances.answer = lambda _: None
        found = await until(source, lambda snapshot: snapshot.synced)
        assert (names(found), found.budget) == ([], Rate(3_000_000_000))


@pytest.mark.parametrize("capacity", ["much", "0"])
@in_a_loop
async def test_a_budget_that_can_not_be_read_leaves_the_last_good_one(capacity: str) -> None:
    cluster = Cluster()
    cluster.node("box-1", "3k")
    async with cluster.followed() as source:
        await until(source, lambda snapshot: snapshot.budget == Rate(3_000_000_000))
        cluster.node("box-1", capacity)
        found = await until(source, lambda snapshot: bool(snapshot.problems))
        assert found.budget == Rate(3_000_000_000)


@in_a_loop
async def test_a_node_that_is_not_there_is_a_problem_and_the_budget_stays() -> None:
    cluster = Cluster()
    cluster.node("box-1", "3k")
    async with cluster.followed() as source:
        await until(source, lambda snapshot: snapshot.budget is not None)
        cluster.nodes.delete("box-1", namespace="")
        found = await until(source, lambda snapshot: bool(snapshot.problems))
        assert found.budget == Rate(3_000_000_000)
        assert "there is no such node" in str(found.problems[0])


def test_no_namespace_means_all() -> None:
    path = "/apis/kura.tuist.dev/v1alpha1/kurainstances"
    assert instances_resource("", marks=MarkLayout()).path == path


# In a thread.


class Reached:
    """An API that notes whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True


def test_a_program_without_a_loop_follows_the_cluster_in_a_thread() -> None:
    cluster, heard, api = Cluster(), threading.Event(), Reached()
    cluster.account("acme", 0x100)
    source = ClusterSource(cluster, US_EAST, clock=SystemAsyncClock(), random=Random(1), on_change=heard.set)
    with FollowedCluster(source, api) as followed:
        assert heard.wait(LIMIT_S)
        assert names(followed.snapshot()) == ["acme"]
    assert api.is_closed
    assert (names(followed.snapshot()), followed.snapshot().failure) == (["acme"], "")


def test_a_fault_that_ends_the_thread_is_in_every_snapshot() -> None:
    cluster, asked = Cluster(), threading.Event()

    def fault(_: object) -> None:
        asked.set()
        raise ZeroDivisionError

    cluster.instances.answer = fault
    source = ClusterSource(cluster, US_EAST, clock=SystemAsyncClock(), random=Random(1))
    with FollowedCluster(source, Reached()) as followed:
        assert asked.wait(LIMIT_S)
    assert "ended" in followed.snapshot().failure
