"""A device's own counters, for who reads them many times a second.

The files of sysfs are opened once, in a sysfs of the thread's own network namespace, and read with
one system call each. Unlike a question over netlink that never waits for a change to traffic
control: they need not the lock that every such change holds (net/core/net-sysfs.c: netstat_show).

A driver may itself fetch these numbers from its hardware only now and then, many once a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.sysfs import DeviceSysfs

if TYPE_CHECKING:
    from typing import Self

_FILES = ("tx_bytes", "tx_packets", "tx_dropped")
_NUMBER_BYTES = 32


@dataclass(frozen=True, slots=True)
class SentCounters:
    """What a device has sent since it was made, and what it dropped instead."""

    bytes: int
    packets: int
    dropped_packets: int


class DeviceCounters(DeviceSysfs):
    """A device's counters, open to be read again and again; a context manager."""

    def __init__(self, device_name: str, ifindex: int) -> None:
        """Raises UsageError for what is no name, StateUnknownError when the device's counters can't be had."""
        super().__init__(device_name, ifindex)
        self._files: list[int] = []
        try:
            for name in _FILES:
                self._files.append(os.open(f"statistics/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory))
        except OSError as error:
            self.close()
            raise StateUnknownError(f"the counters of {device_name} can't be opened: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> SentCounters:
        """Return the counters now. Raises StateUnknownError, also for a device that is gone or was made again."""
        try:
            return SentCounters(*(int(os.pread(file, _NUMBER_BYTES, 0)) for file in self._files))
        except (OSError, ValueError) as error:
            raise StateUnknownError(f"the counters of {self._name} can't be read: {error}") from error

    def close(self) -> None:
        """Close the files; nothing to do a second time."""
        while self._files:
            os.close(self._files.pop())
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
