"""What is read while a load runs: the device's own counters, the root qdisc's drops, and the CPU that it takes.

The CPU of a load is what the machine did less what other processes did: that has the softirqs in it
wherever they ran, also on a CPU that was idle, however the kernel accounts for them.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyroute2 import IPRoute

from kura_shaper.errors import StateUnknownError
from kura_shaper.tree.model import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Reading:
    """The device's transmit counters at one moment of CLOCK_MONOTONIC."""

    at_ns: int
    sent_bytes: int
    sent_packets: int
    dropped_packets: int


class DeviceMeter:
    """Reads one device's counters in some ten microseconds: one RTM_GETSTATS. A context manager."""

    _REQUEST, _HEADER = struct.Struct("=IHHII BBHII"), struct.Struct("=IHHII")
    _RTM_NEWSTATS, _RTM_GETSTATS, _NLM_F_REQUEST, _FILTER_LINK_64 = 92, 94, 1, 1
    # nlmsghdr 16, if_stats_msg 12, rtattr 4; then rtnl_link_stats64, its receive counters left out.
    _COUNTERS = struct.Struct("=32x 8xQ 8xQ 8x8x 8xQ")

    def __init__(self, ifindex: int) -> None:
        self._request = self._REQUEST.pack(
            self._REQUEST.size, self._RTM_GETSTATS, self._NLM_F_REQUEST, 0, 0, 0, 0, 0, ifindex, self._FILTER_LINK_64
        )
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(1.0)

    def __enter__(self) -> DeviceMeter:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def read(self) -> Reading:
        """Return the counters now. Raises StateUnknownError when they can't be read."""
        before_ns = time.monotonic_ns()
        try:
            self._socket.send(self._request)
            reply = self._socket.recv(4_096)
        except OSError as error:
            raise StateUnknownError(f"the device's counters can't be read: {error}") from error
        at_ns = (before_ns + time.monotonic_ns()) // 2
        if self._HEADER.unpack_from(reply)[1] != self._RTM_NEWSTATS:
            raise StateUnknownError("the device's counters can't be read", remedy="is the device gone?")
        packets, sent_bytes, dropped = self._COUNTERS.unpack_from(reply)
        return Reading(at_ns, sent_bytes, packets, dropped)


def root_drops(ifindex: int) -> int:
    """Return what the root qdisc, with all below it, has dropped."""
    with IPRoute() as ip:
        roots: Iterable[Any] = [q for q in ip.get_qdiscs(index=ifindex) if q["parent"] == ROOT.u32]
        for qdisc in roots:
            stats = qdisc.get_attr("TCA_STATS2")
            queue = stats.get_attr("TCA_STATS_QUEUE") if stats else None
            return int(queue["drops"]) if queue else 0
    return 0


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU time since some moment, of all CPUs and of all processes that are not the load's."""

    at_ns: int
    cpus: int
    unused_ns: int
    others_ns: int

    def since(self, before: CpuReading) -> CpuUse:
        """Return what was used between two readings."""
        elapsed_ns = self.at_ns - before.at_ns
        busy_ns = max(0, elapsed_ns * self.cpus - (self.unused_ns - before.unused_ns))
        others_ns = min(max(0, self.others_ns - before.others_ns), busy_ns)
        return CpuUse(busy_ns - others_ns, others_ns * 1_000 // max(1, elapsed_ns * self.cpus))


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The load's CPU time, and how many of a thousand parts of the machine others used meanwhile."""

    load_ns: int
    others_permille: int


def read_cpu(own: Collection[int], proc: Path = Path("/proc")) -> CpuReading:
    """Return the machine's CPU time now. own are the load's processes."""
    tick_ns = _NS_PER_S // os.sysconf("SC_CLK_TCK")
    at_ns = time.monotonic_ns()
    lines = (proc / "stat").read_text(encoding="ascii").splitlines()
    _, _, _, idle, iowait, _, _, steal, *_ = (int(word) for word in lines[0].split()[1:])
    cpus = sum(line.startswith("cpu") for line in lines) - 1
    others = sum(_ticks_of(entry) for entry in _processes(proc) if entry.name not in {str(pid) for pid in own})
    return CpuReading(at_ns, cpus, (idle + iowait + steal) * tick_ns, others * tick_ns)


def _processes(proc: Path) -> Iterable[Path]:
    return (entry for entry in proc.iterdir() if entry.name.isdigit())


def _ticks_of(entry: Path) -> int:
    """Return what a process and the children that it has outlived have used.

    With the latter the sum over all processes does not shrink when one ends. What ksoftirqd does is the
    load's: it carries packets.
    """
    try:
        name, _, rest = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
    except OSError:
        return 0  # it ended just now, and its parent has its time
    return 0 if "(ksoftirqd" in name else sum(int(word) for word in rest.split()[11:15])
