"""Whether the real HAProxy takes a configuration without a warning, and what it can't know itself.

`haproxy -c` opens no socket and checks no capability, so it is necessary and not enough.
What it accepts although it is wrong is refused by the renderer; what is left for here is
whether a certificate stands for every hostname, since HAProxy serves it for any, and
whether it is in date. `uncovered_hosts` tells that without HAProxy.
"""

from __future__ import annotations

import grp
import pwd
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.haproxy.certificates import covers, dns_names, throwaway_pem, validity
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig
from kura_shaper.haproxy.maps import MARK_MAP, PEER_MAP, SNI_MAP, host_name
from kura_shaper.haproxy.options import CertificateKind, version_text
from kura_shaper.haproxy.render import render

if TYPE_CHECKING:
    from kura_shaper.haproxy.binary import HaproxyBinary
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.tenants.document import TenantsDocument

# 3000 tenants take 3 seconds.
_CHECK_SECONDS = 300

_MESSAGE = re.compile(r"^\[(?P<severity>ALERT|WARNING|NOTICE)\]\s+\(\d+\) : (?:config : )?(?P<text>.*)$")
_PLACE = re.compile(r"\[(?P<file>[^\[\]\s]+):(?P<line>\d+)\]")
_ROW = re.compile(r"line (?P<line>\d+) (?:of|in) file '(?P<file>[^']+)'")
_SUMMARY = re.compile(r"(Error\(s\)|Fatal errors) found in configuration|'zero-warning' is set")
_HOST_RESOLVERS = re.compile(rb"^ *parse-resolv-conf$", re.MULTILINE)
_SECTION = re.compile(r"\S+ (?P<tenant>[a-z0-9-]+)_(?:edge|peer|http|grpc)\b")


class Severity(Enum):
    """How HAProxy rates what it says: an alert stops it, a warning stops it under `-dW`."""

    ALERT = "alert"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where and whose as far as that is known.

    `file` is a rendered file's name, or a certificate's path.
    """

    severity: Severity
    message: str
    file: str = ""
    line: int = 0
    tenant: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        owner = f"tenant {self.tenant}" if self.tenant else ""
        return ": ".join(part for part in (place, self.severity.value, owner, self.message) if part)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found, and in `notes` what was put in place of things that this machine lacks.

    `refusals` keep a gateway from starting with these files. `cautions` are about certificates: it
    starts, and serves whom it can.
    """

    version: tuple[int, int, int]
    refusals: tuple[Finding, ...] = ()
    cautions: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was found."""
        return (*self.refusals, *self.cautions)

    @property
    def passed(self) -> bool:
        """True when a gateway starts with these files."""
        return not self.refusals


def check_with_haproxy(document: TenantsDocument, options: GatewayOptions, *, binary: HaproxyBinary) -> CheckReport:
    """Render the document and let HAProxy read the result, in a directory that is gone afterwards.

    A certificate or account that this machine lacks is stood in for, and noted; so are its
    resolvers, since another machine will use its own. Raises what `render` raises, and
    StateUnknownError when the check can't be made or HAProxy gives no answer.
    """
    notes = []
    if binary.version[:2] != options.haproxy_version[:2]:
        rendered, used = version_text(options.haproxy_version[:2]), version_text(binary.version)
        notes.append(f"rendered for HAProxy {rendered}, checked with {used}")
    try:
        with tempfile.TemporaryDirectory(prefix="kura-shaper-check-") as name:
            directory = Path(name)
            local, stand_ins = _stand_in(options, directory)
            config, resolver = _stand_in_resolver(render(document, local))
            refusals = findings_in(config, directory, binary=binary)
        certificates = uncovered_hosts(document, options)
    except OSError as error:
        remedy = "put that right and check again, or render without the check"
        raise StateUnknownError(f"the check could not be made: {error}", remedy=remedy) from error
    said = " ".join(finding.message for finding in refusals)
    # What HAProxy says about a file that can't be read is more than we know.
    unread = (f for f in certificates if f.severity is Severity.ALERT and f.file not in said)
    cautions = tuple(finding for finding in certificates if finding.severity is Severity.WARNING)
    return CheckReport(binary.version, (*refusals, *unread), cautions, (*notes, *stand_ins, *resolver))


def report_without_haproxy(document: TenantsDocument, options: GatewayOptions) -> CheckReport:
    """Return what can be known of the certificates that are here, without HAProxy."""
    found = uncovered_hosts(document, options)
    return CheckReport(
        options.haproxy_version,
        refusals=tuple(finding for finding in found if finding.severity is Severity.ALERT),
        cautions=tuple(finding for finding in found if finding.severity is Severity.WARNING),
    )


def findings_in(config: GatewayConfig, directory: Path, *, binary: HaproxyBinary) -> tuple[Finding, ...]:
    """Write a configuration that was rendered for this directory there, and return what HAProxy says about it.

    Raises StateUnknownError when it gives no answer.
    """
    for file, content in config.files.items():
        (directory / file).write_bytes(content)
    code, output = _run(binary, directory / CONFIG_FILE)
    findings = parse_messages(output.replace(f"{directory}/", ""), config)
    if code != 0 and not findings:
        said = " ".join(output.split())[-500:]
        return (Finding(Severity.ALERT, f"HAProxy ended with status {code}: {said}"),)
    return findings


def parse_messages(output: str, config: GatewayConfig) -> tuple[Finding, ...]:
    """Return HAProxy's alerts and warnings, each with its place in the rendered files."""
    messages: list[tuple[str, str]] = []
    for row in output.splitlines():
        match = _MESSAGE.match(row)
        if match:
            messages.append((match["severity"], match["text"]))
        elif messages and row.strip():
            severity, text = messages[-1]
            messages[-1] = (severity, f"{text} {row.strip()}")
    wanted = ((severity, text) for severity, text in messages if severity != "NOTICE" and not _SUMMARY.search(text))
    return tuple(_finding(Severity(severity.lower()), text, config) for severity, text in wanted)


