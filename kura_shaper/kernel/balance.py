"""The node's budget moved over the shaped queues, to where it is asked for.

With several shaped queues each HTB enforces a share of the budget, and nothing borrows
across. So the shares follow demand: what each queue sent since the last step is read from
its budget class, one small request a queue however many tenants there are, and the classes
are changed, which costs no packet. All that shrink come first, in the same send, so that the
shares never add up to more than the budget.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.dump import read_class
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree import params
from kura_shaper.tree.model import HTB_HANDLE, Handle
from kura_shaper.tree.operations import ChangeClass
from kura_shaper.tree.share import QueueDemand, is_hungry, moves, shares
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.tree.model import Device, HtbClass
    from kura_shaper.tree.snapshot import ClassCounters


# Tenants come and go seldom, and `apply` itself gives their queue what their floors need.
_REFRESH_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Balanced:
    """The shares in force after a step, by queue; waits_for says why nothing could be moved, "" when it could."""

    shares: tuple[Rate, ...] = ()
    moved: int = 0
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class _Reading:
    taken_at_ns: int
    sent_bytes: tuple[int, ...]


class BudgetBalancer:
    """Moves one device's budget, a step at a time. budget is the sum that the shares must have.

    locked holds the device for the time of a move: what `apply` has read must not change under it.
    """

    def __init__(
        self,
        client: TcClient,
        device: Device,
        budget: Rate,
        *,
        clock: Clock,
        locked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._locked = locked
        self._client = client
        self._device = device
        self._budget = params.whole_bytes(budget)
        self._clock = clock
        self._floors: tuple[Rate, ...] = ()
        self._refreshed_at_ns = 0
        self._last: _Reading | None = None

    def _refresh(self) -> None:
        """Read the whole tree for the queues and the floors promised on each."""
        control = KernelTrafficControl(self._client, self._device, clock=self._clock)
        actual = control.snapshot()
        if isinstance(actual, Unknown):
            raise StateUnknownError(actual.reason)
        places = [_budget_class(htb.handle.major) for htb in actual.htbs]
        below = ((place, (c.floor for c in actual.classes.values() if c.parent == place)) for place in places)
        self._floors = tuple(Rate(sum(floor.bits_per_second for floor in floors)) for _, floors in below)
        self._refreshed_at_ns = self._clock.now_ns()
        if self._last and len(self._last.sent_bytes) != len(places):
            self._last = None

    def step(self) -> Balanced:
        """Read what was sent since the last step, and move the shares where demand has moved.

        What can't be read or does not add up is waited for: half of somebody's change must not
        become the budget.
        """
        try:
            if not self._floors or self._clock.now_ns() - self._refreshed_at_ns >= _REFRESH_NS:
                self._refresh()
            found = self._read()
        except KuraShaperError as error:
            self._floors = ()
            return Balanced(waits_for=error.message)
        specs = [spec for spec, _ in found]
        now = _Reading(self._clock.now_ns(), tuple(counters.sent_bytes for _, counters in found))
        before, self._last = self._last, now
        held = tuple(spec.ceil for spec in specs)
        if sum(share.bytes_per_second for share in held) != self._budget.bytes_per_second:
            self._floors = ()
            return Balanced(held, waits_for="the shares do not add up to the budget: `kura-shaper apply` sets them")
        if before is None or len(held) < 2:
            return Balanced(held)
        return self._move(specs, held, _demands(before, now, held))

    @property
    def _majors(self) -> range:
        first = HTB_HANDLE.major
        return range(first, first + len(self._floors))

    def _move(self, specs: Sequence[HtbClass], held: tuple[Rate, ...], demands: Sequence[QueueDemand]) -> Balanced:
        try:
            wanted = shares(self._budget, self._floors, demands, held)
        except KuraShaperError as error:
            self._floors = ()
            return Balanced(held, waits_for=error.message)
        operations = [
            ChangeClass(_with_rate(specs[queue], share, self._device)) for queue, share in moves(held, wanted)
        ]
        if not operations:
            return Balanced(held)
        try:
            with self._locked():
                # What was read before the lock was had may be somebody's half-made change by now.
                if self._held() != held:
                    return Balanced(held, waits_for="somebody else changed the shares")
                refused = [error for error in self._client.send(operations, self._device.ifindex) if error]
        except KuraShaperError as error:
            return Balanced(held, waits_for=error.message)
        if refused:
            self._floors = ()
            return Balanced(held, waits_for=refused[0].message)
        return Balanced(wanted, moved=len(operations))

    def _held(self) -> tuple[Rate, ...]:
        return tuple(spec.ceil for spec, _ in self._read())

    def _read(self) -> list[tuple[HtbClass, ClassCounters]]:
        return [read_class(self._client, self._device.ifindex, _budget_class(major)) for major in self._majors]


def _budget_class(major: int) -> Handle:
    return Handle(major, ReservedClass.BUDGET)


def _with_rate(spec: HtbClass, rate: Rate, device: Device) -> HtbClass:
    return params.inner_class(spec.classid, spec.parent, rate=rate, device=device)


def _demands(before: _Reading, now: _Reading, held: Sequence[Rate]) -> list[QueueDemand]:
    elapsed_ns = max(1, now.taken_at_ns - before.taken_at_ns)
    # A class that was made anew counts from 0 again.
    sent = [max(0, after - earlier) for earlier, after in zip(before.sent_bytes, now.sent_bytes, strict=True)]
    used = [Rate(count * 8_000_000_000 // elapsed_ns) for count in sent]
    return [QueueDemand(rate, is_hungry(rate, share)) for rate, share in zip(used, held, strict=True)]
