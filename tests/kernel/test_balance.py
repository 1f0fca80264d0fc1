"""The budget follows demand over two shaped queues, and never lets the device exceed it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from kernel_flood import flooding, windows
from kernel_traffic import warm_up
from kernel_trees import ACME, BUDGET, GBIT, MBIT, document, tenant, wanted

from kura_shaper.clock import FakeClock, SystemClock
from kura_shaper.kernel.balance import BudgetBalancer
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.tree.build import ShapeChoice, TreeSettings, build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import Handle
from kura_shaper.tree.observe import in_force
from kura_shaper.tree.operations import ChangeClass
from kura_shaper.tree.params import inner_class
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Network

    from kura_shaper.tree.build import Capabilities, Wanted

pytestmark = pytest.mark.privileged

TOTAL = 200 * MBIT
FIRST, SECOND = BUDGET, Handle(0x21, 0x03)
OTHER = Handle(0x20, 0x2A8)


def put(network: Network, capabilities: Capabilities, *, floor: int = 20 * MBIT) -> Wanted:
    """Put a tree of two shaped queues on the device, with a tenant on each that may have the whole budget."""
    tenants = [tenant(ACME, floor=floor, ceiling=GBIT), tenant(OTHER, floor=floor - MBIT, ceiling=GBIT)]
    made = wanted(network.device, capabilities, *tenants, budget=TOTAL, shape=ShapeChoice.MQ, shaped_queues=2)
    found = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in found} == {Status.DONE}
    return made


def held(network: Network) -> tuple[int, int]:
    classes = network.read().classes
    return classes[FIRST].ceil.bits_per_second, classes[SECOND].ceil.bits_per_second


def home_of(made: Wanted, classid: Handle) -> Handle:
    return next(c.classid for c in made.tree.classes if c.classid.minor == classid.minor)


@pytest.mark.traffic
def test_all_demand_on_one_queue_gets_the_budget_within_a_second_and_the_device_never_exceeds_it(
    network: Network, capabilities: Capabilities, tmp_path: Path
) -> None:
    made = put(network, capabilities)
    warm_up(network)
    assert held(network) == pytest.approx((TOTAL / 2, TOTAL / 2), rel=0.05)
    argv = [sys.executable, "-m", "kura_shaper", "--log-level", "info", "--log-format", "json", "balance"]
    options = ["--device=nic0", f"--budget={TOTAL}", f"--state-dir={tmp_path}"]
    command = subprocess.Popen([*argv, *options], stderr=subprocess.PIPE, text=True)
    try:
        for turn, classid in enumerate((OTHER, ACME)):
            queue = home_of(made, classid).major - 0x20
            with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=classid.minor << 16, flows=8):
                started = time.monotonic()
                while held(network)[queue] < 0.85 * TOTAL:
                    assert time.monotonic() - started < (30 if turn == 0 else 10)  # the command's own start counts
                # What this process itself costs the machine is part of the time, so the log tells how long it took.
                found = windows(network.sent_bytes, 6)
            for window in found:
                # A bucket for each queue's budget class and for the tenant's own.
                assert window.sent_bytes <= window.most_bytes(TOTAL, 3 * 65_536), window
            assert sum(w.bits_per_second for w in found) / len(found) > 0.5 * TOTAL
    finally:
        command.send_signal(signal.SIGTERM)
        _, log = command.communicate(timeout=10)
    assert command.returncode == 0
    told = [json.loads(line)["shares_bits_per_second"] for line in log.splitlines() if "budget_moved" in line]
    assert told
    assert all(sum(shares) <= TOTAL for shares in told)
    # 100 ms a step: from even shares to where the demand is, in less than ten.
    assert next(n for n, shares in enumerate(told, start=1) if max(shares) >= 0.85 * TOTAL) <= 10


def test_a_step_moves_only_rates_and_never_lets_the_sum_rise(network: Network, capabilities: Capabilities) -> None:
    put(network, capabilities)
    clock, client = FakeClock(), network.client()
    balancer = BudgetBalancer(client, network.device, Rate(TOTAL), clock=clock)
    assert balancer.step().moved == 0
    before = network.read()
    clock.wait_ns(100_000_000)
    step = balancer.step()
    assert (step.moved, step.waits_for) == (0, "")
    after = network.read()
    assert (after.classes, after.leaves, after.filters) == (before.classes, before.leaves, before.filters)


def test_half_of_somebody_elses_change_does_not_become_the_budget(network: Network, capabilities: Capabilities) -> None:
    put(network, capabilities)
    balancer = BudgetBalancer(network.client(), network.device, Rate(TOTAL), clock=SystemClock())
    balancer.step()
    lower = wanted(
        network.device,
        capabilities,
        tenant(ACME, floor=20 * MBIT, ceiling=GBIT),
        tenant(OTHER, floor=19 * MBIT, ceiling=GBIT),
        budget=TOTAL // 2,
        shape=ShapeChoice.MQ,
        shaped_queues=2,
    )
    half = next(c for c in lower.tree.classes if c.classid == FIRST)
    assert network.client().send([ChangeClass(half)], network.device.ifindex) == [None]
    step = balancer.step()
    assert step.moved == 0
    assert "the shares do not add up to the budget" in step.waits_for


def test_shares_that_demand_has_moved_stay_through_apply_and_a_new_tenant_moves_nobody(
    network: Network, capabilities: Capabilities
) -> None:
    made = put(network, capabilities)
    node = {c.classid: c for c in made.tree.classes}
    rates = {FIRST: 60 * MBIT, SECOND: TOTAL - 60 * MBIT}
    moved = [
        ChangeClass(inner_class(classid, node[classid].parent, rate=Rate(rate), device=network.device))
        for classid, rate in rates.items()
    ]
    assert network.client().send(moved, network.device.ifindex) == [None, None]
    newcomer = tenant(Handle(0x20, 0x300), floor=MBIT, ceiling=GBIT)
    tenants = [tenant(ACME, floor=20 * MBIT, ceiling=GBIT), tenant(OTHER, floor=19 * MBIT, ceiling=GBIT), newcomer]
    found = network.read()
    again = build(
        document(*tenants),
        found.device,
        settings=TreeSettings(Rate(TOTAL), shape=ShapeChoice.MQ, shaped_queues=2),
        capabilities=capabilities,
        in_force=in_force(found),
    )
    assert {c.classid for c in made.tree.classes} < {c.classid for c in again.tree.classes}
    described = [op.describe() for op in plan(again, found).operations]
    assert not [line for line in described if line.startswith(("change class 20:3 ", "change class 21:3 "))]
    assert any(line.startswith(("add class 20:300", "add class 21:300")) for line in described)


def test_the_command_says_what_it_waits_for_and_ends_with_its_duration(network: Network, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "kura_shaper",
        "balance",
        "--device=nic0",
        "--budget=1G",
        "--duration=0.2",
        f"--state-dir={tmp_path}",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=os.environ, check=False)
    assert done.returncode == 0
    assert "budget_waits" in done.stderr
