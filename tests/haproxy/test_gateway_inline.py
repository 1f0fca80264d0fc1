"""The design `inline`: TLS ends at the door, and the same promises hold but for the handshake's own bytes."""

from __future__ import annotations

import ssl
from contextlib import closing
from typing import TYPE_CHECKING

import gateway_rig as rig_module
import pytest
from gateway_ceiling import share_of_slow_ceiling
from gateway_ends import H2Client
from gateway_rig import ACME, BETA, DOCUMENT, GUARDED, HTTPS_PORT, PEER_PORT, GatewayRig

from kura_shaper.haproxy.options import Design
from kura_shaper.tenants.marks import ReservedClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.tenants.document import Tenant

pytestmark = pytest.mark.privileged

GATEWAY_MARK = DOCUMENT.marks.mark(ReservedClass.GATEWAY)


@pytest.fixture(scope="module", params=["3.0", "3.2"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayRig]:
    if reason := rig_module.why_not_here():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("inline")
    with rig_module.running_gateway(directory, version=request.param, design=Design.INLINE) as rig:
        yield rig


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_a_tenant_is_served_by_each_of_its_names(gateway: GatewayRig, version: str) -> None:
    for name in ("acme.kura.test", "acme.cache.test"):
        answer = gateway.curl(f"https://{name}/path", f"--http{version}")
        assert answer.stderr == f"200 {version}"
        assert answer.stdout.startswith("acme http1 /path x-forwarded-for=127.0.0.1")
    assert gateway.curl("https://beta.kura.test/google.bytestream.X/Y", "--http2").stdout.startswith("beta grpc ")


@pytest.mark.parametrize("name", ["unknown.kura.test", None])
def test_an_unknown_name_is_refused_in_the_handshake(gateway: GatewayRig, name: str | None) -> None:
    # The certificate is a wildcard, so it would do for the name.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.connect_tls(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("tenant", [ACME, BETA], ids=lambda tenant: tenant.name)
def test_a_connection_is_the_gateways_until_it_is_its_tenants(
    gateway: GatewayRig, tenant: Tenant, address: str
) -> None:
    with closing(gateway.connect(HTTPS_PORT, address=address)) as connection:
        assert gateway.mark(connection) == GATEWAY_MARK
    for name, port in ((tenant.hosts[0], HTTPS_PORT), (tenant.peer_hosts[0], PEER_PORT)):
        with gateway.connect_tls(name, port, address=address) as connection:
            assert gateway.mark(connection, after=GATEWAY_MARK) == DOCUMENT.marks.mark(tenant.class_id)


def test_one_tenant_cannot_charge_another_over_one_connection(gateway: GatewayRig) -> None:
    with gateway.connect_tls("acme.kura.test", alpn=["h2"]) as connection:
        client = H2Client(connection)
        stolen_from = client.get("acme.kura.test", "/endless")
        assert client.status(stolen_from) == "200"
        assert client.status(client.get("beta.kura.test")) == "421"
        before = client.received.get(stolen_from, 0)
        while client.received.get(stolen_from, 0) < before + 500_000:
            client.read()
        assert gateway.mark(connection) == DOCUMENT.marks.mark(ACME.class_id)


def test_clients_outside_the_ranges_are_refused_on_every_plane(gateway: GatewayRig) -> None:
    assert gateway.curl("https://guarded.kura.test/").stderr.startswith("403")
    assert gateway.curl("https://guarded.kura.test/google.bytestream.X", "--http2").stderr.startswith("403")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        gateway.connect_tls(GUARDED.peer_hosts[0], PEER_PORT)


@pytest.mark.traffic
def test_one_ceiling_bounds_all_planes_together(gateway: GatewayRig) -> None:
    assert 0.5 <= share_of_slow_ceiling(gateway) <= 1.1
