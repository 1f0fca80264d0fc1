"""Whether each identity of the event broker is one pod: a router ends the session of the first when a second comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.verify.observed import Observed

BROKER_REPLICATED = Code(
    "broker-replicated",
    Severity.ERROR,
    "an identity of the event broker has several pods: they take the session from each other without end",
    "set replicas to 1 and the strategy to Recreate; for two brokers deploy two identities",
)


def _identities(observed: Observed) -> Judged:
    deployments = observed.question.deployments
    if deployments is None:
        return Judged(skipped="no Deployments were given (--deployments)")
    brokers = [one for one in deployments if one.runs_broker]
    if not brokers:
        return Judged(skipped="none of the Deployments runs the event broker")
    findings = tuple(
        Finding(
            BROKER_REPLICATED,
            f"Deployment {one.name} has {one.replicas} replicas",
            evidence={"deployment": one.name, "replicas": one.replicas},
        )
        for one in brokers
        if one.replicas > 1
    )
    return Judged(f"{len(brokers)} identities, a pod each", findings)


CHECKS = (
    Check(
        "broker-identities",
        "Is each identity of the event broker one pod?",
        Phase.STATIC,
        (BROKER_REPLICATED,),
        _identities,
    ),
)
