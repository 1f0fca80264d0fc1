"""What one value of a document may be: values that know their place, and checks of texts.

A value keeps its file, line and key path, so that every refusal can say where. The
checks of texts (`hostname`, `network`, ...) know no place: they raise UsageError, and
reading a value through one (`text`, `literal`) adds the place.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.marks import TENANT_CLASS_MAX, TENANT_CLASS_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kura_shaper.tenants.marks import MarkLayout

T = TypeVar("T")

_SHOWN_CHARACTERS = 64
_INTEGER = re.compile(r"0x[0-9a-fA-F]{1,8}|0|[1-9][0-9]{0,9}", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?", re.ASCII)
_HOSTNAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
# Resolvers and browsers read a name whose last label is a number as an IPv4 address.
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
_NETWORK = re.compile(r"[0-9a-fA-F.:]{2,45}(?:/[0-9]{1,3})?", re.ASCII)
# What gRPC service names are made of. A map file of the gateway splits at blanks and starts comments at `#`, its
# configuration expands `%`, quotes and backslashes; and `/` alone would make every request gRPC.
_PATH_PREFIX = re.compile(r"/[A-Za-z0-9_.-][A-Za-z0-9_./-]{0,253}", re.ASCII)


def quoted(content: str) -> str:
    """Return a text from a document as one short line that is safe to print."""
    short = content if len(content) <= _SHOWN_CHARACTERS else content[:_SHOWN_CHARACTERS] + "…"
    return repr(short)


class Reading(Enum):
    """What YAML 1.1 takes a scalar for."""

    TEXT = "text"
    NUMBER = "a number"
    BOOLEAN = "a boolean"
    DATE = "a date"
    NOTHING = "no value"
    SPECIAL = "a special value"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a document and its place: file, line from 1, key path such as `tenants[1].floor`."""

    shape: ClassVar[str] = "a value"
    file: str
    line: int
    path: str

    def refused(self, message: str, *, remedy: str) -> DocumentError:
        """Return the error that says what is wrong with this value, where it stands and what to do."""
        return DocumentError(message, file=self.file, line=self.line, path=self.path, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Scalar(Value):
    """A text, exactly as written."""

    shape: ClassVar[str] = "a single value"
    content: str
    reading: Reading


@dataclass(frozen=True, slots=True)
class Sequence(Value):
    """A list of values."""

    shape: ClassVar[str] = "a list"
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Mapping(Value):
    """Values under keys. Each value's line is the line of its key."""

    shape: ClassVar[str] = "a mapping"
    entries: dict[str, Value]


V = TypeVar("V", bound=Value)


def _shaped(value: Value, kind: type[V]) -> V:
    if isinstance(value, kind):
        return value
    if isinstance(value, Scalar) and value.reading is Reading.NOTHING:
        raise value.refused("has no value", remedy=f"give it {kind.shape}, or remove the key")
    raise value.refused(f"is {value.shape}, not {kind.shape}", remedy=f"write it as {kind.shape}")


def mapping(value: Value, *, required: Iterable[str] = (), optional: Iterable[str] = ()) -> dict[str, Value]:
    """Return the entries of a mapping. Raises DocumentError when a key is missing or unknown."""
    found = _shaped(value, Mapping)
    known = (*required, *optional)
    for key, entry in found.entries.items():
        if key not in known:
            close = difflib.get_close_matches(key[:_SHOWN_CHARACTERS].lower(), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known keys here: {', '.join(known)}"
            raise entry.refused(f"unknown key {quoted(key)}", remedy=remedy)
    for key in required:
        if key not in found.entries:
            raise found.refused(f"key {key} is missing", remedy=f"add {key}:")
    return found.entries


def sequence(value: Value) -> tuple[Value, ...]:
    """Return the items of a list. Raises DocumentError when the value is none."""
    return _shaped(value, Sequence).items


def literal(value: Value, check: Callable[[str], T]) -> T:
    """Return what a check makes of the exact text of a scalar, quoted or not.

    Raises DocumentError when there is no text or the check refuses it.
    """
    scalar = _shaped(value, Scalar)
    if scalar.reading is Reading.NOTHING:
        raise scalar.refused("has no value", remedy="give it one, or remove the key")
    try:
        return check(scalar.content)
    except UsageError as error:
        raise scalar.refused(error.message, remedy=error.remedy) from error


def text(value: Value, check: Callable[[str], T]) -> T:
    """Return what a check makes of a scalar that every reader of YAML takes for a text.

    Raises DocumentError as `literal` does, and for `no`, `1.2` and the like without quotes.
    """
    scalar = _shaped(value, Scalar)
    if scalar.reading not in (Reading.TEXT, Reading.NOTHING):
        shown = quoted(scalar.content)
        raise scalar.refused(f"{shown} without quotes is {scalar.reading.value}", remedy=f"quote it: {shown}")
    return literal(scalar, check)


@dataclass(frozen=True, slots=True)
class Claims:
    """Who holds what must be unique, and where that stands: one record for each kind of thing."""

    what: str
    holders: dict[str, tuple[str, int]] = field(default_factory=dict)

    def claim(self, key: str, value: Value, *, owner: str) -> None:
        """Record the owner of a key. Raises DocumentError that names an earlier owner and its line."""
        claimed = (owner, value.line)
        holder = self.holders.setdefault(key, claimed)
        if holder is not claimed:
            raise value.refused(
                f"{self.what} {key} belongs to {holder[0]} already (line {holder[1]})",
                remedy=f"no {self.what} may stand twice: change or remove one",
            )


def distinct(
    value: Value | None,
    check: Callable[[str], T],
    *,
    claims: Claims,
    read: Callable[[Value, Callable[[str], T]], T] = text,
    owner: str = "",
    otherwise: tuple[T, ...] = (),
) -> tuple[T, ...]:
    """Return the items of a list, each claimed for the owner (without one: for its own place in the document).

    Where there is no list, the answer is `otherwise`. Raises DocumentError when an item is
    refused or somebody holds it already.
    """
    if value is None:
        return otherwise
    found = []
    for item in sequence(value):
        key = read(item, check)
        claims.claim(str(key), item, owner=owner or item.path)
        found.append(key)
    return tuple(found)


def integer(content: str) -> int:
    """Return a whole number in decimal or 0x notation.

    Octal, underscores and base 60 are refused: YAML 1.1 and 1.2 read them as different numbers.
    """
    if not _INTEGER.fullmatch(content):
        raise UsageError(f"{quoted(content)} is no whole number", remedy="write it in decimal or as 0x and hex digits")
    return int(content, 0)


def port(content: str) -> int:
    """Return a TCP port, 1 to 65535."""
    number = integer(content)
    if not 1 <= number <= 65_535:
        raise UsageError(f"port {number} is out of range", remedy="use 1 to 65535")
    return number


def tenant_class(content: str, *, marks: MarkLayout) -> int:
    """Return the class id of a tenant, which marks of that layout can carry."""
    class_id = integer(content)
    if not TENANT_CLASS_MIN <= class_id <= TENANT_CLASS_MAX:
        remedy = f"a tenant's class is {TENANT_CLASS_MIN:#x} to {TENANT_CLASS_MAX:#x}"
        raise UsageError(f"class {class_id:#x} is out of range", remedy=remedy)
    if class_id > marks.class_id_max:
        remedy = f"use at most {marks.class_id_max:#x}, or a wider mask"
        raise UsageError(f"class {class_id:#x} does not fit mask {marks.mask:#010x}", remedy=remedy)
    return class_id


def label(content: str, *, characters_max: int) -> str:
    """Return a DNS-1123 label of at most so many characters."""
    if not _LABEL.fullmatch(content) or len(content) > characters_max:
        remedy = f"use at most {characters_max} of a-z, 0-9 and -, first and last a letter or digit"
        raise UsageError(f"{quoted(content)} is no DNS-1123 label", remedy=remedy)
    return content


def _require_ascii(name: str) -> None:
    if name.isascii():
        return
    remedy = "write its A-label (xn--...)"
    try:
        encoded = name.encode("idna").decode("ascii")
        # The codec is IDNA 2003, which maps some letters away (`straße`): only a name that comes
        # back unchanged is the same name for everybody, so no other is offered.
        if _HOSTNAME.fullmatch(encoded) and encoded.encode("ascii").decode("idna") == name.lower():
            remedy = f"write it as {encoded}"
    except UnicodeError:
        pass
    raise UsageError(f"hostname {quoted(name)} is not ASCII", remedy=remedy)


def dns_name(content: str) -> str:
    """Return a DNS name in lower case without the root's dot; an IP literal is none."""
    if len(content) > 254:
        raise UsageError(f"hostname {quoted(content)} is too long", remedy="use at most 253 characters")
    _require_ascii(content)
    name = content.lower().removesuffix(".")
    if _ENDS_IN_A_NUMBER.fullmatch(name):
        raise UsageError(f"{quoted(content)} is an address, not a hostname", remedy="use a DNS name")
    if not _HOSTNAME.fullmatch(name) or len(name) > 253:
        remedy = "write dot-separated labels of a-z, 0-9 and -, each at most 63 long, without scheme, port or path"
        raise UsageError(f"{quoted(content)} is no hostname", remedy=remedy)
    return name


def hostname(content: str) -> str:
    """Return a hostname that the gateway can map to a tenant: exact, lower case, two labels or more."""
    if "*" in content:
        remedy = "list every name: the gateway maps exact names"
        raise UsageError(f"{quoted(content)} is a wildcard", remedy=remedy)
    name = dns_name(content)
    if "." not in name:
        raise UsageError(f"hostname {quoted(content)} has one label", remedy="write the full name, e.g. acme.example")
    return name


def network(content: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Return a network in CIDR notation; a single address is a network of one."""
    try:
        # Other texts that ipaddress takes, such as netmasks and zones, are refused as the empty one is.
        found = ipaddress.ip_network(content if _NETWORK.fullmatch(content) else "", strict=False)
    except ValueError:
        remedy = "write CIDR notation, e.g. 10.0.0.0/8 or 2001:db8::/32"
        raise UsageError(f"{quoted(content)} is no network", remedy=remedy) from None
    if found.network_address != ipaddress.ip_address(content.partition("/")[0]):
        raise UsageError(f"{quoted(content)} has bits set right of its prefix", remedy=f"write {found}")
    return found


def path_prefix(content: str) -> str:
    """Return the beginning of a gRPC path, safe in the gateway's map files."""
    if not _PATH_PREFIX.fullmatch(content):
        remedy = "start with /, then the service's package, e.g. /google.bytestream., at most 255 characters"
        raise UsageError(f"{quoted(content)} is no path prefix", remedy=remedy)
    return content


def _split_port(content: str, *, example: str) -> tuple[str, int]:
    host, colon, digits = content.rpartition(":")
    if not colon or not _PORT.fullmatch(digits):
        raise UsageError(f"{quoted(content)} has no port", remedy=f"write it as {example}")
    return host, port(digits)


def address_endpoint(content: str) -> Endpoint:
    """Return the endpoint of `ip:port` or `[v6]:port`, where a server is reached."""
    found, number = _address_and_port(content, example="10.0.0.5:4000 or [2001:db8::5]:4000; for a name use dns")
    if found.is_unspecified or found.is_multicast:
        raise UsageError(f"{quoted(content)} is no address of a server", remedy="write the server's own address")
    return Endpoint(host=str(found), port=number)


def listen_endpoint(content: str) -> Endpoint:
    """Return the endpoint of `ip:port` or `[v6]:port`, where something listens; 0.0.0.0 and :: are all addresses."""
    found, number = _address_and_port(content, example="127.0.0.1:8405 or [::1]:8405")
    if found.is_multicast:
        raise UsageError(f"{quoted(content)} is no address to listen at", remedy="write an address of this machine")
    return Endpoint(host=str(found), port=number)


def _address_and_port(content: str, *, example: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, number = _split_port(content, example=example)
    try:
        if host.startswith("[") and host.endswith("]") and "%" not in host:
            return ipaddress.IPv6Address(host[1:-1]), number
        return ipaddress.IPv4Address(host), number
    except ValueError:
        raise UsageError(f"{quoted(content)} is no IP address and port", remedy=f"write it as {example}") from None


def dns_endpoint(content: str) -> Endpoint:
    """Return the endpoint of `name:port`, resolved by the gateway."""
    host, number = _split_port(content, example="cache.tenant.example:4000")
    return Endpoint(host=dns_name(host), port=number, is_dns_name=True)
