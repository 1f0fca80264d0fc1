# SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
"""TCP retransmits per tenant, counted by a program of ours as the kernel sends each segment again.

The program runs at the tracepoint tcp_retransmit_skb (raw: no tracefs, no perf event), takes the
mark from the socket and adds the packet's segments to its class's place in an array. The array is
mapped into our memory, so reading it is no system call, and needs no privilege any more.
There is a place for every class id that a mark can carry, at most 512 KiB: marks without end find no room to grow.

Where a socket keeps its mark is the kernel's own business and differs by version: BTF tells. To read
there takes a helper that the kernel grants to programs under the GPL only, hence this file's licence.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper.kernel.bpf import bpf_call as bpf
from kura_shaper.kernel.btf import read_btf
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.errors import NoPermissionError, NotThereError, UnsupportedError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.kernel.btf import Btf
    from kura_shaper.tenants.marks import MarkLayout

TRACEPOINT = "tcp_retransmit_skb"
_NAME = b"ks_retransmits"
_LICENCE = b"GPL"
NEEDED = "needs CAP_BPF and CAP_PERFMON"

_MAP_CREATE, _PROG_LOAD, _RAW_TRACEPOINT_OPEN = 0, 5, 17
_ARRAY, _MMAPABLE, _RAW_TRACEPOINT = 2, 1 << 10, 17
_COUNT_BYTES, _PAGE_BYTES = 8, 4096
_PAGE = struct.Struct(f"={_PAGE_BYTES // _COUNT_BYTES}Q")
_NO_TENANT = 0
_EMPTY = bytes(_PAGE_BYTES)

_MOV64_REGISTER, _MOV64, _ADD64, _ADD64_REGISTER = 0xBF, 0xB7, 0x07, 0x0F
_AND, _RSH = 0x54, 0x74  # 32 bits, immediate
_LOAD_U16, _LOAD_U32, _LOAD_U64, _STORE_U32, _ATOMIC_ADD_U64 = 0x69, 0x61, 0x79, 0x63, 0xDB
_LOAD_IMMEDIATE, _MAP_DESCRIPTOR = 0x18, 1
_JEQ, _JNE, _JNE32, _CALL, _EXIT = 0x15, 0x55, 0x56, 0x85, 0x95
_MAP_LOOKUP, _PROBE_READ_KERNEL = 1, 113
_R0, _R1, _R2, _R3, _CONTEXT, _SOCKET, _PACKET, _SEGMENTS, _FRAME = 0, 1, 2, 3, 6, 7, 8, 9, 10
_CLASS_AT, _VALUE_AT = -8, -16  # on the stack
_ENCODED = struct.Struct("=BBhi")


@dataclass(frozen=True, slots=True)
class KernelLayout:
    """Where the running kernel keeps what the program reads, in bytes."""

    mark: int  # of a socket
    network: int  # pointer, of a socket
    network_number: int  # of what that points to
    segments: int  # of a packet
    tells_failure: bool  # whether the tracepoint also tells of what could not be sent, with an error


def kernel_layout(btf: Btf) -> KernelLayout:
    """Return what the running kernel says of itself. Raises UnsupportedError."""
    try:
        parameters = btf.parameters(f"btf_trace_{TRACEPOINT}")
    except UnsupportedError as error:
        detail = f"this kernel lacks the tracepoint {TRACEPOINT}"
        raise UnsupportedError(errno.EOPNOTSUPP, detail, doing="reading this kernel's BTF") from error
    return KernelLayout(
        mark=btf.offset("sock", "sk_mark"),
        network=btf.offset("sock", "__sk_common.skc_net.net"),
        network_number=btf.offset("net", "ns.inum"),
        segments=btf.offset("sk_buff", "cb") + btf.offset("tcp_skb_cb", "tcp_gso_segs"),
        tells_failure=parameters > 3,  # the tracer's own data, socket, packet; since 6.17 an error
    )


def network_number() -> int:
    """Return the number of the thread's network namespace."""
    return Path("/proc/thread-self/ns/net").stat().st_ino


