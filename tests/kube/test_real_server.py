"""A reflector and the source against a real API server, through everything that can happen on the way."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from kube_rig import CEILING, INSTANCES, NODES, Cluster, FaultProxy, cluster, kura_instance, running_cluster

from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.instances import RegionSettings
from kura_shaper.tenants.kubernetes.objects import Effect
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.reflector import Timing
from kura_shaper.tenants.kubernetes.source import ClusterSource
from kura_shaper.tenants.kubernetes.thread import FollowedCluster
from kura_shaper.units import Rate

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from kubernetes_rig import Reflecting, in_a_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kura_shaper.tenants.kubernetes.source import Snapshot
    from kura_shaper.tenants.kubernetes.wire import Answer

__all__ = ["cluster", "running_cluster"]  # fixtures

pytestmark = pytest.mark.kube

QUICK = Timing(watch_s=20, idle_margin_s=2, backoff_least_ns=50_000_000, backoff_most_ns=1_000_000_000)
MANY = 5_000


@asynccontextmanager
async def through_proxy(cluster: Cluster, directory: Path) -> AsyncIterator[tuple[FaultProxy, HttpApi]]:
    """Reach the server as admin through a proxy that can fail."""
    async with FaultProxy(cluster.port) as proxy:
        config = cluster.kubeconfig(directory / "config", token=cluster.admin, port=proxy.port)
        async with HttpApi(Access(config, clock=SystemAsyncClock())) as api:
            yield proxy, api


@asynccontextmanager
async def known_through(
    cluster: Cluster, directory: Path, *, timing: Timing = QUICK
) -> AsyncIterator[tuple[FaultProxy, Reflecting]]:
    """Follow the instances through a proxy; `a` is there and known."""
    cluster.create(INSTANCES, kura_instance("a", 0x100))
    async with through_proxy(cluster, directory) as (proxy, api):
        known = Reflecting(api, SystemAsyncClock(), timing=timing)
        async with known.running():
            await known.until(lambda: "kura-a" in known.objects)
            yield proxy, known


def names(known: Reflecting) -> set[str]:
    return {name.removeprefix("kura-") for name in known.objects}


@in_a_loop
async def test_what_is_created_changed_and_deleted_is_seen(cluster: Cluster, tmp_path: Path) -> None:
    async with known_through(cluster, tmp_path) as (_, known):
        cluster.create(INSTANCES, kura_instance("b", 0x101))
        await known.until(lambda: names(known) == {"a", "b"})
        cluster.patch(f"{INSTANCES}/kura-a", {"spec": {"egressGuaranteedMbps": 40}})
        await known.until(lambda: known.objects["kura-a"]["egressGuaranteedMbps"] == 40)
        changes = known.changes
        cluster.patch(f"{INSTANCES}/kura-a/status", {"status": {"phase": "Ready"}})
        cluster.delete(f"{INSTANCES}/kura-b")
        await known.until(lambda: names(known) == {"a"})
        assert known.changes == changes + 1


@in_a_loop
async def test_a_connection_that_is_cut_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    async with known_through(cluster, tmp_path) as (proxy, known):
        for number, name in enumerate("bcdef"):
            proxy.cut()
            cluster.create(INSTANCES, kura_instance(name, 0x200 + number))
            await known.until(lambda name=name: name in names(known))  # type: ignore[misc]


@in_a_loop
async def test_a_server_that_refuses_is_asked_less_and_less_and_nothing_is_forgotten(
    cluster: Cluster, tmp_path: Path
) -> None:
    timing = Timing(watch_s=20, backoff_least_ns=50_000_000, backoff_most_ns=400_000_000)
    async with known_through(cluster, tmp_path, timing=timing) as (proxy, known):
        began = time.monotonic()
        proxy.refuse()
        proxy.cut()
        await proxy.until(lambda: proxy.refused >= 8)
        lasted_s = time.monotonic() - began
        assert lasted_s > 0.8, f"{proxy.refused} connections in {lasted_s} s"
        assert names(known) == {"a"}
        assert "can't be reached" in known.reflector.state.failure
        cluster.create(INSTANCES, kura_instance("b", 0x101))
        proxy.refuse(refuse=False)
        await known.until(lambda: names(known) == {"a", "b"})
        assert known.reflector.state.failure == ""


@in_a_loop
async def test_a_connection_that_hangs_is_given_up_on(cluster: Cluster, tmp_path: Path) -> None:
    timing = Timing(watch_s=1, idle_margin_s=0.5, list_s=5, backoff_least_ns=50_000_000)
    async with known_through(cluster, tmp_path, timing=timing) as (proxy, known):
        proxy.hang()
        cluster.create(INSTANCES, kura_instance("b", 0x101))
        accepted = proxy.accepted
        await proxy.until(lambda: proxy.accepted > accepted)
        assert names(known) == {"a"}
        assert known.reflector.state.failure
        # What was held back would come late; those connections are gone.
        proxy.cut()
        proxy.hang(hang=False)
        await known.until(lambda: names(known) == {"a", "b"})


@in_a_loop
async def test_a_deletion_while_the_server_restarted_is_seen(cluster: Cluster, tmp_path: Path) -> None:
    async with known_through(cluster, tmp_path) as (proxy, known):
        cluster.create(INSTANCES, kura_instance("b", 0x101))
        await known.until(lambda: names(known) == {"a", "b"})
        proxy.refuse()
        proxy.cut()
        cluster.delete(f"{INSTANCES}/kura-a")
        cluster.create(INSTANCES, kura_instance("c", 0x102))
        await asyncio.to_thread(cluster.restart)
        proxy.refuse(refuse=False)
        await known.until(lambda: names(known) == {"b", "c"})


@in_a_loop
async def test_a_restart_in_plain_sight_never_shows_fewer_objects(cluster: Cluster, tmp_path: Path) -> None:
    async with known_through(cluster, tmp_path) as (_, known):
        seen: set[int] = set()
        cluster.stop("apiserver")
        cluster.start_apiserver()
        ready = asyncio.create_task(asyncio.to_thread(cluster.wait_ready))
        while not ready.done():
            seen.add(len(known.objects))
            await asyncio.wait({ready}, timeout=0.01)
        await ready
        cluster.create(INSTANCES, kura_instance("b", 0x101))
        await known.until(lambda: names(known) == {"a", "b"})
        assert seen == {1}


class CompactingApi:
    """Lets etcd forget the version of a list between its first page and its second."""

    def __init__(self, api: HttpApi, cluster: Cluster) -> None:
        self._api, self._cluster = api, cluster
        self.queries: list[dict[str, str]] = []

    @asynccontextmanager
    async def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AsyncIterator[Answer]:
        if "continue" in query and not any("continue" in before for before in self.queries):
            self._cluster.create(INSTANCES, kura_instance("late", 0x900))
            self._cluster.compact()
        self.queries.append(dict(query))
        async with self._api.get(path, query, idle_s=idle_s, total_s=total_s) as answer:
            yield answer


@in_a_loop
async def test_a_list_whose_version_goes_between_its_pages_is_whole_all_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.create_many(INSTANCES, [kura_instance(f"t{n}", 0x100 + n) for n in range(7)])
    async with through_proxy(cluster, tmp_path) as (_, api):
        compacting = CompactingApi(api, cluster)
        known = Reflecting(compacting, SystemAsyncClock(), timing=Timing(page_objects=3))
        listing = await known.reflector.read()
    assert len(listing.objects) == 8
    assert [query.get("limit") for query in compacting.queries] == ["3", "3", None]


# Who we are.


@asynccontextmanager
async def in_a_pod(cluster: Cluster, directory: Path, token: str) -> AsyncIterator[tuple[FaultProxy, HttpApi]]:
    """Reach the server through a proxy as a pod does; the token is in the file `token` of the directory."""
    (directory / "ca.crt").write_bytes(cluster.certificate.read_bytes())
    (directory / "token").write_text(token + "\n")
    async with FaultProxy(cluster.port) as proxy:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(proxy.port)}
        access = Access(clock=SystemAsyncClock(), environ=environ, service_account=directory)
        async with HttpApi(access) as api:
            yield proxy, api


@in_a_loop
async def test_a_token_that_was_replaced_is_used_from_the_next_request_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.service_account("rotating")
    cluster.create(INSTANCES, kura_instance("a", 0x100))
    first, second = (cluster.token("rotating", secret) for secret in ("first", "second"))
    async with in_a_pod(cluster, tmp_path, first) as (proxy, api):
        known = Reflecting(api, SystemAsyncClock(), timing=QUICK)
        async with known.running():
            await known.until(lambda: names(known) == {"a"})
            # The first token is no longer good, and for a while nobody has put the second in place.
            cluster.delete("/api/v1/namespaces/kura/secrets/first")
            cluster.create(INSTANCES, kura_instance("b", 0x101))
            await known.until(lambda: "b" in names(known))
            await until_failed(proxy, known, "401: Unauthorized")
            assert names(known) == {"a", "b"}
            (tmp_path / "token").write_text(second)
            cluster.create(INSTANCES, kura_instance("c", 0x102))
            await known.until(lambda: names(known) == {"a", "b", "c"})


async def until_failed(proxy: FaultProxy, known: Reflecting, words: str) -> None:
    """Cut the watch until it fails for a reason; a server may know a token for a few seconds more."""
    async with asyncio.timeout(60):
        while words not in known.reflector.state.failure:
            proxy.cut()
            await asyncio.sleep(0.1)  # the failure is told by no event: it changes nothing that is known


@in_a_loop
async def test_who_may_not_read_is_told_so_and_reads_as_soon_as_it_may(cluster: Cluster, tmp_path: Path) -> None:
    cluster.service_account("late", may_read=False)
    cluster.create(INSTANCES, kura_instance("a", 0x100))
    async with in_a_pod(cluster, tmp_path, cluster.token("late", "late")) as (proxy, api):
        known = Reflecting(api, SystemAsyncClock(), timing=QUICK)
        async with known.running():
            await until_failed(proxy, known, "403: kurainstances.kura.tuist.dev is forbidden")
            assert not known.reflector.state.synced
            cluster.allow("late")
            await known.until(lambda: names(known) == {"a"})


@in_a_loop
async def test_a_kind_that_is_not_served_is_no_empty_list(cluster: Cluster, tmp_path: Path) -> None:
    async with through_proxy(cluster, tmp_path) as (proxy, api):
        known = Reflecting(api, SystemAsyncClock(), path="/apis/none.example/v1/things", timing=QUICK)
        async with known.running():
            await until_failed(proxy, known, "404: 404 page not found")
            assert not known.reflector.state.synced


# The source and the command.


async def until(source: ClusterSource, what: Callable[[Snapshot], bool]) -> Snapshot:
    async with asyncio.timeout(30):
        while not what(source.snapshot()):
            source.changed.clear()
            await source.changed.wait()
    return source.snapshot()


def make_node(cluster: Cluster, name: str, capacity: str) -> None:
    cluster.create(NODES, {"metadata": {"name": name}})
    change_capacity(cluster, name, capacity)


def change_capacity(cluster: Cluster, name: str, capacity: str | None) -> None:
    cluster.patch(f"{NODES}/{name}/status", {"status": {"capacity": {"tuist.dev/egress-mbps": capacity}}})


@in_a_loop
async def test_the_source_follows_tenants_and_the_budget_of_its_node(cluster: Cluster, tmp_path: Path) -> None:
    make_node(cluster, "box-1", "3000")
    make_node(cluster, "box-2", "1000")
    cluster.create(INSTANCES, kura_instance("acme", 0x100))
    async with through_proxy(cluster, tmp_path) as (proxy, api):
        source = ClusterSource(
            api, RegionSettings("us-east"), clock=SystemAsyncClock(), random=Random(1), node="box-1", timing=QUICK
        )
        task = asyncio.create_task(source.run())
        found = await until(source, lambda snapshot: snapshot.synced)
        assert found.budget == Rate(3_000_000_000)  # the server says 3k
        change_capacity(cluster, "box-1", "5k")
        await until(source, lambda snapshot: snapshot.budget == Rate(5_000_000_000))
        change_capacity(cluster, "box-1", None)
        await until(source, lambda snapshot: snapshot.budget is None)
        cluster.patch(f"{INSTANCES}/kura-acme", {"spec": {"podAnnotations": {CEILING: "1,5G"}}})
        found = await until(source, lambda snapshot: bool(snapshot.problems))
        assert found.problems[0].effect is Effect.LAST_GOOD
        assert found.document
        assert found.document.tenants[0].ceiling == Rate(1_500_000_000)
        proxy.refuse()
        proxy.cut()
        assert source.snapshot().document == found.document
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_program_without_a_loop_follows_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    make_node(cluster, "box-1", "3000")
    cluster.create(INSTANCES, kura_instance("acme", 0x100))
    told, clock = threading.Event(), SystemAsyncClock()
    api = HttpApi(Access(cluster.kubeconfig(tmp_path / "config", token=cluster.admin), clock=clock))
    source = ClusterSource(
        api, RegionSettings("us-east"), clock=clock, random=Random(1), node="box-1", on_change=told.set
    )
    with FollowedCluster(source, api) as followed:
        seen: set[int] = set()
        for number in range(3):
            assert told.wait(30)
            told.clear()
            document = followed.snapshot().document
            seen.add(len(document.tenants) if document else 0)
            cluster.create(INSTANCES, kura_instance(f"t{number}", 0x200 + number))
        assert max(seen) >= 2
    assert followed.snapshot().failure == ""


def export(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "kura-shaper"), "tenants", "export", "--region", "us-east", *options]
    environment = {**os.environ, "KUBECONFIG": str(config)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_export_prints_the_region_and_says_who_may_not_or_can_not(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(INSTANCES, kura_instance("acme", 0x100))
    cluster.create(INSTANCES, kura_instance("far", 0x101, region="eu-west"))
    ended = export(cluster.kubeconfig(tmp_path / "admin", token=cluster.admin))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [tenant.name for tenant in parse_tenants(ended.stdout, file="exported").tenants] == ["acme"]
    cluster.create(INSTANCES, kura_instance("bad", 0x102, podAnnotations={CEILING: "lots"}))
    ended = export(tmp_path / "admin", "--json")
    assert (ended.returncode, len(json.loads(ended.stdout)["problems"])) == (1, 1)
    for token, words in ((cluster.stranger, "403: kurainstances"), ("nobody", "401: Unauthorized")):
        ended = export(cluster.kubeconfig(tmp_path / "other", token=token))
        assert (ended.returncode, ended.stdout) == (4, "")
        assert words in ended.stderr


# Many.

_MEASURE = """
import asyncio, json, sys, time
from pathlib import Path
from random import Random
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.instances import RegionSettings
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.source import ClusterSource

