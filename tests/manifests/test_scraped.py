"""A real Prometheus scrapes a real agent with our rules: each is evaluated, each question of a panel is answered.

Beside the agent there is what a broker serves, which counts one more of everything at each scrape.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from agent_rig import ADDRESS, with_agent
from event_broker_metrics import Served
from manifest_tools import DAEMONSET, tool
from test_dashboard import BOARDS, expressions

from kura_shaper.web import Page, PageServer, text_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

PROMETHEUS, BROKER = "127.0.0.1:9090", "127.0.0.1:9464"
_PATIENCE_S = 40
Api = dict[str, Any]


def config(rules: Path) -> str:
    """Return a configuration with the labels that the PodMonitor sets."""
    target = {"targets": [ADDRESS], "labels": {"node": "box-1", "instance": "box-1"}}
    broker = {"targets": [BROKER], "labels": {"namespace": "event-broker", "instance": "gpu-a-1"}}
    return json.dumps(
        {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": "agents", "static_configs": [target]},
                {"job_name": "brokers", "static_configs": [broker]},
            ],
        }
    )


def ask(path: str) -> Api:
    """Return Prometheus's answer; of whatever status."""
    try:
        with urllib.request.urlopen(f"http://{PROMETHEUS}/api/v1/{path}", timeout=5) as answer:
            found: Api = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        try:
            refused: Api = json.loads(said)
        except ValueError:  # it is only just starting
            return {"status": said}
        return refused
    except OSError as error:
        return {"status": str(error)}


def rules() -> Iterator[Api]:
    for group in ask("rules").get("data", {}).get("groups", ()):
        yield from group["rules"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Api], dict[str, Api]]:
    """Return every rule as Prometheus has it, and the answer to each question of the dashboard."""
    program = tool("promtool").removesuffix("promtool") + "prometheus"
    directory = tmp_path_factory.mktemp("prometheus")
    (directory / "prometheus.yml").write_text(config(DAEMONSET / "alerts" / "rules.yaml"))

    def work() -> tuple[list[Api], dict[str, Api]]:
        options = (f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data")
        words = (program, *options, f"--web.listen-address={PROMETHEUS}")
        with ExitStack() as stack:
            stack.enter_context(closing(serving_a_broker()))
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            end = time.monotonic() + _PATIENCE_S
            while not has_begun():
                assert time.monotonic() < end, ask("targets")
                time.sleep(0.2)
            return list(rules()), {each: ask(f"query?query={quote(each)}") for each in expressions()}

    return with_agent(work)


def serving_a_broker() -> PageServer:
    """Serve what a broker that has much to do serves."""
    served = Served()

    def page(_: str) -> Page:
        served.count()
        return text_page(served.text())

    host, _, port = BROKER.rpartition(":")
    return PageServer(host, int(port), {"/metrics": page})


def has_begun() -> bool:
    """Whether there is enough for a rate, and each rule was evaluated on it."""
    counters = ("kura_shaper_device_sent_bytes_total", "continuum_event_broker_refusals_total")
    rates = [ask(f"query?query={quote(f'rate({each}[1m])')}") for each in counters]
    found = list(rules())
    return (
        all(each.get("data", {}).get("result") for each in rates)
        and bool(found)
        and all(each["health"] != "unknown" for each in found)
    )


def test_each_rule_can_be_evaluated_and_none_fires_at_a_node_that_is_well(
    seen: tuple[list[Api], dict[str, Api]],
) -> None:
    found, _ = seen
    assert [(each["name"], each.get("lastError")) for each in found if each["health"] != "ok"] == []
    firing = [each["name"] for each in found if each["state"] == "firing"]
    assert [name for name in firing if not name.startswith("KuraShaperEventBroker")] == []


def test_each_question_of_the_dashboard_can_be_asked(seen: tuple[list[Api], dict[str, Api]]) -> None:
    _, answers = seen
    assert [(each, answer) for each, answer in answers.items() if answer["status"] != "success"] == []


def test_each_question_about_a_broker_has_an_answer(seen: tuple[list[Api], dict[str, Api]]) -> None:
    _, answers = seen
    without = [each for each in expressions(BOARDS["event-broker"]) if not answers[each]["data"]["result"]]
    # There is no session here, so nothing says how many streams it may have.
    assert [each for each in without if "streams_limit" not in each] == []
