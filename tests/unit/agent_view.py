"""A view of an agent made by hand: devices whose readings, looks and samples a test chooses."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strategies import ETH0, case, kernel_with, tenant

from kura_shaper.agent.keeper import Looked, Tally, Verdict
from kura_shaper.agent.sampler import Sample, Sampled
from kura_shaper.agent.source import Told
from kura_shaper.agent.view import AgentView, DeviceView
from kura_shaper.tree.model import Device, Handle, Shape
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.clock import FakeClock

SECOND = 10**9
ACME, BETA = tenant(0x2A7), tenant(0x2B0)
FLEET = case(ACME, BETA)
ACME_CLASS = Handle(0x20, 0x2A7)
IN_STEP = Looked(Verdict.IN_STEP, shape=Shape.SINGLE, shaped_queues=1, why_shape="shape single: asked for")


@dataclass
class FakeKeeper:
    """What a view takes of a keeper."""

    tally: Tally = field(default_factory=Tally)


@dataclass
class FakeReader:
    """Returns a reading that a test chooses."""

    found: Snapshot | Unknown

    def read(self) -> Snapshot | Unknown:
        return self.found


@dataclass
class FakeSampler:
    """What a view takes of a sampler."""

    sampled: Sampled = field(default_factory=Sampled)
    lock: threading.Lock = field(default_factory=threading.Lock)


def reading(clock: FakeClock, device: Device = ETH0) -> Snapshot:
    """A reading of the fleet's tree with counters that all differ."""
    found = kernel_with(FLEET.wanted()).snapshot()
    counters = {
        classid: ClassCounters(*(1000 * number + field for field in range(8)))
        for number, classid in enumerate(sorted(found.classes), start=1)
    }
    return replace(found, device=device, counters=counters, direct_packets=7, taken_at_ns=clock.now_ns())


def device_view(clock: FakeClock, *, name: str = "eth0", looked: Looked | None = IN_STEP) -> DeviceView:
    """One device in step, sampled twice."""
    device = Device(name, 2)
    sampler = FakeSampler()
    for at, sent in ((0, 0), (1, 12_500_000)):
        counters = {ACME_CLASS: ClassCounters(sent_bytes=sent)}
        at_ns = clock.now_ns() - (1 - at) * SECOND
        sampler.sampled.newest = Sample(at_ns, counters, sent)
        sampler.sampled.windows.add(at_ns, {ACME_CLASS: sent}, sent)
    parts: Any = (FakeKeeper(), FakeReader(reading(clock, device)), sampler)
    made = DeviceView(device, *parts)
    made.looked, made.looked_at_ns, made.budget = looked, clock.now_ns(), Rate(3_000_000_000)
    return made


def agent_view(clock: FakeClock, **devices: DeviceView) -> AgentView:
    """An agent that works."""
    told = Told(FLEET.document, is_valid=True, current_at_ns=clock.now_ns())
    return AgentView(
        told=told, devices=devices or {"eth0": device_view(clock)}, waiting_for="", alive_at_ns=clock.now_ns(), looks=3
    )
