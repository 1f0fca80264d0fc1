"""Load for `verify --live`: the lab's clients, started where the operator says, since it must come from outside."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.lab.traffic import Application, Security, TrafficResult, TrafficSpec
from kura_shaper.verify.active import Step

if TYPE_CHECKING:
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.verify.active import Where

_OBJECT = re.compile(r"/object/(\d{1,15})")
_HTTPS_PORT = 443
_TRAFFIC = "kura_shaper.lab.traffic"


class TrafficClient:
    """The lab's client as a process: one connection of HTTP/1.1 for each stream."""

    def __init__(self, document: TenantsDocument, where: Where, *, duration_ms: int) -> None:
        """Raises UsageError for a URL that is none of a tenant's, or that this client can't ask for."""
        parts = urlsplit(where.url)
        host = (parts.hostname or "").rstrip(".").lower()
        found = _OBJECT.fullmatch(parts.path)
        if parts.scheme not in ("http", "https") or not host or not found:
            raise UsageError(
                f"--url {where.url[:80]!r} can't be asked for", remedy="e.g. https://HOST/object/268435456"
            )
        names = {name.lower(): tenant.name for tenant in document.tenants for name in tenant.hosts}
        if host not in names:
            raise UsageError(f"--url: {host[:64]!r} is no host of a tenant", remedy="take one of the document's hosts")
        self.tenant = names[host]
        self._launcher = tuple(shlex.split(where.launcher))
        self._process: subprocess.Popen[str] | None = None
        self._spec = {
            "application": Application.HTTP1,
            "address": _address(where.connect_to or host),
            "port": parts.port or (_HTTPS_PORT if parts.scheme == "https" else 80),
            "security": Security.TLS if parts.scheme == "https" else Security.PLAIN,
            "sni": host,
            "ca_file": str(where.ca_file or ""),
            "object_bytes": int(found[1]),
            "duration_ms": duration_ms,
        }

    def run(self, streams: int) -> Step:
        """See LoadClient."""
        spec = TrafficSpec(**self._spec, connections=streams)  # type: ignore[arg-type]
        argv = [*self._launcher, sys.executable, "-m", _TRAFFIC, *spec.arguments()]
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
        return Step(streams, start_ns, max(end_ns, start_ns + 1), result.received_bytes, result.failures)

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
