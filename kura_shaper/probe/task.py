"""What to measure, from texts: a document of targets, and over it the options of the command line.

```yaml
apiVersion: kura-shaper/v1
kind: Targets
defaults: {protocol: http2, streams: 4, duration_s: 3}    # any key of a target but name, tenant and url
targets:
  - tenant: acme
    url: https://acme-us-east-1.kura.example
    small: /up                   # asked for once: times
    large: /object/1000000000    # read by all streams: the rate
    min_rate: 100M
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from kura_shaper.errors import UsageError
from kura_shaper.probe.target import Family, Load, Protocol, Security, Target
from kura_shaper.tenants import check, rules
from kura_shaper.tenants.check import Claims, Value
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.file import read_document
from kura_shaper.units import Rate, parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KIND: Final = "Targets"
TARGETS_MAX: Final = 256
GRPC_READ_PATH: Final = "/google.bytestream.ByteStream/Read"
# More than any object has: the stream reads until the time is over.
ENDLESS_BYTES: Final = 2**62
_NS = 1_000_000_000
_STREAMS_MAX = 256
_WORD_CHARACTERS_MAX = 200
_PATH = re.compile(r"/[\x21-\x7e]{0,4095}", re.ASCII)
_SCHEMES = {"https": (Security.TLS, 443), "http": (Security.PLAIN, 80)}
_OWN_KEYS = ("name", "tenant", "url")
_AS_THEY_ARE = ("resource", "sni", "connect_to", "family", "min_rate", "ca_file", "token_file", "header_file")


@dataclass(frozen=True, slots=True)
class Task:
    """A target and how much of it is asked for."""

    target: Target
    load: Load

    @property
    def longest_ns(self) -> int:
        """No measurement of it takes longer: the name, then twice a connection, TLS, the first byte and a rest."""
        return 9 * self.load.timeout_ns + self.load.duration_ns


class Url(NamedTuple):
    """The parts of a URL. The path is with its query, and "" where there is none."""

    host: str
    port: int
    security: Security
    path: str


def load_tasks(path: Path, overrides: Mapping[str, str]) -> tuple[Task, ...]:
    """Return what a document names, with the values of the command line over it (texts by key).

    Raises DocumentError, or UsageError that names the option.
    """
    root = read_document(path)
    rules.require_kind(root, KIND)
    entries = check.mapping(root, required=("apiVersion", "kind", "targets"), optional=("defaults",))
    common = _read(entries["defaults"], keys=_common_keys()) if "defaults" in entries else {}
    over = _options(overrides)
    names, tasks = Claims("target"), []
    for item in check.sequence(entries["targets"]):
        own = check.mapping(item, required=("url",), optional=tuple(READERS))
        told = common | _read(item, keys=tuple(READERS)) | over
        try:
            task = _task(told)
        except UsageError as error:
            raise item.refused(error.message, remedy=error.remedy) from error
        names.claim(task.target.name, own.get("name", item), owner=item.path)
        tasks.append(task)
    if not 0 < len(tasks) <= TARGETS_MAX:
        raise entries["targets"].refused(f"has {len(tasks)} targets", remedy=f"name 1 to {TARGETS_MAX}")
    return tuple(tasks)


def tasks_of_urls(urls: Sequence[str], overrides: Mapping[str, str]) -> tuple[Task, ...]:
    """Return what URLs of the command line name, with its other values (texts by key). Raises UsageError."""
    tasks = []
    for url in urls:
        try:
            tasks.append(_task(_options({**overrides, "url": url})))
        except UsageError as error:
            words = (
                error.message
                if error.message.startswith("--")
                else f"--url {check.quoted(url.partition('?')[0])}: {error.message}"
            )
            raise UsageError(words, remedy=error.remedy) from error
    names = [task.target.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--url names {twice} twice", remedy="once is enough; or name them in a document (--targets)")
    if len(tasks) > TARGETS_MAX:
        raise UsageError(f"--url stands there {len(tasks)} times", remedy=f"at most {TARGETS_MAX} times")
    return tuple(tasks)


def _common_keys() -> tuple[str, ...]:
    return tuple(key for key in READERS if key not in _OWN_KEYS)


def _read(value: Value, *, keys: tuple[str, ...]) -> dict[str, Any]:
    entries = check.mapping(value, optional=keys)
    return {key: check.literal(entry, READERS[key]) for key, entry in entries.items()}


def _options(texts: Mapping[str, str]) -> dict[str, Any]:
    made = {}
    for key, text in texts.items():
        try:
            made[key] = READERS[key](text)
        except UsageError as error:
            option = key.removesuffix("_s").replace("_", "-")
            raise UsageError(f"--{option}: {error.message}", remedy=error.remedy) from error
    return made


def _task(told: dict[str, Any]) -> Task:
    url: Url = told["url"]
    protocol = told.get("protocol", Protocol.AUTO)
    small, large = _paths(told, url, protocol)
    if url.security is Security.PLAIN and protocol is Protocol.TCP:
        raise UsageError("tcp without TLS asks nothing", remedy="use https")
    target = Target(
        name=told.get("name", ""),
        host=url.host,
        port=url.port,
        security=url.security,
        protocol=protocol,
        tenant=told.get("tenant", url.host),
        small=small,
        large=large,
        expected_status=told.get("expect_status"),
        **{key: told[key] for key in _AS_THEY_ARE if key in told},
    )
    if not target.name:
        path = (large or small).partition("?")[0]
        target = replace(target, name=f"{target.authority}{path}"[:_WORD_CHARACTERS_MAX])
    _require_sense(target)
    load = _load(told)
    return Task(target, load)


def _paths(told: Mapping[str, Any], url: Url, protocol: Protocol) -> tuple[str, str]:
    """Return the small and the large path. A URL's own path is the large one."""
    small, large = told.get("small", ""), told.get("large", "")
    if protocol is Protocol.TCP:
        if small or large:
            raise UsageError("tcp asks for no path", remedy="remove small and large, or choose another protocol")
        return "", ""
    own = "" if url.path == "/" else url.path
    if own and large:
        raise UsageError("the URL has a path, and large is another", remedy="leave the path out of the URL")
    large = large or own
    if not small and not large:
        return ("", GRPC_READ_PATH) if protocol is Protocol.GRPC else ("/", "")
    return small, large


