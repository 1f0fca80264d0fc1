"""How packets find their tx queue where act_skbedit can't send them: one eBPF program a device.

In shape `mq` a tenant's HTB hangs below one tx queue, so its packets must be steered there
before the kernel chooses a queue. The program runs at the device's egress, before that choice:

- a mark with a class id: the queue where that tenant was placed; queue 0 for an id without a
  place (the gateway's own, and tenants that this node does not have);
- no mark, but a gateway port as the source: queue 0, where the classifier tells it apart;
- all else is the host's: one of the queues that are not shaped, by the flow's hash.

A queue is written as the kernel writes a *recorded* one: its index + 1 (skb_record_rx_queue
of include/linux/skbuff.h). One less names another queue, without an error.

The verdict is always -1 (TC_ACT_UNSPEC, TCX_NEXT), so that the programs of others that come
after this one still run. Packet bytes are read by a helper that reports short packets: LD_ABS
would end the program with 0 (TC_ACT_OK) for them.

Instruction codes: Documentation/bpf/standardization/instruction-set.rst. There is no compiler
and no map: a placement is code, a binary search over the ids at which the queue changes. It
is cut into subprograms, since a jump reaches 32,767 instructions and a call all of them. They
only return the queue: the verifier rewrites each access to a packet's metadata and moves all
that follows, so with thousands of them loading would take long.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX
from kura_shaper.tree.classifier import ETH_P_IP, ETH_P_IPV6

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kura_shaper.tenants.marks import MarkLayout

OUR_PREFIX = "ks_"
_NAME_DIGITS = 9  # with the rest 15 characters, the most that a program's name can have

_NAME = re.compile(f"{OUR_PREFIX}([0-9a-f]{{2}})_[0-9a-f]{{{_NAME_DIGITS}}}")

Instruction = tuple[int, int, int, int, int]  # code, destination, source, offset, immediate
_Steps = tuple[tuple[int, int], ...]  # an id, and the queue of all ids from there to the next
_ENCODED = struct.Struct("=BBhi")

_AND, _RSH, _LSH, _MOD, _ADD, _MOV = 0x54, 0x74, 0x64, 0x94, 0x04, 0xB4  # 32 bits, immediate
_MOV64, _MOV64_REGISTER, _ADD64, _TO_BIG_ENDIAN = 0xB7, 0xBF, 0x07, 0xDC
_LOAD_U8, _LOAD_U16, _LOAD_U32, _STORE_U32 = 0x71, 0x69, 0x61, 0x63
_JA, _JEQ, _JNE, _JGE, _JLT, _JSET, _CALL, _EXIT = 0x05, 0x15, 0x55, 0x35, 0xA5, 0x45, 0x85, 0x95
_SUBPROGRAM = 1  # BPF_PSEUDO_CALL, in the source register's place

_GET_HASH_RECALC, _LOAD_BYTES_RELATIVE = 34, 68
_FROM_NETWORK_HEADER = 1
_SKB_MARK, _SKB_QUEUE_MAPPING, _SKB_PROTOCOL = 8, 12, 16  # struct __sk_buff

_HOP_BY_HOP, _TCP, _UDP = 0, 6, 17
_IPV4_HEADER, _IPV6_HEADER, _HOP_BY_HOP_HEADER = 20, 40, 8

_R0, _R1, _R2, _R3, _R4, _R5, _SKB, _FRAME = 0, 1, 2, 3, 4, 5, 6, 10
_HEADER_AT, _BYTES_AT = -24, -32  # on the stack

_RECORDED = 1
_SUBPROGRAM_STEPS = 8_192  # at 3 instructions each, jumps span half: far below 32,767


@dataclass(frozen=True, slots=True)
class EbpfProgram:
    """A program of type SCHED_CLS."""

    instructions: tuple[Instruction, ...]
    shaped_queues: int = 0

    @property
    def encoded(self) -> bytes:
        """The program as bpf(2) takes it."""
        return b"".join(_ENCODED.pack(code, dst | src << 4, off, imm) for code, dst, src, off, imm in self.instructions)

    @property
    def name(self) -> str:
        """What the kernel shall call it: ours, for how many shaped queues, and which one."""
        return f"{OUR_PREFIX}{self.shaped_queues:02x}_{hashlib.sha256(self.encoded).hexdigest()[:_NAME_DIGITS]}"


@dataclass(frozen=True, slots=True)
class TcxProgram:
    """A program that is attached to a device's egress. A name that can't be read is empty, thus not ours."""

    program_id: int
    name: str
    is_ours: bool


@dataclass(frozen=True, slots=True)
class TcxState:
    """What is attached to a device's egress by tcx, in the order in which it runs."""

    supported: bool
    programs: tuple[TcxProgram, ...] = ()


