"""TCP retransmits per tenant, counted in the best way that a kernel and our privileges allow.

A tenant's mark is on the socket (SO_MARK) before it is on a packet, and whoever counts must look
there: at the moment of a retransmit the packet does not have it yet. The ways, best first:

- `tracepoint`: a program of ours in the kernel counts each segment as it is sent again. Exact, and
  reading costs nothing. Needs BTF, by which the kernel tells where a socket keeps its mark.
- `bcc`: the same program, compiled on the node. For kernels without BTF whose headers are installed.
- `inet_diag`: each reading asks every marked socket. A lower bound, since sockets end between readings.
- `proc`: one number for the network namespace, no tenants.

A way that the kernel counts by goes on when the privileges that opened it are gone (measured on 6.18:
CAP_BPF and CAP_PERFMON for the first two, CAP_NET_ADMIN for each reading of `inet_diag`, none for `proc`).

All count segments, not packets, of the network namespace in which they were opened, from then on.
`tracepoint` and `bcc` count what was sent again: neither what a full queue of this node refused (the
kernel's TCPRetransFail, which the others count too), nor SYN-ACKs, which have a tenant's mark only if
its listener has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kura_shaper.clock import SystemClock
from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.kernel.retransmits_bcc import BccRetransmits
from kura_shaper.kernel.retransmits_bpf import BpfRetransmits
from kura_shaper.kernel.retransmits_diag import DiagRetransmits
from kura_shaper.kernel.retransmits_proc import ProcRetransmits
from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from kura_shaper.clock import Clock
    from kura_shaper.tenants.marks import MarkLayout

NO_TENANT = 0
OTHER = -1
CLASSES_MAX = 16_384


class Way(StrEnum):
    """How retransmits are counted."""

    TRACEPOINT = "tracepoint"
    BCC = "bcc"
    INET_DIAG = "inet_diag"
    PROC = "proc"


BEST_FIRST = (Way.TRACEPOINT, Way.BCC, Way.INET_DIAG, Way.PROC)


class RetransmitSource(Protocol):
    """One way to count."""

    @property
    def age_ns(self) -> int:
        """How old the last reading is."""
        ...

    def read(self) -> Mapping[int, int]:
        """Return by class id what was retransmitted since this was opened. Raises StateUnknownError."""
        ...

    def close(self) -> None:
        """Stop counting."""
        ...


@dataclass(frozen=True, slots=True)
class Refused:
    """A way that does not work here, and why."""

    way: Way
    because: str

    def __str__(self) -> str:
        return f"{self.way}: {self.because}"


class RetransmitCounter:
    """Counts retransmits by class id; a context manager.

    `way` is how, `refused` says why no better way works here. `has_tenants` is false when all that is
    known is a sum, `is_lower_bound` true when tenants may have retransmitted more than is counted for them.
    """

    def __init__(
        self,
        source: RetransmitSource,
        way: Way,
        marks: MarkLayout,
        *,
        refused: tuple[Refused, ...] = (),
        classes_max: int = CLASSES_MAX,
    ) -> None:
        self.way = way
        self.refused = refused
        self.has_tenants = way is not Way.PROC
        self.is_lower_bound = way is Way.INET_DIAG
        self._source = source
        self._marks = marks
        self._classes_max = classes_max
        self._kept = {NO_TENANT}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def age_ns(self) -> int:
        """How old the last reading is; always 0 where the kernel counts by itself."""
        return self._source.age_ns

    def read(self) -> dict[int, int]:
        """Return by class id how many segments were retransmitted since this was opened; counts never fall.

        NO_TENANT has what carries no mark of ours, OTHER what carries one that no tenant can have, or that
        came after so many others that it is no longer told apart. Raises StateUnknownError.
        """
        counts: dict[int, int] = {}
        for class_id, count in self._source.read().items():
            key = class_id if self._is_kept(class_id) else OTHER
            counts[key] = counts.get(key, 0) + count
        return counts

    def close(self) -> None:
        """Stop counting."""
        self._source.close()

    def _is_kept(self, class_id: int) -> bool:
        if class_id in self._kept:
            return True
        is_carried = class_id == ReservedClass.GATEWAY or TENANT_CLASS_MIN <= class_id <= self._marks.class_id_max
        if not is_carried or len(self._kept) > self._classes_max:
            return False
        self._kept.add(class_id)
        return True


def open_retransmit_counter(
    marks: MarkLayout, *, ways: Sequence[Way] = BEST_FIRST, clock: Clock | None = None, classes_max: int = CLASSES_MAX
) -> RetransmitCounter:
    """Open the first of the ways that works here, for the thread's network namespace.

    Raises StateUnknownError when none does.
    """
    openers = _openers(marks, clock or SystemClock())
    refused: tuple[Refused, ...] = ()
    for way in ways:
        try:
            source = openers[way]()
        except KuraShaperError as error:
            refused += (Refused(way, error.message),)
        else:
            return RetransmitCounter(source, way, marks, refused=refused, classes_max=classes_max)
    reasons = "; ".join(str(each) for each in refused)
    raise StateUnknownError(f"retransmits can't be counted here: {reasons}")


def _openers(marks: MarkLayout, clock: Clock) -> dict[Way, Callable[[], RetransmitSource]]:
    return {
        Way.TRACEPOINT: partial(BpfRetransmits, marks),
        Way.BCC: partial(BccRetransmits, marks),
        Way.INET_DIAG: partial(DiagRetransmits, marks, clock=clock),
        Way.PROC: ProcRetransmits,
    }
