"""The chart, by a real helm: what it renders is what Kustomize renders, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from manifest_tools import CHART, DAEMONSET, Manifest, helm_rendered, kustomized, manifests, of_kind, run, tool

from kura_shaper import __version__

if TYPE_CHECKING:
    from pathlib import Path

EVERYTHING = ("--values", str(CHART / "ci" / "all-values.yaml"))
LEAST = {
    "image": {"repository": "registry.example.com/agent", "tag": "1.2.3"},
    "pools": [{"region": "us-east", "pool": "kura-us-east"}],
}


def comparable(objects: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    """Return objects by kind and name, without what either tool adds to roll out a changed setting."""
    made = {}
    for each in objects:
        text = re.sub(r'"kura-shaper-[a-z0-9]{10}"', '"kura-shaper"', json.dumps(each))
        plain = json.loads(text)
        if plain["kind"] == "DaemonSet":
            plain["spec"]["template"]["metadata"]["annotations"].pop("checksum/settings", None)
            (container,) = plain["spec"]["template"]["spec"]["containers"]
            container["env"].sort(key=lambda variable: variable["name"])
        if plain["kind"] == "ConfigMap":
            plain["data"] = {
                name: json.loads(data) if name.endswith(".json") else yaml.safe_load(data)
                for name, data in plain["data"].items()
            }
        made[plain["kind"], plain["metadata"]["name"]] = plain
    assert len(made) == len(objects)
    return made


@pytest.mark.parametrize(
    ("overlay", "options"), [("all", ()), ("observe", ("--set", "observe=true,bandwidthManager.disable=false"))]
)
def test_it_renders_what_kustomize_renders(overlay: str, options: tuple[str, ...]) -> None:
    ours = comparable(manifests(helm_rendered(*EVERYTHING, *options)))
    theirs = comparable(manifests(kustomized(f"overlays/{overlay}")))
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        assert each == theirs[name], name


def test_lint() -> None:
    run(tool("helm"), "lint", "--strict", CHART, *EVERYTHING)


def refused(values: dict[str, Any], directory: Path) -> str:
    """Return helm's words about values that it does not take, "" when it takes them."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(tool("helm"), "template", "kura-shaper", CHART, "--values", path, check=False)
    return done.stderr if done.returncode else ""


def test_the_least_values_are_taken_and_open_nothing(tmp_path: Path) -> None:
    assert refused(LEAST, tmp_path) == ""
    objects = manifests(helm_rendered("--values", str(tmp_path / "values.yaml")))
    kinds = sorted(each["kind"] for each in objects)
    assert kinds == sorted(
        ["ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet"]
    )
    (settings,) = of_kind(objects, "ConfigMap")
    assert yaml.safe_load(settings["data"]["agent.yaml"])["listen"] == "127.0.0.1:9469"
    assert "KURA_SHAPER_LISTEN" not in json.dumps(objects)


