"""Finding the program, reading what it says, and knowing what it can't: without it, so anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
import trustme

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.haproxy.binary import HaproxyBinary, HaproxyMissingError, find_haproxy, read_version
from kura_shaper.haproxy.certificates import covers, dns_names, throwaway_pem
from kura_shaper.haproxy.check import Finding, Severity, check_with_haproxy, parse_messages, uncovered_hosts
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig
from kura_shaper.haproxy.options import CertificateKind, GatewayOptions, VersionTooOldError
from kura_shaper.haproxy.render import render
from kura_shaper.tenants.document import Backends, Endpoint, Tenant, TenantsDocument
from kura_shaper.units import Rate

CONFIG = GatewayConfig(
    {
        CONFIG_FILE: b"global\n    maxconn 1\n\nfrontend edge\n    bad\n\nbackend a-b_http from web\n    server p0 x\n",
        "mark.map": b"acme 1\nbeta x\n",
        "sni.map": b"acme.example acme\n",
    }
)


DNS_BACKENDS = TenantsDocument(
    "test",
    (
        Tenant(
            "acme",
            0x100,
            Rate(0),
            Rate(8),
            ("acme.kura.example",),
            backends=Backends(http=Endpoint("acme.kura.svc", 4000, is_dns_name=True)),
        ),
    ),
)


def stub(path: Path, script: str) -> HaproxyBinary:
    """Make a program that does so when it is given a configuration, its fourth argument."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return HaproxyBinary(path, (3, 0, 11))


def local_options(tmp_path: Path) -> GatewayOptions:
    """Options for which nothing but the certificate has to be stood in for."""
    return GatewayOptions((3, 0, 11), certificate=PurePosixPath(tmp_path, "none.pem"), user="root", group="root")


def program(path: Path, answer: str) -> Path:
    """Make a program that answers so when it is asked for its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("HAProxy version 3.0.11-1+deb13u5 2026/11/18 - https://haproxy.org/", (3, 0, 11)),
        ("HAProxy version 3.3-dev5-abc 2026/01/01", (3, 3, 0)),
        ("HAProxy version 10.2.3", (10, 2, 3)),
    ],
)
def test_the_version_is_read(tmp_path: Path, answer: str, version: tuple[int, int, int]) -> None:
    assert read_version(program(tmp_path / "haproxy", answer)).version == version


@pytest.mark.parametrize("answer", ["HAProxy version 2.8.25", "HAProxy version 3.0.2-1"])
def test_an_old_program_is_refused_by_name(tmp_path: Path, answer: str) -> None:
    with pytest.raises(VersionTooOldError, match="is too old"):
        read_version(program(tmp_path / "haproxy", answer))


def test_what_is_no_haproxy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HaproxyMissingError, match="is no HAProxy"):
        read_version(program(tmp_path / "haproxy", "nginx/1.2"))
    with pytest.raises(HaproxyMissingError, match="can't be run"):
        read_version(tmp_path / "absent")


def test_the_chosen_program_comes_before_the_cache_and_the_cache_before_the_path(tmp_path: Path) -> None:
    chosen = program(tmp_path / "chosen", "HAProxy version 3.1.1")
    cached = program(tmp_path / "cache" / "haproxy-3.0" / "bin" / "haproxy", "HAProxy version 3.0.11")
    home = program(tmp_path / ".cache" / "kura-shaper" / "haproxy-3.0" / "bin" / "haproxy", "HAProxy version 3.0.12")
    on_path = program(tmp_path / "bin" / "haproxy", "HAProxy version 3.2.1")
    environ = {
        "PATH": str(on_path.parent),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / ".cache"),
        "KURA_SHAPER_CACHE": str(tmp_path / "cache"),
        "KURA_SHAPER_HAPROXY": str(chosen),
    }
    for expected, unset in (
        (chosen, "KURA_SHAPER_HAPROXY"),
        (cached, "KURA_SHAPER_CACHE"),
        (home, "XDG_CACHE_HOME"),
        (home, "HOME"),
        (on_path, "PATH"),
    ):
        assert find_haproxy(environ).path == expected
        del environ[unset]
    with pytest.raises(HaproxyMissingError, match="no HAProxy on this machine"):
        find_haproxy({"PATH": "", "HOME": str(tmp_path / "empty")})


def test_messages_are_told_by_place_and_tenant() -> None:
    output = """[NOTICE]   (1) : haproxy version is 3.0.11
[ALERT]    (1) : config : parsing [haproxy.cfg:8] : 'server a-b_http/p0' : no address
[WARNING]  (1) : config : Proxy 'edge': strange, at [haproxy.cfg:5], and
  | more of it.
