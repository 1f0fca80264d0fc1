"""Options that several commands share, each also an environment variable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kura_shaper.errors import QuantityError, UsageError
from kura_shaper.kernel.journal import DEFAULT_STATE_DIRECTORY
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.tree.model import HostTraffic, LeafKind
from kura_shaper.tree.model import Shape as ShapeInForce
from kura_shaper.units import Rate

TenantsFile = Annotated[
    Path, typer.Option("--tenants", metavar="F", help="The tenants document.", envvar="KURA_SHAPER_TENANTS")
]
OverlayFile = Annotated[
    Path | None,
    typer.Option(
        "--overlay",
        metavar="F",
        help="Other ports and names of the gateway, for one beside an old one.",
        envvar="KURA_SHAPER_OVERLAY",
    ),
]
DeviceName = Annotated[
    str, typer.Option("--device", metavar="D", help="The device that bytes leave by.", envvar="KURA_SHAPER_DEVICE")
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget", metavar="R", help="The node's egress budget, bit/s, e.g. 3G.", envvar="KURA_SHAPER_BUDGET"
    ),
]
Shape = Annotated[ShapeChoice, typer.Option(help="How the tree sits on the device.", envvar="KURA_SHAPER_SHAPE")]
ShapedQueues = Annotated[
    int,
    typer.Option(
        "--shaped-queues",
        metavar="N",
        help="In shape mq, how many tx queues hold tenants.",
        envvar="KURA_SHAPER_SHAPED_QUEUES",
    ),
]
Leaf = Annotated[LeafKind, typer.Option(help="The qdisc below each tenant's class.", envvar="KURA_SHAPER_LEAF")]
HostTrafficChoice = Annotated[
    HostTraffic,
    typer.Option(
        "--host-traffic",
        help="Host traffic beside the budget, or under it.",
        envvar="KURA_SHAPER_HOST_TRAFFIC",
    ),
]
HostReserve = Annotated[
    str,
    typer.Option("--host-reserve", metavar="R", help="Floor of host traffic.", envvar="KURA_SHAPER_HOST_RESERVE"),
]
# For `status`: what is not given is taken as it is in force.
WantedTenants = Annotated[
    Path | None,
    typer.Option("--tenants", metavar="F", help="Show drift against this document.", envvar="KURA_SHAPER_TENANTS"),
]
WantedBudget = Annotated[
    str | None, typer.Option("--budget", metavar="R", help="The budget wanted.", envvar="KURA_SHAPER_BUDGET")
]
WantedShape = Annotated[ShapeInForce | None, typer.Option("--shape", help="The shape wanted.")]
WantedShapedQueues = Annotated[
    int | None,
    typer.Option("--shaped-queues", metavar="N", help="The shaped queues wanted.", envvar="KURA_SHAPER_SHAPED_QUEUES"),
]
WantedLeaf = Annotated[LeafKind | None, typer.Option("--leaf", help="The leaf wanted.", envvar="KURA_SHAPER_LEAF")]
WantedHostTraffic = Annotated[
    HostTraffic | None,
    typer.Option("--host-traffic", help="The place wanted for host traffic.", envvar="KURA_SHAPER_HOST_TRAFFIC"),
]
WantedHostReserve = Annotated[
    str | None,
    typer.Option("--host-reserve", metavar="R", help="The floor wanted for it.", envvar="KURA_SHAPER_HOST_RESERVE"),
]
StateDirectory = Annotated[
    Path,
    typer.Option("--state-dir", metavar="P", help="Where the former state is kept.", envvar="KURA_SHAPER_STATE_DIR"),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]

DEFAULT_STATE = DEFAULT_STATE_DIRECTORY
DEFAULT_RESERVE = "50M"


def rate_option(name: str, text: str) -> Rate:
    """Return an option's rate. Raises UsageError that names the option."""
    try:
        return Rate.parse(text)
    except QuantityError as error:
        raise UsageError(f"{name}: {error.message}", remedy=error.remedy) from error
