"""TCP retransmits of a whole network namespace, which every kernel tells everybody: no tenants.

The counter is SNMP's RetransSegs (RFC 4022): segments sent again, SYN and SYN-ACK included.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kura_shaper.errors import StateUnknownError

_PROC = Path("/proc")
_FILE_BYTES = 65_536
_WRAP = 1 << 8 * struct.calcsize("L")
_NO_TENANT = 0


class ProcRetransmits:
    """Retransmits of the network namespace that the opening thread is in, since this was opened."""

    def __init__(self, proc: Path = _PROC) -> None:
        """Raises StateUnknownError."""
        path = proc / "thread-self" / "net" / "snmp"
        try:
            # An open file keeps speaking of the namespace that it was opened in.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StateUnknownError(f"{path} can't be read: {error.strerror}") from error
        self._total = 0
        try:
            self._last = self._read()
        except StateUnknownError:
            self.close()
            raise

    @property
    def age_ns(self) -> int:
        """A reading is of now."""
        return 0

    def read(self) -> dict[int, int]:
        """Return the count as that of no tenant. Raises StateUnknownError."""
        now = self._read()
        self._total += (now - self._last) % _WRAP
        self._last = now
        return {_NO_TENANT: self._total}

    def close(self) -> None:
        """Close the file; nothing to do a second time."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> int:
        try:
            return parse_retransmitted_segments(os.pread(self._file, _FILE_BYTES, 0).decode("ascii"))
        except (OSError, ValueError) as error:
            raise StateUnknownError(f"the retransmits of this network namespace can't be read: {error}") from error


def parse_retransmitted_segments(text: str) -> int:
    """Return RetransSegs of a /proc/net/snmp. Raises ValueError."""
    lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2 or "RetransSegs" not in lines[0]:
        raise ValueError("it tells of no RetransSegs")
    return int(dict(zip(*lines, strict=True))["RetransSegs"])