class _Assembler:
    """eBPF with names for the targets of jumps and calls."""

    def __init__(self) -> None:
        self._lines: list[tuple[Instruction, str | None]] = []
        self._labels: dict[str, int] = {}

    def emit(
        self, code: int, dst: int = 0, imm: int = 0, *, src: int = 0, off: int = 0, then: str | None = None
    ) -> None:
        self._lines.append(((code, dst, src, off, imm), then))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def assemble(self) -> tuple[Instruction, ...]:
        return tuple(self._resolved(at, line, then) for at, (line, then) in enumerate(self._lines))

    def _resolved(self, at: int, line: Instruction, then: str | None) -> Instruction:
        if then is None:
            return line
        code, dst, src, _, imm = line
        distance = self._labels[then] - at - 1
        return (code, dst, src, 0, distance) if code == _CALL else (code, dst, src, distance, imm)


def steering_program(
    marks: MarkLayout,
    gateway_ports: Iterable[int],
    *,
    placement: Mapping[int, int],
    shaped_queues: int,
    live_queues: int,
) -> EbpfProgram:
    """Return the program that steers a device's packets: placement has the queue of each tenant's class id.

    Queues 0..shaped_queues-1 are shaped, the rest of live_queues is the host's. Raises UsageError
    for queues that are not there, ids that no mark can carry, and more than GATEWAY_PORTS_MAX ports.
    """
    ports = tuple(sorted(set(gateway_ports)))
    _check(marks, ports, placement, shaped_queues=shaped_queues, live_queues=live_queues)
    changes = _steps(placement)
    subprograms = [changes[at : at + _SUBPROGRAM_STEPS] for at in range(0, len(changes), _SUBPROGRAM_STEPS)]
    asm = _Assembler()
    asm.emit(_MOV64_REGISTER, _SKB, src=_R1)
    asm.emit(_LOAD_U32, _R1, src=_SKB, off=_SKB_MARK)
    asm.emit(_AND, _R1, _signed(marks.mask))
    asm.emit(_JEQ, _R1, 0, then="unmarked")
    if marks.shift:
        asm.emit(_RSH, _R1, marks.shift)
    _dispatch(asm, subprograms)
    asm.label("unmarked")
    if ports:
        _match_gateway(asm, ports)
    asm.label("host")
    _host(asm, shaped_queues, live_queues)
    asm.label("write")
    asm.emit(_STORE_U32, _SKB, src=_R0, off=_SKB_QUEUE_MAPPING)
    asm.label("next")
    asm.emit(_MOV64, _R0, -1)
    asm.emit(_EXIT)
    for steps in subprograms:
        asm.label(f"search from {steps[0][0]:#x}")
        _search(asm, steps)
    return EbpfProgram(asm.assemble(), shaped_queues)


def shaped_queues_of(name: str) -> int:
    """Return for how many shaped queues a program of ours with this name is; 0 when the name does not tell."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else 0


def _check(
    marks: MarkLayout, ports: tuple[int, ...], placement: Mapping[int, int], *, shaped_queues: int, live_queues: int
) -> None:
    if len(ports) > GATEWAY_PORTS_MAX:
        remedy = f"keep to {GATEWAY_PORTS_MAX} ports"
        raise UsageError(f"{len(ports)} gateway ports are more than a program can tell apart", remedy=remedy)
    if not 0 < shaped_queues <= live_queues:
        raise UsageError(
            f"{shaped_queues} of {live_queues} tx queues can't be shaped", remedy=f"shape 1 to {live_queues} of them"
        )
    for class_id, queue in placement.items():
        marks.mark(class_id)
        if not 0 <= queue < shaped_queues:
            raise UsageError(
                f"class {class_id:#x} is placed on tx queue {queue}, which is not shaped",
                remedy=f"place it on one of 0..{shaped_queues - 1}",
            )


def _steps(placement: Mapping[int, int]) -> _Steps:
    """Return (first id, queue) wherever the queue changes; the first is of id 0, and on queue 0."""
    queues = {0: 0}
    for class_id in sorted(placement):
        queues[class_id] = placement[class_id]
        queues[class_id + 1] = 0
    changes = zip(queues.items(), (None, *queues.values()), strict=False)
    return tuple((first, queue) for (first, queue), before in changes if queue != before)


def _dispatch(asm: _Assembler, subprograms: Sequence[_Steps]) -> None:
    """Have the subprogram for the id in R1 called, and what it returns written."""
    for steps in reversed(subprograms):
        below = f"below {steps[0][0]:#x}"
        asm.emit(_JLT, _R1, steps[0][0], then=below)
        asm.emit(_CALL, src=_SUBPROGRAM, then=f"search from {steps[0][0]:#x}")
        asm.emit(_JA, then="write")
        asm.label(below)


def _search(asm: _Assembler, steps: _Steps) -> None:
    """Return the queue + 1 of the last step that is not above R1."""
    if len(steps) == 1:
        asm.emit(_MOV, _R0, steps[0][1] + _RECORDED)
        asm.emit(_EXIT)
        return
    middle = len(steps) // 2
    upper = f"id {steps[middle][0]:#x}"
    asm.emit(_JGE, _R1, steps[middle][0], then=upper)
    _search(asm, steps[:middle])
    asm.label(upper)
    _search(asm, steps[middle:])


def _match_gateway(asm: _Assembler, ports: tuple[int, ...]) -> None:
    """Go to queue 0 when the source port is one of the gateway's, else to host."""
    asm.emit(_LOAD_U32, _R1, src=_SKB, off=_SKB_PROTOCOL)  # as it is on the wire
    asm.emit(_TO_BIG_ENDIAN, _R1, 16)
    asm.emit(_JEQ, _R1, ETH_P_IP, then="ipv4")
    asm.emit(_JNE, _R1, ETH_P_IPV6, then="host")
    _ipv6(asm)
    _ipv4(asm)
    asm.label("ports")  # R2 has where the transport header begins
    _load_bytes(asm, _BYTES_AT, 2)
    asm.emit(_LOAD_U16, _R1, src=_FRAME, off=_BYTES_AT)
    asm.emit(_TO_BIG_ENDIAN, _R1, 16)
    for port in ports:
        asm.emit(_JEQ, _R1, port, then="queue 0")
    asm.emit(_JA, then="host")
    asm.label("queue 0")
    asm.emit(_MOV, _R0, _RECORDED)
    asm.emit(_JA, then="write")


