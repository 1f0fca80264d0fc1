"""What the renderer needs to know beside the tenants document: where and how the gateway runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import PurePosixPath

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import Endpoint

# 3.0 is the first that marks a client's connection; 3.0.3 has the fix of github.com/haproxy/haproxy/issues/2634.
MIN_VERSION = (3, 0, 3)
# HAProxy binds a unix socket under a longer, temporary name first, and the kernel's limit is 107.
_MAX_RUN_DIRECTORY_CHARS = 72

# Metrics are asked for by few, and must be had when the doors are full.
METRICS_MAXCONN = 100
MIN_NOFILE = 1024

_DIRECTORY = PurePosixPath("/etc/kura-shaper/haproxy/current")
_RUN_DIRECTORY = PurePosixPath("/run/kura-shaper-haproxy")
_CERTIFICATE = PurePosixPath("/etc/kura-shaper/tls/tls.crt")
_METRICS = Endpoint("127.0.0.1", 8405)
_ALL_ADDRESSES = (IPv4Address("0.0.0.0"), IPv6Address("::"))  # noqa: S104 - serving the world is its purpose

_PATH = re.compile(r"(/[A-Za-z0-9_.+-]+)+", re.ASCII)
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}", re.ASCII)


class BandwidthLimit(Enum):
    """Whether the gateway also smooths each tenant's payload to its ceiling, ahead of the tree."""

    ON = "on"
    OFF = "off"


class Design(Enum):
    """Where the tenant is decided.

    `edge` reads the name in the ClientHello, so the handshake is marked too and TLS ends one hop later.
    `inline` ends TLS at the door: one hop less, but the handshake is the gateway's own traffic, and the
    bandwidth limit counts the payload of each request instead of the bytes of each connection.
    """

    EDGE = "edge"
    INLINE = "inline"


class CertificateKind(Enum):
    """What `GatewayOptions.certificate` names: one PEM file for every host, or a directory of PEM files."""

    FILE = "file"
    DIRECTORY = "directory"


