"""The door to sock_diag: what the kernel tells of the sockets of the thread's network namespace. (man sock_diag)"""

from __future__ import annotations

import errno
import select
import socket
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel import wire
from kura_shaper.kernel.errors import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_RECEIVE_BYTES = 64 * 1024
_TIMEOUT_S = 10.0


class DiagDoor:
    """A sock_diag socket; a context manager. One dump at a time."""

    def __init__(self) -> None:
        """Raises KernelRefusedError when the kernel has no sock_diag."""
        self._sequence = 0
        self._buffer = bytearray(_RECEIVE_BYTES)
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        try:
            self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG)
        except OSError as error:
            raise refusal(error.errno or errno.EIO, doing="opening a socket for sock_diag") from error
        self._socket.settimeout(_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def dump(self, body: bytes, *, doing: str) -> Iterator[tuple[memoryview, int, int]]:
        """Yield (data, first byte, end) of each socket's message, valid until the next one.

        Raises KernelRefusedError when the kernel refuses the dump, StateUnknownError when it can't be had whole.
        """
        try:
            self._ask(body)
            while True:
                view = memoryview(self._buffer)[: self._socket.recv_into(self._buffer)]
                for at in wire.messages(view):
                    length, kind, _, sequence, _ = wire.HEADER.unpack_from(view, at)
                    if sequence != self._sequence:
                        continue
                    if kind == _SOCK_DIAG_BY_FAMILY:
                        yield view, at + wire.HEADER.size, at + length
                    elif kind in (wire.NLMSG_DONE, wire.NLMSG_ERROR):
                        number, words = wire.error_of(view[: at + length], at + wire.HEADER.size, 0)
                        if number or kind == wire.NLMSG_ERROR:
                            raise refusal(number, words, doing=doing)
                        return
        except OSError as error:
            raise StateUnknownError(f"the sockets can't be read: {error}") from error

    def _ask(self, body: bytes) -> None:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while waiting.poll(0):  # the rest of a dump that was left; until its end the kernel allows no other
            self._socket.recv_into(self._buffer)
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        flags = wire.Flags.REQUEST | wire.Flags.DUMP
        length = wire.HEADER.size + len(body)
        self._socket.send(wire.HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, flags, self._sequence, 0) + body)
