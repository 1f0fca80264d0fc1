"""The report as one HTML file that needs no network: the answer, the table, and the numbers as bars and lines."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kura_shaper.bench.answer import caveats, evidence_of, words
from kura_shaper.bench.report import HEADINGS, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kura_shaper.bench.points import Point, Report

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2430; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { max-width: 52rem; } .answer { font-weight: 600; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e3e7ec; white-space: nowrap; }
th { font-weight: 600; color: #5a6675; }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left; }
"""
_LAYOUT = {
    "template": "plotly_white",
    "width": 1080,
    "height": 360,
    "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
}


def to_html(report: Report) -> str:
    """Return the whole file."""
    headline, *rest = words(evidence_of(report))
    machine = report.machine
    about = (
        f"{report.rate}bit/s, {report.tenants} tenants, Linux {machine.kernel}, {machine.cpus} CPUs,"
        f" {machine.many} senders at once, {report.duration_ms / 1_000:g} s a point."
        " Rates are read from the device's own counters."
    )
    return "".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            "<title>kura-shaper bench report</title>",
            f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script>",
            "<h1>Is one classful root CPU-bound here?</h1>",
            f'<p class="answer">{html.escape(headline)}</p>',
            *(f"<p>{html.escape(sentence)}</p>" for sentence in (*rest, *caveats(report))),
            f"<p>{html.escape(about)}</p>",
            _table(report),
            *_plots(report),
            "</html>\n",
        ]
    )


def _table(report: Report) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEADINGS)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table(report))
    made = "".join(
        f"<li><code>{html.escape(m.form)}</code>: {'' if m.is_measured else 'left out: '}{html.escape(m.words)}</li>"
        for m in report.made_of
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{made}</ul>"


def _plots(report: Report) -> Iterable[str]:
    free = [point for point in report.points if point.limit is None]
    smallest = min((point.wire_bytes for point in free), default=0)
    small = [point for point in free if point.wire_bytes == smallest]
    yield _bars(
        "The most packets that each carries",
        "Small packets without a limit, from one sender and from all at once.",
        small,
        name=lambda point: f"{point.senders} sender{'s' if point.senders > 1 else ''}",
        value=lambda point: point.packets_per_second / 1_000,
        unit="1000 packets/s",
    )
    yield _bars(
        "CPU time of a packet",
        "Without a limit, all senders at once; the sender's own work is in it, so compare with `plain`.",
        [point for point in free if point.senders == report.machine.many],
        name=lambda point: point.load,
        value=lambda point: point.ns_per_packet / 1_000,
        unit="microseconds",
    )
    held = [point for point in report.points if point.limit is not None]
    for load in dict.fromkeys(point.load for point in held):
        yield _lines(report, load, [point for point in held if point.load == load])


def _bars(
    title: str,
    about: str,
    points: Sequence[Point],
    *,
    name: Callable[[Point], str],
    value: Callable[[Point], float],
    unit: str,
) -> str:
    figure = go.Figure()
    for group in dict.fromkeys(name(point) for point in points):
        chosen = [point for point in points if name(point) == group]
        figure.add_bar(x=[p.form for p in chosen], y=[round(value(p), 3) for p in chosen], name=group)
    figure.update_layout(**_LAYOUT, barmode="group", yaxis={"title": unit})
    return _section(title, about, figure)


def _lines(report: Report, load: str, points: Sequence[Point]) -> str:
    figure = go.Figure()
    for point in points:
        start_ns = point.windows[0].start_ns
        seconds = [(window.end_ns - start_ns) / 1e9 for window in point.windows]
        figure.add_scatter(x=seconds, y=[round(w.mbps, 1) for w in point.windows], name=point.form, mode="lines")
    figure.add_hline(y=report.rate.mbps, line_dash="dash", line_color="#8a94a3", annotation_text="the rate")
    figure.update_layout(**_LAYOUT, xaxis={"title": "seconds"}, yaxis={"title": "Mbit/s", "rangemode": "tozero"})
    return _section(f"Held to the rate: {load}", "Windows of 100 ms, at the device.", figure)


def _section(title: str, about: str, figure: go.Figure) -> str:
    plot = figure.to_html(full_html=False, include_plotlyjs=False)
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{plot}"
