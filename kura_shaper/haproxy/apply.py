"""From a document to a gateway that has it: decide, write, ask, read back, and keep the last good one.

The order is what makes it safe. Nothing is written before HAProxy itself has read the
new files. They are on disk before the gateway is asked for anything, since whatever it
was only told is lost with its next reload. What was asked for is read back. And when
the gateway does not take a reload, the files from before are in force again, so that a
restart finds what the worker has.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper.durable import replace_durably
from kura_shaper.errors import KuraShaperError, RefusedError, StateUnknownError, UsageError
from kura_shaper.haproxy.certificates import fingerprint, serial
from kura_shaper.haproxy.check import (
    CheckReport,
    Severity,
    certificate_files,
    check_with_haproxy,
    parse_messages,
    report_without_haproxy,
)
from kura_shaper.haproxy.decide import Decision, Kind, LocalCertificate, config_id, decide, dns_backends
from kura_shaper.haproxy.generation import CONFIG_FILE, EMPTY, GatewayConfig, diff_text
from kura_shaper.haproxy.maps import PEER_MAP, SNI_MAP
from kura_shaper.haproxy.master import NotRunningError, ReloadFailedError, read_workers, reload
from kura_shaper.haproxy.options import version_text
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.running import read_running
from kura_shaper.haproxy.write import find_generation, read_generation, withdraw_generation, write_generation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kura_shaper.clock import Clock
    from kura_shaper.haproxy.binary import HaproxyBinary
    from kura_shaper.haproxy.master import Master, Workers
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.haproxy.running import Running
    from kura_shaper.tenants.document import TenantsDocument

_LOCK = ".apply.lock"
_GIVEN = ".certificates.json"
# A path that is one word to HAProxy, whatever it is asked.
_ASKABLE = re.compile(r"[A-Za-z0-9/_.,:=@%+*-]+", re.ASCII)


class Emptying(StrEnum):
    """Whether a map that has names may lose all of them. Seldom meant, and nobody would be served."""

    REFUSED = "refused"
    ALLOWED = "allowed"


class Outcome(StrEnum):
    """What came of it."""

    UNCHANGED = "unchanged"
    APPLIED = "applied"
    DEFERRED = "deferred"
    NOT_RUNNING = "not running"


@dataclass(frozen=True, slots=True)
class ReloadPolicy:
    """How often a gateway may be reloaded: not within `interval_s`, nor while `old_workers_max` old workers serve."""

    interval_s: int = 30
    old_workers_max: int = 8


@dataclass(frozen=True, slots=True)
class Site:
    """One gateway: how it is rendered, where its generations are, who answers for it, and who reads the files first.

    Without `binary` HAProxy does not read them before they are in force.
    """

    options: GatewayOptions
    directory: Path
    master: Master
    binary: HaproxyBinary | None = None
    policy: ReloadPolicy = ReloadPolicy()
    emptying: Emptying = Emptying.REFUSED


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an apply would do.

    `report` is HAProxy's own when `is_checked`, else what is known of the certificates. `running` is
    None when no gateway runs; `previous` is what was in force on disk.
    """

    wanted: GatewayConfig
    previous: GatewayConfig
    decision: Decision
    running: Running | None
    loaded: GatewayConfig | None
    report: CheckReport
    certificates: dict[str, LocalCertificate]
    is_checked: bool = False

    @property
    def difference(self) -> str:
        """A unified diff from what is in force on disk."""
        return diff_text(self.previous, self.wanted)

    @property
    def changes(self) -> bool:
        """Whether an apply would write or ask for anything."""
        return self.decision.kind is not Kind.NONE or self.wanted.generation != self.previous.generation


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done. `wait_s` says when a deferred reload may be tried again."""

    outcome: Outcome
    generation: str
    decision: Decision
    workers: Workers | None = None
    wait_s: int = 0
    notes: tuple[str, ...] = ()


class CheckFailedError(RefusedError):
    """HAProxy does not take the rendered files. Nothing was written; `report` says what and whose."""

    code = "haproxy_check"

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report.refusals[0]), remedy="nothing was written; what was in force still is")
        self.report = report


def prepare(document: TenantsDocument, site: Site) -> Prepared:
    """Return what an apply would do; change nothing.

    Raises what `render` raises, RefusedError when a map would lose all its names, and
    StateUnknownError when the gateway or the files can't be read.
    """
    wanted, previous = render(document, site.options), read_generation(site.directory)
    certificates, unread = _local_certificates(site.options, _read_given(site.directory))
    try:
        running: Running | None = read_running(site.master, site.options, certificates=tuple(certificates))
    except NotRunningError:
        running = None
    if site.emptying is Emptying.REFUSED:
        refuse_emptying(wanted, previous, running)
    loaded: GatewayConfig | None = None
    if running is None:
        decision = Decision(Kind.NONE, ("no gateway runs: it reads the files when it starts",))
    else:
        running_id = running.config_id
        loaded = find_generation(site.directory, lambda c: config_id(c) == running_id) if running_id else None
        decision = decide(wanted, running, site.options, loaded=loaded, certificates=certificates)
    decision = replace(decision, notes=(*decision.notes, *unread))
    known = report_without_haproxy(document, site.options)
    # Without HAProxy nobody knows what it would make of a file, so that is told, and no reason to stop.
    unchecked = replace(known, refusals=(), cautions=known.findings)
    prepared = Prepared(wanted, previous, decision, running, loaded, unchecked, certificates)
    if site.binary is None or not prepared.changes:
        return prepared
    return replace(prepared, report=_checked(document, site.options, site.binary), is_checked=True)


def _checked(document: TenantsDocument, options: GatewayOptions, binary: HaproxyBinary) -> CheckReport:
    """Let the HAProxy that is here read the files; one of another branch reads what they would be for its own."""
    if binary.version[:2] == options.haproxy_version[:2]:
        return check_with_haproxy(document, options, binary=binary)
    report = check_with_haproxy(document, replace(options, haproxy_version=binary.version), binary=binary)
    runs, here = version_text(options.haproxy_version[:2]), version_text(binary.version[:2])
    return replace(report, notes=(*report.notes, f"the files for HAProxy {runs} were checked as for {here}"))


def carry_out(prepared: Prepared, site: Site) -> Applied:
    """Do what was prepared, read it back, and return what came of it.

    A reload that the policy does not allow yet is deferred: nothing is written, unless it makes good
    what the gateway did not take while it runs. Raises CheckFailedError, and RefusedError when the
    gateway did not take it: the files from before are then in force again, or it is said that they
    could not be. After StateUnknownError the new files are in force, and the gateway has them or not.
    """
    decision, running = prepared.decision, prepared.running
    if not prepared.report.passed:
        raise CheckFailedError(prepared.report)
    if running and decision.kind is Kind.RELOAD:
        wait_s, why = _not_yet(running.workers, site.policy)
        if why:
            return _applied(Outcome.DEFERRED, prepared, running.workers, wait_s=wait_s, notes=(why,))
    keep = frozenset({prepared.loaded.generation} if prepared.loaded else ())
    write_generation(prepared.wanted, site.directory, keep=keep)
    if running is None:
        return _applied(Outcome.NOT_RUNNING, prepared, None)
    if not prepared.changes:
        _write_given(site.directory, prepared.certificates)
        return _applied(Outcome.UNCHANGED, prepared, running.workers)
    notes: tuple[str, ...] = ()
    if decision.kind is Kind.RUNTIME:
        notes = _change_while_it_runs(prepared, site)
    if notes:
        wait_s, why = _not_yet(running.workers, site.policy)
        if why:
            return _applied(Outcome.DEFERRED, prepared, running.workers, wait_s=wait_s, notes=(*notes, why))
    if decision.kind is Kind.RELOAD or notes:
        _reload(prepared, running, site)
    after = read_running(site.master, site.options, certificates=tuple(prepared.certificates))
    _verify(prepared, after, site, is_reloaded=decision.kind is Kind.RELOAD or bool(notes))
    _write_given(site.directory, prepared.certificates)
    return _applied(Outcome.APPLIED, prepared, after.workers, notes=notes)


@contextmanager
def alone(directory: Path, clock: Clock, *, patience_s: int = 30) -> Iterator[None]:
    """Hold the directory's lock, so that two applies do not undo each other. Raises RefusedError after a while."""
    try:
        with suppress(FileExistsError):
            directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except NotADirectoryError as error:
        message = f"{directory} is no directory"
        raise UsageError(message, remedy="name a directory, or a path where one can be made") from error
    except OSError as error:
        message = f"{directory} can't be written to: {error.strerror}"
        raise RefusedError(message, remedy="put that right, or name another directory") from error
    try:
        _lock(descriptor, clock, patience_s)
    except OSError as error:
        os.close(descriptor)
        message = f"another apply has been at work in {directory} for {patience_s} s"
        raise RefusedError(message, remedy="see whether it hangs") from error
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, clock: Clock, patience_s: int) -> None:
    deadline_ns = clock.now_ns() + patience_s * 1_000_000_000
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.now_ns() >= deadline_ns:
                raise
            clock.wait_ns(100_000_000)
        else:
            return


