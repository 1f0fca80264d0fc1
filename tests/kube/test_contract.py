"""The API in memory does what a real API server does, as far as a reflector depends on it.

Every test runs against both. Where a real server has to be brought to it, such as to
forgetting a version, the means differ and what is seen must not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from kube_rig import INSTANCES, NODES, Cluster, cluster, kura_instance, running_cluster

from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.fake import FakeApi
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.tenants.kubernetes.wire import Event, GoneError, Kind, parse_event, parse_page, refused

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from kubernetes_rig import in_a_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kura_shaper.tenants.kubernetes.wire import Api, Page

__all__ = ["cluster", "running_cluster"]  # fixtures


class World(Protocol):
    """An API server and the means to change what it serves. Instances are `kura-NAME`."""

    def api(self, directory: Path) -> Any: ...
    async def put(self, name: str, number: int) -> None: ...
    async def delete(self, name: str) -> None: ...
    async def put_node(self, name: str) -> None: ...
    async def forget_lists(self) -> None: ...
    async def forget_watches(self) -> None: ...
    async def let_watches_end(self) -> None: ...


class InMemory:
    """The fake."""

    def __init__(self) -> None:
        self.instances, self.nodes = FakeApi(), FakeApi("NodeList")

    @asynccontextmanager
    async def api(self, directory: Path) -> AsyncIterator[Api]:
        yield self

    def get(self, path: str, query: Any, *, idle_s: float, total_s: float | None = None) -> Any:
        return (self.nodes if path == NODES else self.instances).get(path, query, idle_s=idle_s, total_s=total_s)

    async def put(self, name: str, number: int) -> None:
        self.instances.put(f"kura-{name}", kura_instance(name, number))

    async def delete(self, name: str) -> None:
        self.instances.delete(f"kura-{name}")

    async def put_node(self, name: str) -> None:
        self.nodes.put(name, {"status": {}}, namespace="")

    async def forget_lists(self) -> None:
        self.instances.forget()

    forget_watches = forget_lists

    async def let_watches_end(self) -> None:
        self.nodes.bookmark()
        self.nodes.end_watches()


class Real:
    """The real one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @asynccontextmanager
    async def api(self, directory: Path) -> AsyncIterator[Api]:
        config = self.cluster.kubeconfig(directory / "config", token=self.cluster.admin)
        async with HttpApi(Access(config, clock=SystemAsyncClock())) as api:
            yield api

    async def put(self, name: str, number: int) -> None:
        path = f"{INSTANCES}/kura-{name}"
        body = kura_instance(name, number)
        names = [item["metadata"]["name"] for item in self.cluster.ask("GET", INSTANCES)["items"]]
        if f"kura-{name}" in names:
            self.cluster.patch(path, body)
        else:
            self.cluster.create(INSTANCES, body)

    async def delete(self, name: str) -> None:
        self.cluster.delete(f"{INSTANCES}/kura-{name}")

    async def put_node(self, name: str) -> None:
        self.cluster.create(NODES, {"metadata": {"name": name}})

    async def forget_lists(self) -> None:
        self.cluster.compact()

    async def forget_watches(self) -> None:
        # A watch is served from the server's own memory, which compaction does not touch.
        await asyncio.to_thread(self.cluster.restart)

    async def let_watches_end(self) -> None:
        pass  # by their own timeoutSeconds


@pytest.fixture(params=["in memory", pytest.param("real", marks=pytest.mark.kube)])
def world(request: pytest.FixtureRequest) -> World:
    """Return each of both."""
    return InMemory() if request.param == "in memory" else Real(request.getfixturevalue("cluster"))


async def page(api: Api, path: str = INSTANCES, **query: str) -> Page:
    async with api.get(path, query, idle_s=10, total_s=10) as answer:
        body = await answer.body()
        if answer.status != 200:
            raise refused(answer.status, body)
        return parse_page(body)


@asynccontextmanager
async def watch(api: Api, version: str, path: str = INSTANCES, **query: str) -> AsyncIterator[AsyncIterator[Event]]:
    whole = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "30", **query}
    async with api.get(path, whole, idle_s=40) as answer:
        assert answer.status == 200, await answer.body()
        yield (parse_event(line) async for line in answer.lines())


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await asyncio.wait_for(anext(events), 20) for _ in range(count)]


def names(found: Page) -> list[str]:
    return [item.key[1] for item in found.items]


@in_a_loop
async def test_an_empty_list_is_a_list_with_a_version(world: World, tmp_path: Path) -> None:
    async with world.api(tmp_path) as api:
        found = await page(api)
        assert (found.items, found.more, found.version != "") == ((), "", True)


