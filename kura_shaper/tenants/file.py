"""Loads the tenants document from YAML text: all of it checked, or an error that says where.

The text is read as a stream of YAML events, never as Python objects: aliases, anchors,
tags and deep nesting are refused when they appear, before they can cost anything, and
every value keeps its line. What one value may be is told in `tenants.check`, what holds
of a whole document in `tenants.rules`; here stands what the document may say. An overlay
(`tenants.overlay`) is read the same way.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import yaml

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.tenants import check, rules
from kura_shaper.tenants.check import Claims, Mapping, Reading, Scalar, Sequence, Value
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.marks import MarkLayout, known_mark_user, require_free_bits
from kura_shaper.tenants.overlay import overlaid
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

KIND = "Tenants"
SIZE_BYTES_MAX = 16 * 1024 * 1024
DEPTH_MAX = 20
# Thirty for each of as many tenants as there are class ids; more is no document, and reading it costs seconds.
VALUES_MAX = 2_000_000
GRPC_PREFIXES_MAX = 64
TENANT_NAME_CHARACTERS_MAX = 50
REGION_CHARACTERS_MAX = 63
# Below this a TLS handshake takes seconds, so a smaller ceiling is a slip of the unit, not a promise.
CEILING_MIN = Rate(64_000)

_WRITE_TENANTS = f"start with apiVersion: {rules.API_VERSION}"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_READINGS = {
    "tag:yaml.org,2002:str": Reading.TEXT,
    "tag:yaml.org,2002:int": Reading.NUMBER,
    "tag:yaml.org,2002:float": Reading.NUMBER,
    "tag:yaml.org,2002:bool": Reading.BOOLEAN,
    "tag:yaml.org,2002:timestamp": Reading.DATE,
    "tag:yaml.org,2002:null": Reading.NOTHING,
}
_NOT_IN_YAML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}", re.ASCII)


def load_tenants(path: Path, *, overlay: Path | None = None) -> TenantsDocument:
    """Return the checked tenants document in a file, as an overlay changes it. Raises DocumentError."""
    return parse_tenants(_text(path), file=str(path), overlay=overlay)


def parse_tenants(text: str, *, file: str, overlay: Path | None = None) -> TenantsDocument:
    """Return the checked tenants document in a text, as an overlay changes it; `file` only names the text.

    Raises DocumentError, which names the file of the two that is to blame.
    """
    document = _document(_root(text, file=file))
    return document if overlay is None else overlaid(document, _root(_text(overlay), file=str(overlay)))


def read_document(path: Path, *, remedy: str = _WRITE_TENANTS) -> Value:
    """Return the one value of a YAML file of any kind, each part with its place. Raises DocumentError.

    `remedy` is what is advised for a file that is empty.
    """
    return _root(_text(path), file=str(path), remedy=remedy)


def _text(path: Path) -> str:
    """Return the text in a file. Raises DocumentError."""
    file = _one_line(str(path))
    try:
        with path.open("rb") as stream:
            data = stream.read(SIZE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:  # ValueError: no file can have such a path
        reason = getattr(error, "strerror", None) or "there can be no such path"
        remedy = "check the path and its permissions"
        raise DocumentError(f"could not be read: {reason}", file=file, remedy=remedy) from error
    _require_size(len(data), file=file)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DocumentError("is not UTF-8", file=file, line=line, remedy="save the file as UTF-8") from error


def _root(text: str, *, file: str, remedy: str = _WRITE_TENANTS) -> Value:
    """Return the one value that a text consists of. Raises DocumentError."""
    file = _one_line(file)
    content = text.removeprefix("\ufeff")
    _require_size(len(content), file=file)
    if stray := _NOT_IN_YAML.search(content):
        line = content.count("\n", 0, stray.start()) + 1
        message = f"contains the character {stray.group()!a}"
        raise DocumentError(message, file=file, line=line, remedy="remove it: YAML has no place for it")
    return _compose(content, file=file, remedy=remedy)


def _require_size(size: int, *, file: str) -> None:
    if size > SIZE_BYTES_MAX:
        limit = f"{SIZE_BYTES_MAX // 1024 // 1024} MiB"
        raise DocumentError(f"is larger than {limit}", file=file, remedy=f"keep it to {limit}")


def _one_line(content: str) -> str:
    """Return a text of somebody else's making without what could break a line or a terminal."""
    return content if content.isprintable() else repr(content)[1:-1]


# YAML events to values.


def _events(content: str, *, file: str) -> Generator[yaml.Event, None, None]:
    try:
        for number, event in enumerate(yaml.parse(content, Loader=_LOADER)):
            if number > VALUES_MAX:
                line = _line(event)
                raise DocumentError(
                    f"has more than {VALUES_MAX} values", file=file, line=line, remedy="one document for each region"
                )
            yield event
    # The two others are what PyYAML's own parser lets through for an escape such as "\UFFFFFFFF".
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = _one_line(str(getattr(error, "problem", None) or "it can't be read"))
        raise DocumentError(
            f"is not YAML: {problem[:200]}",
            file=file,
            line=min(mark.line, content.count("\n")) + 1 if mark else 0,
            remedy="check indentation, quotes and brackets up to there",
        ) from error