def _require_sense(target: Target) -> None:
    if target.resource and target.protocol is not Protocol.GRPC:
        raise UsageError("only gRPC names a resource", remedy="protocol: grpc")
    if target.min_rate and not target.large:
        raise UsageError("a least rate needs something large to read", remedy="give the URL a path, or large")
    if target.security is Security.PLAIN and (target.token_file or target.header_file):
        raise UsageError("a token or a header from a file goes over TLS alone", remedy="use https")


def _load(told: Mapping[str, Any]) -> Load:
    given = {key: told[key] for key in ("streams", "connections") if key in told}
    for key in ("duration_s", "timeout_s"):
        if key in told:
            given[f"{key.removesuffix('_s')}_ns"] = told[key]
    # Who says how long wants it to last so long.
    size_bytes = told.get("size", ENDLESS_BYTES if "duration_s" in told else None)
    return Load(**given, size_bytes=size_bytes)


# What one text may be.


def parse_url(text: str) -> Url:
    """Return the parts of a URL of scheme https or http. Raises UsageError."""
    example = "e.g. https://acme.example/object/1000000"
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"{check.quoted(text)} is no URL", remedy=example)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise UsageError(f"{check.quoted(text)} is no URL", remedy=example) from None
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.fragment or port == 0:
        raise UsageError(f"{check.quoted(text)} is no URL of https or http", remedy=example)
    if "@" in parts.netloc:
        # Not shown: what stands before the @ may be a password.
        raise UsageError("a URL takes no user or password", remedy="--token-file or --header-file has them")
    security, usual = _SCHEMES[parts.scheme]
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return Url(_host(parts.hostname), port or usual, security, _path(path) if path else "")


