"""Looks at one device by its name, whatever becomes of it; nothing of it is changed.

A look is a dump of the tree, and at one moment the device's own counter and those of the root
classes, so that what passes outside the tree can be told from what is under way.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from kura_shaper.agent.accounting import roots_of
from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.device_counters import DeviceCounters
from kura_shaper.kernel.dump import read_class
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.retransmits import Way, open_retransmit_counter
from kura_shaper.top.reading import NoReading, Reading, State
from kura_shaper.tree.observe import marks_in_force, observe
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.retransmits import RetransmitCounter
    from kura_shaper.tenants.marks import MarkLayout
    from kura_shaper.tree.model import Device, Handle

# To compile a program takes seconds and headers, which nobody who wants to look at a node should wait for.
_WAYS = (Way.TRACEPOINT, Way.INET_DIAG)


def _open_retransmits(marks: MarkLayout) -> RetransmitCounter:
    return open_retransmit_counter(marks, ways=_WAYS)


class DeviceWatch:
    """Reads a device again and again; a context manager, for one thread.

    `retransmits_note` says how retransmits are counted where that isn't exactly, or why they aren't; "" else.
    """

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        open_retransmits: Callable[[MarkLayout], RetransmitCounter] = _open_retransmits,
    ) -> None:
        self.retransmits_note = ""
        self._name, self._clock, self._open_retransmits = name, clock, open_retransmits
        self._client: TcClient | None = None
        self._device: Device | None = None
        self._counters: DeviceCounters | None = None
        self._counter: RetransmitCounter | None = None
        self._counted_by: MarkLayout | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open."""
        for each in (self._client, self._counters, self._counter):
            if each is not None:
                each.close()

    def read(self) -> Reading | NoReading:
        """Return what is on the device now."""
        try:
            device = self._find()
            if device is None:
                return self._gone()
            if self._client is None:
                self._client = TcClient()
            actual = KernelTrafficControl(self._client, device, clock=self._clock).snapshot()
            if isinstance(actual, Unknown):
                # It may have gone away meanwhile, which is no failure to read it.
                is_there = self._index() == device.ifindex
                return self._nothing(State.UNKNOWN, actual.reason) if is_there else self._gone()
            return self._reading(self._client, actual)
        except (KuraShaperError, OSError) as error:
            return self._nothing(State.UNKNOWN, str(error))

    def _reading(self, client: TcClient, actual: Snapshot) -> Reading | NoReading:
        seen = observe(actual, None)
        if not seen.is_ours:
            root = f"{actual.root.kind} {actual.root.handle}" if actual.root else "none"
            return self._nothing(State.NO_TREE, f"no tree of ours; the root qdisc is {root}")
        device_bytes, roots = self._at_one_moment(client, actual)
        return Reading(
            snapshot=actual,
            faults=(*(seen.steering.faults if seen.steering else ()), *seen.drift),
            device_bytes=device_bytes,
            roots=roots,
            retransmits=self._retransmits(marks_in_force(actual)),
        )

    def _find(self) -> Device | None:
        """Return the device that has the name now, None when none has."""
        index = self._index()
        if index is None:
            self._forget()
            return None
        if self._device is None or self._device.ifindex != index:
            self._forget()
            self._device = read_device(self._name)
            # Without its counters the tree's own are still worth a look.
            with suppress(KuraShaperError, OSError):
                self._counters = DeviceCounters(self._name, self._device.ifindex)
        return self._device

    def _index(self) -> int | None:
        try:
            return socket.if_nametoindex(self._name)
        except OSError:
            return None

    def _forget(self) -> None:
        self._device = None
        if self._counters is not None:
            self._counters.close()
            self._counters = None

    def _at_one_moment(self, client: TcClient, actual: Snapshot) -> tuple[int | None, Mapping[Handle, int]]:
        """Return the device's counter and the root classes' as close together as can be."""
        if self._counters is None:
            return None, {}
        try:
            classids = roots_of({classid: found.sent_bytes for classid, found in actual.counters.items()})
            index = actual.device.ifindex
            roots = {classid: read_class(client, index, classid).counters.sent_bytes for classid in classids}
            return self._counters.read().bytes, roots
        except (KuraShaperError, OSError):
            return None, {}

    def _retransmits(self, marks: MarkLayout | None) -> dict[int, int] | None:
        if marks is None:
            return None
        if marks != self._counted_by:
            self._count_by(marks)
        if self._counter is None:
            return None
        try:
            return self._counter.read()
        except (KuraShaperError, OSError):
            return None

    def _count_by(self, marks: MarkLayout) -> None:
        if self._counter is not None:
            self._counter.close()
        self._counter, self._counted_by = None, marks
        try:
            self._counter = self._open_retransmits(marks)
        except (KuraShaperError, OSError) as error:
            self.retransmits_note = f"{error}"
        else:
            exact = f"retransmits are a lower bound, by {self._counter.way}"
            self.retransmits_note = exact if self._counter.is_lower_bound else ""

    def _gone(self) -> NoReading:
        return self._nothing(State.GONE, f"there is no device {self._name} now")

    def _nothing(self, state: State, reason: str) -> NoReading:
        return NoReading(self._clock.now_ns(), state, reason)