def refuse_emptying(wanted: GatewayConfig, previous: GatewayConfig, running: Running | None) -> None:
    """Raise EmptyingError when clients had names on a plane and would have none, as after a source that failed.

    A plane whose ports go takes its names along: that is said in so many words.
    """
    config = wanted.text(CONFIG_FILE)
    for name in (SNI_MAP, PEER_MAP):
        if f"/{name})" not in config:
            continue  # no door asks it
        sources = (previous.files, running.maps if running else {})
        had = max(source.get(name, b"").count(b"\n") for source in sources)
        if had and not wanted.files[name]:
            message = f"{name} would be empty, and has {had} names now: nobody would be served"
            raise EmptyingError(message, remedy="see whether the document is whole, or allow it with --allow-empty")


class EmptyingError(RefusedError):
    """A map would lose all its names. What was in force still is."""

    code = "empty"


def digest_of(pem: str) -> str:
    """Return what a certificate's content is known by, key and chain included."""
    return hashlib.sha256(pem.encode("ascii")).hexdigest()


def _read_given(directory: Path) -> dict[str, str]:
    """Return the digests of the certificates that the gateway was last given, by path; none where that is not known.

    It tells neither chain nor key of what it has, so what it was given is written down.
    """
    with suppress(OSError, ValueError, AttributeError):
        return {str(path): str(digest) for path, digest in json.loads((directory / _GIVEN).read_text("utf-8")).items()}
    return {}