def uncovered_hosts(
    document: TenantsDocument, options: GatewayOptions, *, now: datetime | None = None
) -> tuple[Finding, ...]:
    """Return what is wrong with the certificates that are here: HAProxy is not needed; nothing when there are none.

    A file without a certificate to read is an alert, since HAProxy will not start with it;
    as nobody knows which hosts it was for, none is called uncovered then. A certificate
    that `now` (with a time zone; default: the present) is out of date is a warning, and so
    is a hostname that no certificate stands for, in date or not.
    """
    moment = now or datetime.now(UTC)
    try:
        paths = certificate_files(options)
    except OSError as error:
        return (_unreadable(Path(options.certificate), error),)
    names: list[str] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            pem = path.read_text(encoding="utf-8", errors="replace")
            names += dns_names(pem)
            findings += _out_of_date(path, pem, moment)
        except (OSError, UsageError) as error:
            findings.append(_unreadable(path, error))
    if not paths or any(finding.severity is Severity.ALERT for finding in findings):
        return tuple(findings)
    return (*findings, *_without_certificate(document, tuple(names)))


def _out_of_date(path: Path, pem: str, now: datetime) -> tuple[Finding, ...]:
    start, end = validity(pem)
    if start <= now <= end:
        return ()
    what = f"is not valid before {start:%Y-%m-%d %H:%M}" if now < start else f"expired at {end:%Y-%m-%d %H:%M}"
    return (Finding(Severity.WARNING, f"the certificate {what} UTC", str(path)),)


def _unreadable(path: Path, error: OSError | UsageError) -> Finding:
    message = error.message if isinstance(error, UsageError) else f"can't be read: {error.strerror}"
    return Finding(Severity.ALERT, message, str(path))


def _without_certificate(document: TenantsDocument, names: tuple[str, ...]) -> tuple[Finding, ...]:
    hosts = sorted((host_name(host, path="hosts"), tenant.name) for tenant in document.tenants for host in tenant.hosts)
    missing = ((host, tenant) for host, tenant in hosts if not covers(names, host))
    return tuple(Finding(Severity.WARNING, f"no certificate for {host}", tenant=tenant) for host, tenant in missing)