[ALERT]    (1) : config : parsing [haproxy.cfg:5] : unable to parse 'x' at line 2 of file 'mark.map'
[WARNING]  (1) : something general
[ALERT]    (1) : config : parsing [elsewhere.cfg:5] : unknown
[ALERT]    (1) : config : Error(s) found in configuration file : haproxy.cfg
[ALERT]    (1) : config : Fatal errors found in configuration.
[ALERT]    (1) : config : Some warnings were found and 'zero-warning' is set. Aborting.
"""
    assert parse_messages(output, CONFIG) == (
        Finding(Severity.ALERT, "parsing [haproxy.cfg:8] : 'server a-b_http/p0' : no address", "haproxy.cfg", 8, "a-b"),
        Finding(
            Severity.WARNING,
            "Proxy 'edge': strange, at [haproxy.cfg:5], and | more of it.",
            "haproxy.cfg",
            5,
        ),
        Finding(
            Severity.ALERT,
            "parsing [haproxy.cfg:5] : unable to parse 'x' at line 2 of file 'mark.map'",
            "mark.map",
            2,
            "beta",
        ),
        Finding(Severity.WARNING, "something general"),
        Finding(Severity.ALERT, "parsing [elsewhere.cfg:5] : unknown"),
    )


def test_a_finding_reads_as_one_line() -> None:
    assert str(Finding(Severity.ALERT, "no address", "haproxy.cfg", 8, "acme")) == (
        "haproxy.cfg:8: alert: tenant acme: no address"
    )
    assert str(Finding(Severity.WARNING, "general")) == "warning: general"


def test_names_of_a_certificate_are_read_without_its_key() -> None:
    hosts = ["*.kura.example", *(f"host-{n}.cache.example" for n in range(40))]
    leaf, *_ = trustme.CA().issue_cert(*hosts, "192.0.2.1").cert_chain_pems
    assert dns_names("some text\n" + leaf.bytes().decode()) == tuple(hosts)
    assert dns_names(throwaway_pem().decode()) == ()


@pytest.mark.parametrize(
    "pem",
    [
        "",
        "-----BEGIN CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMIL/////\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_certificate_is_refused(pem: str) -> None:
    with pytest.raises(UsageError):
        dns_names(pem)


def test_a_wildcard_stands_for_one_label() -> None:
    names = ("*.kura.example", "Cache.example")
    assert covers(names, "acme.kura.example")
    assert covers(names, "cache.example")
    assert not covers(names, "a.b.kura.example")
    assert not covers(names, "kura.example")
    assert not covers(names, "acme.cache.example")


def test_hosts_without_a_certificate_are_found(tmp_path: Path) -> None:
    tenant = Tenant("acme", 0x100, Rate(0), Rate(8), ("acme.kura.example", "Acme.cache.example."))
    document = TenantsDocument("test", (tenant,))
    path = tmp_path / "tls.pem"
    options = GatewayOptions((3, 0, 11), certificate=PurePosixPath(path))
    assert uncovered_hosts(document, options) == ()
    path.write_bytes(trustme.CA().issue_cert("*.kura.example").cert_chain_pems[0].bytes())
    missing = (Finding(Severity.WARNING, "no certificate for acme.cache.example", tenant="acme"),)
    assert uncovered_hosts(document, options) == missing
    folder = replace(options, certificate=PurePosixPath(tmp_path), certificate_kind=CertificateKind.DIRECTORY)
    (tmp_path / "tls.key").write_text("not looked at")
    assert uncovered_hosts(document, folder) == missing
    (tmp_path / "more.pem").write_bytes(trustme.CA().issue_cert("acme.cache.example").cert_chain_pems[0].bytes())
    assert uncovered_hosts(document, folder) == ()


def test_a_check_uses_none_of_this_machines_resolvers(tmp_path: Path) -> None:
    seen = tmp_path / "seen.cfg"
    binary, options = stub(tmp_path / "haproxy", f'/bin/cp "$4" {seen}'), local_options(tmp_path)
    report = check_with_haproxy(DNS_BACKENDS, options, binary=binary)
    assert report.passed
    assert report.notes[1:] == ("no resolvers given: checked with a stand-in on loopback, not with this machine's",)
    checked = seen.read_text().split("\n")
    rendered = render(DNS_BACKENDS, options).text(CONFIG_FILE).split("\n")
    assert "parse-resolv-conf" not in seen.read_text()
    # No line moves, so the places of findings stay true.
    assert len(checked) == len(rendered)
    number = rendered.index("    parse-resolv-conf")
    assert checked[number] == "    nameserver ns0 tcp@127.0.0.1:53"


def test_resolvers_that_were_given_are_checked_and_without_names_there_are_none(tmp_path: Path) -> None:
    seen = tmp_path / "seen.cfg"
    binary, options = stub(tmp_path / "haproxy", f'/bin/cp "$4" {seen}'), local_options(tmp_path)
    given = replace(options, resolvers=(Endpoint("127.0.0.9", 53),))
    assert len(check_with_haproxy(DNS_BACKENDS, given, binary=binary).notes) == 1
    assert "nameserver ns0 127.0.0.9:53" in seen.read_text()
    assert len(check_with_haproxy(TenantsDocument("test", ()), options, binary=binary).notes) == 1
    assert "nameserver" not in seen.read_text()


def test_an_unforeseen_end_is_one_line(tmp_path: Path) -> None:
    binary = stub(tmp_path / "haproxy", "echo one; echo two >&2; exit 7")
    report = check_with_haproxy(DNS_BACKENDS, local_options(tmp_path), binary=binary)
    assert [str(finding) for finding in report.findings] == ["alert: HAProxy ended with status 7: two one"]


def test_a_check_that_can_not_be_made_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = HaproxyBinary(tmp_path / "gone", (3, 0, 11))
    with pytest.raises(StateUnknownError, match=r"gone gave no answer: .*No such file") as caught:
        check_with_haproxy(DNS_BACKENDS, local_options(tmp_path), binary=gone)
    assert "KURA_SHAPER_HAPROXY" in caught.value.remedy
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StateUnknownError, match=r"the check could not be made: .*nowhere") as caught:
        check_with_haproxy(DNS_BACKENDS, local_options(tmp_path), binary=gone)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
