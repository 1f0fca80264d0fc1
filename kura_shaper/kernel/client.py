"""The netlink socket for traffic control: many messages a send, acknowledgements in bulk.

rtnetlink works through a send before it returns, so when the call comes back every
answer already waits in the receive buffer. Only the last message of a batch asks for
an acknowledgement; a refused one always answers. (man netlink)
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel import wire
from kura_shaper.kernel.errors import KernelRefusedError, refusal
from kura_shaper.tree.operations import SetLeaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from kura_shaper.tree.operations import Operation

_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_BUFFER_BYTES = 4 * 1024 * 1024
_BATCH_MESSAGES = 256
_RECEIVE_BYTES = 1024 * 1024
_TIMEOUT_S = 10.0
_NUMBER_MAX = 0xFFFFFFFF
_U16, _U32 = struct.Struct("=H"), struct.Struct("=I")


class DumpBrokenOffError(StateUnknownError):
    """A dump did not come whole; another try may."""

    code = "dump_broken_off"


class TcClient:
    """Sends traffic-control messages in this process's network namespace and reads dumps.

    A context manager. Raises KernelRefusedError subclasses where a dump is refused and
    StateUnknownError where it can't be had whole.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        for forced, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
            except PermissionError:
                self._socket.setsockopt(socket.SOL_SOCKET, plain, _BUFFER_BYTES)
        self._socket.bind((0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def send(
        self, operations: Sequence[Operation], ifindex: int, *, program_fd: int = -1
    ) -> list[KernelRefusedError | None]:
        """Carry out operations in order; return each one's refusal, or None.

        None is no proof: the caller reads the tree back. program_fd is the program of filters of eBPF.
        """
        outcomes: list[KernelRefusedError | None] = []
        for batch in _batches(operations):
            refused = self._transact([wire.encode(operation, ifindex, program_fd=program_fd) for operation in batch])
            outcomes += [
                refusal(*refused[at], doing=operation.describe()) if at in refused else None
                for at, operation in enumerate(batch)
            ]
        return outcomes

    def _transact(self, messages: Sequence[bytes]) -> dict[int, tuple[int, str]]:
        """Send messages at once; return (errno, words) by position of those refused."""
        first, last = self._take_numbers(len(messages))
        try:
            self._socket.send(_numbered(messages, first, flags_of_last=wire.Flags.ACK))
        except OSError as error:
            raise StateUnknownError(f"a message can't be sent: {os.strerror(error.errno or 0)}") from error
        refused: dict[int, tuple[int, str]] = {}
        while True:
            try:
                view = self._receive()
            except TimeoutError as error:
                raise StateUnknownError("the kernel did not answer", remedy="run again") from error
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise StateUnknownError(f"an answer can't be read: {os.strerror(error.errno or 0)}") from error
                # Answers were lost, perhaps the last one. A reading will tell what they would have said.
                self._forget()
                return refused
            kind, flags, sequence = _head(view)
            if kind != wire.NLMSG_ERROR or not first <= sequence <= last:
                continue  # an answer to an earlier batch that timed out
            number, words = wire.error_of(view, wire.HEADER.size, flags)
            if number:
                refused[sequence - first] = (number, words)
            if sequence == last:
                return refused

    def get(self, request: bytes) -> memoryview:
        """Run a request for one object and return the answer, from its tcmsg on; valid until the next call.

        Raises KernelRefusedError when there is none, StateUnknownError when it can't be had.
        """
        sequence, _ = self._take_numbers(1)
        try:
            self._forget()
            self._socket.send(_numbered([request], sequence))
            while True:
                view = self._receive()
                kind, flags, answers = _head(view)
                if answers != sequence:
                    continue
                if kind == wire.NLMSG_ERROR:
                    raise refusal(*wire.error_of(view, wire.HEADER.size, flags), doing="reading one object")
                return view[wire.HEADER.size : _U32.unpack_from(view)[0]]
        except TimeoutError as error:
            raise StateUnknownError("the kernel did not answer a request") from error
        except OSError as error:
            raise StateUnknownError(f"an object can't be read: {os.strerror(error.errno or 0)}") from error

    def dump(self, request: bytes, each: Callable[[memoryview, int, int], None]) -> None:
        """Run a dump request, calling each(data, first byte of tcmsg, end) for every object.

        Raises DumpBrokenOffError when the kernel marks it as interrupted by a change, or answers
        are lost: what was seen of it is worth nothing. StateUnknownError when it can't be had at all.
        """
        try:
            is_whole = self._dump_once(request, each)
        except TimeoutError as error:
            raise StateUnknownError("the kernel did not answer a dump") from error
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise StateUnknownError(f"a dump failed: {os.strerror(error.errno or 0)}") from error
            is_whole = False
        if not is_whole:
            raise DumpBrokenOffError(
                "the tree changed during every reading of it, or answers were lost", remedy="run again"
            )

    def _dump_once(self, request: bytes, each: Callable[[memoryview, int, int], None]) -> bool:
        self._forget()
        sequence, _ = self._take_numbers(1)
        self._socket.send(_numbered([request], sequence))
        whole = True
        while True:
            view = self._receive()
            at = 0
            while at + wire.HEADER.size <= len(view):
                length, kind, flags, answers, _ = wire.HEADER.unpack_from(view, at)
                if length < wire.HEADER.size:
                    raise StateUnknownError("a netlink message is malformed")
                if answers == sequence:
                    whole = whole and not flags & wire.NLM_F_DUMP_INTR
                    if kind == wire.NLMSG_DONE:
                        return whole and not _failed(view, at, length)
                    if kind == wire.NLMSG_ERROR:
                        raise refusal(*wire.error_of(view, at + wire.HEADER.size, flags), doing="reading the tree")
                    each(view, at + wire.HEADER.size, at + length)
                at += (length + 3) & ~3

    def _take_numbers(self, count: int) -> tuple[int, int]:
        """Return the first and the last of so many sequence numbers in a row."""
        if self._last_number + count > _NUMBER_MAX:
            self._last_number = 0
        first = self._last_number + 1
        self._last_number += count
        return first, self._last_number

    def _forget(self) -> None:
        """Throw away what still waits: while a dump is half read the kernel refuses another with EBUSY."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while waiting.poll(0):
            with suppress(OSError):
                self._socket.recv_into(self._buffer)

    def _receive(self) -> memoryview:
        size, _, flags, _ = self._socket.recvmsg_into([self._buffer])
        if flags & socket.MSG_TRUNC:
            raise StateUnknownError("a netlink answer is larger than the buffer")
        return memoryview(self._buffer)[:size]


def _batches(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Cut operations into sends. A class and its leaf are never parted.

    The kernel works through a send whatever becomes of us, so nothing can come between the two.
    """
    start = 0
    while start < len(operations):
        end = start + _BATCH_MESSAGES
        if end < len(operations) and isinstance(operations[end], SetLeaf):
            end += 1
        yield operations[start:end]
        start = end


def _numbered(messages: Sequence[bytes], first: int, *, flags_of_last: int = 0) -> bytearray:
    """Return requests as one send, numbered from first on."""
    parts = bytearray(b"".join(messages))
    last = at = 0
    for number, message in enumerate(messages, start=first):
        last = at
        _U32.pack_into(parts, last + wire.SEQUENCE_AT, number)
        at += len(message)
    (flags,) = _U16.unpack_from(parts, last + wire.FLAGS_AT)
    _U16.pack_into(parts, last + wire.FLAGS_AT, flags | flags_of_last)
    return parts


def _head(view: memoryview) -> tuple[int, int, int]:
    _, kind, flags, sequence, _ = wire.HEADER.unpack_from(view)
    return kind, flags, sequence


def _failed(view: memoryview, at: int, length: int) -> bool:
    """Whether the end of a dump says that it broke off."""
    if length < wire.HEADER.size + 4:
        return False
    return int.from_bytes(view[at + wire.HEADER.size : at + wire.HEADER.size + 4], sys.byteorder, signed=True) < 0
