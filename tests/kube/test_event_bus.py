"""A router that discovers publishers at a real API server, and reads them through a broker that asks it as well."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import pytest
from kube_rig import Cluster, FaultProxy, RefusedError
from metadata_rig import GROUP, QUICK, WORKERS, cluster, running_cluster

from kura_shaper.broker.directory import MetadataDirectory
from kura_shaper.broker.router.discovery import Discovery, open_apis
from kura_shaper.broker.router.settings import Discover
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock

sys.path += [str(Path(__file__).parents[1] / each) for each in ("broker", "unit")]
from bus_rig import NAMESPACE, FakeDirectory, in_flowing_time, until
from dwm import channel, resource
from router_rig import RouterRig, ZmqPublisher, routing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["cluster", "running_cluster"]  # fixtures

pytestmark = pytest.mark.kube


def token_that_reads_metadata(cluster: Cluster) -> str:
    """Return the token of an account that may do what the documentation has it do, and nothing else."""
    cluster.service_account("event-bus", may_read=False)
    rule = {"apiGroups": ["nvidia.com"], "resources": ["dynamoworkermetadatas"], "verbs": ["get", "list", "watch"]}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "event-bus"}
    subject = {"kind": "ServiceAccount", "name": "event-bus", "namespace": "kura"}
    binding = {"metadata": {"name": "event-bus"}, "roleRef": reference, "subjects": [subject]}
    with suppress(RefusedError):  # they are there
        cluster.create(f"{GROUP}/roles", {"metadata": {"name": "event-bus"}, "rules": [rule]})
        cluster.create(f"{GROUP}/rolebindings", binding)
    return cluster.token("event-bus", "event-bus-token")


@asynccontextmanager
async def reading(cluster: Cluster, scratch: Path) -> AsyncIterator[tuple[FaultProxy, RouterRig, Discovery]]:
    """Run a router that discovers through a proxy that can fail, and a broker that follows the same metadata."""
    clock, token = SystemAsyncClock(), token_that_reads_metadata(cluster)
    async with FaultProxy(cluster.port) as proxy, AsyncExitStack() as stack:
        config = cluster.kubeconfig(scratch / "router", token=token, port=proxy.port)
        wanted = (Discover("kura", (NAMESPACE,), ("kv-events",), config),)
        rig = await stack.enter_async_context(routing(discover=wanted))
        apis = await open_apis(rig.bus.settings, stack, clock)
        discovery = Discovery(wanted, apis, rig.bus, clock=clock, random=Random(1), timing=QUICK)
        brokers = Access(cluster.kubeconfig(scratch / "broker", token=token), clock=clock)
        api = await stack.enter_async_context(HttpApi(brokers))
        directory = MetadataDirectory(api, ("kura",), clock=clock, random=Random(2), timing=QUICK)
        rig.directory = cast("FakeDirectory", directory)
        tasks = [asyncio.ensure_future(each) for each in (discovery.run(), directory.run())]
        try:
            await rig.start_broker()
            yield proxy, rig, discovery
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def advertise(cluster: Cluster, publisher: ZmqPublisher, name: str) -> None:
    """Have a worker advertise a publisher, and beside it one of a topic that is not wanted."""
    channels: dict[str, Any] = {
        "wanted": channel(publisher.endpoint),
        "not": channel("tcp://127.0.0.1:1", topic="logs"),
    }
    made = resource(channels, name=name, namespace="kura")
    del made["metadata"]["resourceVersion"]
    cluster.create(WORKERS, made)


def test_publishers_are_read_as_long_as_the_api_server_has_them_and_an_outage_ends_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    first, second = ZmqPublisher(1), ZmqPublisher(2)

    @in_flowing_time
    async def run() -> None:
        advertise(cluster, first, "w0")
        async with reading(cluster, tmp_path) as (proxy, rig, discovery):
            await first.subscribed()
            await rig.hear(first)
            assert [feed.wanted.endpoint for feed in rig.bus.feeds] == [first.endpoint]
            proxy.refuse()
            proxy.cut()
            await proxy.until(lambda: proxy.refused > 2)
            cluster.delete(f"{WORKERS}/w0")
            advertise(cluster, second, "w1")
            # So long ago that the API server can't tell of it any more: only a list shows what went.
            cluster.compact()
            await rig.hear(first)
            assert discovery.publishers == 1
            proxy.refuse(refuse=False)
            await second.subscribed()
            await rig.hear(second)
            await first.subscribed(unsubscribes=1)
            await until(lambda: [feed.wanted.endpoint for feed in rig.bus.feeds] == [second.endpoint])
            cluster.delete(f"{WORKERS}/w1")
            await second.subscribed(unsubscribes=1)
            assert not rig.bus.feeds
            assert rig.output.missed == 0

    try:
        run()
    finally:
        first.close()
        second.close()
