"""The rendered gateway does what it was rendered for: real HAProxy, real TLS, real marks on real sockets."""

from __future__ import annotations

import json
import pwd
import ssl
import stat
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import gateway_rig as rig_module
import pytest
from apply_rig import wait_until
from gateway_ceiling import share_of_slow_ceiling
from gateway_ends import H2Client, receive_all, say_hello_in_pieces
from gateway_rig import ACME, BETA, DOCUMENT, GUARDED, HTTPS_PORT, PEER_PORT, VERSIONS, GatewayRig

from kura_shaper.tenants.marks import ReservedClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.tenants.document import Tenant

pytestmark = pytest.mark.privileged

CAP_NET_BIND_SERVICE, CAP_NET_ADMIN = 10, 12
FORWARDED = "x-forwarded-for=127.0.0.1 x-forwarded-proto=https"
GATEWAY_MARK = DOCUMENT.marks.mark(ReservedClass.GATEWAY)


def mark_of(tenant: Tenant) -> int:
    return DOCUMENT.marks.mark(tenant.class_id)


@pytest.fixture(scope="module", params=VERSIONS)
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    if reason := rig_module.why_not_here():
        pytest.skip(reason)
    with rig_module.running_gateway(tmp_path_factory.mktemp("gateway"), version=request.param) as rig:
        yield rig


@contextmanager
def h2_client(gateway: GatewayRig, name: str) -> Iterator[H2Client]:
    with gateway.connect_tls(name, alpn=["h2"]) as connection:
        yield H2Client(connection)


@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("acme.kura.test", ""),
        ("acme.cache.test", ""),
        ("ACME.kura.test", "ACME.Kura.Test"),
        ("acme.kura.test", "acme.kura.test."),
        ("acme.kura.test", "acme.kura.test:443"),
        ("acme.kura.test", "acme.cache.test"),
    ],
)
def test_a_tenant_is_served_by_each_of_its_names(gateway: GatewayRig, version: str, name: str, host: str) -> None:
    header = ("--header", f"Host: {host}") if host else ()
    answer = gateway.curl(f"https://{name}/some/path", f"--http{version}", *header)
    assert (answer.stderr, answer.stdout) == (f"200 {version}", f"acme http1 /some/path {FORWARDED}")


@pytest.mark.parametrize("prefix", DOCUMENT.gateway.grpc_prefixes)
def test_grpc_paths_go_to_the_h2_server(gateway: GatewayRig, prefix: str) -> None:
    answer = gateway.curl(f"https://beta.kura.test{prefix}Service/Call", "--http2")
    assert (answer.stderr, answer.stdout) == ("200 2", f"beta grpc {prefix}Service/Call")


def test_a_grpc_prefix_in_other_case_or_further_on_is_no_grpc(gateway: GatewayRig) -> None:
    for path in ("/Google.Bytestream.X", "/x/google.bytestream.Y"):
        assert gateway.curl(f"https://beta.kura.test{path}", "--http2").stdout.startswith("beta http1 ")


@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize("host", ["beta.kura.test", "unknown.kura.test", "beta.kura.test:443", "127.0.0.1"])
def test_another_tenants_host_is_misdirected(gateway: GatewayRig, version: str, host: str) -> None:
    answer = gateway.curl("https://acme.kura.test/", f"--http{version}", "--header", f"Host: {host}")
    assert answer.stderr == f"421 {version}"


@pytest.mark.parametrize(
    "request_head",
    [
        "GET / HTTP/1.0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: beta.kura.test, acme.kura.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: acme.kura.test\r\nHost: beta.kura.test\r\n\r\n",
        "GET https://beta.kura.test/ HTTP/1.1\r\nHost: acme.kura.test\r\n\r\n",
        "GET https://beta.kura.test/ HTTP/1.1\r\nHost: beta.kura.test\r\n\r\n",
    ],
)
def test_no_spelling_of_the_host_gets_past(gateway: GatewayRig, request_head: str) -> None:
    with gateway.connect_tls("acme.kura.test") as connection:
        connection.sendall(request_head.encode())
        answer = connection.recv(4096).decode()
    assert answer.split()[1] in {"400", "421"}, answer


def test_forwarding_headers_of_a_client_are_not_believed(gateway: GatewayRig) -> None:
    names = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP")
    headers = [word for name in names for word in ("--header", f"{name}: 198.51.100.7")]
    assert gateway.curl("https://acme.kura.test/x", *headers).stdout == f"acme http1 /x {FORWARDED}"


