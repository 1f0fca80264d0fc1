"""Whose each connection is by the gateway's own account: what to hold the mark of its socket against.

`show sess` names a session's client and the backend that it was given, and backends are named
TENANT_PLANE. A connection that no request is under way on may have no session, and is not told of.
(HAProxy management guide, 9.3)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.maps import MARK_MAP
from kura_shaper.haproxy.master import parse_workers
from kura_shaper.haproxy.running import parse_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.haproxy.master import Master, Workers

_SESSION = re.compile(r"^0x[0-9a-f]+: proto=tcpv[46] src=(?P<src>\S+) fe=\S+ be=(?P<be>\S+) ", re.MULTILINE | re.ASCII)
_MAP = re.compile(rf"^(?P<id>\d+) \((?P<file>[^)]*/)?{re.escape(MARK_MAP)}\)", re.MULTILINE | re.ASCII)
_TENANT = re.compile(r"(?P<tenant>[a-z0-9-]{1,63})_(?:edge|peer|http|grpc)", re.ASCII)
Client = tuple[IPv4Address | IPv6Address, int]


@dataclass(frozen=True, slots=True)
class Attribution:
    """What a gateway says: its workers, the mark of each tenant (None: it has no such map), and whose sessions are.

    sessions maps a client's address and port to the tenant that it was given.
    """

    workers: Workers
    marks: Mapping[str, int] | None = None
    sessions: Mapping[Client, str] = field(default_factory=dict)


def read_attribution(master: Master) -> Attribution:
    """Ask a gateway, and each of its old workers for its sessions. Raises NotRunningError or StateUnknownError."""
    workers = parse_workers(master.ask("show proc"))
    sessions = parse_sessions(master.ask("@1 show sess"))
    for old in workers.old:
        # A worker that has ended by now answers nothing that is a session.
        sessions = parse_sessions(master.ask(f"@!{old.pid} show sess")) | sessions
    return Attribution(workers, _marks(master), sessions)


def parse_sessions(text: str) -> dict[Client, str]:
    """Return the tenant of each client in an answer to `show sess`; sessions that are no tenant's are left out."""
    found: dict[Client, str] = {}
    for match in _SESSION.finditer(text):
        tenant = _TENANT.fullmatch(match["be"])
        host, _, port = match["src"].rpartition(":")
        if tenant and port.isdecimal():
            try:
                address = ip_address(host.strip("[]"))
            except ValueError:
                continue
            if isinstance(address, IPv6Address) and address.ipv4_mapped:
                address = address.ipv4_mapped
            found[address, int(port)] = tenant["tenant"]
    return found


def _marks(master: Master) -> dict[str, int] | None:
    match = _MAP.search(master.ask("@1 show map"))
    if match is None:
        return None
    content = parse_map(master.ask(f"@1 show map #{match['id']}"))
    if content is None:
        return None
    return parse_marks(content.decode("utf-8", "replace"))


def parse_marks(text: str) -> dict[str, int]:
    """Return the mark of each tenant in a rendered map. Raises StateUnknownError."""
    found = {}
    for row in text.splitlines():
        tenant, _, mark = row.partition(" ")
        if not mark.isdecimal():
            raise StateUnknownError(f"the gateway's map of marks has the row {row[:80]!r}")
        found[tenant] = int(mark)
    return found
