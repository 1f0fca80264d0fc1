"""What an agent is told: a YAML file, over it the environment, over that the options of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.kernel.journal import DEFAULT_STATE_DIRECTORY
from kura_shaper.kernel.sysfs import check_device_name
from kura_shaper.tenants.check import address_endpoint
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.marks import SHAPED_QUEUES_MAX
from kura_shaper.tree.build import ShapeChoice, TreeSettings, check_settings
from kura_shaper.tree.model import HostTraffic, LeafKind
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from enum import StrEnum

ENVIRONMENT_PREFIX = "KURA_SHAPER_"
AUTO, NODE = "auto", "node"
_FILE_BYTES_MAX = 1 << 20
_SOURCE_KEYS = frozenset({"file", "region", "namespace", "node", "kubeconfig"})
_LISTEN = Endpoint("127.0.0.1", 9469)


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Tenants are the KuraInstances of a region, and the budget is this node's. namespace "" means all."""

    region: str
    namespace: str = "kura"
    node: str = ""
    kubeconfig: str = ""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Everything that an agent can be told.

    One of `file` and `kubernetes` is the source. `devices` () means those of the default
    routes, `budget` None what this node's capacity says. `observe` plans and never writes.
    `resync_s` is how often everything is looked at without a reason.
    """

    file: Path | None = None
    overlay: Path | None = None
    kubernetes: KubernetesSource | None = None
    devices: tuple[str, ...] = ()
    budget: Rate | None = None
    host_traffic: HostTraffic = HostTraffic.OUTSIDE
    host_reserve: Rate = Rate(50_000_000)
    shape: ShapeChoice = ShapeChoice.AUTO
    shaped_queues: int = 1
    leaf: LeafKind = LeafKind.FQ_CODEL
    listen: Endpoint = _LISTEN
    observe: bool = False
    resync_s: int = 120
    state_dir: Path = DEFAULT_STATE_DIRECTORY
    node_file: Path = DEFAULT_STATE_DIRECTORY / "disabled"

    def __post_init__(self) -> None:
        if (self.file is None) == (self.kubernetes is None):
            remedy = "source: {file: /etc/kura-shaper/tenants.yaml}, or {kubernetes: {region: us-east}}"
            raise UsageError("the agent needs one source: a file or kubernetes", remedy=remedy)
        if self.budget is None and self.kubernetes is None:
            raise UsageError("budget: node needs the source kubernetes", remedy="or give a rate, e.g. budget: 3G")

    def tree(self, budget: Rate) -> TreeSettings:
        """Return the settings of the tree for a budget."""
        return TreeSettings(
            budget=budget,
            shape=self.shape,
            shaped_queues=self.shaped_queues,
            leaf=self.leaf,
            host_traffic=self.host_traffic,
            host_reserve=self.host_reserve,
        )


def load_settings(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str | None] | None = None
) -> AgentSettings:
    """Return the settings of a file, the environment and the command line, the last of which wins.

    `overrides` has texts by the keys of the file; None was not given. Raises UsageError that
    names where a bad value came from.
    """
    levels: list[dict[str, _Given]] = [{}, {}, {}]
    if path is not None:
        levels[0] = {key: _Given(f"{path}: {key}", value) for key, value in _read(path).items()}
    for key in _READERS:
        name = f"{ENVIRONMENT_PREFIX}{key.upper()}"
        if environ.get(name):
            levels[1][key] = _Given(name, environ[name])
        text = (overrides or {}).get(key)
        if text is not None:
            levels[2][key] = _Given(f"--{key.replace('_', '-')}", text)
    return _settings(levels)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it was given."""

    place: str
    value: Any


class _Loader(yaml.SafeLoader):
    """YAML without what a page of settings has no use for: values that stand for others, and keys that do again."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="an alias stands for a value", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - the base class's own
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.MarkedYAMLError(problem=f"key {twice[:64]!r} stands there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    remedy = "see `kura-shaper agent --help`"
    try:
        with path.open("rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise DocumentError("is larger than 1 MiB", file=str(path), remedy=remedy)
        value = yaml.load(content, Loader=_Loader)  # noqa: S506 - a safe loader
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:200]
        raise DocumentError(f"can't be read: {words}", file=str(path), remedy=remedy) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DocumentError("is no mapping", file=str(path), remedy="write `key: value` lines")
    known = ("source", *(key for key in _READERS if key not in _SOURCE_KEYS))
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        where = "; it stands below source" if unknown[0] in _SOURCE_KEYS else f": {', '.join(known)}"
        raise DocumentError(f"unknown key {unknown[0][:64]!r}", file=str(path), remedy=f"known keys{where}")
    source = value.pop("source", None)
    return {**value, **_source(source, path)} if source is not None else value


def _source(value: Any, path: Path) -> dict[str, Any]:
    """Return the source's own keys, flat: a file, or a region and what goes with it."""
    place = f"{path}: source"
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in {"file", "kubernetes"}:
        raise UsageError(
            f"{place} is neither file nor kubernetes", remedy="source: {file: /etc/kura-shaper/tenants.yaml}"
        )
    if "file" in value:
        return {"file": value["file"]}
    inner = value["kubernetes"]
    allowed = _SOURCE_KEYS - {"file"}
    if not isinstance(inner, dict) or not inner.keys() <= allowed or "region" not in inner:
        raise UsageError(
            f"{place}.kubernetes takes {', '.join(sorted(allowed))}", remedy="kubernetes: {region: us-east}"
        )
    return dict(inner)


