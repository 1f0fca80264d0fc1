"""The rules: read by a real promtool, each seen to fire and not to, and asking only for what is served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from manifest_tools import DAEMONSET, anchors, run, tool
from served_metrics import faults_of, grouped_by, served

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

ALERTS = DAEMONSET / "alerts"
RULES = yaml.safe_load((ALERTS / "rules.yaml").read_text())
TEST_FILES = ("rules.test.yaml", "rules.day.test.yaml", "rules.probe.test.yaml", "rules.event-broker.test.yaml")
RUNBOOKS = ("daemonset/README.md", "daemonset/event-broker/README.md")
ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
BY_NAME = {rule["alert"]: rule for rule in ALL}


def cases() -> list[dict[str, Any]]:
    """Return every question about ALERTS that the promtool tests ask."""
    tests = [test for name in TEST_FILES for test in yaml.safe_load((ALERTS / name).read_text())["tests"]]
    return [case for test in tests for case in test.get("promql_expr_test", ())]


def promtool_test(directory: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return run(tool("promtool"), "test", "rules", *(directory / name for name in names), check=False)


def copied(directory: Path, rules: str, test: str) -> Path:
    (directory / "rules.yaml").write_text(rules)
    (directory / "one.test.yaml").write_text(test)
    return directory


def test_promtool_takes_the_rules() -> None:
    run(tool("promtool"), "check", "rules", ALERTS / "rules.yaml")


@pytest.mark.case("F44")
def test_each_rule_fires_when_it_should_and_not_otherwise() -> None:
    done = promtool_test(ALERTS, *TEST_FILES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_is_asked_whether_it_fires_and_whether_it_does_not(name: str) -> None:
    about = [case for case in cases() if f'"{name}"' in case["expr"]]
    assert any(case.get("exp_samples") for case in about), "never seen to fire"
    assert any(not case.get("exp_samples") for case in about), "never seen to keep quiet"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_asks_only_for_what_is_served(name: str) -> None:
    assert faults_of(BY_NAME[name]["expr"], served()) == []


@pytest.mark.case("F-40")
def test_without_their_patience_the_rules_would_fire_in_a_rollout(tmp_path: Path) -> None:
    """Case F-40. The rollout of rules.test.yaml fires nothing; here it is seen that it could."""
    whole = yaml.safe_load((ALERTS / "rules.test.yaml").read_text())
    rollout = [test for test in whole["tests"] if "rollout" in test["name"]]
    assert len(rollout) == 1
    hasty = re.sub(r"for: \d+m", "for: 0m", (ALERTS / "rules.yaml").read_text())
    test = yaml.safe_dump({**whole, "tests": rollout}, sort_keys=False)
    done = promtool_test(copied(tmp_path, hasty, test), "one.test.yaml")
    assert done.returncode == 1
    assert "KuraShaperAgentGone" in done.stdout + done.stderr


@pytest.mark.parametrize("name", BY_NAME)
def test_no_rule_begins_anew_with_another_pod(name: str) -> None:
    """What a rule groups by stays the same when a node gets another pod."""
    expression = BY_NAME[name]["expr"]
    assert not grouped_by(expression) & {"pod", "container", "uid", "job", "version"}
    outermost = re.match(r"(\w+)\s*(by\b|\()", expression.strip())
    assert outermost
    assert outermost[1] in {"sum", "max", "min", "count", "absent"}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_rule_says_how_bad_it_is_and_where_to_read_on(name: str) -> None:
    rule = BY_NAME[name]
    assert name.startswith("KuraShaper")
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page in RUNBOOKS
    assert anchor in anchors((DAEMONSET.parent / page).read_text())
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert used <= grouped_by(rule["expr"])


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(ALL)


def test_the_operator_gets_the_same_rules_with_the_program_that_they_are_about() -> None:
    """Where there is no broker, a rule that asks whether any is heard would fire for ever; and likewise for agents."""
    about = {"alerts/prometheusrule.yaml": False, "event-broker/components/monitoring/prometheusrule.yaml": True}
    for path, is_brokers in about.items():
        (written,) = yaml.safe_load_all((DAEMONSET / path).read_text())
        assert written["kind"] == "PrometheusRule"
        groups = [each for each in RULES["groups"] if each["name"].startswith("kura-shaper-event-broker") is is_brokers]
        assert groups
        assert written["spec"] == {"groups": groups}, "scripts/kubernetes/sync-monitoring writes it"


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(kura_shaper_nothing_total[5m])", "nobody serves kura_shaper_nothing_total"),
        ('kura_shaper_config_present{tenant="a"}', "kura_shaper_config_present has no label tenant"),
        ("sum by (node, tenant) (kura_shaper_disabled)", "no series here has the label tenant"),
        ("sum(rate(kura_shaper_direct_packets[5m]))", "nobody serves kura_shaper_direct_packets"),
    ],
)
def test_a_wrong_question_is_found(expression: str, fault: str) -> None:
    assert faults_of(expression, served()) == [fault]


def test_without_their_patience_the_rules_would_fire_in_an_upgrade_of_brokers(tmp_path: Path) -> None:
    whole = yaml.safe_load((ALERTS / "rules.event-broker.test.yaml").read_text())
    (upgrade,) = [test for test in whole["tests"] if "upgrade" in test["name"]]
    hasty = re.sub(r"for: \d+m", "for: 0m", (ALERTS / "rules.yaml").read_text())
    test = yaml.safe_dump({**whole, "tests": [upgrade]}, sort_keys=False)
    done = promtool_test(copied(tmp_path, hasty, test), "one.test.yaml")
    assert done.returncode == 1
    assert "KuraShaperEventBrokerGone" in done.stdout + done.stderr
