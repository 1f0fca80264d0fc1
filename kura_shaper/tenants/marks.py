"""Class ids and how a firewall mark carries one.

A mark is a class id under a mask: class id = (mark & mask) >> shift. That is why one
constant program classifies every tenant (`kernel.classifier`), and why the same
number stands in the tenants document, in the gateway's marks and in the tree.

Ids below 0x100 belong to this product and name the parts of every tree. Ids
0x100..0xfffe belong to tenants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

TENANT_CLASS_MIN = 0x100
TENANT_CLASS_MAX = 0xFFFE
DEFAULT_MASK = 0xFFFF0000


class ReservedClass(IntEnum):
    """Class ids that every tree has; only GATEWAY is ever carried by a mark."""

    ROOT = 0x01
    HOST = 0x02
    BUDGET = 0x03
    GATEWAY = 0x10
    UNATTRIBUTED = 0x11
    UNKNOWN = 0x12


# The ids after those: one for each shaped queue, which only the frames that prove steering ever carry.
PROOF_CLASS = 0x20
SHAPED_QUEUES_MAX = 16


@dataclass(frozen=True, slots=True)
class MarkUser:
    """Software that is known to use bits of the firewall mark, and which ones."""

    name: str
    mask: int
    on_every_node: bool

    def __str__(self) -> str:
        return self.name


# Source: the public registry of bitwise fwmark users (github.com/fwmark/registry) and the
# users' own documentation. Cilium is listed there with 0xffff1fff: its upper half is an
# identity that counts only beside a magic value in 0x0f00, bits that our marks leave 0, so
# what must stay free on every node is the magic and kube-proxy's two bits.
KNOWN_MARK_USERS: tuple[MarkUser, ...] = (
    MarkUser("kube-proxy", 0x0000C000, on_every_node=True),
    MarkUser("cilium", 0x00001FFF, on_every_node=True),
    MarkUser("aws-vpc-cni", 0x00000080, on_every_node=False),
    MarkUser("cni-portmap", 0x00002000, on_every_node=False),
    MarkUser("calico", 0xFFFF0000, on_every_node=False),
    MarkUser("weave", 0x00060000, on_every_node=False),
    MarkUser("tailscale", 0x000C0000, on_every_node=False),
)


@dataclass(frozen=True, slots=True)
class MarkLayout:
    """Which contiguous bits of the 32-bit mark carry the class id.

    Raises UsageError when the mask is not one run of bits wide enough for a tenant's id.
    """

    mask: int = DEFAULT_MASK

    def __post_init__(self) -> None:
        if not 0 < self.mask <= 0xFFFFFFFF:
            raise UsageError(f"mask {self.mask:#x} is not a 32-bit mask", remedy="use 0xffff0000")
        run = self.mask >> self.shift
        if run & (run + 1):
            raise UsageError(f"mask {self.mask:#010x} has gaps", remedy="use one run of bits, e.g. 0xffff0000")
        if not TENANT_CLASS_MIN <= run <= 0xFFFF:
            raise UsageError(
                f"mask {self.mask:#010x} is {run.bit_length()} bits wide", remedy="a class id needs 9 to 16 bits"
            )

    @property
    def shift(self) -> int:
        """Number of bits below the mask."""
        return (self.mask & -self.mask).bit_length() - 1

    @property
    def class_id_max(self) -> int:
        """Largest tenant class id that a mark can carry."""
        return min(self.mask >> self.shift, TENANT_CLASS_MAX)

    def mark(self, class_id: int) -> int:
        """Return the 32-bit mark of a class id. Raises UsageError when it does not fit the mask."""
        if not 0 < class_id <= self.mask >> self.shift:
            raise UsageError(f"class {class_id:#x} does not fit mask {self.mask:#010x}", remedy="use a smaller class")
        return class_id << self.shift

    def class_id(self, mark: int) -> int:
        """Return the class id in a mark; 0 when it carries none."""
        return (mark & self.mask) >> self.shift

    def overlaps(self) -> tuple[MarkUser, ...]:
        """Known users of the firewall mark whose bits this layout also writes."""
        return tuple(user for user in KNOWN_MARK_USERS if user.mask & self.mask)


def known_mark_user(name: str) -> MarkUser:
    """Return the known user of the firewall mark of that name. Raises UsageError that lists them all."""
    for user in KNOWN_MARK_USERS:
        if user.name == name:
            return user
    known = ", ".join(user.name for user in KNOWN_MARK_USERS)
    raise UsageError(f"{name[:64]!r} is no known user of the firewall mark", remedy=f"known: {known}")


def require_free_bits(
    layout: MarkLayout, *, neighbours: Collection[MarkUser] = (), acknowledged: Collection[MarkUser] = ()
) -> None:
    """Raise UsageError when the layout writes bits that other software on the nodes needs.

    A user that is on every node is always in the way. A neighbour, which is a known user that
    runs on these nodes, is in the way until somebody acknowledges it.
    """
    for user in layout.overlaps():
        clash = f"mask {layout.mask:#010x} writes bits of {user} ({user.mask:#010x})"
        if user.on_every_node:
            raise UsageError(f"{clash}, which is on every node", remedy="use 0xffff0000")
        if user in neighbours and user not in acknowledged:
            remedy = f"choose other bits, or add {user} to marks.acknowledge once it leaves these alone"
            raise UsageError(f"{clash}, a neighbour on these nodes", remedy=remedy)
