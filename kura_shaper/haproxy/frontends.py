"""The doors that clients come in by.

The `edge` frontend reads the name in the ClientHello, so the tenant is known, the
connection marked and its bytes counted before the first of them leaves. TLS ends one
hop later, in `tls`, behind a socket that nobody else can reach. `peer` does the same
with TLS that is not ours to end. What connects to the wrong name is turned away at the
connection: a gRPC client then looks for another address, which an HTTP status would
not make it do. In the design `inline` there is no `edge`: `tls` is the door itself.

Refusals go through sections of their own, so that each kind has its own counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.haproxy.builder import Line, Section, line
from kura_shaper.haproxy.maps import CRT_LIST, GRPC_MAP, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.options import METRICS_MAXCONN, CertificateKind, Design
from kura_shaper.tenants.marks import ReservedClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

# Tenant backends are named TENANT_PLANE. A tenant's name has no underscore, and the names below have
# none either, so neither can be taken for the other.
EDGE, TLS, PEER, METRICS = "edge", "tls", "peer", "metrics"

# Where refused connections and requests end.
UNKNOWN_AT = {EDGE: "unknown-at-edge", PEER: "unknown-at-peer"}
MISDIRECTED = "misdirected"

# JSON, because it escapes what a client sent as its name or path.
_DOOR_LOG = "%(bytes_out)B %(bytes_in)U %(tw)Tw %(tt)Tt %(term)ts %(src)ci"
_ALPN = ("alpn", "h2,http/1.1")
_TLS_LOG = (
    "%{+json}o %(plane)[str(http)] %(tenant)[var(txn.tenant)] %(sni)[ssl_fc_sni] %(host)[var(txn.host)] %(method)HM "
    "%(path)[capture.req.uri] %(version)HV %(status)ST %(bytes_out)B %(bytes_in)U %(ta)Ta %(tr)Tr %(backend)b "
    "%(server)s %(term)ts %(src)ci"
)
_TLS_ERROR_LOG = (
    "%{+json}o %(plane)[str(tls)] %(sni)[ssl_fc_sni] %(error)[fc_err_str] %(tls_error)[ssl_fc_err_str] %(src)ci"
)


def frontend_sections(document: TenantsDocument, options: GatewayOptions) -> tuple[Section, ...]:
    """Return the doors. Without a single host there is no TLS frontend: it would have no certificate."""
    peer = _sni_door(document, options, name=PEER, ports=document.gateway.peer_ports, sni_map=PEER_MAP)
    return (*_https_doors(document, options), *peer, _metrics(options))


def _https_doors(document: TenantsDocument, options: GatewayOptions) -> tuple[Section, ...]:
    ports = document.gateway.https_ports
    has_hosts = any(tenant.hosts for tenant in document.tenants)
    tls = (_tls(document, options), _misdirected()) if has_hosts and ports else ()
    if options.design is Design.INLINE:
        return tls
    return (*_sni_door(document, options, name=EDGE, ports=ports, sni_map=SNI_MAP), *tls)


def _sni_door(
    document: TenantsDocument, options: GatewayOptions, *, name: str, ports: tuple[int, ...], sni_map: str
) -> tuple[Section, ...]:
    if not ports:
        return ()
    tenant = f"var(sess.sni),map_str({options.file(sni_map)})"
    log = f"%{{+json}}o %(plane)[str({name})] %(tenant)[var(sess.tenant)] %(sni)[var(sess.sni)] {_DOOR_LOG}"
    unknown = UNKNOWN_AT[name]
    lines = (
        *(line("bind", *address) for address in _addresses(options, ports)),
        line("maxconn", str(options.maxconn)),
        *((line("timeout client 10m"),) if name == PEER else ()),
        line("tcp-request inspect-delay 5s"),
        _mark_as_gateway(document),
        line("tcp-request content reject unless { req.ssl_hello_type 1 }"),
        line("tcp-request content set-var(sess.sni) req.ssl_sni,lower"),
        line("tcp-request content set-var(sess.tenant)", tenant),
        line("tcp-request content set-fc-mark", _mark(document, options)),
        line("log-format", log),
        # Ends the connection, and counts it apart from what is no TLS at all.
        line("use_backend", unknown, "if", "!{", "var(sess.tenant)", "-m", "found", "}"),
        line("use_backend", f"%[var(sess.tenant)]_{name}"),
    )
    refusal = Section("backend", unknown, (line("tcp-request content reject"),), base="tcp")
    return (Section("frontend", name, lines, base="tcp"), refusal)


def _mark_as_gateway(document: TenantsDocument) -> Line:
    """What leaves before the name is read belongs to no tenant yet."""
    return line("tcp-request connection set-fc-mark", str(document.marks.mark(ReservedClass.GATEWAY)))


def _mark(document: TenantsDocument, options: GatewayOptions) -> str:
    # Without a default the connection would keep the mark that it has.
    return f"var(sess.tenant),map_str_int({options.file(MARK_MAP)},{document.marks.mark(ReservedClass.GATEWAY)})"


def _addresses(options: GatewayOptions, ports: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    for address in options.addresses:
        for port in ports:
            if address.version == 4:
                yield (f"{address}:{port}",)
            else:
                # One socket for both families would show IPv4 clients as ::ffff:192.0.2.1, in logs and to the tenant.
                yield f"[{address}]:{port}", "v6only"


def _tls(document: TenantsDocument, options: GatewayOptions) -> Section:
    sni_map = f"map_str({options.file(SNI_MAP)})"
    grpc = f"path,map_beg({options.file(GRPC_MAP)})"
    lines = (
        *(_inline_doors(document, options) if options.design is Design.INLINE else _inner_door(options)),
        line("maxconn", str(options.maxconn)),
        # Once for the connection, as its mark was: a name that moves while it lives does not move it.
        line("http-request set-var(txn.tenant) var(sess.tenant)"),
        line("http-request set-var(txn.host) req.fhdr(host),host_only,lower,rtrim(.)"),
        line("http-request set-var(txn.owner)", f"var(txn.host),{sni_map}"),
        line("http-request set-var(txn.grpc)", grpc),
        line("http-request del-header x-forwarded- -m beg"),
        line("http-request del-header forwarded"),
        line("http-request del-header x-real-ip"),
        line("http-request set-header x-forwarded-for %[src]"),
        line("http-request set-header x-forwarded-proto https"),
        line("log-format", _TLS_LOG),
        line("error-log-format", _TLS_ERROR_LOG),
        # One connection carries one tenant, the one that its name and its mark say: a request for another
        # would be charged to the wrong account. Clients do try, since one certificate covers many tenants.
        line("use_backend", MISDIRECTED, *["unless", "{", "var(txn.tenant),strcmp(txn.owner)", "eq", "0", "}"]),
        line("use_backend %[var(txn.tenant)]_grpc if { var(txn.grpc) -m found }"),
        # No default backend: a name without one gets 503 and never another tenant's answer.
        line("use_backend %[var(txn.tenant)]_http"),
    )
    return Section("frontend", TLS, lines, base="web")


def _inner_door(options: GatewayOptions) -> tuple[Line, ...]:
    owner = ("mode", "600", "user", options.user, "group", options.group)
    return (
        line("bind", options.tls_socket, *owner, "accept-proxy", *_ends_tls(options)),
        _tenant_of_session(options),
    )


def _inline_doors(document: TenantsDocument, options: GatewayOptions) -> tuple[Line, ...]:
    addresses = _addresses(options, document.gateway.https_ports)
    return (
        *(line("bind", *address, *_ends_tls(options)) for address in addresses),
        _mark_as_gateway(document),
        _tenant_of_session(options),
        line("tcp-request session reject unless { var(sess.tenant) -m found }"),
        line("tcp-request session set-fc-mark", _mark(document, options)),
    )


def _tenant_of_session(options: GatewayOptions) -> Line:
    return line("tcp-request session set-var(sess.tenant)", f"ssl_fc_sni,lower,map_str({options.file(SNI_MAP)})")


def _ends_tls(options: GatewayOptions) -> tuple[str, ...]:
    if options.certificate_kind is CertificateKind.FILE:
        certificate = ("crt-list", options.file(CRT_LIST))
    else:
        certificate = ("crt", str(options.certificate))
    return ("ssl", *certificate, "strict-sni", *_ALPN)


def _misdirected() -> Section:
    return Section("backend", MISDIRECTED, (line("http-request deny deny_status 421"),), base="web")


def _metrics(options: GatewayOptions) -> Section:
    lines = (
        line("bind", str(options.metrics_bind)),
        line("maxconn", str(METRICS_MAXCONN)),
        line("no log"),
        line("http-request use-service prometheus-exporter if { path /metrics }"),
        line("http-request return status 200 content-type text/plain string ok if { path /healthz }"),
        line("http-request deny deny_status 404"),
    )
    return Section("frontend", METRICS, lines, base="web")
