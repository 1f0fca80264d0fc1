"""The marker that holds the agent off a node: a file, so that it outlives the agent, a redeploy and a reboot."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kura_shaper.durable import replace_durably, sync_directory
from kura_shaper.errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

_BYTES_MAX = 64 * 1024
_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True)
class Disabled:
    """Who held the agent off, when (ISO 8601) and why. Each is "" where the file does not say."""

    reason: str = ""
    who: str = ""
    at: str = ""


def read_marker(path: Path) -> Disabled | None:
    """Return the marker, None when there is none.

    A marker that can't be read is one: whoever put it there wanted the agent to keep off.
    """
    try:
        # Without waiting: a pipe in its place would hold up whoever reads it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            content = stream.read(_BYTES_MAX) or b""
    except FileNotFoundError:
        return Disabled(reason=f"{path} leads nowhere") if path.is_symlink() else None
    except OSError as error:
        return Disabled(reason=f"{path} can't be read: {error.strerror}")
    try:
        found = json.loads(content)
        return Disabled(*(_line(found.get(key, "")) for key in ("reason", "who", "at")))
    except (ValueError, AttributeError, RecursionError):
        return Disabled(reason=_line(content.decode("utf-8", errors="replace")))


def _line(value: object) -> str:
    """Return what somebody wrote as one line that no log, terminal or answer stumbles over."""
    text = str(value)[:_CHARACTERS_MAX]
    return "".join(c if c.isprintable() else " " for c in text).strip()


def write_marker(path: Path, disabled: Disabled) -> None:
    """Put the marker there, durably. Raises RefusedError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, json.dumps(asdict(disabled)) + "\n")
    except OSError as error:
        message = f"the marker {path} can't be written: {error.strerror}"
        raise RefusedError(message, remedy="run as root, or name another with --node-file") from error


def remove_marker(path: Path) -> bool:
    """Take the marker away; return whether there was one. Raises RefusedError."""
    try:
        path.unlink()
        sync_directory(path.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RefusedError(f"the marker {path} can't be removed: {error.strerror}", remedy="run as root") from error
    return True
