"""The lab's judgement: each finding appears when its promise is broken, and only then."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import UsageError
from kura_shaper.lab.html import to_html
from kura_shaper.lab.measure import NIC_TX, Measurement
from kura_shaper.lab.report import make_report, table, to_json
from kura_shaper.lab.run import lab_settings
from kura_shaper.lab.scenarios import (
    UNATTRIBUTED,
    LabSettings,
    Path,
    Point,
    Scenario,
    burst_allowance_bytes,
    expected_points,
)
from kura_shaper.lab.traffic import TrafficResult
from kura_shaper.lab.world import lab_tenants
from kura_shaper.measure import Reading, Samples
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CEILING, BUDGET = Rate(200_000_000), Rate(600_000_000)
SETTINGS = LabSettings(ceiling=CEILING, budget=BUDGET)
TENANTS = lab_tenants(CEILING, BUDGET)
WINDOW_MS, WINDOWS = 100, 20


def readings(mbps: Sequence[float]) -> tuple[Reading, ...]:
    """Counters that grow by these rates, one for each window of 100 ms."""
    count = 0
    found = [Reading(0, 0)]
    for number, rate in enumerate(mbps, start=1):
        count += round(rate * 1_000_000 * WINDOW_MS / 8_000)
        found.append(Reading(number * WINDOW_MS * 1_000_000, count))
    return tuple(found)


def point(
    path: Path,
    rates: Mapping[str, Sequence[float]],
    *,
    limit: Rate | None = None,
    counter: str = NIC_TX,
    failures: int = 0,
) -> Point:
    """A point whose counters moved at these rates."""
    samples = Samples({UNATTRIBUTED: readings([0] * WINDOWS)} | {name: readings(r) for name, r in rates.items()})
    result = TrafficResult("http1", 8, 1, 1.0, failures, ("reset",) if failures else (), 1.0, 1.0)
    measurement = Measurement(samples, 0, WINDOWS * WINDOW_MS * 1_000_000, (result,))
    return Point(path, 8, measurement, counter, limit, burst_allowance_bytes(limit) if limit else 0)


def steady(mbps: float) -> list[float]:
    """The same rate in every window."""
    return [mbps] * WINDOWS


def floors(acme: float, globex: float, initech: float, *, total: float) -> Point:
    """The contended point."""
    rates = {"class.acme": acme, "class.globex": globex, "class.initech": initech, NIC_TX: total}
    return point(Path.FLOORS, {name: steady(rate) for name, rate in rates.items()}, limit=BUDGET)


def local(mbps: float, *, at_nic: float) -> Point:
    """Path C."""
    return point(Path.LOCAL, {"pod-0.rx": steady(mbps), NIC_TX: steady(at_nic)}, counter="pod-0.rx")


HELD = point(Path.SHAPED, {NIC_TX: steady(199)}, limit=CEILING)


@pytest.mark.parametrize(
    ("measured", "codes"),
    [
        (HELD, set()),
        (point(Path.SHAPED, {NIC_TX: steady(203)}, limit=CEILING), {"over-limit", "window-over-limit"}),
        (point(Path.SHAPED, {NIC_TX: [*steady(195)[:-1], 260]}, limit=CEILING), {"window-over-limit"}),
        (point(Path.SHAPED, {NIC_TX: steady(189)}, limit=CEILING), {"ceiling-not-used"}),
        (point(Path.DIRECT, {NIC_TX: steady(189)}, limit=CEILING), {"ceiling-not-used"}),
        (point(Path.PEER, {NIC_TX: steady(199), UNATTRIBUTED: steady(1)}, limit=CEILING), {"unattributed"}),
        (point(Path.SHAPED, {NIC_TX: steady(199)}, limit=CEILING, failures=1), {"streams-broke"}),
        (point(Path.BYPASS, {NIC_TX: steady(900)}), set()),
        (point(Path.BYPASS, {NIC_TX: steady(299)}), {"bypass-not-shown"}),
        (local(9000, at_nic=0), set()),
        (local(0, at_nic=0), {"local-not-shown"}),
        (local(9000, at_nic=100), {"local-at-nic"}),
        (floors(120, 300, 180, total=600), set()),
        (floors(40, 380, 180, total=600), {"floor-violated"}),
        (floors(60, 260, 105, total=425), {"budget-not-used"}),
        (floors(120, 320, 180, total=620), {"over-limit", "window-over-limit"}),
        (point(Path.FOREIGN, {NIC_TX: steady(600), UNATTRIBUTED: steady(598)}, limit=BUDGET), set()),
        (point(Path.FOREIGN, {NIC_TX: steady(600)}, limit=BUDGET), {"foreign-not-counted"}),
        (
            point(Path.FOREIGN, {NIC_TX: steady(640), UNATTRIBUTED: steady(640)}, limit=BUDGET),
            {"over-limit", "window-over-limit"},
        ),
    ],
)
def test_a_broken_promise_is_a_finding_and_a_kept_one_is_not(measured: Point, codes: set[str]) -> None:
    report = make_report(SETTINGS, TENANTS, [measured])
    assert {finding.code for finding in report.findings} == codes
    assert report.verdict == ("fail" if codes else "pass")


def test_the_json_has_the_names_that_others_rely_on() -> None:
    bypass = point(Path.BYPASS, {NIC_TX: steady(900)})
    shown = json.loads(
        json.dumps(to_json(make_report(SETTINGS, TENANTS, [bypass, HELD, floors(60, 360, 180, total=600)])))
    )
    assert shown["paths"] == {"bypass": {"8": 900.0}, "shaped": {"8": 199.0}}
    assert shown["ceiling_mbps"] == 200.0
    assert shown["floors"]["acme"]["floor_mbps"] == 50.0
    assert shown["floors"]["acme"]["measured_mbps"] == 60.0
    assert (shown["worst_window"]["mbps"], shown["worst_window"]["path"], shown["worst_window"]["ms"]) == (
        199.0,
        "shaped",
        100,
    )
    assert (shown["unattributed_bytes"], shown["verdict"], shown["findings"], shown["shape"]) == (
        0,
        "pass",
        [],
        "single",
    )


def test_the_html_needs_no_network_and_shows_every_scenario() -> None:
    points = [HELD, floors(60, 360, 180, total=600), point(Path.BYPASS, {NIC_TX: steady(900)})]
    page = to_html(make_report(SETTINGS, TENANTS, points))
    own = page.split("</script>", 1)[1]
    assert "src=" not in own
    assert "<link" not in own
    for words in ("Today:", "Shaped:", "Floors: acme", "Floors: the device", "199.0"):
        assert words in own


def test_a_run_that_measured_nothing_does_not_pass() -> None:
    assert make_report(SETTINGS, TENANTS, []).verdict == "fail"


def test_the_table_has_a_line_for_each_point_and_each_tenant_of_the_floors() -> None:
    rows = table(make_report(SETTINGS, TENANTS, [HELD, floors(60, 360, 180, total=600)]))
    assert len(rows) == 5
    assert rows[0].says == "99.5 % of the limit"
    assert rows[2].says == "120 % of its floor"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ceiling": Rate(1_000_000)}, "--ceiling"),
        ({"budget": Rate(250_000_000)}, "--budget"),
        ({"streams": "1,x"}, "--streams"),
        ({"streams": "0"}, "--streams"),
        ({"streams": "٣"}, "--streams"),
        ({"duration_s": 0.1}, "--duration"),
        ({"scenarios": ("nope",)}, "--scenario"),
    ],
)
def test_a_setting_that_can_not_be_measured_is_refused_by_its_option(changed: dict[str, object], words: str) -> None:
    good: dict[str, object] = {
        "ceiling": CEILING,
        "budget": BUDGET,
        "streams": "8,1,1",
        "duration_s": 1.5,
        "scenarios": ("today",),
    }
    assert lab_settings(**good).streams == (1, 8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        lab_settings(**(good | changed))  # type: ignore[arg-type]


def test_the_progress_knows_how_many_points_a_run_has() -> None:
    assert expected_points(SETTINGS) == 7 + 12 + 1 + 1
    assert expected_points(LabSettings(CEILING, BUDGET, scenarios=(Scenario.FOREIGN,))) == 1
