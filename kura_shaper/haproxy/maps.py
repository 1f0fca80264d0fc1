"""The map files and the certificate list: one row a line, sorted, every key once.

HAProxy splits these files on blanks, takes `#` for a comment and lets the first of two
equal keys win, all without a word. So each key and value is checked here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from kura_shaper.errors import DocumentError
from kura_shaper.haproxy.options import CertificateKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

SNI_MAP = "sni.map"
PEER_MAP = "peer.map"
MARK_MAP = "mark.map"
GRPC_MAP = "grpc.map"
CRT_LIST = "crt-list.txt"

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_TENANT = re.compile(_LABEL, re.ASCII)
_DNS_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_GRPC_PREFIX = re.compile(r"/[A-Za-z0-9_.-][A-Za-z0-9_./-]*", re.ASCII)
_MAX_DNS_NAME_CHARS = 253
_MAX_GRPC_PREFIX_CHARS = 255


def tenant_name(name: str) -> str:
    """Return the name when it is a DNS label, which every name made of it relies on. Raises DocumentError."""
    if not _TENANT.fullmatch(name):
        raise DocumentError(f"{name[:64]!r} is no tenant name", path="tenants", remedy="use a DNS label, e.g. acme")
    return name


def dns_name(name: str, *, path: str) -> str:
    """Return the name in lower case without its final dot. Raises DocumentError when it is no DNS name."""
    normal = _normal(name)
    if not normal:
        raise DocumentError(f"{name[:64]!r} is no DNS name", path=path, remedy="use letters, digits, - and dots")
    return normal


# Each host is asked about by several files, one after the other.
@lru_cache(maxsize=1 << 17)
def _normal(name: str) -> str:
    """Return the name in lower case without its final dot, "" when it is no DNS name."""
    normal = name.lower().removesuffix(".")
    return normal if len(normal) <= _MAX_DNS_NAME_CHARS and _DNS_NAME.fullmatch(normal) else ""


def host_name(name: str, *, path: str) -> str:
    """Return a hostname that clients ask for, as `dns_name`; one label is not enough. Raises DocumentError."""
    normal = dns_name(name, path=path)
    if "." not in normal:
        raise DocumentError(f"{name[:64]!r} is no full hostname", path=path, remedy="e.g. acme.kura.example")
    return normal


def map_files(document: TenantsDocument) -> dict[str, bytes]:
    """Return each map file's content by its name. Raises DocumentError for a bad or repeated key."""
    hosts = [(host, tenant.name) for tenant in document.tenants for host in tenant.hosts]
    peers = [(host, tenant.name) for tenant in document.tenants for host in tenant.peer_hosts]
    return {
        SNI_MAP: _rows((host_name(host, path=f"tenants[{tenant}].hosts"), tenant) for host, tenant in hosts),
        PEER_MAP: _rows((host_name(host, path=f"tenants[{tenant}].peer_hosts"), tenant) for host, tenant in peers),
        # Decimal, since HAProxy's map_str_int reads nothing else.
        MARK_MAP: _rows((tenant.name, str(document.marks.mark(tenant.class_id))) for tenant in document.tenants),
        GRPC_MAP: _rows((_grpc_prefix(prefix), "grpc") for prefix in document.gateway.grpc_prefixes),
    }


def certificate_list(document: TenantsDocument, options: GatewayOptions) -> dict[str, bytes]:
    """Return the list of hostnames that the certificate is served for; nothing where it is a directory.

    One host a line: HAProxy refuses lines of a few thousand. Raises DocumentError.
    """
    if options.certificate_kind is CertificateKind.DIRECTORY:
        return {}
    hosts = sorted(host_name(host, path="hosts") for tenant in document.tenants for host in tenant.hosts)
    rows = (f"{options.certificate} {host}\n" for host in hosts)
    return {CRT_LIST: "".join(rows).encode("ascii")}


def _grpc_prefix(prefix: str) -> str:
    if len(prefix) > _MAX_GRPC_PREFIX_CHARS or not _GRPC_PREFIX.fullmatch(prefix):
        remedy = "e.g. /google.bytestream."
        raise DocumentError(f"{prefix[:64]!r} is no path prefix", path="gateway.grpc_prefixes", remedy=remedy)
    return prefix


def _rows(rows: Iterable[tuple[str, str]]) -> bytes:
    values: dict[str, str] = {}
    for key, value in rows:
        if key in values:
            owners = " and ".join(sorted({values[key], value}))
            raise DocumentError(f"{key!r} is named twice, by {owners}", path="tenants", remedy="keep one of them")
        values[key] = value
    return "".join(f"{key} {values[key]}\n" for key in sorted(values)).encode("ascii")
