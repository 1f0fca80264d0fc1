"""What a broker is told: one YAML file. Everything that is wrong with it is said at once, each with its key path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kura_shaper.broker.protocol.frames import CLIENT_ID_PATTERN
from kura_shaper.broker.protocol.limits import (
    KIB,
    MIB,
    STREAM_BUFFER_BYTES_MAX,
    STREAM_BUFFER_BYTES_MIN,
    STREAMS_DEFAULT,
    STREAMS_MAX,
)
from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.log import LogFormat, LogLevel
from kura_shaper.tenants import check
from kura_shaper.tenants.check import Claims, Mapping, Value
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.file import read_values
from kura_shaper.tenants.kubernetes.access import SERVICE_ACCOUNT

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as Environment
    from enum import StrEnum

    from kura_shaper.broker.addresses import IpNetwork

T = TypeVar("T")

_LISTEN = Endpoint("0.0.0.0", 9464)  # noqa: S104 - probes come to the pod's own address
NAMESPACES_MAX, CIDRS_MAX, DYNAMO_NAMESPACE_CHARACTERS_MAX = 64, 256, 253
_SO_MARK_MAX = 2**32 - 1
_DURATION = re.compile(r"([0-9]{1,7})(ms|s|m)", re.ASCII)
_DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000}
_SIZE = re.compile(r"([0-9]{1,10})(KiB|MiB|)", re.ASCII)
_SIZE_BYTES = {"": 1, "KiB": KIB, "MiB": MIB}
_PATH_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~-]+)*", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)


class SettingsError(UsageError):
    """Settings that can't be used; `problems` are all that is wrong with them, one line each."""

    code = "settings"

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


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
    metrics_listen: Endpoint = _LISTEN
    so_mark: int | None = None
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.JSON


def load_settings(
    path: Path, environ: Environment[str, str] = os.environ, *, service_account: Path = SERVICE_ACCOUNT
) -> BrokerSettings:
    """Return the settings of a file. Raises SettingsError with everything that is wrong."""
    try:
        root = read_values(path)
        # Only that it is a mapping: what it may not have is said beside everything else.
        entries = check.mapping(root, optional=root.entries if isinstance(root, Mapping) else ())
    except DocumentError as error:
        raise SettingsError((str(error),)) from error
    reading = _Reading(entries, str(path))
    for key, value in entries.items():
        reading.require_known(key, value)
    found = {field: reading.read(key, reader) for key, (field, reader) in _READERS.items()}
    found |= _backoff(reading)
    _fill_namespaces(found, reading, environ=environ, service_account=service_account)
    for key in ("bus_url", "client_id", "dynamo_namespaces"):
        if key not in entries:
            reading.refuse(key, "is missing", remedy=f"add {key}:")
    if ("token_file" in entries) == ("token_env" in entries):
        reading.refuse("token_file", "exactly one of token_file and token_env is needed", remedy="name one of them")
    if reading.problems:
        raise SettingsError(tuple(reading.problems))
    return BrokerSettings(**{key: value for key, value in found.items() if value is not None})


class _Reading:
    """The entries of a file while they are read, and what was wrong with them."""

    def __init__(self, entries: dict[str, Value], file: str) -> None:
        self._entries, self._file = entries, file
        self.problems: list[str] = []

    def read(self, key: str, reader: Callable[[Value], T]) -> T | None:
        """Return what a reader makes of an entry, None where there is none or it is refused."""
        if key not in self._entries:
            return None
        try:
            return reader(self._entries[key])
        except DocumentError as error:
            self.problems.append(str(error))
            return None

    def has(self, key: str) -> bool:
        """Return whether there is such an entry."""
        return key in self._entries

    def require_known(self, key: str, value: Value) -> None:
        """Note a key that there is none of."""
        try:
            check.mapping(Mapping(self._file, value.line, "", {key: value}), optional=_KEYS)
        except DocumentError as error:
            self.problems.append(str(error))

    def refuse(self, key: str, message: str, *, remedy: str) -> None:
        """Note what is wrong with an entry, or that it is not there."""
        line = self._entries[key].line if key in self._entries else 0
        self.problems.append(str(DocumentError(message, file=self._file, line=line, path=key, remedy=remedy)))


def _backoff(reading: _Reading) -> dict[str, Any]:
    def entries(value: Value) -> dict[str, Any]:
        within = check.mapping(value, optional=("min", "max"))
        read = _duration_ms(100, 600_000)
        return {
            f"reconnect_{name}_ms": read(within[key])
            for key, name in (("min", "least"), ("max", "most"))
            if key in within
        }

    found = reading.read("reconnect_backoff", entries) or {}
    least_ms, most_ms = found.get("reconnect_least_ms", 1_000), found.get("reconnect_most_ms", 60_000)
    if least_ms > most_ms:
        reading.refuse("reconnect_backoff", f"min of {least_ms} ms is above max of {most_ms} ms", remedy="raise max")
    return found


def _fill_namespaces(
    found: dict[str, Any], reading: _Reading, *, environ: Environment[str, str], service_account: Path
) -> None:
    own = found["kubernetes_namespace"] or environ.get("POD_NAMESPACE", "") or _pods_namespace(service_account)
    try:
        found["kubernetes_namespace"] = check.label(own, characters_max=63)
    except UsageError:
        if not reading.has("kubernetes_namespace"):
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
    host, prefix = url.hostname or "", url.path.rstrip("/")
    if not host or port == 0 or not content.isascii() or not content.isprintable() or " " in content:
        raise UsageError(f"{check.quoted(content)} has no host or an impossible port", remedy=remedy)
    if not _PATH_PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
        raise UsageError("has a path that is none", remedy=remedy)
    if ":" in host:
        return BusUrl(check.address_endpoint(f"[{host}]:{port or 443}").host, port or 443, prefix)
    try:
        found = check.dns_name(host)
    except UsageError:
        found = check.address_endpoint(f"{host}:{port or 443}").host
    return BusUrl(found, port or 443, prefix)


