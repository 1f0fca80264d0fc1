"""One reading of a device's qdiscs, classes and filters as a Snapshot, or Unknown.

What is not ours is kept by kind and handle and never stops a reading.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.kernel import decode, wire
from kura_shaper.kernel.client import DumpBrokenOffError
from kura_shaper.kernel.watch import ChangeWatch
from kura_shaper.tree.model import EGRESS, HOOK, INGRESS, ROOT, MqQdisc, htbs_of
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.tree.model import Device, Filter, Handle, HtbClass, HtbQdisc, Leaf, OtherQdisc, Root
    from kura_shaper.tree.snapshot import ClassCounters

_TRIES = 5


def read_snapshot(client: TcClient, device: Device, *, clock: Clock) -> Snapshot | Unknown:
    """Return what the kernel has on a device now; Unknown when it can't be read whole."""
    reason = ""
    try:
        for _ in range(_TRIES):
            with ChangeWatch(device.ifindex) as watch:
                try:
                    snapshot = _Reading(client, device).snapshot(clock.now_ns())
                except DumpBrokenOffError as error:
                    reason = str(error)
                    continue
                if not watch.saw_change():
                    return _plausible(snapshot)
                reason = "the tree, or the devices, changed during every reading"
    except (KuraShaperError, OSError) as error:
        return Unknown(str(error))
    except (LookupError, ValueError, struct.error) as error:
        return Unknown(f"the kernel's answer can't be understood: {type(error).__name__}: {error}")
    return Unknown(reason)


def read_class(client: TcClient, ifindex: int, classid: Handle) -> decode.Class:
    """Return one HTB class and its counters, without a walk over all the others.

    Raises KernelRefusedError when it is not there, StateUnknownError when it can't be read.
    """
    data = client.get(wire.class_request(ifindex, classid))
    try:
        found = decode.class_of(data, 0, len(data))
    except (LookupError, ValueError, struct.error) as error:
        raise StateUnknownError(f"the kernel's answer for class {classid} can't be understood: {error}") from error
    if found is None:
        raise StateUnknownError(f"class {classid} is not one of an HTB")
    return found


def read_counters(client: TcClient, ifindex: int, htbs: Sequence[Handle]) -> dict[Handle, ClassCounters]:
    """Return the counters of every class of these HTBs: one dump, and nothing else of the device.

    Cheap enough for ten times a second. A class that comes or goes meanwhile may be missing, or
    hide another for this once. Raises StateUnknownError and KernelRefusedError.
    """
    majors = frozenset(handle.major for handle in htbs)
    found: dict[Handle, ClassCounters] = {}

    def take(data: memoryview, start: int, end: int) -> None:
        one = decode.class_of(data, start, end)
        if one is not None and one.spec.classid.major in majors:
            found[one.spec.classid] = one.counters

    try:
        client.dump(wire.dump_request(wire.Message.GETTCLASS, ifindex, htbs[0].u32 if len(htbs) == 1 else 0), take)
    except (LookupError, ValueError, struct.error) as error:
        raise StateUnknownError(f"the kernel's classes can't be understood: {error}") from error
    return found


def _plausible(snapshot: Snapshot) -> Snapshot | Unknown:
    """A device that is up has a root qdisc, if only noqueue: not to have seen it is not to know."""
    if snapshot.root is None and snapshot.device.is_up:
        return Unknown(f"no root qdisc was seen on {snapshot.device.name}, though it is up")
    return snapshot


class _Reading:
    """The dumps of one snapshot."""

    def __init__(self, client: TcClient, device: Device) -> None:
        self._client = client
        self._device = device
        self._root: Root = None
        self._hook: OtherQdisc | None = None
        self._verbatim: list[OtherQdisc] = []
        # By the place that they hang in, which is a class, or an mq's queue.
        self._below: dict[Handle, Leaf | OtherQdisc] = {}
        self._htbs: dict[Handle, tuple[HtbQdisc, int]] = {}
        self._majors: frozenset[int] = frozenset()
        self._classes: dict[Handle, HtbClass] = {}
        self._counters: dict[Handle, ClassCounters] = {}
        self._filters: list[Filter] = []

    def snapshot(self, taken_at_ns: int) -> Snapshot:
        self._client.dump(wire.dump_request(wire.Message.GETQDISC), self._qdisc)
        index = self._device.ifindex
        root: Root = self._htbs[ROOT][0] if ROOT in self._htbs else self._root
        queues = self._queues(root)
        htbs = htbs_of(root, queues.values())
        self._majors = frozenset(htb.handle.major for htb in htbs)
        if htbs:
            # Of one HTB only its own classes; else those of all qdiscs in one go.
            above = htbs[0].handle.u32 if len(htbs) == 1 else 0
            self._client.dump(wire.dump_request(wire.Message.GETTCLASS, index, above), self._class)
        places = [htb.handle for htb in htbs]
        if self._hook is not None and self._hook.kind == "clsact":
            places += [INGRESS, EGRESS]
        for place in places:
            self._client.dump(wire.dump_request(wire.Message.GETTFILTER, index, place.u32), self._filter)
        return Snapshot(
            device=self._device,
            root=root,
            queues=queues,
            classes=self._classes,
            leaves={place: leaf for place, leaf in self._below.items() if place in self._classes},
            filters=tuple(sorted(self._filters, key=lambda f: f.key)),
            verbatim=tuple(self._verbatim),
            counters=self._counters,
            hook=self._hook,
            direct_packets=sum(self._htbs[htb.parent][1] for htb in htbs),
            taken_at_ns=taken_at_ns,
        )

    def _queues(self, root: Root) -> dict[Handle, HtbQdisc | Leaf | OtherQdisc]:
        """Return what hangs below an mq root of somebody's choice."""
        if not isinstance(root, MqQdisc):
            return {}
        below = {place: found for place, found in self._below.items() if place.major == root.handle.major}
        return below | {place: htb for place, (htb, _) in self._htbs.items() if place in below}

    def _qdisc(self, data: memoryview, start: int, end: int) -> None:
        # The kernel ignores the device in a request for qdiscs, so it is chosen here.
        if wire.TCMSG.unpack_from(data, start)[1] != self._device.ifindex:
            return
        found = decode.qdisc_of(data, start, end)
        if found is None:
            return
        other = found.verbatim
        self._verbatim.append(other)
        if other.parent == HOOK:
            self._hook = other
            return
        if other.kind == "htb":
            self._htbs[other.parent] = decode.htb_of(data, start, end)
        if other.parent == ROOT:
            # The kernel's own mq has no handle, and says no more than any other default.
            self._root = MqQdisc(other.handle) if other.kind == "mq" and other.handle.major else other
            return
        self._below[other.parent] = found.leaf

    def _class(self, data: memoryview, start: int, end: int) -> None:
        found = decode.class_of(data, start, end)
        # Classes of an HTB that somebody hung below a class are not ours.
        if found is not None and found.spec.classid.major in self._majors:
            self._classes[found.spec.classid] = found.spec
            self._counters[found.spec.classid] = found.counters

    def _filter(self, data: memoryview, start: int, end: int) -> None:
        found = decode.filter_of(data, start, end)
        if found is not None:
            self._filters.append(found)
