"""What one object of the cluster says about tenants, as a value that no longer depends on JSON.

Reading never fails. A field that can't be used becomes a Problem beside what could be read,
so that one bad object takes nobody else down: what that means for a tenant is decided where
all objects are known (`instances`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kura_shaper.errors import QuantityError, UsageError
from kura_shaper.tenants import check
from kura_shaper.tenants.file import CEILING_MIN, TENANT_NAME_CHARACTERS_MAX
from kura_shaper.units import Rate, parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from ipaddress import IPv4Network, IPv6Network

    from kura_shaper.tenants.marks import MarkLayout

T = TypeVar("T")

CLASS_ANNOTATION = "kura.tuist.dev/egress-class-id"
CEILING_ANNOTATION = "kubernetes.io/egress-bandwidth"
CAPACITY = "tuist.dev/egress-mbps"
BUDGET_ANNOTATION = "tuist.dev/egress-mbps-override"
CLASS_PATH = f'metadata.annotations["{CLASS_ANNOTATION}"]'

_INT32_MAX = 2**31 - 1
_CLASS = re.compile(r"1:([0-9a-fA-F]{1,4})", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*", re.ASCII)


class Effect(StrEnum):
    """What a problem means for what is promised."""

    LAST_GOOD = "the tenant stays as it was"
    LEFT_OUT = "the tenant is left out"
    PART = "this part is left out"
    NONE = "nothing is left out"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one object: where, what, and what to do about it."""

    namespace: str
    name: str
    path: str
    message: str
    remedy: str
    effect: Effect

    @property
    def is_loss(self) -> bool:
        """Whether something that was asked for is not there."""
        return self.effect is not Effect.NONE

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{place}: {self.path}: {self.message}; {self.effect}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Instance:
    """What one KuraInstance says. `account` and `region` are empty where they can't be read.

    A ceiling of None means that it gives none, a class id of None that it has no usable one.
    """

    namespace: str
    name: str
    account: str
    region: str
    floor: Rate = Rate(0)
    ceiling: Rate | None = None
    class_id: int | None = None
    hosts: tuple[str, ...] = ()
    private_host: str = ""
    peer_hosts: tuple[str, ...] = ()
    client_cidrs: tuple[IPv4Network | IPv6Network, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether a tenant may be made of it."""
        return not any(problem.effect is Effect.LEFT_OUT for problem in self.problems)

    def problem(self, path: str, message: str, *, remedy: str, effect: Effect) -> Problem:
        """Return a problem with this object."""
        return Problem(self.namespace, self.name, path, message, remedy, effect)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a Node says of its budget: None for none, and a problem where it says something unusable."""

    name: str
    budget: Rate | None
    annotations: tuple[tuple[str, str], ...] = ()
    problems: tuple[Problem, ...] = ()


class _Fields:
    """The fields of one object, and the problems that were met while reading them."""

    def __init__(self, namespace: str, name: str, root: object) -> None:
        self.namespace, self.name, self.root = namespace, name, root
        self.problems: list[Problem] = []

    def report(self, path: str, error: UsageError, *, effect: Effect) -> None:
        self.problems.append(Problem(self.namespace, self.name, path, error.message, error.remedy, effect))

    def find(self, *keys: str) -> object:
        """Return what stands there. What is empty is the same as absent, as it is for the API server."""
        found = self.root
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if found == "" else found

    def read(self, *keys: str, by: Callable[[object], T], effect: Effect) -> T | None:
        """Return what a check makes of a field; None where it is absent or refused, which is reported."""
        return self.checked(self.find(*keys), by, path=_path(keys), effect=effect)

    def read_each(self, *keys: str, by: Callable[[object], T], effect: Effect) -> tuple[T, ...]:
        """Return what a check makes of each item of a list."""
        items = self.find(*keys)
        if items is None:
            return ()
        if not isinstance(items, list):
            self.report(_path(keys), UsageError("is not a list", remedy="write it as a list"), effect=effect)
            return ()
        read = (self.checked(item, by, path=f"{_path(keys)}[{i}]", effect=effect) for i, item in enumerate(items))
        return tuple(item for item in read if item is not None)

    def checked(self, value: object, by: Callable[[object], T], *, path: str, effect: Effect) -> T | None:
        if value is None:
            return None
        try:
            return by(value)
        except UsageError as error:
            self.report(path, error, effect=effect)
            return None


def _path(keys: Iterable[str]) -> str:
    """Return the place in the notation of kubectl's JSONPath."""
    parts = (f".{key}" if _PLAIN_KEY.fullmatch(key) else f'["{key}"]' for key in keys)
    return "".join(parts).removeprefix(".")


def _text(value: object, *, by: Callable[[str], T]) -> T:
    if not isinstance(value, str):
        raise UsageError(f"{_shown(value)} is not a text", remedy="quote it")
    return by(value)


def _shown(value: object) -> str:
    """Return any value as one short line that is safe to print."""
    return check.quoted(value) if isinstance(value, str) else ascii(value)[:64]


def _floor(value: object) -> Rate:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32_MAX:
        raise UsageError(f"{_shown(value)} is no number of Mbit/s", remedy="write a whole number, 0 or more")
    return Rate(value * 1_000_000)


def _ceiling(content: str) -> Rate:
    rate = Rate.parse(content)
    if rate < CEILING_MIN:
        remedy = f"use at least {CEILING_MIN}: it is in bit/s, e.g. 1500M"
        raise UsageError(f"{check.quoted(content)} is too low to serve anybody", remedy=remedy)
    return rate


def _class_id(content: str, *, marks: MarkLayout) -> int:
    match = _CLASS.fullmatch(content)
    if match is None:
        remedy = "the controller writes 1: and the class in hex digits, e.g. 1:2a7"
        raise UsageError(f"{check.quoted(content)} is no class id", remedy=remedy)
    return check.tenant_class(f"0x{match[1]}", marks=marks)


def read_instance(namespace: str, name: str, raw: object, *, marks: MarkLayout) -> Instance:
    """Return what a KuraInstance says; class ids must fit the marks."""
    fields = _Fields(namespace, name, raw)
    account = fields.read("spec", "accountHandle", by=partial(_text, by=_account), effect=Effect.LEFT_OUT)
    region = fields.read("spec", "region", by=partial(_text, by=str), effect=Effect.LEFT_OUT)
    for value, key in ((account, "accountHandle"), (region, "region")):
        if value is None and fields.find("spec", key) is None:
            missing = UsageError("is missing", remedy="every KuraInstance has one")
            fields.report(f"spec.{key}", missing, effect=Effect.LEFT_OUT)
    hosts, private_host = _hosts(fields)
    return Instance(
        namespace=namespace,
        name=name,
        account=account or "",
        region=region or "",
        floor=fields.read("spec", "egressGuaranteedMbps", by=_floor, effect=Effect.LEFT_OUT) or Rate(0),
        ceiling=fields.read(
            "spec", "podAnnotations", CEILING_ANNOTATION, by=partial(_text, by=_ceiling), effect=Effect.LEFT_OUT
        ),
        class_id=fields.read(
            "metadata",
            "annotations",
            CLASS_ANNOTATION,
            by=partial(_text, by=partial(_class_id, marks=marks)),
            effect=Effect.PART,
        ),
        hosts=hosts,
        private_host=private_host,
        peer_hosts=_one(fields, "meshPublicPeerHost"),
        # A list that lost one network would let in fewer, and one that lost all of them everybody.
        client_cidrs=fields.read_each(
            "spec", "clientCIDRs", by=partial(_text, by=check.network), effect=Effect.LEFT_OUT
        ),
        problems=tuple(fields.problems),  # the last: the others have been read
    )


def _account(content: str) -> str:
    return check.label(content, characters_max=TENANT_NAME_CHARACTERS_MAX)


def _one(fields: _Fields, key: str) -> tuple[str, ...]:
    host = fields.read("spec", key, by=partial(_text, by=check.hostname), effect=Effect.PART)
    return (host,) if host else ()


def _hosts(fields: _Fields) -> tuple[tuple[str, ...], str]:
    """Return the public names, none of an instance that is private, and the private one."""
    private = _one(fields, "privateHost")
    if fields.find("spec", "private") not in (None, False):
        return (), "".join(private)
    aliases = fields.read_each("spec", "clientHostAliases", by=partial(_text, by=check.hostname), effect=Effect.PART)
    names = (*_one(fields, "publicHost"), *aliases, *_one(fields, "stableHost"))
    return tuple(dict.fromkeys(names)), "".join(private)


def _mbps(value: object) -> Rate:
    """Return the rate of a quantity of Mbit/s, as a node advertises it: 3000 comes back as 3k."""
    content = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(content, str):
        raise UsageError(f"{_shown(value)} is no quantity", remedy="write a quantity of Mbit/s, e.g. 3k")
    bits = parse_quantity(content) * 1_000_000
    if bits <= 0 or bits.denominator != 1:
        raise QuantityError(f"{check.quoted(content)} is no budget", remedy="write a quantity of Mbit/s, e.g. 3k")
    return Rate(bits.numerator)


def read_node(name: str, raw: object) -> NodeFacts:
    """Return what a Node says. A pin that can't be read is not replaced by the capacity beside it."""
    fields = _Fields("", name, raw)
    effect = Effect.LAST_GOOD
    budget = fields.read("metadata", "annotations", BUDGET_ANNOTATION, by=_mbps, effect=effect)
    if budget is None and not fields.problems:
        budget = fields.read("status", "capacity", CAPACITY, by=_mbps, effect=effect)
    found = fields.find("metadata", "annotations")
    pairs = found.items() if isinstance(found, Mapping) else ()
    annotations = tuple(sorted((k, v) for k, v in pairs if isinstance(k, str) and isinstance(v, str)))
    return NodeFacts(name, budget, annotations, tuple(fields.problems))