def _client_id(content: str) -> str:
    if not re.fullmatch(CLIENT_ID_PATTERN, content):
        remedy = "use at most 63 of letters, digits, . _ and -, first and last a letter or digit"
        raise UsageError(f"{check.quoted(content)} is no client id", remedy=remedy)
    return content


def _label(content: str) -> str:
    return check.label(content, characters_max=63)


def _dynamo_namespace(content: str) -> str:
    if not content or len(content) > DYNAMO_NAMESPACE_CHARACTERS_MAX or not content.isprintable():
        raise UsageError(f"{check.quoted(content)} is no Dynamo namespace", remedy="use 1 to 253 characters")
    return content


def _path(content: str) -> Path:
    if not content or not content.isprintable():
        raise UsageError(f"{check.quoted(content)} is no path", remedy="write the path of a file")
    return Path(content)


def _environment_name(content: str) -> str:
    if not _ENVIRONMENT_NAME.fullmatch(content):
        # Not repeated: somebody may have put the token itself here.
        raise UsageError("is no name of an environment variable", remedy="write the variable's name, not the token")
    return content


def _server_name(content: str) -> str:
    return check.dns_name(content)


def _text(reader: Callable[[str], T]) -> Callable[[Value], T]:
    return lambda value: check.literal(value, reader)


def _list(what: str, reader: Callable[[str], T], most: int) -> Callable[[Value], tuple[T, ...]]:
    def read(value: Value) -> tuple[T, ...]:
        items = check.sequence(value)
        if not 1 <= len(items) <= most and not (what == "network" and not items):
            raise value.refused(f"has {len(items)} items", remedy=f"give 1 to {most}")
        return check.distinct(value, reader, claims=Claims(what), read=check.literal)

    return read


def _whole(least: int, most: int) -> Callable[[Value], int]:
    def read(content: str) -> int:
        number = check.integer(content)
        if not least <= number <= most:
            raise UsageError(f"{number} is out of range", remedy=f"use {least} to {most}")
        return number

    return _text(read)


def _duration_ms(least_ms: int, most_ms: int) -> Callable[[Value], int]:
    def read(content: str) -> int:
        match = _DURATION.fullmatch(content)
        if match is None:
            raise UsageError(f"{check.quoted(content)} is no duration", remedy="write e.g. 250ms, 5s or 1m")
        duration_ms = int(match[1]) * _DURATION_MS[match[2]]
        if not least_ms <= duration_ms <= most_ms:
            raise UsageError(f"{content} is out of range", remedy=f"use {least_ms}ms to {most_ms}ms")
        return duration_ms

    return _text(read)


def _size_bytes(content: str) -> int:
    match = _SIZE.fullmatch(content)
    size_bytes = int(match[1]) * _SIZE_BYTES[match[2]] if match else 0
    if not STREAM_BUFFER_BYTES_MIN <= size_bytes <= STREAM_BUFFER_BYTES_MAX:
        raise UsageError(f"{check.quoted(content)} is no size from 16KiB to 1MiB", remedy="write e.g. 256KiB")
    return size_bytes


def _choice(kind: type[StrEnum]) -> Callable[[Value], Any]:
    def read(content: str) -> StrEnum:
        if content not in list(kind):
            raise UsageError(f"{check.quoted(content)} is not known", remedy=f"use {', '.join(kind)}")
        return kind(content)

    return _text(read)


_READERS: dict[str, tuple[str, Callable[[Value], Any]]] = {
    "bus_url": ("bus_url", _text(_bus_url)),
    "client_id": ("client_id", _text(_client_id)),
    "kubernetes_namespace": ("kubernetes_namespace", _text(_label)),
    "watch_namespaces": ("watch_namespaces", _list("namespace", _label, NAMESPACES_MAX)),
    "dynamo_namespaces": ("dynamo_namespaces", _list("Dynamo namespace", _dynamo_namespace, NAMESPACES_MAX)),
    "token_file": ("token_file", _text(_path)),
    "token_env": ("token_env", _text(_environment_name)),
    "ca_bundle": ("ca_bundle", _text(_path)),
    "tls_server_name": ("tls_server_name", _text(_server_name)),
    "allowed_cidrs": ("allowed_cidrs", _list("network", check.network, CIDRS_MAX)),
    "max_streams": ("max_streams", _whole(1, STREAMS_MAX)),
    "max_stream_buffer_bytes": ("max_stream_buffer_bytes", _text(_size_bytes)),
    "upstream_connect_timeout": ("upstream_connect_timeout_ms", _duration_ms(100, 10_000)),
    "drain_deadline": ("drain_deadline_ms", _duration_ms(0, 600_000)),
    "metrics_listen": ("metrics_listen", _text(check.listen_endpoint)),
    "so_mark": ("so_mark", _whole(1, _SO_MARK_MAX)),
    "log_level": ("log_level", _choice(LogLevel)),
    "log_format": ("log_format", _choice(LogFormat)),
}
_KEYS = (*_READERS, "reconnect_backoff")
