"""What a broker is told: one YAML file. Everything that is wrong with it is said at once, each with its key path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kura_shaper.broker import entries
from kura_shaper.broker.entries import NAMESPACES_MAX, Entries
from kura_shaper.broker.protocol.limits import (
    STREAM_BUFFER_BYTES_MAX,
    STREAM_BUFFER_BYTES_MIN,
    STREAMS_DEFAULT,
    STREAMS_MAX,
)
from kura_shaper.errors import UsageError
from kura_shaper.log import LogFormat, LogLevel
from kura_shaper.tenants import check
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.kubernetes.access import SERVICE_ACCOUNT

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as Environment
    from pathlib import Path

    from kura_shaper.broker.addresses import IpNetwork
    from kura_shaper.tenants.check import Value
    from kura_shaper.units import Rate

_LISTEN = Endpoint("0.0.0.0", 9464)  # noqa: S104 - probes come to the pod's own address
CIDRS_MAX = 256
_SO_MARK_MAX = 2**32 - 1
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BusUrl:
    """Where the router is. `prefix` comes before the paths of the bus, without a / at its end."""

    host: str
    port: int
    prefix: str = ""

    @property
    def authority(self) -> str:
        """As HTTP names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 443 else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Everything that a broker can be told. One of `token_file` and `token_env` is set."""

    bus_url: BusUrl
    client_id: str
    kubernetes_namespace: str
    watch_namespaces: tuple[str, ...]
    dynamo_namespaces: tuple[str, ...]
    token_file: Path | None = None
    token_env: str = ""
    ca_bundle: Path | None = None
    tls_server_name: str = ""
    allowed_cidrs: tuple[IpNetwork, ...] = ()
    max_streams: int = STREAMS_DEFAULT
    max_stream_buffer_bytes: int = STREAM_BUFFER_BYTES_MAX
    upstream_connect_timeout_ms: int = 5_000
    reconnect_least_ms: int = 1_000
    reconnect_most_ms: int = 60_000
    drain_deadline_ms: int = 25_000
    deauthorise_after_ms: int | None = None
    max_stream_rate: Rate | None = None
    metrics_listen: Endpoint = _LISTEN
    so_mark: int | None = None
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.JSON


def load_settings(
    path: Path, environ: Environment[str, str] = os.environ, *, service_account: Path = SERVICE_ACCOUNT
) -> BrokerSettings:
    """Return the settings of a file. Raises SettingsError with everything that is wrong."""
    reading = Entries.of_file(path, _KEYS)
    found = {field: reading.read(key, reader) for key, (field, reader) in _READERS.items()}
    found |= _backoff(reading)
    _fill_namespaces(found, reading, environ=environ, service_account=service_account)
    reading.require("bus_url", "client_id", "dynamo_namespaces")
    if ("token_file" in reading) == ("token_env" in reading):
        reading.refuse("token_file", "exactly one of token_file and token_env is needed", remedy="name one of them")
    reading.raise_if_wrong()
    return BrokerSettings(**{key: value for key, value in found.items() if value is not None})


def _backoff(reading: Entries) -> dict[str, Any]:
    def bounds(value: Value) -> dict[str, Any]:
        within = check.mapping(value, optional=("min", "max"))
        read = entries.duration_ms(100, 600_000)
        return {
            f"reconnect_{name}_ms": read(within[key])
            for key, name in (("min", "least"), ("max", "most"))
            if key in within
        }

    found = reading.read("reconnect_backoff", bounds) or {}
    least_ms, most_ms = found.get("reconnect_least_ms", 1_000), found.get("reconnect_most_ms", 60_000)
    if least_ms > most_ms:
        reading.refuse("reconnect_backoff", f"min of {least_ms} ms is above max of {most_ms} ms", remedy="raise max")
    return found


def _fill_namespaces(
    found: dict[str, Any], reading: Entries, *, environ: Environment[str, str], service_account: Path
) -> None:
    own = found["kubernetes_namespace"] or environ.get("POD_NAMESPACE", "") or _pods_namespace(service_account)
    try:
        found["kubernetes_namespace"] = check.label(own, characters_max=63)
    except UsageError:
        if "kubernetes_namespace" not in reading:
            remedy = "add kubernetes_namespace, or set POD_NAMESPACE"
            reading.refuse("kubernetes_namespace", "is not known outside a pod", remedy=remedy)
    if found["watch_namespaces"] is None:
        found["watch_namespaces"] = (own,)


def _pods_namespace(service_account: Path) -> str:
    try:
        return (service_account / "namespace").read_text().strip()
    except (OSError, ValueError):
        return ""


# What one entry may be.


def _bus_url(content: str) -> BusUrl:
    remedy = "write https://host[:port][/prefix]"
    try:
        url = urlsplit(content)
        port = url.port
    except ValueError as error:
        raise UsageError("is no URL", remedy=remedy) from error
    if "@" in content or "?" in content or "#" in content:
        # Not repeated: what stands there may be a secret.
        raise UsageError("has a user, a query or a fragment", remedy=remedy)
    if url.scheme != "https":
        raise UsageError(f"{check.quoted(content)} is not https", remedy="the bus is never spoken without TLS")
    host = url.hostname or ""
    if not host or port == 0 or not content.isascii() or not content.isprintable() or " " in content:
        raise UsageError(f"{check.quoted(content)} has no host or an impossible port", remedy=remedy)
    prefix = entries.url_prefix(url.path)
    if ":" in host:
        return BusUrl(check.address_endpoint(f"[{host}]:{port or 443}").host, port or 443, prefix)
    try:
        found = check.dns_name(host)
    except UsageError:
        found = check.address_endpoint(f"{host}:{port or 443}").host
    return BusUrl(found, port or 443, prefix)


def _label(content: str) -> str:
    return check.label(content, characters_max=63)


def _environment_name(content: str) -> str:
    if not _ENVIRONMENT_NAME.fullmatch(content):
        # Not repeated: somebody may have put the token itself here.
        raise UsageError("is no name of an environment variable", remedy="write the variable's name, not the token")
    return content


def _server_name(content: str) -> str:
    return check.dns_name(content)


_READERS: dict[str, tuple[str, Callable[[Value], Any]]] = {
    "bus_url": ("bus_url", entries.text(_bus_url)),
    "client_id": ("client_id", entries.text(entries.client_id)),
    "kubernetes_namespace": ("kubernetes_namespace", entries.text(_label)),
    "watch_namespaces": ("watch_namespaces", entries.listed("namespace", _label, NAMESPACES_MAX)),
    "dynamo_namespaces": (
        "dynamo_namespaces",
        entries.listed("Dynamo namespace", entries.dynamo_namespace, NAMESPACES_MAX),
    ),
    "token_file": ("token_file", entries.text(entries.file_path)),
    "token_env": ("token_env", entries.text(_environment_name)),
    "ca_bundle": ("ca_bundle", entries.text(entries.file_path)),
    "tls_server_name": ("tls_server_name", entries.text(_server_name)),
    "allowed_cidrs": ("allowed_cidrs", entries.listed("network", check.network, CIDRS_MAX)),
    "max_streams": ("max_streams", entries.whole(1, STREAMS_MAX)),
    "max_stream_buffer_bytes": (
        "max_stream_buffer_bytes",
        entries.size_bytes(STREAM_BUFFER_BYTES_MIN, STREAM_BUFFER_BYTES_MAX),
    ),
    "upstream_connect_timeout": ("upstream_connect_timeout_ms", entries.duration_ms(100, 10_000)),
    "drain_deadline": ("drain_deadline_ms", entries.duration_ms(0, 600_000)),
    "deauthorise_after": ("deauthorise_after_ms", entries.duration_ms(1_000, 3_600_000)),
    "max_stream_rate": ("max_stream_rate", entries.text(entries.rate)),
    "metrics_listen": ("metrics_listen", entries.text(check.listen_endpoint)),
    "so_mark": ("so_mark", entries.whole(1, _SO_MARK_MAX)),
    "log_level": ("log_level", entries.choice(LogLevel)),
    "log_format": ("log_format", entries.choice(LogFormat)),
}
_KEYS = (*_READERS, "reconnect_backoff")
