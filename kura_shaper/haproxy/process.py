"""The sections that are nobody's in particular: process settings, defaults, resolvers, and the table of ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.haproxy.builder import Section, line
from kura_shaper.haproxy.options import BandwidthLimit

if TYPE_CHECKING:
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

CEILINGS, DNS = "ceilings", "dns"

# What a running gateway says it was started with. The id is put in once the rest is known.
CONFIG_ID_PREFIX = "kura-shaper-"
NO_CONFIG_ID = "0000000000000000"

HAS_NOTSENT_LOWAT = (3, 1, 0)

# A table entry lives for each tenant; one that doesn't fit would push another's count out.
_MIN_TABLE_ENTRIES = 1024


def process_sections(document: TenantsDocument, options: GatewayOptions) -> tuple[Section, ...]:
    """Return `global`, the defaults, the resolvers when a backend is a DNS name, and the table of ceilings."""
    backends = [tenant.backends for tenant in document.tenants]
    endpoints = (endpoint for group in backends for endpoint in (group.http, group.grpc, group.peer))
    sections = [_global(options), *_defaults()]
    if any(endpoint is not None and endpoint.is_dns_name for endpoint in endpoints):
        sections.append(_resolvers(options))
    if options.bandwidth_limit is BandwidthLimit.ON:
        sections.append(_ceilings(document))
    return tuple(sections)


def _global(options: GatewayOptions) -> Section:
    lines = [
        line("log stdout format raw local0 info"),
        line("description", f"{CONFIG_ID_PREFIX}{NO_CONFIG_ID}"),
        line("stats socket", str(options.admin_socket), "mode", "600", "level", "admin", "expose-fd", "listeners"),
        # Without it a new worker would answer 503 for a DNS name until it has asked for the address.
        line("server-state-file", str(options.servers_state)),
        line("master-worker no-exit-on-failure"),
        line("maxconn", str(options.process_maxconn)),
        # An old worker has a table of its own, so for as long as it lives a ceiling counts twice in the gateway.
        line("hard-stop-after", f"{options.hard_stop_after_s}s"),
        line("close-spread-time 30s"),
        # Without cap_net_admin no mark is set, and no message says so.
        line("setcap cap_net_admin,cap_net_bind_service"),
        line("user", options.user),
        line("group", options.group),
        line("ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets"),
        # The key of tls.crt is then looked for in tls.key, as a mounted Kubernetes Secret has them.
        line("ssl-load-extra-del-ext"),
        line("tune.h2.fe.max-concurrent-streams", str(options.h2_streams)),
    ]
    if options.nbthread is not None:
        lines.append(line("nbthread", str(options.nbthread)))
    if options.has_h2_rxbuf:
        lines.append(line("tune.h2.fe.rxbuf", str(options.h2_window)))
    else:
        lines.append(line("tune.h2.fe.initial-window-size", str(options.h2_window)))
    # Bytes already in a client's socket buffer are past the limit: keep them few.
    if options.haproxy_version >= HAS_NOTSENT_LOWAT:
        lines.append(line("tune.notsent-lowat.client 16384"))
    return Section("global", "", tuple(lines))


def _defaults() -> tuple[Section, ...]:
    base = (
        line("log global"),
        line("option dontlognull"),
        line("retries 2"),
        line("timeout connect 5s"),
        line("timeout client 3600s"),
        line("timeout server 3600s"),
        line("timeout client-fin 30s"),
        line("timeout check 2s"),
    )
    web = (
        line("mode http"),
        line("timeout http-request 10s"),
        line("timeout http-keep-alive 75s"),
        line("timeout tunnel 3600s"),
    )
    return (
        Section("defaults", "base", base),
        Section("defaults", "tcp", (line("mode tcp"),), base="base"),
        Section("defaults", "web", web, base="base"),
    )


def _resolvers(options: GatewayOptions) -> Section:
    servers = [line("nameserver", f"ns{n}", str(server)) for n, server in enumerate(options.resolvers)]
    timing = (
        line("accepted_payload_size 8192"),
        line("resolve_retries 3"),
        line("timeout resolve 1s"),
        line("timeout retry 1s"),
        line("hold valid 2s"),
        line("hold obsolete 3s"),
        line("hold nx 5s"),
    )
    return Section("resolvers", DNS, (*(servers or [line("parse-resolv-conf")]), *timing))


def _ceilings(document: TenantsDocument) -> Section:
    entries = _MIN_TABLE_ENTRIES
    while entries < 2 * len(document.tenants):
        entries *= 2
    # Keys are cut at `len` without a word; a DNS label has at most 63 characters.
    table = line("stick-table type string len 64 size", str(entries), "expire", "1h", "store", "bytes_out_rate(1s)")
    return Section("backend", CEILINGS, (table,), base="tcp")
