"""What the fake kernel has beside its qdiscs: the tcx programs of its device, and the XPS of its queues."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kura_shaper.tree.ebpf import TcxProgram, TcxState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.tree.ebpf import EbpfProgram


@dataclass(slots=True)
class FakeBeside:
    """The values are replaced, never changed, so that a shallow copy is one of its own."""

    tcx: TcxState
    xps: Mapping[int, int] = field(default_factory=dict)
    _programs_loaded: int = 0

    def set_tcx(self, program: EbpfProgram) -> int:
        """Put our program first, in place of one that was there; return the errno of why not."""
        if not self.tcx.supported:
            return errno.EINVAL
        self.remove_tcx()
        self._attach_first(TcxProgram(self._next_id(), program.name, is_ours=True))
        return 0

    def remove_tcx(self) -> None:
        """Take our program away, where there is one."""
        self.tcx = replace(self.tcx, programs=tuple(found for found in self.tcx.programs if not found.is_ours))

    def attach_foreign(self, name: str) -> None:
        """Put somebody else's program first."""
        self._attach_first(TcxProgram(self._next_id(), name, is_ours=False))

    def _attach_first(self, program: TcxProgram) -> None:
        self.tcx = replace(self.tcx, programs=(program, *self.tcx.programs))

    def _next_id(self) -> int:
        self._programs_loaded += 1
        return self._programs_loaded

    def set_xps(self, queue: int, mask: int, *, live: int) -> int:
        """Give a queue to CPUs; return the errno of why not."""
        if queue >= live:
            return errno.ENOENT
        others = {other: held for other, held in self.xps.items() if other != queue}
        self.xps = others | ({queue: mask} if mask else {})
        return 0

    def forget_xps(self, *, live: int) -> None:
        """Forget the masks of queues that are not live any more."""
        self.xps = {queue: mask for queue, mask in self.xps.items() if queue < live}