def certificate_files(options: GatewayOptions) -> tuple[Path, ...]:
    """Return the certificate files that are here, as HAProxy would read them. Raises OSError."""
    path = Path(options.certificate)
    if options.certificate_kind is CertificateKind.FILE:
        return (path,) if path.is_file() else ()
    # What HAProxy itself leaves out of a directory.
    skipped = (".key", ".issuer", ".ocsp", ".sctl")
    files = sorted(path.iterdir()) if path.is_dir() else []
    return tuple(file for file in files if file.is_file() and file.name[0] != "." and file.suffix not in skipped)


def _stand_in(options: GatewayOptions, directory: Path) -> tuple[GatewayOptions, tuple[str, ...]]:
    """Return the options with what this machine lacks replaced, each by one word, so that no line moves."""
    local = replace(options, directory=PurePosixPath(directory))
    notes: list[str] = []
    if not certificate_files(options):
        notes.append(f"no certificate at {options.certificate}: checked with a throwaway one")
        certificate = directory / "certificates" / "throwaway.pem"
        certificate.parent.mkdir()
        certificate.write_bytes(throwaway_pem())
        certificate = certificate if options.certificate_kind is CertificateKind.FILE else certificate.parent
        local = replace(local, certificate=PurePosixPath(certificate))
    try:
        pwd.getpwnam(options.user)
    except KeyError:
        notes.append(f"no account {options.user}: checked with root")
        local = replace(local, user="root")
    try:
        grp.getgrnam(options.group)
    except KeyError:
        notes.append(f"no group {options.group}: checked with root")
        local = replace(local, group="root")
    return local, tuple(notes)


def _stand_in_resolver(config: GatewayConfig) -> tuple[GatewayConfig, tuple[str, ...]]:
    """Return the configuration with one resolver on loopback in place of this machine's, on the same line.

    HAProxy connects a socket to each resolver as it reads, and warns where there is no
    route. It leaves one that is asked over TCP for later, so even loopback may be down.
    """
    text, found = _HOST_RESOLVERS.subn(b"    nameserver ns0 tcp@127.0.0.1:53", config.files[CONFIG_FILE])
    if not found:
        return config, ()
    note = "no resolvers given: checked with a stand-in on loopback, not with this machine's"
    return GatewayConfig({**config.files, CONFIG_FILE: text}), (note,)


def _run(binary: HaproxyBinary, config: Path) -> tuple[int, str]:
    command = (str(binary.path), "-dW", "-c", "-f", str(config))
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_CHECK_SECONDS, env={}, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"not within {_CHECK_SECONDS} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        remedy = f"see whether `{binary.path} -vv` runs here, or set KURA_SHAPER_HAPROXY"
        raise StateUnknownError(f"{binary.path} gave no answer: {why}", remedy=remedy) from error
    return done.returncode, (done.stderr + done.stdout).decode("utf-8", errors="replace")


def _finding(severity: Severity, text: str, config: GatewayConfig) -> Finding:
    # The innermost place: a message about a map names the line that loads it as well.
    for pattern in (_ROW, _PLACE):
        for match in pattern.finditer(text):
            file, number = match["file"], int(match["line"])
            if file in config.files:
                return Finding(severity, text, file, number, _owner(config, file, number))
    return Finding(severity, text)


def _owner(config: GatewayConfig, file: str, number: int) -> str:
    """Return the tenant whose section or row the line is in, "" when it is nobody's."""
    rows = config.text(file).split("\n")[:number]
    words = rows[-1].split(" ")
    if file == MARK_MAP:
        return words[0]
    if file in {SNI_MAP, PEER_MAP}:
        return words[-1]
    if file != CONFIG_FILE:
        return ""
    header = next((row for row in reversed(rows) if row and not row.startswith((" ", "#"))), "")
    match = _SECTION.match(header)
    return match["tenant"] if match else ""
