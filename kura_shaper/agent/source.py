"""Where an agent's document comes from. Whatever fails, the last good one stays, with its age."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kura_shaper.errors import UsageError
from kura_shaper.tenants.file import SIZE_BYTES_MAX, load_tenants

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.clock import Clock
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.units import Rate


@dataclass(frozen=True, slots=True)
class Told:
    """What a source says. `document` is the last good one, None before there was any.

    `is_valid` tells whether the newest reading was good; `current_at_ns` when `document` was
    last known to be the newest. `budget` is None where the source knows of none. `problems` are
    things wrong with single tenants, or with the whole, a line each. `may_disrupt` is the
    maintenance that somebody declared for this node.
    """

    document: TenantsDocument | None = None
    is_valid: bool = False
    current_at_ns: int = 0
    budget: Rate | None = None
    problems: tuple[str, ...] = ()
    may_disrupt: bool = False


class Source(Protocol):
    """Somebody who tells of tenants."""

    def told(self) -> Told:
        """Return what is known now; never raises, and never waits for a network."""
        ...


class FileSource:
    """A tenants document in a file, parsed anew when what the file holds is something else."""

    def __init__(self, path: Path, overlay: Path | None, *, clock: Clock) -> None:
        self._path, self._overlay, self._clock = path, overlay, clock
        self._told = Told()
        self._digests: tuple[bytes, ...] | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files whose change counts."""
        return (self._path, *((self._overlay,) if self._overlay else ()))

    def told(self) -> Told:
        """See Source."""
        try:
            # The content counts: two writes within a tick of the file system's clock have one time.
            digests = tuple(map(_digest, self.paths))
        except OSError as error:
            self._digests = None
            return self._failed(f"{error.filename or self._path}: could not be read: {error.strerror}")
        if digests == self._digests:
            if self._told.is_valid:
                self._told = replace(self._told, current_at_ns=self._clock.now_ns())
            return self._told
        self._digests = digests
        try:
            document = load_tenants(self._path, overlay=self._overlay)
        except UsageError as error:
            return self._failed(str(error))
        self._told = Told(document, is_valid=True, current_at_ns=self._clock.now_ns())
        return self._told

    def _failed(self, problem: str) -> Told:
        self._told = replace(self._told, is_valid=False, problems=(problem,))
        return self._told


def _digest(path: Path) -> bytes:
    """Return what stands for a file's content. Raises OSError, also for a pipe, which would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        # One byte more than a document may have.
        return hashlib.sha256(stream.read(SIZE_BYTES_MAX + 1)).digest()
