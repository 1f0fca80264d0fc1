"""A broker with what its pod has: the account's rights, the mounted files, no capability, nothing to write to."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from event_broker_cluster import access, cluster, kubectl, running_cluster, worker
from event_broker_manifests import of_bundle
from manifest_tools import Manifest, the

if TYPE_CHECKING:
    from kube_rig import Cluster

__all__ = ["access", "cluster", "running_cluster", "worker"]  # fixtures

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

UID = 65532
_PATIENCE_S = 40
# As a container has it: nothing can be written to, and the credentials are where the manifests mount them.
CONFINED = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /run
cp -aT "$1" /run
mount -o remount,ro /run
mount -o remount,bind,ro /
shift
exec "$@"
"""


class Pod:
    """A broker in a process that has what its pod would have, and no more."""

    def __init__(self, cluster: Cluster, directory: Path, *, objects: list[Manifest]) -> None:
        self._port = _free_port()
        files = directory / "run"
        own, credentials = (files / "secrets" / name for name in ("kubernetes.io/serviceaccount", "event-broker"))
        for each in (own, credentials):
            each.mkdir(parents=True)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = cluster.create("/api/v1/namespaces/event-broker/serviceaccounts/event-broker/token", asked)
        (own / "token").write_text(made["status"]["token"])
        shutil.copy(cluster.certificate, own / "ca.crt")
        (own / "namespace").write_text("event-broker")
        (credentials / "token").write_text("the-routers-token\n")
        shutil.copy(cluster.certificate, credentials / "ca.pem")
        settings = yaml.safe_load(the(objects, "ConfigMap")["data"]["config.yaml"])
        # Another port, since this is the machine's network; and a router that refuses at once.
        settings |= {"metrics_listen": f"127.0.0.1:{self._port}", "bus_url": f"https://127.0.0.1:{_free_port()}"}
        (files / "config.yaml").write_text(yaml.safe_dump(settings))
        for each in files.rglob("*"):
            each.chmod(0o755 if each.is_dir() else 0o440)
            os.chown(each, 0, UID)
        self.log = (directory / "log").open("w+")
        confined = ("unshare", "--mount", "sh", "-c", CONFINED, "sh", str(files))
        account = (f"--reuid={_account()}", f"--regid={UID}", "--clear-groups")
        rights = ("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
        (args,) = [each["args"] for each in the(objects, "Deployment")["spec"]["template"]["spec"]["containers"]]
        words = [word.replace("/etc/event-broker/", "/run/") for word in args]
        environment = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "LANG")},
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(cluster.port),
            "POD_NAMESPACE": "event-broker",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/",
        }
        self.process = subprocess.Popen(
            [*confined, "setpriv", *account, *rights, sys.executable, "-m", "kura_shaper", *words],
            stdout=self.log,
            stderr=self.log,
            env=environment,
            cwd=Path(__file__).parents[2],
        )

    def ask(self, path: str) -> tuple[int, str]:
        """Return its answer; 0 when there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def until(self, what: Any) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not what():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{self.process.poll()}: {self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self.log.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _account() -> int:
    """Return the pod's uid; or 0, without capabilities, where this tree can be read by root alone."""
    for path in (__file__, sys.executable, yaml.__file__):
        words = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "test", "-r", path)
        if subprocess.run(words, check=False).returncode:
            return 0
    return UID


@pytest.mark.usefixtures("access", "worker")
def test_a_broker_runs_with_what_its_pod_has(cluster: Cluster, tmp_path: Path) -> None:
    """As uid 65532, without a capability, with nothing to write to, and with the account's own rights."""
    with ExitStack() as stack:
        pod = Pod(cluster, tmp_path, objects=of_bundle("one"))
        stack.callback(pod.close)
        pod.until(lambda: pod.ask("/readyz")[0] == 200)
        assert pod.ask("/healthz")[0] == 200
        metrics = pod.ask("/metrics")[1]
        assert "continuum_event_broker_metadata_publishers 1.0" in metrics
        # It has its token and its certificates, and dialled.
        pod.until(lambda: 'sessions_total{outcome="dial_failed"} 0.0' not in pod.ask("/metrics")[1])
        assert 'credential_reloads_total{result="failed"} 0.0' in pod.ask("/metrics")[1]
        (confined,) = [line for line in _status(pod.process.pid) if line.startswith("CapBnd")]
        assert int(confined.split()[1], 16) == 0
        pod.process.send_signal(signal.SIGTERM)
        assert pod.process.wait(20) == 0, pod.said()
        assert "the-routers-token" not in pod.said()


@pytest.mark.usefixtures("access", "worker")
def test_without_its_role_a_broker_is_not_ready_and_says_where(cluster: Cluster, tmp_path: Path) -> None:
    kubectl(cluster, "delete", "rolebinding", "event-broker", "--namespace=gpu")
    with ExitStack() as stack:
        pod = Pod(cluster, tmp_path, objects=of_bundle("one"))
        stack.callback(pod.close)
        pod.until(lambda: "metadata_failed" in pod.said())
        assert '"namespace": "gpu"' in pod.said()
        assert pod.ask("/readyz")[0] == 503
        assert 'sessions_total{outcome="dial_failed"} 0.0' in pod.ask("/metrics")[1]


def _status(pid: int) -> list[str]:
    """Return what the kernel says of the broker, which took the place of the shell that confined it."""
    return Path(f"/proc/{pid}/status").read_text().splitlines()
