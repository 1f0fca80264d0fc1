"""A gateway with its tenants on one machine: real HAProxy, real TLS, small servers, and nothing left behind.

Everything that is a process lives in anonymous namespaces (network, mount, process),
which end when their first process does; that one waits for the end of its input, so
they end with this test process, however it ends. The servers are threads of this
process whose sockets were made inside.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from gateway_ends import serve, serve_h2c, serve_http1, serve_peer

from kura_shaper.haproxy.binary import HaproxyBinary, HaproxyMissingError, cache_directory, find_haproxy
from kura_shaper.haproxy.options import GatewayOptions, VersionTooOldError
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.write import write_generation
from kura_shaper.lab.isolation import inside
from kura_shaper.tenants.document import Backends, Endpoint, Tenant, TenantsDocument
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

# The branches that the gateway is made for; scripts/setup brings both.
VERSIONS = ("3.0", "3.2")
RUN_DIRECTORY = "/mnt"
HTTPS_PORT, PEER_PORT = 443, 7443
SLOW_CEILING = Rate.parse("40M")
_MARK = re.compile(r"fwmark:(0x[0-9a-f]+)")


def _tenant(slot: int, name: str, *hosts: str, class_id: int, **changes: Any) -> Tenant:
    http, grpc, peer = (Endpoint("127.0.0.1", base + slot) for base in (4000, 5000, 6000))
    backends = Backends(http=http, grpc=grpc, peer=peer)
    tenant = Tenant(name, class_id, Rate(0), Rate.parse("10G"), hosts, (f"peer.{name}.kura.test",), (), backends)
    return replace(tenant, **changes)


_RANGES = (ip_network("127.0.0.9"), ip_network("::1"))
ACME = _tenant(1, "acme", "acme.kura.test", "acme.cache.test", class_id=0x2A7, ceiling=SLOW_CEILING)
BETA = _tenant(2, "beta", "beta.kura.test", class_id=0x100)
# Its class sets the highest bit of the mark.
GUARDED = _tenant(3, "guarded", "guarded.kura.test", class_id=0xFFFE, client_cidrs=_RANGES)
DOCUMENT = TenantsDocument("test", (ACME, BETA, GUARDED))


def why_not_here() -> str:
    """Return why these tests can't run on this machine, "" when they can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("unshare", "nsenter", "ip", "ss", "mount", "curl"):
        if shutil.which(program) is None:
            return f"needs {program}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "needs namespaces"


def haproxy_of(version: str) -> HaproxyBinary:
    """Return the HAProxy of a branch, from the cache or the one that is found anyway; without one, skip the test."""
    cached = str(cache_directory() / f"haproxy-{version}" / "bin" / "haproxy")
    for environ in ({**os.environ, "KURA_SHAPER_HAPROXY": cached}, os.environ):
        with suppress(HaproxyMissingError, VersionTooOldError):
            binary = find_haproxy(environ)
            if binary.version[:2] == tuple(map(int, version.split("."))):
                return binary
    pytest.skip(f"no HAProxy {version} on this machine: scripts/setup brings it")


class Namespace:
    """Anonymous namespaces, held by a process that ends when `close` or the end of this process ends its input."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"ready\n")
        self._holder.stdin.flush()
        self._holder.stdout.readline()
        self._path = f"/proc/{self._holder.pid}/ns"
        self.network = Path(self._path, "net")
        # With loopback's usual 64 KiB, a write of 16 KiB waits 200 ms for the rest of its segment.
        self.run("ip", "link", "set", "lo", "mtu", "1500", "up")
        # HAProxy's sockets go here: root's other directories may be closed to the account it runs as.
        self.run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", RUN_DIRECTORY)

    @property
    def root(self) -> Path:
        """The file system as it is seen inside."""
        return Path(f"/proc/{self._holder.pid}/root")

    def command(self, *words: str) -> list[str]:
        """Return the command that runs the words inside."""
        doors = (f"--net={self._path}/net", f"--mount={self._path}/mnt", f"--pid={self._path}/pid_for_children")
        return ["nsenter", *doors, *words]

    def run(self, *words: str) -> str:
        """Run a program inside and return its output."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=20).stdout

    def spawn(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in this network, as a child of this process that dies with it."""
        command = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={self.network}", *words]
        return subprocess.Popen(command, **options)

    def new_socket(self, family: socket.AddressFamily, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Return a socket of this network."""
        with inside(self.network):
            return socket.socket(family, kind)

    def listen(self, endpoint: Endpoint) -> socket.socket:
        """Return a socket that listens inside."""
        listener = self.new_socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((endpoint.host, endpoint.port))
        listener.listen(64)
        return listener

    def close(self) -> None:
        """End every process inside, and with the last of them the namespaces."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(timeout=10)
        assert self._holder.stdout is not None
        self._holder.stdout.close()


@dataclass(frozen=True, slots=True)
class GatewayRig:
    """A running gateway, and the means to be its client: on its own machine, or on another that it has a wire to."""

    namespace: Namespace
    client: ssl.SSLContext
    ca_file: Path
    log: Path
    master_socket: str
    document: TenantsDocument
    options: GatewayOptions
    clients: Namespace
    address: str = "127.0.0.1"

    def curl(self, url: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Get a URL whose host is at the gateway. The output is `STATUS HTTP-VERSION BODY`."""
        form = ("--write-out", "%{stderr}%{http_code} %{http_version}", "--cacert", str(self.ca_file))
        where = ("--connect-to", f"::{self.address}:{PEER_PORT if ':7443' in url else HTTPS_PORT}", "--max-time", "10")
        command = self.clients.command("curl", "--silent", *form, *where, *options, url)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)

    def connect(self, port: int, *, address: str = "", source: str = "") -> socket.socket:
        """Return a TCP connection to the gateway."""
        address = address or self.address
        plain = self.clients.new_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        plain.settimeout(10)
        if source:
            plain.bind((source, 0))
        plain.connect((address, port))
        return plain

    def connect_tls(
        self, name: str | None, port: int = HTTPS_PORT, *, alpn: Sequence[str] = (), **where: str
    ) -> ssl.SSLSocket:
        """Return a TLS connection to the gateway that asks for the name."""
        context = self.client
        if name is None or alpn:
            context = ssl.create_default_context(cafile=self.ca_file)
            context.check_hostname = name is not None
            if alpn:
                context.set_alpn_protocols(list(alpn))
        return context.wrap_socket(self.connect(port, **where), server_hostname=name)

    def mark(self, client: socket.socket, *, after: int = 0) -> int:
        """Return the mark on the gateway's side of a connection, 0 when it has none.

        With `after` it is waited for until it is another than that, for the gateway learns of the end of a
        handshake later than its client does.
        """
        gateway_port, client_port = client.getpeername()[1], client.getsockname()[1]
        match = f"sport = :{gateway_port} and dport = :{client_port}"
        # A mark is set within the gateway's next turn; ask until it is, or for long enough.
        mark = 0
        for _ in range(40):
            found = _MARK.search(self.namespace.run("ss", "-Htnoem", match))
            mark = int(found[1], 16) if found else mark
            if mark not in (0, after):
                break
            time.sleep(0.01)
        return mark

    def master(self, command: str) -> str:
        """Send a command to HAProxy's master and return the answer."""
        return _ask(self.master_socket, command)

    def admin(self, command: str) -> str:
        """Send a command to the worker that serves and return the answer."""
        return _ask(f"{self.namespace.root}{RUN_DIRECTORY}/admin.sock", command)


