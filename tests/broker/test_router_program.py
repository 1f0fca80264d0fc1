"""The command `kura-shaper event-bus` as a process: its output, its probes, its signals and its status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import NAMESPACE, TOKEN, FakeDirectory, authority, in_flowing_time, settings, until
from prometheus_client.parser import text_string_to_metric_families
from router_rig import ZmqPublisher

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.resolve import Resolver
from kura_shaper.broker.service import Broker
from kura_shaper.tenants.kubernetes.fake import FakeApi

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import channel, resource
from kubernetes_rig import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]


class RouterProcess:
    """The command, and what it said."""

    def __init__(self, process: asyncio.subprocess.Process, config: Path, told: dict[str, Any]) -> None:
        self.process, self.config, self._told = process, config, told
        self.logged: list[dict[str, Any]] = []
        self.lines: list[bytes] = []
        self._tasks = [asyncio.ensure_future(self._read_log()), asyncio.ensure_future(self._read_lines())]

    async def _read_log(self) -> None:
        assert self.process.stderr
        async for line in self.process.stderr:
            self.logged.append(json.loads(line))

    async def _read_lines(self) -> None:
        assert self.process.stdout
        async for line in self.process.stdout:
            self.lines.append(line)

    async def started(self) -> dict[str, Any]:
        """Return what it says when it has begun."""
        return await self.logged_one("started")

    def rewrite(self, **changes: Any) -> None:
        """Write its settings anew."""
        self.config.write_text(json.dumps(self._told | changes))

    async def logged_one(self, event: str, *, after: int = 0) -> dict[str, Any]:
        """Return the first line of the log with an event, of those after so many, when there is one."""
        await until(lambda: any(each["event"] == event for each in self.logged[after:]))
        return next(each for each in self.logged[after:] if each["event"] == event)

    async def ended(self) -> int:
        """Return its status, with everything that it said read."""
        status = await self.process.wait()
        await asyncio.gather(*self._tasks)
        return status


@asynccontextmanager
async def command(scratch: Path, *options: str, **told: Any) -> AsyncIterator[RouterProcess]:
    """Run it until the test is over."""
    issued = authority().issue_cert("127.0.0.1")
    (scratch / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (scratch / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (scratch / "token").write_text(TOKEN)
    files = {key: str(scratch / name) for key, name in (("certificate", "tls.crt"), ("private_key", "tls.key"))}
    places = {"listen": f"127.0.0.1:{free_port()}", "metrics_listen": f"127.0.0.1:{free_port()}"}
    whole = {"token_file": str(scratch / "token"), **places, **files, **told}
    (scratch / "bus.yaml").write_text(json.dumps(whole))
    line = ["-m", "kura_shaper", "event-bus", "--config", str(scratch / "bus.yaml"), *(options or ["--json"])]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *line,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        limit=1 << 20,
    )
    try:
        yield RouterProcess(process, scratch / "bus.yaml", whole)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def broker_of(router: RouterProcess, scratch: Path, *publishers: ZmqPublisher) -> AsyncIterator[Broker]:
    """Run a broker of a router, which advertises publishers, until the test is over."""
    directory = FakeDirectory()
    for each in publishers:
        directory.advertise(each.endpoint)
    told = settings(port_of((await router.started())["listen"]), scratch)
    broker = Broker(told, Credentials(told), directory, random=Random(1), resolver=Resolver())
    running = asyncio.ensure_future(broker.run())
    try:
        yield broker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def fetch(place: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{place}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def port_of(place: str) -> int:
    return int(place.rpartition(":")[2])


@pytest.mark.case("ER21")
@pytest.mark.case("ER16")
@in_flowing_time
async def test_events_are_lines_of_json_probes_answer_and_a_signal_ends_it_with_0() -> None:
    with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = [{"endpoint": publisher.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
        async with command(scratch, subscriptions=wanted) as router:
            places = await router.started()
            async with broker_of(router, scratch, publisher):
                await publisher.subscribed()
                for _ in range(10):
                    publisher.publish()
                await until(lambda: len(router.lines) == 10)
                events = [json.loads(line) for line in router.lines]
                assert [event["sequence"] for event in events] == list(range(10))
                assert events[0]["payload"] == {"k": 1}
                probes = {path: await asyncio.to_thread(fetch, places["metrics"], path) for path in PROBES}
                assert [status for status, _ in probes.values()] == [200] * len(PROBES)
                values = {
                    sample.name: sample.value
                    for family in text_string_to_metric_families(probes["/metrics"][1])
                    for sample in family.samples
                    if not sample.labels
                }
                assert values["continuum_event_bus_events_total"] == 10
                assert values["continuum_event_bus_feeds_read"] == 1
                router.process.send_signal(signal.SIGTERM)
                assert await router.ended() == 0
                assert all(json.loads(line)["topic"] == "kv-events" for line in router.lines)
                everything = json.dumps([router.logged, [text for _, text in probes.values()]])
                assert TOKEN not in everything


def kubeconfig(path: Path, server: str) -> str:
    """Write how to reach an API server."""
    named: dict[str, dict[str, Any]] = {
        "clusters": {"cluster": {"server": server}},
        "users": {"user": {}},
        "contexts": {"context": {"cluster": "c", "user": "c"}},
    }
    whole = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
    path.write_text(json.dumps(whole | {key: [{"name": "c", **value}] for key, value in named.items()}))
    return str(path)


@in_flowing_time
async def test_a_publisher_that_is_discovered_is_read_until_it_is_advertised_no_more() -> None:
    api = FakeApi("DynamoWorkerMetadataList")
    with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        async with served(api) as server:
            config = kubeconfig(scratch / "kubeconfig", server)
            wanted = {"namespace": "gpu", "dynamo_namespaces": [NAMESPACE], "topics": ["kv-events"]}
            async with command(scratch, discover=[{**wanted, "kubeconfig": config}]) as router:
                async with broker_of(router, scratch, publisher):
                    made = resource({"k": channel(publisher.endpoint, namespace=NAMESPACE)})
                    api.put("w0", made, namespace="gpu")
                    await publisher.subscribed()
                    publisher.publish()
                    await until(lambda: len(router.lines) == 1)
                    place = (await router.started())["metrics"]
                    metrics = (await asyncio.to_thread(fetch, place, "/metrics"))[1]
                    for line in (
                        "publishers_discovered 1.0",
                        "publishers_beyond 0.0",
                        "discovery_namespaces_synced 1.0",
                        'discovery_lists_total{result="ok"} 1.0',
                        'discovery_skipped_total{reason="total_cap"} 0.0',
                        'discovery_watch_restarts_total{reason="expired"} 0.0',
                        "feeds_read 1.0",
                    ):
                        assert f"continuum_event_bus_{line}\n" in metrics
                    status = json.loads((await asyncio.to_thread(fetch, place, "/statusz"))[1])
                    assert status["discovery"]["publishers"] == 1
                    api.delete("w0", namespace="gpu")
                    await publisher.subscribed(unsubscribes=1)
                    router.process.send_signal(signal.SIGTERM)
                    assert await router.ended() == 0
                assert {asked.query.get("limit") for asked in api.asked if not asked.is_watch} == {"32"}


@pytest.mark.case("ER17")
@in_flowing_time
async def test_events_are_served_to_another_program_while_none_are_printed() -> None:
    with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = [{"endpoint": publisher.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
        port = free_port()
        async with command(scratch, "--quiet", subscriptions=wanted, serve=port) as router:
            async with broker_of(router, scratch, publisher):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await publisher.subscribed()
                for _ in range(10):
                    publisher.publish()
                told = [json.loads(await reader.readline()) for _ in range(10)]
                assert [each["sequence"] for each in told] == list(range(10))
                metrics = (await asyncio.to_thread(fetch, (await router.started())["metrics"], "/metrics"))[1]
                assert "continuum_event_bus_served_clients 1.0" in metrics
                router.process.send_signal(signal.SIGTERM)
                assert await router.ended() == 0
                assert await reader.read() == b""
                writer.close()
            assert router.lines == []


@pytest.mark.case("ER13")
@in_flowing_time
async def test_sighup_brings_subscriptions_and_tokens_into_force_and_a_bad_file_changes_nothing() -> None:
    with closing(ZmqPublisher(1)) as first, closing(ZmqPublisher(2)) as second, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = [{"endpoint": first.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
        async with command(scratch, subscriptions=wanted) as router, broker_of(router, scratch, first, second):
            await first.subscribed()
            more = [{"endpoint": second.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
            router.rewrite(subscriptions=[*wanted, *more], max_streams=7)
            router.process.send_signal(signal.SIGHUP)
            await second.subscribed()
            told = await router.logged_one("settings_need_a_restart")
            assert told["keys"] == ["max_streams"]

            text = router.config.read_text()
            for bad, key in (("no: [yaml", "bus.yaml"), (text.replace('"listen"', '"lisden"'), "lisden")):
                before = len(router.logged)
                router.config.write_text(bad)
                router.process.send_signal(signal.SIGHUP)
                assert key in (await router.logged_one("settings_bad", after=before))["problem"]

            (scratch / "token").write_text("another-token\n")
            router.process.send_signal(signal.SIGHUP)
            await router.logged_one("tokens_changed")
            (scratch / "tls.key").write_text("no key")
            router.process.send_signal(signal.SIGHUP)
            assert "private_key" in json.dumps(await router.logged_one("credential_bad"))
            for publisher in (first, second):
                publisher.publish()
                # Not disturbed by any of it.
                assert (publisher.subscribes, publisher.unsubscribes) == (1, 0)
            await until(lambda: len(router.lines) == 2)
            metrics = (await asyncio.to_thread(fetch, (await router.started())["metrics"], "/metrics"))[1]
            assert 'continuum_event_bus_settings_reloads_total{result="ok"} 1.0' in metrics
            assert 'continuum_event_bus_settings_reloads_total{result="failed"} 4.0' in metrics
            assert "another-token" not in json.dumps(router.logged)
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended() == 0


@pytest.mark.case("ER12")
@in_flowing_time
async def test_sigusr1_has_a_broker_come_anew() -> None:
    with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = [{"endpoint": publisher.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
        running = command(scratch, subscriptions=wanted, drain_deadline="200ms")
        async with running as router, broker_of(router, scratch, publisher) as broker:
            await publisher.subscribed()
            router.process.send_signal(signal.SIGUSR1)
            await publisher.subscribed(2, unsubscribes=1)
            assert broker.counts.reconnects["rebalance"] == 1
            assert (await router.logged_one("rebalance"))["outcome"] == "asked"
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended() == 0


PROBES = ("/metrics", "/healthz", "/readyz", "/statusz")


@pytest.mark.case("ER11")
@in_flowing_time
async def test_a_second_signal_ends_it_at_once_although_a_client_stays() -> None:
    with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wanted = [{"endpoint": publisher.endpoint, "dynamo_namespace": NAMESPACE, "expose": f"127.0.0.1:{free_port()}"}]
        async with command(scratch, subscriptions=wanted, drain_deadline="10m") as router:
            places = await router.started()
            async with broker_of(router, scratch, publisher) as broker:
                await until(lambda: broker.view.session is not None and broker.view.session.is_established)
                status = json.loads((await asyncio.to_thread(fetch, places["metrics"], "/statusz"))[1])
                port = port_of(status["ports"][0]["listen"])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                assert await reader.readexactly(10)
                router.process.send_signal(signal.SIGINT)
                await until(lambda: any(each["event"] == "draining" for each in router.logged))
                ready = await asyncio.to_thread(fetch, places["metrics"], "/readyz")
                assert ready == (503, "it leaves\n")
                router.process.send_signal(signal.SIGINT)
                assert await router.ended() == 128 + signal.SIGINT
                writer.close()


@pytest.mark.case("ER95")
@pytest.mark.parametrize("goes_on", [False, True])
def test_when_its_reader_is_gone_it_leaves_with_0_unless_it_serves_as_well(goes_on: bool) -> None:
    @in_flowing_time
    async def run() -> None:
        with closing(ZmqPublisher()) as publisher, tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            wanted = [{"endpoint": publisher.endpoint, "dynamo_namespace": NAMESPACE, "topics": [""]}]
            told: dict[str, Any] = {"serve": free_port()} if goes_on else {}
            async with command(scratch, subscriptions=wanted, **told) as router, broker_of(router, scratch, publisher):
                await publisher.subscribed()
                # As the end of `head` does.
                router.process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
                publisher.publish()
                await router.logged_one("stdout_gone")
                if goes_on:
                    reader, _ = await asyncio.open_connection("127.0.0.1", told["serve"])
                    place = (await router.started())["metrics"]
                    while "served_clients 1.0" not in (await asyncio.to_thread(fetch, place, "/metrics"))[1]:
                        await asyncio.sleep(0)
                    number = publisher.publish()
                    assert json.loads(await reader.readline())["sequence"] == number
                    metrics = (await asyncio.to_thread(fetch, place, "/metrics"))[1]
                    assert 'continuum_event_bus_events_dropped_total{reason="output_full"} 0.0' in metrics
                    router.process.send_signal(signal.SIGTERM)
                assert await router.process.wait() == 0
                assert [each["event"] for each in router.logged].count("stdout_gone") == 1

    run()
