"""A report as lines for people: what does not hold first, then every check with what it saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.verify.report.machine import live_rows
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.verify.run import Report
    from kura_shaper.verify.values import Result

_LINES_MAX = 25


def to_lines(report: Report) -> Iterable[str]:
    """Yield the lines. What others chose the names of has no say over the terminal."""
    for line in _lines(report):
        yield "".join(c if c.isprintable() else "?" for c in line)


def _lines(report: Report) -> Iterable[str]:
    if report.before:
        yield str(report.before)
    for finding in report.findings[:_LINES_MAX]:
        yield f"{finding.code.severity}[{finding.code.name}]: {finding.message}"
        yield f"    {finding.code.meaning}"
        yield f"    remedy: {finding.code.remedy}"
    if len(report.findings) > _LINES_MAX:
        yield f"... and {len(report.findings) - _LINES_MAX} more findings; --json has all of them"
    for finding in report.accepted:
        yield f"accepted[{finding.code.name}]: {finding.message}"
    width = max((len(result.check.name) for result in report.results), default=0)
    for result in report.results:
        yield f"{result.outcome:<8} {result.check.name:<{width}} {_words(result)}".rstrip()
    yield from _paths(report)
    yield summary(report)


def _paths(report: Report) -> Iterable[str]:
    """Yield the ways of the load beside each other, as a table."""
    rows = live_rows(report)
    if not rows:
        return
    width = max(len(row["path"]) for row in rows)
    yield f"{'PATH':<{width}}  STREAMS  RECEIVED MBIT/S  CLASS MBIT/S"
    for row in rows:
        counted = row["class_bits_per_second"]
        in_class = "-" if counted is None else f"{counted / 1e6:.1f}"
        control = "  a control" if row["is_control"] else ""
        received = row["received_bits_per_second"] / 1e6
        yield f"{row['path']:<{width}}  {row['streams']:>7}  {received:>15.1f}  {in_class:>12}{control}"


def _words(result: Result) -> str:
    if result.outcome is Outcome.FINDING:
        names = ", ".join(dict.fromkeys(finding.code.name for finding in result.findings))
        return f"{names}; unknown: {result.unknown}" if result.unknown else names
    return result.unknown or result.words


def summary(report: Report) -> str:
    """Return the verdict in one line."""
    counts = {outcome: sum(r.outcome is outcome for r in report.results) for outcome in Outcome}
    parts = [f"{counts[Outcome.HOLDS]} checks hold"]
    if report.findings:
        parts.append(f"{len(report.findings)} finding{'s' if len(report.findings) > 1 else ''}")
    for outcome, word in ((Outcome.UNKNOWN, "could not be made"), (Outcome.SKIPPED, "had nothing to look at")):
        if counts[outcome]:
            parts.append(f"{counts[outcome]} {word}")
    if report.accepted:
        parts.append(f"{len(report.accepted)} accepted")
    return f"{report.observed.node.device.name}: {report.verdict}: {', '.join(parts)}"
