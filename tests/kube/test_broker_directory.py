"""The broker's directory against a real API server: lists, watches, compaction, outages, rights, rotated tokens."""

from __future__ import annotations

import asyncio
import functools
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from kube_rig import Cluster, FaultProxy
from metadata_rig import GROUP, QUICK, WORKERS, cluster, running_cluster

from kura_shaper.broker.directory import MetadataDirectory
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import channel, resource, worker
from kubernetes_rig import in_a_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["cluster", "running_cluster"]  # fixtures

pytestmark = pytest.mark.kube


def metadata(*endpoints: str, name: str = "w0") -> dict[str, Any]:
    made = resource({f"k{each}": channel(each) for each in endpoints}, name=name, namespace="kura")
    del made["metadata"]["resourceVersion"]
    return made


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)  # nothing tells when it is


@asynccontextmanager
async def following(
    cluster: Cluster, directory: Path, *, token: str = ""
) -> AsyncIterator[tuple[FaultProxy, MetadataDirectory]]:
    """Follow the metadata through a proxy that can fail."""
    clock = SystemAsyncClock()
    async with FaultProxy(cluster.port) as proxy:
        config = cluster.kubeconfig(directory / "config", token=token or cluster.admin, port=proxy.port)
        async with HttpApi(Access(config, clock=clock)) as api:
            made = MetadataDirectory(api, ("kura",), clock=clock, random=Random(1), timing=QUICK)
            task = asyncio.ensure_future(made.run())
            try:
                yield proxy, made
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def knows(directory: MetadataDirectory, endpoint: str) -> bool:
    return directory.is_advertised(endpoint, "dynamo")


ONE, TWO = "tcp://10.244.1.7:41235", "tcp://[fd00::7]:5557"


@in_a_loop
async def test_what_workers_write_and_take_away_is_known(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(WORKERS, metadata(ONE))
    async with following(cluster, tmp_path) as (_, known):
        await known.synced()
        assert knows(known, ONE)
        cluster.create(WORKERS, metadata(TWO, name="w1"))
        await until(lambda: knows(known, TWO))
        cluster.patch(f"{WORKERS}/w0", {"spec": {"data": {"event_channels": None}}})
        await until(lambda: not knows(known, ONE))
        cluster.delete(f"{WORKERS}/w1")
        await until(lambda: not knows(known, TWO))
        assert not any(known.counts.skipped.values())


@pytest.mark.case("EB3")
@in_a_loop
async def test_a_hundred_workers_come_in_pages(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_many(WORKERS, [metadata_of(number) for number in range(100)])
    async with following(cluster, tmp_path) as (_, known):
        await known.synced()
        assert (known.resources, known.references) == (100, 400)
        assert knows(known, "tcp://10.0.0.99:40003")


def metadata_of(number: int) -> dict[str, Any]:
    made = worker(number)
    made["metadata"] = {"name": f"w{number}", "namespace": "kura"}
    return made


@pytest.mark.case("EB5")
@in_a_loop
async def test_an_outage_loses_nothing_and_what_was_deleted_meanwhile_goes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(WORKERS, metadata(ONE))
    cluster.create(WORKERS, metadata(TWO, name="w1"))
    async with following(cluster, tmp_path) as (proxy, known):
        await known.synced()
        proxy.refuse()
        proxy.cut()
        await proxy.until(lambda: proxy.refused > 2)
        cluster.delete(f"{WORKERS}/w0")
        # So long ago that the API server can't tell of it any more.
        cluster.compact()
        assert knows(known, ONE)
        assert knows(known, TWO)
        proxy.refuse(refuse=False)
        await until(lambda: not knows(known, ONE))
        assert knows(known, TWO)


@pytest.mark.case("EP22")
@in_a_loop
async def test_a_server_that_forgot_every_version_is_listed_anew(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create(WORKERS, metadata(ONE))
    async with following(cluster, tmp_path) as (_, known):
        await known.synced()
        await asyncio.to_thread(cluster.restart)
        cluster.create(WORKERS, metadata(TWO, name="w1"))
        await until(lambda: knows(known, TWO))
        assert knows(known, ONE)


def role(cluster: Cluster, account: str) -> None:
    """Let an account do exactly what a broker needs, and nothing else."""
    rule = {"apiGroups": ["nvidia.com"], "resources": ["dynamoworkermetadatas"], "verbs": ["get", "list", "watch"]}
    cluster.create(f"{GROUP}/roles", {"metadata": {"name": account}, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "kura"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account}
    binding = {"metadata": {"name": account}, "roleRef": reference, "subjects": [subject]}
    cluster.create(f"{GROUP}/rolebindings", binding)


@pytest.mark.case("EB46")
@in_a_loop
async def test_the_role_that_is_documented_is_enough_and_without_it_nothing_is_advertised(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.service_account("broker", may_read=False)
    token = cluster.token("broker", "broker-token")
    cluster.create(WORKERS, metadata(ONE))
    async with following(cluster, tmp_path, token=token) as (_, known):
        await until(lambda: known.counts.lists["failed"] > 2)
        assert not knows(known, ONE)
        role(cluster, "broker")
        await until(functools.partial(knows, known, ONE))
        cluster.create(WORKERS, metadata(TWO, name="w1"))
        await until(lambda: knows(known, TWO))


@pytest.mark.case("EP23")
@in_a_loop
async def test_a_token_that_was_replaced_is_read_when_the_old_one_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.service_account("rotated", may_read=False)
    role(cluster, "rotated")
    old, new = cluster.token("rotated", "rotated-old"), cluster.token("rotated", "rotated-new")
    cluster.create(WORKERS, metadata(ONE))
    async with following(cluster, tmp_path, token=old) as (proxy, known):
        await known.synced()
        # The token is bound to this secret, and is no good without it.
        cluster.delete("/api/v1/namespaces/kura/secrets/rotated-old")
        failed = known.counts.watch_restarts["error"]
        proxy.cut()
        await until(lambda: known.counts.watch_restarts["error"] > failed + 1)
        cluster.kubeconfig(tmp_path / "config", token=new, port=proxy.port)
        cluster.create(WORKERS, metadata(TWO, name="w1"))
        await until(lambda: knows(known, TWO))
