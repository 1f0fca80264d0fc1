"""A report as one JSON object, and as JUnit for CI."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from kura_shaper import __version__
from kura_shaper.verify.active import Load
from kura_shaper.verify.after import facts_of
from kura_shaper.verify.checks.live import counted_bytes
from kura_shaper.verify.observed import Traffic
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from kura_shaper.verify.run import Report
    from kura_shaper.verify.values import Finding, Result

_NS_PER_S = 1_000_000_000
# What XML 1.0 can't hold, escaped or not.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(report: Report) -> dict[str, Any]:
    """Return the object. Rates are in bit/s, times in their names."""
    traffic = report.observed.traffic
    return {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "device": report.observed.node.device.name,
        "started_at": report.started_at,
        "kura_shaper": __version__,
        "kernel": os.uname().release,
        "duration_s": round(traffic.duration_ns / _NS_PER_S, 3) if isinstance(traffic, Traffic) else 0,
        "window_ms": report.settings.window_ms,
        "findings": [_finding(finding) for finding in report.findings],
        "accepted": [_finding(finding) for finding in report.accepted],
        "checks": [_result(result) for result in report.results],
        "tenants": _tenants(report),
        "live": live_rows(report),
        "facts": _facts(report),
        "before": asdict(report.before) if report.before else None,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    evidence = {key: list(value) if isinstance(value, tuple) else value for key, value in finding.evidence.items()}
    return {
        "code": finding.code.name,
        "severity": finding.code.severity,
        "message": finding.message,
        "tenant": finding.tenant,
        "evidence": evidence,
        "meaning": finding.code.meaning,
        "remedy": finding.code.remedy,
    }


def _result(result: Result) -> dict[str, Any]:
    return {
        "name": result.check.name,
        "question": result.check.question,
        "phase": result.check.phase,
        "outcome": result.outcome,
        "seen": result.words,
        "unknown": result.unknown,
        "findings": [finding.code.name for finding in result.findings],
    }


def _tenants(report: Report) -> list[dict[str, Any]]:
    """Return what each tenant sent, as far as it was looked at."""
    traffic = report.observed.traffic
    if not isinstance(traffic, Traffic):
        return []
    rows = []
    for tenant in report.observed.question.document.tenants:
        series = traffic.sent.get(tenant.class_id)
        if series is None or len(series.readings) < 2:
            continue
        whole, worst = series.whole(), max(series.windows(), key=lambda window: window.rate)
        rows.append(
            {
                "tenant": tenant.name,
                "class": f"{tenant.class_id:#x}",
                "floor_bits_per_second": tenant.floor.bits_per_second,
                "ceiling_bits_per_second": tenant.ceiling.bits_per_second,
                "sent_bytes": whole.sent_bytes,
                "bits_per_second": whole.rate.bits_per_second,
                "fastest_window": {
                    "ms": round(worst.duration_ms, 1),
                    "bits_per_second": worst.rate.bits_per_second,
                },
            }
        )
    return rows


def live_rows(report: Report) -> list[dict[str, Any]]:
    """Return each step of the load from outside: what its client received, and what the tenant's class counted."""
    load, traffic = report.observed.load, report.observed.traffic
    if not isinstance(load, Load):
        return []
    tenants = report.observed.question.document.tenants
    class_id = next((tenant.class_id for tenant in tenants if tenant.name == load.tenant), None)
    series = traffic.sent.get(class_id) if isinstance(traffic, Traffic) and class_id else None
    rows = []
    for step in load.steps:
        duration_ns = max(1, step.duration_ns)
        counted = counted_bytes(series.readings, step) if series and series.readings else None
        rows.append(
            {
                "path": step.path,
                "streams": step.streams,
                "is_control": step.is_control,
                "received_bits_per_second": step.received_bytes * 8 * _NS_PER_S // duration_ns,
                "class_bits_per_second": None if counted is None else counted * 8 * _NS_PER_S // duration_ns,
                "failures": step.failures,
            }
        )
    return rows


def _facts(report: Report) -> dict[str, Any]:
    """Return what a later run can compare itself with: what a restart must not change, and counters that only grow."""
    facts = facts_of(report.observed)
    if facts is None:
        return {}
    return {
        "boot": facts.boot,
        "ifindex": facts.ifindex,
        "shape": facts.shape or None,
        "sent_bytes": facts.sent_bytes,
        "tenants": {name: f"{class_id:#x}" for name, class_id in facts.tenants.items()},
        "gateway": list(facts.gateway),
    }


def to_junit(report: Report) -> str:
    """Return JUnit: a case for each check, which failed, was in error (unknown), was skipped, or passed."""
    cases = report.results
    suite = ET.Element(
        "testsuite",
        name=f"kura-shaper verify {_clean(report.observed.node.device.name)}",
        tests=str(len(cases)),
        failures=str(sum(bool(_counted(report, result)) for result in cases)),
        errors=str(sum(bool(r.unknown) and not _counted(report, r) for r in cases)),
        skipped=str(sum(r.outcome is Outcome.SKIPPED for r in cases)),
        timestamp=report.started_at,
    )
    for result in cases:
        case = ET.SubElement(suite, "testcase", classname=f"verify.{result.check.phase}", name=result.check.name)
        _fill(case, report, result)
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _counted(report: Report, result: Result) -> list[Finding]:
    return [finding for finding in result.findings if finding.code.name not in report.settings.accepted]


def _fill(case: ET.Element, report: Report, result: Result) -> None:
    counted = _counted(report, result)
    if counted:
        failure = ET.SubElement(case, "failure", type=counted[0].code.name, message=_clean(counted[0].message))
        lines = (f"{f.code.severity} {f.code.name}: {f.message}\nremedy: {f.code.remedy}" for f in counted)
        failure.text = _clean("\n".join(lines))
    elif result.unknown:
        ET.SubElement(case, "error", type="unknown", message=_clean(result.unknown))
    elif result.outcome is Outcome.SKIPPED:
        ET.SubElement(case, "skipped", message=_clean(result.words))
    ET.SubElement(case, "system-out").text = _clean(f"{result.check.question}\n{result.words}")


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
