"""What it costs to program and to read a tree, beside tc and the general netlink library.

Every run has a network namespace of its own, which vanishes with it, and a veth that is up,
since grafting a root on a device that is down costs nothing of what it costs on a node.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from measurement import Measurement, SkippedError, best_in_turns, require, timed
from pyroute2 import IPRoute

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import KernelRefusedError
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.kernel.plugins import register
from kura_shaper.kernel.probe import probe
from kura_shaper.tenants.document import Tenant, TenantsDocument
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, Wanted, build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import (
    EGRESS,
    Bfifo,
    BpfMatch,
    Device,
    Fq,
    FqCodel,
    Handle,
    HtbClass,
    HtbQdisc,
    Leaf,
    MqQdisc,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    Operation,
    SetFilter,
    SetLeaf,
    SetQueue,
)
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")
NIC = "nic0"
# A node of the largest kind, so that a tree of 10,000 still has a trickle for each.
BUDGET, CEILING, FIRST_CLASS = Rate.parse("40G"), Rate.parse("1500M"), 0x100
CHANGES = 200


@dataclass(frozen=True, slots=True)
class Stage:
    """A fresh device in a fresh namespace, and the operations that make a tree on it."""

    device: Device
    operations: tuple[Operation, ...]
    client: TcClient

    def program(self) -> None:
        """Make the tree."""
        refused = [error for error in self.client.send(self.operations, self.device.ifindex) if error]
        if refused:
            raise refused[0]

    def program_and_read_back(self) -> None:
        """Make the tree as `apply` does: each operation must show in a reading."""
        control = KernelTrafficControl(self.client, self.device, clock=SystemClock())
        outcomes = execute(self.operations, control, clock=SystemClock())
        if any(outcome.status is not Status.DONE for outcome in outcomes):
            raise SkippedError("an operation did not hold")

    def read(self) -> Snapshot:
        """Return what is there."""
        found = KernelTrafficControl(self.client, self.device, clock=SystemClock()).snapshot()
        if not isinstance(found, Snapshot):
            raise SkippedError(found.reason)
        return found


def program(tenants: int, runs: int) -> Iterator[Measurement]:
    """From an empty device to a whole tree: root, classes, leaves, classifier."""
    name = f"program-{tenants}"
    require_privilege()
    require("tc")

    def ours() -> float:
        return on_stage(tenants, lambda stage: timed(stage.program))

    def ours_read_back() -> float:
        return on_stage(tenants, lambda stage: timed(stage.program_and_read_back))

    def peer() -> float:
        return on_stage(tenants, run_batch)

    check_same_tree(min(tenants, 100))
    mine, read_back, theirs = best_in_turns(name, runs, ours, ours_read_back, peer)
    note = f"sent and acknowledged; {read_back:.3g} s ({read_back / theirs:.2f}) with every operation read back"
    yield Measurement(name, mine, theirs, "tc -batch, the whole process", "s", note)


def change_one() -> Iterator[Measurement]:
    """One class of ten thousand gets another ceiling."""
    name = "change-one"
    require_privilege()
    require("tc")
    mine, process, library = on_stage(10_000, lambda stage: time_changes(name, stage))
    note = f"the best of {CHANGES} on a tree of 10000"
    yield Measurement(name, mine, process, "one tc process", "ms", note)
    yield Measurement(name, mine, library, "pyroute2", "ms", note)


def time_changes(name: str, stage: Stage) -> list[float]:
    """Return the milliseconds that a change takes us, a process of tc, and the library."""
    stage.program()
    spec = next(op.spec for op in stage.operations if isinstance(op, AddClass) and op.spec.classid.minor == FIRST_CLASS)
    change, line = ChangeClass(spec), ["tc", *class_line("change", spec).split()]
    rates = {"rate": spec.floor.bytes_per_second, "ceil": spec.ceil.bytes_per_second}
    buckets = {"burst": spec.burst_bytes, "cburst": spec.cburst_bytes, "quantum": spec.quantum_bytes}
    target = {"index": stage.device.ifindex, "handle": spec.classid.u32, "parent": spec.parent.u32}
    with IPRoute() as ip:
        contenders: list[Callable[[], float]] = [
            lambda: timed(lambda: stage.client.send([change], stage.device.ifindex)) * 1_000,
            lambda: timed(lambda: subprocess.run(line, check=True)) * 1_000,
            lambda: timed(lambda: ip.tc("change-class", "htb", **target, **rates, **buckets)) * 1_000,
        ]
        return best_in_turns(name, CHANGES, *contenders)


def dump(tenants: int, runs: int) -> Iterator[Measurement]:
    """Read a whole tree: qdiscs, classes with their counters, filters."""
    name = f"dump-{tenants}"
    require_privilege()
    require("tc")

    def all_of_them(stage: Stage) -> list[float]:
        stage.program()
        register()
        with IPRoute() as ip:

            def library() -> None:
                index = stage.device.ifindex
                for found in (ip.get_qdiscs(index), ip.get_classes(index), ip.get_filters(index)):
                    list(found)

            line = ["tc", "-j", "-s", "class", "show", "dev", NIC]
            process = lambda: subprocess.run(line, check=True, stdout=subprocess.DEVNULL)  # noqa: E731
            contenders = (stage.read, library, process)
            return best_in_turns(name, runs, *(lambda work=work: timed(work) for work in contenders))

    mine, library, process = on_stage(tenants, all_of_them)
    note = "qdiscs, classes with counters, filters, decoded"
    yield Measurement(name, mine, process, "tc -j -s class show, classes alone, as text", "s", note)
    yield Measurement(name, mine, library, "pyroute2", "s", note)


def program_mq(tenants: int, runs: int) -> Iterator[Measurement]:
    """The same number of tenants over four HTBs below an mq: the kernel's walk over all classes is shorter."""
    name = f"program-{tenants}-mq"
    require_privilege()
    require("tc")

    def on_mq(work: Callable[[Stage], _T]) -> _T:
        return on_stage(tenants, work, shaped_queues=4)

    contenders = [
        lambda: on_mq(lambda stage: timed(stage.program)),
        lambda: on_mq(run_batch),
        lambda: on_stage(tenants, lambda stage: timed(stage.program)),
    ]
    mine, batch, single = best_in_turns(name, runs, *contenders)
    note = "four shaped queues, without what steers to them"
    yield Measurement(name, mine, batch, "tc -batch, the whole process", "s", note)
    yield Measurement(name, mine, single, "ours, shape single", "s", note)


