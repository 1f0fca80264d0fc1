"""The agent's metrics: built anew at each scrape from one reading of the kernel, so that nothing freezes.

What can't be read is absent, never zero. A tenant that left takes its series along. Labels
are bounded: devices, tenants and classes of this node, and kinds from fixed lists.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, SummaryMetricFamily

from kura_shaper import __version__
from kura_shaper.agent.keeper import DriftKind
from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel.disk import read_disks
from kura_shaper.kernel.retransmits import NO_TENANT
from kura_shaper.kernel.softnet import read_softnet
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.build import owners_of
from kura_shaper.tree.model import Shape
from kura_shaper.tree.observe import observe
from kura_shaper.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from kura_shaper.agent.view import AgentView, DeviceView
    from kura_shaper.clock import Clock

PREFIX = "kura_shaper_"
_SECOND_NS = 1e9
_NO_OWNER = {NO_TENANT: "unmarked"}
_CLASS_LABELS = ("device", "tenant", "class")
_REASON_CHARS = 120
# Name, words, and the field of ClassCounters.
_CLASS_COUNTERS = (
    ("class_sent_bytes", "Bytes that a class sent", "sent_bytes"),
    ("class_sent_packets", "Packets that a class sent", "sent_packets"),
    ("class_dropped_packets", "Packets that a class dropped", "dropped_packets"),
    ("class_overlimits", "Times that a class was over its limit", "overlimits"),
    ("class_lended", "Packets sent from a class's own rate", "lended"),
    ("class_borrowed", "Packets sent from a parent's rate", "borrowed"),
)


class AgentMetrics:
    """A collector of prometheus_client."""

    def __init__(self, view: AgentView, clock: Clock) -> None:
        self._view, self._clock = view, clock

    def collect(self) -> Iterator[Metric]:
        """Yield every series that is known at this moment."""
        yield InfoMetricFamily(f"{PREFIX}build", "This program", {"version": __version__})
        yield from self._agent()
        devices = tuple(self._view.devices.values())
        yield from _looks(devices, other_shapers=self._view.other_shapers)
        yield from self._readings(devices)
        yield from self._retransmits()
        yield from _node()

    def _agent(self) -> Iterator[Metric]:
        view, now_ns = self._view, self._clock.now_ns()
        yield _gauge("source_valid", "1 when the newest document can be used", view.told.is_valid)
        if view.told.current_at_ns:
            words = "Time since the document in use was last known to be the newest"
            yield _gauge("source_age_seconds", words, (now_ns - view.told.current_at_ns) / _SECOND_NS)
        yield _gauge("source_problems", "Things wrong with single tenants of the source", len(view.told.problems))
        yield _gauge("disabled", "1 while a marker holds the agent off", view.disabled is not None)
        yield _gauge("observing", "1 when the agent plans and never writes", view.observes)
        words = "1 when this node's budget is known; without it there is no tree"
        yield _gauge("budget_known", words, _has_budget(view))
        words = "Looks at everything, and the time that they took"
        yield SummaryMetricFamily(
            f"{PREFIX}reconcile_seconds", words, count_value=view.looks, sum_value=view.looks_seconds
        )
        wakes = CounterMetricFamily(f"{PREFIX}wakes", "What woke the agent", labels=["reason"])
        for reason, count in sorted(view.wakes.items()):
            wakes.add_metric([reason], count)
        yield wakes

    def _readings(self, devices: tuple[DeviceView, ...]) -> Iterator[Metric]:
        found = [(device, device.reader.read()) for device in devices]
        readings = [(device, actual) for device, actual in found if isinstance(actual, Snapshot)]
        age = _family("snapshot_age_seconds", "Age of the reading that this scrape shows", "device")
        for device, actual in readings:
            age.add_metric([device.device.name], (self._clock.now_ns() - actual.taken_at_ns) / _SECOND_NS)
        yield age
        yield from _classes(readings, self._view)
        yield from _trees(readings, self._view)
        yield from self._windows(devices)

    def _windows(self, devices: tuple[DeviceView, ...]) -> Iterator[Metric]:
        owners = _owners(self._view)
        words = "Highest rate in a short window of the last minute"
        fastest = _family("class_window_max_bits_per_second", words, *_CLASS_LABELS)
        whole = _family("device_window_max_bits_per_second", words, "device")
        window = _family("window_seconds", "How long such a window is now", "device")
        outside = CounterMetricFamily(
            f"{PREFIX}outside_bytes", "Bytes that left the device and passed no class of the tree", labels=["device"]
        )
        sent = CounterMetricFamily(f"{PREFIX}device_sent_bytes", "Bytes that the device sent", labels=["device"])
        now_ns = self._clock.now_ns()
        for device in devices:
            name, sampler = device.device.name, device.sampler
            with sampler.lock:
                sampled = sampler.sampled
                for classid, one in sampled.windows.classes.items():
                    rate = one.highest(now_ns)
                    if rate is not None:
                        fastest.add_metric([name, owners.get(classid.minor, ""), str(classid)], rate)
                rate = sampled.windows.device.highest(now_ns)
                if rate is not None:
                    whole.add_metric([name], rate)
                window.add_metric([name], sampled.window_ns / _SECOND_NS)
                if sampled.newest is not None and sampled.is_fresh(now_ns):
                    outside.add_metric([name], sampled.outside.total_bytes)
                    sent.add_metric([name], sampled.newest.device_bytes)
        yield from (fastest, whole, window, outside, sent)

    def _retransmits(self) -> Iterator[Metric]:
        counter = self._view.retransmits
        if counter is None:
            return
        owners = _owners(self._view)
        way = _family("retransmit_way_info", "How retransmits are counted", "way")
        way.add_metric([counter.way], 1)
        yield way
        found = CounterMetricFamily(
            f"{PREFIX}tenant_tcp_retransmits", "TCP segments sent again, by whose they were", labels=["tenant"]
        )
        try:
            counts = counter.read()
        except (KuraShaperError, OSError):
            return
        by_owner: dict[str, int] = {}
        for class_id, count in counts.items():
            owner = owners.get(class_id) or _NO_OWNER.get(class_id, "other")
            by_owner[owner] = by_owner.get(owner, 0) + count
        for owner, count in sorted(by_owner.items()):
            found.add_metric([owner], count)
        yield found


def _looks(devices: tuple[DeviceView, ...], *, other_shapers: tuple[str, ...]) -> Iterator[Metric]:
    """Yield what the looks came to: counts since the start, and the state after the last."""
    installs = CounterMetricFamily(f"{PREFIX}installs", "Trees that were made where there was none", labels=["device"])
    changes = CounterMetricFamily(f"{PREFIX}changes", "Changes that were asked for", labels=["device"])
    repairs = CounterMetricFamily(f"{PREFIX}repairs", "Looks that mended drift", labels=["device"])
    words = "Parts of a tree that nobody asked to be different"
    drift = CounterMetricFamily(f"{PREFIX}drift", words, labels=["device", "kind"])
    in_step = _family("in_step", "1 when the device was as wanted at the last look", "device")
    pending = _family("pending_operations", "What is still to be done, or would be", "device")
    budget = _family("device_budget_bits_per_second", "The budget that is wanted", "device")
    shape = _family("shape_info", "The shape of the tree, and why", "device", "shape", "reason")
    steering = _family("steering_ok", "1 when packets were proven to come to their queue", "device")
    foreign = _family("foreign_owner", "1 for whoever else has a hand on the device", "device", "kind")
    for device in devices:
        name, tally, looked = device.device.name, device.keeper.tally, device.looked
        installs.add_metric([name], tally.installs)
        changes.add_metric([name], tally.changes)
        repairs.add_metric([name], tally.repairs)
        for kind in DriftKind:
            drift.add_metric([name, kind], tally.drift[kind])
        if device.budget is not None:
            budget.add_metric([name], device.budget.bits_per_second)
        if looked is None:
            continue
        in_step.add_metric([name], float(looked.verdict.is_well))
        pending.add_metric([name], looked.pending)
        if looked.shape is not None:
            shape.add_metric([name, looked.shape, looked.why_shape[:_REASON_CHARS]], 1)
        is_proven = bool(looked.proof and looked.proof.is_proven)
        steering.add_metric([name], float(looked.shape is not Shape.MQ or is_proven))
        for owner in (*looked.foreign, *other_shapers):
            foreign.add_metric([name, owner], 1)
    yield from (installs, changes, repairs, drift, in_step, pending, budget, shape, steering, foreign)


def _classes(readings: list[tuple[DeviceView, Snapshot]], view: AgentView) -> Iterator[Metric]:
    owners = _owners(view)
    counters = [
        CounterMetricFamily(f"{PREFIX}{name}", words, labels=_CLASS_LABELS) for name, words, _ in _CLASS_COUNTERS
    ]
    backlog = _family("class_backlog_bytes", "Bytes that wait in a class", *_CLASS_LABELS)
    rate = _family("class_rate_bits_per_second", "A class's floor, as the kernel has it", *_CLASS_LABELS)
    ceil = _family("class_ceil_bits_per_second", "A class's ceiling, as the kernel has it", *_CLASS_LABELS)
    for device, actual in readings:
        for classid, spec in actual.classes.items():
            found = actual.counters.get(classid)
            if found is None:
                continue
            labels = [device.device.name, owners.get(classid.minor, ""), str(classid)]
            for family, (_, _, field) in zip(counters, _CLASS_COUNTERS, strict=True):
                family.add_metric(labels, getattr(found, field))
            backlog.add_metric(labels, found.backlog_bytes)
            rate.add_metric(labels, spec.floor.bits_per_second)
            ceil.add_metric(labels, spec.ceil.bits_per_second)
    yield from (*counters, backlog, rate, ceil)


def _trees(readings: list[tuple[DeviceView, Snapshot]], view: AgentView) -> Iterator[Metric]:
    present = _family("config_present", "1 when a whole tree of ours is on the device", "device")
    direct = CounterMetricFamily(f"{PREFIX}direct_packets", "Packets that passed an HTB by", labels=["device"])
    unattributed = CounterMetricFamily(
        f"{PREFIX}unattributed_bytes", "Payload that left the gateway's ports without a mark", labels=["device"]
    )
    # What was promised, not what the kernel has: there they are scaled to fit, and would never show as too many.
    floors = _family("device_floor_sum_bits_per_second", "Sum of the floors that tenants were promised", "device")
    for device, actual in readings:
        name = device.device.name
        seen = observe(actual, None)
        present.add_metric([name], float(seen.is_ours and not seen.drift))
        if not seen.is_ours:
            continue
        direct.add_metric([name], actual.direct_packets)
        strays = (c for classid, c in actual.counters.items() if classid.minor == ReservedClass.UNATTRIBUTED)
        unattributed.add_metric([name], sum(found.sent_bytes for found in strays))
        if view.told.document is not None:
            promised = (tenant.floor.bits_per_second for tenant in view.told.document.tenants)
            floors.add_metric([name], sum(promised))
    yield from (present, direct, unattributed, floors)


# Name, words, and the property of DiskCounters.
_DISK_COUNTERS = (
    ("disk_reads", "Reads that a disk completed", "reads"),
    ("disk_read_bytes", "Bytes read from a disk", "read_bytes"),
    ("disk_read_seconds", "Time that all reads of a disk took", "read_seconds"),
    ("disk_writes", "Writes that a disk completed", "writes"),
    ("disk_written_bytes", "Bytes written to a disk", "written_bytes"),
    ("disk_write_seconds", "Time that all writes to a disk took", "written_seconds"),
    ("disk_busy_seconds", "Time that any request of a disk was under way", "busy_seconds"),
)


def _node() -> Iterator[Metric]:
    """Yield what no tree sees: packets lost before it, and the disks that a cache reads from."""
    with suppress(KuraShaperError):
        softnet = read_softnet()
        words = "Packets dropped because a processor's queue was full"
        yield CounterMetricFamily(f"{PREFIX}softnet_dropped", words, value=softnet.dropped_packets)
        words = "Times that a processor ran out of its share before its queue was empty"
        yield CounterMetricFamily(f"{PREFIX}softnet_squeezed", words, value=softnet.squeezed)
    with suppress(KuraShaperError):
        disks = read_disks().disks
        for name, words, field in _DISK_COUNTERS:
            family = CounterMetricFamily(f"{PREFIX}{name}", words, labels=["device"])
            for disk in disks:
                family.add_metric([disk.name], getattr(disk, field))
            yield family


def _owners(view: AgentView) -> dict[int, str]:
    document = view.told.document
    return dict(owners_of(document)) if document else {}


def _has_budget(view: AgentView) -> bool:
    return any(device.budget is not None for device in view.devices.values())


def _family(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", words, labels=labels)


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", words, value=float(value))
