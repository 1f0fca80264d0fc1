"""One reading of a device for all who ask within a moment: a scrape, a status page, a health check."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from kura_shaper.clock import Clock
    from kura_shaper.tree.model import Device

_FRESH_NS = 1_000_000_000


class DeviceReader:
    """Reads a device at most once a second, by a socket of its own. For several threads."""

    def __init__(self, device: Device, *, clock: Clock) -> None:
        self._clock = clock
        self._client = TcClient()
        self._control = KernelTrafficControl(self._client, device, clock=clock)
        self._lock = threading.Lock()
        self._found: Snapshot | Unknown = Unknown("not read yet")
        self._read_at_ns = -_FRESH_NS

    def read(self) -> Snapshot | Unknown:
        """Return a reading that is no older than a second."""
        with self._lock:
            if self._clock.now_ns() - self._read_at_ns >= _FRESH_NS:
                self._found = self._control.snapshot()
                self._read_at_ns = self._clock.now_ns()
            return self._found

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self._client.close()
