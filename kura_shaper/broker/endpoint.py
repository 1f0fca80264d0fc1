"""The address of a publisher as metadata and routers write it: `tcp://10.244.1.7:41235`.

There is one way to write each address, the canonical one, and two texts name the same
publisher when their canonical ones are equal. What a resolver reads as an address although it
does not look like one (`2130706433`, `127.1`, `0x7f.1`, `010.0.0.1`) is no endpoint at all.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass

from kura_shaper.errors import UsageError

ENDPOINT_BYTES_MAX = 256
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_SCHEME = "tcp://"
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[1-9][0-9]{0,4})", re.ASCII)
_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
_NAME_CHARACTERS_MAX = 253
_HOSTS_KEPT = 1_024


class EndpointError(UsageError):
    """A text that is no endpoint. The message does not repeat it."""

    code = "endpoint"


@dataclass(frozen=True, slots=True)
class PublisherAddress:
    """A host and a port. `ip` is None for a name, which has to be resolved."""

    host: str
    port: int
    ip: IpAddress | None

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.ip is not None and self.ip.version == 6 else self.host
        return f"{_SCHEME}{host}:{self.port}"


def parse_endpoint(text: str) -> PublisherAddress:
    """Return the address that a text names. Raises EndpointError."""
    if len(text) > ENDPOINT_BYTES_MAX or not text.isascii():
        raise EndpointError(f"is longer than {ENDPOINT_BYTES_MAX} bytes or not ASCII")
    if not text.startswith(_SCHEME):
        raise EndpointError(f"does not begin with {_SCHEME}")
    match = _ADDRESS.fullmatch(text, len(_SCHEME))
    if match is None or int(match["port"]) > 65_535:
        raise EndpointError("is not a host and a port from 1 to 65535")
    host, ip = _host(match["v6"] or match["host"])
    if match["v6"] is not None and (ip is None or ip.version != 6):
        raise EndpointError("has no IPv6 address between the brackets")
    return PublisherAddress(host if ip else _name(host), int(match["port"]), ip)


# A worker has several publishers at one address, and reading and writing that is most of the work of a list.
@functools.lru_cache(_HOSTS_KEPT)
def _host(text: str) -> tuple[str, IpAddress | None]:
    """Return an address as it is written canonically, or what is none as it is."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return text, None
    return str(ip), ip


def _name(host: str) -> str:
    name = host.lower().removesuffix(".")
    if len(name) > _NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise EndpointError("has no host name or address")
    if _ENDS_IN_A_NUMBER.fullmatch(name):
        raise EndpointError("has a host that is read as an address but not written as one")
    return name
