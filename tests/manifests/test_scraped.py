"""A real Prometheus scrapes a real agent with our rules: each is evaluated, each question of a panel is answered."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from agent_rig import ADDRESS, with_agent
from manifest_tools import DAEMONSET, tool
from test_dashboard import expressions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

PROMETHEUS = "127.0.0.1:9090"
_PATIENCE_S = 40
Api = dict[str, Any]


def config(rules: Path) -> str:
    """Return a configuration with the labels that the PodMonitor sets."""
    target = {"targets": [ADDRESS], "labels": {"node": "box-1", "instance": "box-1"}}
    return json.dumps(
        {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "agents", "static_configs": [target]}],
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
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            end = time.monotonic() + _PATIENCE_S
            while not has_begun():
                assert time.monotonic() < end, ask("targets")
                time.sleep(0.2)
            return list(rules()), {each: ask(f"query?query={quote(each)}") for each in expressions()}

    return with_agent(work)


def has_begun() -> bool:
    """Whether there is enough for a rate, and each rule was evaluated on it."""
    rate = ask(f"query?query={quote('rate(kura_shaper_device_sent_bytes_total[1m])')}")
    found = list(rules())
    return (
        bool(rate.get("data", {}).get("result")) and bool(found) and all(each["health"] != "unknown" for each in found)
    )


def test_each_rule_can_be_evaluated_and_none_fires_at_a_node_that_is_well(
    seen: tuple[list[Api], dict[str, Api]],
) -> None:
    found, _ = seen
    assert [(each["name"], each.get("lastError")) for each in found if each["health"] != "ok"] == []
    assert [each["name"] for each in found if each["state"] == "firing"] == []


def test_each_question_of_the_dashboard_can_be_asked(seen: tuple[list[Api], dict[str, Api]]) -> None:
    _, answers = seen
    assert [(each, answer) for each, answer in answers.items() if answer["status"] != "success"] == []
