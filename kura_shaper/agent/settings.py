"""What an agent is told: a YAML file, over it the environment, over that the options of the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.kernel.journal import DEFAULT_STATE_DIRECTORY
from kura_shaper.kernel.sysfs import check_device_name
from kura_shaper.tenants.check import address_endpoint
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tenants.marks import SHAPED_QUEUES_MAX
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.tree.model import HostTraffic, LeafKind
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENVIRONMENT_PREFIX = "KURA_SHAPER_"
AUTO, NODE = "auto", "node"
_FILE_BYTES_MAX = 1 << 20
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


def load_settings(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str | None] | None = None
) -> AgentSettings:
    """Return the settings of a file, the environment and the command line, the last of which wins.

    `overrides` has texts by the keys of the file; None was not given. Raises UsageError that
    names where a bad value came from.
    """
    told: dict[str, tuple[str, Any]] = {}
    if path is not None:
        told |= {key: (f"{path}: {key}", value) for key, value in _read(path).items()}
    for key in _READERS:
        name = f"{ENVIRONMENT_PREFIX}{key.upper()}"
        if environ.get(name):
            told[key] = (name, environ[name])
    told |= {key: (f"--{key.replace('_', '-')}", text) for key, text in (overrides or {}).items() if text is not None}
    return _settings(told)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            value = yaml.safe_load(stream.read(_FILE_BYTES_MAX))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        words = " ".join(str(error).split())[:200]
        raise DocumentError(
            f"can't be read: {words}", file=str(path), remedy="see `kura-shaper agent --help`"
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DocumentError("is no mapping", file=str(path), remedy="write `key: value` lines")
    unknown = sorted(str(key) for key in value if key not in _READERS and key != "source")
    if unknown:
        known = ", ".join(("source", *_READERS))
        raise DocumentError(f"unknown key {unknown[0][:64]!r}", file=str(path), remedy=f"known keys: {known}")
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
    allowed = {"region", "namespace", "node", "kubeconfig"}
    if not isinstance(inner, dict) or not inner.keys() <= allowed:
        raise UsageError(
            f"{place}.kubernetes takes {', '.join(sorted(allowed))}", remedy="kubernetes: {region: us-east}"
        )
    return {key: inner[key] for key in inner}


def _settings(told: dict[str, tuple[str, Any]]) -> AgentSettings:
    read = {key: _reading(_READERS[key], place, value) for key, (place, value) in told.items()}
    kubernetes = {key: read.pop(key) for key in ("region", "namespace", "node", "kubeconfig") if key in read}
    if kubernetes.get("region"):
        if "file" in read and told["file"][0].startswith("--"):
            kubernetes = {}
        else:
            read.pop("file", None)
            read["kubernetes"] = KubernetesSource(**kubernetes)
    known = {f.name for f in fields(AgentSettings)}
    return AgentSettings(**{key: value for key, value in read.items() if key in known})


def _reading(reader: Callable[[Any], Any], place: str, value: Any) -> Any:
    try:
        return reader(value)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", remedy=error.remedy) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place}: {value!r} can't be used", remedy=str(error)[:120]) from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise UsageError(f"{str(value)[:64]!r} is no text", remedy="write one line of text")
    return value


def _rate(value: Any) -> Rate:
    return Rate.parse(str(value))


def _devices(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [name.strip() for name in _text(value).split(",")]
    if names == [AUTO]:
        return ()
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
        if isinstance(value, bool) or not text.isdecimal() or not least <= int(text) <= most:
            raise UsageError(f"{text[:32]!r} is out of range", remedy=f"use {least} to {most}")
        return int(text)

    return read


def _listen(value: Any) -> Endpoint:
    endpoint = address_endpoint(_text(value))
    ip_address(endpoint.host)
    return endpoint


_READERS: dict[str, Callable[[Any], Any]] = {
    "file": lambda value: Path(_text(value)),
    "overlay": lambda value: Path(_text(value)),
    "region": _text,
    "namespace": _text,
    "node": _text,
    "kubeconfig": _text,
    "devices": _devices,
    "budget": _budget,
    "host_traffic": HostTraffic,
    "host_reserve": _rate,
    "shape": ShapeChoice,
    "shaped_queues": _number(1, SHAPED_QUEUES_MAX),
    "leaf": LeafKind,
    "listen": _listen,
    "observe": _flag,
    "resync_s": _number(5, 86_400),
    "state_dir": lambda value: Path(_text(value)),
    "node_file": lambda value: Path(_text(value)),
}
KEYS = tuple(_READERS)
