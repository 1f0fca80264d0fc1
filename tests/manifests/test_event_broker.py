"""The event broker's bundle and chart: the same objects, settings that it takes, and nothing beyond its needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from event_broker_manifests import (
    BUNDLE,
    CHART,
    CUSTOM,
    LEAST,
    OVERLAYS,
    changed,
    comparable,
    everything,
    identity_of,
    like,
    of_bundle,
    of_values,
    settings_of,
    with_component,
)
from manifest_tools import check_schemas, containers, kustomized, of_kind, run, the, tool

from kura_shaper import __version__

# Bundle and chart.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_renders_what_kustomize_renders(overlay: str) -> None:
    ours, theirs = comparable(like(overlay)), comparable(of_bundle(overlay))
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert each == theirs[name], name


def test_with_a_mark_too(tmp_path: Path) -> None:
    ours = like("one", "--set", "settings.so_mark=44498944")
    theirs = comparable(with_component("one", "so-mark", tmp_path))
    for name, each in comparable(ours).items():
        if each["kind"] != "ConfigMap":
            assert each == theirs[name], name
    settings = settings_of(ours, the(ours, "Deployment"), tmp_path)
    assert (settings.so_mark, settings.metrics_listen.host) == (44498944, "127.0.0.1")


def test_with_cilium_too(tmp_path: Path) -> None:
    theirs = comparable(with_component("one", "cilium", tmp_path))
    ours = comparable(like("one", "--set", "networkPolicy.cilium=true"))
    assert ours == theirs
    policy = the(list(ours.values()), "CiliumNetworkPolicy")
    assert policy["spec"]["egress"] == [{"toEntities": ["kube-apiserver"]}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_lint(overlay: str) -> None:
    run(tool("helm"), "lint", "--strict", CHART, "--values", CHART / "ci" / f"{overlay}-values.yaml")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_schemas_of_kubernetes_take_it(overlay: str) -> None:
    check_schemas(kustomized(f"event-broker/overlays/{overlay}"), *CUSTOM)


def test_the_version_is_the_packages() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
    image = yaml.safe_load((BUNDLE / "identity" / "kustomization.yaml").read_text())["images"][0]
    assert image["newTag"] == __version__
    for overlay in OVERLAYS:
        for deployment in of_kind(of_bundle(overlay), "Deployment"):
            (container,) = containers(deployment)
            assert container["image"] == f"{image['newName']}:{__version__}"


# One identity, one pod.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_identity_has_one_pod_and_never_two_at_once(overlay: str, tmp_path: Path) -> None:
    for objects in everything(overlay):
        deployments = of_kind(objects, "Deployment")
        assert len(deployments) == OVERLAYS.index(overlay) + 1
        for each in deployments:
            assert each["spec"]["replicas"] == 1
            assert each["spec"]["strategy"] == {"type": "Recreate"}
        ids = [settings_of(objects, each, tmp_path).client_id for each in deployments]
        assert len(set(ids)) == len(ids)
        assert ids == [identity_of(each) for each in deployments]
        secrets = [str(each["spec"]["template"]["spec"]["volumes"][1]) for each in deployments]
        assert len(set(secrets)) == len(secrets), "a token each"
        assert len({str(each["spec"]["selector"]) for each in deployments}) == len(deployments)


def test_two_identities_keep_off_each_others_node() -> None:
    for objects in everything("two"):
        for each in of_kind(objects, "Deployment"):
            affinity = each["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
            (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
            selector = term["podAffinityTerm"]["labelSelector"]
            # Whatever adds the identity's own label here has it keep off itself alone.
            assert selector == {
                "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["event-broker"]}]
            }


def test_only_two_identities_have_a_budget_of_disruptions() -> None:
    for objects in everything("one"):
        assert not of_kind(objects, "PodDisruptionBudget")
    for objects in everything("two"):
        budget = the(objects, "PodDisruptionBudget")["spec"]
        assert budget["maxUnavailable"] == 1
        for each in of_kind(objects, "Deployment"):
            assert budget["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("deadline", "seconds"), [("", 35), ("25s", 35), ("1500ms", 12), ("0s", 10), ("10m", 610), ("0090s", 100)]
)
def test_a_pod_has_the_time_that_its_streams_have(deadline: str, seconds: int, tmp_path: Path) -> None:
    objects = of_values(changed("settings", "drain_deadline", value=deadline) if deadline else LEAST, tmp_path)
    deployment = the(objects, "Deployment")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds
    assert settings_of(objects, deployment, tmp_path).drain_deadline_ms <= (seconds - 10) * 1000


# Settings and credentials.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_broker_takes_its_settings_and_finds_its_files(overlay: str, tmp_path: Path) -> None:
    for objects in everything(overlay):
        for each in of_kind(objects, "Deployment"):
            settings = settings_of(objects, each, tmp_path)
            pod = each["spec"]["template"]["spec"]
            (container,) = containers(each)
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert container["args"] == ["event-broker", "--config", f"{mounts['settings']['mountPath']}/config.yaml"]
            assert not any("subPath" in mount for mount in mounts.values()), "what is rotated would not be seen"
            assert all(mount["readOnly"] for mount in mounts.values())
            sources = pod["volumes"][1]["projected"]["sources"]
            files = {item["path"] for source in sources for item in source["secret"]["items"]}
            assert {settings.token_file, settings.ca_bundle} == {
                Path(mounts["credentials"]["mountPath"], name) for name in files
            }
            assert pod["volumes"][1]["projected"]["defaultMode"] == 0o440
            assert settings.kubernetes_namespace == "event-broker"
            assert settings.watch_namespaces == ("gpu",)
            assert settings.drain_deadline_ms < pod["terminationGracePeriodSeconds"] * 1000


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_where_the_broker_answers(overlay: str, tmp_path: Path) -> None:
    for objects in everything(overlay):
        for each in of_kind(objects, "Deployment"):
            (container,) = containers(each)
            listen = settings_of(objects, each, tmp_path).metrics_listen
            probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
            assert {probe["path"] for name, probe in probes.items() if name != "readinessProbe"} == {"/healthz"}
            assert probes["readinessProbe"]["path"] == "/readyz"
            assert {probe["port"] for probe in probes.values()} == {listen.port}
            assert container["ports"] == [{"name": "metrics", "containerPort": listen.port, "protocol": "TCP"}]
            assert listen.host == "0.0.0.0"


# Rights.


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_keeps_the_strictest_standard(overlay: str) -> None:
    for objects in everything(overlay):
        labels = the(objects, "Namespace")["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
        for each in of_kind(objects, "Deployment"):
            pod = each["spec"]["template"]["spec"]
            (container,) = containers(each)
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["runAsUser"] == 65532
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"] == {
                "privileged": False,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            assert not any("hostPath" in volume for volume in pod["volumes"])
            assert container["resources"]["limits"].keys() == {"memory"}


def test_a_mark_costs_what_is_said_and_no_more(tmp_path: Path) -> None:
    for objects in (with_component("one", "so-mark", tmp_path), like("one", "--set", "settings.so_mark=1")):
        pod = the(objects, "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert (pod["hostNetwork"], pod["securityContext"]["runAsUser"]) == (True, 0)
        assert {container[probe]["httpGet"]["host"] for probe in container if probe.endswith("Probe")} == {"127.0.0.1"}
        assert container["ports"][0]["hostPort"] == 9464


def test_the_account_reads_one_resource_in_each_watched_namespace(tmp_path: Path) -> None:
    values = changed("settings", "watch_namespaces", value=["gpu", "gpu-canary"])
    for objects, namespaces in (
        (of_bundle("two"), ["gpu"]),
        (of_values(values, tmp_path), ["gpu", "gpu-canary"]),
        (of_values(LEAST, tmp_path), ["here"]),
    ):
        assert not of_kind(objects, "ClusterRole") + of_kind(objects, "ClusterRoleBinding")
        roles, bindings = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
        assert [role["metadata"]["namespace"] for role in roles] == namespaces
        assert [binding["metadata"]["namespace"] for binding in bindings] == namespaces
        for role in roles:
            (rule,) = role["rules"]
            assert rule["apiGroups"] == ["nvidia.com"]
            assert rule["resources"] == ["dynamoworkermetadatas"]
            assert rule["verbs"] == ["get", "list", "watch"]
        account = the(objects, "ServiceAccount")
        assert account["automountServiceAccountToken"] is False
        for binding in bindings:
            (subject,) = binding["subjects"]
            assert subject["name"] == account["metadata"]["name"]
            assert subject["namespace"] == account["metadata"]["namespace"]