def _settings(levels: Sequence[Mapping[str, _Given]]) -> AgentSettings:
    told = {key: given for level in levels for key, given in level.items()}
    if _chosen_source(levels) == "region":
        told.pop("file", None)
    else:
        told = {key: given for key, given in told.items() if key == "file" or key not in _SOURCE_KEYS}
    read = {key: _reading(_READERS[key], given.place, given.value) for key, given in told.items()}
    kubernetes = {key: read.pop(key) for key in _SOURCE_KEYS - {"file"} if key in read}
    if kubernetes:
        read["kubernetes"] = KubernetesSource(**kubernetes)
    made = AgentSettings(**read)
    check_settings(made.tree(made.budget or Rate(0)))
    return made


def _chosen_source(levels: Sequence[Mapping[str, _Given]]) -> str:
    """Return the key of the source that the last level names which names one."""
    for level in reversed(levels):
        named = [key for key in ("file", "region") if key in level]
        if len(named) > 1:
            places = " and ".join(level[key].place for key in named)
            raise UsageError(f"{places} name two sources", remedy="name one: a file, or the region of a cluster")
        if named:
            return named[0]
    return ""


def _reading(reader: Callable[[Any], Any], place: str, value: Any) -> Any:
    try:
        return reader(value)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", remedy=error.remedy) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place}: {str(value)[:64]!r} can't be used", remedy=str(error)[:120]) from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(f"{str(value)[:64]!r} is no text", remedy="write one line of text")
    return value


def _word(value: Any) -> str:
    if value == "":
        raise UsageError("is empty", remedy="write one line of text")
    return _text(value)


def _path(value: Any) -> Path:
    return Path(_word(value))


def _choice(kinds: type[StrEnum]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in list(kinds):
            raise UsageError(f"{str(value)[:32]!r} is not known", remedy=f"use {', '.join(kinds)}")
        return kinds(value)

    return read


def _rate(value: Any) -> Rate:
    rate = Rate.parse(str(value)[:64]) if not isinstance(value, bool) else Rate(0)
    if not rate.bits_per_second:
        raise UsageError(f"{str(value)[:32]!r} is no rate", remedy="a rate in bit/s, e.g. 3G")
    return rate


def _devices(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [name.strip() for name in _text(value).split(",")]
    if names == [AUTO]:
        return ()
    if AUTO in names:
        raise UsageError("auto stands beside names", remedy="auto, or e.g. [eth0]")
    for name in names:
        check_device_name(_text(name))
    if not names:
        raise UsageError("names no device", remedy="auto, or e.g. [eth0]")
    return tuple(dict.fromkeys(names))


def _budget(value: Any) -> Rate | None:
    return None if value == NODE else _rate(value)


def _flag(value: Any) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise UsageError(f"{str(value)[:32]!r} is neither true nor false", remedy="true or false")
    return words[str(value).lower()]


def _number(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        text = str(value)
        if (
            isinstance(value, bool)
            or not (text.isascii() and text.isdecimal() and len(text) < 10)
            or not least <= int(text) <= most
        ):
            raise UsageError(f"{text[:32]!r} is out of range", remedy=f"use {least} to {most}")
        return int(text)

    return read


def _listen(value: Any) -> Endpoint:
    return address_endpoint(_text(value))


_READERS: dict[str, Callable[[Any], Any]] = {
    "file": _path,
    "overlay": _path,
    "region": _word,
    "namespace": _text,
    "node": _text,
    "kubeconfig": _text,
    "devices": _devices,
    "budget": _budget,
    "host_traffic": _choice(HostTraffic),
    "host_reserve": lambda value: Rate.parse(str(value)[:64]),
    "shape": _choice(ShapeChoice),
    "shaped_queues": _number(1, SHAPED_QUEUES_MAX),
    "leaf": _choice(LeafKind),
    "listen": _listen,
    "observe": _flag,
    "resync_s": _number(5, 86_400),
    "state_dir": _path,
    "node_file": _path,
}
KEYS = tuple(_READERS)
