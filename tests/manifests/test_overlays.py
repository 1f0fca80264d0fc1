"""What Kustomize makes of the overlays: each object as it should be, settings that the agent takes, and no more."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_tools import (
    DAEMONSET,
    OVERLAYS,
    Manifest,
    check_schemas,
    containers,
    kustomized,
    manifests,
    of_kind,
    run,
    the,
    tool,
)

from kura_shaper.agent.settings import AgentSettings, load_settings
from kura_shaper.tree.build import ShapeChoice

POOLS = {
    "eu-west": "kura-dedibox",
    "us-east": "kura-us-east",
    "us-west": "kura-us-west",
    "ca-east": "kura-ca-east",
    "ap-southeast": "kura-ap-southeast",
    "sa-west": "kura-sa-west",
    "eu-east": "kura-eu-east",
    "us-central": "kura-us-central",
}
POOL = "node.cluster.x-k8s.io/pool"
GRANTED = ["NET_ADMIN", "BPF", "PERFMON"]
# Objects of others, whose schemas kubernetes-validate does not have; a real server is asked about these.
CUSTOM = {"PodMonitor", "PrometheusRule", "CiliumNodeConfig", "CiliumClusterwideNetworkPolicy"}


def rendered(overlay: str) -> list[Manifest]:
    return manifests(kustomized(f"overlays/{overlay}"))


def daemonsets(overlay: str) -> list[Manifest]:
    return of_kind(rendered(overlay), "DaemonSet")


def identity(each: Manifest) -> tuple[str, str, str]:
    return each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]


def environment(daemonset: Manifest) -> dict[str, str]:
    (container,) = containers(daemonset)
    told = {"spec.nodeName": "the-node", "status.hostIP": "192.0.2.7"}
    made: dict[str, str] = {}
    for each in container["env"]:
        value = each["value"] if "value" in each else told[each["valueFrom"]["fieldRef"]["fieldPath"]]
        # As the kubelet does it, a variable that was named before can be used.
        made[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], value)
    return made


def settings_of(overlay: str, daemonset: Manifest, directory: Path) -> AgentSettings:
    """Return what the agent of a DaemonSet makes of its ConfigMap and its environment."""
    (volume,) = [each for each in daemonset["spec"]["template"]["spec"]["volumes"] if each["name"] == "settings"]
    (found,) = [
        each
        for each in of_kind(rendered(overlay), "ConfigMap")
        if each["metadata"]["name"] == volume["configMap"]["name"]
    ]
    path = directory / "agent.yaml"
    path.write_text(found["data"]["agent.yaml"])
    return load_settings(path, environment(daemonset))


@pytest.mark.parametrize("overlay", ["observe", "all"])
def test_every_pool_has_its_agents(overlay: str) -> None:
    found = {
        each["metadata"]["labels"]["tuist.dev/region"]: each["spec"]["template"]["spec"]["nodeSelector"][POOL]
        for each in daemonsets(overlay)
    }
    assert found == POOLS


def test_the_canary_is_one_pool_and_exactly_what_it_will_be_in_all() -> None:
    """Going from one overlay to the next changes objects in place; two agents never come to one node."""
    (canary,) = daemonsets("canary")
    assert canary in daemonsets("all")
    for overlay in ("observe", "canary"):
        assert {identity(each) for each in rendered(overlay)} <= {identity(each) for each in rendered("all")}
    config = the(rendered("canary"), "CiliumNodeConfig")
    assert config["spec"]["nodeSelector"]["matchExpressions"][0]["values"] == ["kura-us-east"]


def test_observing_differs_in_one_variable_and_leaves_the_bandwidth_manager_alone() -> None:
    for looking, shaping in zip(daemonsets("observe"), daemonsets("all"), strict=True):
        assert environment(looking) == {**environment(shaping), "KURA_SHAPER_OBSERVE": "true"}
    assert not of_kind(rendered("observe"), "CiliumNodeConfig")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_agent_takes_its_settings(overlay: str, tmp_path: Path) -> None:
    for daemonset in daemonsets(overlay):
        settings = settings_of(overlay, daemonset, tmp_path)
        assert settings.kubernetes
        assert settings.kubernetes.region == daemonset["metadata"]["labels"]["tuist.dev/region"]
        assert (settings.kubernetes.namespace, settings.kubernetes.node) == ("kura", "the-node")
        assert settings.observe is (overlay == "observe")
        assert settings.shape is ShapeChoice.SINGLE
        assert settings.budget is None
        assert (settings.listen.host, settings.listen.port) == ("192.0.2.7", 9469)


@pytest.mark.case("F49")
def test_without_a_component_the_agent_is_heard_by_its_own_node_alone() -> None:
    """Case F-49."""
    settings = yaml.safe_load(the(manifests(kustomized("base")), "ConfigMap")["data"]["agent.yaml"])
    assert settings["listen"].startswith("127.0.0.1:")
    assert "KURA_SHAPER_LISTEN" not in environment(the(manifests(kustomized("base")), "DaemonSet"))


@pytest.mark.case("F51")
@pytest.mark.case("F50")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_port_that_is_open_is_kept_from_the_world(overlay: str) -> None:
    """Cases F-49, F-50, F-51."""
    policy = the(rendered(overlay), "CiliumClusterwideNetworkPolicy")["spec"]
    (expression,) = policy["nodeSelector"]["matchExpressions"]
    assert policy["nodeSelector"].keys() == {"matchExpressions"}
    assert expression["key"] == POOL
    assert set(expression["values"]) >= {
        each["spec"]["template"]["spec"]["nodeSelector"][POOL] for each in daemonsets(overlay)
    }
    assert policy["ingress"] == [{"fromEntities": ["all"]}], "a policy that only denies turns all else away"
    (denied,) = policy["ingressDeny"]
    assert denied["fromEntities"] == ["world"]
    assert {port["port"] for each in denied["toPorts"] for port in each["ports"]} == {"9469", "8405", "9470"}
    assert "egress" not in policy


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_agent_has_no_more_than_it_needs(overlay: str) -> None:
    for daemonset in daemonsets(overlay):
        pod = daemonset["spec"]["template"]["spec"]
        (container,) = containers(daemonset)
        granted = container["securityContext"]
        assert granted["capabilities"] == {"drop": ["ALL"], "add": GRANTED}
        assert granted["readOnlyRootFilesystem"]
        assert not granted["allowPrivilegeEscalation"]
        assert not granted["privileged"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC"} & pod.keys()
        paths = {each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
        assert paths == {"/var/lib/kura-shaper", "/sys/fs/bpf"}
        assert pod["hostNetwork"]
        assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert pod["priorityClassName"] == "system-node-critical"
        assert {each["key"] for each in pod["tolerations"]} == {"tuist.dev/kura-cache", "tuist.dev/runner-cache"}
        assert container["resources"]["limits"].keys() == {"memory"}


def test_the_account_only_reads() -> None:
    for kind in ("Role", "ClusterRole"):
        for rule in the(rendered("all"), kind)["rules"]:
            assert set(rule["verbs"]) == {"get", "list", "watch"}
    assert the(rendered("all"), "Role")["metadata"]["namespace"] == "kura"
    assert the(rendered("all"), "Role")["rules"][0]["resources"] == ["kurainstances"]
    assert [rule["resources"] for rule in the(rendered("all"), "ClusterRole")["rules"]] == [["nodes"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_image_floats_and_no_pod_runs_everywhere(overlay: str) -> None:
    """Case F-76."""
    for daemonset in daemonsets(overlay):
        for container in containers(daemonset):
            assert re.search(r":v?\d+\.\d+\.\d+$|@sha256:[0-9a-f]{64}$", container["image"])
        assert daemonset["spec"]["template"]["spec"]["nodeSelector"][POOL] in POOLS.values()


def test_the_base_by_itself_runs_nowhere() -> None:
    pod = the(manifests(kustomized("base")), "DaemonSet")["spec"]["template"]["spec"]
    assert pod["nodeSelector"][POOL] == "none"


@pytest.mark.parametrize(("path", "address"), [("base", "127.0.0.1"), ("overlays/all", "the pod's")])
def test_probes_ask_where_the_agent_answers(path: str, address: str) -> None:
    for daemonset in of_kind(manifests(kustomized(path)), "DaemonSet"):
        (container,) = containers(daemonset)
        probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert {probe["path"] for name, probe in probes.items() if name != "readinessProbe"} == {"/healthz"}
        assert probes["readinessProbe"]["path"] == "/readyz"
        asked = {(probe.get("host", "the pod's"), probe["port"]) for probe in probes.values()}
        assert asked == {(address, 9469)}
        assert ("KURA_SHAPER_LISTEN" in environment(daemonset)) is (path != "base")
        assert [port["containerPort"] for port in container["ports"]] == [9469]


def test_mq_grants_what_it_says_and_no_more(tmp_path: Path) -> None:
    relative = Path(os.path.relpath(DAEMONSET, tmp_path.resolve()))
    overlay = {"resources": [str(relative / "overlays/canary")], "components": [str(relative / "components/mq")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    found = manifests(run(tool("kubectl"), "kustomize", tmp_path).stdout)
    (container,) = containers(the(found, "DaemonSet"))
    assert container["securityContext"]["capabilities"]["add"] == [*GRANTED, "NET_RAW", "SYS_ADMIN"]
    assert environment(the(found, "DaemonSet"))["KURA_SHAPER_SHAPE"] == "auto"


def test_a_pod_monitor_finds_the_agents_and_names_the_node() -> None:
    monitor = the(rendered("all"), "PodMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    for daemonset in daemonsets("all"):
        assert wanted <= daemonset["spec"]["template"]["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert {"node", "instance"} <= {each.get("targetLabel") for each in endpoint["relabelings"]}


def test_a_collector_keeps_what_the_rules_ask_for() -> None:
    values: dict[str, Any] = yaml.safe_load((DAEMONSET / "k8s-monitoring-values.yaml").read_text())
    monitors = values["prometheusOperatorObjects"]["podMonitors"]
    assert monitors["namespaces"] == ["kura-shaper", "event-broker"]
    kept = re.compile("|".join(monitors["metricsTuning"]["includeMetrics"]))
    shown = ("dashboards/kura-shaper.json", "dashboards/event-broker/event-broker.json")
    texts = ((DAEMONSET / path).read_text() for path in ("alerts/rules.yaml", *shown))
    asked = {name for text in texts for name in re.findall(r"(?:kura_shaper|continuum)_\w+", text)}
    assert asked
    assert all(kept.fullmatch(name) for name in asked)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schemas_of_kubernetes_take_it(overlay: str) -> None:
    check_schemas(kustomized(f"overlays/{overlay}"), *CUSTOM)
