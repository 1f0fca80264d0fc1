"""What tests/data/bus_v1/README.md tells the authors of routers works as it stands there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import TOKEN, authority, in_flowing_time, until
from router_rig import ZmqPublisher, routing
from test_router_program import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "data" / "bus_v1" / "README.md"


def block(kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


@asynccontextmanager
async def running(*words: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


def status(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/statusz", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.case("ER69")
@in_flowing_time
async def test_a_broker_of_the_page_dials_a_router_and_its_publisher_is_read() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        scratch, port = rig.scratch, free_port()
        (scratch / "stand_in.py").write_text(block("python"))
        (scratch / "ca.pem").write_bytes(authority().cert_pem.bytes())
        told = block("yaml").replace("localhost:8443", f"localhost:{rig.bus.port}").replace(":9464", f":{port}")
        (scratch / "broker.yaml").write_text(told.replace("ca.pem", str(scratch / "ca.pem")))
        async with running(str(scratch / "stand_in.py"), publisher.endpoint) as api:
            assert api.stdout
            (scratch / "kubeconfig.json").write_bytes(await api.stdout.readline())
            words = ["--config", str(scratch / "broker.yaml"), "--kubeconfig", str(scratch / "kubeconfig.json")]
            async with running("-m", "kura_shaper", "event-broker", *words, EVENT_BROKER_TOKEN=TOKEN):
                await until(lambda: "try-1" in rig.bus.by_client)
                await rig.read()
                await rig.hear(publisher)
                found = await asyncio.to_thread(status, port)
                assert found["session"]["id"] == rig.bus.by_client["try-1"].id
                assert len(found["session"]["streams"]) == 1
