"""Deployments as `kubectl get deployments -A -o json` has them: as much of them as a check asks about."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES = 256 * 1024 * 1024
_NAME_CHARS = 128
_COMMAND = "event-broker"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One Deployment; name is NAMESPACE/NAME. runs_broker is whether a container's command is the event broker."""

    name: str
    replicas: int
    runs_broker: bool


def read_deployments(path: Path) -> tuple[Deployment, ...]:
    """Return the Deployments in a file, a List or one of them; other kinds are left out. Raises UsageError."""
    option = f"--deployments {str(path)!r}"
    remedy = "write it by `kubectl get deployments -A -o json`"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{option} is too large", remedy=remedy)
        found = json.loads(path.read_text("utf-8"))
        items = found.get("items", [found])
        return tuple(_deployment(item) for item in items if item["kind"] == "Deployment")
    except OSError as error:
        raise UsageError(f"{option} can't be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{option} is no list of Deployments", remedy=remedy) from error


def _deployment(item: Any) -> Deployment:
    meta, spec = item["metadata"], item["spec"]
    name = f"{meta.get('namespace', 'default')}/{meta['name']}"
    containers = spec["template"]["spec"]["containers"]
    # What is not set is one (apps/v1).
    replicas = int(spec.get("replicas", 1))
    return Deployment(name[:_NAME_CHARS], replicas, any(map(_runs_broker, containers)))


def _runs_broker(container: Any) -> bool:
    words = (*(container.get("command") or ()), *(container.get("args") or ()))
    # The image has the program as its entrypoint, so its own first word is the command.
    return _COMMAND in words[:2]
