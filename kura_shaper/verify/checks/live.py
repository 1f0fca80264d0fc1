"""Whether load from outside is held to its tenant's ceiling, over however many streams, by what its client received."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.snapshot import Unknown
from kura_shaper.units import Rate
from kura_shaper.verify.checks.rates import in_words, traffic_of
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.measure import Reading, Series
    from kura_shaper.tenants.document import Tenant
    from kura_shaper.tree.model import HtbClass
    from kura_shaper.verify.active import Step
    from kura_shaper.verify.observed import Observed

_BITS_PER_BYTE_S = 8 * 1_000_000_000
# Below this part of the ceiling it was not the ceiling that held the load.
_PUT_TO_THE_TEST_PERCENT = 70
# What is short of this is a matter of when a client and a node read their counters.
_MISSING_BYTES, _MISSING_PERCENT = 1_000_000, 10

LIVE_OVER_CEILING = Code(
    "live-over-ceiling",
    Severity.ERROR,
    "a client outside received more payload than its tenant's ceiling lets pass",
    "`--streams 1,4,8` tells how it grows; then what the checks `sockets`, `steering` and `routes` say",
)
LIVE_NOT_IN_CLASS = Code(
    "live-not-in-class",
    Severity.ERROR,
    "a client outside received payload that its tenant's class never counted: it came another way",
    "follow its address (`ip route get`), and whether another server answers for its host name",
)


def _live(observed: Observed) -> Judged:
    load, wanted = observed.load, observed.wanted
    if load is None:
        return Judged(skipped="no load was made")
    if isinstance(load, Unknown):
        return Judged(unknown=load.reason)
    tenant = next((one for one in observed.question.document.tenants if one.name == load.tenant), None)
    if tenant is None:
        return Judged(unknown=f"tenant {load.tenant[:64]!r} of the load is not in the document")
    findings, unknown, seen = [], [], []
    spec = None
    if not isinstance(wanted, Unknown):
        spec = next((one for one in wanted.tree.classes if one.classid.minor == tenant.class_id), None)
    traffic = traffic_of(observed)
    series = None if isinstance(traffic, Judged) else traffic.sent.get(tenant.class_id)
    for step in load.steps:
        rate = Rate(step.received_bytes * _BITS_PER_BYTE_S // max(1, step.duration_ns))
        words = f"{step.path} {step.streams} streams {rate.mbps:.1f} Mbit/s".lstrip()
        seen.append(f"{words} (a control)" if step.is_control else words)
        if step.is_control:
            continue
        findings += _over(tenant, spec, step, rate, observed)
        findings += _elsewhere(tenant, series, step)
        if not findings and rate.bits_per_second * 100 < tenant.ceiling.bits_per_second * _PUT_TO_THE_TEST_PERCENT:
            unknown.append(f"{words} do not put a ceiling of {tenant.ceiling} to the test")
    if isinstance(traffic, Judged) and not findings:
        unknown.append(traffic.unknown or traffic.skipped)
    return Judged(f"{tenant.name}, ceiling {tenant.ceiling}: {', '.join(seen)}", tuple(findings), "; ".join(unknown))


def _over(tenant: Tenant, spec: HtbClass | None, step: Step, rate: Rate, observed: Observed) -> list[Finding]:
    # Payload is less than what the ceiling counts, so the bucket and a packet are all that may come on top.
    bucket = (spec.cburst_bytes if spec else 0) + observed.node.device.gso_max_bytes
    most = tenant.ceiling.bits_per_second * step.duration_ns // _BITS_PER_BYTE_S + bucket
    if step.received_bytes <= most:
        return []
    percent = rate.bits_per_second * 100 // max(1, tenant.ceiling.bits_per_second)
    of_ceiling = f"{percent} % of its ceiling {tenant.ceiling}"
    message = f"{tenant.name}: {rate.mbps:.1f} Mbit/s over {step.streams} streams, {of_ceiling}"
    evidence: dict[str, int | str | tuple[str, ...]] = {
        "path": step.path,
        "streams": step.streams,
        "received_bytes": step.received_bytes,
        "allowed_bytes": most,
        "duration_ms": step.duration_ns // 1_000_000,
    }
    return [Finding(LIVE_OVER_CEILING, message, tenant.name, evidence)]


def _elsewhere(tenant: Tenant, series: Series | None, step: Step) -> list[Finding]:
    if series is None:
        return []
    counted = counted_bytes(series.readings, step)
    lost = step.received_bytes - counted
    if lost <= _MISSING_BYTES or lost * 100 <= step.received_bytes * _MISSING_PERCENT:
        return []
    received = f"a client received {in_words(step.received_bytes)} over {step.streams} streams"
    message = f"{tenant.name}: {received}, its class counted {in_words(counted)}"
    evidence: dict[str, int | str | tuple[str, ...]] = {
        "path": step.path,
        "streams": step.streams,
        "received_bytes": step.received_bytes,
        "class_bytes": counted,
    }
    return [Finding(LIVE_NOT_IN_CLASS, message, tenant.name, evidence)]


def counted_bytes(readings: tuple[Reading, ...], step: Step) -> int:
    """Return the most that a class can have sent in a step: between the last reading before and the first after it."""
    before = [reading for reading in readings if reading.at_ns <= step.start_ns] or [readings[0]]
    after = [reading for reading in readings if reading.at_ns >= step.end_ns] or [readings[-1]]
    return after[0].count_bytes - before[-1].count_bytes


CHECKS = (
    Check(
        "live",
        "Is load from outside held to its ceiling, over one stream and over many, and all of it in its class?",
        Phase.ACTIVE,
        (LIVE_OVER_CEILING, LIVE_NOT_IN_CLASS),
        _live,
    ),
)
