"""The checks, in the order that they are reported in, and every finding that they can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.verify.checks import after, byways, gateway, identities, live, node, rates, tree, wire

if TYPE_CHECKING:
    from kura_shaper.verify.values import Check, Code

CHECKS: tuple[Check, ...] = (
    *tree.CHECKS,
    *node.CHECKS,
    *byways.CHECKS,
    *gateway.CHECKS,
    *identities.CHECKS,
    *rates.CHECKS,
    *wire.CHECKS,
    *live.CHECKS,
    *after.CHECKS,
)


def codes() -> dict[str, Code]:
    """Return every kind of finding by its name."""
    return {code.name: code for check in CHECKS for code in check.codes}