def _ask(address: str, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(20)
        control.connect(address)
        control.sendall(f"{command}\n".encode())
        # The master's socket would wait for another command after some of them.
        control.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: control.recv(65_536), b"")).decode()


@contextmanager
def running_gateway(
    directory: Path,
    *,
    version: str,
    document: TenantsDocument = DOCUMENT,
    start_servers: Callable[[ExitStack, GatewayRig, trustme.CA], None] | None = None,
    launcher: Sequence[str] = (),
    **changes: Any,
) -> Iterator[GatewayRig]:
    """Yield a gateway that answers for a document, with its tenants' servers. Changes are to its GatewayOptions.

    `start_servers` brings other servers than threads that say who they are; `launcher` is
    what HAProxy is started with.
    """
    ca = trustme.CA()
    hosts = sorted(host for tenant in document.tenants for host in tenant.hosts)
    certificate = ca.issue_cert("*.kura.test", *hosts)
    # As a mounted Kubernetes Secret has them: the key beside the chain.
    (directory / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(directory / "tls.key")
    ca.cert_pem.write_to_path(directory / "ca.pem")
    binary = haproxy_of(version)
    options = GatewayOptions(
        binary.version,
        directory=PurePosixPath(directory, "gateway", "current"),
        run_directory=PurePosixPath(RUN_DIRECTORY),
        certificate=PurePosixPath(directory, "tls.crt"),
        user="nobody",
        group="nogroup",
        nbthread=2,
        maxconn=100,
    )
    options = replace(options, **changes)
    write_generation(render(document, options), directory / "gateway")
    with ExitStack() as stack:
        namespace = Namespace()
        stack.callback(namespace.close)
        log = directory / "haproxy.log"
        master = f"{namespace.root}{RUN_DIRECTORY}/master.sock"
        client = ssl.create_default_context(cafile=directory / "ca.pem")
        rig = GatewayRig(namespace, client, directory / "ca.pem", log, master, document, options, namespace)
        (start_servers or start_own_servers)(stack, rig, ca)
        config = str(options.directory / "haproxy.cfg")
        haproxy = (str(binary.path), "-W", "-S", f"{RUN_DIRECTORY}/master.sock", "-f", config)
        command = namespace.command(*launcher, *haproxy)
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)
        _wait_until_open(rig, process)
        yield rig


def start_own_servers(stack: ExitStack, rig: GatewayRig, ca: trustme.CA, *, without_grpc: Collection[str] = ()) -> None:
    """Start servers that say who they are, but no gRPC ones for some tenants."""
    namespace = rig.namespace
    for tenant in rig.document.tenants:
        backends, name = tenant.backends, tenant.name
        assert backends.http is not None
        assert backends.grpc is not None
        assert backends.peer is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert(*tenant.peer_hosts).configure_cert(context)
        serve_http1(stack, namespace.listen(backends.http), name)
        if name not in without_grpc:
            serve(stack, namespace.listen(backends.grpc), lambda c, name=name: serve_h2c(c, name))
        serve(stack, namespace.listen(backends.peer), lambda c, x=context, name=name: serve_peer(c, x, name))


def _wait_until_open(rig: GatewayRig, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        with suppress(OSError):
            rig.connect(rig.document.gateway.https_ports[0]).close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"HAProxy did not start: {rig.log.read_text()}")
