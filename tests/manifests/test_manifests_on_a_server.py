"""The manifests and the chart on a real API server: taken, refused, installed, and what the account may do there."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_tools import CHART, OVERLAYS, kustomized, run, tool

pytestmark = pytest.mark.slow

ACCOUNT = "system:serviceaccount:kura-shaper:kura-shaper"


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the path of a kubeconfig of a real API server that has the others' definitions."""
    sys.path.append(str(Path(__file__).parents[1] / "kube"))
    rig = pytest.importorskip("kube_rig")
    programs = rig.programs()
    if programs is None:
        pytest.skip("no Kubernetes API server; scripts/kubernetes/install-apiserver brings it")
    directory = tmp_path_factory.mktemp("cluster")
    cluster = rig.Cluster(directory, programs)
    try:
        cluster.start()
        server = {"server": f"https://127.0.0.1:{cluster.port}", "certificate-authority": str(cluster.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": cluster.admin}}],
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        definitions = Path(__file__).with_name("definitions.yaml")
        run(tool("kubectl"), "--kubeconfig", path, "apply", "--filename", definitions)
        established = ("wait", "--for=condition=Established", "--timeout=30s", "--filename", definitions)
        run(tool("kubectl"), "--kubeconfig", path, *established)
        run(tool("kubectl"), "--kubeconfig", path, "create", "namespace", "kura-shaper")
        _until_explained(path, "podmonitors.spec", "ciliumnodeconfigs.spec", "kurainstances.spec")
        yield path
    finally:
        cluster.stop()


def _until_explained(kubeconfig: Path, *fields: str) -> None:
    """A kind is there before its schema is, by which kubectl finds a field that nobody knows."""
    end = time.monotonic() + 30
    while not all(kubectl(kubeconfig, "explain", each, check=False) for each in fields):
        assert time.monotonic() < end, "the schemas are not published"
        time.sleep(0.2)


def kubectl(kubeconfig: Path, *words: str, stdin: str | None = None, check: bool = True) -> str:
    """Return what kubectl says; "" where it may fail and did."""
    done = run(tool("kubectl"), "--kubeconfig", kubeconfig, *words, stdin=stdin, check=check)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_taken(kubeconfig: Path, overlay: str) -> None:
    words = ("apply", "--dry-run=server", "--validate=true", "--filename", "-")
    assert "daemonset.apps/kura-shaper-us-east" in kubectl(kubeconfig, *words, stdin=kustomized(f"overlays/{overlay}"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory: 256Mi", "memory: 256Mibi"),
        ("mountPropagation: HostToContainer", "mountPropagation: HostToPod"),
        ("configMap:\n          name", "configMapp:\n          name"),
        ("operator: In", "operator: Within"),
        ("targetLabel", "targetLable"),
    ],
)
def test_what_is_wrong_is_refused(kubeconfig: Path, old: str, new: str) -> None:
    wrong = kustomized("overlays/canary").replace(old, new)
    assert wrong != kustomized("overlays/canary")
    assert not kubectl(kubeconfig, "apply", "--dry-run=server", "--filename", "-", stdin=wrong, check=False)


def test_the_account_may_do_what_the_agent_does_and_nothing_else(kubeconfig: Path) -> None:
    kubectl(kubeconfig, "apply", "--filename", "-", stdin=kustomized("base/access"))

    def may(*words: str) -> bool:
        return kubectl(kubeconfig, "auth", "can-i", f"--as={ACCOUNT}", *words, check=False).strip() == "yes"

    for verb in ("get", "list", "watch"):
        assert may(verb, "kurainstances.kura.tuist.dev", "--namespace=kura")
        assert may(verb, "nodes")
    for denied in (
        ("list", "kurainstances.kura.tuist.dev", "--all-namespaces"),
        ("update", "kurainstances.kura.tuist.dev", "--namespace=kura"),
        ("list", "secrets", "--namespace=kura"),
        ("list", "pods", "--namespace=kura"),
        ("patch", "nodes"),
        ("create", "pods", "--namespace=kura-shaper"),
    ):
        assert not may(*denied), denied


def test_helm_installs_upgrades_and_uninstalls(kubeconfig: Path) -> None:
    values = (
        *("--values", CHART / "ci" / "all-values.yaml", "--set", "namespace.create=false"),
        *("--set", "instancesNamespace=default"),
    )
    where = ("--kubeconfig", kubeconfig, "--namespace", "released")
    kubectl(kubeconfig, "create", "namespace", "released")
    # The access that another test made belongs to nobody's release.
    kubectl(kubeconfig, "delete", "clusterrole,clusterrolebinding", "kura-shaper", "--ignore-not-found")
    run(tool("helm"), "install", "kura-shaper", CHART, *where, *values, "--set", "observe=true")
    described = ("--namespace", "released", "get", "daemonset", "kura-shaper-us-east", "--output", "yaml")
    assert "KURA_SHAPER_OBSERVE" in kubectl(kubeconfig, *described)
    run(tool("helm"), "upgrade", "kura-shaper", CHART, *where, *values)
    found: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, *described))
    assert "KURA_SHAPER_OBSERVE" not in str(found)
    run(tool("helm"), "uninstall", "kura-shaper", *where)
    assert "kura-shaper" not in kubectl(kubeconfig, "--namespace", "released", "get", "daemonsets,configmaps")
