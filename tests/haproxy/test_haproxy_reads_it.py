"""The real HAProxy reads what is rendered, without a single warning, and what it refuses is told by place."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest
from gateway_rig import VERSIONS, haproxy_of

from kura_shaper.haproxy.builder import MAX_LINE_CHARS, MAX_WORDS, Line, Section, line, to_bytes
from kura_shaper.haproxy.certificates import throwaway_pem
from kura_shaper.haproxy.check import Severity, check_with_haproxy, findings_in
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig
from kura_shaper.haproxy.options import BandwidthLimit, CertificateKind, GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.haproxy.binary import HaproxyBinary

RESOLVER_NOTE = "no resolvers given: checked with a stand-in on loopback, not with this machine's"


@pytest.fixture(scope="module", params=VERSIONS)
def haproxy(request: pytest.FixtureRequest) -> HaproxyBinary:
    return haproxy_of(request.param)


def fleet(size: int) -> TenantsDocument:
    """So many tenants, with each kind of backend and of client range among them."""
    return TenantsDocument("us-east", tuple(_tenant(number) for number in range(size)))


def _tenant(number: int) -> Tenant:
    name = f"tenant-{number}"
    address = Endpoint(f"kura-{name}.kura.svc.cluster.local", 4000, is_dns_name=True)
    if number % 2 == 0:
        address = Endpoint("2001:db8::5" if number % 4 else "10.0.0.5", 4000)
    cidrs = tuple(ip_network(f"10.{n}.0.0/16") for n in range(number % 40))
    return Tenant(
        name=name,
        class_id=0x100 + number,
        floor=Rate.parse("25M"),
        ceiling=Rate.parse("1500M"),
        hosts=(f"{name}.kura.example", f"{name}.cache.example"),
        peer_hosts=(f"peer.{name}.kura.example",),
        client_cidrs=(*cidrs, ip_network("2001:db8::/32")) if cidrs else (),
        backends=Backends(http=address, grpc=replace(address, port=4001), peer=replace(address, port=7443)),
    )


def options_for(haproxy: HaproxyBinary, tmp_path: Path) -> GatewayOptions:
    """Options whose certificate is not there."""
    return GatewayOptions(haproxy.version, certificate=PurePosixPath(tmp_path, "none.pem"), user="root", group="root")


@pytest.mark.parametrize("limit", list(BandwidthLimit))
@pytest.mark.parametrize("size", [0, 1, 200])
def test_it_is_read_without_a_warning(haproxy: HaproxyBinary, tmp_path: Path, size: int, limit: BandwidthLimit) -> None:
    options = replace(options_for(haproxy, tmp_path), bandwidth_limit=limit)
    report = check_with_haproxy(fleet(size), options, binary=haproxy)
    assert report.findings == ()
    certificate = f"no certificate at {options.certificate}: checked with a throwaway one"
    # Of the first two tenants the second has a DNS name for a backend.
    assert report.notes == ((certificate, RESOLVER_NOTE) if size > 1 else (certificate,))


@pytest.mark.privileged
@pytest.mark.parametrize("limit", list(BandwidthLimit))
def test_it_is_read_without_a_warning_where_nothing_has_a_route(
    haproxy: HaproxyBinary, tmp_path: Path, limit: BandwidthLimit
) -> None:
    options = replace(options_for(haproxy, tmp_path), bandwidth_limit=limit)
    # Even loopback is down in a new namespace.
    report = in_new_namespace(lambda: check_with_haproxy(fleet(4), options, binary=haproxy))
    assert report.findings == ()
    assert RESOLVER_NOTE in report.notes


@pytest.mark.parametrize(
    "changes",
    [
        {"certificate_kind": CertificateKind.DIRECTORY},
        {"nbthread": 2, "maxconn": 1_000_000, "dns_servers": 64},
        {"addresses": (IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")), "metrics_bind": Endpoint("::1", 8405)},
        {"resolvers": (Endpoint("10.96.0.10", 53), Endpoint("2001:db8::53", 53))},
        {"user": "no-such-account", "group": "no-such-account"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_option_is_read_without_a_warning(
    haproxy: HaproxyBinary, tmp_path: Path, changes: dict[str, object]
) -> None:
    options = replace(options_for(haproxy, tmp_path), **changes)  # type: ignore[arg-type]
    assert check_with_haproxy(fleet(4), options, binary=haproxy).findings == ()


def test_a_gateway_without_a_plane_is_read_without_a_warning(haproxy: HaproxyBinary, tmp_path: Path) -> None:
    options = options_for(haproxy, tmp_path)
    for gateway in (Gateway(peer_ports=()), Gateway(https_ports=(443, 8443), peer_ports=(7443, 7444))):
        assert check_with_haproxy(replace(fleet(2), gateway=gateway), options, binary=haproxy).findings == ()


def test_a_bad_line_is_told_by_place_and_tenant(haproxy: HaproxyBinary, tmp_path: Path) -> None:
    options = replace(options_for(haproxy, tmp_path), directory=PurePosixPath(tmp_path))
    Path(options.certificate).write_bytes(throwaway_pem())
    good = render(fleet(2), options)
    text = good.text(CONFIG_FILE).replace("option httpchk GET /ready", "option nonsense")
    marks = good.files["mark.map"].replace(b"tenant-1 ", b"tenant-1 x")
    broken = GatewayConfig({**good.files, CONFIG_FILE: text.encode(), "mark.map": marks})
    findings = findings_in(broken, tmp_path, binary=haproxy)
    assert {(finding.severity, finding.file, finding.tenant) for finding in findings} == {
        (Severity.ALERT, CONFIG_FILE, "tenant-0"),
        (Severity.ALERT, CONFIG_FILE, "tenant-1"),
        (Severity.ALERT, "mark.map", "tenant-1"),
    }
    nonsense = [finding for finding in findings if "nonsense" in finding.message]
    rows = text.split("\n")
    assert [rows[finding.line - 1].strip() for finding in nonsense] == ["option nonsense"] * 4
    assert str(tmp_path) not in "".join(map(str, findings))


def test_a_file_that_is_cut_short_is_a_finding(haproxy: HaproxyBinary, tmp_path: Path) -> None:
    options = replace(options_for(haproxy, tmp_path), directory=PurePosixPath(tmp_path))
    cut = render(fleet(0), options).files[CONFIG_FILE][:-1]
    assert findings_in(GatewayConfig({CONFIG_FILE: cut}), tmp_path, binary=haproxy) != ()


def test_a_certificate_that_is_there_is_used(haproxy: HaproxyBinary, tmp_path: Path) -> None:
    options = options_for(haproxy, tmp_path)
    Path(options.certificate).write_bytes(throwaway_pem().replace(b"M", b"N"))
    report = check_with_haproxy(fleet(1), options, binary=haproxy)
    assert report.notes == ()
    assert not report.passed


def test_the_longest_lines_are_read(haproxy: HaproxyBinary, tmp_path: Path) -> None:
    head = (line("bind 127.0.0.1:1"), line("mode http"), line("timeout client 1s"))
    words = line("acl long path", *("/x" for _ in range(MAX_WORDS - 3)))
    characters = line("acl long path", "/" + "x" * (MAX_LINE_CHARS - len("acl long path /")))
    section = Section("frontend", "limits", (*head, words, characters, line("http-request deny if long")))
    config = GatewayConfig({CONFIG_FILE: to_bytes([section])})
    assert findings_in(config, tmp_path, binary=haproxy) == ()


@pytest.mark.parametrize("word", ["a b", "#", "a\\b", '"$HOME"', "$HOME", "${HOME}", "%", "~!@^&*()-=+[]{}|;:,.<>/?`"])
def test_a_quoted_word_is_read_back_as_it_was(haproxy: HaproxyBinary, tmp_path: Path, word: str) -> None:
    # HAProxy names an unknown keyword in its answer, which shows how it read the word.
    config = GatewayConfig({CONFIG_FILE: to_bytes([Section("frontend", "f", (Line((word,)),))])})
    assert f"unknown keyword '{word}'" in "".join(map(str, findings_in(config, tmp_path, binary=haproxy)))
