"""What must hold of the tenants document as a whole, in whichever file a part of it stands.

The document itself (`tenants.file`) and an overlay over it (`tenants.overlay`) are held
to the same rules; each passes the value that is to blame.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tenants import check
from kura_shaper.tenants.check import Mapping, Value
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX

if TYPE_CHECKING:
    from kura_shaper.tenants.document import Gateway, Tenant

API_VERSION = "kura-shaper/v1"


def require_kind(root: Value, kind: str) -> None:
    """Raise DocumentError where a file says that it is of another version or kind; a missing word is not judged.

    To be asked before anything else: in a file of another kind every other remark would mislead.
    """
    for key, wanted in (("apiVersion", API_VERSION), ("kind", kind)):
        if isinstance(root, Mapping) and key in root.entries:
            check.text(root.entries[key], partial(_constant, wanted=wanted))


def _constant(content: str, *, wanted: str) -> str:
    if content != wanted:
        raise UsageError(f"is {check.quoted(content)}", remedy=f"this version reads {wanted}")
    return content


def require_few_ports(gateway: Gateway, value: Value) -> None:
    """Raise DocumentError at the value when the gateway has more ports than a filter can tell apart."""
    if len(gateway.ports) > GATEWAY_PORTS_MAX:
        raise value.refused(f"has {len(gateway.ports)} ports", remedy=f"keep to {GATEWAY_PORTS_MAX} over both planes")


def require_served(tenant: Tenant, entries: dict[str, Value], *, gateway: Gateway, backends: str = "backends") -> None:
    """Raise DocumentError when names of the tenant, which stand in the entries, have no port or no server.

    `backends` is where the remedy sends a person for those.
    """
    for key, hosts, ports, protocol, backend in (
        ("hosts", tenant.hosts, gateway.https_ports, "http", tenant.backends.http),
        ("peer_hosts", tenant.peer_hosts, gateway.peer_ports, "peer", tenant.backends.peer),
    ):
        if hosts and backend is None:
            remedy = f"add {backends}.{protocol}, or remove {key}"
            raise entries[key].refused(f"nothing serves the {key} of {tenant.name}", remedy=remedy)
        if hosts and not ports:
            remedy = f"give the gateway a port for them, or remove {key}"
            raise entries[key].refused(f"the gateway has no port for the {key} of {tenant.name}", remedy=remedy)
