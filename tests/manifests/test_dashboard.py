"""The dashboard: what Grafana needs is there, and every question is one that promtool reads and somebody serves."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from manifest_tools import DAEMONSET, run, tool
from served_metrics import asked_by, faults_of, served

if TYPE_CHECKING:
    from pathlib import Path

DASHBOARD: dict[str, Any] = json.loads((DAEMONSET / "dashboards" / "kura-shaper.json").read_text())
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
PANELS: list[dict[str, Any]] = [each for panel in DASHBOARD["panels"] for each in (panel, *panel.get("panels", ()))]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
# What Grafana puts in the place of its own variables.
OWN_VARIABLES = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}
LABELS = re.compile(r"label_values\((.+), (\w+)\)")


def expressions() -> list[str]:
    """Return every expression of the dashboard, with something in the place of each variable."""
    asked = [target["expr"] for panel in CHARTS for target in panel["targets"]]
    asked += [each["expr"] for each in DASHBOARD["annotations"]["list"] if "expr" in each]
    queries = [LABELS.fullmatch(each["definition"]) for each in VARIABLES.values() if each["type"] == "query"]
    asked += [match[1] for match in queries if match]
    return [filled(each) for each in asked]


def filled(expression: str) -> str:
    for name, value in OWN_VARIABLES.items():
        expression = expression.replace(f"${name}", value)
    return re.sub(r"\$\{?\w+\}?", "x", expression)


def ids(panel: dict[str, Any]) -> str:
    return f"{panel['id']}-{panel['title'][:30]}"


def test_grafana_has_what_it_needs() -> None:
    assert DASHBOARD["uid"] == "kura-shaper"
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 39
    assert "id" not in DASHBOARD, "an id belongs to one Grafana"


def test_panels_have_an_id_each_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


@pytest.mark.parametrize("panel", CHARTS, ids=ids)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for each in (panel, *panel["targets"]):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_variable_is_defined() -> None:
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?([a-z]\w*)", text.replace("$__", "")))
    assert used == VARIABLES.keys()


@pytest.mark.parametrize("panel", CHARTS, ids=ids)
def test_a_panel_asks_only_for_what_is_served(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert faults_of(filled(target["expr"]), served()) == []
        in_legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
        assert in_legend <= grouped


def test_variables_and_annotations_ask_only_for_what_is_served() -> None:
    known = served()
    for expression in expressions():
        assert faults_of(expression, known) == []
    for each in VARIABLES.values():
        if each["type"] == "query":
            match = LABELS.fullmatch(each["definition"])
            assert match
            assert match[2] in known[asked_by(filled(match[1]))[0].name] | {"node"}


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"asked:{number}", "expr": each} for number, each in enumerate(expressions())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", path)


@pytest.mark.case("F48")
def test_a_percentage_of_the_budget_is_of_the_device_itself() -> None:
    """Case F-48: the tree can't tell of what passes it by."""
    (panel,) = [each for each in CHARTS if each["title"] == "Fullest budget"]
    names = {each.name for each in asked_by(filled(panel["targets"][0]["expr"]))}
    assert names == {"kura_shaper_device_sent_bytes_total", "kura_shaper_device_budget_bits_per_second"}
