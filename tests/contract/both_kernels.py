"""Both kernels side by side: the same operations to each, and what is compared of their readings."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.classifier import ETH_P_ALL, ETH_P_IP, ClassifierKind, bpf_program
from kura_shaper.tree.ebpf import TcxState
from kura_shaper.tree.model import (
    ROOT,
    Bfifo,
    BpfMatch,
    Filter,
    FlowerMatch,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HtbClass,
    HtbQdisc,
    Leaf,
    MqQdisc,
    OtherQdisc,
    QueueMapping,
    SteeringKind,
    ticks_of_bytes,
)
from kura_shaper.tree.operations import Operation, RemoveTcx, SetFilter, SetLeaf, SetQueue, SetTcx, SetXps
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

# These tests also run by themselves, without those of the kernel.
sys.path.append(str(Path(__file__).parents[1] / "kernel"))
from kernel_devices import set_live_tx_queues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conftest import Network

    from kura_shaper.tree.build import Capabilities


@dataclass(frozen=True, slots=True)
class Live:
    """Not an operation of ours: somebody changes how many tx queues are live."""

    count: int


Step = Operation | Live

OURS = Handle(0x20)
ROOT_QDISC = HtbQdisc(OURS, ROOT, 2, 1000)
FIFO, OTHER_FIFO = Bfifo(100_000), Bfifo(200_000)
MASK = 0xFFFF0000


def at(minor: int) -> Handle:
    return Handle(0x20, minor)


def htb(
    minor: int, parent: int = 0, *, floor: int = 10**6, ceil: int = 10**7, quantum_bytes: int = 1514, prio: int = 0
) -> HtbClass:
    rates = Rate(floor), Rate(ceil)
    burst, cburst = (ticks_of_bytes(rate, 65_536) for rate in rates)
    return HtbClass(at(minor), at(parent), *rates, burst, cburst, quantum_bytes, prio)


def leaf(minor: int, major: int, parameters: Bfifo | FqCodel = FIFO) -> Leaf:
    return Leaf(Handle(major), at(minor), parameters)


def bpf(
    priority: int = 100, *, ethertype: int = ETH_P_ALL, handle: int = 1, port: int = 443, on: Handle = OURS
) -> Filter:
    return Filter(on, priority, ethertype, handle, bpf_program(MarkLayout(), [port], OURS.major))


def fw(minor: int, *, mask: int = MASK, to: int = 0) -> Filter:
    mark = minor << 16
    return Filter(OURS, 100, ETH_P_ALL, mark, FwMatch(mark, mask, at(to or minor)))


def flower(number: int, port: int, *, to: int = 5, priority: int = 110, protocol: int = 6) -> Filter:
    return Filter(OURS, priority, ETH_P_IP, number, FlowerMatch(ETH_P_IP, protocol, port, at(to)))


def fifo_root(handle: int, limit_packets: int) -> OtherQdisc:
    return OtherQdisc("pfifo", Handle(handle), ROOT, limit_packets.to_bytes(4, "little"))


FQ_CODEL = FqCodel(1_000, 1024, 5_000, 100_000, 1514, 1 << 25)


MQ = MqQdisc(Handle(0x1F))


def place(queue: int, *, mq: int = 0x1F) -> Handle:
    return MqQdisc(Handle(mq)).child(queue)


def htb_on(queue: int, major: int = 0x20, *, default_minor: int = 2, mq: int = 0x1F) -> SetQueue:
    return SetQueue(HtbQdisc(Handle(major), place(queue, mq=mq), default_minor, 1000))


def leaf_on(queue: int, major: int = 0xB0, parameters: Bfifo | FqCodel | Fq = FIFO, *, mq: int = 0x1F) -> SetQueue:
    return SetQueue(Leaf(Handle(major), place(queue, mq=mq), parameters))


def of_major(major: int, spec: HtbClass) -> HtbClass:
    """Return the same class in another HTB."""
    return replace(spec, classid=Handle(major, spec.classid.minor), parent=Handle(major, spec.parent.minor))


def skip_where_lacking(steps: Sequence[Step], network: Network, capabilities: Capabilities) -> None:
    """Skip a test that needs what this kernel has not."""
    missing = sorted(_needs(steps) - _had(network, capabilities))
    if missing:
        pytest.skip(f"this kernel lacks {', '.join(missing)}")


def _needs(steps: Sequence[Step]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        match step:
            case SetLeaf(Leaf(parameters=parameters)) | SetQueue(Leaf(parameters=parameters)):
                found.add(parameters.kind)
            case SetFilter(Filter(match=BpfMatch(), action=None)):
                found.add(ClassifierKind.BPF)
            case SetFilter(Filter(match=FwMatch() | FlowerMatch(), action=None)):
                found.add(ClassifierKind.FW)
            case SetFilter(Filter(action=QueueMapping())):
                found.add("skbedit")
            case SetTcx() | RemoveTcx():
                found.add("tcx")
            case SetXps():
                found.add("XPS")
    return found


def _had(network: Network, capabilities: Capabilities) -> set[str]:
    tcx = network.control().snapshot()
    assert isinstance(tcx, Snapshot), tcx
    found: set[str] = {*capabilities.leaves, *capabilities.classifiers}
    if SteeringKind.SKBEDIT in capabilities.steering:
        found.add("skbedit")
    if tcx.tcx is not None and tcx.tcx.supported:
        found.add("tcx")
    if has_xps(network):
        found.add("XPS")
    return found


def has_xps(network: Network) -> bool:
    """Whether this kernel knows XPS; asked by clearing what is clear."""
    (refused,) = network.control().send([SetXps(0, 0)])
    return refused is None


def fake_of(network: Network) -> FakeKernel:
    """Return a fake kernel with the device of this network as it is now."""
    found = network.control().snapshot()
    assert isinstance(found, Snapshot), found
    has_tcx = found.tcx is not None and found.tcx.supported
    return FakeKernel(network.device, found.root, has_tcx=has_tcx)


def assert_same(network: Network, steps: Sequence[Step]) -> list[int | None]:
    """Take steps on both kernels; return what they answered."""
    real, fake = network.control(), fake_of(network)
    answers = []
    for number, step in enumerate(steps):
        said, faked = None, None
        if isinstance(step, Live):
            set_live_tx_queues(network, step.count)
            fake.set_live_tx_queues(step.count)
        else:
            (said,), (faked,) = real.send([step]), fake.send([step])
        found = real.snapshot()
        assert isinstance(found, Snapshot), found
        where = f"{number}: {step}"
        assert named(faked) == named(said), where
        assert seen(fake.snapshot()) == seen(found), where
        answers.append(said.errno if said else None)
    return answers


def named(error: Any) -> str:
    return errno.errorcode[error.errno] if error else "taken"


def _without_options(qdisc: HtbQdisc | Leaf | OtherQdisc) -> HtbQdisc | Leaf | OtherQdisc:
    if isinstance(qdisc, OtherQdisc) and qdisc.is_kernel_default:
        return replace(qdisc, options=b"")
    return qdisc


def seen(found: Snapshot) -> dict[str, object]:
    """Return what is compared of a reading. A kernel's own leaves are not shown by every kernel."""
    tcx = found.tcx or TcxState(supported=False)
    return {
        "live": found.device.tx_queues,
        "root": found.root,
        "queues": {place: _without_options(below) for place, below in found.queues.items()},
        "htbs": found.htbs,
        "classes": dict(found.classes),
        "leaves": {parent: below for parent, below in found.leaves.items() if below.handle.major},
        "filters": found.filters,
        "hook": found.hook and (found.hook.kind, found.hook.handle, found.hook.parent),
        "tcx": [tcx.supported, *((program.name, program.is_ours) for program in tcx.programs)],
        "xps": found.xps,
        "handles": {(q.kind, q.handle, q.parent) for q in found.verbatim if q.handle.major},
    }
