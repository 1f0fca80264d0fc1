"""The options of render-haproxy, and the gateway that they describe."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.options import BandwidthLimit, CertificateKind, Design, GatewayOptions
from kura_shaper.tenants.check import listen_endpoint
from kura_shaper.tenants.document import Endpoint

_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?", re.ASCII)
# With only "3.0" given, the branch's patch level does not matter to what is rendered.
_ANY_PATCH = 999
_DEFAULTS = GatewayOptions((3, 0, _ANY_PATCH))
DEFAULT_CERTIFICATE = str(_DEFAULTS.certificate)

_WHAT, _HOW, _RUN = "What to do", "How the gateway runs", "A running gateway"

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Generations are written here.")]
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Let the real `haproxy -c` read the result before it is written.", rich_help_panel=_WHAT
    ),
]
Diff = Annotated[
    bool,
    typer.Option("--diff", help="Print what would change and do nothing. 1: something would.", rich_help_panel=_WHAT),
]
Apply = Annotated[
    bool,
    typer.Option("--apply", help="Bring the running gateway in step, and read it back.", rich_help_panel=_WHAT),
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Apply whenever the document changes, until a signal.", rich_help_panel=_WHAT),
]
Version = Annotated[
    str,
    typer.Option(
        "--haproxy-version",
        metavar="X.Y",
        help="Render for this version; default: the one that runs, or the one found here.",
        rich_help_panel=_HOW,
    ),
]
ReadFrom = Annotated[
    str,
    typer.Option(
        "--read-from",
        metavar="P",
        help="Where HAProxy will read the files; default: OUT/current.",
        rich_help_panel=_HOW,
    ),
]
RunDirectory = Annotated[
    str, typer.Option("--run-dir", metavar="P", help="Where the gateway's sockets are.", rich_help_panel=_HOW)
]
Certificate = Annotated[
    str,
    typer.Option(
        "--certificate", metavar="PEM", help="Chain and key for all hostnames, in one file.", rich_help_panel=_HOW
    ),
]
CertificateDirectory = Annotated[
    str,
    typer.Option(
        "--certificate-dir", metavar="P", help="Or a directory of such files, one a name or more.", rich_help_panel=_HOW
    ),
]
User = Annotated[str, typer.Option("--user", help="The account that the gateway runs as.", rich_help_panel=_HOW)]
Group = Annotated[str, typer.Option("--group", help="And its group.", rich_help_panel=_HOW)]
DesignChoice = Annotated[
    Design,
    typer.Option(
        "--design", help="Where the tenant is decided: by the name before TLS, or in it.", rich_help_panel=_HOW
    ),
]
Bwlim = Annotated[
    BandwidthLimit,
    typer.Option("--bwlim", help="Smooth each tenant's payload ahead of the tree.", rich_help_panel=_HOW),
]
Bind = Annotated[
    list[str] | None,
    typer.Option("--bind", metavar="IP", help="Listen at this address; may be repeated.", rich_help_panel=_HOW),
]
Resolver = Annotated[
    list[str] | None,
    typer.Option(
        "--resolver",
        metavar="IP:PORT",
        help="Ask this DNS server; may be repeated. Default: those of the machine.",
        rich_help_panel=_HOW,
    ),
]
DnsServers = Annotated[
    int, typer.Option("--dns-servers", metavar="N", help="Addresses taken of one DNS name.", rich_help_panel=_HOW)
]
MetricsBind = Annotated[
    str, typer.Option("--metrics", metavar="IP:PORT", help="Where HAProxy's own metrics are.", rich_help_panel=_HOW)
]
Threads = Annotated[
    int | None, typer.Option("--nbthread", metavar="N", help="Threads; default: one a processor.", rich_help_panel=_HOW)
]
Maxconn = Annotated[
    int, typer.Option("--maxconn", metavar="N", help="Clients at a time on each plane.", rich_help_panel=_HOW)
]
Nofile = Annotated[
    int | None,
    typer.Option(
        "--nofile", metavar="N", help="Refuse what needs more descriptors than this limit.", rich_help_panel=_HOW
    ),
]
WireOverhead = Annotated[
    int,
    typer.Option(
        "--wire-overhead-percent",
        metavar="N",
        help="Lower the bandwidth limit by what headers add on the wire, e.g. 5.",
        rich_help_panel=_HOW,
    ),
]
Http2Window = Annotated[
    int | None,
    typer.Option(
        "--h2-window-bytes",
        metavar="N",
        help="What a client may upload ahead of a slow server, HTTP/2. Default: 4194304, with 3.0 65535.",
        rich_help_panel=_HOW,
    ),
]
Http2Streams = Annotated[
    int,
    typer.Option("--h2-streams", metavar="N", help="Requests at a time on an HTTP/2 connection.", rich_help_panel=_HOW),
]
HardStop = Annotated[
    int,
    typer.Option(
        "--hard-stop-after-s",
        metavar="S",
        help="Seconds after a reload at which an old worker ends.",
        rich_help_panel=_HOW,
    ),
]
MasterSocketPath = Annotated[
    str,
    typer.Option(
        "--master-socket",
        metavar="P",
        help="The socket of `haproxy -W -S P`; default: RUN_DIR/master.sock.",
        envvar="KURA_SHAPER_MASTER_SOCKET",
        rich_help_panel=_RUN,
    ),
]
ReloadInterval = Annotated[
    int,
    typer.Option(
        "--reload-interval-s", metavar="S", min=0, help="Least seconds between two reloads.", rich_help_panel=_RUN
    ),
]
OldWorkersMax = Annotated[
    int,
    typer.Option(
        "--old-workers-max",
        metavar="N",
        min=1,
        help="No further reload while so many old workers serve.",
        rich_help_panel=_RUN,
    ),
]
AllowEmpty = Annotated[
    bool,
    typer.Option("--allow-empty", help="Let a map lose all of its names.", rich_help_panel=_RUN),
]
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="IP:PORT",
        help="With --watch: serve its metrics here, e.g. 127.0.0.1:9470.",
        rich_help_panel=_RUN,
    ),
]
Resync = Annotated[
    int,
    typer.Option(
        "--resync-s",
        metavar="S",
        min=1,
        help="With --watch: look at the gateway at least this often.",
        rich_help_panel=_RUN,
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway is, as given on the command line."""

    out: Path
    read_from: str
    run_directory: str
    certificate: str
    certificate_directory: str
    master_socket: str

    @property
    def master(self) -> PurePosixPath:
        """Path of the master's socket."""
        return PurePosixPath(self.master_socket or f"{self.run_directory}/master.sock")

    def options(self, version: tuple[int, int, int], **how: object) -> GatewayOptions:
        """Return the options of the renderer. Raises UsageError for two certificates or a value out of range."""
        if self.certificate and self.certificate_directory:
            raise UsageError("--certificate and --certificate-dir are both given", remedy="give one of them")
        kind = CertificateKind.DIRECTORY if self.certificate_directory else CertificateKind.FILE
        certificate = self.certificate_directory or self.certificate or DEFAULT_CERTIFICATE
        return GatewayOptions(
            haproxy_version=version,
            directory=PurePosixPath(self.read_from or self.out.absolute() / "current"),
            run_directory=PurePosixPath(self.run_directory),
            certificate=PurePosixPath(certificate),
            certificate_kind=kind,
            **how,  # type: ignore[arg-type]  # each is an option of its own below
        )


def parse_version(text: str) -> tuple[int, int, int]:
    """Return the version of --haproxy-version. Raises UsageError."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise UsageError(f"--haproxy-version {text[:32]!r} is no version", remedy='e.g. "3.0" or "3.0.11"')
    return int(match[1]), int(match[2]), int(match[3] or _ANY_PATCH)


def parse_endpoint(option: str, text: str, check: Callable[[str], Endpoint] = listen_endpoint) -> Endpoint:
    """Return the IP:PORT of an option. Raises UsageError that names the option."""
    try:
        return check(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", remedy='e.g. "127.0.0.1:8405"') from error


def parse_addresses(texts: list[str] | None) -> tuple[IPv4Address | IPv6Address, ...]:
    """Return the addresses of --bind, all of them without one. Raises UsageError."""
    try:
        return tuple(map(ip_address, texts)) if texts else _DEFAULTS.addresses
    except ValueError as error:
        raise UsageError(f"--bind: {error}", remedy='e.g. "192.0.2.10" or "::"') from error
