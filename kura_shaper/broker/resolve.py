"""Names to addresses, without a wait that anybody else would feel.

getaddrinfo can't be cancelled: a name server that does not answer holds its thread for as long
as the resolver's configuration says. So each lookup has a thread of its own, which is left behind
when its time is over; there are only so many, and who finds none free waits within its own time. The
threads are daemons, so that none of them holds up the end of the program.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.endpoint import IpAddress, PublisherAddress

LOOKUPS_MAX = 64
_ADDRESSES_MAX = 16


class ResolveError(Exception):
    """A name has no address, or nobody could say."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One address to dial: what is checked is what is dialled."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    ip: IpAddress


def literal(ip: IpAddress, port: int) -> Candidate:
    """Return the one candidate of an address that needs no resolver."""
    if ip.version == 4:
        return Candidate(socket.AF_INET, (str(ip), port), ip)
    return Candidate(socket.AF_INET6, (str(ip), port, 0, 0), ip)


class Resolver:
    """Asks the system's resolver; `lookup` is getaddrinfo or what stands for it in a test."""

    def __init__(self, lookup: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._places = asyncio.Semaphore(LOOKUPS_MAX)

    async def resolve(self, address: PublisherAddress) -> tuple[Candidate, ...]:
        """Return the addresses of a publisher in the order to try them. Raises ResolveError."""
        if address.ip is not None:
            return (literal(address.ip, address.port),)
        return await self.resolve_name(address.host, address.port)

    async def resolve_name(self, host: str, port: int) -> tuple[Candidate, ...]:
        """Return the addresses of a name, at most 16. Raises ResolveError."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        def ask() -> None:
            try:
                found: list[Any] | Exception = self._lookup(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                found = error
            with suppress(RuntimeError):  # the loop is gone, and nobody waits
                loop.call_soon_threadsafe(self._told, answer, found)

        threading.Thread(target=ask, name="resolve", daemon=True).start()
        candidates = _candidates(await answer)
        if not candidates:
            raise ResolveError("the name has no address")
        return candidates

    def _told(self, answer: asyncio.Future[list[Any]], found: list[Any] | Exception) -> None:
        self._places.release()
        if answer.done():  # its time was over
            return
        if isinstance(found, Exception):
            answer.set_exception(ResolveError("the name could not be resolved"))
        else:
            answer.set_result(found)


def _candidates(found: list[Any]) -> tuple[Candidate, ...]:
    made: dict[Any, Candidate] = {}
    for family, _, _, _, sockaddr in found:
        if family in (socket.AF_INET, socket.AF_INET6):
            # A link-local address may come with its zone, which the address alone decides about.
            ip = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
            made[sockaddr] = Candidate(family, sockaddr, ip)
    return tuple(made.values())[:_ADDRESSES_MAX]
