"""Steering proven by counters: frames that carry the mark of a proof must turn up in its class.

A rule that is there proves nothing: another program may end the chain before it, XPS may
override it, the kernel ignores a queue that is not live, all without an error. So a few
frames are sent out of the device for each shaped queue. Nothing but them ever carries a
proof's mark, and their flows differ, so that without steering the kernel would spread them
over all queues.

The frames are UDP to port 9 between documentation addresses (RFC 5737), with a time to live
of 1, addressed to the device's own hardware address: the next switch drops them.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kura_shaper.tenants.marks import PROOF_CLASS
from kura_shaper.tree.model import HTB_HANDLE, Handle
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.tree.steer import steering_faults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.tenants.marks import MarkLayout
    from kura_shaper.tree.model import Device

_FRAMES = 16
_ETH_P_IP, _DISCARD_PORT, _FIRST_PORT = 0x0800, 9, 33_434
_WITHIN_NS, _EVERY_NS = 500_000_000, 5_000_000
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_UDP = struct.Struct("!HHHH")
_FROM, _TO = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether marked frames came to their queues' classes; reason is one line when they did not."""

    is_proven: bool
    reason: str = ""


class Prove(Protocol):
    """What proves steering on a device."""

    def __call__(self, control: TrafficControl, marks: MarkLayout, *, clock: Clock) -> Proof:
        """Return the proof, or why there is none."""
        ...


def prove_steering(control: TrafficControl, marks: MarkLayout, *, clock: Clock) -> Proof:
    """Return whether frames with each proof's mark come to its class, and nothing speaks against the rest."""
    before = control.snapshot()
    if isinstance(before, Unknown):
        return Proof(is_proven=False, reason=before.reason)
    faults = steering_faults(before)
    if not before.device.is_up:
        return Proof(is_proven=False, reason="the link is down")
    try:
        for queue in _queues(before):
            send_frames(before.device, mark=marks.mark(PROOF_CLASS + queue))
    except OSError as error:
        return Proof(is_proven=False, reason=f"frames can't be sent: {error.strerror}")
    missing = _missing(before, control, clock=clock)
    if isinstance(missing, str):
        return Proof(is_proven=False, reason=missing)
    lost = [
        f"{count} of {_FRAMES} marked frames did not come to tx queue {queue}"
        for queue, count in missing.items()
        if count
    ]
    return Proof(is_proven=not lost and not faults, reason="; ".join((*lost, *faults)))


def _queues(found: Snapshot) -> list[int]:
    return [htb.handle.major - HTB_HANDLE.major for htb in found.htbs]


def _missing(before: Snapshot, control: TrafficControl, *, clock: Clock) -> dict[int, int] | str:
    """Return how many frames each shaped queue has not seen within half a second."""
    deadline = clock.now_ns() + _WITHIN_NS
    while True:
        after = control.snapshot()
        if isinstance(after, Unknown):
            return after.reason
        missing = {
            # More than were sent are another run's, which proves at the same time.
            queue: max(0, _FRAMES - (_seen(after, queue) - _seen(before, queue)))
            for queue in _queues(before)
        }
        if not any(missing.values()) or clock.now_ns() >= deadline:
            return missing
        clock.wait_ns(_EVERY_NS)


def _seen(found: Snapshot, queue: int) -> int:
    classid = Handle(HTB_HANDLE.major + queue, PROOF_CLASS + queue)
    return found.counters.get(classid, ClassCounters()).sent_packets


def send_frames(device: Device, *, mark: int, count: int = _FRAMES) -> None:
    """Send frames with a mark out of a device, each of another flow. Raises OSError."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", mark))
        sender.bind((device.name, 0))
        own_address = sender.getsockname()[4]
        for packet in _packets(count):
            sender.sendto(packet, (device.name, _ETH_P_IP, 0, 0, own_address))


def _packets(count: int) -> Iterable[bytes]:
    payload = b"kura-shaper proves steering"
    for number in range(count):
        udp = _UDP.pack(_FIRST_PORT + number, _DISCARD_PORT, _UDP.size + len(payload), 0) + payload
        head = (0x45, 0, _IPV4.size + len(udp), number, 0, 1, socket.IPPROTO_UDP)
        yield _IPV4.pack(*head, _checksum(_IPV4.pack(*head, 0, _FROM, _TO)), _FROM, _TO) + udp


def _checksum(header: bytes) -> int:
    """Return the checksum of an IPv4 header (RFC 1071)."""
    total = int(sum(struct.unpack(f"!{len(header) // 2}H", header)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
