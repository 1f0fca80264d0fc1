"""Steering by a tcx program, on the real kernel: which queue counts a packet, who comes first, what remains."""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import drop_sys_admin
from kernel_traffic import FAMILIES, send_datagrams, upload, warm_up

from kura_shaper.kernel import bpf
from kura_shaper.kernel.errors import InvalidError, KernelRefusedError, NoPermissionError, NotThereError
from kura_shaper.kernel.probe import probe
from kura_shaper.tenants.marks import TENANT_CLASS_MAX, TENANT_CLASS_MIN, MarkLayout
from kura_shaper.tree.ebpf import EbpfProgram, TcxState, steering_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from conftest import Ended, Network

pytestmark = pytest.mark.privileged

MARKS = MarkLayout()
GATEWAY_PORT = 443
ACME, GLOBEX, INITECH, UNPLACED = 0x2A7, 0x2A8, 0x300, 0x301
PLACEMENT = {ACME: 2, GLOBEX: 1, INITECH: 0}
SHAPED, LIVE, HOST_QUEUE = 3, 4, 3
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


def _ok(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def mount(kind: str, path: str, flags: int = 0) -> None:
    _ok(_LIBC.mount(kind.encode(), path.encode(), kind.encode(), flags, None), f"mount {kind} on {path}")


@contextmanager
def mounts_of_our_own() -> Iterator[None]:
    """Have a mount namespace, without a name, so that nothing is left on the machine."""
    home, present = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), Path.cwd()
    _ok(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    try:
        mount("none", "/", _MS_REC_PRIVATE)
        yield
    finally:
        _ok(_LIBC.setns(home, _CLONE_NEWNS), "setns")
        os.close(home)
        os.chdir(present)


@pytest.fixture(params=["the system's bpffs", "a bpffs of ours"])
def nic(request: pytest.FixtureRequest, network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the number of `nic0`, on a node that has a bpffs or has none."""
    ifindex = network.device.ifindex
    if not bpf.attached(ifindex).supported:
        pytest.skip("this kernel lacks tcx")
    # Here the mounts are private on purpose, and end with the test.
    monkeypatch.setattr(bpf, "has_private_mounts", lambda: False)
    with mounts_of_our_own():
        mount("tmpfs", "/run")
        mount("bpf" if request.param == "the system's bpffs" else "tmpfs", "/sys/fs/bpf")
        yield ifindex


def steering(placement: Mapping[int, int] = PLACEMENT) -> EbpfProgram:
    return steering_program(MARKS, [GATEWAY_PORT], placement=placement, shaped_queues=SHAPED, live_queues=LIVE)


@dataclass(frozen=True, slots=True)
class Foreign(EbpfProgram):
    """Somebody else's program, which ends the chain: TCX_PASS."""

    instructions: tuple[tuple[int, int, int, int, int], ...] = ((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0))

    @property
    def name(self) -> str:
        return "cil_to_netdev"


def attach_foreign(ifindex: int) -> int:
    """Attach somebody else's program before all others; it stays as long as the descriptor that is returned."""
    program = bpf.load_steering(Foreign())
    try:
        return bpf.attach_first(program, ifindex)
    finally:
        os.close(program)


def names(ifindex: int) -> list[str]:
    return [program.name for program in bpf.attached(ifindex).programs]


def tc(command: str) -> str:
    return subprocess.run(["tc", *command.split()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def queues(network: Network, nic: int) -> Callable[[], list[int]]:
    """Put a counter on each tx queue; return what returns the packets that each has sent since it was asked last.

    It is asked once more after steering begins: the little that the machine sends by itself may
    have gone anywhere until then, and leaves by the host's queue from then on.
    """
    tc("qdisc replace dev nic0 root handle 1: mq")
    for queue in range(LIVE):
        tc(f"qdisc add dev nic0 parent 1:{queue + 1:x} handle {queue + 1}0: pfifo limit 1000")
    warm_up(network)
    last = [0] * LIVE

    def since() -> list[int]:
        found = {each["handle"]: each["packets"] for each in json.loads(tc("-j -s qdisc show dev nic0"))}
        now = [found[f"{queue + 1}0:"] for queue in range(LIVE)]
        news = [after - before for before, after in zip(last, now, strict=True)]
        last[:] = now
        return news

    since()
    return since


def pins() -> list[str]:
    # The kernel puts files of its own into a new bpffs (CONFIG_BPF_PRELOAD).
    return sorted(path.name for path in bpf.pin_directory().glob("steer_*"))


@pytest.mark.parametrize("tenants", [0, 1, 1_000, 10_000])
def test_the_verifier_accepts_every_size(network: Network, tenants: int) -> None:
    ids = random.Random(1).sample(range(TENANT_CLASS_MIN, TENANT_CLASS_MAX), tenants)
    placement = {class_id: at % SHAPED for at, class_id in enumerate(ids)}
    os.close(bpf.load_steering(steering(placement)))
    without_ports = steering_program(MARKS, [], placement=placement, shaped_queues=4, live_queues=4)
    os.close(bpf.load_steering(without_ports))


def test_the_verifier_accepts_the_worst_placement(network: Network) -> None:
    worst = {class_id: 1 + class_id % 2 for class_id in range(TENANT_CLASS_MIN, TENANT_CLASS_MAX + 1)}
    os.close(bpf.load_steering(steering(worst)))


@pytest.mark.parametrize(
    ("instructions", "kind", "words"),
    [
        (((0xBF, 0, 3, 0, 0), (0x95, 0, 0, 0, 0)), NoPermissionError, "R3 !read_ok"),
        (((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0), (0x95, 0, 0, 0, 0)), InvalidError, "unreachable insn 2"),
    ],
)
def test_a_refusal_has_the_verifiers_words(
    network: Network, instructions: tuple[tuple[int, int, int, int, int], ...], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        bpf.load_steering(EbpfProgram(instructions))


def test_a_device_that_is_not_there_is_no_empty_chain(nic: int) -> None:
    with pytest.raises(NotThereError):
        bpf.attached(9_999)


def test_a_kernel_without_tcx_has_an_empty_chain(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf, "_TCX_EGRESS", 4_711)  # what it answers for an attach type that it does not know
    assert bpf.attached(network.device.ifindex) == TcxState(supported=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_marked_datagrams_leave_by_their_tenants_queue(
    nic: int, queues: Callable[[], list[int]], family: socket.AddressFamily
) -> None:
    bpf.steer_by_tcx(steering(), nic)
    for class_id in (*PLACEMENT, UNPLACED):
        queues()
        send_datagrams(family, mark=MARKS.mark(class_id), count=100)
        expected = [0, 0, 0]
        expected[PLACEMENT.get(class_id, 0)] = 100
        assert queues()[:SHAPED] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_marked_connections_leave_by_their_tenants_queue(
    network: Network, nic: int, queues: Callable[[], list[int]], family: socket.AddressFamily
) -> None:
    bpf.steer_by_tcx(steering(), nic)
    queues()
    assert upload(network, family, mark=MARKS.mark(ACME), size=100_000) == 100_000
    sent = queues()
    assert sent[:2] == [0, 0]
    assert sent[2] > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_unmarked_datagrams_leave_by_the_gateways_or_the_hosts_queue(
    nic: int, queues: Callable[[], list[int]], family: socket.AddressFamily
) -> None:
    bpf.steer_by_tcx(steering(), nic)
    queues()
    send_datagrams(family, source_port=GATEWAY_PORT, count=100)
    assert queues()[:SHAPED] == [100, 0, 0]
    for source_port in range(20_000, 20_100):
        send_datagrams(family, source_port=source_port)
    *shaped, host = queues()
    assert shaped == [0, 0, 0]
    assert host >= 100


def test_a_queue_is_its_index_plus_one(nic: int, queues: Callable[[], list[int]]) -> None:
    """The control: what is one less is accepted, attached, and steers elsewhere without an error."""
    wrong = EbpfProgram(
        tuple(
            (code, dst, src, off, imm - 1 if (code, dst) == (0xB4, 0) else imm)
            for code, dst, src, off, imm in steering().instructions
        )
    )
    bpf.steer_by_tcx(wrong, nic)
    queues()
    send_datagrams(socket.AF_INET, mark=MARKS.mark(ACME), count=100)
    assert queues()[:SHAPED] == [0, 100, 0]


def test_a_foreign_program_that_ends_the_chain_comes_after_ours(nic: int, queues: Callable[[], list[int]]) -> None:
    foreign = attach_foreign(nic)
    bpf.steer_by_tcx(steering(), nic)
    assert [(program.name, program.is_ours) for program in bpf.attached(nic).programs] == [
        (steering().name, True),
        ("cil_to_netdev", False),
    ]
    queues()
    send_datagrams(socket.AF_INET, mark=MARKS.mark(ACME), count=100)
    assert queues()[2] == 100
    os.close(foreign)


def test_a_foreign_program_that_came_before_ours_is_overtaken(nic: int, queues: Callable[[], list[int]]) -> None:
    bpf.steer_by_tcx(steering(), nic)
    foreign = attach_foreign(nic)
    queues()
    for _ in range(100):  # each from another port
        send_datagrams(socket.AF_INET, mark=MARKS.mark(ACME))
    assert queues()[2] < 100
    bpf.steer_by_tcx(steering(), nic)
    assert names(nic) == [steering().name, "cil_to_netdev"]
    queues()
    for class_id in PLACEMENT:
        send_datagrams(socket.AF_INET, mark=MARKS.mark(class_id), count=100)
    assert queues()[:SHAPED] == [100, 100, 100]
    os.close(foreign)


def test_a_new_placement_replaces_the_old_one_in_place(nic: int, queues: Callable[[], list[int]]) -> None:
    bpf.steer_by_tcx(steering(), nic)
    before = bpf._chain(nic)
    moved = steering({ACME: 1})
    bpf.steer_by_tcx(moved, nic)
    (after,) = bpf._chain(nic)
    assert names(nic) == [moved.name]
    assert after.link_id == before[0].link_id
    assert after.program_id != before[0].program_id
    queues()
    send_datagrams(socket.AF_INET, mark=MARKS.mark(ACME), count=100)
    assert queues()[:SHAPED] == [0, 100, 0]
    assert len(pins()) == 1


def test_it_outlives_the_process_that_made_it(nic: int, in_child: Callable[[Callable[[], None]], Ended]) -> None:
    ended = in_child(lambda: bpf.steer_by_tcx(steering(), nic))
    assert ended.status == 0, ended.stderr
    assert names(nic) == [steering().name]


def test_leaving_detaches_at_once_and_only_us(nic: int) -> None:
    foreign = attach_foreign(nic)
    bpf.steer_by_tcx(steering(), nic)
    for _ in range(2):
        bpf.unsteer_tcx(nic)
        assert names(nic) == ["cil_to_netdev"]
        assert pins() == []
    os.close(foreign)


def test_leaving_where_we_never_were_mounts_nothing(nic: int) -> None:
    bpf.unsteer_tcx(nic)
    bpf.reap_pins()
    assert not Path("/run/kura-shaper").exists()


def test_without_its_pin_a_link_is_gone(nic: int) -> None:
    bpf.steer_by_tcx(steering(), nic)
    (name,) = pins()
    (bpf.pin_directory() / name).unlink()
    # The kernel puts the last reference in a work item, after a grace period.
    deadline = time.monotonic() + 5
    while names(nic) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names(nic) == []


@pytest.mark.parametrize("then", ["steer", "leave"])
def test_a_process_killed_before_its_link_had_its_name_leaves_nothing_for_good(nic: int, then: str) -> None:
    bpf.steer_by_tcx(steering({}), nic)
    program = bpf.load_steering(steering({ACME: 1}))
    link = bpf.attach_first(program, nic)
    (name,) = pins()
    bpf.pin(link, bpf.pin_directory() / f"{name}_new")
    os.close(link)
    os.close(program)
    assert len(names(nic)) == 2
    if then == "steer":
        bpf.steer_by_tcx(steering(), nic)
        assert (names(nic), pins()) == ([steering().name], [name])
    else:
        bpf.unsteer_tcx(nic)
        assert (names(nic), pins()) == ([], [])


def test_a_bpffs_that_the_system_got_later_takes_over(nic: int) -> None:
    bpf.steer_by_tcx(steering({}), nic)
    before = bpf.pin_directory()
    mount("bpf", "/sys/fs/bpf")
    bpf.steer_by_tcx(steering(), nic)
    assert names(nic)[:1] == [steering().name]
    if before == Path("/run/kura-shaper/bpf"):
        assert names(nic) == [steering().name]
        assert list(before.glob("steer_*")) == []
    assert bpf.pin_directory() == Path("/sys/fs/bpf/kura-shaper")


def test_pins_of_devices_that_are_gone_are_reaped(network: Network, nic: int) -> None:
    bpf.steer_by_tcx(steering(), nic)
    subprocess.run(["ip", "link", "add", "nic9", "type", "veth", "peer", "name", "up9"], check=True)
    other = socket.if_nametoindex("nic9")
    bpf.steer_by_tcx(steering(), other)
    (kept,) = [name for name in pins() if name.startswith(f"steer_{nic}_")]
    assert len(pins()) == 2
    subprocess.run(["ip", "link", "del", "nic9"], check=True)
    bpf.reap_pins()
    assert pins() == [kept]
    assert names(nic) == [steering().name]


def test_finding_out_what_the_kernel_can_leaves_no_pin(
    nic: int, in_child: Callable[[Callable[[], None]], Ended]
) -> None:
    """As an agent in its container: without CAP_SYS_ADMIN no reading tells that a program is attached."""
    bpf.pin_directory()  # mounting one would need that capability too

    def work() -> None:
        drop_sys_admin()
        probe()

    ended = in_child(work)
    assert ended.status == 0, ended.stderr
    assert pins() == []


def test_a_pin_that_would_vanish_with_our_own_mounts_is_refused(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not bpf.attached(network.device.ifindex).supported:
        pytest.skip("this kernel lacks tcx")
    # Process 1 may not let itself be compared with.
    monkeypatch.setattr(bpf, "has_private_mounts", lambda: True)
    with mounts_of_our_own():
        mount("tmpfs", "/run")
        mount("tmpfs", "/sys/fs/bpf")
        with pytest.raises(KernelRefusedError, match="mount one at /sys/fs/bpf first"):
            bpf.steer_by_tcx(steering(), network.device.ifindex)
    assert names(network.device.ifindex) == []
