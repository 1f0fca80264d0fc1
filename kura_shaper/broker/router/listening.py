"""TCP ports that the router listens on, and what becomes of connections when there are no descriptors for them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kura_shaper.broker.router.seldom import SeldomLog
    from kura_shaper.tenants.document import Endpoint

_ACCEPT_PAUSE_S = 0.2
_ONLY_IPV6 = ((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),)


def listen_on(
    key: str, at: Endpoint, *, backlog: int, ipv6_options: Sequence[tuple[int, int, int]] = ()
) -> socket.socket:
    """Listen. `key` is what the settings call it. Raises UsageError when the address can't be had."""
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    try:
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _not_had(key, at, error) from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in ipv6_options if family == socket.AF_INET6 else ():
            made.setsockopt(*option)
        made.bind((at.host, at.port))
        made.listen(backlog)
    except OSError as error:
        made.close()
        raise _not_had(key, at, error) from error
    return made


def _not_had(key: str, at: Endpoint, error: OSError) -> UsageError:
    return UsageError(f"{key} {at}: {error.strerror}", remedy="choose another address or port")


async def accept_each(
    listener: socket.socket, take: Callable[[socket.socket, tuple[Any, ...]], Awaitable[None]], *, seldom: SeldomLog
) -> None:
    """Take connections, each with the address that it came from, until this is cancelled.

    Without descriptors nothing is taken for a moment, and whoever wants in waits in the kernel; `seldom` says so.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, address = await loop.sock_accept(listener)
        except ConnectionError:
            # It was there, and is gone already.
            continue
        except OSError as error:
            seldom.warn("accept_failed", reason=error.strerror)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        await take(accepted, address)


class Listening:
    """A port for other programs: does not listen before `start`, nor after `stop`."""

    def __init__(self, key: str, at: Endpoint, *, seldom: SeldomLog) -> None:
        self._key, self._at, self._seldom = key, at, seldom
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    async def start(self, accept: Callable[[], asyncio.Protocol], *, backlog: int) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        loop = asyncio.get_running_loop()

        async def take(accepted: socket.socket, _: tuple[Any, ...]) -> None:
            with suppress(OSError):
                await loop.connect_accepted_socket(accept, accepted)

        self._listener = listen_on(self._key, self._at, backlog=backlog, ipv6_options=_ONLY_IPV6)
        self._accepting = loop.create_task(accept_each(self._listener, take, seldom=self._seldom))

    def stop(self) -> None:
        """Take no further connections."""
        if self._listener is None or self._accepting is None:
            return
        # Before it is closed: somebody else may have its descriptor then.
        self._accepting.get_loop().remove_reader(self._listener)
        self._accepting.cancel()
        self._listener.close()
        self._listener = None
