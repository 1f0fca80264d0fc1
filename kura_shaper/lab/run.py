"""One whole run of the lab: it stands, it is measured, it is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.options import BandwidthLimit
from kura_shaper.lab.apply import apply_tree
from kura_shaper.lab.report import Report, make_report
from kura_shaper.lab.scenarios import LabSettings, Run, Scenario, run_scenarios
from kura_shaper.lab.topology import Lab
from kura_shaper.lab.world import World, lab_spec, lab_tenants
from kura_shaper.tree.model import Shape
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TX_QUEUES = 4
_LEAST_CEILING, _MOST_STREAMS = Rate(5_000_000), 64
_DURATION_S = (0.5, 600.0)


def lab_settings(
    *,
    ceiling: Rate,
    budget: Rate,
    streams: str,
    duration_s: float,
    scenarios: Sequence[str],
    shape: Shape = Shape.SINGLE,
) -> LabSettings:
    """Return checked settings. Raises UsageError that names the option."""
    if ceiling < _LEAST_CEILING:
        raise UsageError(f"--ceiling {ceiling} is too low to be measured in 100 ms", remedy=f"use {_LEAST_CEILING} up")
    if budget < ceiling.scaled(3, 2):
        raise UsageError(f"--budget {budget} is below 1.5 times the ceiling", remedy="then floors can't be told apart")
    if not _DURATION_S[0] <= duration_s <= _DURATION_S[1]:
        raise UsageError(f"--duration {duration_s} is out of range", remedy="use 0.5 to 600 seconds")
    return LabSettings(
        ceiling=ceiling,
        budget=budget,
        streams=_streams(streams),
        duration_ms=round(duration_s * 1000),
        scenarios=tuple(_scenario(name) for name in scenarios),
        shape=shape,
    )


def _streams(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(n.isascii() and n.isdigit() and 1 <= int(n) <= _MOST_STREAMS for n in numbers):
        raise UsageError(f"--streams {text[:40]!r} is no list of numbers", remedy=f'1 to {_MOST_STREAMS}, e.g. "1,4,8"')
    return tuple(sorted({int(n) for n in numbers}))


def _scenario(name: str) -> Scenario:
    try:
        return Scenario(name)
    except ValueError:
        raise UsageError(f"--scenario {name[:40]!r} is unknown", remedy=f"one of {', '.join(Scenario)}") from None


def run_lab(settings: LabSettings, *, tell: Callable[[str], None], stay: Callable[[str], None] | None = None) -> Report:
    """Set the lab up, measure every point and judge them; only inside `run_isolated`.

    tell hears what is measured next. stay is called at the end with the name of the node's
    namespace; until it returns, the lab stands, with the tree in force and the gateway serving.
    """
    tenants = lab_tenants(settings.ceiling, settings.budget)
    with Lab(lab_spec(tenants, TX_QUEUES)) as lab:
        world = World(lab, tenants)
        world.start_servers()
        points = tuple(run_scenarios(Run(world, settings, tell)))
        if stay is not None:
            apply_tree(world, settings.budget, settings.shape)
            world.start_gateway(BandwidthLimit.OFF)
            stay(lab.topology.node.name)
        return make_report(settings, tenants, points)
