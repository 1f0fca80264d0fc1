"""The tenants document as values: what is promised to whom in one region.

Everything else reads this one shape: the planner, the renderer of the gateway, the
checks. It is only ever built by a source (`tenants.file`), which has checked it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import MarkLayout

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from kura_shaper.units import Rate

# A jump of classic BPF reaches 255 instructions, and each port takes five of them.
GATEWAY_PORTS_MAX = 40
DEFAULT_GRPC_PREFIXES = (
    "/build.bazel.remote.asset.v1.",
    "/build.bazel.remote.execution.v2.",
    "/google.bytestream.",
    "/google.devtools.build.v1.",
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a backend listens: an IP literal, or a DNS name that the gateway resolves itself."""

    host: str
    port: int
    is_dns_name: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Backends:
    """A tenant's servers, one for each protocol that it is reached by."""

    http: Endpoint | None = None
    grpc: Endpoint | None = None
    peer: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """One account: its class id, the rates promised to it, its hostnames and its servers."""

    name: str
    class_id: int
    floor: Rate
    ceiling: Rate
    hosts: tuple[str, ...] = ()
    peer_hosts: tuple[str, ...] = ()
    client_cidrs: tuple[IPv4Network | IPv6Network, ...] = ()
    backends: Backends = field(default_factory=Backends)


@dataclass(frozen=True, slots=True)
class Gateway:
    """Ports of the gateway on every node of the region, and what makes a request gRPC."""

    https_ports: tuple[int, ...] = (443,)
    peer_ports: tuple[int, ...] = (7443,)
    grpc_prefixes: tuple[str, ...] = DEFAULT_GRPC_PREFIXES

    @property
    def ports(self) -> tuple[int, ...]:
        """Every port that customers' bytes leave from, sorted, without repeats."""
        return tuple(sorted({*self.https_ports, *self.peer_ports}))


@dataclass(frozen=True, slots=True)
class TenantsDocument:
    """A checked tenants document. Tenants are sorted by class id."""

    region: str
    tenants: tuple[Tenant, ...]
    marks: MarkLayout = field(default_factory=MarkLayout)
    gateway: Gateway = field(default_factory=Gateway)
