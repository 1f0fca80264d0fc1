"""Reads a node: everything that stands still at once, then its counters for a while. It writes nothing.

The one thing that it sends are the few frames that prove the steering (see `kernel.prove`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.sessions import read_attribution
from kura_shaper.kernel import byways
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.device_counters import DeviceCounters
from kura_shaper.kernel.dump import read_counters, read_snapshot
from kura_shaper.kernel.links import egress_devices, read_device
from kura_shaper.kernel.processes import read_holders
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.kernel.sockets import read_connections, read_listeners, read_xdp_sockets
from kura_shaper.kernel.softnet import read_softnet
from kura_shaper.tenants.marks import SHAPED_QUEUES_MAX
from kura_shaper.tree.model import HTB_HANDLE, Handle, MqQdisc
from kura_shaper.tree.observe import marks_in_force
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.verify.after import read_boot
from kura_shaper.verify.observed import NodeReading, Sockets, Traffic
from kura_shaper.verify.track import Sample, Tracker

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kura_shaper.clock import Clock
    from kura_shaper.haproxy.master import Master
    from kura_shaper.haproxy.sessions import Attribution
    from kura_shaper.kernel.processes import Holders
    from kura_shaper.kernel.prove import Proof
    from kura_shaper.verify.observed import Question

_EVERY_HTB = tuple(Handle(HTB_HANDLE.major + queue) for queue in range(SHAPED_QUEUES_MAX))
# Where Cilium keeps the map of its bandwidth manager, and removes it from when that is turned off.
_THROTTLE_MAP = Path("/sys/fs/bpf/tc/globals/cilium_throttle")
_WAYS_MAX = 512

_T = TypeVar("_T")


class NodeReader:
    """Reads one device's node; a context manager. `gateway` answers for the gateway, None when there is none to ask."""

    def __init__(
        self,
        device_name: str,
        *,
        clock: Clock,
        gateway: Master | None = None,
        throttle_map: Path = _THROTTLE_MAP,
    ) -> None:
        """Raises UsageError when there is no such device, StateUnknownError when it can't be read."""
        self.device = read_device(device_name)
        self._clock, self._gateway, self._throttle_map = clock, gateway, throttle_map
        with ExitStack() as stack:
            self._client = stack.enter_context(TcClient())
            self._control = KernelTrafficControl(self._client, self.device, clock=clock)
            self._counters = stack.enter_context(DeviceCounters(self.device.name, self.device.ifindex))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, question: Question) -> NodeReading:
        """Return a reading. What can't be read is Unknown, with the reason."""
        snapshot = self._control.snapshot()
        ports = question.document.gateway.ports
        links = _or_unknown(byways.read_links)
        listeners = _or_unknown(lambda: read_listeners(ports))
        holders: Holders | Unknown = Unknown("the listeners are not known")
        if not isinstance(listeners, Unknown):
            inodes = frozenset(one.inode for one in listeners)
            holders = _or_unknown(lambda: read_holders(inodes))
        defaults = _or_unknown(egress_devices)
        hardware = links if isinstance(links, Unknown) else _or_unknown(lambda: byways.read_hardware_filters(links))
        return NodeReading(
            device=self.device if isinstance(snapshot, Unknown) else snapshot.device,
            snapshot=snapshot,
            proof=self._proof(snapshot),
            links=links,
            rules=_or_unknown(byways.read_mark_rules),
            port=_or_unknown(lambda: byways.read_port(self.device)),
            xdp_sockets=_or_unknown(read_xdp_sockets),
            hardware_filters=hardware,
            default_devices=defaults,
            other_trees=() if isinstance(defaults, Unknown) else tuple(filter(self._has_tree, defaults)),
            listeners=listeners,
            holders=holders,
            attribution=self._attribution(),
            bandwidth_manager=str(self._throttle_map) if _exists(self._throttle_map) else "",
            boot=read_boot(),
        )

    def watch(
        self,
        question: Question,
        *,
        duration_ns: int,
        window_ns: int,
        tell: Callable[[int], None] = lambda _: None,
        is_over: Callable[[], bool] = lambda: True,
    ) -> Traffic | Unknown:
        """Look at the counters for a while, and until is_over says so; tell how long it has been. Makes no traffic."""
        first = self._control.snapshot()
        if isinstance(first, Unknown):
            return first
        tracker = Tracker(self.device.gso_max_bytes)
        softnet = _or_unknown(read_softnet)
        try:
            start_ns = self._clock.now_ns()
            tracker.add(self._sample())
            before = self._sockets(question)
            while (passed_ns := self._clock.now_ns() - start_ns) < duration_ns or not is_over():
                tell(passed_ns)
                # From the end of the last sample, so that no two are closer than a window.
                self._clock.wait_ns(window_ns)
                tracker.add(self._sample())
            # The counters of the classes frame those of the sockets, so that what these sent is all in between.
            after = self._sockets(question)
            tracker.add(self._sample())
        except KuraShaperError as error:
            return Unknown(str(error))
        seen = tracker.traffic(start_ns, self._clock.now_ns(), window_ns)
        return replace(
            seen,
            direct_packets=_direct(first, self._control.snapshot()),
            before=before,
            after=after,
            ways=self._ways(after),
            softnet=softnet if isinstance(softnet, Unknown) else _or_unknown(lambda: (softnet, read_softnet())),
        )

    def _proof(self, snapshot: Snapshot | Unknown) -> Proof | None:
        if isinstance(snapshot, Unknown) or not is_ours(snapshot.root) or not isinstance(snapshot.root, MqQdisc):
            return None
        marks = marks_in_force(snapshot)
        return prove_steering(self._control, marks, clock=self._clock) if marks else None

    def _has_tree(self, name: str) -> bool:
        """Whether another device has a tree of ours. What can't be read has none that anybody could vouch for."""
        if name == self.device.name:
            return False
        other = _or_unknown(partial(read_device, name))
        found = other if isinstance(other, Unknown) else read_snapshot(self._client, other, clock=self._clock)
        return not isinstance(found, Unknown) and is_ours(found.root)

    def _attribution(self) -> Attribution | Unknown | None:
        gateway = self._gateway
        return None if gateway is None else _or_unknown(lambda: read_attribution(gateway))

    def _sockets(self, question: Question) -> Sockets | Unknown:
        connections = _or_unknown(lambda: read_connections(question.document.gateway.ports))
        return connections if isinstance(connections, Unknown) else Sockets(connections, self._attribution())

    def _sample(self) -> Sample:
        at_ns = self._clock.now_ns()
        device = self._counters.read()
        root = _or_unknown(lambda: byways.read_root_bytes(self._client, self.device.ifindex))
        read_ns = self._clock.now_ns()
        counters = read_counters(self._client, self.device.ifindex, _EVERY_HTB)
        return Sample(
            at_ns, read_ns, self._clock.now_ns(), device, None if isinstance(root, Unknown) else root, counters
        )

    def _ways(self, after: Sockets | Unknown) -> dict[str, int]:
        """Return the device that each peer is reached by, of those that were sent most."""
        if isinstance(after, Unknown):
            return {}
        ways: dict[str, int] = {}
        ranked = sorted(after.connections, key=lambda one: -(one.sent_bytes or 0))
        for one in islice((c for c in ranked if not c.peer.is_loopback), _WAYS_MAX):
            if str(one.peer) not in ways:
                found = _or_unknown(partial(byways.way_to, one.peer, mark=one.mark or 0))
                if not isinstance(found, Unknown):
                    ways[str(one.peer)] = found
        return ways


def _direct(first: Snapshot, last: Snapshot | Unknown) -> int:
    return 0 if isinstance(last, Unknown) else max(0, last.direct_packets - first.direct_packets)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _or_unknown(read: Callable[[], _T]) -> _T | Unknown:
    try:
        return read()
    except (KuraShaperError, OSError) as error:
        return Unknown(str(error))