def cycles(count: int) -> Iterator[Measurement]:
    """What a process grows by over many readings and plans that find nothing to do."""
    name = f"memory-{count}"
    require_privilege()

    def ours(stage: Stage) -> float:
        stage.program()
        actual = stage.read()
        wanted = wanted_for(1_000, stage.device)
        return growth_kib(lambda: plan(wanted, stage.read()) if actual else None, count)

    def library(stage: Stage) -> float:
        stage.program()
        with IPRoute() as ip:
            return growth_kib(lambda: list(ip.get_classes(stage.device.ifindex)), count // 10)

    mine, theirs = (in_fork(partial(on_stage, 1_000, work)) for work in (ours, library))
    note = f"{count} readings and plans of 1000 tenants; pyroute2: a tenth as many readings of the classes"
    yield Measurement(name, max(mine, 1), max(theirs, 1), "pyroute2", "KiB", note)


def growth_kib(work: Callable[[], object], count: int) -> float:
    """Return how much larger the resident memory is at the end than after the first tenth."""
    sizes = []
    for number in range(count):
        work()
        if number in (count // 10, count - 1):
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024)
    return float(sizes[-1] - sizes[0])


def in_fork(work: Callable[[], float]) -> float:
    """Return work() of a process of its own, whose memory nobody else's work has stretched."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writable, repr(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable) as answer:
        text = answer.read()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SkippedError("it failed in a process of its own")
    return float(text)


def on_stage(tenants: int, work: Callable[[Stage], _T], *, shaped_queues: int = 0) -> _T:
    """Return work(stage) in a namespace of its own; nothing of it is left afterwards."""

    def run() -> _T:
        with fresh_nic() as device, TcClient() as client:
            return work(Stage(device, operations_for(tenants, device, shaped_queues), client))

    return in_new_namespace(run)


@contextmanager
def fresh_nic() -> Iterator[Device]:
    """Make a veth that is up; take it away at once, so that its end is no part of the next run."""
    with IPRoute() as ip:
        ip.link("add", ifname=NIC, kind="veth", peer={"ifname": "up0"}, num_tx_queues=4)
        for name in (NIC, "up0"):
            (index,) = ip.link_lookup(ifname=name)
            ip.link("set", index=index, state="up")
        try:
            yield read_device(NIC)
        finally:
            ip.link("del", ifname=NIC)


def operations_for(tenants: int, device: Device, shaped_queues: int = 0) -> tuple[Operation, ...]:
    """Return what makes a tree of so many tenants on an empty device; with shaped queues in shape mq."""
    operations = plan(wanted_for(tenants, device, shaped_queues), Snapshot(device=device, root=None)).operations
    # tc has no line for eBPF without a file, so steering is left out for both.
    return tuple(op for op in operations if not (isinstance(op, AddHook) or is_steering(op)))


def is_steering(operation: Operation) -> bool:
    """Whether an operation puts a filter onto the egress hook."""
    return isinstance(operation, SetFilter) and operation.filter.parent == EGRESS


def wanted_for(tenants: int, device: Device, shaped_queues: int = 0) -> Wanted:
    """Return the wanted tree of so many tenants."""
    document = TenantsDocument(
        "bench",
        tuple(Tenant(f"t{n}", FIRST_CLASS + n, Rate(0), CEILING) for n in range(tenants)),
    )
    shape = ShapeChoice.MQ if shaped_queues else ShapeChoice.SINGLE
    settings = TreeSettings(BUDGET, shape=shape, shaped_queues=max(1, shaped_queues))
    return build(document, device, settings=settings, capabilities=capabilities())


@lru_cache(maxsize=1)
def capabilities() -> Capabilities:
    """Return what this kernel accepts."""
    return probe()


def require_privilege() -> None:
    """Raise SkippedError where no network namespace can be made."""
    if os.geteuid() != 0:
        raise SkippedError("needs root")
    try:
        in_new_namespace(lambda: None)
    except KernelRefusedError as error:
        raise SkippedError(error.message) from error


# The peer: the same tree as a file for tc -batch.


def run_batch(stage: Stage) -> float:
    """Make the stage's tree with tc; return the seconds from its start to its end."""
    # A file without a name is gone with this process, however it ends.
    with tempfile.TemporaryFile("w") as file:
        file.writelines(f"{batch_line(operation)}\n" for operation in stage.operations)
        file.flush()
        line = ["tc", "-batch", f"/proc/self/fd/{file.fileno()}"]
        return timed(lambda: subprocess.run(line, check=True, pass_fds=[file.fileno()]))


def batch_line(operation: Operation) -> str:
    """Return an operation as a line for tc."""
    match operation:
        case AddRoot(MqQdisc() as qdisc):
            return f"qdisc add dev {NIC} root handle {qdisc.handle} mq"
        case SetQueue(HtbQdisc() as qdisc):
            options = f"default {qdisc.default_minor:x} direct_qlen {qdisc.direct_qlen_packets}"
            return f"qdisc add dev {NIC} parent {qdisc.parent} handle {qdisc.handle} htb {options}"
        case SetQueue(Leaf() as leaf):
            return f"qdisc add dev {NIC} parent {leaf.parent} handle {leaf.handle} {leaf_words(leaf)}"
        case AddRoot(HtbQdisc() as qdisc):
            options = f"default {qdisc.default_minor:x} direct_qlen {qdisc.direct_qlen_packets}"
            return f"qdisc add dev {NIC} root handle {qdisc.handle} htb {options}"
        case AddClass(spec):
            return class_line("add", spec)
        case SetLeaf(leaf):
            return f"qdisc add dev {NIC} parent {leaf.parent} handle {leaf.handle} {leaf_words(leaf)}"
        case SetFilter(filter_) if isinstance(filter_.match, BpfMatch):
            code = ",".join(" ".join(map(str, line)) for line in filter_.match.instructions)
            code = f"{len(filter_.match.instructions)},{code}"
            key = f"parent {filter_.parent} prio {filter_.priority} handle {filter_.handle:x} protocol all"
            return f"filter add dev {NIC} {key} bpf bytecode '{code}'"
    raise SkippedError(f"tc has no line for: {operation.describe()}")


def class_line(verb: str, spec: HtbClass) -> str:
    """Return a class as a line for tc."""
    rates = f"rate {spec.floor.bits_per_second}bit ceil {spec.ceil.bits_per_second}bit"
    buckets = f"burst {spec.burst_bytes}b cburst {spec.cburst_bytes}b"
    where = f"parent {spec.parent} classid {spec.classid}"
    return f"class {verb} dev {NIC} {where} htb {rates} {buckets} quantum {spec.quantum_bytes} prio {spec.prio}"


def leaf_words(leaf: Leaf) -> str:
    """Return a leaf's kind and parameters as tc has them."""
    match leaf.parameters:
        case Bfifo(limit_bytes):
            return f"bfifo limit {limit_bytes}b"
        case FqCodel() as p:
            times = f"target {p.target_us}us interval {p.interval_us}us"
            sizes = f"limit {p.limit_packets} flows {p.flows} quantum {p.quantum_bytes}"
            return f"fq_codel {sizes} {times} memory_limit {p.memory_limit_bytes}b {'ecn' if p.ecn else 'noecn'}"
        case Fq() as p:
            quanta = f"quantum {p.quantum_bytes} initial_quantum {p.initial_quantum_bytes}"
            drop = "horizon_drop" if p.horizon_drop else "horizon_cap"
            limits = f"limit {p.limit_packets} flow_limit {p.flow_limit_packets}"
            return f"fq {limits} {quanta} horizon {p.horizon_us}us {drop}"


def check_same_tree(tenants: int) -> None:
    """Raise SkippedError when the peer would make another tree: then a comparison means nothing."""

    def ours(stage: Stage) -> dict[str, Any]:
        stage.program()
        return essence(stage.read())

    def theirs(stage: Stage) -> dict[str, Any]:
        run_batch(stage)
        return essence(stage.read())

    if on_stage(tenants, ours) != on_stage(tenants, theirs):
        raise SkippedError("tc makes another tree of the same operations")


def essence(found: Snapshot) -> dict[str, Any]:
    """Return all of a tree but the bucket sizes, which tc rounds to whole microseconds."""

    def of_class(spec: HtbClass) -> tuple[Handle, Rate, Rate, int, int]:
        return (spec.parent, spec.floor, spec.ceil, spec.quantum_bytes, spec.prio)

    return {
        "root": found.root,
        "classes": {classid: of_class(spec) for classid, spec in found.classes.items()},
        "leaves": dict(found.leaves),
        "filters": found.filters,
    }


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    "program-1000": lambda: program(1_000, runs=9),
    "program-10000": lambda: program(10_000, runs=3),
    "change-one": change_one,
    "program-10000-mq": lambda: program_mq(10_000, runs=2),
    "memory-1000": lambda: cycles(1_000),
    "dump-1000": lambda: dump(1_000, runs=9),
    "dump-10000": lambda: dump(10_000, runs=3),
}
