"""How a running gateway gets from what it has to what is wanted: not at all, while it runs, or by a reload.

Pure: values in, a decision out. HAProxy takes maps, host names of certificates,
certificates and server addresses while it runs. Everything else is in the
configuration itself and takes a reload, which costs: for as long as the old worker
serves, each ceiling counts twice in the gateway. So the reasons are always given.

The decision compares with what the gateway says it has, never with what it was last
told: what somebody changed by hand is put right by the next run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.haproxy.generation import CONFIG_FILE
from kura_shaper.haproxy.maps import CRT_LIST, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.options import CertificateKind
from kura_shaper.haproxy.process import CONFIG_ID_PREFIX
from kura_shaper.haproxy.running import MAPS
from kura_shaper.haproxy.steps import AddHost, MoveServer, RemoveHost, ReplaceCertificate, ReplaceMap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kura_shaper.haproxy.generation import GatewayConfig
    from kura_shaper.haproxy.options import GatewayOptions
    from kura_shaper.haproxy.running import Running
    from kura_shaper.haproxy.steps import Step

Sections = dict[str, tuple[str, ...]]

_TENANT_SECTION = re.compile(r"backend (?P<tenant>[a-z0-9-]+)_(?P<plane>edge|peer|http|grpc)", re.ASCII)
_SERVER = re.compile(
    r"server (?P<name>\S+) (?P<host>\[[0-9a-f:.]+\]|[0-9.]+):(?P<port>\d+)(?P<rest>(?: .*)?)", re.ASCII
)
_TEMPLATE = re.compile(r"server-template p \d+ (\S+:\d+) ", re.ASCII)
_CHECK_PORT = re.compile(r" port (\d+)", re.ASCII)
_CONFIG_ID = re.compile(rf"^    description {CONFIG_ID_PREFIX}([0-9a-f]{{16}})$", re.MULTILINE | re.ASCII)
_LIMIT = "filter bwlim-out "
_ALLOWED = "acl allowed "


class Kind(StrEnum):
    """What has to happen."""

    NONE = "none"
    RUNTIME = "runtime"
    RELOAD = "reload"


@dataclass(frozen=True, slots=True)
class LocalCertificate:
    """A certificate as it is in a file here: SHA-1 and serial number of its leaf, and what HAProxy would be given,
    key included. `has_changed` when that is known to differ from what the gateway was last given."""

    fingerprint: str
    pem: str
    serial: str = ""
    has_changed: bool = False

    def is_loaded_as(self, identity: str) -> bool:
        """Tell whether a worker's certificate is this one, by what `parse_fingerprint` returned."""
        return identity in {self.fingerprint, f"serial {self.serial}"}


@dataclass(frozen=True, slots=True)
class Decision:
    """What has to happen, why, and for `RUNTIME` the steps in their order.

    `notes` are things that a person may want to know and nothing is done about.
    """

    kind: Kind
    reasons: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()


def config_id(config: GatewayConfig) -> str:
    """Return the id in a rendered configuration, "" when there is none."""
    match = _CONFIG_ID.search(config.text(CONFIG_FILE))
    return match[1] if match else ""


def decide(
    wanted: GatewayConfig,
    running: Running,
    options: GatewayOptions,
    *,
    loaded: GatewayConfig | None,
    certificates: Mapping[str, LocalCertificate] | None = None,
) -> Decision:
    """Return what makes the running gateway the wanted one.

    `loaded` is the generation that the worker started with, None when that is not known
    any more. `certificates` are those that can be read here, by their path.
    """
    if loaded is None:
        what = f"configuration {running.config_id}" if running.config_id else "a configuration of somebody else's"
        return Decision(Kind.RELOAD, (f"the gateway runs {what}, which is not here to compare with",))
    old, new = _sections(loaded), _sections(wanted)
    reasons, notes = _structure(old, new, _routed(wanted))
    text = wanted.text(CONFIG_FILE)
    maps = [name for name in MAPS if options.file(name) in text]
    reasons += [f"{name} is not loaded" for name in maps if name not in running.maps]
    local = certificates or {}
    if options.certificate_kind is CertificateKind.DIRECTORY:
        reasons += [f"certificate {path} is new" for path in sorted(local.keys() - running.fingerprints.keys())]
    if reasons:
        return Decision(Kind.RELOAD, tuple(reasons), notes=tuple(notes))
    steps = (
        *_certificate_steps(running, local),
        *_server_steps(new, running),
        *_routing_steps(wanted, running, options, maps),
    )
    kind = Kind.RUNTIME if steps else Kind.NONE
    return Decision(kind, tuple(step.describe() for step in steps), steps, tuple(notes))


def dns_backends(config: GatewayConfig) -> dict[str, str]:
    """Return NAME:PORT of each backend that is found by DNS."""
    found = {}
    for header, rows in _sections(config).items():
        for match in filter(None, map(_TEMPLATE.match, rows)):
            found[header.split(" ")[1]] = match[1]
    return found


def _sections(config: GatewayConfig) -> Sections:
    found: Sections = {}
    for block in config.text(CONFIG_FILE).strip("\n").split("\n\n"):
        header, *rows = block.split("\n")
        if not header.startswith("#"):
            # Its id differs with anything else that differs, so it says nothing by itself.
            found[header] = tuple(row.strip() for row in rows if not _CONFIG_ID.match(row))
    return found


def _routed(config: GatewayConfig) -> dict[str, set[str]]:
    """Return the tenants that clients reach, by the map that leads to them."""
    return {name: {row.split(" ")[-1] for row in config.text(name).splitlines()} for name in (SNI_MAP, PEER_MAP)}