class ClassCounts:
    """A mapped array in the kernel with a count for each class id."""

    def __init__(self, descriptor: int, class_ids: int) -> None:
        """Raises KernelRefusedError."""
        length = -(-class_ids * _COUNT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._map = mmap.mmap(descriptor, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise refusal(error.errno or errno.EIO, doing="mapping the counts of retransmits") from error

    def read(self) -> dict[int, int]:
        """Return the counts that are not 0."""
        found = {}
        for start in range(0, len(self._map), _PAGE_BYTES):
            page = self._map[start : start + _PAGE_BYTES]
            if page != _EMPTY:
                first = start // _COUNT_BYTES
                found.update({first + at: count for at, count in enumerate(_PAGE.unpack(page)) if count})
        return found

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


class MappedRetransmits:
    """Counts that a program in the kernel keeps as long as what attaches it is open."""

    def __init__(self, counts: ClassCounts, attached: int) -> None:
        self._counts, self._attached = counts, attached

    @property
    def age_ns(self) -> int:
        """A reading is of now."""
        return 0

    def read(self) -> dict[int, int]:
        """Return the counts by class id, that of no tenant always."""
        return {_NO_TENANT: 0, **self._counts.read()}

    def close(self) -> None:
        """Take the program out of the kernel; nothing to do a second time."""
        if self._attached >= 0:
            os.close(self._attached)
            self._counts.close()
            self._attached = -1


class BpfRetransmits(MappedRetransmits):
    """Retransmits by class id of the thread's network namespace since this was opened."""

    def __init__(self, marks: MarkLayout) -> None:
        """Raises KernelRefusedError when the kernel can't count so, or we may not."""
        layout = kernel_layout(read_btf())
        class_ids = (marks.mask >> marks.shift) + 1
        with _naming_what_is_needed(), closing(_create_array(class_ids)) as array:
            program = counting_program(marks, layout, network_number(), array)
            with closing(_load(program)) as descriptor:
                counts = ClassCounts(array, class_ids)
                try:
                    super().__init__(counts, _attach(descriptor))
                except BaseException:
                    counts.close()
                    raise


_Line = tuple[int, int, int, int | None, int]  # code, destination, source, offset (None: to the end), immediate


def counting_program(marks: MarkLayout, layout: KernelLayout, network: int, counts: int) -> bytes:
    """Return the program that counts the retransmits of one network namespace into the array of a descriptor."""
    lines: list[_Line] = [(_MOV64_REGISTER, _CONTEXT, _R1, 0, 0)]
    if layout.tells_failure:
        lines += [(_LOAD_U64, _R1, _CONTEXT, 16, 0), (_JNE32, _R1, 0, None, 0)]
    lines += [
        (_LOAD_U64, _SOCKET, _CONTEXT, 0, 0),
        (_LOAD_U64, _PACKET, _CONTEXT, 8, 0),
        *_read_kernel(_SOCKET, layout.network, 8),
        (_JNE, _R0, 0, None, 0),
        (_LOAD_U64, _R1, _FRAME, _VALUE_AT, 0),
        *_read_kernel(_R1, layout.network_number, 4),
        (_JNE, _R0, 0, None, 0),
        (_LOAD_U32, _R1, _FRAME, _VALUE_AT, 0),
        (_JNE32, _R1, 0, None, _signed(network)),
        *_read_kernel(_PACKET, layout.segments, 2),
        (_JNE, _R0, 0, None, 0),
        (_LOAD_U16, _SEGMENTS, _FRAME, _VALUE_AT, 0),
        *_read_kernel(_SOCKET, layout.mark, 4),
        (_JNE, _R0, 0, None, 0),
        (_LOAD_U32, _R1, _FRAME, _VALUE_AT, 0),
        (_AND, _R1, 0, 0, _signed(marks.mask)),
        (_RSH, _R1, 0, 0, marks.shift),
        (_STORE_U32, _FRAME, _R1, _CLASS_AT, 0),
        (_LOAD_IMMEDIATE, _R1, _MAP_DESCRIPTOR, 0, counts),
        (0, 0, 0, 0, 0),  # its second half
        (_MOV64_REGISTER, _R2, _FRAME, 0, 0),
        (_ADD64, _R2, 0, 0, _CLASS_AT),
        (_CALL, 0, 0, 0, _MAP_LOOKUP),
        (_JEQ, _R0, 0, None, 0),
        (_ATOMIC_ADD_U64, _R0, _SEGMENTS, 0, 0),
    ]
    end = len(lines)
    lines += [(_MOV64, _R0, 0, 0, 0), (_EXIT, 0, 0, 0, 0)]
    return b"".join(
        _ENCODED.pack(code, to | source << 4, end - at - 1 if offset is None else offset, immediate)
        for at, (code, to, source, offset, immediate) in enumerate(lines)
    )


def _read_kernel(register: int, offset: int, size: int) -> list[_Line]:
    """Copy bytes at an offset from an address in the kernel to the stack; R0 is not 0 when they can't be read."""
    return [
        (_MOV64_REGISTER, _R3, register, 0, 0),
        (_ADD64, _R3, 0, 0, offset),
        (_MOV64_REGISTER, _R1, _FRAME, 0, 0),
        (_ADD64, _R1, 0, 0, _VALUE_AT),
        (_MOV64, _R2, 0, 0, size),
        (_CALL, 0, 0, 0, _PROBE_READ_KERNEL),
    ]


def check_privilege() -> None:
    """Raise NoPermissionError when we may have no array in the kernel, let alone a program."""
    with _naming_what_is_needed(), closing(_create_array(1)):
        pass


def _create_array(class_ids: int) -> int:
    attributes = struct.pack("=IIIIIII16s", _ARRAY, 4, _COUNT_BYTES, class_ids, _MMAPABLE, 0, 0, _NAME)
    return bpf(_MAP_CREATE, attributes, doing="making the counts of retransmits")


def _load(program: bytes) -> int:
    code, licence = ctypes.create_string_buffer(program), ctypes.create_string_buffer(_LICENCE)
    size = len(program) // _ENCODED.size
    attributes = struct.pack(
        "=IIQQIIQII16s",
        *(_RAW_TRACEPOINT, size, ctypes.addressof(code), ctypes.addressof(licence)),
        *(0, 0, 0, 0, 0, _NAME),
    )
    return bpf(_PROG_LOAD, attributes, doing="loading the program that counts retransmits")


def _attach(descriptor: int) -> int:
    """Have the program run; return what keeps it there as long as it is open."""
    name = ctypes.create_string_buffer(TRACEPOINT.encode())
    attributes = struct.pack("=QI4x", ctypes.addressof(name), descriptor)
    try:
        return bpf(_RAW_TRACEPOINT_OPEN, attributes, doing=f"attaching to the tracepoint {TRACEPOINT}")
    except NotThereError as error:
        detail = f"this kernel lacks the tracepoint {TRACEPOINT}"
        raise UnsupportedError(errno.EOPNOTSUPP, detail, doing="counting retransmits") from error


@contextmanager
def _naming_what_is_needed() -> Iterator[None]:
    try:
        yield
    except NoPermissionError as error:
        detail = f"{error.detail or os.strerror(error.errno)}: {NEEDED}"
        raise NoPermissionError(error.errno, detail, doing="counting retransmits in the kernel") from error


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number
