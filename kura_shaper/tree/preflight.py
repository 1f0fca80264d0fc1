"""What must not be done, said before anything is touched: each refusal names its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.devices import device_problems
from kura_shaper.tree.model import EGRESS, HTB_HANDLE, MQ_HANDLE, HtbQdisc, Leaf, MqQdisc, OtherQdisc, is_htb_of_queue
from kura_shaper.tree.steer import OUR_HOOK_PRIORITIES, is_ours_at_hook

if TYPE_CHECKING:
    from kura_shaper.tree.model import Handle, Root, Tree
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


def is_ours(root: Root) -> bool:
    """Whether a root qdisc is of our making: one with our handle, and an HTB with one of our default classes."""
    if isinstance(root, HtbQdisc):
        return root.handle == HTB_HANDLE and root.default_minor in _OUR_DEFAULTS
    return isinstance(root, MqQdisc) and root.handle == MQ_HANDLE


def preflight(tree: Tree, actual: Snapshot, permission: Permission) -> tuple[Refusal, ...]:
    """Return every reason not to bring this tree onto that device. Empty: go ahead."""
    problems = (Refusal(p.code, p.message, p.remedy) for p in device_problems(actual.device))
    return (*problems, *_root_refusals(tree, actual, permission), *_hook_refusals(tree, actual))


def _root_refusals(tree: Tree, actual: Snapshot, permission: Permission) -> tuple[Refusal, ...]:
    root, name = actual.root, actual.device.name
    if root is None or actual.has_default_root:
        return ()
    if not is_ours(root):
        if Permission.TAKE_OVER in permission:
            return ()
        message = f"{name} has a root qdisc of somebody else's: {root.kind} {root.handle}"
        return (Refusal("foreign-root", message, "find its owner first, then --take-over replaces it"),)
    if Permission.DISRUPTION in permission:
        return ()
    remedy = "--allow-disruption rebuilds it and drops what is queued"
    if type(root) is not type(tree.root):
        message = f"the tree of ours on {name} has another shape, which can't be changed in place"
        return (Refusal("rebuild-needed", message, remedy),)
    if root != tree.root:
        message = f"the root qdisc of {name} was made with other parameters and can't be changed in place"
        return (Refusal("rebuild-needed", message, remedy),)
    return tuple(
        Refusal("rebuild-needed", f"tx queue {place.minor - 1} of {name} has {_words(found)}, {problem}", remedy)
        for place, (found, problem) in misfits(tree, actual).items()
    )


def misfits(tree: Tree, actual: Snapshot) -> dict[Handle, tuple[HtbQdisc | Leaf | OtherQdisc, str]]:
    """Return what stands on a tx queue and keeps the tree from being as it should, and why. All goes, or it stays."""
    wanted = {qdisc.parent: qdisc for qdisc in tree.queues}
    taken = {leaf.handle for leaf in tree.leaves} | {htb.handle for htb in tree.htbs}
    found = {}
    for place, stands in actual.queues.items():
        shall = wanted.get(place)
        if isinstance(shall, HtbQdisc):
            if stands != shall and not is_default(stands):
                found[place] = (stands, "not our HTB")
        elif isinstance(stands, HtbQdisc) and is_htb_of_queue(stands):
            found[place] = (stands, "an HTB of ours, though it is not to be shaped")
        elif stands.handle in taken:
            found[place] = (stands, "a handle that belongs to a class of the tree")
    return found


def is_default(found: HtbQdisc | Leaf | OtherQdisc | None) -> bool:
    """Whether nobody chose what stands on a queue: nothing at all, which drops everything, or the kernel's own."""
    return found is None or (isinstance(found, OtherQdisc) and found.is_kernel_default)


def _words(found: HtbQdisc | Leaf | OtherQdisc) -> str:
    kind = found.parameters.kind if isinstance(found, Leaf) else found.kind
    return f"{kind} {found.handle}"


def _hook_refusals(tree: Tree, actual: Snapshot) -> tuple[Refusal, ...]:
    if not tree.has_hook:
        return ()
    name = actual.device.name
    if actual.hook is not None and actual.hook.kind != "clsact":
        message = f"{name} has a qdisc {actual.hook.kind}, which excludes the clsact that steering needs"
        return (Refusal("hook-taken", message, f"remove it (tc qdisc del dev {name} ingress), or use shape single"),)
    taken = {
        f.priority
        for f in actual.filters
        if f.parent == EGRESS and f.priority in OUR_HOOK_PRIORITIES and not is_ours_at_hook(f)
    }
    return tuple(
        Refusal(
            "hook-taken",
            f"filter prio {priority} on the egress hook of {name} is somebody else's",
            f"find its owner; steering needs the priorities {min(OUR_HOOK_PRIORITIES)} to {max(OUR_HOOK_PRIORITIES)}",
        )
        for priority in sorted(taken)
    )
