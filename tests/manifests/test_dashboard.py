"""The dashboards: what Grafana needs is there, and every question is one that promtool reads and somebody serves."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from event_broker_metrics import scraped_of_a_broker
from manifest_tools import DAEMONSET, run, tool
from served_metrics import TARGET_LABELS, asked_by, faults_of, series_of, served

if TYPE_CHECKING:
    from pathlib import Path

Board = dict[str, Any]
FOLDER = DAEMONSET / "dashboards"
BOARDS: dict[str, Board] = {
    path.stem: json.loads(path.read_text())
    for path in (FOLDER / "kura-shaper.json", FOLDER / "event-broker" / "event-broker.json")
}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def variables(board: Board) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in board["templating"]["list"]}


def panels(board: Board) -> list[dict[str, Any]]:
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]


def charts(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in panels(board) if panel["type"] != "row"]


CHARTS = [panel for board in BOARDS.values() for panel in charts(board)]
# What Grafana puts in the place of its own variables.
OWN_VARIABLES = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}
LABELS = re.compile(r"label_values\((.+), (\w+)\)")


def expressions(*boards: Board) -> list[str]:
    """Return every expression of dashboards, by default of all, with something in the place of each variable."""
    asked = []
    for board in boards or BOARDS.values():
        asked += [target["expr"] for panel in charts(board) for target in panel["targets"]]
        asked += [each["expr"] for each in board["annotations"]["list"] if "expr" in each]
        queries = [
            LABELS.fullmatch(each["definition"]) for each in variables(board).values() if each["type"] == "query"
        ]
        asked += [match[1] for match in queries if match]
    return [filled(each) for each in asked]


def filled(expression: str) -> str:
    for name, value in OWN_VARIABLES.items():
        expression = expression.replace(f"${name}", value)
    return re.sub(r"\$\{?\w+\}?", ".*", expression)


def ids(panel: dict[str, Any]) -> str:
    return f"{panel['id']}-{panel['title'][:30]}"


@each_board
def test_grafana_has_what_it_needs(board: Board) -> None:
    assert board["title"]
    assert board["schemaVersion"] >= 39
    assert "id" not in board, "an id belongs to one Grafana"


def test_no_dashboard_takes_the_place_of_another() -> None:
    assert [board["uid"] for board in BOARDS.values()] == ["kura-shaper", "kura-shaper-event-broker"]


@each_board
def test_panels_have_an_id_each_and_do_not_overlap(board: Board) -> None:
    assert len({panel["id"] for panel in panels(board)}) == len(panels(board))
    for one, other in combinations([panel["gridPos"] for panel in panels(board)], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels(board))


@pytest.mark.parametrize("panel", CHARTS, ids=ids)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for each in (panel, *panel["targets"]):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@each_board
def test_every_variable_is_defined(board: Board) -> None:
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board).replace("$__", "")))
    assert used == variables(board).keys()


@pytest.mark.parametrize("panel", CHARTS, ids=ids)
def test_a_panel_asks_only_for_what_is_served(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert faults_of(filled(target["expr"]), served()) == []
        in_legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
        assert in_legend <= grouped


@each_board
def test_variables_and_annotations_ask_only_for_what_is_served(board: Board) -> None:
    known = served()
    for expression in expressions(board):
        assert faults_of(expression, known) == []
    for each in variables(board).values():
        if each["type"] == "query":
            match = LABELS.fullmatch(each["definition"])
            assert match
            assert match[2] in known[asked_by(filled(match[1]))[0].name] | TARGET_LABELS


def test_whatever_a_broker_serves_is_shown() -> None:
    asked = {each.name for expression in expressions(BOARDS["event-broker"]) for each in asked_by(expression)}
    families = {re.sub(r"_(bucket|count|sum|created)$", "_bucket", name) for name in series_of(scraped_of_a_broker())}
    assert {name for name in families if "_bucket" in name} == {"continuum_event_broker_stream_open_seconds_bucket"}
    histogram, info = "continuum_event_broker_stream_open_seconds", "continuum_event_broker_build"
    assert families - {histogram, info} == asked


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"asked:{number}", "expr": each} for number, each in enumerate(expressions())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", path)


def test_what_a_person_sees_first_of_brokers_is_so(tmp_path: Path) -> None:
    """Identity `a` is well, `b` is not, and `c` is gone."""
    series = {
        'session_up{instance="a"}': "1x20",
        'session_up{instance="b"}': "0x20",
        'build_info{instance="a"}': "1x20",
        'build_info{instance="b"}': "1x20",
        'build_info{instance="c"}': "1x5 stale",
        'terminal_error{instance="a",code="unsupported_version"}': "0x20",
        'terminal_error{instance="b",code="unsupported_version"}': "1x20",
        'streams_open{instance="a"}': "60x20",
        'streams_opening{instance="a"}': "4x20",
        'streams_limit{instance="a"}': "256x20",
        'streams_open{instance="b"}': "0x20",
        'streams_opening{instance="b"}': "0x20",
        'streams_limit{instance="b"}': "0x20",
        'buffered_bytes{instance="a"}': f"{32 << 20}x20",
        'metadata_snapshot_age_seconds{instance="a"}': "12x20",
        'metadata_snapshot_age_seconds{instance="b"}': "1000x20",
    }
    seen = {
        "Without a session": 1,
        "Not heard": 1,
        "Terminal errors": 1,
        "Fullest streams": 0.25,
        "Fullest buffers": 0.5,
        "Oldest metadata": 1000,
    }
    stats = {each["title"]: each["targets"][0]["expr"] for each in charts(BOARDS["event-broker"])}
    asked = [
        {"expr": filled(stats[title]), "eval_time": "15m", "exp_samples": [{"labels": "{}", "value": value}]}
        for title, value in seen.items()
    ]
    inputs = [{"series": f"continuum_event_broker_{name}", "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": asked}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    run(tool("promtool"), "test", "rules", path)


@pytest.mark.case("F48")
def test_a_percentage_of_the_budget_is_of_the_device_itself() -> None:
    """Case F-48: the tree can't tell of what passes it by."""
    (panel,) = [each for each in CHARTS if each["title"] == "Fullest budget"]
    names = {each.name for each in asked_by(filled(panel["targets"][0]["expr"]))}
    assert names == {"kura_shaper_device_sent_bytes_total", "kura_shaper_device_budget_bits_per_second"}