def _compose(content: str, *, file: str, remedy: str) -> Value:
    """Return the one value that a YAML text consists of. Raises DocumentError."""
    with closing(_events(content, file=file)) as events:
        composer = _Composer(file=file, events=events)
        root: Value | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    composer.refuse(event, "", message="a second document starts here", remedy="keep one for each file")
                root = composer.value(next(events), path="", depth=1)
    if root is None or (isinstance(root, Scalar) and root.reading is Reading.NOTHING):
        raise DocumentError("is empty", file=file, remedy=remedy)
    return root


def _line(event: yaml.Event) -> int:
    # Every event that a parser makes has a mark; only hand-made ones may lack it.
    return event.start_mark.line + 1 if event.start_mark else 0


@dataclass(frozen=True, slots=True)
class _Composer:
    """Builds values from one stream of YAML events, and refuses what a document has no use for."""

    file: str
    events: Iterator[yaml.Event]
    resolve: Callable[..., str] = field(default_factory=lambda: yaml.resolver.Resolver().resolve)

    def refuse(self, event: yaml.Event, path: str, *, message: str, remedy: str) -> NoReturn:
        raise DocumentError(message, file=self.file, line=_line(event), path=path, remedy=remedy)

    def value(self, event: yaml.Event, *, path: str, depth: int, line: int = 0) -> Value:
        line = line or _line(event)
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor is not None):
            self.refuse(event, path, message="uses an anchor or alias of YAML", remedy="write the value out")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            self.refuse(event, path, message="uses a tag of YAML", remedy="remove the word that starts with !")
        if depth > DEPTH_MAX:
            self.refuse(event, path, message=f"is nested deeper than {DEPTH_MAX} levels", remedy="write it flat")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(self.file, line, path, event.value, self._reading(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(self.file, line, path, self._items(path, depth))
        return Mapping(self.file, line, path, self._entries(path, depth))

    def _reading(self, event: yaml.ScalarEvent) -> Reading:
        if not event.implicit[0]:  # only a plain scalar may be anything but a text
            return Reading.TEXT
        return _READINGS.get(self.resolve(yaml.ScalarNode, event.value, (True, False)), Reading.SPECIAL)

    def _items(self, path: str, depth: int) -> tuple[Value, ...]:
        found: list[Value] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            found.append(self.value(event, path=f"{path}[{len(found)}]", depth=depth + 1))
        return tuple(found)

    def _entries(self, path: str, depth: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.value(event, path=path, depth=depth + 1)
            if not isinstance(key, Scalar):
                raise key.refused("a key is no single word", remedy="write a plain word before the colon")
            if key.reading is Reading.SPECIAL and key.content == "<<":
                raise key.refused("uses a merge key of YAML", remedy="write the keys out")
            if key.content in found:
                raise key.refused(
                    f"key {check.quoted(key.content)} stands twice, first in line {found[key.content].line}",
                    remedy="remove one",
                )
            name = key.content if _PLAIN_KEY.fullmatch(key.content) else check.quoted(key.content)
            inner = f"{path}.{name}" if path else name
            found[key.content] = self.value(next(self.events), path=inner, depth=depth + 1, line=key.line)
        return found


# Values to the document.


@dataclass(frozen=True, slots=True)
class _Promise:
    """A rate and where it was said."""

    rate: Rate
    source: str

    def __str__(self) -> str:
        return f"{self.rate} ({self.source})"


_BUILT_IN_FLOOR = _Promise(Rate(0), "built-in default")
_BUILT_IN_CEILING = _Promise(Rate(1_500_000_000), "built-in default")


@dataclass(frozen=True, slots=True)
class _Region:
    """What every tenant of a document is judged against."""

    marks: MarkLayout
    gateway: Gateway
    floor: _Promise
    ceiling: _Promise
    names: Claims = field(default_factory=lambda: Claims("name"))
    classes: Claims = field(default_factory=lambda: Claims("class"))
    hosts: Claims = field(default_factory=lambda: Claims("host"))


def _document(root: Value) -> TenantsDocument:
    rules.require_kind(root, KIND)
    required, optional = ("apiVersion", "kind", "region", "tenants"), ("marks", "defaults", "gateway")
    entries = check.mapping(root, required=required, optional=optional)
    name = check.text(entries["region"], partial(check.label, characters_max=REGION_CHARACTERS_MAX))
    defaults = check.mapping(entries["defaults"], optional=("floor", "ceiling")) if "defaults" in entries else {}
    region = _Region(
        marks=_marks(entries["marks"]) if "marks" in entries else MarkLayout(),
        gateway=_gateway(entries["gateway"]) if "gateway" in entries else Gateway(),
        floor=_promise(defaults.get("floor"), source="default", otherwise=_BUILT_IN_FLOOR),
        ceiling=_promise(defaults.get("ceiling"), source="default", otherwise=_BUILT_IN_CEILING),
    )
    tenants = [_tenant(value, region) for value in check.sequence(entries["tenants"])]
    tenants.sort(key=lambda tenant: tenant.class_id)
    return TenantsDocument(region=name, tenants=tuple(tenants), marks=region.marks, gateway=region.gateway)


def _marks(value: Value) -> MarkLayout:
    entries = check.mapping(value, optional=("mask", "neighbours", "acknowledge"))
    layout = check.literal(entries["mask"], _mark_layout) if "mask" in entries else MarkLayout()
    neighbours = check.distinct(entries.get("neighbours"), known_mark_user, claims=Claims("name"))
    acknowledged = check.distinct(entries.get("acknowledge"), known_mark_user, claims=Claims("name"))
    try:
        require_free_bits(layout, neighbours=neighbours, acknowledged=acknowledged)
    except UsageError as error:
        raise entries.get("mask", value).refused(error.message, remedy=error.remedy) from error
    return layout


def _mark_layout(content: str) -> MarkLayout:
    return MarkLayout(check.integer(content))


def _gateway(value: Value) -> Gateway:
    entries = check.mapping(value, optional=("https_ports", "peer_ports", "grpc_prefixes"))
    default, claims, prefixes = Gateway(), Claims("port"), Claims("prefix")
    for key, ports in (("https_ports", default.https_ports), ("peer_ports", default.peer_ports)):
        if key not in entries:  # a default that stays in force holds its ports before the others are read
            claims.holders.update({str(port): (f"the default {key}", value.line) for port in ports})
    read_ports = partial(check.distinct, check=check.port, read=check.literal, claims=claims)
    gateway = Gateway(
        https_ports=read_ports(entries.get("https_ports"), otherwise=default.https_ports),
        peer_ports=read_ports(entries.get("peer_ports"), otherwise=default.peer_ports),
        grpc_prefixes=check.distinct(
            entries.get("grpc_prefixes"), check.path_prefix, claims=prefixes, otherwise=default.grpc_prefixes
        ),
    )
    rules.require_few_ports(gateway, value)
    if len(gateway.grpc_prefixes) > GRPC_PREFIXES_MAX:
        message = f"has {len(gateway.grpc_prefixes)} prefixes"
        raise entries["grpc_prefixes"].refused(message, remedy=f"keep to {GRPC_PREFIXES_MAX} shorter ones")
    return gateway


def _promise(value: Value | None, *, source: str, otherwise: _Promise) -> _Promise:
    return _Promise(check.literal(value, Rate.parse), f"{source}, line {value.line}") if value else otherwise


def _tenant(value: Value, region: _Region) -> Tenant:
    optional = ("floor", "ceiling", "hosts", "peer_hosts", "client_cidrs", "backends")
    entries = check.mapping(value, required=("name", "class"), optional=optional)
    name = check.text(entries["name"], partial(check.label, characters_max=TENANT_NAME_CHARACTERS_MAX))
    region.names.claim(name, entries["name"], owner=value.path)
    owner = f"tenant {name}"
    class_id = check.literal(entries["class"], partial(check.tenant_class, marks=region.marks))
    region.classes.claim(f"{class_id:#x}", entries["class"], owner=owner)
    floor, ceiling = _promises(value, entries, region=region)
    tenant = Tenant(
        name=name,
        class_id=class_id,
        floor=floor,
        ceiling=ceiling,
        hosts=check.distinct(entries.get("hosts"), check.hostname, claims=region.hosts, owner=owner),
        peer_hosts=check.distinct(entries.get("peer_hosts"), check.hostname, claims=region.hosts, owner=owner),
        client_cidrs=check.distinct(entries.get("client_cidrs"), check.network, claims=Claims("network")),
        backends=_backends(entries["backends"]) if "backends" in entries else Backends(),
    )
    rules.require_served(tenant, entries, gateway=region.gateway)
    return tenant


def _promises(value: Value, entries: dict[str, Value], *, region: _Region) -> tuple[Rate, Rate]:
    floor = _promise(entries.get("floor"), source="its own", otherwise=region.floor)
    ceiling = _promise(entries.get("ceiling"), source="its own", otherwise=region.ceiling)
    place = entries.get("ceiling", value)
    if ceiling.rate < CEILING_MIN:
        remedy = f"use at least {CEILING_MIN}: rates are in bit/s, e.g. 25M"
        raise place.refused(f"ceiling {ceiling} is too low to serve anybody", remedy=remedy)
    if ceiling.rate < floor.rate:
        message = f"ceiling {ceiling} is below floor {floor}"
        raise place.refused(message, remedy="raise the ceiling or lower the floor")
    return floor.rate, ceiling.rate


def _backends(value: Value) -> Backends:
    entries = check.mapping(value, optional=("http", "grpc", "peer"))
    return Backends(**{protocol: _endpoint(entry) for protocol, entry in entries.items()})


def _endpoint(value: Value) -> Endpoint:
    entries = check.mapping(value, optional=("address", "dns"))
    if len(entries) != 1:
        found = "both address and dns" if entries else "neither address nor dns"
        raise value.refused(f"has {found}", remedy="give one of them")
    if "address" in entries:
        return check.text(entries["address"], check.address_endpoint)
    return check.text(entries["dns"], check.dns_endpoint)
