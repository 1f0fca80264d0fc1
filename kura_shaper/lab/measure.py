"""One measurement: clients run, counters are read every 100 ms, the rates come from the counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.links import read_device
from kura_shaper.lab.isolation import inside
from kura_shaper.lab.nic import DeviceBytes
from kura_shaper.lab.topology import NIC, Lab, Namespace
from kura_shaper.lab.traffic import TrafficResult, TrafficSpec
from kura_shaper.measure import ByteSampler, Samples, Series
from kura_shaper.tree.build import owners_of
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.units import Rate

NIC_TX = f"{NIC}.tx"
# From the first byte on every stream until the rate is the one that stays.
_SETTLE_NS = 400_000_000
# Clients are told when to end; this is for one that is not.
CLIENT_DURATION_MS = 3_600_000
_END_TIMEOUT_S = 10.0
_TRAFFIC = "kura_shaper.lab.traffic"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Counters over a run of clients; the steady part lies between start_ns and end_ns."""

    samples: Samples
    start_ns: int
    end_ns: int
    results: tuple[TrafficResult, ...] = field(default=())

    def rate(self, counter: str = NIC_TX) -> Rate:
        """Return a counter's average over the steady part."""
        return self.samples.series(counter).average_rate(self.start_ns, self.end_ns)

    def series(self, counter: str = NIC_TX) -> Series:
        """Return all readings of a counter, from before the first byte to after the last."""
        return self.samples.series(counter)

    def sent_bytes(self, counter: str) -> int:
        """Return how far a counter moved over the whole run."""
        return self.series(counter).whole().sent_bytes

    @property
    def failures(self) -> int:
        """Streams that broke."""
        return sum(result.failures for result in self.results)


class ClassBytes:
    """A source: `class.<owner>`, the bytes that each class of the node's tree has sent."""

    def __init__(self, lab: Lab, document: TenantsDocument) -> None:
        """Raises UsageError when the device is not there."""
        self._owners = owners_of(document)
        with inside(lab.topology.node.path):
            self._client = TcClient()
            self._control = KernelTrafficControl(self._client, read_device(NIC), clock=SystemClock())

    def __call__(self) -> dict[str, int]:
        """Return the counters. Raises StateUnknownError when the tree can't be read."""
        snapshot = self._control.snapshot()
        if isinstance(snapshot, Unknown):
            raise StateUnknownError(snapshot.reason)
        return {
            f"class.{self._owners.get(classid.minor, classid)}": counters.sent_bytes
            for classid, counters in snapshot.counters.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


def measure(
    lab: Lab,
    clients: Sequence[tuple[Namespace, TrafficSpec]],
    *,
    devices: Sequence[str],
    duration_ms: int,
    classes: ClassBytes | None = None,
) -> Measurement:
    """Run clients, each in its namespace, for duration_ms after all of them settled.

    Raises StateUnknownError when a client has not got a byte on every stream in time.
    """
    clock = SystemClock()
    source = DeviceBytes(lab.topology.node.path, devices)
    try:
        with ByteSampler([source, *([classes] if classes else [])]) as sampler:
            processes = [lab.spawn_module(where, _TRAFFIC, spec.arguments()) for where, spec in clients]
            for process, (_, spec) in zip(processes, clients, strict=True):
                flowing = process.wait_event("flowing", timeout_s=spec.start_timeout_ms / 1_000 + 5)
                _check_all_flow(flowing, spec)
            clock.wait_ns(_SETTLE_NS)
            start_ns = clock.now_ns()
            clock.wait_ns(duration_ms * 1_000_000)
            end_ns = clock.now_ns()
            for process in processes:
                process.child.terminate()
            ended = [process.wait_event("result", timeout_s=_END_TIMEOUT_S) for process in processes]
            samples = sampler.stop()
    finally:
        source.close()
    return Measurement(samples, start_ns, end_ns, tuple(TrafficResult.from_event(event) for event in ended))


def _check_all_flow(flowing: Mapping[str, Any], spec: TrafficSpec) -> None:
    if flowing["streams"] != spec.streams:
        name = f"{spec.application.value} to {spec.sni or spec.address}"
        raise StateUnknownError(f"{name}: only {flowing['streams']} of {spec.streams} streams got a byte")