@in_a_loop
async def test_pages_are_of_one_version_whatever_changes_meanwhile(world: World, tmp_path: Path) -> None:
    async with world.api(tmp_path) as api:
        for number, name in enumerate("ebdca"):
            await world.put(name, 0x100 + number)
        first = await page(api, limit="2")
        await world.put("aa", 0x200)
        await world.delete("e")
        second = await page(api, limit="2", **{"continue": first.more})
        third = await page(api, limit="2", **{"continue": second.more})
        found = [name for each in (first, second, third) for name in names(each)]
        assert found == [f"kura-{name}" for name in "abcde"]
        assert {each.version for each in (first, second, third)} == {first.version}
        assert third.more == ""
        assert names(await page(api)) == [f"kura-{name}" for name in ("a", "aa", "b", "c", "d")]


@in_a_loop
async def test_objects_have_their_namespace_name_and_version(world: World, tmp_path: Path) -> None:
    async with world.api(tmp_path) as api:
        await world.put("a", 0x100)
        (item,) = (await page(api)).items
        assert item.key == ("kura", "kura-a")
        assert item.version
        assert item.raw["spec"] == kura_instance("a", 0x100)["spec"]


@in_a_loop
async def test_a_watch_tells_what_came_after_its_version_in_order(world: World, tmp_path: Path) -> None:
    async with world.api(tmp_path) as api:
        await world.put("a", 0x100)
        version = (await page(api)).version
        await world.put("b", 0x101)
        async with watch(api, version) as events:
            found = await take(events, 1)
            await world.put("a", 0x102)
            await world.delete("b")
            await world.put("b", 0x103)
            found += await take(events, 3)
        changes = [(event.kind, event.item.key[1]) for event in found]
        assert changes == [
            (Kind.ADDED, "kura-b"),
            (Kind.MODIFIED, "kura-a"),
            (Kind.DELETED, "kura-b"),
            (Kind.ADDED, "kura-b"),
        ]
        versions = [int(event.item.version) for event in found]
        assert versions == sorted(set(versions))
        async with watch(api, found[1].item.version) as events:
            assert [event.item.version for event in await take(events, 2)] == [str(v) for v in versions[2:]]


@in_a_loop
async def test_a_selector_chooses_one_object_in_lists_and_watches(world: World, tmp_path: Path) -> None:
    selector = {"fieldSelector": "metadata.name=box-1"}
    async with world.api(tmp_path) as api:
        await world.put_node("box-2")
        found = await page(api, NODES, **selector)
        assert found.items == ()
        async with watch(api, found.version, NODES, **selector) as events:
            await world.put_node("box-3")
            await world.put_node("box-1")
            (event,) = await take(events, 1)
        assert event.item.key == ("", "box-1")
        assert names(await page(api, NODES, **selector)) == ["box-1"]


@in_a_loop
async def test_a_bookmark_tells_the_version_that_others_moved_on_to_and_then_a_watch_ends(
    world: World, tmp_path: Path
) -> None:
    query = {"fieldSelector": "metadata.name=box-1", "allowWatchBookmarks": "true", "timeoutSeconds": "4"}
    async with world.api(tmp_path) as api:
        version = (await page(api, NODES)).version
        async with watch(api, version, NODES, **query) as events:
            await world.put_node("box-2")
            await world.let_watches_end()
            found = [event async for event in events]
        assert {event.kind for event in found} == {Kind.BOOKMARK}
        assert int(found[-1].item.version) > int(version)


@in_a_loop
async def test_a_list_whose_version_is_forgotten_can_not_go_on_and_says_so_by_its_status(
    world: World, tmp_path: Path
) -> None:
    async with world.api(tmp_path) as api:
        for number, name in enumerate("abc"):
            await world.put(name, 0x100 + number)
        first = await page(api, limit="2")
        await world.put("d", 0x200)
        await world.forget_lists()
        with pytest.raises(GoneError, match="410"):
            await page(api, limit="2", **{"continue": first.more})


@in_a_loop
async def test_a_watch_whose_version_is_forgotten_is_answered_with_200_and_an_error_as_event(
    world: World, tmp_path: Path
) -> None:
    async with world.api(tmp_path) as api:
        await world.put("a", 0x100)
        version = (await page(api)).version
        await world.delete("a")
        await world.put("b", 0x101)
        await world.forget_watches()
        async with watch(api, version) as events:
            with pytest.raises(GoneError, match="410"):
                await take(events, 1)


@pytest.mark.kube
@in_a_loop
async def test_what_is_not_served_is_a_404_in_plain_text(cluster: Cluster, tmp_path: Path) -> None:
    async with Real(cluster).api(tmp_path) as api:
        async with api.get("/apis/none.example/v1/things", {}, idle_s=10) as answer:
            body = await answer.body()
        assert answer.status == 404
        with pytest.raises(ValueError, match="Extra data"):
            json.loads(body)
