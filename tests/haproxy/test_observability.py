"""The queries of haproxy/README.md, asked of a real Prometheus that scrapes a real gateway: each has an answer."""

from __future__ import annotations

import json
import re
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import gateway_rig as rig_module
import pytest
from gateway_ends import H2Client, serve
from gateway_rig import GUARDED, HTTPS_PORT, VERSIONS, GatewayRig
from prometheus_client import CollectorRegistry, generate_latest

from kura_shaper.clock import SystemClock
from kura_shaper.haproxy.binary import cache_directory
from kura_shaper.haproxy.master import MasterSocket
from kura_shaper.haproxy.metrics import WatchMetrics
from kura_shaper.haproxy.watch import WatchState
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Iterator

pytestmark = pytest.mark.privileged

README = Path(__file__).parents[2] / "haproxy" / "README.md"
QUERIES = re.findall(r"\n([^\n]+):\n\n```promql\n(.+?)\n```", README.read_text(), re.DOTALL)
WATCH = Endpoint("127.0.0.1", 9470)
PROMETHEUS_PORT = 9090
CONFIG = """
global: {scrape_interval: 250ms}
scrape_configs:
  - {job_name: haproxy, static_configs: [{targets: ["127.0.0.1:8405"]}]}
  - {job_name: watch, static_configs: [{targets: ["127.0.0.1:9470"]}]}
"""


def prometheus() -> Path:
    path = cache_directory() / "prometheus" / "bin" / "prometheus"
    if not path.exists():
        pytest.skip(f"no Prometheus at {path}; scripts/setup brings it")
    return path


@pytest.fixture(scope="module", params=VERSIONS)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    """A gateway and its watch's metrics, under a Prometheus, after one of each thing that it counts."""
    if reason := rig_module.why_not_here():
        pytest.skip(reason)
    program, directory = prometheus(), tmp_path_factory.mktemp("watched")
    with ExitStack() as stack:
        rig = stack.enter_context(rig_module.running_gateway(directory, version=request.param))
        state = WatchState(source_valid=True, in_step=True)
        registry = CollectorRegistry()
        registry.register(WatchMetrics(state, MasterSocket(Path(rig.master_socket)), SystemClock()))
        serve(stack, rig.namespace.listen(WATCH), lambda connection: _answer(connection, registry))
        _start_prometheus(stack, rig, program, directory)
        stack.enter_context(_busy(rig))
        yield rig


def _answer(connection: socket.socket, registry: CollectorRegistry) -> None:
    connection.recv(4096)
    body = generate_latest(registry)
    connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n" + body)


def _start_prometheus(stack: ExitStack, rig: GatewayRig, program: Path, directory: Path) -> None:
    config = directory / "prometheus.yml"
    config.write_text(CONFIG)
    listen = f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}"
    words = (str(program), f"--config.file={config}", f"--storage.tsdb.path={directory}/data", listen)
    process = rig.namespace.spawn(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 10)
    stack.callback(process.terminate)
    until(lambda: "up" in str(ask(rig, "up")), seconds=20)


class _busy:  # noqa: N801 - reads as what it does
    """Holds what takes a while, after doing once what is counted."""

    def __init__(self, rig: GatewayRig) -> None:
        self._rig, self._stack = rig, ExitStack()

    def __enter__(self) -> None:
        rig = self._rig
        # Counters that begin with what they count have no rate: each is asked for before.
        until(lambda: ask(rig, "haproxy_backend_sessions_total"), seconds=10)
        for _ in range(2):
            rig.curl("https://beta.kura.test/", "--http2")
            rig.curl("https://beta.kura.test/google.bytestream.X", "--http2")
            rig.curl("https://beta.kura.test/", "--header", "Host: acme.kura.test")
            for name in ("unknown.kura.test", GUARDED.hosts[0]):
                with suppress(OSError):
                    rig.connect_tls(name).close()
            with rig.connect(HTTPS_PORT) as plain, suppress(OSError):
                plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
                plain.recv(10)
            time.sleep(0.3)
        download: ssl.SSLSocket = self._stack.enter_context(rig.connect_tls("acme.kura.test", alpn=["h2"]))
        client = H2Client(download)
        client.status(client.get("acme.kura.test", "/endless"))
        assert "Success=1" in rig.master("reload")

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def ask(rig: GatewayRig, query: str) -> list[dict[str, Any]]:
    """Return Prometheus's answer to a query."""
    address = f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?query={quote(query)}"
    command = rig.namespace.command("curl", "--silent", "--max-time", "5", address)
    answer = subprocess.run(command, capture_output=True, timeout=10, check=False).stdout
    # While it starts, it answers in words.
    if not answer.startswith(b"{"):
        return []
    found = json.loads(answer)
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def until(condition: Any, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def value(rig: GatewayRig, query: str) -> float:
    (row,) = ask(rig, query)
    return float(row["value"][1])


def test_the_queries_are_there() -> None:
    assert len(QUERIES) == 10


@pytest.mark.parametrize(("question", "query"), QUERIES, ids=[question[:30] for question, _ in QUERIES])
def test_a_query_of_the_readme_has_an_answer(watched: GatewayRig, question: str, query: str) -> None:
    if "== 0" in query:
        # Everything is ready here, so the rows are there without the condition, and not with it.
        until(lambda: ask(watched, query.removesuffix("== 0")), seconds=10)
        assert ask(watched, query) == []
        return
    until(lambda: ask(watched, query), seconds=10)


def test_the_answers_are_right(watched: GatewayRig) -> None:
    by_subject = {question.split(" ")[0]: query for question, query in QUERIES}
    until(lambda: value(watched, by_subject["Old"]) == 1, seconds=10)
    labels = [row["metric"] for row in ask(watched, by_subject["Which"])]
    assert {"tenant": "beta", "plane": "edge"} in labels
    assert {"tenant": "acme", "plane": "peer"} in labels
    assert {"tenant": "beta", "protocol": "grpc"} in [row["metric"] for row in ask(watched, by_subject["HTTP"])]
    for subject in ("Requests", "Connections", "Refused"):
        assert sum(float(row["value"][1]) for row in ask(watched, by_subject[subject])) > 0, subject
    refused = {row["metric"]["proxy"]: float(row["value"][1]) for row in ask(watched, by_subject["Clients"])}
    assert refused["guarded_edge"] > 0
    assert value(watched, by_subject["Whether"]) == 1
