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

from bus_rig import NAMESPACE, TOKEN, FakeDirectory, authority, in_flowing_time, settings, until
from prometheus_client.parser import text_string_to_metric_families
from router_rig import ZmqPublisher

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.resolve import Resolver
from kura_shaper.broker.service import Broker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]


class RouterProcess:
    """The command, and what it said."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
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
        await until(lambda: any(each["event"] == "started" for each in self.logged))
        return next(each for each in self.logged if each["event"] == "started")

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
    whole = {"token_file": str(scratch / "token"), **places, **files}
    (scratch / "bus.yaml").write_text(json.dumps(whole | told))
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
        yield RouterProcess(process)
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


PROBES = ("/metrics", "/healthz", "/readyz", "/statusz")


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