def _write_given(directory: Path, certificates: Mapping[str, LocalCertificate]) -> None:
    given = {path: digest_of(certificate.pem) for path, certificate in sorted(certificates.items())}
    if given != _read_given(directory):
        with suppress(OSError):
            replace_durably(directory / _GIVEN, json.dumps(given, indent=2) + "\n")


def _local_certificates(
    options: GatewayOptions, given: Mapping[str, str]
) -> tuple[dict[str, LocalCertificate], tuple[str, ...]]:
    """Return the certificates that can be read here, by path, and a note for each that can't."""
    found: dict[str, LocalCertificate] = {}
    notes = []
    try:
        paths = certificate_files(options)
    except OSError as error:
        return {}, (f"{options.certificate} can't be read here, so its content is not compared: {error.strerror}",)
    if not paths:
        notes.append(f"no certificate is here at {options.certificate}, so its content is not compared")
    for path in paths:
        if not _ASKABLE.fullmatch(str(path)):
            notes.append(f"{str(path)!r} can't be asked for by that name, so its content is not compared")
            continue
        try:
            pem, key = path.read_text(encoding="ascii"), path.with_suffix(".key")
            # As HAProxy does: a key that is not in the file is beside it.
            if "PRIVATE KEY-----" not in pem and key.is_file():
                pem = f"{pem.rstrip()}\n{key.read_text(encoding='ascii')}"
            has_changed = given.get(str(path), digest_of(pem)) != digest_of(pem)
            found[str(path)] = LocalCertificate(fingerprint(pem), pem, serial(pem), has_changed=has_changed)
        except (OSError, UnicodeError, UsageError) as error:
            notes.append(f"{path} can't be read here, so its content is not compared: {error}")
    return found, tuple(notes)


def _not_yet(workers: Workers, policy: ReloadPolicy) -> tuple[int, str]:
    """Return how long to wait for a reload and why, (0, "") when it may be now."""
    if len(workers.old) >= policy.old_workers_max:
        count = len(workers.old)
        words = f"{count} old workers still serve, and each has a bucket of its own for every ceiling"
        return max(policy.interval_s, 1), f"{words}; a further reload waits for them"
    wait_s = policy.interval_s - workers.current.age_s
    if wait_s > 0:
        return wait_s, f"the last reload was {workers.current.age_s} s ago, and {policy.interval_s} s lie between two"
    return 0, ""


def _change_while_it_runs(prepared: Prepared, site: Site) -> tuple[str, ...]:
    """Ask for each step and read back; return why that was not enough, () when it was."""
    for step in prepared.decision.steps:
        try:
            step.perform(site.master)
        except RefusedError as error:
            # The files are written, so a reload brings what a step did not.
            return (f"a reload, since a change while it runs was refused: {error.message}",)
    after = read_running(site.master, site.options, certificates=tuple(prepared.certificates))
    left = _left(prepared, after, site, loaded=prepared.loaded)
    return (f"a reload, since a change while it runs did not last: {'; '.join(left[:3])}",) if left else ()


