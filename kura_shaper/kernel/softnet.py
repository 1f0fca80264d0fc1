"""What the kernel dropped before any qdisc saw it: the backlog between a device and the network stack.

A packet that finds the backlog of its CPU full is dropped there, and no counter of a class or a
device tells of it. `squeezed` counts how often the kernel stopped receiving with packets left,
because its time or its budget was up: the sign that comes before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kura_shaper.errors import StateUnknownError

_PROC = Path("/proc")
_DROPPED, _SQUEEZED = 1, 2  # columns; there are 9 to 15 of them by the kernel (net/core/net-procfs.c)


@dataclass(frozen=True, slots=True)
class Softnet:
    """Counters of all CPUs of the node since it booted. Each CPU's has 32 bits and may wrap."""

    dropped_packets: int
    squeezed: int


def read_softnet(proc: Path = _PROC) -> Softnet:
    """Return the totals. Raises StateUnknownError."""
    path = proc / "net" / "softnet_stat"
    try:
        return parse_softnet(path.read_text("ascii"))
    except (OSError, ValueError) as error:
        raise StateUnknownError(f"{path} can't be read: {error}") from error


def parse_softnet(text: str) -> Softnet:
    """Return the totals of a file with one line of hex numbers a CPU. Raises ValueError."""
    cpus = [line.split() for line in text.splitlines()]
    if not cpus or any(len(columns) <= _SQUEEZED for columns in cpus):
        raise ValueError("not one line of counters a CPU")
    return Softnet(
        dropped_packets=sum(int(columns[_DROPPED], 16) for columns in cpus),
        squeezed=sum(int(columns[_SQUEEZED], 16) for columns in cpus),
    )
