"""A report without names and addresses: each is replaced by one that means nothing, the same one everywhere.

Values are replaced, not text, and then judged anew: whatever is written of them afterwards, in any form,
has only what stands for them. Rates, counters, class ids, devices and processes stay, which is what a
report is about.
"""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, TypeVar

from kura_shaper.haproxy.sessions import Attribution
from kura_shaper.tenants.document import Backends
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.active import Load
from kura_shaper.verify.expect import observed_of
from kura_shaper.verify.observed import Sockets, Traffic
from kura_shaper.verify.run import Report, judge

if TYPE_CHECKING:
    from kura_shaper.kernel.sockets import Address, Connection
    from kura_shaper.tenants.document import Tenant, TenantsDocument
    from kura_shaper.verify.deployments import Deployment
    from kura_shaper.verify.observed import NodeReading

# Reserved for benchmarks and for documentation (RFC 2544, RFC 3849): nobody has these.
_IPV4, _IPV6 = int(IPv4Address("198.18.0.0")), int(IPv6Address("2001:db8::"))
_IPV4_COUNT = 1 << 17
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w.:]*[\w:])"
)
_MAC = re.compile(r"\b(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}\b")
_T = TypeVar("_T")


class Redactor:
    """Gives each name and address another one. Names get theirs in the order of the document."""

    def __init__(self, document: TenantsDocument) -> None:
        self._addresses: dict[Address, Address] = {}
        self._names = {tenant.name: f"tenant-{number}" for number, tenant in enumerate(document.tenants, start=1)}
        hosts = (host for tenant in document.tenants for host in (*tenant.hosts, *tenant.peer_hosts))
        self._hosts = {host: f"host-{number}.example" for number, host in enumerate(hosts, start=1)}
        words = sorted({**self._names, **self._hosts}, key=len, reverse=True)
        self._words = (
            re.compile("|".join(rf"(?<![\w.-]){re.escape(word)}(?![\w-])" for word in words)) if words else None
        )

    def name(self, tenant: str) -> str:
        """Return what stands for a tenant; one that the document does not have gets a name too."""
        return self._names.setdefault(tenant, f"stranger-{len(self._names) + 1}")

    def host(self, host: str) -> str:
        """Return what stands for a hostname."""
        return self._hosts.setdefault(host, f"host-{len(self._hosts) + 1}.example")

    def address(self, address: Address) -> Address:
        """Return what stands for an address. Loopback and the unspecified one are everybody's."""
        if address.is_loopback or address.is_unspecified:
            return address
        if address not in self._addresses:
            number = len(self._addresses) + 1
            is_v6 = address.version == 6
            # More than there are of the one kind are told as the other: they still differ.
            new = IPv6Address(_IPV6 + number) if is_v6 or number >= _IPV4_COUNT else IPv4Address(_IPV4 + number)
            self._addresses[address] = new
        return self._addresses[address]

    def text(self, text: str) -> str:
        """Return a text without any of them."""
        clean = _MAC.sub("02:00:00:00:00:00", text)
        clean = _ADDRESS.sub(self._address_of, clean)
        return self._words.sub(lambda match: self._word(match[0]), clean) if self._words else clean

    def unknown(self, value: _T | Unknown) -> _T | Unknown:
        """Return a value, or its reason without any of them."""
        return Unknown(self.text(value.reason)) if isinstance(value, Unknown) else value

    def _word(self, word: str) -> str:
        return self._names.get(word) or self._hosts[word]

    def _address_of(self, match: re.Match[str]) -> str:
        try:
            return str(self.address(ip_address(match[0])))
        except ValueError:
            return match[0]


def redacted(report: Report) -> Report:
    """Return the same run with other names and addresses."""
    observed = report.observed
    by = Redactor(observed.question.document)
    question = replace(
        observed.question,
        document=_document(observed.question.document, by),
        deployments=_deployments(observed.question.deployments),
    )
    traffic = observed.traffic
    if isinstance(traffic, Traffic):
        traffic = _traffic(traffic, by)
    elif isinstance(traffic, Unknown):
        traffic = by.unknown(traffic)
    load, earlier = observed.load, observed.earlier
    if isinstance(load, Load):
        load = replace(load, tenant=by.name(load.tenant))
    if earlier:
        earlier = replace(earlier, tenants={by.name(name): class_id for name, class_id in earlier.tenants.items()})
    again = replace(observed_of(question, _node(observed.node, by), traffic), load=by.unknown(load), earlier=earlier)
    phases = {result.check.phase for result in report.results}
    return replace(report, observed=again, results=tuple(judge(again, report.settings, phases)))


def _document(document: TenantsDocument, by: Redactor) -> TenantsDocument:
    return replace(document, region="region", tenants=tuple(_tenant(tenant, by) for tenant in document.tenants))


def _deployments(found: tuple[Deployment, ...] | None) -> tuple[Deployment, ...] | None:
    if found is None:
        return None
    return tuple(replace(one, name=f"deployment-{number}") for number, one in enumerate(found, start=1))


def _tenant(tenant: Tenant, by: Redactor) -> Tenant:
    return replace(
        tenant,
        name=by.name(tenant.name),
        hosts=tuple(map(by.host, tenant.hosts)),
        peer_hosts=tuple(map(by.host, tenant.peer_hosts)),
        client_cidrs=(),
        backends=Backends(),
    )


def _node(node: NodeReading, by: Redactor) -> NodeReading:
    listeners = node.listeners
    if not isinstance(listeners, Unknown):
        listeners = tuple(replace(one, address=by.address(one.address)) for one in listeners)
    proof = replace(node.proof, reason=by.text(node.proof.reason)) if node.proof else None
    return replace(
        node,
        snapshot=by.unknown(node.snapshot),
        proof=proof,
        links=by.unknown(node.links),
        rules=by.unknown(node.rules),
        port=by.unknown(node.port),
        xdp_sockets=by.unknown(node.xdp_sockets),
        hardware_filters=by.unknown(node.hardware_filters),
        default_devices=by.unknown(node.default_devices),
        listeners=by.unknown(listeners),
        holders=by.unknown(node.holders),
        attribution=_attribution(node.attribution, by),
    )


def _traffic(traffic: Traffic, by: Redactor) -> Traffic:
    ways = {str(by.address(ip_address(peer))): way for peer, way in traffic.ways.items()}
    before, after = _sockets(traffic.before, by), _sockets(traffic.after, by)
    broken = {class_id: by.text(reason) for class_id, reason in traffic.broken.items()}
    return replace(traffic, ways=ways, before=before, after=after, broken=broken, softnet=by.unknown(traffic.softnet))


def _sockets(sockets: Sockets | Unknown, by: Redactor) -> Sockets | Unknown:
    if isinstance(sockets, Unknown):
        return by.unknown(sockets)
    return Sockets(tuple(_connection(one, by) for one in sockets.connections), _attribution(sockets.attribution, by))


def _connection(one: Connection, by: Redactor) -> Connection:
    return replace(one, local=by.address(one.local), peer=by.address(one.peer))


def _attribution(found: Attribution | Unknown | None, by: Redactor) -> Attribution | Unknown | None:
    if not isinstance(found, Attribution):
        return by.unknown(found)
    marks = None if found.marks is None else {by.name(tenant): mark for tenant, mark in found.marks.items()}
    sessions = {(by.address(peer), port): by.name(tenant) for (peer, port), tenant in found.sessions.items()}
    return replace(found, marks=marks, sessions=sessions)
