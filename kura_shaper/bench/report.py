"""A run as a table of text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kura_shaper.bench.answer import answer, caveats, evidence_of, words

if TYPE_CHECKING:
    from kura_shaper.bench.points import Point, Report

HEADINGS = (
    *("FORM", "PACKETS", "SENDERS", "LIMIT", "MBIT/S", "KPKT/S", "CPU S/GBIT", "NS/PACKET"),
    *("OF LIMIT", "WORST 100MS", "DROPPED"),
)


def table(report: Report) -> list[tuple[str, ...]]:
    """Return the run as rows of text, the headings' order."""
    return [_row(point) for point in sorted(report.points, key=_order)]


def _order(point: Point) -> tuple[bool, int, int]:
    return (point.limit is None, -point.wire_bytes, -point.senders)


def _row(point: Point) -> tuple[str, ...]:
    of_limit, worst = point.of_limit_permille(), point.worst_of_limit_permille()
    return (
        point.form,
        point.load,
        str(point.senders),
        str(point.limit) if point.limit else "-",
        f"{point.bits_per_second / 10**6:.0f}",
        f"{point.packets_per_second / 1_000:.1f}",
        f"{point.cpu_seconds_per_gbit:.3f}",
        str(point.ns_per_packet),
        "-" if of_limit is None else f"{of_limit / 10:.1f} %",
        "-" if worst is None else f"{worst / 10:.1f} %",
        str(point.dropped_packets),
    )


def to_json(report: Report) -> dict[str, Any]:
    """Return the run as `bench --json` prints it."""
    evidence = evidence_of(report)
    return {
        "kernel": report.machine.kernel,
        "cpus": report.machine.cpus,
        "senders": report.machine.many,
        "rate_mbps": report.rate.mbps,
        "tenants": report.tenants,
        "streams": report.streams,
        "duration_ms": report.duration_ms,
        "shapes": {m.form: {"measured": m.is_measured, "says": m.words} for m in report.made_of},
        "points": [_point_json(point) for point in report.points],
        "answer": answer(evidence),
        "needed_packets_per_second": {"mtu": evidence.mtu_needed, "gso": evidence.gso_needed},
        "carried_packets_per_second": evidence.carried,
        "used": {
            "mtu": evidence.used_permille(evidence.mtu_needed) / 1_000,
            "gso": evidence.used_permille(evidence.gso_needed) / 1_000,
        },
        "words": list(words(evidence)),
        "caveats": list(caveats(report)),
    }


def _point_json(point: Point) -> dict[str, Any]:
    of_limit, worst = point.of_limit_permille(), point.worst_of_limit_permille()
    return {
        "shape": point.form,
        "packets": point.load,
        "wire_bytes_per_packet": point.wire_bytes,
        "senders": point.senders,
        "limit_mbps": point.limit.mbps if point.limit else None,
        "mbps": round(point.bits_per_second / 10**6, 1),
        "packets_per_second": point.packets_per_second,
        "segments_per_second": point.packets_per_second * point.segments,
        "cpu_seconds_per_gbit": round(point.cpu_seconds_per_gbit, 5),
        "cpu_ns_per_packet": point.ns_per_packet,
        "accuracy": None if of_limit is None else of_limit / 1_000,
        "worst_window": {"ms": 100, "mbps": round(point.worst_mbps, 1), "accuracy": worst / 1_000 if worst else None},
        "dropped_packets": point.dropped_packets,
        "others_share": point.others_permille / 1_000,
    }