def _host(text: str) -> str:
    """Return an IP address as everybody writes it, or a DNS name."""
    return str(ip_address(text)) if _is_address(text) else check.dns_name(text)


def _endpoint(text: str) -> Endpoint:
    host, colon, digits = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host) != is_bracketed:
        raise UsageError(f"{check.quoted(text)} is no HOST:PORT", remedy="e.g. 192.0.2.10:443 or [::1]:443")
    found = _host(host[1:-1] if is_bracketed else host)
    return Endpoint(found, check.port(digits), is_dns_name=not _is_address(found))


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host)) and "%" not in host
    except ValueError:
        return False


def _path(text: str) -> str:
    if not _PATH.fullmatch(text):
        raise UsageError(f"{check.quoted(text)} is no path", remedy="start with /, in ASCII, blanks as %20")
    return text


def _word(text: str) -> str:
    if not text or not text.isprintable() or len(text) > _WORD_CHARACTERS_MAX:
        raise UsageError(f"{check.quoted(text)} is no name", remedy=f"1 to {_WORD_CHARACTERS_MAX} printable characters")
    return text


def _file(text: str) -> Path:
    return Path(_word(text))


def _protocol(text: str) -> Protocol:
    if text not in list(Protocol):
        raise UsageError(f"{check.quoted(text)} is no protocol", remedy=f"use {', '.join(Protocol)}")
    return Protocol(text)


def _family(text: str) -> Family:
    found = {"any": Family.ANY, "4": Family.IPV4, "6": Family.IPV6}.get(text)
    if found is None:
        raise UsageError(f"{check.quoted(text)} is no family of addresses", remedy="use 4, 6 or any")
    return found


def _number(text: str, *, least: int, most: int) -> int:
    number = check.integer(text)
    if not least <= number <= most:
        raise UsageError(f"{number} is out of range", remedy=f"use {least} to {most}")
    return number


def _rate(text: str) -> Rate:
    rate = Rate.parse(text)
    if not rate.bits_per_second:
        raise UsageError("a least rate of 0 is none", remedy="leave it out")
    return rate


def _size(text: str) -> int:
    size = parse_quantity(text)
    if size < 1 or size.denominator != 1 or size > ENDLESS_BYTES:
        raise UsageError(f"{check.quoted(text)} is no number of bytes", remedy="e.g. 100M or 64Mi")
    return size.numerator


def duration_ns(text: str, *, least_s: Fraction, most_s: int) -> int:
    """Return a time in seconds, such as `1.5`, in nanoseconds. Raises UsageError outside the bounds."""
    seconds = parse_quantity(text.removesuffix("s"))
    if not least_s <= seconds <= most_s:
        raise UsageError(f"{check.quoted(text)} is out of range", remedy=f"use {float(least_s):g} to {most_s} seconds")
    return int(seconds * _NS)


READERS: Final[dict[str, Callable[[str], Any]]] = {
    "name": _word,
    "tenant": _word,
    "url": parse_url,
    "protocol": _protocol,
    "small": _path,
    "large": _path,
    "expect_status": partial(_number, least=0, most=599),
    "resource": _word,
    "sni": check.dns_name,
    "connect_to": _endpoint,
    "family": _family,
    "min_rate": _rate,
    "ca_file": _file,
    "token_file": _file,
    "header_file": _file,
    "streams": partial(_number, least=1, most=_STREAMS_MAX),
    "connections": partial(_number, least=1, most=_STREAMS_MAX),
    "size": _size,
    "duration_s": partial(duration_ns, least_s=Fraction(1, 10), most_s=300),
    "timeout_s": partial(duration_ns, least_s=Fraction(1, 10), most_s=60),
}