@pytest.mark.case("F-76")
@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"image": {"repository": "registry.example.com/agent", "tag": "latest"}}, "/image/tag"),
        ({"image": {"repository": "registry.example.com/agent", "tag": "1.2"}}, "/image/tag"),
        ({"image": {"repository": "registry.example.com/agent", "tag": "stable"}}, "/image/tag"),
        ({"image": {"repository": "registry.example.com/agent", "tag": ""}}, "/image/tag"),
        ({"image": {"repository": "registry.example.com/agent:latest", "tag": "1.2.3"}}, "/image/repository"),
        ({"image": {"repository": "", "tag": "1.2.3"}}, "/image/repository"),
        ({"image": {"repository": "registry.example.com/agent", "digest": "sha256:12"}}, "/image/digest"),
        ({"pools": []}, "/pools"),
        ({"pools": [{"region": "us-east", "pool": ""}]}, "/pools/0/pool"),
        ({"pools": [{"region": "us-east"}]}, "/pools/0"),
        ({"pools": [{"region": "a", "pool": "p"}, {"region": "a", "pool": "q"}]}, "a region stands there twice"),
        ({"pools": [{"region": "a", "pool": "p", "env": {"KURA_SHAPER_LISTEN": "0.0.0.0:1"}}]}, "KURA_SHAPER_LISTEN"),
        ({"nodeSelectors": {}}, "nodeSelectors"),
        ({"settings": {"ceiling": "1G"}}, "ceiling"),
        ({"settings": {"budget": "1.5 Gbit"}}, "/settings/budget"),
        ({"settings": {"listen": "0.0.0.0:9469"}}, "/settings/listen"),
        ({"settings": {"shape": "mq"}}, "/settings/shape"),
        ({"observe": "yes"}, "/observe"),
        ({"maxUnavailable": 0}, "/maxUnavailable"),
        ({"monitoring": {"enabled": True}}, "/hostPolicy"),
    ],
)
def test_what_would_go_wrong_is_refused(change: dict[str, Any], about: str, tmp_path: Path) -> None:
    assert about in refused({**LEAST, **change}, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"repository": "registry.example.com:5000/a/b", "tag": "v1.2.3-rc.1"}},
        {"image": {"repository": "registry.example.com/a", "digest": f"sha256:{'0a' * 32}"}},
        {"monitoring": {"enabled": True, "portIsKeptFromTheWorld": True}},
        {"monitoring": {"enabled": True}, "hostPolicy": {"enabled": True}},
        {"settings": {"budget": "1.5G", "devices": ["eth0"]}},
        {"pools": [{"region": "a", "pool": "p", "env": {"KURA_SHAPER_BUDGET": "950M"}}]},
    ],
)
def test_what_is_right_is_taken(change: dict[str, Any], tmp_path: Path) -> None:
    assert refused({**LEAST, **change}, tmp_path) == ""


def test_an_image_by_digest_has_no_tag(tmp_path: Path) -> None:
    digest = f"sha256:{'0a' * 32}"
    values = {**LEAST, "image": {"repository": "registry.example.com/a", "digest": digest}}
    assert refused(values, tmp_path) == ""
    (daemonset,) = of_kind(manifests(helm_rendered("--values", str(tmp_path / "values.yaml"))), "DaemonSet")
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["image"] == f"registry.example.com/a@{digest}"


def test_mq_grants_what_the_component_grants(tmp_path: Path) -> None:
    component = (DAEMONSET / "components" / "mq" / "kustomization.yaml").read_text()
    added = re.findall(r"add/-, value: (\w+)}", component)
    objects = manifests(helm_rendered(*EVERYTHING, "--set", "mq=true"))
    for daemonset in of_kind(objects, "DaemonSet"):
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]
        assert container["securityContext"]["capabilities"]["add"] == ["NET_ADMIN", "BPF", "PERFMON", *added]
        assert {"name": "KURA_SHAPER_SHAPE", "value": "auto"} in container["env"]


@pytest.mark.parametrize(
    ("copy", "original"),
    [("kura-shaper.json", "dashboards/kura-shaper.json"), ("rules.yaml", "alerts/prometheusrule.yaml")],
)
def test_the_charts_copies_are_the_originals(copy: str, original: str) -> None:
    found = yaml.safe_load((DAEMONSET / original).read_text())
    assert yaml.safe_load((CHART / "files" / copy).read_text()) == found.get("spec", found), (
        "scripts/kubernetes/sync-monitoring copies them"
    )


def test_the_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    pool = yaml.safe_load((DAEMONSET / "base" / "pool" / "kustomization.yaml").read_text())
    assert pool["images"][0]["newTag"] == __version__


def test_whoever_installs_is_told_what_comes_next() -> None:
    words = ("install", "kura-shaper", CHART, "--namespace", "kura-shaper", "--dry-run=client", *EVERYTHING)
    told = run(tool("helm"), *words).stdout.partition("NOTES:")[2]
    assert "kubectl -n kura-shaper get daemonset,pods" in told
    assert "break-glass.sh" in told
