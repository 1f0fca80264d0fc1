"""What a node's disks have read and written.

Whole disks only: a partition's traffic is its disk's too, and so is that of what is stacked on
disks (device mapper, md). A disk is what has hardware, or a hypervisor's, behind it: a `device`
in sysfs, which loop, ram and stacked devices lack. (Documentation/admin-guide/iostats.rst)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kura_shaper.errors import StateUnknownError

DISKS_MAX = 64

_SYS = Path("/sys")
_SECTOR_BYTES = 512  # of every device, whatever its own sectors are
_NUMBER = re.compile(r"(\d+)")
_NO_DISK = re.compile(r"(sr|fd)\d+")  # optical and floppy drives have a `device`
_COLUMNS_MIN = 11  # 15 since 4.18 with discards, 17 since 5.5 with flushes; the first 11 never changed


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """Counters of one disk since it came. The times have 32 bits in the kernel, so they wrap after 49 days of it.

    `read_ms` and `written_ms` are the sums over all requests, `busy_ms` is when any was under way.
    """

    name: str
    reads: int
    read_bytes: int
    read_ms: int
    writes: int
    written_bytes: int
    written_ms: int
    busy_ms: int

    @property
    def read_seconds(self) -> float:
        """What all reads took."""
        return self.read_ms / 1e3

    @property
    def written_seconds(self) -> float:
        """What all writes took."""
        return self.written_ms / 1e3

    @property
    def busy_seconds(self) -> float:
        """How long any request was under way."""
        return self.busy_ms / 1e3


@dataclass(frozen=True, slots=True)
class Disks:
    """A node's disks in the order of their names, and how many more there are than were to be read."""

    disks: tuple[DiskCounters, ...]
    left_out: int = 0


def read_disks(sys: Path = _SYS, *, at_most: int = DISKS_MAX) -> Disks:
    """Return the counters of each whole disk. Raises StateUnknownError when sysfs can't be read."""
    block = sys / "block"
    try:
        found = sorted((entry.name for entry in block.iterdir() if _is_disk(entry)), key=_natural)
    except OSError as error:
        raise StateUnknownError(f"the disks can't be read in sysfs: {error}") from error
    disks = [_read(block / name) for name in found[:at_most]]
    return Disks(tuple(disk for disk in disks if disk), left_out=max(0, len(found) - at_most))


def parse_disk(name: str, text: str) -> DiskCounters:
    """Return what a disk's `stat` tells. Raises ValueError."""
    columns = [int(column) for column in text.split()]
    if len(columns) < _COLUMNS_MIN:
        raise ValueError(f"{len(columns)} counters instead of at least {_COLUMNS_MIN}")
    reads, _, read_sectors, read_ms, writes, _, written_sectors, written_ms, _, busy_ms = columns[:10]
    return DiskCounters(
        name=name,
        reads=reads,
        read_bytes=read_sectors * _SECTOR_BYTES,
        read_ms=read_ms,
        writes=writes,
        written_bytes=written_sectors * _SECTOR_BYTES,
        written_ms=written_ms,
        busy_ms=busy_ms,
    )


def _read(directory: Path) -> DiskCounters | None:
    """Return a disk's counters, None when it went meanwhile."""
    # A slash in a device's name (cciss/c0d0) is a ! in sysfs.
    name = directory.name.replace("!", "/")
    try:
        return parse_disk(name, (directory / "stat").read_text("ascii"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateUnknownError(f"the counters of disk {name} can't be read: {error}") from error


def _is_disk(entry: Path) -> bool:
    return not _NO_DISK.fullmatch(entry.name) and (entry / "device").exists()


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort nvme2n1 before nvme10n1."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(name)]
