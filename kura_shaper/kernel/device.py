"""One device as the executor sees it: read a snapshot, send operations.

The fake kernel has the same two methods, and the contract tests hold it to this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kura_shaper.kernel.dump import read_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.kernel.errors import KernelRefusedError
    from kura_shaper.tree.model import Device
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot, Unknown


class TrafficControl(Protocol):
    """Effects on one device's qdiscs."""

    def snapshot(self) -> Snapshot | Unknown:
        """Return what is there now, or Unknown."""
        ...

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """Carry operations out in order; return each one's refusal, or None."""
        ...


class KernelTrafficControl:
    """The real kernel, one device, in this process's network namespace."""

    def __init__(self, client: TcClient, device: Device, *, clock: Clock) -> None:
        self._client = client
        self._device = device
        self._clock = clock

    def snapshot(self) -> Snapshot | Unknown:
        """See TrafficControl."""
        return read_snapshot(self._client, self._device, clock=self._clock)

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """See TrafficControl."""
        return self._client.send(operations, self._device.ifindex)