@pytest.mark.parametrize("port", [HTTPS_PORT, PEER_PORT])
@pytest.mark.parametrize("name", ["unknown.kura.test", "kura.test", None])
def test_an_unknown_name_is_refused_at_the_connection(gateway: GatewayRig, port: int, name: str | None) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.connect_tls(name, port)


def test_planes_do_not_serve_each_others_names(gateway: GatewayRig) -> None:
    for name, port in (("peer.acme.kura.test", HTTPS_PORT), ("acme.kura.test", PEER_PORT)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            gateway.connect_tls(name, port)


@pytest.mark.parametrize("port", [HTTPS_PORT, PEER_PORT])
def test_what_is_no_tls_is_refused_at_once(gateway: GatewayRig, port: int) -> None:
    started = time.monotonic()
    with closing(gateway.connect(port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: acme.kura.test\r\n\r\n")
        with pytest.raises(ConnectionError):
            assert connection.recv(10) or _closed()
    assert time.monotonic() - started < 2


def _closed() -> bytes:
    raise ConnectionError("closed")


@pytest.mark.parametrize("port", [HTTPS_PORT, PEER_PORT])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_has_the_gateways_mark_until_it_names_a_tenant(
    gateway: GatewayRig, port: int, address: str
) -> None:
    with closing(gateway.connect(port, address=address)) as connection:
        assert gateway.mark(connection) == GATEWAY_MARK


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("tenant", [ACME, BETA], ids=lambda tenant: tenant.name)
def test_a_connection_carries_its_tenants_mark(gateway: GatewayRig, tenant: Tenant, address: str) -> None:
    with gateway.connect_tls(tenant.hosts[0], address=address) as connection:
        assert gateway.mark(connection) == mark_of(tenant)
    with gateway.connect_tls(tenant.peer_hosts[0], PEER_PORT, address=address) as connection:
        assert gateway.mark(connection) == mark_of(tenant)


def test_a_mark_with_its_highest_bit_set_arrives_whole(gateway: GatewayRig) -> None:
    assert mark_of(GUARDED) >= 2**31
    with gateway.connect_tls(GUARDED.hosts[0], source="127.0.0.9") as connection:
        assert gateway.mark(connection) == mark_of(GUARDED)


def test_a_name_that_arrives_in_pieces_is_read(gateway: GatewayRig) -> None:
    with closing(gateway.connect(HTTPS_PORT)) as connection:
        say_hello_in_pieces(gateway.client, connection, "beta.kura.test", piece_bytes=100)
        assert connection.recv(1) == b"\x16"
        assert gateway.mark(connection) == mark_of(BETA)


def test_one_tenant_cannot_charge_another_over_one_connection(gateway: GatewayRig) -> None:
    with h2_client(gateway, "acme.kura.test") as client:
        stolen_from = client.get("acme.kura.test", "/endless")
        assert client.status(stolen_from) == "200"
        before = client.received.get(stolen_from, 0)
        for more in ((), (("host", "beta.kura.test"),)):
            assert client.status(client.get("beta.kura.test", "/", *more)) == "421"
            assert gateway.mark(client.connection) == mark_of(ACME)
        while client.received[stolen_from] < before + 500_000:
            client.read()
        assert gateway.mark(client.connection) == mark_of(ACME)


@pytest.mark.parametrize(("address", "source"), [("127.0.0.1", "127.0.0.9"), ("::1", "::1")])
def test_clients_within_the_ranges_are_served(gateway: GatewayRig, address: str, source: str) -> None:
    with gateway.connect_tls(GUARDED.hosts[0], address=address, source=source) as connection:
        connection.sendall(b"GET /in HTTP/1.0\r\nHost: guarded.kura.test\r\n\r\n")
        assert receive_all(connection).endswith(f"http1 /in {FORWARDED.replace('127.0.0.1', source)}".encode())
    with gateway.connect_tls(GUARDED.peer_hosts[0], PEER_PORT, address=address, source=source) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"guarded peer"


@pytest.mark.parametrize(("name", "port"), [(GUARDED.hosts[0], HTTPS_PORT), (GUARDED.peer_hosts[0], PEER_PORT)])
def test_clients_outside_the_ranges_are_refused(gateway: GatewayRig, name: str, port: int) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.connect_tls(name, port)


def test_the_peer_plane_passes_the_peers_own_tls(gateway: GatewayRig) -> None:
    with gateway.connect_tls("peer.beta.kura.test", PEER_PORT) as connection:
        certificate = connection.getpeercert()
        assert certificate is not None
        assert certificate["subjectAltName"] == (("DNS", "peer.beta.kura.test"),)
        connection.sendall(b"hello")
        assert connection.recv(100) == b"beta peer"


@pytest.mark.traffic
def test_one_ceiling_bounds_all_planes_together(gateway: GatewayRig) -> None:
    assert 0.5 <= share_of_slow_ceiling(gateway) <= 1.1


def _metrics_door(gateway: GatewayRig, path: str) -> str:
    with closing(gateway.connect(8405)) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return receive_all(connection).decode()


def _metric(gateway: GatewayRig, series: str) -> int:
    rows = dict(row.rsplit(" ", 1) for row in _metrics_door(gateway, "/metrics").splitlines() if row.startswith("hap"))
    return int(rows[series])


def test_misdirected_requests_and_each_tenants_bytes_are_counted(gateway: GatewayRig) -> None:
    denied, sent = (
        'haproxy_frontend_requests_denied_total{proxy="tls"}',
        'haproxy_backend_bytes_out_total{proxy="beta_edge"}',
    )
    before = _metric(gateway, denied), _metric(gateway, sent)
    gateway.curl("https://beta.kura.test/", "--header", "Host: acme.kura.test")
    assert _metric(gateway, denied) == before[0] + 1
    # The client has the response before HAProxy has counted it.
    assert wait_until(lambda: _metric(gateway, sent) > before[1], what="the bytes of the response")


def test_metrics_and_health_answer_on_the_loopback_alone(gateway: GatewayRig) -> None:
    assert _metrics_door(gateway, "/healthz").startswith("HTTP/1.1 200 OK")
    assert _metrics_door(gateway, "/").startswith("HTTP/1.1 404")
    listeners = gateway.namespace.run("ss", "-Htnl", "sport = :8405").split()
    assert listeners[3] == "127.0.0.1:8405"


def test_logs_are_json_that_names_the_tenant(gateway: GatewayRig) -> None:
    with h2_client(gateway, "beta.kura.test") as client:
        client.status(client.get('beta.kura.test"', "/quote'\"%22"))
    gateway.curl("https://beta.kura.test/logged", "--http2")
    deadline = time.monotonic() + 3
    while "/logged" not in gateway.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    rows = [json.loads(row) for row in gateway.log.read_text().splitlines() if row.startswith("{")]
    logged = next(row for row in rows if row.get("path") == "/logged")
    assert (logged["tenant"], logged["status"], logged["src"]) == ("beta", 200, "127.0.0.1")
    strange = [row for row in gateway.log.read_text().splitlines() if not row.startswith(("{", "[NOTICE]"))]
    assert strange == []


def test_the_private_door_is_closed_to_others(gateway: GatewayRig) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    for name, owner in (("tls.sock", nobody), ("admin.sock", 0)):
        status = (gateway.namespace.root / "mnt" / name).stat()
        assert (stat.filemode(status.st_mode), status.st_uid) == ("srw-------", owner)


def _processes(gateway: GatewayRig) -> list[dict[str, str]]:
    """Return the fields of /proc/PID/status of each HAProxy inside."""
    texts = [path.read_text() for path in (gateway.namespace.root / "proc").glob("[0-9]*/status")]
    tables = [dict(row.split(":\t", 1) for row in text.splitlines() if ":\t" in row) for text in texts]
    return [table for table in tables if table["Name"] == "haproxy"]


def test_the_worker_holds_the_two_capabilities_alone(gateway: GatewayRig) -> None:
    (worker,) = [table for table in _processes(gateway) if not table["Uid"].startswith("0\t")]
    assert int(worker["CapEff"], 16) == (1 << CAP_NET_ADMIN) | (1 << CAP_NET_BIND_SERVICE)


def test_a_reload_keeps_serving_under_the_programs_own_name(gateway: GatewayRig) -> None:
    assert "Success=1" in gateway.master("reload")
    assert gateway.curl("https://acme.kura.test/after", "--http2").stderr == "200 2"
    assert [table["Uid"] for table in _processes(gateway)].count("0\t0\t0\t0") == 1
    with gateway.connect_tls("beta.kura.test") as connection:
        assert gateway.mark(connection) == mark_of(BETA)
