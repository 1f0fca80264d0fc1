"""Which addresses may be dialled. Asked of every resolved address right before its connect.

Addresses that name this host, its neighbours or a crowd are never dialled, unless somebody
allows exactly such a range: 0.0.0.0/0 allows none of them, 127.0.0.0/8 the loopback. An IPv6 address that
carries an IPv4 one (mapped, NAT64, 6to4) is judged by that one as well, or it would be a way around.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.broker.endpoint import IpAddress

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

SPECIAL_RANGES: tuple[IpNetwork, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # "this network" (RFC 1122): Linux takes 0.0.0.0 for the loopback
            "127.0.0.0/8",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "255.255.255.255/32",
            "::/128",
            "::1/128",
            "fe80::/10",
            "ff00::/8",
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_LOW_32 = 0xFFFF_FFFF


class AddressFilter:
    """Allows what lies in one of the networks; without any network, everything that is not special."""

    def __init__(self, allowed: tuple[IpNetwork, ...] = ()) -> None:
        self._allowed = allowed

    def allows(self, address: IpAddress) -> bool:
        """Return whether this address may be dialled."""
        outer = _unmapped(address)
        if not all(map(self._is_fine, (outer, *_embedded(outer)))):
            return False
        return not self._allowed or any(outer in network for network in self._allowed)

    def _is_fine(self, address: IpAddress) -> bool:
        """Return whether an address is not special, or somebody allowed a part of just that special range."""
        special = next((each for each in SPECIAL_RANGES if address in each), None)
        if special is None:
            return True
        return any(address in network and _is_within(network, special) for network in self._allowed)


def _unmapped(address: IpAddress) -> IpAddress:
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _embedded(address: IpAddress) -> Iterator[ipaddress.IPv4Address]:
    if not isinstance(address, ipaddress.IPv6Address):
        return
    number = int(address)
    # :: and ::1 are special themselves, and carry nothing.
    if address in _NAT64 or (address in _COMPATIBLE and number > 1):
        yield ipaddress.IPv4Address(number & _LOW_32)
    if address in _SIX_TO_FOUR:
        yield ipaddress.IPv4Address(number >> 80 & _LOW_32)


def _is_within(network: IpNetwork, special: IpNetwork) -> bool:
    if isinstance(network, ipaddress.IPv4Network):
        return isinstance(special, ipaddress.IPv4Network) and network.subnet_of(special)
    return isinstance(special, ipaddress.IPv6Network) and network.subnet_of(special)
