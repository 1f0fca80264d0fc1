"""The sections of one tenant: its bytes on each plane, and its servers.

Everything that goes to a tenant's clients passes its `_edge` or `_peer` backend, which
hold the ceiling: one filter in each, both counting in one table under the tenant's
name, so all its connections share one bucket. In the design `inline`, and where HAProxy
can't limit a connection without losing its end, `_http` and `_grpc` take the place of
`_edge`. The limit is a constant because HAProxy takes no expression for a shared one.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING

from kura_shaper.errors import DocumentError
from kura_shaper.haproxy.builder import Line, Section, line
from kura_shaper.haproxy.frontends import EDGE, PEER
from kura_shaper.haproxy.maps import dns_name
from kura_shaper.haproxy.options import BandwidthLimit, Design
from kura_shaper.haproxy.process import CEILINGS, DNS

if TYPE_CHECKING:
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import Endpoint, Tenant

# HAProxy keeps a limit in a signed 32-bit count of bytes a period; beyond that it collapses without a word.
MAX_LIMIT_BYTES_PER_SECOND = 2**31 - 1
# Without a least slice a crowd of streams passes the ceiling: +62 % at 800 streams. With a whole buffer of HAProxy,
# 16384, the limit saves up what stalled clients did not take, and lets go of it at once when they wake up.
CONNECTION_SLICE_BYTES = 12_288
# Streams of a response each wait for their own slice: with a larger one, some of 200 get nothing for 15 s while the
# tenant's rate falls to half. The price is 2 % above the ceiling, which the tree takes away again.
RESPONSE_SLICE_BYTES = 4_096

_CHECK = ("check", "inter", "1s", "fall", "2", "rise", "1")
_CIDRS_A_LINE = 16
_REJECT = line("tcp-request content reject unless allowed")
_DENY = line("http-request deny deny_status 403 unless allowed")
_LIMIT_BYTES = line("tcp-request content set-bandwidth-limit ceiling")
_READY = line("option httpchk GET /ready")


def tenant_sections(tenant: Tenant, options: GatewayOptions) -> tuple[Section, ...]:
    """Return the tenant's backends for the planes it uses.

    Raises DocumentError for a hostname without a server behind it, a bad address, or a
    ceiling that HAProxy can't hold (1 byte/s to 2 GiB/s) while the bandwidth limit is on.
    """
    sections: list[Section] = []
    allowed = _allowed(tenant)
    counts_bytes = tenant.peer_hosts or (tenant.hosts and options.design is Design.EDGE)
    limit: tuple[Line, ...] = ()
    if counts_bytes and options.limits_connections:
        limit = _limit(tenant, options, _LIMIT_BYTES, slice_bytes=CONNECTION_SLICE_BYTES)
    if tenant.hosts:
        served = (*_http(tenant, options, allowed=allowed), *_grpc(tenant, options, allowed=allowed))
        if not served:
            raise _missing(tenant, "http or grpc")
        if options.design is Design.EDGE:
            to_tls = line("server tls", options.tls_socket, "send-proxy-v2")
            sections.append(_plane(tenant, plane=EDGE, allowed=allowed, limit=limit, server=(to_tls,)))
        sections += served
    if tenant.peer_hosts:
        if tenant.backends.peer is None:
            raise _missing(tenant, "peer")
        server = _server(tenant.backends.peer, options, _CHECK, path=f"tenants[{tenant.name}].backends.peer")
        to_peer = (line("timeout server 10m"), *server)
        sections.append(_plane(tenant, plane=PEER, allowed=allowed, limit=limit, server=to_peer))
    return tuple(sections)


def _allowed(tenant: Tenant) -> tuple[Line, ...]:
    """Return the addresses that may connect, nothing when all may."""
    if not tenant.client_cidrs:
        return ()
    cidrs = [str(cidr) for cidr in sorted(tenant.client_cidrs, key=lambda cidr: (cidr.version, cidr))]
    chunks = (cidrs[start : start + _CIDRS_A_LINE] for start in range(0, len(cidrs), _CIDRS_A_LINE))
    # Lines of one name are alternatives of each other.
    return tuple(line("acl allowed src", *chunk) for chunk in chunks)


def _plane(
    tenant: Tenant, *, plane: str, allowed: tuple[Line, ...], limit: tuple[Line, ...], server: tuple[Line, ...]
) -> Section:
    rules = (*allowed, _REJECT) if allowed else ()
    # A filter is declared ahead of the rules that use it.
    return Section("backend", f"{tenant.name}_{plane}", (*rules, *limit, *server), base="tcp")


def _web(
    tenant: Tenant,
    options: GatewayOptions,
    name: str,
    *,
    allowed: tuple[Line, ...],
    ready: tuple[Line, ...],
    server: tuple[Line, ...],
) -> Section:
    rules = (*allowed, _DENY) if allowed else ()
    limit: tuple[Line, ...] = ()
    if options.design is Design.INLINE or not options.limits_connections:
        # Once for a response, and never for the request too: twice leaks a table entry up to 3.2.25.
        use = line("http-response set-bandwidth-limit ceiling")
        limit = _limit(tenant, options, use, slice_bytes=RESPONSE_SLICE_BYTES)
    return Section("backend", f"{tenant.name}_{name}", (*rules, *limit, *ready, *server), base="web")


def _http(tenant: Tenant, options: GatewayOptions, *, allowed: tuple[Line, ...]) -> tuple[Section, ...]:
    endpoint = tenant.backends.http
    if endpoint is None:
        return ()
    server = _server(endpoint, options, _CHECK, path=f"tenants[{tenant.name}].backends.http")
    return (_web(tenant, options, "http", allowed=allowed, ready=(_READY,), server=server),)


def _grpc(tenant: Tenant, options: GatewayOptions, *, allowed: tuple[Line, ...]) -> tuple[Section, ...]:
    endpoint, http = tenant.backends.grpc, tenant.backends.http
    if endpoint is None:
        return ()
    ready: tuple[Line, ...] = ()
    check: tuple[str, ...] = _CHECK
    # A listener that speaks gRPC alone answers no GET, so readiness is asked of the HTTP port beside it.
    if http is not None and http.host == endpoint.host:
        ready = (_READY,)
        check = ("check", "port", str(http.port), "check-proto", "h1", *_CHECK[1:])
    path = f"tenants[{tenant.name}].backends.grpc"
    server = _server(endpoint, options, ("proto", "h2", *check), path=path)
    return (_web(tenant, options, "grpc", allowed=allowed, ready=ready, server=server),)


def _limit(tenant: Tenant, options: GatewayOptions, use: Line, *, slice_bytes: int) -> tuple[Line, ...]:
    """Return the tenant's filter and the rule that uses it, nothing without the bandwidth limit."""
    if options.bandwidth_limit is BandwidthLimit.OFF:
        return ()
    limit = tenant.ceiling.scaled(100 - options.wire_overhead_percent, 100).bytes_per_second
    if not 1 <= limit <= MAX_LIMIT_BYTES_PER_SECOND:
        path = f"tenants[{tenant.name}].ceiling"
        remedy = "use 8 to 17.179G bit/s, or render without the bandwidth limit"
        raise DocumentError(f"HAProxy can't hold a ceiling of {tenant.ceiling} bit/s", path=path, remedy=remedy)
    key = ("key", f"str({tenant.name})", "table", CEILINGS)
    return (
        line("filter bwlim-out ceiling limit", str(limit), *key, "min-size", str(slice_bytes)),
        use,
    )


def _server(endpoint: Endpoint, options: GatewayOptions, words: tuple[str, ...], *, path: str) -> tuple[Line, ...]:
    if not 1 <= endpoint.port <= 65_535:
        raise DocumentError(f"port {endpoint.port} is out of range", path=path, remedy="use 1 to 65535")
    if endpoint.is_dns_name:
        address = f"{dns_name(endpoint.host, path=path)}:{endpoint.port}"
        slots = ("p", str(options.dns_servers), address, "resolvers", DNS, "init-addr", "last,none")
        return (
            line("load-server-state-from-file global"),
            # One server at a time, the same for as long as it is ready: a cache read from all is cold in each.
            line("balance first"),
            line("server-template", *slots, *words),
        )
    if not _is_address(endpoint.host):
        raise DocumentError(f"{endpoint.host[:64]!r} is no IP address", path=path, remedy="or use dns")
    return (line("server p0", str(endpoint), *words),)


# A tenant's backends are on one address more often than not.
@lru_cache(maxsize=16)
def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _missing(tenant: Tenant, what: str) -> DocumentError:
    path = f"tenants[{tenant.name}].backends"
    return DocumentError("hostnames lead to no server", path=path, remedy=f"add a {what} backend")
