"""Uploads over HTTP/2, and what one that its server does not read does to others."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_ends import H2Client
from gateway_rig import VERSIONS, GatewayRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.privileged

MIB = 2**20
SLOW_S = 2.0


@pytest.fixture(scope="module", params=VERSIONS)
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    with gateway_rig.running_gateway(tmp_path_factory.mktemp("gateway"), version=request.param) as rig:
        # What a slow server has not read waits in the gateway, not in the kernel.
        rig.namespace.run("sysctl", "-w", "net.ipv4.tcp_rmem=4096 65536 65536", "net.ipv4.tcp_wmem=4096 65536 65536")
        yield rig


@pytest.mark.parametrize("http", ["--http1.1", "--http2"])
def test_a_large_upload_arrives_whole(gateway: GatewayRig, tmp_path: Path, http: str) -> None:
    body = hashlib.sha256(b"seed").digest() * (16 * MIB // 32)
    (tmp_path / "body").write_bytes(body)
    answer = gateway.curl(
        "https://beta.kura.test/", http, "--data-binary", f"@{tmp_path}/body", "--expect100-timeout", "1"
    )
    assert answer.stderr.startswith("200")
    assert answer.stdout == hashlib.sha256(body).hexdigest()


def test_an_upload_that_its_server_does_not_read_holds_up_its_connection_and_no_other(gateway: GatewayRig) -> None:
    """Not as nginx, which gives each stream a buffer of its own. A client with several connections sees nothing."""
    with gateway.connect_tls("beta.kura.test", alpn=["h2"]) as connection, ThreadPoolExecutor(1) as threads:
        client = H2Client(connection)
        # The gateway tells its windows ahead of its first answer.
        assert client.status(client.get("beta.kura.test")) == "200"
        started = time.monotonic()
        stuck = threads.submit(client.post_until_stuck, "beta.kura.test", f"/slow/{SLOW_S}", size=16 * MIB)
        answered = threads.submit(lambda: (client.status(client.get("beta.kura.test")), time.monotonic()))
        time.sleep(0.3)
        assert gateway.curl("https://beta.kura.test/", "--http2").stderr.startswith("200")
        assert time.monotonic() - started < 1.5
        stuck.result(10)
        status, at = answered.result(10)
    assert status == "200"
    assert at - started >= SLOW_S
