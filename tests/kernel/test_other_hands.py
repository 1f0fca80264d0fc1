"""Other hands on the same device: readings stay whole, what was altered is seen and mended, nobody loses a ceiling."""

from __future__ import annotations

import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from conftest import WORLD
from kernel_traffic import udp_socket
from kernel_trees import ACME, GATEWAY_PORT, MBIT, ZETA, document, htb_class, tenant, wanted
from pyroute2 import IPRoute

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.watch import ChangeWatch
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import Handle
from kura_shaper.tree.observe import observe
from kura_shaper.tree.operations import AddClass, DeleteClass
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from conftest import Network

    from kura_shaper.tree.build import Capabilities, Wanted

pytestmark = pytest.mark.privileged

READINGS = 100


def put(network: Network, capabilities: Capabilities, *handles: Handle) -> Wanted:
    """Put a tree with a tenant for each class on the device."""
    made = wanted(network.device, capabilities, *(tenant(handle, floor=0) for handle in handles))
    outcomes = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    return made


def tc(command: str, *more: str) -> None:
    subprocess.run(["tc", *command.split(), *more], check=True, capture_output=True)


def test_no_reading_beside_a_second_writer_misses_a_class_that_stays(
    network: Network, capabilities: Capabilities
) -> None:
    many = [Handle(0x20, 0x100 + number) for number in range(600)]
    put(network, capabilities, *many)
    stop = threading.Event()

    def toggle() -> None:
        spec = htb_class(Handle(0x20, 0x50), ceil=10 * MBIT)
        with TcClient() as client:
            while not stop.is_set():
                client.send([AddClass(spec)], network.device.ifindex)
                stop.wait(0.05)
                client.send([DeleteClass(spec.classid)], network.device.ifindex)

    writer = threading.Thread(target=toggle)
    writer.start()
    try:
        control = network.control()
        found = [control.snapshot() for _ in range(READINGS)]
    finally:
        stop.set()
        writer.join()
    whole = [s for s in found if isinstance(s, Snapshot)]
    assert all(set(many) <= set(snapshot.classes) for snapshot in whole)
    assert all("changed during every reading" in s.reason for s in found if isinstance(s, Unknown))
    assert whole


@pytest.mark.parametrize("change", ["class", "another device", "nothing"])
def test_a_watch_tells_what_would_tear_a_reading(network: Network, capabilities: Capabilities, change: str) -> None:
    put(network, capabilities, ACME)
    with IPRoute() as ip:
        ip.link("add", ifname="other0", kind="veth", peer={"ifname": "other1"})
        with ChangeWatch(network.device.ifindex) as watch:
            if change == "class":
                network.client().send([AddClass(htb_class(Handle(0x20, 0x50)))], network.device.ifindex)
            elif change == "another device":
                ip.link("del", ifname="other0")
            assert watch.saw_change() is (change != "nothing")


@pytest.mark.parametrize("extra", [["da"], ["action", "pass"]])
def test_our_program_with_a_flag_or_an_action_of_somebody_elses_is_seen_and_mended(
    network: Network, capabilities: Capabilities, extra: list[str]
) -> None:
    made = put(network, capabilities, ACME)
    (ours,) = made.tree.filters
    instructions = getattr(ours.match, "instructions")  # noqa: B009 - the union's other members have none
    bytecode = ",".join([str(len(instructions)), *(" ".join(map(str, i)) for i in instructions)])
    tc("filter del dev nic0 parent 20: prio 100")
    place = "filter add dev nic0 parent 20: protocol all prio 100 handle 1 bpf bytecode"
    try:
        tc(place, bytecode, *extra)
    except subprocess.CalledProcessError:
        pytest.skip(f"this kernel lacks it: {' '.join(extra)}")
    altered = network.read()
    assert observe(altered, document(tenant(ACME, floor=0))).drift
    outcomes = execute(plan(made, altered).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert plan(made, network.read()).operations == ()


def test_a_filter_of_another_kind_at_our_priority_goes_as_a_whole(network: Network, capabilities: Capabilities) -> None:
    made = put(network, capabilities, ACME)
    tc("filter del dev nic0 parent 20: prio 100")
    tc(
        *[
            "filter",
            "add",
            "dev",
            "nic0",
            "parent",
            "20:",
            "protocol",
            "all",
            "prio",
            "100",
            "u32",
            "match",
            "u32",
            "0",
            "0",
            "classid",
            "20:2",
        ]
    )
    outcomes = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert network.read().filters == made.tree.filters


def test_an_overhead_set_by_hand_is_drift_and_mended(network: Network, capabilities: Capabilities) -> None:
    made = put(network, capabilities, ACME)
    tc(f"class change dev nic0 parent 20:3 classid {ACME} htb rate 1mbit ceil 1500mbit overhead 40 mpu 64")
    outcomes = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert plan(made, network.read()).operations == ()


def test_a_size_table_on_the_root_is_a_rebuild_that_must_be_allowed(
    network: Network, capabilities: Capabilities
) -> None:
    made = put(network, capabilities, ACME)
    tc("qdisc del dev nic0 root")
    tc(
        *[
            "qdisc",
            "add",
            "dev",
            "nic0",
            "root",
            "handle",
            "20:",
            "stab",
            "overhead",
            "24",
            "htb",
            "default",
            "12",
            "direct_qlen",
            "1000",
        ]
    )
    assert [refusal.code for refusal in plan(made, network.read()).refusals] == ["rebuild-needed"]


def test_a_budget_across_every_bound_holds_and_stays(network: Network, capabilities: Capabilities) -> None:
    for budget in (4 * MBIT, 3_000 * MBIT, 2 * MBIT):
        made = wanted(network.device, capabilities, tenant(ACME, floor=0), budget=budget)
        outcomes = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
        assert {outcome.status for outcome in outcomes} == {Status.DONE}
        assert plan(made, network.read()).operations == ()


@pytest.mark.case("D10")
def test_the_class_of_a_tenant_that_left_stays_while_it_sends_and_goes_when_it_is_quiet(
    network: Network, capabilities: Capabilities
) -> None:
    """Case D10."""
    put(network, capabilities, ACME, ZETA)
    left = wanted(network.device, capabilities, tenant(ZETA, floor=0))
    stop = threading.Event()

    def keep_sending() -> None:
        with udp_socket(socket.AF_INET, mark=ACME.minor << 16, source_port=GATEWAY_PORT) as sender:
            while not stop.wait(0.02):
                sender.sendto(bytes(500), (WORLD.v4, 9))

    sending = threading.Thread(target=keep_sending)
    sending.start()
    try:
        outcomes = execute(plan(left, network.read()).operations, network.control(), clock=SystemClock())
        assert Status.BUSY in {outcome.status for outcome in outcomes}
        assert ACME in network.read().classes
    finally:
        stop.set()
        sending.join()
    outcomes = execute(plan(left, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert ACME not in network.read().classes


def test_a_take_over_of_a_tree_that_uses_our_handles_is_done(network: Network, capabilities: Capabilities) -> None:
    tc(
        *[
            "qdisc",
            "add",
            "dev",
            "nic0",
            "root",
            "handle",
            "7:",
            "tbf",
            "rate",
            "10mbit",
            "burst",
            "20k",
            "latency",
            "50ms",
        ]
    )
    tc("qdisc add dev nic0 parent 7:1 handle 20: pfifo")
    made = wanted(network.device, capabilities, tenant(ACME, floor=0))
    planned = plan(made, network.read(), Permission.TAKE_OVER)
    outcomes = execute(planned.operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} == {Status.DONE}
    assert network.read().root == made.tree.root
