"""Whether a kubeconfig that was given is one. Nothing that it names is asked or started, and it is not repeated."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import yaml

from kura_shaper.broker.credentials import CredentialError, read_file

if TYPE_CHECKING:
    from pathlib import Path

_BYTES_MAX = 1024 * 1024
_REMEDY = "write a kubeconfig, e.g. with kubectl config view --raw --minify"


class _ShapeError(Exception):
    """What a kubeconfig lacks."""


def require_kubeconfig(key: str, path: Path) -> None:
    """Raise CredentialError for a file by which no API server can be reached. `key` is what names it."""
    found = read_kubeconfig(key, path)
    try:
        _require_cluster(found)
    except _ShapeError as error:
        raise CredentialError(key, f"{path} is no kubeconfig: {error}", remedy=_REMEDY) from error


def read_kubeconfig(key: str, path: Path) -> object:
    """Return what a file says, of whatever shape. Raises CredentialError for one that can't be read, or is no YAML."""
    if find_spec("aiohttp") is None or find_spec("kubernetes") is None:
        remedy = "install kura-shaper[kubernetes]"
        raise CredentialError(key, "needs the Kubernetes client, which is not installed", remedy=remedy)
    content = read_file(key, path, _BYTES_MAX)
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CredentialError(key, f"{path} is no YAML", remedy=_REMEDY) from error


def _require_cluster(found: object) -> None:
    """Follow the current context to a server, as a client does."""
    if not isinstance(found, dict):
        raise _ShapeError("it is no mapping")
    context = _named(found, "contexts", "context", found.get("current-context"), by="current-context")
    cluster = _named(found, "clusters", "cluster", context.get("cluster"), by="the current context's cluster")
    if context.get("user"):
        _named(found, "users", "user", context["user"], by="the current context's user")
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("https://", "http://")):
        raise _ShapeError("its current cluster has no server")


def _named(found: dict[Any, Any], part: str, field: str, name: object, *, by: str) -> dict[Any, Any]:
    """Return what an entry of a list has under a name. Raises _ShapeError."""
    entries = found.get(part)
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise _ShapeError(f"{part} is no list of mappings")
    for each in entries:
        if name is not None and each.get("name") == name:
            value = each.get(field)
            if value is None and field == "user":
                return {}
            if not isinstance(value, dict):
                raise _ShapeError(f"an entry of {part} has no {field}")
            return value
    raise _ShapeError(f"{by} names none of {part}")
