"""A real API server and its etcd for the tests, and a proxy before it that breaks what a test wants broken.

They listen on the loopback, keep everything in a temporary directory, and end with the
session. The programs come from `scripts/kubernetes/install-apiserver`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kura_shaper.haproxy.binary import cache_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTANCES = "/apis/kura.tuist.dev/v1alpha1/namespaces/kura/kurainstances"
NODES = "/api/v1/nodes"
CLASS = "kura.tuist.dev/egress-class-id"
CEILING = "kubernetes.io/egress-bandwidth"
_CRD = Path(__file__).with_name("crd.yaml")
_READY_S = 90
_WRITERS = 4
_ROUND_S = 0.05


def programs() -> Path | None:
    """Return where kube-apiserver and etcd are, None where they are not."""
    found = cache_directory() / "kubernetes" / "bin"
    return found if (found / "kube-apiserver").exists() and (found / "etcd").exists() else None


def kura_instance(account: str, class_id: int, **spec: Any) -> dict[str, Any]:
    """Return a KuraInstance to create."""
    return {
        "apiVersion": "kura.tuist.dev/v1alpha1",
        "kind": "KuraInstance",
        "metadata": {"name": f"kura-{account}", "namespace": "kura", "annotations": {CLASS: f"1:{class_id:x}"}},
        "spec": {
            "accountHandle": account,
            "tenantID": account,
            "region": "us-east",
            "image": "kura:1",
            "publicHost": f"{account}.kura.example",
            "egressGuaranteedMbps": 25,
            "podAnnotations": {CEILING: "1500M"},
            **spec,
        },
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class RefusedError(Exception):
    """The API server refused what a test asked."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')[:300]}")
        self.status = status


