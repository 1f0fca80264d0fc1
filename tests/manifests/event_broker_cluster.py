"""A real API server with the namespaces and kinds of brokers and workers, for the tests of the broker's manifests."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from manifest_tools import kustomized, run, tool

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("kube", "unit")]
from dwm import channel, resource
from kube_rig import Cluster, running_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["running_cluster"]  # a fixture

KUBE = Path(__file__).parents[1] / "kube"
NAMESPACES = ("event-broker", "gpu", "monitoring", "released")
KIND = "dynamoworkermetadatas.nvidia.com"


@pytest.fixture(scope="module")
def cluster(running_cluster: Cluster) -> Cluster:
    """Return a real cluster that has the kinds, and the namespaces of brokers and workers."""
    path = kubeconfig(running_cluster)
    for definitions in (Path(__file__).with_name("definitions.yaml"), KUBE / "dwm_crd.yaml"):
        kubectl(running_cluster, "apply", "--filename", str(definitions))
        kubectl(running_cluster, "wait", "--for=condition=Established", "--timeout=30s", "--filename", str(definitions))
    there = kubectl(running_cluster, "get", "namespaces", "--output", "name")
    for name in NAMESPACES:
        if f"namespace/{name}\n" not in there:
            kubectl(running_cluster, "create", "namespace", name)
    end = time.monotonic() + 30
    while not kubectl(running_cluster, "explain", "podmonitors.spec", check=False):
        assert time.monotonic() < end, f"the schemas are not published: {path}"
        time.sleep(0.2)
    return running_cluster


def kubeconfig(cluster: Cluster) -> Path:
    return cluster.kubeconfig(cluster.directory / "admin.kubeconfig", token=cluster.admin)


def kubectl(cluster: Cluster, *words: str, stdin: str | None = None, check: bool = True) -> str:
    """Return what kubectl says; "" where it may fail and did."""
    done = run(tool("kubectl"), "--kubeconfig", kubeconfig(cluster), *words, stdin=stdin, check=check)
    return done.stdout if done.returncode == 0 else ""


def helm(cluster: Cluster, *words: str | Path) -> None:
    run(tool("helm"), *words, "--kubeconfig", kubeconfig(cluster))


def as_of_old(text: str) -> str:
    """Return manifests without what a server of 1.20 does not have: kubernetes-validate is asked about these."""
    return text.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n").replace("endPort: 65535", "")


@pytest.fixture
def access(cluster: Cluster) -> None:
    """Apply account, Roles and NetworkPolicy as they are."""
    kubectl(cluster, "apply", "--filename", "-", stdin=as_of_old(kustomized("event-broker/access")))


@pytest.fixture
def worker(cluster: Cluster) -> Iterator[None]:
    """Let a worker advertise a publisher."""
    made = resource({"k": channel("tcp://10.244.1.7:41235")}, name="w0", namespace="gpu")
    del made["metadata"]["resourceVersion"]
    kubectl(cluster, "apply", "--filename", "-", stdin=json.dumps(made))
    yield
    kubectl(cluster, "delete", KIND, "--all", "--namespace=gpu")
