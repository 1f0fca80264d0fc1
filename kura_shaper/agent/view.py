"""What an agent knows at a moment, as one value that its metrics, its health and its status page share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.agent.source import Told

if TYPE_CHECKING:
    from kura_shaper.agent.keeper import DeviceKeeper, Looked
    from kura_shaper.agent.marker import Disabled
    from kura_shaper.agent.reader import DeviceReader
    from kura_shaper.agent.sampler import Sampler
    from kura_shaper.kernel.retransmits import RetransmitCounter
    from kura_shaper.tree.model import Device
    from kura_shaper.units import Rate


@dataclass(slots=True)
class DeviceView:
    """One device that is kept: how the last look went, and who reads its counters."""

    device: Device
    keeper: DeviceKeeper
    reader: DeviceReader
    sampler: Sampler
    looked: Looked | None = None
    looked_at_ns: int = 0
    budget: Rate | None = None


@dataclass(slots=True)
class AgentView:
    """Everything that is told of an agent.

    `devices` are by name. `waiting_for` says why there is nothing to keep, "" when there is.
    `alive_at_ns` is when the loop last turned, `look_began_ns` when the look under way began, 0 between looks.
    """

    told: Told = field(default_factory=Told)
    devices: dict[str, DeviceView] = field(default_factory=dict)
    disabled: Disabled | None = None
    observes: bool = False
    waiting_for: str = "the first look"
    alive_at_ns: int = 0
    look_began_ns: int = 0
    looks: int = 0
    looks_seconds: float = 0.0
    wakes: Counter[str] = field(default_factory=Counter)
    retransmits: RetransmitCounter | None = None
    problems: tuple[str, ...] = ()
    other_shapers: tuple[str, ...] = ()