class Cluster:
    """A real API server with RBAC, TLS and the KuraInstance definition. `admin` may do everything."""

    # What the server is told beside what it always is. Accounts would get no pods admitted: nothing makes their tokens.
    server_options: tuple[str, ...] = ("--bind-address", "127.0.0.1", "--disable-admission-plugins", "ServiceAccount")

    def __init__(self, directory: Path, bin_directory: Path, *, port: int = 0) -> None:
        self.directory, self._bin = directory, bin_directory
        self.port, self._etcd_port, self._etcd_peer_port = port or _free_port(), _free_port(), _free_port()
        self.admin, self.stranger = secrets.token_hex(16), secrets.token_hex(16)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}

    @property
    def certificate(self) -> Path:
        """What the server's certificate is checked with."""
        return self.directory / "certs" / "apiserver.crt"

    def start(self) -> None:
        """Return when the server serves KuraInstances."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL)
        key_file = self.directory / "sa.key"
        key_file.write_bytes(key.private_bytes(*encoding, serialization.NoEncryption()))
        tokens = self.directory / "tokens.csv"
        tokens.write_text(f'{self.admin},admin,admin,"system:masters"\n{self.stranger},stranger,stranger\n')
        etcd = f"http://127.0.0.1:{self._etcd_port}"
        peer = f"http://127.0.0.1:{self._etcd_peer_port}"
        self._commands["etcd"] = [
            *(str(self._bin / "etcd"), "--data-dir", str(self.directory / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", "--log-level", "error"),
        ]
        self._commands["apiserver"] = [
            *(str(self._bin / "kube-apiserver"), "--etcd-servers", etcd, "--cert-dir", str(self.directory / "certs")),
            *("--advertise-address", "127.0.0.1", "--secure-port", str(self.port), *self.server_options),
            *("--insecure-port", "0", "--authorization-mode", "RBAC", "--token-auth-file", str(tokens)),
            *("--service-cluster-ip-range", "10.0.0.0/24", "--endpoint-reconciler-type", "none", "--profiling=false"),
            *("--service-account-key-file", str(key_file), "--service-account-signing-key-file", str(key_file)),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
        ]
        self._run("etcd")
        self._run("apiserver")
        self.until(lambda: self.ask("GET", "/readyz", decode=False))
        self.create("/api/v1/namespaces", {"metadata": {"name": "kura"}})
        self.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(_CRD.read_text()))
        self.until(lambda: self.ask("GET", INSTANCES))

    def _run(self, name: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            # A session of its own: an interrupt at the terminal is for pytest, which stops them in order.
            self._running[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Return when it serves KuraInstances."""
        self.until(lambda: self.ask("GET", "/readyz", decode=False))
        self.until(lambda: self.ask("GET", INSTANCES))

    def until(self, ask: Any) -> None:
        """Ask until it is answered."""
        end = time.monotonic() + _READY_S
        while True:
            with suppress(OSError, RefusedError, http.client.HTTPException):
                ask()
                return
            for name, process in self._running.items():
                if process.poll() is not None:
                    log = (self.directory / f"{name}.log").read_text(errors="replace")
                    raise AssertionError(f"{name} ended:\n{log[-2000:]}")
            assert time.monotonic() < end, "the API server is not ready"
            time.sleep(_ROUND_S)  # nothing tells when it is

    def stop(self, *names: str) -> None:
        """Stop programs, all by default."""
        for name in names or ("apiserver", "etcd"):
            process = self._running.pop(name, None)
            if process:
                # It would wait up to a minute for watches to end.
                process.kill()
                process.wait()

    def remove(self) -> None:
        """Stop everything and leave nothing."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def restart(self) -> None:
        """Start the API server anew. It remembers no version that was before, so watches from there are gone."""
        self.stop("apiserver")
        self._run("apiserver")
        self.wait_ready()

    def start_apiserver(self) -> None:
        """Start it after `stop("apiserver")`; does not wait until it serves."""
        self._run("apiserver")

    def compact(self) -> None:
        """Let etcd forget every version but the newest, as the API server has it do every five minutes."""
        status = self._etcd("maintenance/status", {})
        self._etcd("kv/compaction", {"revision": status["header"]["revision"], "physical": True})

    def _etcd(self, call: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._etcd_port, timeout=30)
        try:
            connection.request("POST", f"/v3/{call}", json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, *, decode: bool = True, kind: str = "json") -> Any:
        """Ask as admin. Raises RefusedError."""
        trusted = ssl.create_default_context(cafile=str(self.certificate) if self.certificate.exists() else None)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=trusted, timeout=30)
        headers = {"Authorization": f"Bearer {self.admin}", "Content-Type": f"application/{kind}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RefusedError(answer.status, content)
        return json.loads(content) if decode else content

    def create(self, path: str, body: Any) -> Any:
        """Create an object."""
        return self.ask("POST", path, body)

    def create_many(self, path: str, bodies: Sequence[Any]) -> None:
        """Create objects over a few connections that stay open."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            parts = [bodies[start::_WRITERS] for start in range(_WRITERS)]
            list(pool.map(lambda part: self._create_each(path, part), parts))

    def _create_each(self, path: str, bodies: Sequence[Any]) -> None:
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=trusted, timeout=60)
        headers = {"Authorization": f"Bearer {self.admin}", "Content-Type": "application/json"}
        try:
            for body in bodies:
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                content = answer.read()
                if answer.status >= 300:
                    raise RefusedError(answer.status, content)
        finally:
            connection.close()

    def patch(self, path: str, body: Any) -> Any:
        """Merge into an object."""
        return self.ask("PATCH", path, body, kind="merge-patch+json")

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.ask("DELETE", path)

    def clear(self) -> None:
        """Delete all KuraInstances and nodes."""
        self.delete(INSTANCES)
        self.delete(NODES)

    def kubeconfig(self, path: Path, *, token: str, port: int = 0) -> Path:
        """Write how to reach the server as somebody, through another port if there is one."""
        server = {"server": f"https://127.0.0.1:{port or self.port}", "certificate-authority": str(self.certificate)}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "clusters": [{"name": "c", "cluster": server}],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )
        return path

    def service_account(self, name: str, *, may_read: bool = True) -> None:
        """Make a service account in namespace kura that may read what an agent reads, or nothing."""
        with suppress(RefusedError):  # it is there
            self.create("/api/v1/namespaces/kura/serviceaccounts", {"metadata": {"name": name}})
        if may_read:
            self.allow(name)

    def allow(self, name: str) -> None:
        """Let a service account read KuraInstances and nodes."""
        base = "/apis/rbac.authorization.k8s.io/v1"
        verbs = ["get", "list", "watch"]
        rules = [
            {"apiGroups": ["kura.tuist.dev"], "resources": ["kurainstances"], "verbs": verbs},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": verbs},
        ]
        subject = {"kind": "ServiceAccount", "name": name, "namespace": "kura"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
        self.create(f"{base}/clusterroles", {"metadata": {"name": name}, "rules": rules})
        binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
        self.create(f"{base}/clusterrolebindings", binding)

    def token(self, account: str, secret: str) -> str:
        """Return a token of a service account that is good while a secret is there, which is made for it."""
        self.create("/api/v1/namespaces/kura/secrets", {"metadata": {"name": secret}})
        bound = {"boundObjectRef": {"kind": "Secret", "apiVersion": "v1", "name": secret}}
        path = f"/api/v1/namespaces/kura/serviceaccounts/{account}/token"
        made: str = self.create(path, {"spec": bound})["status"]["token"]
        return made


_RUNNING = pytest.StashKey[Cluster]()


@pytest.fixture(scope="session")
def running_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Return a real cluster, one for the session, also where several modules have this fixture."""
    stash = request.config.stash
    if _RUNNING not in stash:
        found = programs()
        if found is None:
            pytest.skip("no kube-apiserver: scripts/kubernetes/install-apiserver builds it")
        made = Cluster(tmp_path_factory.mktemp("cluster"), found)
        request.config.add_cleanup(made.remove)
        made.start()
        stash[_RUNNING] = made
    return stash[_RUNNING]


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """Return the cluster without KuraInstances and nodes."""
    running_cluster.clear()
    return running_cluster


class FaultProxy:
    """Stands before a server and passes bytes on, until it is told to do worse. TLS goes through as it is."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.accepted = 0
        self.refused = 0
        self.stirred = asyncio.Event()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection that is open."""
        for writer in list(self._writers):
            writer.transport.abort()

    def refuse(self, *, refuse: bool = True) -> None:
        """Reset every connection that comes from now on, at once; or stop that."""
        self._refusing = refuse

    def hang(self, *, hang: bool = True) -> None:
        """Hold every byte back from now on, and keep connections open; or pass them on again."""
        if hang:
            self._passing.clear()
        else:
            self._passing.set()

    async def until(self, what: Any, *, limit_s: float = 30) -> None:
        """Return when something about its connections holds."""
        async with asyncio.timeout(limit_s):
            while not what():
                self.stirred.clear()
                await self.stirred.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refused += 1
            writer.transport.abort()
            self.stirred.set()
            return
        self.accepted += 1
        self.stirred.set()
        try:
            there = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        pumps = [self._pump(reader, there[1]), self._pump(there[0], writer)]
        tasks = {asyncio.create_task(pump) for pump in pumps}
        self._tasks |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, there[1]):
            end.transport.abort() if end.transport.is_closing() else end.close()
            self._writers.discard(end)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks -= tasks

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
