"""What a run measured, as values: the loads' points with their windows, and the machine."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kura_shaper.units import Rate

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Window:
    """What left the device between two readings, on the wire."""

    start_ns: int
    end_ns: int
    wire_bytes: int

    @property
    def mbps(self) -> float:
        """Mbit/s."""
        return self.wire_bytes * 8_000 / max(1, self.end_ns - self.start_ns)


@dataclass(frozen=True, slots=True)
class Point:
    """One form under one load. wire_bytes are what one packet of the qdisc is on the wire.

    limit is None where nothing held back. load_ns is the CPU time of the senders and all that their
    packets cost, on all CPUs; others_permille what of the machine other processes had meanwhile.
    """

    form: str
    load: str
    wire_bytes: int
    segments: int
    senders: int
    limit: Rate | None
    packets: int
    windows: tuple[Window, ...]
    load_ns: int
    others_permille: int
    dropped_packets: int

    @property
    def duration_ns(self) -> int:
        """From the first to the last reading."""
        return max(1, self.windows[-1].end_ns - self.windows[0].start_ns)

    @property
    def packets_per_second(self) -> int:
        """Packets as the qdisc sees them: with GSO one is many frames."""
        return self.packets * _NS_PER_S // self.duration_ns

    @property
    def bits_per_second(self) -> int:
        """On the wire, headers of every frame included."""
        return sum(window.wire_bytes for window in self.windows) * 8 * _NS_PER_S // self.duration_ns

    @property
    def cpu_seconds_per_gbit(self) -> float:
        """CPU seconds for 10^9 bit on the wire."""
        return self.load_ns / max(1, sum(window.wire_bytes for window in self.windows) * 8)

    @property
    def cores_permille(self) -> int:
        """Thousandths of a core that the load and its packets took, the senders included."""
        return self.load_ns * 1_000 // self.duration_ns

    @property
    def ns_per_packet(self) -> int:
        """CPU time of one packet, the sender's own included."""
        return self.load_ns // max(1, self.packets)

    @property
    def worst_mbps(self) -> float:
        """The fastest window."""
        return max(window.mbps for window in self.windows)

    def of_limit_permille(self) -> int | None:
        """Return the rate in thousandths of the limit; None without one."""
        return self.bits_per_second * 1_000 // self.limit.bits_per_second if self.limit else None

    def worst_of_limit_permille(self) -> int | None:
        """Return the fastest window in thousandths of the limit; None without one."""
        return round(self.worst_mbps * 10**9 / self.limit.bits_per_second) if self.limit else None


def windows_of(readings: Sequence[tuple[int, int]]) -> tuple[Window, ...]:
    """Return the windows between readings of a time and a counter of bytes."""
    return tuple(Window(a[0], b[0], b[1] - a[1]) for a, b in itertools.pairwise(readings))


@dataclass(frozen=True, slots=True)
class MadeOf:
    """What a form was made of here, or why it is left out."""

    form: str
    words: str
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What it was measured on. many is the number of senders that push at once."""

    kernel: str
    cpus: int
    many: int

    @classmethod
    def here(cls, *, cpus: int, many: int) -> Machine:
        """Return this one."""
        return cls(platform.release(), cpus, many)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run measured. mtu_bytes and gso_bytes are the wire bytes of a frame and of a large buffer."""

    rate: Rate
    tenants: int
    streams: int
    duration_ms: int
    machine: Machine
    mtu_bytes: int
    gso_bytes: int
    made_of: tuple[MadeOf, ...]
    points: tuple[Point, ...]

    def find(self, form: str, *, wire_bytes: int, senders: int, is_limited: bool) -> Point | None:
        """Return a point of the run."""
        wanted = (form, wire_bytes, senders, is_limited)
        return next((p for p in self.points if (p.form, p.wire_bytes, p.senders, p.limit is not None) == wanted), None)
