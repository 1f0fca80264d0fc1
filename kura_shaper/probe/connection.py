"""A connection as it comes up: an address, TCP, TLS. Shared by everything here that is a client."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kura_shaper.probe.failures import ClientError, Phase, Reason, translated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kura_shaper.probe.target import Family


class Address(NamedTuple):
    """Where a socket connects to."""

    family: int
    where: tuple[str | int, ...]

    def __str__(self) -> str:
        host, port = self.where[:2]
        return f"[{host}]:{port}" if self.family == socket.AF_INET6 else f"{host}:{port}"


class Resolver:
    """Asks the system for the addresses of names, and waits for it only so long.

    A lookup can't be called off, so it is left behind when it takes too long; the next one for
    the same name then waits for it rather than beginning another.
    """

    def __init__(self, look_up: Callable[..., list[tuple[object, ...]]] | None = None) -> None:
        self._look_up = look_up or socket.getaddrinfo
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int, Family], _Lookup] = {}

    def addresses(self, host: str, port: int, *, family: Family, timeout_s: float) -> tuple[Address, ...]:
        """Return the addresses of a name, in the system's order. Raises ClientError."""
        key = (host, port, family)
        with self._lock:
            lookup = self._under_way.get(key)
            if lookup is None:
                lookup = self._under_way[key] = _Lookup()
                threading.Thread(target=self._run, args=(key, lookup), name="resolve", daemon=True).start()
        if not lookup.is_done.wait(timeout_s):
            raise ClientError(Reason.DNS, f"the resolver has not answered for {host} within {timeout_s:g} s")
        with translated(Phase.CONNECTING):
            if lookup.error is not None:
                raise lookup.error
        return lookup.found

    def _run(self, key: tuple[str, int, Family], lookup: _Lookup) -> None:
        host, port, family = key
        try:
            rows = self._look_up(host, port, family=family.value, type=socket.SOCK_STREAM)
            lookup.found = tuple(dict.fromkeys(Address(int(row[0]), row[4]) for row in rows))  # type: ignore[call-overload, arg-type]
        except OSError as error:
            lookup.error = error
        except UnicodeError:
            lookup.error = socket.gaierror(socket.EAI_NONAME, "the name can't be one")
        with self._lock:
            del self._under_way[key]
        lookup.is_done.set()


class _Lookup:
    def __init__(self) -> None:
        self.found: tuple[Address, ...] = ()
        self.error: OSError | None = None
        self.is_done = threading.Event()


def connect(addresses: Sequence[Address], *, timeout_s: float) -> tuple[socket.socket, Address]:
    """Return a connection to the first address that answers; all of them together have so long. Raises ClientError.

    The socket blocks without end. Whoever looks at the clock cuts it: see `cut`.
    """
    failed: ClientError | None = None
    share_s = timeout_s / max(len(addresses), 1)
    for address in addresses:
        try:
            with translated(Phase.CONNECTING):
                return _connect_one(address, share_s), address
        except ClientError as error:
            failed = failed or ClientError(error.reason, f"{address}: {error.message}")
    raise failed or ClientError(Reason.DNS, "the name has no address")


def _connect_one(address: Address, timeout_s: float) -> socket.socket:
    peer = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(timeout_s)
        peer.connect(address.where)
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return peer


def trust(ca_file: Path | None, alpn: Sequence[str]) -> ssl.SSLContext:
    """Return what TLS is begun with: the system's authorities, or those of a file alone. Raises ClientError."""
    with translated(Phase.CONNECTING):
        context = ssl.create_default_context(cafile=ca_file)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context


def secure(peer: socket.socket, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """Return the connection with TLS begun, and no byte of it exchanged; it has the socket now. Raises ClientError."""
    with translated(Phase.SECURING):
        return context.wrap_socket(peer, server_hostname=name, do_handshake_on_connect=False)


def shake_hands(peer: ssl.SSLSocket) -> None:
    """Bring TLS up. Raises ClientError."""
    with translated(Phase.SECURING):
        peer.do_handshake()


def require_alpn(peer: ssl.SSLSocket, wanted: Sequence[str]) -> str:
    """Return the protocol that TLS agreed on, "" where the other side names none. Raises ClientError.

    Who names none speaks HTTP/1.1, since HTTP/2 has to be named (RFC 9113, 3.2).
    """
    agreed = peer.selected_alpn_protocol() or ""
    if wanted and agreed not in wanted and not (not agreed and "http/1.1" in wanted):
        raise ClientError(Reason.ALPN, f"the other side does not speak {' or '.join(wanted)}")
    return agreed


def ends_at_s(peer: ssl.SSLSocket) -> int | None:
    """Return the last second, in Unix time, that the other side's certificate is for."""
    found = (peer.getpeercert() or {}).get("notAfter")
    return int(ssl.cert_time_to_seconds(found)) if isinstance(found, str) else None


def cut(peer: socket.socket) -> None:
    """End a connection under the thread that blocks on it, whatever it does there.

    Python's TLS asks again when the kernel's own timeouts (SO_RCVTIMEO) end a read, so they end
    nothing. An SSLSocket's shutdown() would take its state away from under the other thread.
    """
    with suppress(OSError):  # it may have ended
        socket.socket.shutdown(peer, socket.SHUT_RDWR)
