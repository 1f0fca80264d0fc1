"""The sections that all tenants share: process settings, defaults, and the doors that clients come in by.

The `edge` frontend reads the name in the ClientHello, so the tenant is known, the
connection marked and its bytes counted before the first of them leaves. TLS ends one
hop later, in `tls`, behind a socket that nobody else can reach. `peer` does the same
with TLS that is not ours to end. What connects to the wrong name is turned away at the
connection: a gRPC client then looks for another address, which an HTTP status would
not make it do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.haproxy.builder import Line, Section, line
from kura_shaper.haproxy.maps import CRT_LIST, GRPC_MAP, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.options import BandwidthLimit, CertificateKind
from kura_shaper.tenants.marks import ReservedClass

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

# Tenant backends are named TENANT_PLANE. A tenant's name has no underscore, and the names below have
# none either, so neither can be taken for the other.
EDGE, TLS, PEER, METRICS, CEILINGS, DNS = "edge", "tls", "peer", "metrics", "ceilings", "dns"

HAS_NOTSENT_LOWAT = (3, 1, 0)
HAS_H2_RXBUF = (3, 1, 0)

# A table entry lives for each tenant; one that doesn't fit would push another's count out.
_MIN_TABLE_ENTRIES = 1024

# JSON, because it escapes what a client sent as its name or path.
_DOOR_LOG = "%(bytes_out)B %(bytes_in)U %(tw)Tw %(tt)Tt %(term)ts %(src)ci"
_METRICS_MAXCONN = 100
_ALPN = ("alpn", "h2,http/1.1")
_TLS_LOG = (
    "%{+json}o %(plane)[str(http)] %(tenant)[var(txn.tenant)] %(sni)[ssl_fc_sni] %(host)[var(txn.host)] %(method)HM "
    "%(path)[capture.req.uri] %(version)HV %(status)ST %(bytes_out)B %(bytes_in)U %(ta)Ta %(tr)Tr %(backend)b "
    "%(server)s %(term)ts %(src)ci"
)
_TLS_ERROR_LOG = (
    "%{+json}o %(plane)[str(tls)] %(sni)[ssl_fc_sni] %(error)[fc_err_str] %(tls_error)[ssl_fc_err_str] %(src)ci"
)


def process_sections(document: TenantsDocument, options: GatewayOptions) -> tuple[Section, ...]:
    """Return `global`, the defaults, the resolvers when a backend is a DNS name, and the table of ceilings."""
    sections = [_global(options), *_defaults()]
    backends = [tenant.backends for tenant in document.tenants]
    endpoints = (endpoint for group in backends for endpoint in (group.http, group.grpc, group.peer))
    if any(endpoint is not None and endpoint.is_dns_name for endpoint in endpoints):
        sections.append(_resolvers(options))
    if options.bandwidth_limit is BandwidthLimit.ON:
        sections.append(_ceilings(document))
    return tuple(sections)


def frontend_sections(document: TenantsDocument, options: GatewayOptions) -> tuple[Section, ...]:
    """Return the doors. Without a single host there is no TLS frontend: it would have no certificate."""
    edge = _sni_door(document, options, name=EDGE, ports=document.gateway.https_ports, sni_map=SNI_MAP)
    peer = _sni_door(document, options, name=PEER, ports=document.gateway.peer_ports, sni_map=PEER_MAP)
    has_hosts = any(tenant.hosts for tenant in document.tenants)
    doors = (edge, *((_tls(options),) if has_hosts else ()), peer)
    return (*(door for door in doors if door.lines), _metrics(options))


def _global(options: GatewayOptions) -> Section:
    lines = [
        line("log stdout format raw local0 info"),
        line("stats socket", str(options.admin_socket), "mode", "600", "level", "admin", "expose-fd", "listeners"),
        line("master-worker no-exit-on-failure"),
        # A TLS client counts twice, at the edge and behind it. Were the sum not bounded below this, a full edge
        # would leave no room behind it, and everybody would wait for everybody.
        line("maxconn", str(3 * options.maxconn + _METRICS_MAXCONN)),
        # An old worker has a table of its own, so for as long as it lives a ceiling counts twice in the gateway.
        line("hard-stop-after 30m"),
        line("close-spread-time 30s"),
        # Without cap_net_admin no mark is set, and no message says so.
        line("setcap cap_net_admin,cap_net_bind_service"),
        line("user", options.user),
        line("group", options.group),
        line("ssl-default-bind-options ssl-min-ver TLSv1.2 no-tls-tickets"),
        # The key of tls.crt is then looked for in tls.key, as a mounted Kubernetes Secret has them.
        line("ssl-load-extra-del-ext"),
        line("tune.h2.fe.max-concurrent-streams 32"),
    ]
    if options.nbthread is not None:
        lines.append(line("nbthread", str(options.nbthread)))
    # A window of 64 KiB, the default, holds an upload over 190 ms to 0.3 MB/s.
    if options.haproxy_version >= HAS_H2_RXBUF:
        lines.append(line("tune.h2.fe.rxbuf 4194304"))
    else:
        lines.append(line("tune.h2.fe.initial-window-size 4194304"))
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
    web = (line("mode http"), line("timeout http-request 10s"), line("timeout http-keep-alive 75s"))
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


def _sni_door(
    document: TenantsDocument, options: GatewayOptions, *, name: str, ports: tuple[int, ...], sni_map: str
) -> Section:
    gateway_mark = str(document.marks.mark(ReservedClass.GATEWAY))
    tenant = f"var(sess.sni),map_str({options.file(sni_map)})"
    mark = f"var(sess.tenant),map_str_int({options.file(MARK_MAP)},{gateway_mark})"
    log = f"%{{+json}}o %(plane)[str({name})] %(tenant)[var(sess.tenant)] %(sni)[var(sess.sni)] {_DOOR_LOG}"
    lines = (
        *(_bind(address, port) for address in options.addresses for port in ports),
        line("maxconn", str(options.maxconn)),
        *((line("timeout client 10m"),) if name == PEER else ()),
        line("tcp-request inspect-delay 5s"),
        # What leaves before the name is read belongs to no tenant yet.
        line("tcp-request connection set-fc-mark", gateway_mark),
        line("tcp-request content reject unless { req.ssl_hello_type 1 }"),
        line("tcp-request content set-var(sess.sni) req.ssl_sni,lower"),
        line("tcp-request content set-var(sess.tenant)", tenant),
        line("tcp-request content reject unless { var(sess.tenant) -m found }"),
        line("tcp-request content set-fc-mark", mark),
        line("log-format", log),
        line("use_backend", f"%[var(sess.tenant)]_{name}"),
    )
    return Section("frontend", name, lines if ports else (), base="tcp")


def _bind(address: IPv4Address | IPv6Address, port: int) -> Line:
    if address.version == 4:
        return line("bind", f"{address}:{port}")
    # One socket for both families would show IPv4 clients as ::ffff:192.0.2.1, in logs and to the tenant.
    return line("bind", f"[{address}]:{port}", "v6only")


def _tls(options: GatewayOptions) -> Section:
    if options.certificate_kind is CertificateKind.FILE:
        certificate = ("crt-list", options.file(CRT_LIST))
    else:
        certificate = ("crt", str(options.certificate))
    owner = ("mode", "600", "user", options.user, "group", options.group)
    sni_map = f"map_str({options.file(SNI_MAP)})"
    grpc = f"path,map_beg({options.file(GRPC_MAP)})"
    lines = (
        line("bind", options.tls_socket, *owner, "accept-proxy", "ssl", *certificate, "strict-sni", *_ALPN),
        line("maxconn", str(options.maxconn)),
        line("http-request set-var(txn.tenant)", f"ssl_fc_sni,lower,{sni_map}"),
        line("http-request set-var(txn.host) req.fhdr(host),host_only,lower,rtrim(.)"),
        line("http-request set-var(txn.owner)", f"var(txn.host),{sni_map}"),
        # One connection carries one tenant, the one that its name and its mark say: a request for another
        # would be charged to the wrong account. Clients do try, since one certificate covers many tenants.
        line("http-request deny deny_status 421 unless { var(txn.tenant),strcmp(txn.owner) eq 0 }"),
        line("http-request set-var(txn.grpc)", grpc),
        line("http-request del-header x-forwarded- -m beg"),
        line("http-request del-header forwarded"),
        line("http-request del-header x-real-ip"),
        line("http-request set-header x-forwarded-for %[src]"),
        line("http-request set-header x-forwarded-proto https"),
        line("log-format", _TLS_LOG),
        line("error-log-format", _TLS_ERROR_LOG),
        line("use_backend %[var(txn.tenant)]_grpc if { var(txn.grpc) -m found }"),
        # No default backend: a name without one gets 503 and never another tenant's answer.
        line("use_backend %[var(txn.tenant)]_http"),
    )
    return Section("frontend", TLS, lines, base="web")


def _metrics(options: GatewayOptions) -> Section:
    lines = (
        line("bind", str(options.metrics_bind)),
        line("maxconn", str(_METRICS_MAXCONN)),
        line("no log"),
        line("http-request use-service prometheus-exporter if { path /metrics }"),
        line("http-request return status 200 content-type text/plain string ok if { path /healthz }"),
        line("http-request deny deny_status 404"),
    )
    return Section("frontend", METRICS, lines, base="web")
