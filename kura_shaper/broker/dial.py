"""Sockets of our own: marked for the node's tree, and told to notice soon when the other end is gone."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.broker.resolve import Candidate

_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_PROBES = 30, 10, 3
_USER_TIMEOUT_MS = 30_000


class MarkRefusedError(RefusedError):
    """The kernel does not let this process mark its sockets."""

    code = "so_mark"


class DialError(Exception):
    """No address could be connected to."""


def open_socket(family: int, *, so_mark: int | None) -> socket.socket:
    """Return a TCP socket that does not block. Raises MarkRefusedError when it can't have its mark."""
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if so_mark is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, so_mark)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    except PermissionError as error:
        made.close()
        raise MarkRefusedError("so_mark can't be set", remedy="grant CAP_NET_ADMIN, or remove so_mark") from error
    except OSError:
        made.close()
        raise
    return made


def require_mark(so_mark: int | None) -> None:
    """Raise MarkRefusedError when a mark is wanted and this process may not set it."""
    if so_mark is not None:
        open_socket(socket.AF_INET, so_mark=so_mark).close()


async def connect(candidate: Candidate, *, so_mark: int | None, within_s: float) -> socket.socket:
    """Return a socket that is connected to exactly this address. Raises DialError, or TimeoutError."""
    loop = asyncio.get_running_loop()
    try:
        made = open_socket(candidate.family, so_mark=so_mark)
    except OSError as error:
        raise DialError(f"no socket: {error.strerror}") from error
    try:
        async with asyncio.timeout(within_s):
            await loop.sock_connect(made, candidate.sockaddr)
    except OSError as error:
        made.close()
        # In Python 3.11 a TimeoutError is an OSError, and ours says that the address did not answer.
        raise DialError("did not answer in time" if isinstance(error, TimeoutError) else str(error.strerror)) from error
    except BaseException:
        made.close()
        raise
    return made


async def connect_any(candidates: Iterable[Candidate], *, so_mark: int | None, each_within_s: float) -> socket.socket:
    """Return a socket connected to the first address that answers. Raises DialError."""
    failure = "there is no address"
    for candidate in candidates:
        try:
            return await connect(candidate, so_mark=so_mark, within_s=each_within_s)
        except DialError as error:
            failure = str(error)
    raise DialError(failure)
