"""From what a gateway has to what is wanted: nothing, a change while it runs, or a reload with its reason."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
from gateway_model import ACME, BETA, OPTIONS, FakeGateway, document, tenant
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.haproxy.decide import Decision, Kind, LocalCertificate, config_id, decide
from kura_shaper.haproxy.generation import EMPTY
from kura_shaper.haproxy.maps import CRT_LIST, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.options import CertificateKind
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.running import read_running
from kura_shaper.haproxy.steps import AddHost, MoveServer, RemoveHost, ReplaceCertificate, ReplaceMap
from kura_shaper.tenants.document import Backends, Endpoint, Gateway
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

OLD = document(ACME, BETA)
AA, BB, CC = (letter * 40 for letter in "ABC")
PEERS = Backends(ACME.backends.http, ACME.backends.grpc, Endpoint("10.0.0.1", 7000))
GUEST = replace(ACME, peer_hosts=("peer.acme.test",), backends=PEERS)
HTTP_ONLY = replace(ACME, backends=Backends(http=ACME.backends.http))
DNS = replace(ACME, backends=Backends(http=Endpoint("acme.svc.test", 4000, is_dns_name=True)))


def gateway_of(old: TenantsDocument, options: GatewayOptions = OPTIONS) -> FakeGateway:
    gateway = FakeGateway(options)
    gateway.load(render(old, options))
    return gateway


def decided(
    new: TenantsDocument,
    gateway: FakeGateway,
    *,
    loaded: TenantsDocument = OLD,
    certificates: dict[str, LocalCertificate] | None = None,
) -> Decision:
    options = gateway.options
    running = read_running(gateway, options, certificates=tuple(certificates or ()))
    return decide(
        render(new, options), running, options, loaded=render(loaded, options), certificates=certificates or {}
    )


def settled(new: TenantsDocument, gateway: FakeGateway, *, loaded: TenantsDocument = OLD) -> Decision:
    """Decide, do it, and expect that nothing is left."""
    decision = decided(new, gateway, loaded=loaded)
    assert decision.kind is Kind.RUNTIME
    assert decision.reasons == tuple(step.describe() for step in decision.steps)
    for step in decision.steps:
        step.perform(gateway)
    assert decided(new, gateway, loaded=loaded).kind is Kind.NONE
    return decision


def kinds(decision: Decision) -> list[str]:
    return [
        f"{type(s).__name__} {s.path[11:]}" if isinstance(s, ReplaceMap) else type(s).__name__ for s in decision.steps
    ]


def test_the_same_is_nothing() -> None:
    assert decided(OLD, gateway_of(OLD)) == Decision(Kind.NONE)


def moved(endpoint: Endpoint) -> TenantsDocument:
    return document(replace(ACME, backends=Backends(http=endpoint, grpc=replace(endpoint, port=5000))), BETA)


@pytest.mark.parametrize(
    ("new", "steps"),
    [
        (document(replace(ACME, hosts=("acme.kura.test", "new.test")), BETA), ["AddHost", "ReplaceMap sni.map"]),
        (document(replace(ACME, hosts=("new.test",)), BETA), ["AddHost", "ReplaceMap sni.map", "RemoveHost"]),
        (document(replace(ACME, hosts=BETA.hosts), replace(BETA, hosts=ACME.hosts)), ["ReplaceMap sni.map"]),
        (document(replace(ACME, class_id=0x200), BETA), ["ReplaceMap mark.map"]),
        (document(replace(ACME, class_id=0x101), replace(BETA, class_id=0x100)), ["ReplaceMap mark.map"]),
        (replace(OLD, gateway=Gateway(grpc_prefixes=("/a.",))), ["ReplaceMap grpc.map"]),
        (replace(OLD, gateway=Gateway(grpc_prefixes=())), ["ReplaceMap grpc.map"]),
        (document(ACME), ["ReplaceMap sni.map", "ReplaceMap mark.map", "RemoveHost"]),
        (moved(Endpoint("10.0.0.2", 4000)), ["MoveServer", "MoveServer"]),
        (moved(Endpoint("10.0.0.1", 4444)), ["MoveServer", "MoveServer"]),
        (moved(Endpoint("2001:db8::1", 4000)), ["MoveServer", "MoveServer"]),
    ],
)
def test_what_can_be_changed_while_it_runs(new: TenantsDocument, steps: list[str]) -> None:
    assert kinds(settled(new, gateway_of(OLD))) == steps


def test_a_server_that_is_checked_at_the_port_beside_it_follows_that_port() -> None:
    (http, grpc) = (s for s in settled(moved(Endpoint("10.0.0.1", 4444)), gateway_of(OLD)).steps)
    assert http == MoveServer("acme_http/p0", "10.0.0.1", 4444, 0)
    assert grpc == MoveServer("acme_grpc/p0", "10.0.0.1", 5000, 4444)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (OLD, document(ACME, BETA, tenant("gamma", 0x102)), "tenant gamma: backend gamma_edge is new"),
        (OLD, document(replace(ACME, ceiling=Rate.parse("2G")), BETA), "tenant acme: another ceiling, and "),
        (
            OLD,
            document(replace(ACME, client_cidrs=(ip_network("10.0.0.0/8"),)), BETA),
            "tenant acme: other client_cidrs",
        ),
        (OLD, document(HTTP_ONLY, BETA), "tenant acme: backend acme_grpc is to go"),
        (document(GUEST, BETA), document(replace(GUEST, hosts=()), BETA), ""),
        (document(HTTP_ONLY, BETA), document(DNS, BETA), "section resolvers dns is new"),
        (
            document(DNS, BETA),
            document(HTTP_ONLY, BETA),
            "tenant acme: its servers are found or checked in another way",
        ),
        (
            document(DNS, BETA),
            document(replace(DNS, backends=Backends(http=Endpoint("b.svc.test", 4000, is_dns_name=True))), BETA),
            "tenant acme: its servers are found or checked in another way",
        ),
        (OLD, replace(OLD, gateway=Gateway(https_ports=(8443,))), "section frontend edge changes: bind 0.0.0.0:8443"),
        (OLD, replace(OLD, gateway=Gateway(peer_ports=())), "section frontend peer is to go"),
    ],
)
def test_what_takes_a_reload_and_why(old: TenantsDocument, new: TenantsDocument, reason: str) -> None:
    decision = decided(new, gateway_of(old), loaded=old)
    assert decision.steps == () or not reason
    assert decision.kind is (Kind.RELOAD if reason else Kind.RUNTIME)
    assert not reason or reason in "; ".join(decision.reasons)


def test_a_grpc_server_that_loses_its_readiness_port_takes_a_reload() -> None:
    new = document(replace(ACME, backends=Backends(ACME.backends.http, Endpoint("10.0.0.9", 5000))), BETA)
    assert decided(new, gateway_of(OLD)).reasons == ("tenant acme: its servers are found or checked in another way",)


def test_a_plane_without_names_stays_loaded_and_is_noted() -> None:
    old, new = document(GUEST, BETA), document(replace(ACME, hosts=ACME.hosts), BETA)
    gateway = gateway_of(old)
    decision = settled(new, gateway, loaded=old)
    (note,) = decision.notes
    assert note.startswith("backends of acme stay loaded")
    assert decided(new, gateway, loaded=old) == Decision(Kind.NONE, notes=(note,))


def test_a_tenant_that_went_and_returns() -> None:
    gateway = gateway_of(OLD)
    settled(document(ACME), gateway)
    assert decided(document(ACME), gateway).notes
    settled(OLD, gateway)
    settled(document(ACME), gateway)
    with_other = document(ACME, replace(BETA, ceiling=Rate.parse("3G")))
    assert "tenant beta: another ceiling" in decided(with_other, gateway).reasons[0]
    elsewhere = replace(BETA, backends=Backends(Endpoint("10.0.0.9", 4001), Endpoint("10.0.0.9", 5001)))
    assert kinds(settled(document(ACME, elsewhere), gateway))[:2] == ["MoveServer", "MoveServer"]


def test_resolvers_that_nobody_asks_any_more_wait() -> None:
    old = document(DNS, BETA)
    assert settled(document(BETA), gateway_of(old), loaded=old).notes


@pytest.mark.parametrize("description", ["", "kura-shaper-0123456789abcdef", "somebody's"])
def test_a_configuration_that_is_not_here_takes_a_reload(description: str) -> None:
    gateway = gateway_of(OLD)
    gateway.description = description
    decision = decide(render(OLD, OPTIONS), read_running(gateway, OPTIONS), OPTIONS, loaded=None)
    assert decision.kind is Kind.RELOAD
    assert ("0123456789abcdef" if "0123" in description else "somebody else's") in decision.reasons[0]


def test_a_map_that_is_not_loaded_takes_a_reload() -> None:
    gateway = gateway_of(OLD)
    del gateway.maps[OPTIONS.file(PEER_MAP)]
    assert decided(OLD, gateway) == Decision(Kind.RELOAD, ("peer.map is not loaded",))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g: g.maps[OPTIONS.file(SNI_MAP)].append("evil.test acme"),
        lambda g: g.maps[OPTIONS.file(SNI_MAP)].append("acme.kura.test beta"),
        lambda g: g.maps[OPTIONS.file(MARK_MAP)].clear(),
        lambda g: g.maps[OPTIONS.file(MARK_MAP)].append("acme 1"),
        lambda g: g.maps[OPTIONS.file(MARK_MAP)].append("stranger 1"),
        lambda g: g.rows.append(("/c/tls.crt", "evil.test", 7)),
        lambda g: g.rows.append(("/c/tls.crt", "acme.kura.test", 7)),
        lambda g: g.rows.append(("/c/other.crt", "acme.kura.test", 7)),
        lambda g: g.rows.append(("/c/tls.crt", "acme.kura.test more.test", 7)),
        lambda g: g.rows.append(("/c/tls.crt", "", 7)),
        lambda g: g.rows.clear(),
        lambda g: setattr(g.servers["acme_http/p0"], "address", "10.9.9.9"),
        lambda g: setattr(g.servers["acme_http/p0"], "check_port", 9),
        lambda g: setattr(g.servers["acme_grpc/p0"], "check_port", 0),
    ],
)
def test_what_was_changed_by_hand_is_put_right(spoil: Any) -> None:
    gateway = gateway_of(OLD)
    spoil(gateway)
    settled(OLD, gateway)
    assert {row.split(" ")[0] for row in gateway.maps[OPTIONS.file(SNI_MAP)]} == {"acme.kura.test", "beta.kura.test"}
    assert sorted(host for _, host, _ in gateway.rows) == ["acme.kura.test", "beta.kura.test"]


def test_a_certificate_is_replaced_when_it_differs_and_only_then() -> None:
    gateway = gateway_of(OLD)
    gateway.certificates["/c/tls.crt"] = AA
    assert decided(OLD, gateway, certificates={"/c/tls.crt": LocalCertificate(AA, "pem")}).kind is Kind.NONE
    decision = decided(OLD, gateway, certificates={"/c/tls.crt": LocalCertificate(BB, "SECRET")})
    assert decision.steps == (ReplaceCertificate("/c/tls.crt", "SECRET"),)
    assert "SECRET" not in "".join(decision.reasons)


@pytest.mark.parametrize(
    ("loaded", "has_changed", "is_replaced"),
    [("A" * 40, False, False), ("serial 7B", False, False), ("serial 7C", False, True), ("A" * 40, True, True)],
)
def test_a_certificate_is_known_by_fingerprint_or_serial_and_by_what_was_given(
    loaded: str, has_changed: bool, is_replaced: bool
) -> None:
    local = {"/c/tls.crt": LocalCertificate("A" * 40, "SECRET", "7B", has_changed=has_changed)}
    gateway = gateway_of(OLD)
    running = replace(read_running(gateway, OPTIONS), fingerprints={"/c/tls.crt": loaded})
    found = decide(render(OLD, OPTIONS), running, OPTIONS, loaded=render(OLD, OPTIONS), certificates=local)
    assert (found.steps == (ReplaceCertificate("/c/tls.crt", "SECRET"),)) is is_replaced


def test_a_row_that_no_file_could_have_is_not_kept_for_a_moment() -> None:
    gateway = gateway_of(OLD)
    found = read_running(gateway, OPTIONS)
    running = replace(found, maps={**found.maps, MARK_MAP: found.maps[MARK_MAP] + "bücher 5\n".encode()})
    steps = decide(render(OLD, OPTIONS), running, OPTIONS, loaded=render(OLD, OPTIONS)).steps
    assert [step.rows for step in steps if isinstance(step, ReplaceMap)] == [render(OLD, OPTIONS).files[MARK_MAP]]


def test_a_new_certificate_takes_a_reload_in_a_directory_alone() -> None:
    options = replace(OPTIONS, certificate=PurePosixPath("/c"), certificate_kind=CertificateKind.DIRECTORY)
    gateway = gateway_of(OLD, options)
    gateway.certificates["/c/a.pem"] = AA
    local = {"/c/a.pem": LocalCertificate(BB, "pem"), "/c/b.pem": LocalCertificate(CC, "pem")}
    assert decided(OLD, gateway, certificates=local) == Decision(Kind.RELOAD, ("certificate /c/b.pem is new",))
    gateway.certificates["/c/b.pem"] = CC
    assert [step.describe() for step in decided(OLD, gateway, certificates=local).steps] == ["certificate /c/a.pem"]
    gateway = gateway_of(OLD)
    assert decided(OLD, gateway, certificates={"/c/x.crt": LocalCertificate(BB, "pem")}).kind is Kind.NONE


def test_the_id_of_a_configuration_is_read_back() -> None:
    assert len(config_id(render(OLD, OPTIONS))) == 16
    assert config_id(EMPTY) == ""


# From any document to any other that has the same backends.

NAMES = ("a", "b", "c")


@st.composite
def documents(draw: st.DrawFn) -> TenantsDocument:
    owners = {
        host: draw(st.sampled_from(NAMES)) for host in draw(st.sets(st.sampled_from([f"h{n}.test" for n in range(5)])))
    }
    classes = draw(st.permutations(range(0x100, 0x106)))
    tenants = []
    for name, class_id in zip(NAMES, classes, strict=False):
        host = draw(st.sampled_from(["10.0.0.1", "10.0.0.2", "fd00::1"]))
        backends = Backends(*(Endpoint(host, draw(st.integers(4000, 4002))) for _ in range(3)))
        hosts = (f"{name}.test", *sorted(h for h, owner in owners.items() if owner == name))
        if draw(st.booleans()) or name == "a":
            tenants.append(tenant(name, class_id, hosts=hosts, peer_hosts=(f"peer.{name}.test",), backends=backends))
    prefixes = tuple(sorted(draw(st.sets(st.sampled_from(["/x.", "/y."])))))
    return document(*tenants, gateway=Gateway(grpc_prefixes=prefixes))


FULL = document(*(tenant(n, 0x200 + i, backends=PEERS, peer_hosts=(f"peer.{n}.test",)) for i, n in enumerate(NAMES)))


def rows(gateway: FakeGateway, name: str) -> list[tuple[str, str]]:
    found = (row.split(" ") for row in gateway.maps[OPTIONS.file(name)])
    return [(key, value) for key, value in found]


@settings(deadline=None)
@given(documents(), documents())
def test_at_no_moment_a_name_is_known_and_what_it_needs_is_not(old: TenantsDocument, new: TenantsDocument) -> None:
    gateway = gateway_of(FULL)
    settle = decided(old, gateway, loaded=FULL)
    assert settle.kind is not Kind.RELOAD
    for step in settle.steps:
        step.perform(gateway)
    given_by: set[tuple[str, str]] = set()
    for name in (SNI_MAP, PEER_MAP):
        given_by |= {
            (r.split(" ")[0], r.split(" ")[1]) for d in (old, new) for r in render(d, OPTIONS).text(name).splitlines()
        }
    marks: set[tuple[str, str]] = set()
    for wanted in (old, new):
        marks |= {(r.split(" ")[0], r.split(" ")[1]) for r in render(wanted, OPTIONS).text(MARK_MAP).splitlines()}

    def holds() -> None:
        marked, listed = dict(rows(gateway, MARK_MAP)), {host for _, host, _ in gateway.rows}
        assert set(rows(gateway, MARK_MAP)) <= marks
        for name in (SNI_MAP, PEER_MAP):
            assert set(rows(gateway, name)) <= given_by
            assert {owner for _, owner in rows(gateway, name)} <= marked.keys()
        assert {host for host, _ in rows(gateway, SNI_MAP)} <= listed

    holds()
    gateway.after_each = holds
    decision = decided(new, gateway, loaded=FULL)
    assert decision.kind is not Kind.RELOAD
    for step in decision.steps:
        step.perform(gateway)
    assert decided(new, gateway, loaded=FULL).kind is Kind.NONE
    final = render(new, OPTIONS)
    assert "".join(f"{a} {b}\n" for a, b in rows(gateway, SNI_MAP)) == final.text(SNI_MAP)
    assert sorted(f"{c} {h}" for c, h, _ in gateway.rows) == final.text(CRT_LIST).splitlines()
    assert {type(s) for s in decision.steps} <= {AddHost, RemoveHost, ReplaceMap, MoveServer}
