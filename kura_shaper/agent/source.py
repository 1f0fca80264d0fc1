"""Where an agent's document comes from. Whatever fails, the last good one stays, with its age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kura_shaper.errors import UsageError
from kura_shaper.tenants.file import load_tenants

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
    """A tenants document in a file, read anew when the file is another one."""

    def __init__(self, path: Path, overlay: Path | None, *, clock: Clock) -> None:
        self._path, self._overlay, self._clock = path, overlay, clock
        self._told = Told()
        self._stamp: tuple[object, ...] | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files whose change counts."""
        return (self._path, *((self._overlay,) if self._overlay else ()))

    def told(self) -> Told:
        """See Source."""
        stamp = tuple(map(_stamp, self.paths))
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        elif self._told.is_valid:
            # It was looked at and is the same.
            self._told = _at(self._told, self._clock.now_ns())
        return self._told

    def _read(self) -> None:
        try:
            document = load_tenants(self._path, overlay=self._overlay)
        except UsageError as error:
            before = self._told
            self._told = Told(before.document, False, before.current_at_ns, problems=(str(error),))  # noqa: FBT003
            return
        self._told = Told(document, is_valid=True, current_at_ns=self._clock.now_ns())


def _at(told: Told, now_ns: int) -> Told:
    return Told(told.document, told.is_valid, now_ns, told.budget, told.problems, told.may_disrupt)


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
