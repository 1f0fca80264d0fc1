"""The command as a process: real signals, real probes, an API server over HTTP, and no secret anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from bus_rig import TOKEN, Publisher, RouterRig, Script, authority, in_a_loop, pause, until

from kura_shaper.broker.protocol.frames import Draining
from kura_shaper.tenants.kubernetes.fake import FakeApi, refusal

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import PATH, channel, resource
from kubernetes_rig import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]


class Program:
    """A broker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int) -> None:
        self.process, self._log, self._port = process, log, port
        self.router: RouterRig
        self.publisher: Publisher
        self.api: FakeApi

    @property
    def log(self) -> str:
        """Everything that it logged."""
        return self._log.read_text()

    async def get(self, page: str) -> tuple[int, str]:
        """Return status and text of a page."""
        return await asyncio.to_thread(self._get, page)

    def _get(self, page: str) -> tuple[int, str]:
        # A variable of the environment must not send this to a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._port}{page}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    async def has(self, page: str, status: int) -> None:
        """Return when a page has a status."""
        while True:
            try:
                if (await self.get(page))[0] == status:
                    return
            except OSError:  # not there yet
                assert self.process.returncode is None, self.log
            await pause()

    async def ended(self) -> int:
        """Return the status that it ends with."""
        return await self.process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@asynccontextmanager
async def program(directory: Path, *, script: Script | None = None, **changes: Any) -> AsyncIterator[Program]:
    """Run the command with a router, an API server and a publisher that is advertised."""
    router, publisher, api, port = RouterRig(script), Publisher(), FakeApi("DynamoWorkerMetadataList"), free_port()
    await router.start()
    await publisher.start()
    api.put("w0", resource({"k": channel(publisher.endpoint)}, name="w0"), namespace="gpu")
    (directory / "token").write_text(TOKEN)
    (directory / "ca.pem").write_bytes(authority().cert_pem.bytes())
    told = {
        "bus_url": f"https://127.0.0.1:{router.port}/tunnel",
        "client_id": "gpu-a-1",
        "kubernetes_namespace": "gpu",
        "dynamo_namespaces": ["dynamo"],
        "token_file": str(directory / "token"),
        "ca_bundle": str(directory / "ca.pem"),
        "allowed_cidrs": ["127.0.0.0/8"],
        "metrics_listen": f"127.0.0.1:{port}",
        "drain_deadline": "20s",
    } | changes
    (directory / "config.yaml").write_text(yaml.safe_dump(told))
    async with served(api) as address:
        cluster = {"name": "c", "cluster": {"server": address}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {
            "current-context": "c",
            "clusters": [cluster],
            "contexts": [context],
            "users": [{"name": "u", "user": {}}],
        }
        (directory / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))
        with (directory / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kura_shaper", "--log-level", "debug", "event-broker"),
                *("--config", str(directory / "config.yaml"), "--kubeconfig", str(directory / "kubeconfig")),
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        made = Program(process, directory / "log", port)
        made.router, made.publisher, made.api = router, publisher, api
        try:
            yield made
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await publisher.stop()
            await router.stop()


@pytest.mark.case("EB38")
@pytest.mark.case("EB8")
@pytest.mark.case("EB2")
@in_a_loop
async def test_a_broker_relays_shows_itself_and_drains_at_a_signal(tmp_path: Path) -> None:
    async with program(tmp_path) as run:
        peer = await run.router.peer()
        assert peer.requests[0] == "/tunnel/bus/v1/session"
        await run.has("/readyz", 200)
        stream_id = await peer.opened(run.publisher.endpoint)
        connection = await run.publisher.connection()
        await connection.send(b"x" * 100_000)
        await until(lambda: len(peer.streams[stream_id].received) == 100_000)
        assert await peer.refusal("ipc://x") == "invalid_target"
        pages = {page: await run.get(page) for page in ("/metrics", "/healthz", "/readyz", "/statusz")}
        assert {status for status, _ in pages.values()} == {200}
        metrics, status = pages["/metrics"][1], json.loads(pages["/statusz"][1])
        assert 'continuum_event_broker_bytes_total{direction="to_router"} 100000.0' in metrics
        assert 'continuum_event_broker_refusals_total{code="invalid_target"} 1.0' in metrics
        assert "continuum_event_broker_session_up 1.0" in metrics
        assert status["session"]["streams"][0]["endpoint"] == run.publisher.endpoint
        assert run.publisher.endpoint not in metrics
        run.process.send_signal(signal.SIGTERM)
        await until(lambda: bool(peer.frames(Draining)))
        connection.transport.close()
        assert (await peer.closed(stream_id)).code == "upstream_closed"
        assert await run.ended() == 0
        said = run.log + "".join(text for _, text in pages.values())
        assert "session_established" in said
        assert TOKEN not in said


@pytest.mark.case("EB39")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    @in_a_loop
    async def check() -> None:
        async with program(tmp_path) as run:
            peer = await run.router.peer()
            await peer.opened(run.publisher.endpoint)
            run.process.send_signal(number)
            await until(lambda: bool(peer.frames(Draining)))
            run.process.send_signal(number)
            assert await run.ended() == 128 + number

    check()


@pytest.mark.case("EB40")
@pytest.mark.parametrize("when", ["list", "handshake"])
def test_a_signal_before_there_is_a_session_ends_with_0(tmp_path: Path, when: str) -> None:
    @in_a_loop
    async def check() -> None:
        async with program(tmp_path, script=Script(session_status=0)) as run:
            if when == "list":
                run.api.answer = lambda _: refusal(503, "starting")
            await run.has("/healthz", 200)
            if when == "handshake":
                await until(lambda: bool(run.router.peers) and bool(run.router.peers[0].session_http_id))
            run.process.send_signal(signal.SIGTERM)
            assert await run.ended() == 0

    check()


@pytest.mark.case("EB46")
@pytest.mark.case("EB47")
@in_a_loop
async def test_nothing_but_the_metadata_is_asked_for(tmp_path: Path) -> None:
    async with program(tmp_path) as run:
        # Nobody was asked whether this worker is ready: its metadata is all that counts.
        await (await run.router.peer()).opened(run.publisher.endpoint)
        assert {asked.path for asked in run.api.asked} == {PATH.format("gpu")}


@in_a_loop
async def test_a_port_that_is_taken_and_a_bad_file_end_with_2(tmp_path: Path) -> None:
    taken = Publisher()
    await taken.start()
    async with program(tmp_path, metrics_listen=taken.endpoint.removeprefix("tcp://")) as run:
        assert await run.ended() == 2
        assert "error[usage]" in run.log
    await taken.stop()
    async with program(tmp_path, max_streams=0) as run:
        assert await run.ended() == 2
        assert "max_streams" in run.log


@pytest.mark.case("EB41")
@in_a_loop
async def test_a_broker_goes_on_after_a_refusal_that_only_other_settings_mend(tmp_path: Path) -> None:
    async with program(tmp_path, script=Script(session_status=404)) as run:
        await run.has("/readyz", 200)
        while 'terminal_error{code="unsupported_version"} 1.0' not in (await run.get("/metrics"))[1]:
            await pause()
        assert run.process.returncode is None
