"""What Kustomize and Helm make of the event broker's manifests, and what the broker makes of its settings in them."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import yaml
from manifest_tools import DAEMONSET, Manifest, kustomized, manifests, of_kind, run, tool

from kura_shaper.broker.settings import BrokerSettings, load_settings

BUNDLE = DAEMONSET / "event-broker"
CHART = DAEMONSET / "helm" / "event-broker"
OVERLAYS = ("one", "two")
IDENTITY = "kura-shaper/identity"
# What the chart knows by itself.
OWN = {"client_id", "kubernetes_namespace", "token_file", "token_env", "ca_bundle", "metrics_listen"}
# Objects of others, whose schemas kubernetes-validate does not have; a real server is asked about these.
CUSTOM = {"PodMonitor", "PrometheusRule", "CiliumNetworkPolicy"}
LEAST: dict[str, Any] = {
    "image": {"repository": "registry.example.com/event-broker", "tag": "1.2.3"},
    "identities": [{"name": "a", "tokenSecret": "a"}],
    "settings": {
        "bus_url": "https://203.0.113.10",
        "dynamo_namespaces": ["dynamo"],
        "allowed_cidrs": ["10.244.0.0/16"],
    },
    "networkPolicy": {"apiServer": {"cidrs": ["10.96.0.1/32"]}},
}


def changed(*path: str, value: Any) -> dict[str, Any]:
    """Return the least values with one more, or another one."""
    made: dict[str, Any] = json.loads(json.dumps(LEAST))
    within = made
    for key in path[:-1]:
        within = within.setdefault(key, {})
    within[path[-1]] = value
    return made


@functools.cache
def of_chart(*options: str) -> str:
    """Return what Helm makes of the chart with these options."""
    return run(tool("helm"), "template", "event-broker", CHART, "--namespace", "event-broker", *options).stdout


def like(overlay: str, *options: str) -> list[Manifest]:
    """Return what Helm makes of the values that stand for an overlay."""
    return manifests(of_chart("--values", str(CHART / "ci" / f"{overlay}-values.yaml"), *options))


def of_bundle(overlay: str) -> list[Manifest]:
    return manifests(kustomized(f"event-broker/overlays/{overlay}"))


def with_component(overlay: str, component: str, directory: Path) -> list[Manifest]:
    """Return what Kustomize makes of an overlay with one component more."""
    bundle = Path(os.path.relpath(BUNDLE, directory.resolve()))
    whole = {"resources": [str(bundle / "overlays" / overlay)], "components": [str(bundle / "components" / component)]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    return manifests(run(tool("kubectl"), "kustomize", directory).stdout)


def of_values(values: dict[str, Any], directory: Path) -> list[Manifest]:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return manifests(run(tool("helm"), "template", "x", CHART, "--namespace", "here", "--values", path).stdout)


def refused(values: dict[str, Any], directory: Path, *options: str) -> str:
    """Return helm's words about values that it does not take, "" when it takes them."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(tool("helm"), "template", "x", CHART, "--values", path, *options, check=False)
    return done.stderr if done.returncode else ""


def comparable(objects: list[Manifest]) -> dict[tuple[str, str, str], Manifest]:
    """Return objects by kind, namespace and name, without what either tool adds to roll out a changed setting."""
    made = {}
    for each in objects:
        plain = json.loads(re.sub(r'"(event-broker-gpu-a-\d)-[a-z0-9]{10}"', r'"\1"', json.dumps(each)))
        if plain["kind"] == "Deployment":
            plain["spec"]["template"]["metadata"].pop("annotations", None)
        if plain["kind"] == "ConfigMap":
            # Python's own reader of YAML would take a second for a dashboard.
            plain["data"] = {
                name: json.loads(data) if name.endswith(".json") else yaml.safe_load(data)
                for name, data in plain["data"].items()
            }
        made[plain["kind"], plain["metadata"].get("namespace", ""), plain["metadata"]["name"]] = plain
    assert len(made) == len(objects)
    return made


def settings_of(objects: list[Manifest], deployment: Manifest, directory: Path) -> BrokerSettings:
    """Return what the broker of a Deployment makes of its ConfigMap and its environment."""
    pod = deployment["spec"]["template"]["spec"]
    (name,) = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "settings"]
    (found,) = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"] == name]
    path = directory / "config.yaml"
    path.write_text(found["data"]["config.yaml"])
    (variable,) = pod["containers"][0]["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    return load_settings(path, {variable["name"]: deployment["metadata"]["namespace"]})


def identity_of(deployment: Manifest) -> str:
    found: str = deployment["spec"]["selector"]["matchLabels"][IDENTITY]
    return found


def everything(overlay: str) -> list[list[Manifest]]:
    return [of_bundle(overlay), like(overlay)]
