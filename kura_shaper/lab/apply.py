"""The lab uses the product as an operator does: by its command, in the node's namespace."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError
from kura_shaper.lab.isolation import SCRATCH_DIR, inside
from kura_shaper.lab.topology import NIC

if TYPE_CHECKING:
    from kura_shaper.lab.world import World
    from kura_shaper.tree.model import Shape
    from kura_shaper.units import Rate

_TIMEOUT_S = 60


def apply_tree(world: World, budget: Rate, shape: Shape) -> None:
    """Run `kura-shaper apply` on the node's NIC. Raises RefusedError when it does not exit with 0."""
    options = (
        f"--tenants={world.document_path}",
        f"--device={NIC}",
        f"--budget={budget}",
        f"--shape={shape}",
        f"--state-dir={SCRATCH_DIR}",
    )
    argv = [sys.executable, "-m", "kura_shaper", "apply", *options]
    with inside(world.lab.topology.node.path):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise RefusedError(f"kura-shaper apply ended with {done.returncode} in the lab: {words}")