def _reload(prepared: Prepared, running: Running, site: Site) -> None:
    state = Path(site.options.servers_state)
    _write_servers_state(state, running, dns_backends(prepared.wanted))
    try:
        reload(site.master)
    except StateUnknownError:
        # The answer alone may be lost, so the gateway is asked what it runs.
        if read_running(site.master, site.options).config_id != config_id(prepared.wanted):
            raise
    except ReloadFailedError as error:
        _put_back(prepared, site, error)
        said = error.output.replace(f"{site.options.directory}/", "")
        findings = [f for f in parse_messages(said, prepared.wanted) if f.severity is Severity.ALERT and f.file]
        if not findings:
            raise
        raise ReloadFailedError(error.output, where=str(findings[0])) from error
    finally:
        # It says what is true now; a start next week must not read it.
        with suppress(OSError):
            state.unlink()


def _write_servers_state(path: Path, running: Running, wanted: Mapping[str, str]) -> None:
    """Leave the addresses of DNS names for the new worker. Only those: everything else the files know better."""
    servers = (server for server in running.servers.values() if server.address)
    rows = [s.row for s in servers if wanted.get(s.name.partition("/")[0]) == f"{s.fqdn}:{s.port}"]
    if not rows:
        return
    temporary = path.with_suffix(".new")
    with suppress(OSError):
        # Without it the new worker asks for the addresses first, which takes it a moment. The directory may be
        # the gateway's own account's, so what lies there already, say a link, is not written through.
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="ascii") as file:
            file.write(running.servers_head + "".join(f"{row}\n" for row in rows))
        temporary.replace(path)


def _put_back(prepared: Prepared, site: Site, why: KuraShaperError) -> None:
    """Put what was in force before in force again: on disk, so that a restart finds it, and in the worker."""
    try:
        good = _last_good(prepared, site)
        if good == EMPTY:
            withdraw_generation(site.directory)
            return
        keep = frozenset({prepared.loaded.generation} if prepared.loaded else ())
        write_generation(good, site.directory, keep=keep)
        if read_workers(site.master).is_disowned:
            # HAProxy 3.2 hands the sockets of such a worker on to nobody: the next reload that fails would take
            # the socket between edge and TLS away from it, and HTTPS with that. One that goes well ends this.
            reload(site.master)
            return
    except KuraShaperError as error:
        message = f"{why.message}; and the files from before could not be put back: {error.message}"
        raise RefusedError(message, remedy="put back the link `current` by hand before the gateway restarts") from why
    if not prepared.decision.steps:
        return
    try:
        now = read_running(site.master, site.options)
        for step in decide(good, now, site.options, loaded=prepared.loaded).steps:
            step.perform(site.master)
    except KuraShaperError as error:
        message = f"{why.message}; and what was changed while it runs could not be taken back: {error.message}"
        raise RefusedError(message, remedy="the files from before are in force; apply again") from why


def _last_good(prepared: Prepared, site: Site) -> GatewayConfig:
    """Return the newest configuration that the worker has: of what it started with, and of what came while it runs.

    That is what was in force, unless an apply was cut short, or files were only written.
    """
    running, loaded, previous = prepared.running, prepared.loaded, prepared.previous
    if running is None or loaded is None:
        return previous

    def has(config: GatewayConfig) -> bool:
        return decide(config, running, site.options, loaded=loaded).kind is not Kind.RELOAD

    return previous if has(previous) else find_generation(site.directory, has) or loaded


def _verify(prepared: Prepared, after: Running, site: Site, *, is_reloaded: bool) -> None:
    """Raise RefusedError unless the gateway says that it has what was wanted."""
    loaded = prepared.wanted if is_reloaded else prepared.loaded
    if is_reloaded and after.config_id != config_id(prepared.wanted):
        raise RefusedError(
            f"after the reload the gateway runs configuration {after.config_id or 'of somebody else'}",
            remedy=f"see whether its -f names {site.options.file('haproxy.cfg')}",
        )
    if left := _left(prepared, after, site, loaded=loaded):
        raise RefusedError(
            f"the gateway took everything, and does not have it: {'; '.join(left[:3])}",
            remedy="see its log, and apply again",
        )


def _left(prepared: Prepared, after: Running, site: Site, *, loaded: GatewayConfig | None) -> tuple[str, ...]:
    """Return what the gateway still lacks of what was wanted."""
    certificates = {path: replace(known, has_changed=False) for path, known in prepared.certificates.items()}
    left = decide(prepared.wanted, after, site.options, loaded=loaded, certificates=certificates)
    return () if left.kind is Kind.NONE else left.reasons


def _applied(
    outcome: Outcome,
    prepared: Prepared,
    workers: Workers | None,
    *,
    wait_s: int = 0,
    notes: tuple[str, ...] = (),
) -> Applied:
    return Applied(
        outcome=outcome,
        generation=prepared.wanted.generation,
        decision=prepared.decision,
        workers=workers,
        wait_s=wait_s,
        notes=notes,
    )