class VersionTooOldError(UsageError):
    """An HAProxy that can't do what the gateway needs of it."""

    code = "haproxy_too_old"


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How the gateway runs.

    `directory` is where the rendered files will be read from, `run_directory` where the
    sockets are (the account `user` must be able to reach it). `certificate` holds the
    chain, and the key too unless that is beside it as .key. `maxconn` is the most clients
    at a time on each plane; one takes up to six descriptors, and with `nofile`, the limit
    that the gateway will run under, a document that needs more is refused. `addresses` are
    bound on every port. Without `resolvers` the gateway asks those of /etc/resolv.conf.
    `dns_servers` bounds the addresses used of one DNS name. `wire_overhead_percent` lowers
    the bandwidth limit by what headers add on the wire. `h2_window_bytes` is what a client may
    send ahead of a slow server (None: what is good for the version), `h2_streams` how many
    requests of one connection run at once.
    An old worker ends `hard_stop_after_s` after its reload, whatever it still serves.

    Raises UsageError for a value out of range, VersionTooOldError for one before 3.0.3.
    """

    haproxy_version: tuple[int, int, int]
    directory: PurePosixPath = _DIRECTORY
    run_directory: PurePosixPath = _RUN_DIRECTORY
    certificate: PurePosixPath = _CERTIFICATE
    certificate_kind: CertificateKind = CertificateKind.FILE
    user: str = "haproxy"
    group: str = "haproxy"
    design: Design = Design.EDGE
    bandwidth_limit: BandwidthLimit = BandwidthLimit.ON
    wire_overhead_percent: int = 0
    nbthread: int | None = None
    maxconn: int = 10_000
    nofile: int | None = None
    h2_window_bytes: int | None = None
    h2_streams: int = 32
    hard_stop_after_s: int = 1_800
    metrics_bind: Endpoint = _METRICS
    addresses: tuple[IPv4Address | IPv6Address, ...] = _ALL_ADDRESSES
    resolvers: tuple[Endpoint, ...] = ()
    dns_servers: int = 3

    def __post_init__(self) -> None:
        refuse_old_version(self.haproxy_version)
        for name in ("directory", "run_directory", "certificate"):
            _check_path(name, getattr(self, name))
        if len(str(self.run_directory)) > _MAX_RUN_DIRECTORY_CHARS:
            remedy = f"use at most {_MAX_RUN_DIRECTORY_CHARS} characters"
            raise UsageError(f"run_directory {self.run_directory} is too long for a socket", remedy=remedy)
        for name in ("user", "group"):
            if not _ACCOUNT.fullmatch(getattr(self, name)):
                raise UsageError(f"{name} {getattr(self, name)!r} is no account name", remedy='e.g. "haproxy"')
        _check_range("nbthread", 1 if self.nbthread is None else self.nbthread, most=1024)
        _check_range("maxconn", self.maxconn, most=1_000_000)
        _check_range("dns_servers", self.dns_servers, most=64)
        _check_range("nofile", MIN_NOFILE if self.nofile is None else self.nofile, least=MIN_NOFILE, most=2**30)
        # HAProxy holds a window in 31 bits, and one smaller than a buffer of it stalls an upload for good.
        _check_range("h2_window_bytes", self.h2_window_bytes or 16_384, least=16_384, most=2**31 - 1)
        _check_range("h2_streams", self.h2_streams, most=65_535)
        _check_range("hard_stop_after_s", self.hard_stop_after_s, most=86_400)
        _check_range("wire_overhead_percent", self.wire_overhead_percent, least=0, most=50)
        if not self.addresses or len(set(self.addresses)) != len(self.addresses):
            raise UsageError("addresses is empty or names one twice", remedy="e.g. 0.0.0.0 and ::")
        for endpoint in (self.metrics_bind, *self.resolvers):
            _check_ip_endpoint(endpoint)

    @property
    def tls_socket(self) -> str:
        """Address of the private socket between the edge and the TLS frontend."""
        return f"unix@{self.run_directory}/tls.sock"

    @property
    def has_h2_rxbuf(self) -> bool:
        """Whether each HTTP/2 stream has buffers of its own for what a client uploads."""
        return self.haproxy_version >= (3, 1, 0)

    @property
    def limits_connections(self) -> bool:
        """Whether the bandwidth limit may count bytes of a connection, rather than those of responses.

        Up to 3.2.22 and 3.4.3 the end of a connection overtakes what the limit holds back, and
        the last 1 to 20 kB are lost (github.com/haproxy/haproxy/issues/3457).
        """
        if self.haproxy_version < (3, 4, 0):
            return (3, 2, 23) <= self.haproxy_version < (3, 3, 0)
        return self.haproxy_version >= (3, 4, 4)

    @property
    def h2_window(self) -> int:
        """The HTTP/2 window in bytes.

        A window of 64 KiB holds an upload over 190 ms to 0.3 MB/s. Before 3.1 more than that lets an
        upload stand in the way of what else arrives on its connection: now and then up- and downloads
        of one gRPC channel waited for each other for good.
        """
        if self.h2_window_bytes is not None:
            return self.h2_window_bytes
        return 4_194_304 if self.has_h2_rxbuf else 65_535

    @property
    def process_maxconn(self) -> int:
        """Connections of the whole process: a TLS client counts at each door that it passes, and metrics have theirs.

        Were the sum not bounded above that of the doors, a full edge would leave no room behind it, and
        everybody would wait for everybody.
        """
        doors = 3 if self.design is Design.EDGE else 2
        return doors * self.maxconn + METRICS_MAXCONN

    @property
    def servers_state(self) -> PurePosixPath:
        """Path of the addresses that a new worker takes over from the one before it."""
        return self.run_directory / "servers.state"

    @property
    def admin_socket(self) -> PurePosixPath:
        """Path of the socket that the running gateway takes commands on."""
        return self.run_directory / "admin.sock"

    def file(self, name: str) -> str:
        """Return the path that a rendered file will be read from."""
        return str(self.directory / name)


def refuse_old_version(version: tuple[int, int, int]) -> None:
    """Raise VersionTooOldError when the version is one that the gateway can't be run with."""
    if version < MIN_VERSION:
        raise VersionTooOldError(
            f"HAProxy {version_text(version)} is too old", remedy=f"use {version_text(MIN_VERSION)} or newer"
        )


def version_text(version: tuple[int, ...]) -> str:
    """Return the version as HAProxy prints it."""
    return ".".join(map(str, version))


def _check_path(name: str, path: PurePosixPath) -> None:
    if not _PATH.fullmatch(str(path)) or ".." in path.parts:
        remedy = "use an absolute path of letters, digits, . _ + and -"
        raise UsageError(f"{name} {str(path)!r} can't be written in a configuration", remedy=remedy)


def _check_range(name: str, value: int, *, most: int, least: int = 1) -> None:
    if not least <= value <= most:
        raise UsageError(f"{name} {value} is out of range", remedy=f"use {least} to {most}")


def _check_ip_endpoint(endpoint: Endpoint) -> None:
    try:
        ip_address(endpoint.host)
    except ValueError:
        raise UsageError(f"{endpoint} has no IP address", remedy='e.g. "127.0.0.1:8405"') from None
    _check_range("port", endpoint.port, most=65_535)
