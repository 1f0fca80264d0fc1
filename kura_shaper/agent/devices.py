"""The devices that an agent keeps: each with its sockets, its threads and its counts, made and ended together."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kura_shaper.agent.keeper import DeviceKeeper
from kura_shaper.agent.reader import DeviceReader
from kura_shaper.agent.sampler import Sampler
from kura_shaper.agent.view import DeviceView
from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel import bpf
from kura_shaper.kernel.balance import BudgetBalancer
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.device_counters import DeviceCounters
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.sysfs import DeviceSysfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kura_shaper.clock import Clock
    from kura_shaper.tree.build import Capabilities
    from kura_shaper.tree.model import Device
    from kura_shaper.units import Rate

    # What lets the agent look soon, with the reason.
    Wake = Callable[[str], None]

_BALANCE_EVERY_S = 0.1
# So many steps in a row that could move nothing: what stands is to be looked at.
_STUCK_STEPS = 5
_PEEK_EVERY_S = 1.0


class KeptDevice:
    """One device of this very index: a device of the same name that was made anew is another one."""

    def __init__(
        self, device: Device, state_dir: Path, capabilities: Capabilities, *, clock: Clock, wake: Wake
    ) -> None:
        """Raises KuraShaperError and OSError; then nothing stays open."""
        self.device = device
        self._clock, self._wake = clock, wake
        self._journal = Journal(state_dir, device)
        with ExitStack() as stack:
            client = stack.enter_context(TcClient())
            control = KernelTrafficControl(client, device, clock=clock)
            self.keeper = DeviceKeeper(control, self._journal, capabilities, clock=clock)
            reader = DeviceReader(device, clock=clock)
            stack.callback(reader.close)
            counters = stack.enter_context(DeviceCounters(device.name, device.ifindex))
            sampler = Sampler(device.ifindex, device_bytes=lambda: counters.read().bytes, clock=clock)
            stack.callback(sampler.stop)
            self.view = DeviceView(device, self.keeper, reader, sampler)
            self._balancing, self._peeking = _Repeated(), _Repeated()
            stack.callback(self._balancing.stop)
            stack.callback(self._peeking.stop)
            sampler.start()
            self._stack = stack.pop_all()

    @property
    def is_balanced(self) -> bool:
        """Whether its budget is moved between queues now."""
        return self._balancing.is_running

    def balance(self, budget: Rate, queues: int) -> None:
        """Move the budget over several shaped queues from now on; with fewer than two, stop."""
        if queues < 2:
            self._balancing.stop()
        else:
            self._balancing.start(budget, lambda stop: self._balance(budget, stop), f"balance-{self.device.name}")

    def peek(self, *, is_steered: bool) -> None:
        """Watch what no event tells, where packets are steered to their queue."""
        if is_steered:
            self._peeking.start(None, self._peek, f"peek-{self.device.name}")
        else:
            self._peeking.stop()

    def close(self) -> None:
        """End its threads and close its sockets. The kernel keeps what it has."""
        self._stack.close()

    def _balance(self, budget: Rate, stop: threading.Event) -> None:
        stuck = 0
        with TcClient() as client:
            balancer = BudgetBalancer(client, self.device, budget, clock=self._clock, locked=self._journal.locked)
            while not stop.wait(_BALANCE_EVERY_S):
                stuck = stuck + 1 if balancer.step().waits_for else 0
                if stuck == _STUCK_STEPS:
                    self._wake("balance")

    def _peek(self, stop: threading.Event) -> None:
        before = self._silent()
        while not stop.wait(_PEEK_EVERY_S):
            now = self._silent()
            if now != before and now is not None:
                before = now
                self._wake("steering")

    def _silent(self) -> object:
        """Return what stands before the egress hook, and the CPUs that queues are given to; None when unknown."""
        try:
            with DeviceSysfs(self.device.name, self.device.ifindex) as sysfs:
                return bpf.attached(self.device.ifindex), sysfs.xps_masks(), sysfs.xps_rxqs()
        except (KuraShaperError, OSError):
            return None


class _Repeated:
    """A thread that does something until it is stopped, for as long as it is asked for."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._key: object = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, key: object, work: Callable[[threading.Event], None], name: str) -> None:
        """Begin, unless what goes by the same key is under way. Work that ended with an error begins again."""
        if self.is_running and self._key == key:
            return
        self.stop()
        self._stop, self._key = threading.Event(), key
        self._thread = threading.Thread(target=_quietly, args=(work, self._stop), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=5)
            self._thread = None


def _quietly(work: Callable[[threading.Event], None], stop: threading.Event) -> None:
    # What stands in the kernel holds without it, and the next look begins it again.
    with suppress(KuraShaperError, OSError):
        work(stop)