async def measure():
    clock = SystemAsyncClock()
    began = time.monotonic()
    async with HttpApi(Access(Path(sys.argv[1]), clock=clock)) as api:
        source = ClusterSource(api, RegionSettings("us-east"), clock=clock, random=Random(1))
        task = asyncio.create_task(source.run())
        await source.changed.wait()
        synced_s = time.monotonic() - began
        # Not ru_maxrss, which begins with the memory of whoever started this.
        rows = open("/proc/self/status").read().splitlines()
        peak_kib = next(int(row.split()[1]) for row in rows if row.startswith("VmHWM"))
        print(json.dumps({"tenants": len(source.snapshot().document.tenants), "synced_s": synced_s,
            "cpu_s": time.process_time(), "problems": len(source.snapshot().problems),
            "rss_mib": peak_kib / 1024}), flush=True)
        task.cancel()

asyncio.run(measure())
"""


@pytest.mark.slow
def test_five_thousand_instances_are_known_within_seconds(
    cluster: Cluster, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    cluster.create_many(INSTANCES, [kura_instance(f"tenant-{n}", 0x100 + n) for n in range(MANY)])
    config = cluster.kubeconfig(tmp_path / "config", token=cluster.admin)
    command = [sys.executable, "-c", _MEASURE, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    for key, value in found.items():
        record_property(key, value)
    print(found)
    assert (found["tenants"], found["problems"]) == (MANY, 0)
    assert found["rss_mib"] < 160
