"""Places for whoever has shown no token yet: few, for a short time, and apart from those of clients that were let in.

Whoever holds such a place for half a second and is the oldest makes room for a newcomer when there is no other place,
so that connections that say nothing keep nobody out. One source of addresses never has all of them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.router.seldom import SeldomLog

STRANGERS_MAX, STRANGERS_OF_A_SOURCE_MAX = 128, 64
# TLS and a request take a client some round trips.
STRANGER_LEAST_S, STRANGER_WITHIN_S = 0.5, 5.0
_IPV6_SITE_BITS = 64


def source_of(host: str) -> str:
    """Return whose an address is: of IPv6, everybody has a whole network of addresses."""
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ip_network((address, _IPV6_SITE_BITS), strict=False))


@dataclass(slots=True, eq=False)
class Stranger:
    """One of them. `cut` ends its connection at once."""

    source: str
    began_s: float
    cut: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class Strangers:
    """All of them, the oldest first."""

    def __init__(self, seldom: SeldomLog) -> None:
        self._loop, self._seldom = asyncio.get_running_loop(), seldom
        self._there: dict[Stranger, None] = {}
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._there)

    async def make_room(self, source: str) -> bool:
        """Return when there is a place for one more; False when its source has all that it may have."""
        same = [each for each in self._there if each.source == source]
        if len(same) >= STRANGERS_OF_A_SOURCE_MAX:
            self._tell_full("one_source")
            if not self._evict(same[0]):
                return False
        while len(self._there) >= STRANGERS_MAX:
            self._tell_full("all")
            oldest = next(iter(self._there))
            if not self._evict(oldest):
                self._left.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(oldest.began_s + STRANGER_LEAST_S):
                        await self._left.wait()
        return True

    def add(self, source: str, cut: Callable[[], None]) -> Stranger:
        """Somebody came."""
        stranger = Stranger(source, self._loop.time(), cut)
        stranger.timer = self._loop.call_later(STRANGER_WITHIN_S, self._end, stranger)
        self._there[stranger] = None
        return stranger

    def discard(self, stranger: Stranger) -> None:
        """It is gone, or no stranger any more."""
        if stranger.timer is not None:
            stranger.timer.cancel()
        self._there.pop(stranger, None)
        self._left.set()

    def _tell_full(self, of: str) -> None:
        self._seldom.warn("strangers_full", of=of, strangers=len(self._there))

    def _evict(self, stranger: Stranger) -> bool:
        if self._loop.time() - stranger.began_s < STRANGER_LEAST_S:
            return False
        self._end(stranger)
        return True

    def _end(self, stranger: Stranger) -> None:
        self.discard(stranger)
        stranger.cut()
