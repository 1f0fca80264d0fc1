"""Files that are there whole or not at all, also after the power went out."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _world_readable(descriptor: int) -> None:
    os.fchmod(descriptor, 0o644)


def replace_durably(path: Path, text: str, *, prepare: Callable[[int], None] = _world_readable) -> None:
    """Put a text in place of a file, or where there is none. Raises OSError; then nothing has changed.

    `prepare` gets the new file's descriptor before it is in place, to set its mode and owner; until
    then only its owner may read it. A link is replaced, not followed.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text.encode("utf-8"))
            stream.flush()
            prepare(descriptor)
            os.fsync(descriptor)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries to disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