def _structure(old: Sections, new: Sections, routed: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return why a reload is needed, and what may stay as it is until the next one."""
    reasons: dict[str, None] = {}
    unused: dict[str, None] = {}
    for header in (*new, *(header for header in old if header not in new)):
        before, after = old.get(header), new.get(header)
        match = _TENANT_SECTION.match(header)
        if match is None:
            # Resolvers that no backend asks do no harm.
            if before != after and not (after is None and header.startswith("resolvers ")):
                reasons[_shared_reason(header, before, after)] = None
        elif before is None:
            reasons[f"tenant {match['tenant']}: backend {match['tenant']}_{match['plane']} is new"] = None
        elif after is None:
            tenant, sni_map = match["tenant"], PEER_MAP if match["plane"] == "peer" else SNI_MAP
            # What no name leads to does no harm, and goes with the next reload.
            if tenant in routed[sni_map]:
                reasons[f"tenant {tenant}: backend {tenant}_{match['plane']} is to go"] = None
            else:
                unused[tenant] = None
        elif before != after and _fixed(before) != _fixed(after):
            reasons[f"tenant {match['tenant']}: {_tenant_reason(before, after)}"] = None
    notes = [f"backends of {', '.join(unused)} stay loaded, with no name that leads to them, until the next reload"]
    return list(reasons), notes if unused else []


def _shared_reason(header: str, before: tuple[str, ...] | None, after: tuple[str, ...] | None) -> str:
    name = " ".join(header.split(" ")[:2])
    if before is None or after is None:
        return f"section {name} {'is new' if before is None else 'is to go'}"
    changed = [row for row in after if row not in before] or [row for row in before if row not in after]
    return f"section {name} changes: {changed[0] if changed else 'the order of its lines'}"


def _tenant_reason(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    changed = {*before} ^ {*after}
    if any(row.startswith(_LIMIT) for row in changed):
        return "another ceiling, and HAProxy takes a shared limit as a constant"
    if any(row.startswith(_ALLOWED) for row in changed):
        return "other client_cidrs"
    return "its servers are found or checked in another way"


def _fixed(rows: tuple[str, ...]) -> tuple[str, ...]:
    """Return a section's lines without what can be changed in a running server."""
    return tuple(_SERVER.sub(lambda m: f"server {m['name']}{_CHECK_PORT.sub(' port', m['rest'])}", row) for row in rows)


def _server_steps(new: Sections, running: Running) -> Iterator[MoveServer]:
    for header, rows in new.items():
        backend = header.split(" ")[1] if header.startswith("backend ") else ""
        for match in filter(None, map(_SERVER.fullmatch, rows)):
            name, address, port = f"{backend}/{match['name']}", match["host"].strip("[]"), int(match["port"])
            check = _CHECK_PORT.search(match["rest"])
            check_port = int(check[1]) if check else 0
            server = running.servers.get(name)
            if server is None or (server.address, server.port, server.check_port) != (address, port, check_port):
                yield MoveServer(name, address, port, check_port)


def _certificate_steps(running: Running, local: Mapping[str, LocalCertificate]) -> Iterator[ReplaceCertificate]:
    for path, certificate in sorted(local.items()):
        loaded = running.fingerprints.get(path, "")
        if loaded and (certificate.has_changed or not certificate.is_loaded_as(loaded)):
            yield ReplaceCertificate(path, certificate.pem)


def _routing_steps(
    wanted: GatewayConfig, running: Running, options: GatewayOptions, maps: Sequence[str]
) -> Iterator[Step]:
    """Yield the steps of names and marks, so that at no moment a name is known and what it needs is not.

    Coming: certificate, mark, name. Going: name, mark, certificate.
    """
    list_path = options.file(CRT_LIST)
    hosts = {(host, certificate) for certificate, _, host in _rows(wanted, CRT_LIST)}
    listed = {(host, certificate) for host, certificate, _ in running.certificate_rows}
    for host, certificate in sorted(hosts - listed):
        yield AddHost(list_path, certificate, host)
    final = [(name, wanted.files[name]) for name in maps if name != MARK_MAP]
    if MARK_MAP in maps:
        between = _both(running.maps[MARK_MAP], wanted.files[MARK_MAP])
        final = [(MARK_MAP, between), *final, (MARK_MAP, wanted.files[MARK_MAP])]
    has = dict(running.maps)
    for name, rows in final:
        if has[name] != rows:
            yield ReplaceMap(options.file(name), rows)
            has[name] = rows
    seen: set[tuple[str, str]] = set()
    for host, certificate, row_id in running.certificate_rows:
        if (host, certificate) not in hosts or (host, certificate) in seen:
            yield RemoveHost(list_path, row_id, host)
        seen.add((host, certificate))


def _both(had: bytes, wanted: bytes) -> bytes:
    """Return the wanted rows and those of the keys that are to go."""
    keys = {row.split(b" ")[0] for row in wanted.splitlines()}
    # What no rendered file could say, somebody else has put there: it need not be kept even for a moment.
    rows = (row for row in had.splitlines(keepends=True) if row.isascii())
    going = {row for row in rows if row.split(b" ")[0] not in keys}
    return b"".join(sorted({*wanted.splitlines(keepends=True), *going}))


def _rows(config: GatewayConfig, name: str) -> Iterator[tuple[str, str, str]]:
    for row in config.text(name).splitlines():
        yield row.partition(" ")
