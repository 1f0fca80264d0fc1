"""A run's points as findings, as the contract's JSON and as a table.

Rates are Mbit/s of 10^6 bit, read from the device's own byte counters.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kura_shaper.lab.measure import NIC_TX
from kura_shaper.lab.scenarios import UNATTRIBUTED, Path, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kura_shaper.lab.scenarios import LabSettings, Point
    from kura_shaper.lab.world import LabTenant
    from kura_shaper.units import Rate

_USED_PERMILLE, _OVER_PERMILLE, _BYPASS_PERMILLE, _FLOOR_PERMILLE, _STRAY_PERMILLE = 950, 1010, 1500, 950, 1
_HELD = (
    Path.SHAPED,
    Path.SHAPED_HTTP2,
    Path.SHAPED_GRPC,
    Path.SHAPED_IPV6,
    Path.SHAPED_BWLIM,
    Path.PEER,
)
_BOUND = (*_HELD, Path.FLOORS, Path.FOREIGN)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not hold. code is stable."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a run measured, and what does not hold."""

    settings: LabSettings
    tenants: tuple[LabTenant, ...]
    points: tuple[Point, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """pass, or fail when anything was found or nothing was measured."""
        return "fail" if self.findings or not self.points else "pass"


def make_report(settings: LabSettings, tenants: tuple[LabTenant, ...], points: Sequence[Point]) -> Report:
    """Judge the points of a run."""
    findings = [finding for point in points for finding in _judge(point, settings, tenants)]
    return Report(settings, tenants, tuple(points), tuple(findings))


def _judge(point: Point, settings: LabSettings, tenants: tuple[LabTenant, ...]) -> Iterable[Finding]:
    name = f"{point.path}/{point.streams}"
    rate = point.measurement.rate(point.counter)
    if point.measurement.failures:
        reasons = "; ".join(r for result in point.measurement.results for r in result.reasons)
        yield Finding("streams-broke", f"{name}: {point.measurement.failures} streams broke: {reasons}")
    if point.limit and _permille(rate, point.limit) > _OVER_PERMILLE:
        yield Finding("over-limit", f"{name}: {rate} on average, the limit is {point.limit}")
    if point.path in _BOUND and point.limit:
        excess = point.measurement.series(point.counter).excess(point.limit, burst_bytes=point.burst_bytes)
        if excess.excess_bytes > 0:
            window = f"{excess.window.duration_ms:.0f} ms at {excess.window.rate}"
            yield Finding("window-over-limit", f"{name}: {excess.excess_bytes} bytes too many in {window}")
    # bwlim counts payload, so in front of the tree it keeps the wire a little below the ceiling.
    if point.path in (*_HELD, Path.DIRECT) and point.limit and _permille(rate, point.limit) < _USED_PERMILLE:
        yield Finding("ceiling-not-used", f"{name}: {rate} of {point.limit}")
    if point.path is Path.BYPASS and _permille(rate, settings.ceiling) < _BYPASS_PERMILLE:
        yield Finding(
            "bypass-not-shown",
            f"{name}: this machine moves only {rate} through the gateway; a lower --ceiling shows the bypass",
        )
    if point.path is Path.LOCAL:
        yield from _judge_local(point, settings)
    if point.path in _HELD and point.measurement.sent_bytes(UNATTRIBUTED):
        yield Finding("unattributed", f"{name}: {point.measurement.sent_bytes(UNATTRIBUTED)} bytes without a mark")
    if point.path is Path.FLOORS:
        yield from _judge_floors(point, settings, tenants)
    if point.path is Path.FOREIGN and not _counted_as_unattributed(point):
        yield Finding("foreign-not-counted", f"{name}: bytes from a gateway port without a mark were not counted")


def _judge_local(point: Point, settings: LabSettings) -> Iterable[Finding]:
    """Path C goes as fast as the machine does, and none of it crosses the NIC."""
    rate, at_nic = point.measurement.rate(point.counter), point.measurement.rate()
    if _permille(rate, settings.ceiling) < _BYPASS_PERMILLE:
        yield Finding("local-not-shown", f"{point.path}: this machine moves only {rate} from pod to pod")
    if _permille(at_nic, rate) > _STRAY_PERMILLE:
        yield Finding("local-at-nic", f"{point.path}: {at_nic} of it crossed the NIC")


def _judge_floors(point: Point, settings: LabSettings, tenants: tuple[LabTenant, ...]) -> Iterable[Finding]:
    for tenant in tenants:
        rate = point.measurement.rate(f"class.{tenant.name}")
        if _permille(rate, tenant.floor) < _FLOOR_PERMILLE:
            yield Finding("floor-violated", f"{tenant.name}: {rate} under contention, its floor is {tenant.floor}")
    total = point.measurement.rate()
    if _permille(total, settings.budget) < _USED_PERMILLE:
        yield Finding("budget-not-used", f"floors: {total} in all, the budget is {settings.budget}")


def _counted_as_unattributed(point: Point) -> bool:
    """Whether the class saw what the device saw, but for the few bytes that carry no payload."""
    seen = point.measurement.rate(UNATTRIBUTED)
    return _permille(seen, point.measurement.rate()) >= _USED_PERMILLE


def _permille(rate: Rate, of: Rate) -> int:
    return rate.bits_per_second * 1000 // max(1, of.bits_per_second)


def to_json(report: Report) -> dict[str, Any]:
    """Return the run as `lab run --json` prints it."""
    settings = report.settings
    paths: dict[str, dict[str, float]] = {}
    for point in report.points:
        if point.path not in (Path.FLOORS, Path.FOREIGN):
            paths.setdefault(point.path, {})[str(point.streams)] = _mbps(point.measurement.rate(point.counter))
    held = [p for p in report.points if p.path in _HELD]
    return {
        "kernel": platform.release(),
        "shape": settings.shape.value,
        "ceiling_mbps": _mbps(settings.ceiling),
        "budget_mbps": _mbps(settings.budget),
        "duration_ms": settings.duration_ms,
        "paths": paths,
        "worst_window": _worst_window(held, report.tenants),
        "floors": _floors(report),
        "foreign": _foreign(report),
        "unattributed_bytes": sum(p.measurement.sent_bytes(UNATTRIBUTED) for p in held),
        "verdict": report.verdict,
        "findings": [{"code": f.code, "message": f.message} for f in report.findings],
    }


def _worst_window(held: Sequence[Point], tenants: tuple[LabTenant, ...]) -> dict[str, Any] | None:
    windows = [(point.measurement.series(NIC_TX).worst_window(), point) for point in held]
    if not windows:
        return None
    window, point = max(windows, key=lambda pair: pair[0].rate)
    return {
        "ms": 100,
        "measured_ms": round(window.duration_ms, 1),
        "mbps": _mbps(window.rate),
        "tenant": tenants[0].name,
        "path": point.path,
        "streams": point.streams,
    }


def _floors(report: Report) -> dict[str, Any]:
    return {
        tenant.name: {
            "floor_mbps": _mbps(tenant.floor),
            "ceiling_mbps": _mbps(tenant.ceiling),
            "measured_mbps": _mbps(point.measurement.rate(f"class.{tenant.name}")),
        }
        for point in report.points
        if point.path is Path.FLOORS
        for tenant in report.tenants
    }


def _foreign(report: Report) -> dict[str, Any] | None:
    for point in report.points:
        if point.path is Path.FOREIGN:
            return {
                "mbps": _mbps(point.measurement.rate()),
                "unattributed_bytes": point.measurement.sent_bytes(UNATTRIBUTED),
            }
    return None


def _mbps(rate: Rate) -> float:
    return round(rate.mbps, 1)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table for people."""

    scenario: str
    what: str
    streams: str
    mbps: str
    worst_mbps: str
    limit_mbps: str
    says: str


_WORDS = {
    Path.DIRECT: (Scenario.TODAY, "A  client to the pod, across the NIC"),
    Path.BYPASS: (Scenario.TODAY, "B  client to the gateway to the pod"),
    Path.LOCAL: (Scenario.TODAY, "C  same node, never at the NIC"),
    Path.SHAPED: (Scenario.SHAPED, "B  HTTP/1.1"),
    Path.SHAPED_HTTP2: (Scenario.SHAPED, "B  HTTP/2"),
    Path.SHAPED_GRPC: (Scenario.SHAPED, "B  gRPC"),
    Path.SHAPED_IPV6: (Scenario.SHAPED, "B  HTTP/1.1 over IPv6"),
    Path.SHAPED_BWLIM: (Scenario.SHAPED, "B  HTTP/1.1, bwlim as well"),
    Path.PEER: (Scenario.SHAPED, "   peer plane :7443"),
    Path.FLOORS: (Scenario.FLOORS, "   three tenants want everything"),
    Path.FOREIGN: (Scenario.FOREIGN, "   unmarked server on :443"),
}


def words_of(path: Path) -> str:
    """Return a path's name for people."""
    return " ".join(_WORDS[path][1].split())


def headline(report: Report) -> str:
    """Return the run in one sentence."""
    bypass = [p for p in report.points if p.path is Path.BYPASS]
    held = [p for p in report.points if p.path in _HELD]
    ceiling = report.settings.ceiling.mbps
    said = []
    if bypass:
        most = max(p.measurement.rate() for p in bypass).mbps
        said.append(f"today a tenant with a ceiling of {ceiling:.0f} Mbit/s sends up to {most:.0f} through the gateway")
    if held:
        most = max(p.measurement.rate() for p in held).mbps
        worst = max(p.measurement.series(NIC_TX).worst_window().rate for p in held).mbps
        said.append(f"under the tree at most {most:.1f} on average and {worst:.1f} in the worst 100 ms")
    return f"{'; '.join(said)}." if said else ""


def table(report: Report) -> list[Row]:
    """Return the run as lines of a table, the floors a line for each tenant."""
    rows = []
    for point in report.points:
        scenario, what = _WORDS[point.path]
        rows.append(_row(scenario, what, point, report.settings))
        if point.path is Path.FLOORS:
            rows += [_floor_row(tenant, point) for tenant in report.tenants]
    return rows


def _row(scenario: str, what: str, point: Point, settings: LabSettings) -> Row:
    rate = point.measurement.rate(point.counter)
    return Row(
        scenario=scenario,
        what=what,
        streams=str(point.streams),
        mbps=f"{rate.mbps:.1f}",
        worst_mbps=f"{point.measurement.series(point.counter).worst_window().rate.mbps:.1f}",
        limit_mbps=f"{point.limit.mbps:.0f}" if point.limit else f"{settings.ceiling.mbps:.0f}",
        says=_says(point, rate, settings),
    )


def _says(point: Point, rate: Rate, settings: LabSettings) -> str:
    permille = _permille(rate, point.limit or settings.ceiling)
    if permille > _BYPASS_PERMILLE:
        return f"{permille / 1000:.1f} times the limit"
    return f"{permille / 10:.1f} % of the limit"


def _floor_row(tenant: LabTenant, point: Point) -> Row:
    counter = f"class.{tenant.name}"
    rate = point.measurement.rate(counter)
    worst = point.measurement.series(counter).worst_window().rate
    percent = _permille(rate, tenant.floor) / 10
    return Row(
        "",
        f"     {tenant.name}: floor {tenant.floor}, ceiling {tenant.ceiling}",
        "",
        f"{rate.mbps:.1f}",
        f"{worst.mbps:.1f}",
        f"{tenant.ceiling.mbps:.0f}",
        f"{percent:.0f} % of its floor",
    )
