"""A report as one HTML file that needs no network: what does not hold, what was asked, and every rate over time."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kura_shaper import __version__
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.observed import Traffic
from kura_shaper.verify.report.text import summary
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.measure import Series
    from kura_shaper.tenants.document import Tenant
    from kura_shaper.units import Rate
    from kura_shaper.verify.observed import Observed
    from kura_shaper.verify.run import Report
    from kura_shaper.verify.values import Finding

_PLOTS_MAX = 24
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { max-width: 60rem; } .verdict { font-weight: 600; }
.pass, .holds { color: #0a7a4b; } .findings, .finding, .error { color: #b3261e; }
.unknown, .warning { color: #8a5a00; } .skipped { color: #5a6675; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .8rem; text-align: left; border-bottom: 1px solid #e3e7ec; vertical-align: top; }
th { font-weight: 600; color: #5a6675; } td.id { white-space: nowrap; }
"""
_LAYOUT = {
    "template": "plotly_white",
    "width": 1080,
    "height": 320,
    "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
    "xaxis": {"title": "seconds"},
    "yaxis": {"title": "Mbit/s", "rangemode": "tozero"},
    "hovermode": "x unified",
}


def to_html(report: Report) -> str:
    """Return the whole file."""
    about = (
        f"{report.started_at}, kura-shaper {__version__}. Rates are read from the classes' and the device's own"
        f" counters in windows of {report.settings.window_ms} ms."
    )
    return "".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            "<title>kura-shaper verify report</title>",
            f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script>",
            "<h1>Is the ceiling real?</h1>",
            f'<p><span class="verdict {report.verdict}">{html.escape(summary(report))}</span></p>',
            f"<p>{html.escape(about)}</p>",
            _findings("Findings", report.findings),
            _findings("Accepted", report.accepted),
            _checks(report),
            *_plots(report),
            "</html>\n",
        ]
    )


def _findings(title: str, findings: tuple[Finding, ...]) -> str:
    if not findings:
        return ""
    rows = "".join(
        f'<tr><td class="id {f.code.severity}">{html.escape(f.code.name)}</td>'
        f"<td>{html.escape(f.message)}<br>{html.escape(f.code.meaning)}</td><td>{html.escape(f.code.remedy)}</td>"
        f"<td>{_evidence(f)}</td></tr>"
        for f in findings
    )
    head = "<tr><th>Finding</th><th>What was seen, and what it means</th><th>Remedy</th><th>Evidence</th></tr>"
    return f"<h2>{title}</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _evidence(finding: Finding) -> str:
    return "<br>".join(
        f"{html.escape(key)}: {html.escape(', '.join(value) if isinstance(value, tuple) else str(value))}"
        for key, value in finding.evidence.items()
    )


def _checks(report: Report) -> str:
    rows = []
    for result in report.results:
        words = result.words
        if result.outcome is Outcome.FINDING:
            words = ", ".join(dict.fromkeys(f.code.name for f in result.findings))
        if result.unknown:
            words = f"{words}; could not be looked at: {result.unknown}" if words else result.unknown
        rows.append(
            f'<tr><td class="id">{html.escape(result.check.name)}</td><td>{html.escape(result.check.question)}</td>'
            f'<td class="id {result.outcome}">{result.outcome}</td><td>{html.escape(words)}</td></tr>'
        )
    head = "<tr><th>Check</th><th>Question</th><th></th><th>What was seen</th></tr>"
    return f"<h2>Checks</h2><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _plots(report: Report) -> Iterable[str]:
    observed = report.observed
    traffic = observed.traffic
    if not isinstance(traffic, Traffic):
        return
    budget = _budget(observed)
    figure = go.Figure()
    _line(figure, "device", traffic.device, traffic)
    _line(figure, "root qdisc", traffic.root, traffic)
    if ReservedClass.BUDGET in traffic.sent:
        _line(figure, "all tenants", traffic.sent[ReservedClass.BUDGET], traffic)
    if budget:
        _level(figure, "budget", budget)
    words = "What the device sent, what its root qdisc passed, and what of that is under the budget."
    yield _section("The device", words, figure)
    figure = go.Figure()
    for class_id in (ReservedClass.UNATTRIBUTED, ReservedClass.UNKNOWN):
        if class_id in traffic.sent:
            _line(figure, class_id.name.lower(), traffic.sent[class_id], traffic)
    words = "Payload of gateway ports without a mark, and bytes with a mark that no class has. Both stay at 0."
    yield _section("Unattributed", words, figure)
    yield from _tenant_plots(report, traffic)


def _tenant_plots(report: Report, traffic: Traffic) -> Iterable[str]:
    named = {finding.tenant for finding in report.findings}
    moved = [(t, traffic.sent[t.class_id]) for t in report.observed.question.document.tenants if _moved(t, traffic)]
    moved.sort(key=lambda one: (one[0].name not in named, -one[1].whole().sent_bytes))
    for tenant, series in moved[:_PLOTS_MAX]:
        figure = go.Figure()
        _line(figure, tenant.name, series, traffic)
        _level(figure, "ceiling", tenant.ceiling)
        if tenant.floor.bits_per_second:
            _level(figure, "floor", tenant.floor)
        yield _section(tenant.name, f"Class {tenant.class_id:#x} against what was promised.", figure)
    if len(moved) > _PLOTS_MAX:
        yield f"<p>{len(moved) - _PLOTS_MAX} more tenants sent something, and less than these.</p>"


def _moved(tenant: Tenant, traffic: Traffic) -> bool:
    series = traffic.sent.get(tenant.class_id)
    return series is not None and len(series.readings) > 1 and series.whole().sent_bytes > 0


def _budget(observed: Observed) -> Rate | None:
    if observed.question.asked.budget:
        return observed.question.asked.budget
    return None if isinstance(observed.expected, Unknown) else observed.expected.settings.budget


def _line(figure: go.Figure, name: str, series: Series, traffic: Traffic) -> None:
    if len(series.readings) < 2:
        return
    xs: list[float] = []
    ys: list[float] = []
    for window in series.windows():
        # Steps: a rate is that of its whole window.
        xs += [(window.start_ns - traffic.start_ns) / 1e9, (window.end_ns - traffic.start_ns) / 1e9]
        ys += [round(window.rate.mbps, 3)] * 2
    figure.add_scatter(x=xs, y=ys, name=html.escape(name), mode="lines")


def _level(figure: go.Figure, name: str, rate: Rate) -> None:
    figure.add_hline(
        y=rate.mbps,
        line_dash="dash",
        line_color="#8a94a3",
        annotation_text=f"{name} {rate.mbps:g}",
        annotation_position="top left",
    )


def _section(title: str, words: str, figure: go.Figure) -> str:
    figure.update_layout(**_LAYOUT)
    plot = figure.to_html(full_html=False, include_plotlyjs=False)
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p>{plot}"
