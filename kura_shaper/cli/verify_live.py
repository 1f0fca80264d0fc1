"""Load for `verify --live`: the lab's clients, started where the operator says, since it must come from outside."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.lab.traffic import Application, Security, TrafficResult, TrafficSpec
from kura_shaper.verify.active import Step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.verify.active import Where

_OBJECT = re.compile(r"/object/(\d{1,15})")
_HTTPS_PORT, _HTTP_PORT = 443, 80
_TRAFFIC = "kura_shaper.lab.traffic"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of the matrix: by which protocol, to which address, from where. path is what it is called."""

    path: str
    application: Application
    address: str
    port: int
    security: Security
    host: str
    object_bytes: int
    launcher: tuple[str, ...]
    is_control: bool = False


def ways_of(
    document: TenantsDocument, where: Where, *, protocols: Sequence[Application], controls: Sequence[str] = ()
) -> tuple[str, tuple[Way, ...]]:
    """Return the tenant of a URL and every way to it: protocols times addresses, then the controls.

    A control is the URL of a way that no ceiling is for, such as a pod's own: it is asked from here, by
    HTTP/1.1. Raises UsageError for a URL that is none of a tenant's, or that no client can ask for.
    """
    host, port, security, object_bytes = _parts(where.url, "--url")
    names = {name.lower(): tenant.name for tenant in document.tenants for name in (*tenant.hosts, *tenant.peer_hosts)}
    if host not in names:
        raise UsageError(f"--url: {host[:64]!r} is no host of a tenant", remedy="take one of the document's hosts")
    launcher = tuple(shlex.split(where.launcher))
    addresses = tuple(_address(name) for name in where.connect_to or (host,))
    ways = [
        Way(
            f"{protocol.value} {_family(address)}",
            protocol,
            address,
            port,
            security,
            host,
            object_bytes,
            launcher,
        )
        for address in addresses
        for protocol in protocols
    ]
    for number, url in enumerate(controls, start=1):
        host_of, port_of, security_of, object_bytes_of = _parts(url, "--control")
        address = _address(host_of)
        path = f"control {number} {_family(address)}"
        ways.append(
            Way(path, Application.HTTP1, address, port_of, security_of, host_of, object_bytes_of, (), is_control=True)
        )
    return names[host], tuple(ways)


def _parts(url: str, option: str) -> tuple[str, int, Security, int]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip(".").lower(), parts.port
    except ValueError as error:
        raise UsageError(f"{option} {url[:80]!r} is no URL: {error}") from error
    found = _OBJECT.fullmatch(parts.path)
    if parts.scheme not in ("http", "https") or not host or not found:
        remedy = "e.g. https://HOST/object/268435456"
        raise UsageError(f"{option} {url[:80]!r} can't be asked for", remedy=remedy)
    is_secure = parts.scheme == "https"
    security = Security.TLS if is_secure else Security.PLAIN
    return host, port or (_HTTPS_PORT if is_secure else _HTTP_PORT), security, int(found[1])


def _family(address: str) -> str:
    return f"IPv{ip_address(address).version}"


class TrafficClient:
    """The lab's client as a process: one connection for each stream, where the protocol has one stream each."""

    def __init__(self, tenant: str, way: Way, *, ca_file: Path | None, duration_ms: int) -> None:
        self.tenant = tenant
        self._way = way
        self._process: subprocess.Popen[str] | None = None
        self._spec = {
            "application": way.application,
            "address": way.address,
            "port": way.port,
            "security": way.security,
            "sni": way.host,
            "ca_file": str(ca_file or ""),
            "object_bytes": way.object_bytes,
            "duration_ms": duration_ms,
        }

    def run(self, streams: int) -> Step:
        """See LoadClient."""
        spec = TrafficSpec(**self._spec, connections=streams)  # type: ignore[arg-type]
        argv = [*self._way.launcher, sys.executable, "-m", _TRAFFIC, *spec.arguments()]
        clock = SystemClock()
        try:
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)  # noqa: S603
        except OSError as error:
            raise StateUnknownError(f"the client can't be started: {error}", remedy="see --live-from") from error
        self._process = process
        with process:
            _event(process, "flowing")
            start_ns = clock.now_ns()
            result = TrafficResult.from_event(_event(process, "result"))
            # The client's own time, which what it received is of; it ends a moment before we hear of that.
            end_ns = start_ns + round(result.duration_ms * 1_000_000)
        return Step(
            streams,
            start_ns,
            max(end_ns, start_ns + 1),
            result.received_bytes,
            result.failures,
            self._way.path,
            self._way.is_control,
        )

    def close(self) -> None:
        """End a client that is still at it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def _address(host: str) -> str:
    """Return an address to connect to; the client resolves no names, so that each stream goes to the same place."""
    try:
        return str(ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        remedy = "name the gateway's address with --connect-to"
        raise UsageError(f"--url: {host[:64]!r} has no address: {error.strerror}", remedy=remedy) from error


def _event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout else ""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        found = {}
    if found.get("event") != name:
        said = line.strip()[:200] or f"nothing, and ended with {process.wait()}"
        raise StateUnknownError(f"the client did not say `{name}`: {said}", remedy="run its command by hand")
    return found
