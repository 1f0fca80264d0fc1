"""What must not be done, said before anything is touched: each refusal names its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import HtbQdisc, OtherQdisc

if TYPE_CHECKING:
    from kura_shaper.tree.model import Tree
    from kura_shaper.tree.snapshot import Snapshot

_OUR_DEFAULTS = frozenset({ReservedClass.HOST, ReservedClass.UNKNOWN})


class Permission(Flag):
    """What an operator allowed beyond the ordinary."""

    NONE = 0
    DISRUPTION = auto()
    TAKE_OVER = auto()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a plan may not run. code is stable."""

    code: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def is_ours(root: HtbQdisc | OtherQdisc | None, wanted: HtbQdisc) -> bool:
    """Whether a root qdisc is of our making: an HTB with our handle and one of our default classes."""
    return isinstance(root, HtbQdisc) and root.handle == wanted.handle and root.default_minor in _OUR_DEFAULTS


def preflight(tree: Tree, actual: Snapshot, permission: Permission) -> tuple[Refusal, ...]:
    """Return every reason not to bring this tree onto that device. Empty: go ahead."""
    return (*_device_refusals(actual), *_root_refusals(tree, actual, permission))


def _device_refusals(actual: Snapshot) -> tuple[Refusal, ...]:
    device = actual.device
    if device.is_loopback:
        return (Refusal("loopback", f"{device.name} is the loopback device", "name the device that bytes leave by"),)
    return ()


def _root_refusals(tree: Tree, actual: Snapshot, permission: Permission) -> tuple[Refusal, ...]:
    root, name = actual.root, actual.device.name
    if root is None or actual.has_default_root:
        return ()
    if not is_ours(root, tree.root):
        if Permission.TAKE_OVER in permission:
            return ()
        message = f"{name} has a root qdisc of somebody else's: {root.kind} {root.handle}"
        return (Refusal("foreign-root", message, "find its owner first, then --take-over replaces it"),)
    if root != tree.root and Permission.DISRUPTION not in permission:
        message = f"the root qdisc of {name} was made with other parameters and can't be changed in place"
        return (Refusal("rebuild-needed", message, "--allow-disruption rebuilds it and drops what is queued"),)
    return ()
