"""What a running gateway really has: read from itself, not from the files that it was given."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.maps import CRT_LIST, GRPC_MAP, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.master import Workers, parse_workers
from kura_shaper.haproxy.process import CONFIG_ID_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.haproxy.master import Master
    from kura_shaper.haproxy.options import GatewayOptions

MAPS = (MARK_MAP, GRPC_MAP, PEER_MAP, SNI_MAP)

_INFO = re.compile(r"^(?P<key>[A-Za-z_-]+): (?P<value>.*)$", re.MULTILINE)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?")
_SERIAL = re.compile(r"^Serial: 0*([0-9A-F]+)$", re.MULTILINE)
_FINGERPRINT = re.compile(r"^SHA1 FingerPrint: ([0-9A-F]{40})$", re.MULTILINE)
# Columns of `show servers state` (management guide, 9.3); version 1 of the format.
_STATE_VERSION = "1"
_COLUMNS = ("be_name", "srv_name", "srv_addr", "srv_admin_state", "srv_fqdn", "srv_port", "srv_check_port")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server as the worker has it. `name` is BACKEND/SERVER, `row` its line in the state that HAProxy can read back.

    `address` is "" while a DNS name has none; `fqdn` is "" for a server that is no DNS name.
    """

    name: str
    address: str
    port: int
    check_port: int
    fqdn: str
    row: str


@dataclass(frozen=True, slots=True)
class Running:
    """One reading. `config_id` is "" for a gateway that was not rendered here.

    `maps` has each loaded map by its file name, as the bytes of a rendered file.
    `certificate_rows` has the host names of the certificate list, each with the certificate and
    the id that removes it. `fingerprints` has the SHA-1 of each certificate asked for, or its
    serial number (see `parse_fingerprint`), by path.
    """

    version: tuple[int, int, int]
    config_id: str
    workers: Workers
    maps: Mapping[str, bytes] = field(default_factory=dict)
    certificate_rows: tuple[tuple[str, str, str], ...] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    servers: Mapping[str, RunningServer] = field(default_factory=dict)
    servers_head: str = ""


def read_running(master: Master, options: GatewayOptions, *, certificates: tuple[str, ...] = ()) -> Running:
    """Ask a gateway for everything that can be changed while it runs.

    `certificates` are the paths to ask fingerprints of. Raises NotRunningError, or
    StateUnknownError when an answer is missing or makes no sense.
    """
    workers = parse_workers(master.ask("show proc"))
    info = _info(master)
    version = _version(info)
    description = info.get("description", "")
    config_id = description.removeprefix(CONFIG_ID_PREFIX) if description.startswith(CONFIG_ID_PREFIX) else ""
    head, servers = parse_servers(master.ask("@1 show servers state"))
    found = {name: parse_map(master.ask(f"@1 show map {options.file(name)}")) for name in MAPS}
    prints = {path: parse_fingerprint(master.ask(f"@1 show ssl cert {path}")) for path in certificates}
    return Running(
        version=version,
        config_id=config_id,
        workers=workers,
        maps={name: content for name, content in found.items() if content is not None},
        certificate_rows=parse_certificate_list(master.ask(f"@1 show ssl crt-list -n {options.file(CRT_LIST)}")),
        fingerprints={path: text for path, text in prints.items() if text},
        servers=servers,
        servers_head=head,
    )


def read_version(master: Master) -> tuple[int, int, int]:
    """Return the version of the current worker. Raises NotRunningError or StateUnknownError."""
    return _version(_info(master))


def _info(master: Master) -> dict[str, str]:
    return {match["key"].lower(): match["value"] for match in _INFO.finditer(master.ask("@1 show info"))}


def _version(info: Mapping[str, str]) -> tuple[int, int, int]:
    match = _VERSION.match(info.get("version", ""))
    if match is None:
        raise StateUnknownError("the gateway's worker does not say its version", remedy="is it HAProxy at all?")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def parse_map(text: str) -> bytes | None:
    """Return a map as the bytes of a rendered file, from an answer to `show map`; None when it is not loaded."""
    if text.startswith("Unknown map identifier"):
        return None
    if not text:
        raise StateUnknownError("the gateway answers nothing when asked for a map")
    rows = []
    for row in text.splitlines():
        if row:
            reference, _, content = row.partition(" ")
            if not reference.startswith("0x"):
                raise StateUnknownError(f"the gateway answers `{row[:80]}` when asked for a map")
            rows.append(f"{content}\n")
    return "".join(sorted(rows)).encode("utf-8")


def parse_certificate_list(text: str) -> tuple[tuple[str, str, str], ...]:
    """Return (host, certificate, id) of each row in an answer to `show ssl crt-list -n`, () when it is not loaded.

    Raises StateUnknownError for another answer: a list that is taken for empty would be filled twice.
    """
    if not text.startswith(("# ", "didn't find the specified filename")):
        raise StateUnknownError(f"the gateway answers {text[:80]!r} when asked for its certificate list")
    rows = []
    for row in text.splitlines():
        if row.startswith("/"):
            row_id, _, host = row.partition(" ")
            rows.append((host.strip(), row_id.rpartition(":")[0], row_id))
    return tuple(rows)


def parse_fingerprint(text: str) -> str:
    """Return the fingerprint in an answer to `show ssl cert PATH`, "" when the worker has no such certificate.

    HAProxy cuts its answer where its buffer is full, with some 400 names: then it is `serial ` and
    the certificate's serial number, which stands before them. Raises StateUnknownError for another
    answer, as of a worker that still starts.
    """
    if match := _FINGERPRINT.search(text):
        return match[1]
    if text.startswith("Filename: ") and (match := _SERIAL.search(text)):
        return f"serial {match[1]}"
    if not text.startswith(("Can't display the certificate", "Filename: ")):
        raise StateUnknownError(f"the gateway answers {text[:80]!r} when asked for a certificate")
    return ""


def parse_servers(text: str) -> tuple[str, dict[str, RunningServer]]:
    """Return the head of an answer to `show servers state`, and the servers by name. Raises StateUnknownError."""
    rows = [row for row in text.splitlines() if row]
    if len(rows) < 2 or rows[0] != _STATE_VERSION or not rows[1].startswith("# "):
        raise StateUnknownError(f"the gateway's servers can't be read: {' '.join(rows)[:80]!r}")
    columns = rows[1].removeprefix("# ").split()
    try:
        places = [columns.index(name) for name in _COLUMNS]
        servers = [_server(row, places) for row in rows[2:]]
    except (ValueError, IndexError) as error:
        raise StateUnknownError(f"the gateway's servers can't be read: {error}") from error
    return "\n".join(rows[:2]) + "\n", {server.name: server for server in servers}


def _server(row: str, places: list[int]) -> RunningServer:
    words = row.split()
    backend, server, address, _, fqdn, port, check_port = (words[place] for place in places)
    return RunningServer(
        name=f"{backend}/{server}",
        address="" if address == "-" else address,
        port=int(port),
        check_port=int(check_port),
        fqdn="" if fqdn == "-" else fqdn,
        row=row,
    )
