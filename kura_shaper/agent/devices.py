"""The devices that an agent keeps: each with its sockets, its threads and its counts, made and ended together."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kura_shaper.agent.keeper import DeviceKeeper
from kura_shaper.agent.reader import DeviceReader
from kura_shaper.agent.sampler import Sampler
from kura_shaper.agent.view import DeviceView
from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel.balance import BudgetBalancer
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.device_counters import DeviceCounters
from kura_shaper.kernel.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.clock import Clock
    from kura_shaper.tree.build import Capabilities
    from kura_shaper.tree.model import Device
    from kura_shaper.units import Rate

_BALANCE_EVERY_S = 0.1


class KeptDevice:
    """One device of this very index: a device of the same name that was made anew is another one."""

    def __init__(self, device: Device, state_dir: Path, capabilities: Capabilities, *, clock: Clock) -> None:
        self.device = device
        self._stack = ExitStack()
        self._clock = clock
        client = self._stack.enter_context(TcClient())
        self._journal = Journal(state_dir, device)
        control = KernelTrafficControl(client, device, clock=clock)
        self.keeper = DeviceKeeper(control, self._journal, capabilities, clock=clock)
        reader = DeviceReader(device, clock=clock)
        self._stack.callback(reader.close)
        counters = self._stack.enter_context(DeviceCounters(device.name, device.ifindex))
        sampler = Sampler(device.ifindex, device_bytes=lambda: counters.read().bytes, clock=clock)
        self._stack.callback(sampler.stop)
        self.view = DeviceView(device, self.keeper, reader, sampler)
        self._balancing = _Balancing()
        self._stack.callback(self._balancing.stop)
        sampler.start()

    def balance(self, budget: Rate, queues: int) -> None:
        """Move the budget over several shaped queues from now on; with fewer than two, stop."""
        if queues < 2:
            self._balancing.stop()
            return
        self._balancing.start(self.device, budget, self._journal, self._clock)

    def close(self) -> None:
        """End its threads and close its sockets. The kernel keeps what it has."""
        self._stack.close()


class _Balancing:
    """The thread that moves a device's budget, while there is one."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._budget: Rate | None = None

    def start(self, device: Device, budget: Rate, journal: Journal, clock: Clock) -> None:
        if self._thread is not None and self._budget == budget:
            return
        self.stop()
        self._stop, self._budget = threading.Event(), budget
        arguments = (device, budget, journal, clock, self._stop)
        self._thread = threading.Thread(target=_balance, args=arguments, name=f"balance-{device.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=5)
            self._thread = None


def _balance(device: Device, budget: Rate, journal: Journal, clock: Clock, stop: threading.Event) -> None:
    try:
        with TcClient() as client:
            balancer = BudgetBalancer(client, device, budget, clock=clock, locked=journal.locked)
            while not stop.wait(_BALANCE_EVERY_S):
                balancer.step()
    except (KuraShaperError, OSError):
        # Without a socket nothing moves; the shares that are in force add up to the budget.
        return
