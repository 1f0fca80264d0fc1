"""The command as a process: real signals, real probes, an API server over HTTP, and no secret anywhere."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from bus_rig import TOKEN, Publisher, Script, in_a_loop, pause, until
from program_rig import PATH, program

from kura_shaper.broker.protocol.frames import Draining
from kura_shaper.tenants.kubernetes.fake import refusal

if TYPE_CHECKING:
    from pathlib import Path


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
        refused = next(line for line in run.log.splitlines() if "stream_refused" in line)
        assert "ipc://x" not in refused
        assert len(json.loads(refused)["target"]) == 12
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


def by_no_kubeconfig(directory: Path, command: list[str], address: str) -> list[str]:
    """Give a kubeconfig that is not there."""
    del address
    return [*command, "--kubeconfig", str(directory / "none")]


@in_a_loop
async def test_a_kubeconfig_that_is_not_there_ends_with_2_and_its_path(tmp_path: Path) -> None:
    async with program(tmp_path, reach=by_no_kubeconfig) as run:
        assert await run.ended() == 2
        assert run.log.count("\n") == 1
        assert str(tmp_path / "none") in run.log
        assert "give --kubeconfig" not in run.log


@in_a_loop
async def test_targets_are_logged_in_clear_and_a_network_of_everything_is_warned_of(tmp_path: Path) -> None:
    networks = ["0.0.0.0/0", "127.0.0.0/8"]
    async with program(tmp_path, options=["--log-targets"], allowed_cidrs=networks) as run:
        peer = await run.router.peer()
        assert await peer.refusal("ipc://\x1b[2J") == "invalid_target"
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 0
        assert r'"target": "ipc://\u001b[2J"' in run.log
        assert '"event": "any_address_is_allowed", "network": "0.0.0.0/0"' in run.log
        assert "127.0.0.0/8" not in run.log


@pytest.mark.case("EB41")
@in_a_loop
async def test_a_broker_goes_on_after_a_refusal_that_only_other_settings_mend(tmp_path: Path) -> None:
    async with program(tmp_path, script=Script(session_status=404)) as run:
        await run.has("/readyz", 200)
        while 'terminal_error{code="unsupported_version"} 1.0' not in (await run.get("/metrics"))[1]:
            await pause()
        assert run.process.returncode is None
