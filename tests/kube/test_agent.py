"""The agent with a real API server as its source: the device has what is said there, whatever befalls the API."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from kube_rig import INSTANCES, NODES, Cluster, kura_instance, programs

from kura_shaper.tree.model import Handle
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Network

pytestmark = [pytest.mark.privileged, pytest.mark.kube]

NODE = "node-1"
ACME, BETA = 0x2A7, 0x2A8
PORT = 19_469


@pytest.fixture
def cluster(network: Network, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of this test's own, on the loopback of the node's namespace, where the agent can reach it."""
    found = programs()
    if found is None:
        pytest.skip("no kube-apiserver: scripts/kubernetes/install-apiserver builds it")
    directory = tmp_path / "cluster"
    directory.mkdir()
    made = Cluster(directory, found)
    with ExitStack() as stack:
        stack.callback(made.remove)
        made.start()
        made.service_account("agent")
        yield made


@contextmanager
def running(cluster: Cluster, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent by a service account that may read what an agent reads."""
    kubeconfig = directory / "kubeconfig"
    if not kubeconfig.exists():
        cluster.kubeconfig(kubeconfig, token=cluster.token("agent", "one"))
    settings = ("--region", "us-east", "--node", NODE, "--kubeconfig", str(kubeconfig), "--devices", "nic0")
    where = ("--state-dir", str(directory / "state"), "--node-file", str(directory / "disabled"))
    command = [sys.executable, "-m", "kura_shaper", "agent", *settings, *where, "--shape", "single"]
    with (directory / "agent.log").open("ab") as log:
        process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{PORT}", *options], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)


def until(condition: Callable[[], Any], *, seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def status() -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/statusz", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


def ceiling(network: Network, class_id: int) -> Rate | None:
    spec = network.read().classes.get(Handle(0x20, class_id))
    return spec.ceil if spec else None


def node(mbps: str, **annotations: str) -> dict[str, Any]:
    metadata = {"name": NODE, "annotations": {key.replace("__", "/"): value for key, value in annotations.items()}}
    return {"metadata": metadata, "status": {"capacity": {"tuist.dev/egress-mbps": mbps}}}


def test_the_device_follows_the_cluster(network: Network, cluster: Cluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as process:
        # Without a budget there is no tree and no cap, and that is said.
        cluster.create(INSTANCES, kura_instance("acme", ACME))
        until(lambda: status().get("reason") == "waiting for this node's budget")
        assert ceiling(network, ACME) is None
        cluster.create(NODES, node("3k"))
        until(lambda: ceiling(network, ACME) == Rate.parse("1500M"))
        assert status()["ready"]
        # Another ceiling, another tenant, another budget, and one that goes.
        cluster.patch(
            f"{INSTANCES}/kura-acme", {"spec": {"podAnnotations": {"kubernetes.io/egress-bandwidth": "700M"}}}
        )
        until(lambda: ceiling(network, ACME) == Rate.parse("700M"))
        cluster.create(INSTANCES, kura_instance("beta", BETA))
        until(lambda: ceiling(network, BETA) is not None)
        cluster.patch(f"{NODES}/{NODE}/status", {"status": {"capacity": {"tuist.dev/egress-mbps": "500"}}})
        until(lambda: ceiling(network, 0x3) == Rate.parse("500M"))
        cluster.delete(f"{INSTANCES}/kura-beta")
        until(lambda: ceiling(network, BETA) is None)
        # A bad instance is told of, keeps what it had, and costs nobody else anything.
        cluster.patch(
            f"{INSTANCES}/kura-acme", {"spec": {"podAnnotations": {"kubernetes.io/egress-bandwidth": "fast"}}}
        )
        until(lambda: status()["source"]["problems"])
        assert ceiling(network, ACME) == Rate.parse("500M")
        # Nor does the last one that goes leave an empty tree, which would hold nobody back.
        cluster.delete(f"{INSTANCES}/kura-acme")
        until(lambda: "1 tenants stay" in str(status()["source"]["problems"]))
        assert ceiling(network, ACME) == Rate.parse("500M")
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert ceiling(network, ACME) == Rate.parse("500M")


def test_without_the_api_the_last_good_state_stays_also_over_a_restart(
    network: Network, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.create(NODES, node("3k"))
    cluster.create(INSTANCES, kura_instance("acme", ACME))
    with running(cluster, tmp_path):
        until(lambda: ceiling(network, ACME) == Rate.parse("1500M"))
        until(lambda: (tmp_path / "state" / "last-good.json").exists())
        cluster.stop("apiserver")
        until(lambda: status()["source"]["valid"] is False)
        # Drift is mended all the same.
        subprocess.run(["tc", "qdisc", "del", "dev", "nic0", "root"], check=True)
        until(lambda: ceiling(network, ACME) == Rate.parse("1500M"))
    subprocess.run(["tc", "qdisc", "del", "dev", "nic0", "root"], check=True)
    with running(cluster, tmp_path):
        until(lambda: ceiling(network, ACME) == Rate.parse("1500M"))
        assert status()["source"]["valid"] is False
        cluster.start_apiserver()
        cluster.wait_ready()
        cluster.create(INSTANCES, kura_instance("beta", BETA))
        cluster.delete(f"{INSTANCES}/kura-acme")
        until(lambda: ceiling(network, ACME) is None, seconds=60)
        assert status()["source"]["valid"] is True
