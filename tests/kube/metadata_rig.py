"""A cluster with the definition of DynamoWorkerMetadata and none of it, for whoever follows it."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from kube_rig import Cluster, RefusedError, running_cluster

from kura_shaper.broker.directory import Timing

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import PATH

__all__ = ["GROUP", "QUICK", "WORKERS", "cluster", "running_cluster"]

WORKERS = PATH.format("kura")
GROUP = "/apis/rbac.authorization.k8s.io/v1/namespaces/kura"
QUICK = Timing(
    watch_least_s=10, watch_most_s=20, idle_margin_s=2, backoff_least_ns=50_000_000, backoff_most_ns=500_000_000
)
_CRD = Path(__file__).with_name("dwm_crd.yaml")


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """Return the cluster with the definition, and no metadata."""
    with suppress(RefusedError):  # it is there
        running_cluster.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(_CRD.read_text())
        )
    running_cluster.until(lambda: running_cluster.ask("GET", WORKERS))
    running_cluster.delete(WORKERS)
    return running_cluster
