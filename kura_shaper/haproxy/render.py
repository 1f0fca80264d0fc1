"""From a tenants document to everything that the gateway reads: values in, bytes out, nothing else touched.

The same document and options give the same bytes on every machine, at any time and in
any order of tenants, so that a difference is always a change.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.errors import DocumentError
from kura_shaper.haproxy.backends import tenant_sections
from kura_shaper.haproxy.builder import to_bytes
from kura_shaper.haproxy.frontends import frontend_sections, process_sections
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig
from kura_shaper.haproxy.maps import certificate_list, host_name, map_files, tenant_name
from kura_shaper.haproxy.options import version_text
from kura_shaper.tenants.marks import TENANT_CLASS_MIN

if TYPE_CHECKING:
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument


def render(document: TenantsDocument, options: GatewayOptions) -> GatewayConfig:
    """Return the whole configuration for a document.

    Raises DocumentError for a document that no correct gateway can be made of, WordError
    for a value that can't be written, UsageError for a class that doesn't fit the marks.
    """
    document = replace(document, tenants=tuple(sorted(document.tenants, key=lambda tenant: tenant.name)))
    _check(document, options)
    shared = (*process_sections(document, options), *frontend_sections(document, options))
    tenants = (section for tenant in document.tenants for section in tenant_sections(tenant, options))
    config = to_bytes((*shared, *tenants))
    # The branch alone: a patch level changes nothing in the files, so it must not look like a change.
    version = version_text(options.haproxy_version[:2])
    digest = hashlib.sha256(config).hexdigest()
    header = (
        f"# Written by kura-shaper for HAProxy {version}; change the tenants document instead.\n# sha256 {digest}\n\n"
    )
    files = {**map_files(document), **certificate_list(document, options)}
    return GatewayConfig.with_manifest({**files, CONFIG_FILE: header.encode("ascii") + config}, version=version)


def _check(document: TenantsDocument, options: GatewayOptions) -> None:
    """Refuse what HAProxy itself accepts, though it can't mean one thing."""
    names: set[str] = set()
    classes: dict[int, str] = {}
    owners: dict[str, str] = {}
    for tenant in document.tenants:
        path = f"tenants[{tenant_name(tenant.name)}]"
        if tenant.name in names:
            raise DocumentError("the tenant is there twice", path=path)
        names.add(tenant.name)
        _check_class(document, tenant.class_id, path=f"{path}.class")
        if classes.setdefault(tenant.class_id, tenant.name) != tenant.name:
            raise DocumentError(f"class {tenant.class_id:#x} belongs to two tenants", path=path)
        for host in (*tenant.hosts, *tenant.peer_hosts):
            if owners.setdefault(host_name(host, path=f"{path}.hosts"), tenant.name) != tenant.name:
                raise DocumentError(f"{host!r} belongs to two tenants", path=path, remedy="keep one of them")
    _check_ports(document, options)


def _check_class(document: TenantsDocument, class_id: int, *, path: str) -> None:
    if not TENANT_CLASS_MIN <= class_id <= document.marks.class_id_max:
        most = document.marks.class_id_max
        remedy = f"use {TENANT_CLASS_MIN:#x} to {most:#x}"
        raise DocumentError(f"class {class_id:#x} is not a tenant's", path=path, remedy=remedy)


def _check_ports(document: TenantsDocument, options: GatewayOptions) -> None:
    """Refuse one port for two doors: the kernel would share it out among them at random."""
    ports = (*document.gateway.https_ports, *document.gateway.peer_ports, options.metrics_bind.port)
    for port in ports:
        if not 1 <= port <= 65_535:
            raise DocumentError(f"port {port} is out of range", path="gateway", remedy="use 1 to 65535")
    if len(set(ports)) != len(ports):
        raise DocumentError("a port is used twice", path="gateway", remedy="the metrics' own port counts too")
