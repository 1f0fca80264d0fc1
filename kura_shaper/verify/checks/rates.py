"""Whether ceilings, floors and the budget held in every window, by the classes' own counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import LeafKind
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.units import Rate
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.measure import Excess, Series
    from kura_shaper.tenants.document import Tenant
    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import HtbClass
    from kura_shaper.verify.observed import Hungry, Observed, Traffic

_NS_PER_S = 1_000_000_000
_BITS_PER_BYTE_S = 8 * _NS_PER_S
# Shorter than this a class's turn among all others' says little.
_HUNGRY_WINDOWS = 5
# A budget is full from here on: headers that a class is charged with and buckets take the rest.
_FULL_PERCENT = 95

CEILING_EXCEEDED = Code(
    "ceiling-exceeded",
    Severity.ERROR,
    "a tenant sent more in a window than its ceiling, its bucket and one packet allow",
    "look at what the tree's check says; several classes of one tenant, or another ceiling, show there",
)
BUDGET_EXCEEDED = Code(
    "budget-exceeded",
    Severity.ERROR,
    "all tenants together sent more in a window than the budget, its bucket and one packet allow",
    "`kura-shaper plan`: floors that add up to more than the budget break it",
)
FLOOR_MISSED = Code(
    "floor-missed",
    Severity.ERROR,
    "a tenant always had packets waiting while the budget was full, and got less than its floor",
    "`kura-shaper status`: its class, its prio and its quantum; then the device's own pace",
)


def traffic_of(observed: Observed) -> Traffic | Judged:
    """Return what was seen of the traffic, or why a check of it says nothing."""
    if observed.traffic is None:
        return Judged(skipped="no traffic was looked at")
    if isinstance(observed.traffic, Unknown):
        return Judged(unknown=observed.traffic.reason)
    actual = observed.node.snapshot
    if isinstance(actual, Unknown) or not is_ours(actual.root):
        return Judged(unknown="there is no tree of ours whose classes could tell")
    return observed.traffic


def in_words(count_bytes: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count_bytes >= size:
            return f"{count_bytes / size:.1f} {unit}"
    return f"{count_bytes} bytes"


def _ceilings(observed: Observed) -> Judged:
    traffic, wanted = traffic_of(observed), observed.wanted
    if isinstance(traffic, Judged):
        return traffic
    if isinstance(wanted, Unknown):
        return Judged(unknown=wanted.reason)
    specs = _specs(wanted)
    findings, unknown, moved = [], [], []
    for tenant in observed.question.document.tenants:
        if tenant.class_id in traffic.broken:
            unknown.append(f"{tenant.name}: {traffic.broken[tenant.class_id]}")
            continue
        series, spec = traffic.sent.get(tenant.class_id), specs.get(tenant.class_id)
        if series is None or spec is None or len(series.readings) < 2 or not series.whole().sent_bytes:
            continue
        moved.append((tenant, series, spec))
        excess = series.excess(spec.ceil, burst_bytes=_bucket(spec, observed))
        if excess.excess_bytes > 0:
            findings.append(_exceeded(tenant, spec, excess, _bucket(spec, observed)))
    if not moved and not unknown:
        return Judged(skipped=f"no tenant sent anything in {_seconds(traffic)}")
    return Judged(_fastest(moved, traffic), tuple(findings), unknown="; ".join(unknown[:5]))


def _bucket(spec: HtbClass, observed: Observed) -> int:
    # A class may send while its bucket is not empty, so the last packet passes whole.
    return spec.cburst_bytes + observed.node.device.gso_max_bytes


def _exceeded(tenant: Tenant, spec: HtbClass, excess: Excess, bucket_bytes: int) -> Finding:
    window = excess.window
    message = (
        f"{tenant.name}: {window.rate.mbps:.1f} Mbit/s over {window.duration_ms:.0f} ms, ceiling {spec.ceil};"
        f" {in_words(excess.excess_bytes)} more than ceiling, bucket and one packet"
    )
    evidence = {
        "window_ms": round(window.duration_ms),
        "window_bytes": window.sent_bytes,
        "ceiling_bits_per_second": spec.ceil.bits_per_second,
        "promised_bits_per_second": tenant.ceiling.bits_per_second,
        "bucket_bytes": bucket_bytes,
        "excess_bytes": excess.excess_bytes,
    }
    return Finding(CEILING_EXCEEDED, message, tenant.name, evidence)


def _fastest(moved: list[tuple[Tenant, Series, HtbClass]], traffic: Traffic) -> str:
    def share(one: tuple[Tenant, Series, HtbClass]) -> float:
        return _worst_rate(one[1], traffic).bits_per_second / one[2].ceil.bits_per_second

    total = sum(series.whole().sent_bytes for _, series, _ in moved)
    words = f"{len(moved)} tenants sent {in_words(total)} in {_seconds(traffic)}"
    if not moved:
        return words
    tenant, series, spec = max(moved, key=share)
    rate = _worst_rate(series, traffic)
    nearest = f"nearest to its ceiling {tenant.name}: {rate.mbps:.1f} of {spec.ceil.mbps:.1f} Mbit/s"
    return f"{words}; {nearest} in a window of at most {traffic.longest_window_ns / 1_000_000:.0f} ms"


def _worst_rate(series: Series, traffic: Traffic) -> Rate:
    worst = max(series.windows(), key=lambda window: window.rate)
    return worst.rate if traffic.readings > 1 else Rate(0)


def _budget(observed: Observed) -> Judged:
    traffic, wanted = traffic_of(observed), observed.wanted
    if isinstance(traffic, Judged):
        return traffic
    if isinstance(wanted, Unknown):
        return Judged(unknown=wanted.reason)
    if ReservedClass.BUDGET in traffic.broken:
        return Judged(unknown=traffic.broken[ReservedClass.BUDGET])
    series = traffic.sent.get(ReservedClass.BUDGET)
    if series is None or len(series.readings) < 2:
        return Judged(unknown="the budget's class was not read twice")
    if not series.whole().sent_bytes:
        return Judged(skipped=f"nothing passed the budget in {_seconds(traffic)}")
    parts = [spec for spec in wanted.tree.classes if spec.classid.minor == ReservedClass.BUDGET]
    budget = Rate(sum(spec.ceil.bits_per_second for spec in parts))
    bucket = sum(_bucket(spec, observed) for spec in parts)
    excess = series.excess(budget, burst_bytes=bucket)
    rate = _worst_rate(series, traffic)
    if excess.excess_bytes > 0:
        window = excess.window
        message = (
            f"all tenants: {window.rate.mbps:.1f} Mbit/s over {window.duration_ms:.0f} ms, budget {budget};"
            f" {in_words(excess.excess_bytes)} more than budget, bucket and one packet"
        )
        evidence = {
            "window_ms": round(window.duration_ms),
            "window_bytes": window.sent_bytes,
            "budget_bits_per_second": budget.bits_per_second,
            "bucket_bytes": bucket,
            "excess_bytes": excess.excess_bytes,
        }
        return Judged(findings=(Finding(BUDGET_EXCEEDED, message, evidence=evidence),))
    return Judged(f"fastest window {rate.mbps:.1f} of {budget.mbps:.1f} Mbit/s")


def _floors(observed: Observed) -> Judged:
    traffic, wanted = traffic_of(observed), observed.wanted
    if isinstance(traffic, Judged):
        return traffic
    if isinstance(wanted, Unknown):
        return Judged(unknown=wanted.reason)
    if any(leaf.parameters.kind is LeafKind.FQ for leaf in wanted.tree.leaves):
        return Judged(skipped="a leaf fq holds packets until their time: what waits there is no sign of want")
    specs = _specs(wanted)
    budget = Rate(sum(c.ceil.bits_per_second for c in wanted.tree.classes if c.classid.minor == ReservedClass.BUDGET))
    findings, judged = [], 0
    for tenant in observed.question.document.tenants:
        spec = specs.get(tenant.class_id)
        stretches = [h for h in traffic.hungry.get(tenant.class_id, ()) if _tells(h, traffic, budget)]
        if spec is None or not stretches or tenant.class_id in traffic.broken:
            continue
        judged += 1
        worst = max(stretches, key=lambda hungry: _short_bytes(hungry, spec, observed))
        if _short_bytes(worst, spec, observed) > 0:
            findings.append(_missed(tenant, spec, worst, budget))
    if not judged:
        return Judged(skipped="no tenant waited while the budget was full, so no floor was put to the test")
    return Judged(f"{judged} tenants waited while the budget was full; each got its floor", tuple(findings))


def _tells(hungry: Hungry, traffic: Traffic, budget: Rate) -> bool:
    """Whether a stretch is long enough, and the budget was full in it."""
    if hungry.duration_ns < _HUNGRY_WINDOWS * traffic.window_ns:
        return False
    return hungry.budget_bytes * _BITS_PER_BYTE_S * 100 >= budget.bits_per_second * hungry.duration_ns * _FULL_PERCENT


def _short_bytes(hungry: Hungry, spec: HtbClass, observed: Observed) -> int:
    """Return how many bytes a class was short of its floor, beyond what buckets and one packet explain."""
    owed = spec.floor.bits_per_second * hungry.duration_ns // _BITS_PER_BYTE_S
    return owed - hungry.sent_bytes - spec.burst_bytes - observed.node.device.gso_max_bytes


def _missed(tenant: Tenant, spec: HtbClass, hungry: Hungry, budget: Rate) -> Finding:
    got = Rate(hungry.sent_bytes * _BITS_PER_BYTE_S // hungry.duration_ns)
    used = hungry.budget_bytes * _BITS_PER_BYTE_S * 100 // (budget.bits_per_second * hungry.duration_ns)
    message = (
        f"{tenant.name}: {got.mbps:.1f} Mbit/s over {hungry.duration_ns / _NS_PER_S:.1f} s with packets waiting,"
        f" floor {spec.floor}, while the budget was used to {used} %"
    )
    evidence = {
        "stretch_ms": hungry.duration_ns // 1_000_000,
        "sent_bytes": hungry.sent_bytes,
        "floor_bits_per_second": spec.floor.bits_per_second,
        "promised_bits_per_second": tenant.floor.bits_per_second,
        "budget_used_percent": used,
    }
    return Finding(FLOOR_MISSED, message, tenant.name, evidence)


def _specs(wanted: Wanted) -> dict[int, HtbClass]:
    return {spec.classid.minor: spec for spec in wanted.tree.classes}


def _seconds(traffic: Traffic) -> str:
    return f"{traffic.duration_ns / _NS_PER_S:.1f} s"


CHECKS = (
    Check(
        "ceilings",
        "Did no tenant pass its ceiling in any window?",
        Phase.PASSIVE,
        (CEILING_EXCEEDED,),
        _ceilings,
    ),
    Check(
        "budget",
        "Did all tenants together stay within the budget in every window?",
        Phase.PASSIVE,
        (BUDGET_EXCEEDED,),
        _budget,
    ),
    Check(
        "floors",
        "Did every tenant that had packets waiting get its floor?",
        Phase.PASSIVE,
        (FLOOR_MISSED,),
        _floors,
    ),
)
