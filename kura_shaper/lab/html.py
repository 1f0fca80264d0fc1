"""The report as one HTML file that needs no network: the table, and every rate over time."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kura_shaper.lab.measure import NIC_TX
from kura_shaper.lab.report import headline, table, words_of
from kura_shaper.lab.scenarios import UNATTRIBUTED, Path, in_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.lab.report import Report
    from kura_shaper.lab.scenarios import Point
    from kura_shaper.measure import Series

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { max-width: 52rem; } .verdict { font-weight: 600; } .pass { color: #0a7a4b; } .fail { color: #b3261e; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e3e7ec; white-space: nowrap; }
th { font-weight: 600; color: #5a6675; }
td:nth-child(-n+2), th:nth-child(-n+2), td:last-child { text-align: left; }
"""
_STORY = (
    (
        "Today: pacing at the NIC, keyed by the pod",
        (
            "Path A holds its ceiling whatever the number of streams. Path B sends the same tenant's bytes through the"
            " gateway on the node: they leave with the node's identity and the mechanism never sees them."
        ),
        (Path.DIRECT, Path.BYPASS),
    ),
    (
        "Shaped: path B under the tree",
        (
            "The gateway marks each connection with its tenant, and the tree at the device holds the sum of all of"
            " them, over every protocol and on the peer plane."
        ),
        (
            Path.SHAPED,
            Path.SHAPED_HTTP2,
            Path.SHAPED_GRPC,
            Path.SHAPED_IPV6,
            Path.SHAPED_BWLIM,
            Path.PEER,
        ),
    ),
)
_WIDTH, _HEIGHT = 1080, 360


def to_html(report: Report) -> str:
    """Return the whole file."""
    verdict = f'<p>Verdict: <span class="verdict {report.verdict}">{report.verdict}</span></p>'
    findings = "".join(f"<li><code>{html.escape(f.code)}</code> {html.escape(f.message)}</li>" for f in report.findings)
    return "".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            "<title>kura-shaper lab report</title>",
            f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script>",
            "<h1>kura-shaper lab report</h1>",
            "<p>Every rate is read from the device's own byte counters in windows of 100 ms, headers included.</p>",
            f"<p>{html.escape(headline(report))}</p>",
            verdict,
            f"<ul>{findings}</ul>" if findings else "",
            _table(report),
            *_story_plots(report),
            *_floor_plots(report),
            *_foreign_plots(report),
            "</html>\n",
        ]
    )


def _table(report: Report) -> str:
    head = "".join(
        f"<th>{cell}</th>" for cell in ("Scenario", "Path", "Streams", "Mbit/s", "Worst 100 ms", "Limit", "")
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(cell)}</td>"
            for cell in (row.scenario, row.what, row.streams, row.mbps, row.worst_mbps, row.limit_mbps, row.says)
        )
        + "</tr>"
        for row in table(report)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _story_plots(report: Report) -> Iterable[str]:
    for title, words, paths in _STORY:
        points = [p for p in report.points if p.path in paths]
        if points:
            figure = _figure()
            for point in points:
                name = f"{words_of(point.path)}, {in_words(point.streams)}"
                _line(figure, name, point.measurement.series(point.counter), point)
            _level(figure, "ceiling", report.settings.ceiling.mbps)
            _level(figure, "floor", report.tenants[0].floor.mbps)
            yield _section(title, words, figure)


def _floor_plots(report: Report) -> Iterable[str]:
    for point in (p for p in report.points if p.path is Path.FLOORS):
        for tenant in report.tenants:
            figure = _figure()
            _line(figure, tenant.name, point.measurement.series(f"class.{tenant.name}"), point)
            _level(figure, "floor", tenant.floor.mbps)
            _level(figure, "ceiling", tenant.ceiling.mbps)
            words = f"{tenant.name} while all three tenants want everything."
            yield _section(f"Floors: {tenant.name}", words, figure)
        figure = _figure()
        _line(figure, "device", point.measurement.series(NIC_TX), point)
        _level(figure, "budget", report.settings.budget.mbps)
        yield _section("Floors: the device", "All tenants together, against the node's budget.", figure)


def _foreign_plots(report: Report) -> Iterable[str]:
    for point in (p for p in report.points if p.path is Path.FOREIGN):
        figure = _figure()
        _line(figure, "device", point.measurement.series(NIC_TX), point)
        _line(figure, "unattributed class", point.measurement.series(UNATTRIBUTED), point)
        _level(figure, "budget", report.settings.budget.mbps)
        words = "A server that knows no mark sends from the gateway's port: its bytes are counted, and bounded."
        yield _section("Foreign: bytes without a mark", words, figure)


def _figure() -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        width=_WIDTH,
        height=_HEIGHT,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        xaxis={"title": "seconds"},
        yaxis={"title": "Mbit/s", "rangemode": "tozero"},
        hovermode="x unified",
    )
    return figure


def _line(figure: go.Figure, name: str, series: Series, point: Point) -> None:
    windows = series.windows()
    seconds = [(w.end_ns - point.measurement.start_ns) / 1e9 for w in windows]
    figure.add_scatter(x=seconds, y=[round(w.rate.mbps, 2) for w in windows], name=name, mode="lines")


def _level(figure: go.Figure, name: str, mbps: float) -> None:
    figure.add_hline(
        y=mbps,
        line_dash="dash",
        line_color="#8a94a3",
        annotation_text=f"{name} {mbps:g}",
        annotation_position="top left",
    )


def _section(title: str, words: str, figure: go.Figure) -> str:
    plot = figure.to_html(full_html=False, include_plotlyjs=False)
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(words)}</p>{plot}"
