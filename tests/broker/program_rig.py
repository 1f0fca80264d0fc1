"""The command as a process, with a router, an API server over HTTP and a publisher around it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from bus_rig import TOKEN, Publisher, RouterRig, Script, authority, pause

from kura_shaper.tenants.kubernetes.fake import FakeApi

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from dwm import PATH as PATH
from dwm import channel, resource
from kubernetes_rig import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ROOT = Path(__file__).parents[2]


class Program:
    """A broker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, port: int) -> None:
        self.process, self._log, self._port = process, log, port
        self.router: RouterRig
        self.publisher: Publisher
        self.api: FakeApi

    @property
    def log(self) -> str:
        """Everything that it logged."""
        return self._log.read_text()

    async def get(self, page: str) -> tuple[int, str]:
        """Return status and text of a page."""
        return await asyncio.to_thread(self._get, page)

    def _get(self, page: str) -> tuple[int, str]:
        # A variable of the environment must not send this to a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._port}{page}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    async def has(self, page: str, status: int) -> None:
        """Return when a page has a status."""
        while True:
            try:
                if (await self.get(page))[0] == status:
                    return
            except OSError:  # not there yet
                assert self.process.returncode is None, self.log
            await pause()

    async def ended(self) -> int:
        """Return the status that it ends with."""
        return await self.process.wait()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


# Makes the command that reaches the API server at an address in a way of its own.
Reach = Callable[[Path, list[str], str], list[str]]


def by_kubeconfig(directory: Path, command: list[str], address: str) -> list[str]:
    """Reach the API server as a person does."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": address, "certificate-authority": str(directory / "ca.pem")}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (directory / "kubeconfig").write_text(json.dumps(config))
    return [*command, "--kubeconfig", str(directory / "kubeconfig")]


def as_pod(directory: Path, command: list[str], address: str) -> list[str]:
    """Reach the API server as a pod does, by files that only this process sees where every pod has them. Needs root."""
    account = directory / "account"
    account.mkdir()
    (account / "token").write_text("of the account")
    (account / "ca.crt").write_bytes(authority().cert_pem.bytes())
    host, _, port = address.removeprefix("https://").partition(":")
    script = (
        "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io && "
        'cp -r "$1" /run/secrets/kubernetes.io/serviceaccount && shift && exec "$@"'
    )
    variables = [f"KUBERNETES_SERVICE_HOST={host}", f"KUBERNETES_SERVICE_PORT={port}"]
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(account), "env", *variables, *command]


@asynccontextmanager
async def program(
    directory: Path,
    *,
    script: Script | None = None,
    reach: Reach = by_kubeconfig,
    publisher: Publisher | None = None,
    level: str = "debug",
    options: Sequence[str] = (),
    **changes: Any,
) -> AsyncIterator[Program]:
    """Run the command with a router, an API server and a publisher that is advertised."""
    router, api, port = RouterRig(script), FakeApi("DynamoWorkerMetadataList"), free_port()
    publisher = publisher or Publisher()
    await router.start()
    await publisher.start()
    api.put("w0", resource({"k": channel(publisher.endpoint)}, name="w0"), namespace="gpu")
    (directory / "token").write_text(TOKEN)
    (directory / "ca.pem").write_bytes(authority().cert_pem.bytes())
    told = {
        "bus_url": f"https://127.0.0.1:{router.port}/tunnel",
        "client_id": "gpu-a-1",
        "kubernetes_namespace": "gpu",
        "dynamo_namespaces": ["dynamo"],
        "token_file": str(directory / "token"),
        "ca_bundle": str(directory / "ca.pem"),
        "allowed_cidrs": ["127.0.0.0/8"],
        "metrics_listen": f"127.0.0.1:{port}",
        "drain_deadline": "20s",
    } | changes
    (directory / "config.yaml").write_text(yaml.safe_dump(told))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("127.0.0.1").configure_cert(context)
    command = [sys.executable, "-m", "kura_shaper", "--log-level", level, "event-broker"]
    async with served(api, certificate=context) as address:
        line = reach(directory, [*command, "--config", str(directory / "config.yaml"), *options], address)
        with (directory / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *line, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
        made = Program(process, directory / "log", port)
        made.router, made.publisher, made.api = router, publisher, api
        try:
            yield made
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await publisher.stop()
            await router.stop()
