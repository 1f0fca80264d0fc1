"""Which class the gateway's bytes come to at the device: whose they are, or why that can't be told."""

from __future__ import annotations

import ssl
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_ends import receive_all, say_hello_in_pieces, serve_http1
from gateway_rig import HTTPS_PORT, PEER_PORT, VERSIONS
from gateway_wire import ACME, BETA, DOCUMENT, NODE, Wire, gateway_on_a_wire

from kura_shaper.tenants.document import Endpoint, Gateway

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kura_shaper.tenants.document import Tenant

pytestmark = pytest.mark.privileged

OBJECT_BYTES = 200_000


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def shaped(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with gateway_on_a_wire(tmp_path_factory.mktemp("gateway"), version=version) as wire:
        wire.shape()
        yield wire


@contextmanager
def sent(wire: Wire) -> Iterator[dict[str, int]]:
    """Yield what is filled, at the end of the block, with the bytes that each class sent in it."""
    found: dict[str, int] = {}
    before = wire.counters()
    yield found
    after = wire.counters()
    found.update({name: after[name] - before.get(name, 0) for name in after})


def get_object(connection: ssl.SSLSocket, host: str) -> None:
    connection.sendall(f"GET /object/{OBJECT_BYTES} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    received = 0
    while received < OBJECT_BYTES:
        received += len(connection.recv(65_536)) or pytest.fail("the gateway closed the connection")


def test_no_byte_of_any_client_is_unattributed(shaped: Wire) -> None:
    rig = shaped.rig
    with sent(shaped) as found:
        for tenant in (ACME, BETA):
            (host,), (peer_host,) = tenant.hosts, tenant.peer_hosts
            for http in ("--http1.1", "--http2"):
                answer = rig.curl(f"https://{host}/object/{OBJECT_BYTES}", http, "--output", "/dev/null")
                assert answer.stderr.startswith("200")
            with rig.connect_tls(peer_host, PEER_PORT) as connection:
                get_object(connection, peer_host)
        assert rig.curl("https://acme.kura.test/", "--header", "Host: beta.kura.test").stderr.startswith("421")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            rig.connect_tls("unknown.kura.test")
    assert found["unattributed"] == 0
    assert found["unknown"] == 0
    for tenant in (ACME, BETA):
        assert 3 * OBJECT_BYTES < found[tenant.name] < 4 * OBJECT_BYTES


@pytest.mark.parametrize("tls_version", ["TLSv1_2", "TLSv1_3"])
@pytest.mark.parametrize("tenant", [ACME, BETA], ids=lambda tenant: tenant.name)
def test_old_and_new_tls_and_a_session_that_is_resumed_are_the_tenants(
    shaped: Wire, tenant: Tenant, tls_version: str
) -> None:
    context = ssl.create_default_context(cafile=shaped.rig.ca_file)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[tls_version]
    session, resumed = None, []
    with sent(shaped) as found:
        for _ in range(2):
            plain = shaped.rig.connect(HTTPS_PORT)
            with context.wrap_socket(plain, server_hostname=tenant.hosts[0], session=session) as connection:
                get_object(connection, tenant.hosts[0])
                session = connection.session
                resumed.append(connection.session_reused)
    assert resumed == [False, True]
    assert found["unattributed"] == 0
    assert found[tenant.name] > 2 * OBJECT_BYTES


def test_a_hello_in_pieces_is_the_tenants(shaped: Wire) -> None:
    with sent(shaped) as found, closing(shaped.rig.connect(HTTPS_PORT)) as connection:
        say_hello_in_pieces(shaped.rig.client, connection, "acme.kura.test", piece_bytes=60)
        assert connection.recv(1) == b"\x16"
    assert found["unattributed"] == 0
    assert found["acme"] > 1_000


# As in a container that was given no capabilities beyond the usual ones.
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set", "-net_admin,-net_raw", "--inh-caps", "-net_admin,-net_raw")


def test_without_its_capabilities_a_gateway_that_leaves_root_does_not_start_and_says_so(
    version: str, tmp_path: Path
) -> None:
    log = tmp_path / "haproxy.log"
    gateway = gateway_rig.running_gateway(tmp_path, version=version, launcher=WITHOUT_CAPABILITIES)
    with suppress(AssertionError), gateway:
        # 3.0 opens its doors before it finds out.
        deadline = time.monotonic() + 5
        while "Cannot switch uid" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "Cannot switch uid" in log.read_text()


def test_without_its_capabilities_a_gateway_that_stays_root_serves_and_its_bytes_are_unattributed(
    version: str, tmp_path: Path
) -> None:
    """HAProxy says nothing about it, so the class is what has to be watched."""
    changes = {"launcher": WITHOUT_CAPABILITIES, "user": "root", "group": "root"}
    with gateway_on_a_wire(tmp_path, version=version, **changes) as wire:
        wire.shape()
        with sent(wire) as found, wire.rig.connect_tls("acme.kura.test") as connection:
            assert wire.rig.mark(connection) == 0
            get_object(connection, "acme.kura.test")
        assert found["unattributed"] > OBJECT_BYTES
        assert found["acme"] == 0
        assert "ALERT" not in wire.near.log.read_text()
        assert "WARNING" not in wire.near.log.read_text()


def test_beside_another_server_each_ones_bytes_are_told_apart(version: str, tmp_path: Path) -> None:
    """The way to move in: first the gateway on a port of its own, beside what serves on 443."""
    beside = replace(DOCUMENT, gateway=Gateway(https_ports=(8443,), peer_ports=(7443,)))
    with gateway_on_a_wire(tmp_path, version=version, document=beside) as wire, ExitStack() as stack:
        serve_http1(stack, wire.near.namespace.listen(Endpoint(NODE, HTTPS_PORT)), "another")
        wire.shape()
        found = ask_both(wire)
        assert found["acme"] > OBJECT_BYTES
        assert found["host"] > OBJECT_BYTES
        assert found["unattributed"] == 0
        wire.shape(replace(DOCUMENT, gateway=Gateway(https_ports=(443, 8443), peer_ports=(7443,))))
        found = ask_both(wire)
        assert found["acme"] > OBJECT_BYTES
        assert found["host"] < OBJECT_BYTES
        assert found["unattributed"] > OBJECT_BYTES


def ask_both(wire: Wire) -> dict[str, int]:
    """Return what was sent while the gateway was asked once, and the other server too."""
    with sent(wire) as found:
        with wire.rig.connect_tls("acme.kura.test", 8443) as connection:
            get_object(connection, "acme.kura.test")
        with closing(wire.rig.connect(HTTPS_PORT)) as other:
            other.sendall(f"GET /bytes/{OBJECT_BYTES} HTTP/1.0\r\n\r\n".encode())
            assert len(receive_all(other)) > OBJECT_BYTES
    return found
