"""The whole way of an alert: somebody takes the tree off a device, and a minute later a person's webhook is told."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from agent_rig import DEVICE, ask, with_agent
from manifest_tools import DAEMONSET, tool
from test_scraped import PROMETHEUS, config
from test_scraped import ask as ask_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

ALERTMANAGER, WEBHOOK = "127.0.0.1:9093", "127.0.0.1:9099"
_PATIENCE_S = 60
# Debian's Alertmanager wants its templates in /usr/share: laid over it for the process alone.
WITH_SHARE = ("unshare", "--mount", "sh", "-c")
OVERLAY = 'mount -t overlay overlay -o "lowerdir=$0:/usr/share" /usr/share && exec "$@"'


class Webhook:
    """Keeps the alerts that come."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.came = threading.Event()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["content-length"])))
                webhook.alerts += told["alerts"]
                self.send_response(200)
                self.end_headers()
                webhook.came.set()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        host, _, port = WEBHOOK.rpartition(":")
        self.server = HTTPServer((host, int(port)), Handler)

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


def prometheus_config() -> str:
    """Return a configuration with the rules as they are shipped."""
    scraping: dict[str, Any] = json.loads(config(DAEMONSET / "alerts" / "rules.yaml"))
    return json.dumps({**scraping, "alerting": {"alertmanagers": [{"static_configs": [{"targets": [ALERTMANAGER]}]}]}})


def alertmanager_config() -> str:
    route = {"receiver": "person", "group_wait": "0s", "group_by": ["alertname"]}
    receiver = {"name": "person", "webhook_configs": [{"url": f"http://{WEBHOOK}/", "send_resolved": False}]}
    return json.dumps({"route": route, "receivers": [receiver]})


def start(stack: ExitStack, *words: str) -> None:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def scrapes() -> int:
    """Return how many times Prometheus has seen the drift counter of the root."""
    query = 'count_over_time(kura_shaper_drift_total{kind="root"}[5m])'
    result = ask_prometheus(f"query?query={quote(query)}").get("data", {}).get("result", [])
    return int(result[0]["value"][1]) if result else 0


def test_a_tree_that_somebody_took_away_reaches_a_person(tmp_path: Path) -> None:
    programs = Path(tool("promtool")).parent
    (tmp_path / "prometheus.yml").write_text(prometheus_config())
    (tmp_path / "alertmanager.yml").write_text(alertmanager_config())

    def work() -> list[dict[str, Any]]:
        webhook = Webhook()
        with ExitStack() as stack:
            stack.enter_context(webhook.serving())
            start(
                stack,
                *WITH_SHARE,
                OVERLAY,
                str(programs.parent / "share"),
                str(programs / "alertmanager"),
                f"--config.file={tmp_path}/alertmanager.yml",
                f"--storage.path={tmp_path}/alertmanager",
                f"--web.listen-address={ALERTMANAGER}",
                "--cluster.listen-address=",
            )
            start(
                stack,
                str(programs / "prometheus"),
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={PROMETHEUS}",
            )
            until(lambda: scrapes() >= 2, "two scrapes")
            assert webhook.alerts == [], "nobody is called while all is well"
            subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], check=True)
            assert webhook.came.wait(_PATIENCE_S), ask("/statusz")
            # By then the agent has put it back.
            until(lambda: ask("/readyz")[0] == 200, "the tree back")
            return webhook.alerts

    (alert, *others) = with_agent(work)
    assert others == []
    assert alert["status"] == "firing"
    assert alert["labels"] == {
        "alertname": "KuraShaperConfigurationReplaced",
        "severity": "warning",
        "device": DEVICE,
        "node": "box-1",
        "instance": "box-1",
    }
    assert alert["annotations"]["summary"] == f"Somebody took the tree off {DEVICE} of box-1"
    assert alert["annotations"]["runbook"].startswith("daemonset/README.md#")
