"""Finding the program, reading what it says, and knowing what it can't: without it, so anywhere."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

import pytest
import trustme

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.binary import HaproxyBinary, HaproxyMissingError, find_haproxy, read_version
from kura_shaper.haproxy.certificates import throwaway_pem
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


def test_the_chosen_program_comes_before_the_path_and_the_path_before_the_cache(tmp_path: Path) -> None:
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
        (on_path, "PATH"),
        (cached, "KURA_SHAPER_CACHE"),
        (home, "XDG_CACHE_HOME"),
        (home, "HOME"),
    ):
        # Without PATH the system's own places are looked in.
        assert find_haproxy({"PATH": "/nowhere"} | environ).path == expected
        del environ[unset]
    environ["KURA_SHAPER_CACHE"] = str(tmp_path / "cache")
    old = program(tmp_path / "old" / "haproxy", "HAProxy version 2.6.12")
    assert find_haproxy(environ | {"PATH": str(old.parent)}).path == cached
    with pytest.raises(VersionTooOldError):
        find_haproxy({"PATH": str(old.parent), "HOME": str(tmp_path / "empty")})
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


OLD = datetime(2000, 1, 1, tzinfo=UTC)
NOW = datetime(2026, 6, 1, tzinfo=UTC)
ACME = TenantsDocument("test", (Tenant("acme", 0x100, Rate(0), Rate(8), ("acme.kura.example", "Acme.cache.example.")),))


def pem(*names: str, start: datetime = NOW - timedelta(days=1), end: datetime = NOW + timedelta(days=1)) -> bytes:
    """A certificate for these names, without its key."""
    issued = trustme.CA().issue_cert(*names, not_before=start, not_after=end)
    leaf: bytes = issued.cert_chain_pems[0].bytes()
    return leaf


def file_options(path: Path) -> GatewayOptions:
    return GatewayOptions((3, 0, 11), certificate=PurePosixPath(path))


def directory_options(path: Path) -> GatewayOptions:
    return replace(file_options(path), certificate_kind=CertificateKind.DIRECTORY)


def test_hosts_without_a_certificate_are_found(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    assert uncovered_hosts(ACME, file_options(path), now=NOW) == ()
    path.write_bytes(pem("*.kura.example"))
    missing = (Finding(Severity.WARNING, "no certificate for acme.cache.example", tenant="acme"),)
    assert uncovered_hosts(ACME, file_options(path), now=NOW) == missing
    (tmp_path / "tls.key").write_text("not looked at")
    (tmp_path / ".hidden").write_text("not looked at")
    assert uncovered_hosts(ACME, directory_options(tmp_path), now=NOW) == missing
    (tmp_path / "more.pem").write_bytes(pem("acme.cache.example"))
    assert uncovered_hosts(ACME, directory_options(tmp_path), now=NOW) == ()


def test_where_no_certificate_is_there_is_nothing_to_say(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert uncovered_hosts(ACME, file_options(path)) == ()
        assert uncovered_hosts(ACME, directory_options(path)) == ()


def test_a_certificate_without_names_stands_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    path.write_bytes(throwaway_pem())
    findings = uncovered_hosts(ACME, file_options(path), now=NOW)
    assert [finding.message for finding in findings] == [
        "no certificate for acme.cache.example",
        "no certificate for acme.kura.example",
    ]


def test_a_file_that_holds_no_certificate_is_an_alert_and_no_host_is_called_uncovered(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.pem", tmp_path / "b.pem"
    good.write_bytes(pem("*.kura.example"))
    for content, message in (
        (b"\xff\x00 no PEM", "the file has no certificate in PEM form"),
        (throwaway_pem().replace(b"M", b"N"), "the certificate is no X.509 that can be read"),
    ):
        bad.write_bytes(content)
        alert = (Finding(Severity.ALERT, message, str(bad)),)
        assert uncovered_hosts(ACME, file_options(bad), now=NOW) == alert
        assert uncovered_hosts(ACME, directory_options(tmp_path), now=NOW) == alert
    assert str(alert[0]) == f"{bad}: alert: the certificate is no X.509 that can be read"


@pytest.mark.parametrize(
    ("path", "reason"), [("/proc/self/mem", "Input/output error"), ("/" + "x" * 300, "File name too long")]
)
def test_a_certificate_that_can_not_be_read_is_an_alert(path: str, reason: str) -> None:
    alert = Finding(Severity.ALERT, f"can't be read: {reason}", path)
    assert uncovered_hosts(ACME, file_options(Path(path)), now=NOW) == (alert,)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (timedelta(0), timedelta(0), ""),
        (timedelta(days=-9), timedelta(seconds=-1), "the certificate expired at 2026-05-31 23:59 UTC"),
        (timedelta(minutes=1), timedelta(days=9), "the certificate is not valid before 2026-06-01 00:01 UTC"),
    ],
)
def test_a_certificate_out_of_date_is_a_warning(tmp_path: Path, start: timedelta, end: timedelta, message: str) -> None:
    path = tmp_path / "tls.pem"
    path.write_bytes(pem("*.kura.example", "acme.cache.example", start=NOW + start, end=NOW + end))
    wanted = (Finding(Severity.WARNING, message, str(path)),) if message else ()
    assert uncovered_hosts(ACME, file_options(path), now=NOW) == wanted
    # HAProxy may serve it all the same when there is another for the same name.
    (tmp_path / "more.pem").write_bytes(pem("acme.kura.example"))
    assert uncovered_hosts(ACME, directory_options(tmp_path), now=NOW) == wanted


def test_the_date_is_the_present_one_where_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    path.write_bytes(pem("*.kura.example", "acme.cache.example", start=OLD, end=OLD + timedelta(days=366)))
    assert [f.message for f in uncovered_hosts(ACME, file_options(path))] == [
        "the certificate expired at 2001-01-01 00:00 UTC"
    ]


def test_beside_haproxy_a_broken_certificate_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "none.pem"
    path.write_text("no PEM")
    options = local_options(tmp_path)
    named = stub(tmp_path / "haproxy", f"echo \"[ALERT]    (1) : config : can't load '{path}'\"; exit 1")
    messages = [finding.message for finding in check_with_haproxy(DNS_BACKENDS, options, binary=named).findings]
    assert messages == [f"can't load '{path}'"]
    silent = stub(tmp_path / "haproxy", "exit 0")
    messages = [finding.message for finding in check_with_haproxy(DNS_BACKENDS, options, binary=silent).findings]
    assert messages == ["the file has no certificate in PEM form"]


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
