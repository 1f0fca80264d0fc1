"""DATA frames, made beside the h2 library, which takes up to a fifth of a relay's whole time to make them.

A DATA frame that ends nothing changes no state but the two windows (RFC 9113, sections 5.1 and 6.9), and its head is
nine bytes. Everything else stays the library's: what it has to say by then goes out before the frame, so that the
order of frames is the order of calls.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from h2.connection import H2Connection

_HEAD = struct.Struct(">BHBBI")
_DATA, _NO_FLAGS = 0, 0


class DataFrames:
    """What a connection sends: frames of the library, and DATA frames between them."""

    def __init__(self, connection: H2Connection) -> None:
        self._h2 = connection
        self._parts: list[bytes] = []

    def room_bytes(self, http_id: int) -> int:
        """Return how much the windows of a stream and of the connection let through; nothing when it has ended."""
        stream = self._h2.streams.get(http_id)
        if stream is None or stream.closed:
            return 0
        return min(self._h2.outbound_flow_control_window, stream.outbound_flow_control_window)

    def put(self, http_id: int, data: bytes) -> None:
        """Send data that fits a frame and the windows, as `room_bytes` has just said."""
        stream, size = self._h2.streams[http_id], len(data)
        stream.outbound_flow_control_window -= size
        self._h2.outbound_flow_control_window -= size
        parts = self._parts
        if before := self._h2.data_to_send():
            parts.append(before)
        parts.append(_HEAD.pack(size >> 16, size & 0xFFFF, _DATA, _NO_FLAGS, http_id))
        parts.append(data)

    def take(self) -> bytes:
        """Return everything that is to be sent, once."""
        rest = self._h2.data_to_send()
        if not self._parts:
            return rest
        self._parts.append(rest)
        data = b"".join(self._parts)
        self._parts.clear()
        return data
