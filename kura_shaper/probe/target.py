"""What is asked, how much of it, and what came of it: the values that the client takes and gives."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kura_shaper.probe.failures import OURS

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.probe.failures import Failure
    from kura_shaper.tenants.document import Endpoint
    from kura_shaper.units import Rate

_SECOND_NS = 1_000_000_000
# The gateway lets 32 requests at a time on an HTTP/2 connection.
_STREAMS_PER_CONNECTION_MAX = 32
# A rate at which the probe itself keeps a processor busy for so much of the time says little about the target.
BUSY_PERCENT = 90


class Protocol(StrEnum):
    """What is spoken. AUTO offers HTTP/2 and HTTP/1.1 and takes what it gets; TCP ends where TLS is up."""

    AUTO = "auto"
    HTTP1 = "http1"
    HTTP2 = "http2"
    GRPC = "grpc"
    TCP = "tcp"

    @property
    def alpn(self) -> tuple[str, ...]:
        """What TLS is asked for, the first preferred; () asks for nothing."""
        return {
            Protocol.AUTO: ("h2", "http/1.1"),
            Protocol.HTTP1: ("http/1.1",),
            Protocol.TCP: (),
        }.get(self, ("h2",))

    @property
    def multiplexes(self) -> bool:
        """Whether one connection carries several streams."""
        return self in {Protocol.HTTP2, Protocol.GRPC}


class Security(StrEnum):
    """What it is spoken over."""

    PLAIN = "plain"
    TLS = "tls"


class Family(Enum):
    """Which addresses of a name are tried."""

    ANY = socket.AF_UNSPEC
    IPV4 = socket.AF_INET
    IPV6 = socket.AF_INET6


class Verdict(StrEnum):
    """What a measurement means. UNKNOWN says nothing about the target: we could not try, or could not tell."""

    FINE = "fine"
    SLOW = "slow"
    FAILED = "failed"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that a tenant's client would ask for.

    `small` and `large` are paths (for gRPC, of methods): the small one is asked for once and
    tells times, the large one tells the rate. `expected_status` is that of HTTP, or for gRPC the
    `grpc-status`; None is what means success. `connect_to` is where to go instead of where the
    name leads; the name in TLS and in the request stays.
    """

    name: str
    host: str
    port: int = 443
    protocol: Protocol = Protocol.AUTO
    security: Security = Security.TLS
    tenant: str = ""
    small: str = ""
    large: str = ""
    resource: str = ""
    sni: str = ""
    connect_to: Endpoint | None = None
    family: Family = Family.ANY
    expected_status: int | None = None
    min_rate: Rate | None = None
    ca_file: Path | None = None
    token_file: Path | None = None
    header_file: Path | None = None

    @property
    def authority(self) -> str:
        """The name in requests."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.security is Security.TLS else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def server_name(self) -> str:
        """The name in TLS, which the certificate has to have."""
        return self.sni or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked for.

    Each stream reads `size_bytes`, asking again when an object ends sooner; None is one object,
    whole. After `duration_ns` all of them end, wherever they are. A step before the first byte,
    and a pause after it, may take `timeout_ns`. `connections` 0 is what the protocol does.
    """

    streams: int = 1
    connections: int = 0
    size_bytes: int | None = None
    duration_ns: int = 10 * _SECOND_NS
    timeout_ns: int = 5 * _SECOND_NS

    def streams_of(self, protocol: Protocol) -> tuple[int, ...]:
        """Return how many streams each connection carries."""
        if not protocol.multiplexes:
            return (1,) * self.streams
        connections = self.connections or -(-self.streams // _STREAMS_PER_CONNECTION_MAX)
        least, more = divmod(self.streams, min(connections, self.streams))
        return (least + 1,) * more + (least,) * (min(connections, self.streams) - more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of one measurement. None is what was not reached, or can't be told.

    Times are medians over the connections or streams. `first_byte_ns` runs from the last byte of
    a request to the first of its payload (to the end of the head, where there is no payload). The
    rate is that of all streams together, while all of them flow: from the first byte of the last
    one to begin, until the first one ends.
    """

    target: Target
    address: str = ""
    spoken: str = ""
    status: int | None = None
    grpc_status: int | None = None
    resolve_ns: int | None = None
    connect_ns: int | None = None
    handshake_ns: int | None = None
    first_byte_ns: int | None = None
    first_byte_max_ns: int | None = None
    certificate_ends_at_s: int | None = None
    streams: int = 0
    received_bytes: int = 0
    rate: Rate | None = None
    window_ns: int = 0
    busy_percent: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def is_bound_by_us(self) -> bool:
        """Whether the rate is a lower bound: the probe had no processor left."""
        return self.rate is not None and self.busy_percent >= BUSY_PERCENT

    @property
    def verdict(self) -> Verdict:
        """What it means."""
        if any(failure.reason not in OURS for failure in self.failures):
            return Verdict.FAILED
        if self.failures:
            is_refused = any(failure.reason == "refused" for failure in self.failures)
            return Verdict.REFUSED if is_refused else Verdict.UNKNOWN
        wanted = self.target.min_rate
        if wanted is None or (self.rate is not None and self.rate >= wanted):
            return Verdict.FINE
        return Verdict.UNKNOWN if self.rate is None or self.is_bound_by_us else Verdict.SLOW