def _ipv6(asm: _Assembler) -> None:
    """With one extension header: the kernel's own, before a segment of more than 64 KiB (BIG TCP)."""
    asm.emit(_MOV, _R2, 6)
    _load_bytes(asm, _BYTES_AT, 1)
    asm.emit(_LOAD_U8, _R1, src=_FRAME, off=_BYTES_AT)
    asm.emit(_MOV, _R2, _IPV6_HEADER)
    asm.emit(_JEQ, _R1, _TCP, then="ports")
    asm.emit(_JEQ, _R1, _UDP, then="ports")
    asm.emit(_JNE, _R1, _HOP_BY_HOP, then="host")
    _load_bytes(asm, _BYTES_AT, 1)
    asm.emit(_LOAD_U8, _R1, src=_FRAME, off=_BYTES_AT)
    asm.emit(_MOV, _R2, _IPV6_HEADER + _HOP_BY_HOP_HEADER)
    asm.emit(_JEQ, _R1, _TCP, then="ports")
    asm.emit(_JA, then="host")


def _ipv4(asm: _Assembler) -> None:
    asm.label("ipv4")
    asm.emit(_MOV, _R2, 0)
    _load_bytes(asm, _HEADER_AT, _IPV4_HEADER)
    asm.emit(_LOAD_U16, _R1, src=_FRAME, off=_HEADER_AT + 6)
    asm.emit(_TO_BIG_ENDIAN, _R1, 16)
    asm.emit(_JSET, _R1, 0x1FFF, then="host")  # a later fragment has no ports
    asm.emit(_LOAD_U8, _R2, src=_FRAME, off=_HEADER_AT)
    asm.emit(_AND, _R2, 0x0F)
    asm.emit(_LSH, _R2, 2)
    asm.emit(_LOAD_U8, _R1, src=_FRAME, off=_HEADER_AT + 9)
    asm.emit(_JEQ, _R1, _TCP, then="ports")
    asm.emit(_JNE, _R1, _UDP, then="host")


def _load_bytes(asm: _Assembler, at: int, size: int) -> None:
    """Copy bytes from offset R2 of the packet to the stack; a packet that ends before goes to host."""
    asm.emit(_MOV64_REGISTER, _R1, src=_SKB)
    asm.emit(_MOV64_REGISTER, _R3, src=_FRAME)
    asm.emit(_ADD64, _R3, at)
    asm.emit(_MOV, _R4, size)
    asm.emit(_MOV, _R5, _FROM_NETWORK_HEADER)
    asm.emit(_CALL, imm=_LOAD_BYTES_RELATIVE)
    asm.emit(_JNE, _R0, 0, then="host")


def _host(asm: _Assembler, shaped_queues: int, live_queues: int) -> None:
    if live_queues == shaped_queues:
        asm.emit(_JA, then="next")
        return
    asm.emit(_MOV64_REGISTER, _R1, src=_SKB)
    asm.emit(_CALL, imm=_GET_HASH_RECALC)
    asm.emit(_MOD, _R0, live_queues - shaped_queues)
    asm.emit(_ADD, _R0, shaped_queues + _RECORDED)
    asm.emit(_JA, then="write")


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number
