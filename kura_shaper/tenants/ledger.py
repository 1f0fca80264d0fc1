"""The ledger beside a tenants document: who had which class id, and which were freed when.

A file that can't be read as one is an error, never an empty ledger: ids would be reused
early.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kura_shaper.durable import replace_durably
from kura_shaper.errors import DocumentError, RefusedError
from kura_shaper.tenants.rules import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

KIND = "ClassLedger"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_REMEDY = "take it from version control, or remove it: then freed ids may be reused at once"


@dataclass(frozen=True, slots=True, order=True)
class Freed:
    """An id whose tenant is gone, and since when that is known."""

    class_id: int
    tenant: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who had which id at the last allocation, and which ids were freed before."""

    held: Mapping[str, int] = field(default_factory=dict)
    freed: tuple[Freed, ...] = ()


def ledger_path(document: Path) -> Path:
    """Return where the ledger of a document is."""
    return document.with_name(f"{document.name}.quarantine.yaml")


def read_text(path: Path) -> str:
    """Return the text in a file, every line end as it is. Raises DocumentError."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        remedy = "check the path and its permissions"
        raise DocumentError(f"could not be read: {reason}", file=str(path), remedy=remedy) from error


def read_ledger(path: Path) -> Ledger:
    """Return the ledger in a file; an empty one where there is no file. Raises DocumentError."""
    if not os.path.lexists(path):
        return Ledger()
    text = read_text(path)
    try:
        return _ledger(yaml.load(text, Loader=_LOADER))  # noqa: S506, the loader is a safe one
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DocumentError("is no ledger of class ids", file=str(path), remedy=_REMEDY) from error


def _ledger(found: Any) -> Ledger:
    if (found["apiVersion"], found["kind"]) != (API_VERSION, KIND):
        raise ValueError(found["kind"])
    held = {_typed(name, str): _typed(class_id, int) for name, class_id in found["held"].items()}
    freed = (
        Freed(_typed(entry["class"], int), _typed(entry["tenant"], str), _time(_typed(entry["at"], str)))
        for entry in found["freed"]
    )
    return Ledger(held, tuple(sorted(freed)))


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def ledger_text(ledger: Ledger, *, document: str) -> str:
    """Return the text of a ledger; `document` is the name of the file that it is about."""
    lines = [
        f"# Which class ids of {document} are in use, and which were freed when. Written by",
        "# `kura-shaper tenants allocate`; keep it with the document.",
        f"apiVersion: {API_VERSION}",
        f"kind: {KIND}",
        "held:" if ledger.held else "held: {}",
        *(f"  {json.dumps(name)}: {class_id:#x}" for name, class_id in sorted(ledger.held.items())),
        "freed:" if ledger.freed else "freed: []",
        *(
            f'  - {{class: {entry.class_id:#x}, tenant: {json.dumps(entry.tenant)}, at: "{_shown(entry.at)}"}}'
            for entry in sorted(ledger.freed)
        ),
    ]
    return "\n".join(lines) + "\n"


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds")


def replace_file(path: Path, text: str) -> None:
    """Put a text in place of a file: whole or not at all, with the mode and owner that it had.

    What a link leads to is replaced, not the link. Raises RefusedError.
    """
    target = Path(os.path.realpath(path))
    try:
        replace_durably(target, text, prepare=lambda descriptor: _keep_owner(target, descriptor))
    except OSError as error:
        message = f"{path} can't be written: {error.strerror}"
        raise RefusedError(message, remedy="check the directory: it was left as it was") from error


def _keep_owner(target: Path, descriptor: int) -> None:
    with suppress(FileNotFoundError):
        status = target.stat()
        with suppress(PermissionError):  # only root may give a file away
            os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, status.st_mode & 0o7777)
        return
    os.fchmod(descriptor, 0o644)
