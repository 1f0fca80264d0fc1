"""One device as the executor sees it: read a snapshot, send operations.

Most operations are netlink messages, many a send. Programs of eBPF and the queues' XPS
have doors of their own. The fake kernel has the same two methods, and the contract tests
hold it to this.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.kernel import bpf
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.dump import read_snapshot
from kura_shaper.kernel.errors import InvalidError, KernelRefusedError
from kura_shaper.kernel.sysfs import DeviceSysfs
from kura_shaper.tree.ebpf import TcxProgram, TcxState
from kura_shaper.tree.model import DirectBpf, MqQdisc
from kura_shaper.tree.operations import RemoveTcx, SetFilter, SetTcx, SetXps
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.tree.steer import steering_in_force

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.tree.model import Device
    from kura_shaper.tree.operations import Operation


# What can't be read (opening another's program takes CAP_SYS_ADMIN) is not ours.
_SOMEBODYS = TcxState(supported=True, programs=(TcxProgram(0, "that can't be read", is_ours=False),))


class TrafficControl(Protocol):
    """Effects on one device's qdiscs."""

    def snapshot(self) -> Snapshot | Unknown:
        """Return what is there now, or Unknown."""
        ...

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """Carry operations out in order; return each one's refusal, or None."""
        ...


class KernelTrafficControl:
    """The real kernel, one device, in this thread's network namespace."""

    def __init__(self, client: TcClient, device: Device, *, clock: Clock) -> None:
        self._client = client
        self._device = device
        self._clock = clock

    def snapshot(self) -> Snapshot | Unknown:
        """See TrafficControl. The device's live tx queues are counted anew."""
        found = read_snapshot(self._client, self._device, clock=self._clock)
        if isinstance(found, Unknown):
            return found
        live, xps, xps_rxqs = self._queues()
        found = replace(found, device=replace(found.device, tx_queues=live), xps=xps, xps_rxqs=xps_rxqs)
        tcx = self._tcx()
        if not isinstance(tcx, Unknown):
            return replace(found, tcx=tcx)
        if not is_ours(found.root):
            # Somebody's program may end the chain before ours: a tree that needs the hook must not be begun.
            return replace(found, tcx=_SOMEBODYS)
        is_needed = isinstance(found.root, MqQdisc) and steering_in_force(found) is None
        return tcx if is_needed else found  # needed where they are what steers, or nothing does

    def _queues(self) -> tuple[int, Mapping[int, int] | None, frozenset[int]]:
        """Return the live tx queues and their XPS masks; where they can't be read, what was known and None."""
        if self._device.tx_queues == 1 and not self._device.kind:
            return 1, {}, frozenset()
        try:
            with DeviceSysfs(self._device.name, self._device.ifindex) as sysfs:
                return sysfs.live_tx_queues(), sysfs.xps_masks(), frozenset(sysfs.xps_rxqs())
        except (KuraShaperError, OSError):
            return self._device.tx_queues, None, frozenset()

    def _tcx(self) -> TcxState | Unknown:
        try:
            return bpf.attached(self._device.ifindex)
        except (KuraShaperError, OSError) as error:
            return Unknown(f"the tcx programs can't be read: {error}")

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """See TrafficControl."""
        outcomes: list[KernelRefusedError | None] = []
        for is_netlink, run in groupby(operations, key=_is_netlink):
            if is_netlink:
                outcomes += self._client.send(tuple(run), self._device.ifindex)
            else:
                outcomes += [_refusal_of(partial(self._carry_out, operation)) for operation in run]
        return outcomes

    def _carry_out(self, operation: Operation) -> KernelRefusedError | None:
        match operation:
            case SetTcx(program):
                bpf.steer_by_tcx(program, self._device.ifindex)
            case RemoveTcx():
                bpf.unsteer_tcx(self._device.ifindex)
            case SetXps(queue, mask):
                with DeviceSysfs(self._device.name, self._device.ifindex) as sysfs:
                    sysfs.set_xps_mask(queue, mask)
            case SetFilter(filter_) if isinstance(filter_.match, DirectBpf):
                if filter_.match.program is None:
                    return InvalidError(errno.EINVAL, "the filter has no program", doing=operation.describe())
                with closing(bpf.load_steering(filter_.match.program)) as descriptor:
                    return self._client.send([operation], self._device.ifindex, program_fd=descriptor)[0]
        return None


def _is_netlink(operation: Operation) -> bool:
    match operation:
        case SetTcx() | RemoveTcx() | SetXps():
            return False
        case SetFilter(filter_):
            return not isinstance(filter_.match, DirectBpf)
        case _:
            return True


def _refusal_of(work: Callable[[], KernelRefusedError | None]) -> KernelRefusedError | None:
    """Return what was refused; what can't be known becomes a refusal too, and a later reading tells."""
    try:
        return work()
    except KernelRefusedError as error:
        return error
    except StateUnknownError as error:
        return KernelRefusedError(errno.EIO, error.message)
