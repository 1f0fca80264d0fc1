"""What is advertised, through lists in pages, watches that end in every way, outages and caps."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import tracemalloc
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import in_a_loop, loop, until

from kura_shaper.broker.directory import MetadataDirectory, Timing
from kura_shaper.tenants.kubernetes.fake import FakeAnswer, FakeApi, FakeAsyncClock, refusal
from kura_shaper.tenants.kubernetes.wire import ApiError

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import PATH, channel, listed, resource, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from kura_shaper.tenants.kubernetes.fake import Asked
    from kura_shaper.tenants.kubernetes.wire import Answer

NAMESPACE = "dynamo"


def endpoint(number: int = 1) -> str:
    return f"tcp://10.0.0.{number}:41235"


class Server:
    """One API server with several namespaces, each a fake of its own."""

    def __init__(self, *namespaces: str) -> None:
        self.namespaces = {name: FakeApi("DynamoWorkerMetadataList") for name in namespaces}

    @asynccontextmanager
    async def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AsyncIterator[Answer]:
        name = next(each for each in self.namespaces if path == PATH.format(each))
        async with self.namespaces[name].get(path, query, idle_s=idle_s, total_s=total_s) as answer:
            yield answer

    def put(self, *channels: Any, name: str = "w0", namespace: str = "gpu") -> None:
        made = resource({f"k{number}": each for number, each in enumerate(channels)}, name=name, namespace=namespace)
        self.namespaces[namespace].put(name, made, namespace=namespace)


class Following:
    """A directory that runs."""

    def __init__(self, server: Server, *, timing: Timing | None = None) -> None:
        self.clock = FakeAsyncClock()
        self.changes = 0
        self.directory = MetadataDirectory(
            server,
            tuple(server.namespaces),
            clock=self.clock,
            random=Random(1),
            timing=timing,
            on_change=self._on_change,
        )

    def _on_change(self) -> None:
        self.changes += 1

    def is_current(self) -> bool:
        return self.directory.is_current

    def knows(self, number: int = 1) -> bool:
        return self.directory.is_advertised(endpoint(number), NAMESPACE)


@asynccontextmanager
async def following(server: Server, *, synced: bool = True, timing: Timing | None = None) -> AsyncIterator[Following]:
    made = Following(server, timing=timing)
    task = asyncio.ensure_future(made.directory.run())
    try:
        if synced:
            await made.directory.synced()
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.case("EB1")
@pytest.mark.case("EB16")
@in_a_loop
async def test_nothing_is_advertised_before_every_namespace_was_listed() -> None:
    server = Server("gpu", "canary")
    server.put(channel(endpoint()))
    blocked = True
    server.namespaces["canary"].answer = lambda _: refusal(503, "starting") if blocked else None
    async with following(server, synced=False) as known:
        await until(lambda: known.directory.namespaces_synced == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not known.knows()
        blocked = False
        await known.directory.synced()
        assert known.knows()


@in_a_loop
async def test_what_is_created_changed_and_deleted_is_known() -> None:
    server = Server("gpu")
    server.put(channel(endpoint(1)))
    async with following(server) as known:
        assert known.knows(1)
        server.put(channel(endpoint(2)))
        await until(lambda: known.knows(2))
        assert not known.knows(1)
        server.namespaces["gpu"].delete("w0", namespace="gpu")
        await until(lambda: not known.knows(2))
        assert (known.directory.resources, known.directory.references) == (0, 0)


@in_a_loop
async def test_publishers_are_told_with_their_topics_by_namespace_and_each_change_is() -> None:
    server = Server("gpu", "canary")
    server.put(channel(endpoint(1), topic="kv_metrics"), channel(endpoint(2)))
    server.put(channel(endpoint(3)), namespace="canary")
    async with following(server) as known:
        told = list(known.directory.publishers("gpu"))
        assert told == [((endpoint(1), NAMESPACE), "kv_metrics"), ((endpoint(2), NAMESPACE), "kv-events")]
        assert list(known.directory.publishers("elsewhere")) == []
        assert known.changes == 2
        api = server.namespaces["gpu"]
        await api.until(lambda: bool(api.watches))
        api.bookmark()
        api.delete("w0", namespace="gpu")
        await until(lambda: known.changes == 3)
        assert list(known.directory.publishers("gpu")) == []
        assert len(list(known.directory.publishers("canary"))) == 1


@pytest.mark.case("ED15")
@in_a_loop
async def test_an_endpoint_of_two_resources_is_advertised_until_the_second_goes_and_counts_twice() -> None:
    server = Server("gpu", "canary")
    server.put(channel(endpoint()), name="a")
    server.put(channel(endpoint()), name="b")
    server.put(channel(endpoint()), name="c", namespace="canary")
    async with following(server) as known:
        assert known.directory.references == 3
        server.namespaces["gpu"].delete("a", namespace="gpu")
        server.namespaces["canary"].delete("c", namespace="canary")
        await until(lambda: known.directory.references == 1)
        assert known.knows()
        server.namespaces["gpu"].delete("b", namespace="gpu")
        await until(lambda: not known.knows())


@in_a_loop
async def test_an_endpoint_is_advertised_under_its_own_dynamo_namespace_only() -> None:
    server = Server("gpu")
    server.put(channel(endpoint(), namespace="team-a"))
    async with following(server) as known:
        assert not known.knows()
        assert known.directory.is_advertised(endpoint(), "team-a")


@pytest.mark.case("EB3")
@in_a_loop
async def test_a_list_goes_in_pages_of_32_and_only_one_raw_page_is_in_memory() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    pad = "x" * 60_000
    pages = [
        json.dumps(
            listed(
                *(
                    resource({"k": channel(endpoint(each))}, name=f"w{page}-{each}", model_cards=pad)
                    for each in range(32)
                ),
                more=str(page + 1) if page < 3 else "",
            )
        ).encode()
        for page in range(4)
    ]
    waiting = list(pages)

    def answer(asked: Asked) -> FakeAnswer | None:
        return None if asked.is_watch or not waiting else FakeAnswer(200, bytes(memoryview(waiting.pop(0))))

    api.answer = answer
    api.version, api._past = 9, {9: ()}
    tracemalloc.start()
    try:
        async with following(server) as known:
            most = tracemalloc.get_traced_memory()[1]
            assert known.directory.resources == 128
    finally:
        tracemalloc.stop()
    assert len(pages[0]) < most < 1.5 * len(pages[0])
    lists = [asked.query for asked in api.asked if not asked.is_watch]
    assert [(query["limit"], query.get("continue")) for query in lists] == [
        ("32", None),
        *(("32", each) for each in "123"),
    ]


@pytest.mark.case("EB4")
@in_a_loop
async def test_a_list_that_fails_half_way_commits_nothing() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    server.put(channel(endpoint(1)), name="w1")
    async with following(server) as known:
        fails = 3

        def second_page_fails(asked: Asked) -> FakeAnswer | None:
            nonlocal fails
            if asked.is_watch or not asked.query.get("continue") or not fails:
                return None
            fails -= 1
            raise ApiError("the connection was lost")

        api.answer = second_page_fails
        for number in range(2, 72):
            server.put(channel(endpoint(number)), name=f"w{number}")
        api.delete("w1", namespace="gpu")
        api.forget()
        seen = set()

        def is_new() -> bool:
            seen.add((known.knows(1), known.knows(40), known.knows(71)))
            return known.directory.counts.lists["ok"] == 2

        api.end_watches()
        await until(is_new)
        assert fails == 0
        assert known.directory.counts.lists == {"ok": 2, "failed": 3}
        assert known.directory.resources == 70
        # At each moment either all of the old or all of the new list, watch events before it apart.
        assert not known.knows(1)


@pytest.mark.case("EB5")
@in_a_loop
async def test_what_is_known_outlives_an_outage_and_what_was_deleted_goes_with_the_next_list() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    server.put(channel(endpoint(1)), name="w1")
    server.put(channel(endpoint(2)), name="w2")
    async with following(server) as known:
        assert known.is_current()
        away = True
        api.answer = lambda _: refusal(503, "away") if away else None
        api.end_watches(ApiError("reset"))
        await api.until(lambda: len(api.asked) > 10)
        api.delete("w1", namespace="gpu")
        api.forget()
        assert known.knows(1)
        assert known.knows(2)
        assert not known.is_current()  # what it does not know, it does not know to be gone
        away = False
        await until(lambda: not known.knows(1))
        assert known.knows(2)
        assert known.is_current()
        assert known.directory.counts.watch_restarts["expired"] == 1


@pytest.mark.parametrize("retry_after_s", [0, 10])
@in_a_loop
async def test_namespaces_that_fail_at_once_come_back_at_different_instants(retry_after_s: int) -> None:
    server = Server(*(f"gpu-{number}" for number in range(16)))
    away = True

    def answer(_: Asked) -> FakeAnswer | None:
        return refusal(503, "starting", retry_after_ns=retry_after_s * 1_000_000_000) if away else None

    async with following(server) as known:
        await until(lambda: all(api.watches for api in server.namespaces.values()))
        for api in server.namespaces.values():
            api.answer = answer
            api.forget()
            api.end_watches(ApiError("reset"))
        # The cut of each watch, and two refusals after that.
        await until(lambda: len(known.clock.slept_ns) >= 3 * 16)
        away = False
        waits = known.clock.slept_ns[:48]
        await until(lambda: known.directory.counts.lists["ok"] == 32)
    told_ns = retry_after_s * 1_000_000_000
    for first in (16, 32):
        refused = waits[first : first + 16]
        assert min(refused) >= told_ns
        # No two alike, and spread over what the backoff has come to.
        assert len(set(refused)) == 16
        assert max(refused) - min(refused) > 100_000_000


@pytest.mark.case("EB3")
@in_a_loop
async def test_one_page_is_in_memory_at_a_time_also_of_several_namespaces() -> None:
    inner = Server("gpu", "canary", "lab")
    for number in range(70):
        for name in inner.namespaces:
            inner.put(channel(endpoint(number)), name=f"w{number}", namespace=name)
    under_way: list[str] = []
    turns = []

    class Slow(Server):
        @asynccontextmanager
        async def get(
            self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
        ) -> AsyncIterator[Answer]:
            async with inner.get(path, query, idle_s=idle_s, total_s=total_s) as answer:
                if "watch" in query:
                    yield answer
                    return
                under_way.append(path)
                turns.append(path)
                for _ in range(20):
                    await asyncio.sleep(0)
                    assert under_way == [path]
                yield answer
                under_way.remove(path)

    async with following(Slow(*inner.namespaces)) as known:
        assert known.directory.resources == 210
        # In turns, so that a long list of one namespace does not keep the others waiting for all of it.
        assert len(set(turns[:3])) == 3


@pytest.mark.case("EB6")
@in_a_loop
async def test_a_watch_that_does_not_open_within_thirty_seconds_is_tried_again() -> None:
    server = Server("gpu")
    server.put(channel(endpoint()))
    hanging = asyncio.Event()
    opened = 0

    class Hanging(Server):
        @asynccontextmanager
        async def get(
            self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
        ) -> AsyncIterator[Answer]:
            nonlocal opened
            if "watch" in query:
                opened += 1
                if opened == 1:
                    await hanging.wait()
            async with server.get(path, query, idle_s=idle_s, total_s=total_s) as answer:
                yield answer

    async with following(Hanging("gpu")) as known:
        await until(lambda: opened == 1)
        await loop().advance(29.9)
        assert opened == 1
        await loop().advance(0.2)
        await until(lambda: opened == 2)
        assert known.directory.counts.watch_restarts["timeout"] == 1
        server.put(channel(endpoint(2)))
        await until(lambda: known.knows(2))


def refuse_watches(asked: Asked, *, gone: bool) -> FakeAnswer | None:
    return refusal(410, "gone") if gone and asked.is_watch else None


def has_more_than(known: Following, lists: int) -> bool:
    return known.directory.counts.lists["ok"] > lists


@pytest.mark.case("EP22")
@in_a_loop
async def test_a_version_that_is_gone_is_listed_anew_and_a_bookmark_moves_it_on() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    server.put(channel(endpoint()))
    async with following(server) as known:
        await api.until(lambda: bool(api.watches))
        version = api.version + 1
        api.bookmark()
        await until(lambda: known.directory._followers[0].version == str(version))
        api.end_watches()
        await api.until(lambda: api.asked[-1].query.get("resourceVersion") == str(version))
        for gone in (True, False):
            # Either as the status of HTTP or as an event.
            api.answer = functools.partial(refuse_watches, gone=gone)
            lists = known.directory.counts.lists["ok"]
            api.forget()
            api.end_watches()
            await until(functools.partial(has_more_than, known, lists))
            api.answer = functools.partial(refuse_watches, gone=False)


@pytest.mark.case("EP22")
@in_a_loop
async def test_a_page_that_is_gone_begins_the_list_anew_still_in_pages() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    for number in range(70):
        server.put(channel(endpoint(number)), name=f"w{number}")
    gone = [True]
    api.answer = lambda asked: (gone.pop(), refusal(410, "x"))[1] if asked.query.get("continue") and gone else None
    async with following(server) as known:
        assert known.directory.resources == 70
        assert all(asked.query.get("limit") == "32" for asked in api.asked if not asked.is_watch)


@in_a_loop
async def test_a_list_that_goes_on_with_another_version_does_not_count() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    pages = [listed(worker(1), version="5", more="x"), listed(worker(2), version="6")]

    def mixed(asked: Asked) -> FakeAnswer | None:
        return FakeAnswer(200, json.dumps(pages.pop(0)).encode()) if pages else None

    api.answer = mixed
    async with following(server) as known:
        assert known.directory.resources == 0
        assert known.directory.counts.lists == {"ok": 1, "failed": 1}


@pytest.mark.case("EB46")
@in_a_loop
async def test_only_metadata_is_asked_for() -> None:
    server = Server("gpu", "canary")
    async with following(server):
        await until(lambda: all(api.watches for api in server.namespaces.values()))
        for name, api in server.namespaces.items():
            assert {asked.path for asked in api.asked} == {PATH.format(name)}
            (watch,) = (asked for asked in api.asked if asked.is_watch)
            assert watch.query["allowWatchBookmarks"] == "true"
            assert 240 <= int(watch.query["timeoutSeconds"]) <= 420


def pages_of(resources: int, *, publishers: int, first: int = 0) -> list[bytes]:
    """Return the pages of a long list."""
    made = []
    for begin in range(0, resources, 32):
        workers = [worker(first + number, publishers=publishers) for number in range(begin, min(begin + 32, resources))]
        more = str(begin + 32) if begin + 32 < resources else ""
        made.append(json.dumps(listed(*workers, more=more)).encode())
    return made


def answers(api: FakeApi, pages: list[bytes]) -> None:
    """Let an API answer these pages, whose watches then begin where they were listed."""
    waiting = list(pages)

    def answer(asked: Asked) -> FakeAnswer | None:
        return FakeAnswer(200, waiting.pop(0)) if not asked.is_watch and waiting else None

    api.answer = answer
    api.version = 9
    api._past, api._log = {9: ()}, []


@pytest.mark.case("EB45")
@in_a_loop
async def test_16384_resources_of_four_publishers_are_all_known_and_one_resource_more_is_not() -> None:
    server = Server("gpu")
    answers(server.namespaces["gpu"], pages_of(16_384, publishers=4))
    async with following(server) as known:
        assert (known.directory.resources, known.directory.references) == (16_384, 65_536)
        assert not any(known.directory.counts.skipped.values())
    answers(server.namespaces["gpu"], pages_of(16_386, publishers=1))
    async with following(server) as known:
        assert known.directory.resources == 16_384
        assert known.directory.counts.skipped["resource_cap"] == 2


@pytest.mark.case("EB45")
@in_a_loop
async def test_65536_publishers_are_kept_of_all_namespaces_together() -> None:
    server = Server("gpu", "canary")
    for number, api in enumerate(server.namespaces.values()):
        answers(api, pages_of(200, publishers=200, first=1_000 * number))
    async with following(server) as known:
        assert known.directory.references <= 65_536
        assert known.directory.references > 65_536 - 200
        assert known.directory.counts.skipped["total_cap"] == 400 - 65_536 // 200


@pytest.mark.case("ED21")
@in_a_loop
async def test_an_update_beyond_the_cap_takes_what_was_there_away_and_adds_nothing() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    answers(api, pages_of(16_383, publishers=4))
    async with following(server) as known:
        await api.until(lambda: bool(api.watches))
        server.put(channel(endpoint(1)), name="new")
        await until(lambda: known.knows(1))
        server.put(*(channel(f"tcp://10.9.9.9:{port}") for port in range(1, 6)), name="new")
        await until(lambda: not known.knows(1))
        assert not known.directory.is_advertised("tcp://10.9.9.9:1", NAMESPACE)
        assert known.directory.counts.skipped["total_cap"] == 1
        server.put(*(channel(f"tcp://10.9.9.9:{port}") for port in range(1, 5)), name="new")
        await until(lambda: known.directory.references == 65_536)


@in_a_loop
async def test_the_age_grows_while_nothing_is_proven_and_falls_with_any_event() -> None:
    server = Server("gpu")
    api = server.namespaces["gpu"]
    async with following(server) as known:
        await api.until(lambda: bool(api.watches))
        known.clock.advance_s(100)
        assert known.directory.age_s >= 100
        api.bookmark()
        await until(lambda: known.directory.age_s < 1)
