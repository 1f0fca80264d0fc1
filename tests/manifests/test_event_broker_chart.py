"""The event broker's chart: what it refuses, what it takes, and the network that it makes of its values."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from event_broker_manifests import (
    CHART,
    IDENTITY,
    LEAST,
    OVERLAYS,
    OWN,
    changed,
    everything,
    of_values,
    refused,
    settings_of,
)
from manifest_tools import Manifest, of_kind, the

from kura_shaper.broker import settings as broker_settings

if TYPE_CHECKING:
    from pathlib import Path

# What is refused.


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({}, "image"),
        (changed("image", "tag", value="latest"), "/image/tag"),
        (changed("image", value={"repository": "r.example/b", "digest": "sha256:12"}), "/image/digest"),
        (changed("identities", value=[]), "/identities"),
        (changed("identities", value=[{"name": "a"}]), "tokenSecret"),
        (changed("identities", value=[{"name": "A_b", "tokenSecret": "a"}]), "/identities/0/name"),
        (changed("identities", value=[{"name": "a", "tokenSecret": "a", "replicas": 2}]), "replicas"),
        (changed("identities", value=[{"name": "a", "tokenSecret": "a"}] * 2), "a name stands there twice"),
        (
            changed(
                "identities",
                value=[{"name": "a", "tokenSecret": "a"}, {"name": "b", "clientId": "a", "tokenSecret": "b"}],
            ),
            "a client_id stands there twice",
        ),
        (changed("replicas", value=2), "/replicas"),
        (changed("replicas", value=0), "/replicas"),
        (changed("replicaCount", value=2), "replicaCount"),
        (changed("settings", "bus_url", value="http://203.0.113.10"), "/settings/bus_url"),
        (changed("settings", "bus_url", value="https://u:p@203.0.113.10"), "/settings/bus_url"),
        (changed("settings", "bus_url", value="https://router.example.net"), "networkPolicy.bus.cidrs"),
        (changed("settings", value={"bus_url": "https://192.0.2.1", "dynamo_namespaces": ["d"]}), "allowed_cidrs"),
        (changed("settings", "allowed_cidrs", value=["10.0.0.0"]), "/settings/allowed_cidrs/0"),
        (changed("settings", "dynamo_namespaces", value=[]), "/settings/dynamo_namespaces"),
        (changed("settings", "watch_namespaces", value=["Gpu"]), "/settings/watch_namespaces/0"),
        (changed("settings", "max_streams", value=4097), "/settings/max_streams"),
        (changed("settings", "max_stream_buffer_bytes", value=1), "/settings/max_stream_buffer_bytes"),
        (changed("settings", "drain_deadline", value=25), "/settings/drain_deadline"),
        (changed("settings", "drain_deadline", value="1h"), "/settings/drain_deadline"),
        (changed("settings", "so_mark", value=0), "/settings/so_mark"),
        (changed("settings", "client_id", value="x"), "client_id"),
        (changed("settings", "token_env", value="TOKEN"), "token_env"),
        (changed("settings", "metrics_listen", value="0.0.0.0:1"), "metrics_listen"),
        (changed("ca", value={"secret": "a", "configMap": "b"}), "/ca"),
        (changed("networkPolicy", "apiServer", "cidrs", value=[]), "networkPolicy.apiServer.cidrs"),
        (changed("networkPolicy", "publisherPorts", value=[{"port": 0}]), "/networkPolicy/publisherPorts/0/port"),
        (changed("monitoring", "enabled", value=True), "/networkPolicy"),
        (changed("nodeSelectors", value={}), "nodeSelectors"),
    ],
)
def test_what_would_go_wrong_is_refused(values: dict[str, Any], about: str, tmp_path: Path) -> None:
    assert about in refused(values, tmp_path)


def test_with_a_mark_nobody_scrapes_from_elsewhere(tmp_path: Path) -> None:
    values = changed("settings", "so_mark", value=1)
    values["monitoring"] = {"enabled": True}
    values["networkPolicy"]["metricsFrom"] = [{"podSelector": {}}]
    assert "/settings" in refused(values, tmp_path)


def test_a_second_replica_is_refused_also_where_the_schema_is_not_asked(tmp_path: Path) -> None:
    words = refused(changed("replicas", value=2), tmp_path, "--skip-schema-validation")
    assert "add an identity instead" in words


@pytest.mark.parametrize(
    "values",
    [
        LEAST,
        changed("image", value={"repository": "r.example:5000/a/b", "digest": f"sha256:{'0a' * 32}"}),
        changed("settings", "allowed_cidrs", value=[]),
        changed("settings", "allowed_cidrs", value=["fd00:10:244::/56"]),
        changed("settings", "bus_url", value="https://[2001:db8::1]:8443/gpu"),
        changed("settings", "max_stream_buffer_bytes", value="64KiB"),
        changed("ca", value={"configMap": "trust", "key": "bundle.pem"}),
        changed("networkPolicy", value={"enabled": False}),
        changed("networkPolicy", value={"cilium": True}),
        changed("identities", value=[{"name": "a", "clientId": "Gpu_1.a", "tokenSecret": "a", "tokenKey": "t"}]),
    ],
)
def test_what_is_right_is_taken_and_the_broker_takes_its_settings(values: dict[str, Any], tmp_path: Path) -> None:
    objects = of_values(values, tmp_path)
    settings = settings_of(objects, the(objects, "Deployment"), tmp_path)
    assert settings.client_id == values["identities"][0].get("clientId", "a")


def test_the_schema_knows_the_keys_that_the_broker_knows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["settings"]["properties"]) == set(broker_settings._KEYS) - OWN


@pytest.mark.parametrize("number", [16_384, 1_048_576])
def test_a_number_stays_one(number: int, tmp_path: Path) -> None:
    """Helm has read large ones as 1.048576e+06."""
    objects = of_values(changed("settings", "max_stream_buffer_bytes", value=number), tmp_path)
    assert settings_of(objects, the(objects, "Deployment"), tmp_path).max_stream_buffer_bytes == number


# The network.


def egress(objects: list[Manifest]) -> list[Manifest]:
    found: list[Manifest] = the(objects, "NetworkPolicy")["spec"]["egress"]
    return found


def blocks(rule: Manifest) -> list[str]:
    return [peer["ipBlock"]["cidr"] for peer in rule["to"] if "ipBlock" in peer]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_broker_reaches_what_its_settings_say_and_nothing_else(overlay: str, tmp_path: Path) -> None:
    for objects in everything(overlay):
        policy = the(objects, "NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for each in of_kind(objects, "Deployment"):
            assert (
                policy["podSelector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
            )
            settings = settings_of(objects, each, tmp_path)
            names, api, bus, publishers = policy["egress"]
            assert {port["port"] for port in names["ports"]} == {53}
            assert {port["port"] for port in api["ports"]} == {443, 6443}
            assert [port["port"] for port in bus["ports"]] == [settings.bus_url.port]
            assert blocks(publishers) == [str(network) for network in settings.allowed_cidrs]
            watched = [peer["namespaceSelector"] for peer in publishers["to"] if "namespaceSelector" in peer]
            assert watched == [{"matchLabels": {"kubernetes.io/metadata.name": "gpu"}}]
            assert publishers["ports"] == [{"port": 1024, "endPort": 65535, "protocol": "TCP"}]
            (scrapes,) = policy["ingress"]
            assert scrapes["ports"] == [{"port": settings.metrics_listen.port, "protocol": "TCP"}]
            assert scrapes["from"]


@pytest.mark.parametrize(
    ("url", "said", "cidrs", "port"),
    [
        ("https://203.0.113.10", [], ["203.0.113.10/32"], 443),
        ("https://203.0.113.10:8443/x", [], ["203.0.113.10/32"], 8443),
        ("https://[2001:db8::1]", [], ["2001:db8::1/128"], 443),
        ("https://[2001:db8::1]:8443", [], ["2001:db8::1/128"], 8443),
        ("https://router.example.net:9443", ["198.51.100.0/24"], ["198.51.100.0/24"], 9443),
    ],
)
def test_the_routers_address_comes_from_its_url(
    url: str, said: list[str], cidrs: list[str], port: int, tmp_path: Path
) -> None:
    values = changed("settings", "bus_url", value=url)
    values["networkPolicy"]["bus"] = {"cidrs": said}
    rule = egress(of_values(values, tmp_path))[2]
    assert blocks(rule) == cidrs
    assert [ipaddress.ip_network(each) for each in cidrs]
    assert rule["ports"] == [{"port": port, "protocol": "TCP"}]


def test_the_least_values_let_nobody_in(tmp_path: Path) -> None:
    objects = of_values(LEAST, tmp_path)
    kinds = sorted(each["kind"] for each in objects)
    assert kinds == sorted(["ConfigMap", "Deployment", "NetworkPolicy", "Role", "RoleBinding", "ServiceAccount"])
    policy = the(objects, "NetworkPolicy")["spec"]
    assert "Ingress" in policy["policyTypes"]
    assert "ingress" not in policy


def test_without_allowed_cidrs_the_network_lets_a_broker_to_the_watched_namespaces_alone(tmp_path: Path) -> None:
    (peer,) = egress(of_values(changed("settings", "allowed_cidrs", value=[]), tmp_path))[3]["to"]
    assert peer == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "here"}}}


def test_a_pod_monitor_finds_the_brokers_and_names_the_identity() -> None:
    for objects in everything("two"):
        monitor = the(objects, "PodMonitor")["spec"]
        for each in of_kind(objects, "Deployment"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert monitor["selector"]["matchLabels"].items() <= labels.items()
            assert IDENTITY in labels
        (endpoint,) = monitor["podMetricsEndpoints"]
        named = {each.get("targetLabel"): each.get("sourceLabels") for each in endpoint["relabelings"]}
        # As Prometheus writes a label of a pod.
        assert named["instance"] == [f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', IDENTITY)}"]
