"""An overlay: the same tenants behind other ports and names, for a gateway beside an old one.

What is promised stays the document's: an overlay has no word for a class, a floor or a
ceiling, so the tree is the same tree. It can replace the gateway's ports, and it can say
which tenants keep names at the gateway, and which names.

The document was checked before, so whatever breaks its rules after the merge is the
overlay's doing, and the refusal names the place there.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tenants import check, rules
from kura_shaper.tenants.check import Claims

if TYPE_CHECKING:
    from kura_shaper.tenants.check import Value
    from kura_shaper.tenants.document import Gateway, Tenant, TenantsDocument

KIND = "Overlay"


def overlaid(document: TenantsDocument, root: Value) -> TenantsDocument:
    """Return the document as the overlay changes it, under all rules of a document. Raises DocumentError."""
    rules.require_kind(root, KIND)
    entries = check.mapping(root, required=("apiVersion", "kind"), optional=("gateway", "tenants"))
    changed = replace(document, gateway=_gateway(entries["gateway"], document)) if "gateway" in entries else document
    if "tenants" in entries:
        return replace(changed, tenants=_tenants(entries["tenants"], changed))
    if "gateway" in entries:
        _require_reachable(changed, entries["gateway"])
    return changed


# The gateway.


def _ports_entries(value: Value) -> dict[str, Value]:
    return check.mapping(value, optional=("https_ports", "peer_ports"))


def _gateway(value: Value, document: TenantsDocument) -> Gateway:
    entries, former = _ports_entries(value), document.gateway
    planes = (("https_ports", former.https_ports), ("peer_ports", former.peer_ports))
    kept = {port: key for key, ports in planes if key not in entries for port in ports}
    read_ports = partial(
        check.distinct, check=partial(_free_port, kept=kept), read=check.literal, claims=Claims("port")
    )
    gateway = replace(
        former,
        https_ports=read_ports(entries.get("https_ports"), otherwise=former.https_ports),
        peer_ports=read_ports(entries.get("peer_ports"), otherwise=former.peer_ports),
    )
    rules.require_few_ports(gateway, value)
    return gateway


def _free_port(content: str, *, kept: dict[int, str]) -> int:
    number = check.port(content)
    if number in kept:
        remedy = f"use another, or give {kept[number]} here too"
        raise UsageError(f"port {number} belongs to {kept[number]} of the tenants document already", remedy=remedy)
    return number


def _require_reachable(document: TenantsDocument, value: Value) -> None:
    """Raise DocumentError when the overlay took the last port of a plane on which tenants keep their own names."""
    entries, gateway = _ports_entries(value), document.gateway
    for tenant in document.tenants:
        for key, hosts, plane, ports in (
            ("hosts", tenant.hosts, "https_ports", gateway.https_ports),
            ("peer_hosts", tenant.peer_hosts, "peer_ports", gateway.peer_ports),
        ):
            if hosts and not ports:
                remedy = "give a port, or list the tenants that keep names under tenants:"
                raise entries[plane].refused(f"leaves no port for the {key} of {tenant.name}", remedy=remedy)


# The tenants.


def _tenants(value: Value, document: TenantsDocument) -> tuple[Tenant, ...]:
    known = {tenant.name: tenant for tenant in document.tenants}
    names, hosts = Claims("name"), Claims("host")
    kept: dict[str, Tenant] = {}
    for item in check.sequence(value):
        entries = check.mapping(item, required=("name",), optional=("hosts", "peer_hosts"))
        former = check.text(entries["name"], partial(_known, tenants=known))
        names.claim(former.name, entries["name"], owner=item.path)
        if len(entries) == 1:
            # It may be meant as "keeps all its names", which would be the opposite.
            remedy = "list the names that it keeps, or remove the tenant"
            raise item.refused(f"gives {former.name} neither hosts nor peer_hosts", remedy=remedy)
        read_hosts = partial(check.distinct, check=check.hostname, claims=hosts, owner=f"tenant {former.name}")
        tenant = replace(
            former, hosts=read_hosts(entries.get("hosts")), peer_hosts=read_hosts(entries.get("peer_hosts"))
        )
        rules.require_served(
            tenant, entries, gateway=document.gateway, backends="its backends in the tenants document, at backends"
        )
        kept[tenant.name] = tenant
    return tuple(kept.get(name) or replace(tenant, hosts=(), peer_hosts=()) for name, tenant in known.items())


def _known(content: str, *, tenants: dict[str, Tenant]) -> Tenant:
    if content not in tenants:
        # No name is longer than the part that is compared.
        close = difflib.get_close_matches(content[:64], tenants, n=1)
        remedy = f"did you mean {close[0]}?" if close else "use the name of a tenant in the tenants document"
        raise UsageError(f"{check.quoted(content)} is no tenant of the tenants document", remedy=remedy)
    return tenants[content]
