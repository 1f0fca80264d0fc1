"""From a tenants document to everything that the gateway reads: values in, bytes out, nothing else touched.

The same document and options give the same bytes on every machine, at any time and in
any order of tenants, so that a difference is always a change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.haproxy.backends import tenant_sections
from kura_shaper.haproxy.builder import to_bytes
from kura_shaper.haproxy.frontends import frontend_sections
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig, config_digest
from kura_shaper.haproxy.maps import certificate_list, host_name, map_files, tenant_name
from kura_shaper.haproxy.options import version_text
from kura_shaper.haproxy.process import NO_CONFIG_ID, process_sections
from kura_shaper.tenants.marks import TENANT_CLASS_MIN

if TYPE_CHECKING:
    from kura_shaper.haproxy.builder import Section
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

# HAProxy starts one thread for each processor; where nobody said how many, allow for a large machine.
_MANY_THREADS = 64


def render(document: TenantsDocument, options: GatewayOptions) -> GatewayConfig:
    """Return the whole configuration for a document.

    Raises DocumentError for a document that no correct gateway can be made of, WordError
    for a value that can't be written, UsageError for a class that doesn't fit the marks.
    """
    document = replace(document, tenants=tuple(sorted(document.tenants, key=lambda tenant: tenant.name)))
    _check(document, options)
    shared = (*process_sections(document, options), *frontend_sections(document, options))
    tenants = (section for tenant in document.tenants for section in tenant_sections(tenant, options))
    sections = (*shared, *tenants)
    _check_descriptors(sections, options)
    config = _with_id(to_bytes(sections))
    # The branch alone: a patch level changes nothing in the files, so it must not look like a change.
    version = version_text(options.haproxy_version[:2])
    header = f"# Written by kura-shaper for HAProxy {version}; change the tenants document instead.\n\n"
    files = {**map_files(document), **certificate_list(document, options)}
    return GatewayConfig.with_manifest({**files, CONFIG_FILE: header.encode("ascii") + config}, version=version)


def _with_id(config: bytes) -> bytes:
    """Put the digest of the text where it says who it is: a running gateway can then be asked what it was given."""
    return config.replace(NO_CONFIG_ID.encode("ascii"), config_digest(config).encode("ascii"), 1)


def _check_descriptors(sections: tuple[Section, ...], options: GatewayOptions) -> None:
    """Refuse what HAProxy finds out when it starts, and says as "Cannot raise FD limit"."""
    if options.nofile is None:
        return
    needed = descriptors_needed(sections, options)
    if needed <= options.nofile:
        return
    most = options.maxconn - (needed - options.nofile + 5) // 6
    remedy = f"use maxconn {most} or a higher limit" if most > 0 else "raise the limit"
    raise UsageError(
        f"maxconn {options.maxconn} takes {needed} descriptors of a limit of {options.nofile}", remedy=remedy
    )


def descriptors_needed(sections: tuple[Section, ...], options: GatewayOptions) -> int:
    """Return how many file descriptors HAProxy asks for at its start, or a little more.

    Measured with 3.0 and 3.2: two for each connection that is allowed, one for each server,
    three for each thread, and some fifty.
    """
    servers = 0
    for words in (line.words for section in sections for line in section.lines):
        servers += int(words[2]) if words[0] == "server-template" else words[0] == "server"
    threads = options.nbthread or _MANY_THREADS
    return 2 * options.process_maxconn + servers + 3 * threads + 64


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
