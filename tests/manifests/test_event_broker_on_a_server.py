"""The event broker's manifests on a real API server: taken, refused, installed, and all that its account may."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import yaml
from event_broker_cluster import KIND, access, as_of_old, cluster, helm, kubectl, running_cluster
from event_broker_manifests import CHART, OVERLAYS, like
from manifest_tools import kustomized

if TYPE_CHECKING:
    from kube_rig import Cluster

__all__ = ["access", "cluster", "running_cluster"]  # fixtures

pytestmark = pytest.mark.slow

ACCOUNT = "system:serviceaccount:event-broker:event-broker"
READ = ("get", "list", "watch")


def takes(cluster: Cluster, text: str) -> str:
    words = ("apply", "--dry-run=server", "--validate=true", "--filename", "-")
    return kubectl(cluster, *words, stdin=as_of_old(text), check=False)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_taken(cluster: Cluster, overlay: str) -> None:
    assert "deployment.apps/event-broker-gpu-a-1" in takes(cluster, kustomized(f"event-broker/overlays/{overlay}"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_the_chart_renders_is_taken(cluster: Cluster, overlay: str) -> None:
    assert "deployment.apps/event-broker-gpu-a-1" in takes(cluster, yaml.safe_dump_all(like(overlay)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory: 512Mi", "memory: 512Mibi"),
        ("configMap:\n          name", "configMapp:\n          name"),
        ("defaultMode: 288", "defaultMode: 440000"),
        ("topologyKey", "topologKey"),
        ("cidr: 10.244.0.0/16", "cidr: 10.244.0.0/33"),
        ("operator: In", "operator: Within"),
        ("targetLabel", "targetLable"),
    ],
)
def test_what_is_wrong_is_refused(cluster: Cluster, old: str, new: str) -> None:
    right = kustomized("event-broker/overlays/two")
    wrong = right.replace(old, new)
    if wrong == right:
        pytest.fail(f"{old!r} is not in the manifests")
    assert not takes(cluster, wrong)


# What the account may.


def rules_of(cluster: Cluster, namespace: str) -> list[tuple[str, ...]]:
    """Return all that the account may do in a namespace, but what every account may: to ask what it may do itself."""
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    asked = json.dumps({**kind, "spec": {"namespace": namespace}})
    words = ("create", "--filename", "-", "--output", "json", f"--as={ACCOUNT}")
    status = json.loads(kubectl(cluster, *words, stdin=asked))["status"]
    assert not status["incomplete"]
    return [
        (*rule["apiGroups"], *rule["resources"], *sorted(rule["verbs"]))
        for rule in status["resourceRules"]
        if rule["apiGroups"] != ["authorization.k8s.io"]
    ]


@pytest.mark.usefixtures("access")
def test_the_account_may_read_one_kind_in_one_namespace_and_nothing_else(cluster: Cluster) -> None:
    assert rules_of(cluster, "gpu") == [("nvidia.com", "dynamoworkermetadatas", *READ)]
    for other in ("default", "kube-system", "event-broker", "kura"):
        assert rules_of(cluster, other) == []


@pytest.mark.usefixtures("access")
def test_each_right_that_could_be_is_asked_for(cluster: Cluster) -> None:
    """The same by SubjectAccessReviews, verb by verb, and for kinds that a broker could be thought to read."""

    def may(verb: str, kind: str, *where: str) -> bool:
        words = ("auth", "can-i", f"--as={ACCOUNT}", verb, kind, *where)
        return kubectl(cluster, *words, check=False).strip() == "yes"

    for verb in (*READ, "create", "update", "patch", "delete", "deletecollection", "escalate", "bind"):
        assert may(verb, KIND, "--namespace=gpu") is (verb in READ), verb
        assert not may(verb, KIND, "--namespace=default")
        assert not may(verb, KIND, "--all-namespaces")
    assert not may("update", f"{KIND}/status", "--namespace=gpu")
    for kind in ("pods", "secrets", "configmaps", "endpoints", "endpointslices.discovery.k8s.io", "services"):
        for verb in READ:
            assert not may(verb, kind, "--namespace=gpu"), (verb, kind)
            assert not may(verb, kind, "--namespace=event-broker"), (verb, kind)
    assert not may("list", "namespaces")
    assert not may("create", "serviceaccounts/token", "--namespace=event-broker")


@pytest.mark.usefixtures("access")
def test_one_verb_more_would_be_seen(cluster: Cluster) -> None:
    where, account = "--namespace=gpu", "--serviceaccount=event-broker:event-broker"
    kubectl(cluster, "create", "role", "more", "--verb=patch", f"--resource={KIND}", where)
    kubectl(cluster, "create", "rolebinding", "more", "--role=more", account, where)
    try:
        end = time.monotonic() + 10
        while len(rules_of(cluster, "gpu")) == 1:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        kubectl(cluster, "delete", "role,rolebinding", "more", where)
    end = time.monotonic() + 10
    while len(rules_of(cluster, "gpu")) > 1:
        assert time.monotonic() < end
        time.sleep(0.1)


# Helm.


def test_helm_installs_upgrades_one_after_the_other_and_uninstalls(cluster: Cluster) -> None:
    values = (
        *("--values", CHART / "ci" / "two-values.yaml", "--namespace", "released"),
        *("--set", "namespace.create=false", "--set-json", "networkPolicy.publisherPorts=[]"),
    )

    def of(identity: str, path: str) -> str:
        words = ("--namespace=released", "get", "deployment", f"brokers-{identity}", f"--output=jsonpath={{{path}}}")
        return kubectl(cluster, *words)

    helm(cluster, "install", "brokers", CHART, *values)
    assert kubectl(cluster, "--namespace=gpu", "get", "role,rolebinding", "brokers", "--output", "name")
    assert kubectl(cluster, "--namespace=released", "get", "poddisruptionbudget", "brokers", "--output", "name")
    # Paused as the README has it: the next upgrade leaves that alone, and so its pod.
    kubectl(cluster, "--namespace=released", "rollout", "pause", "deployment/brokers-gpu-a-2")
    helm(cluster, "upgrade", "brokers", CHART, *values, "--set", "settings.drain_deadline=2m,image.tag=0.1.1")
    for identity, paused in (("gpu-a-1", ""), ("gpu-a-2", "true")):
        assert of(identity, ".spec.template.spec.terminationGracePeriodSeconds") == "130"
        assert of(identity, ".spec.paused") == paused
    kubectl(cluster, "--namespace=released", "rollout", "resume", "deployment/brokers-gpu-a-2")
    helm(cluster, "uninstall", "brokers", "--namespace", "released")
    kinds = "deployments,configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets,podmonitors,prometheusrules"
    assert "brokers" not in kubectl(cluster, "--namespace=released", "get", kinds)
    assert "brokers" not in kubectl(cluster, "--namespace=gpu", "get", "roles,rolebindings")


def test_a_single_identity_and_kustomize_leave_nothing(cluster: Cluster) -> None:
    text = as_of_old(kustomized("event-broker/overlays/one"))
    kubectl(cluster, "apply", "--filename", "-", stdin=text)
    without = [each for each in yaml.safe_load_all(text) if each["kind"] != "Namespace"]
    kubectl(cluster, "delete", "--filename", "-", stdin=yaml.safe_dump_all(without))
    assert "event-broker" not in kubectl(cluster, "--namespace=gpu", "get", "roles,rolebindings")
