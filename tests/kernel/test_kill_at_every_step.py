"""A kill between any two operations leaves a tree that carries traffic, and the next run finishes the work.

Cases F14, F20, F35: half an installation must not drop anybody's packets.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from kernel_traffic import FAMILIES, WORLD, listener, set_mark, transfer, upload
from kernel_trees import ACME, GBIT, MBIT, ROOT_HANDLE, ZETA, differences, tenant, wanted

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.apply import Applied, apply_tree, remove_tree
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.journal import Journal
from kura_shaper.tree.build import ShapeChoice, root_qdisc
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import ROOT, Handle, OtherQdisc
from kura_shaper.tree.operations import AddRoot, DeleteHook, DeleteRoot, Operation, RestoreQdisc
from kura_shaper.tree.preflight import Permission

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from conftest import Network

    from kura_shaper.kernel.errors import KernelRefusedError
    from kura_shaper.tree.build import Wanted

pytestmark = pytest.mark.privileged

UNKNOWN, NEW = Handle(0x20, 0x2A9), Handle(0x20, 0x2AA)
MARKS = [0, ACME.minor << 16, ZETA.minor << 16, NEW.minor << 16, UNKNOWN.minor << 16]
UPLOAD_BYTES = 20_000
FORMER = OtherQdisc("pfifo", Handle(5), ROOT, options=(77).to_bytes(4, "little"))


class Dying(KernelTrafficControl):
    """Sends one operation at a time, and is killed after so many of them."""

    def __init__(self, client: TcClient, network: Network, *, lives: int) -> None:
        super().__init__(client, network.device, clock=SystemClock())
        self._lives = lives

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        outcomes: list[KernelRefusedError | None] = []
        for operation in operations:
            if self._lives == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._lives -= 1
            outcomes += super().send([operation])
        return outcomes


@dataclass(frozen=True, slots=True)
class Scenario:
    """A state to start from, and a run that leads to another."""

    # What is there before the tree, and whether a tree is.
    former: tuple[OtherQdisc, ...] = ()
    has_tree: bool = True
    direct_qlen_packets: int = 1000
    permission: Permission = Permission.NONE
    is_removal: bool = False
    tenants: tuple[Any, ...] = field(default=())
    budget: int = 10 * GBIT
    shape: ShapeChoice = ShapeChoice.SINGLE
    # The shape of the tree that is there before, where that is another one.
    shape_before: ShapeChoice | None = None
    shaped_queues: int = 1


BEFORE = (tenant(ACME), tenant(ZETA, floor=0))
SCENARIOS = {
    "a first installation": Scenario(has_tree=False, tenants=BEFORE),
    "an installation over somebody else's root": Scenario(
        has_tree=False, former=(FORMER,), tenants=BEFORE, permission=Permission.TAKE_OVER
    ),
    "tenants that come and go, and rates that rise": Scenario(
        tenants=(tenant(ACME, floor=50 * MBIT, ceiling=3 * GBIT), tenant(NEW)), budget=20 * GBIT
    ),
    "rates and a budget that fall": Scenario(
        tenants=(tenant(ACME, floor=MBIT, ceiling=GBIT), tenant(ZETA, ceiling=GBIT)), budget=2 * GBIT
    ),
    "a root that is rebuilt": Scenario(direct_qlen_packets=5, tenants=BEFORE, permission=Permission.DISRUPTION),
    "a removal": Scenario(is_removal=True),
    "mq: a first installation": Scenario(has_tree=False, tenants=BEFORE, shape=ShapeChoice.MQ),
    "mq: tenants that come and go over two queues": Scenario(
        tenants=(tenant(ACME, floor=50 * MBIT, ceiling=3 * GBIT), tenant(NEW)),
        budget=20 * GBIT,
        shape=ShapeChoice.MQ,
        shaped_queues=2,
    ),
    "mq in place of single": Scenario(
        tenants=BEFORE, permission=Permission.DISRUPTION, shape=ShapeChoice.MQ, shape_before=ShapeChoice.SINGLE
    ),
    "single in place of mq": Scenario(
        tenants=BEFORE, permission=Permission.DISRUPTION, shape_before=ShapeChoice.MQ, shaped_queues=2
    ),
    "mq: a removal that brings a former root back": Scenario(is_removal=True, former=(FORMER,), shape=ShapeChoice.MQ),
    "a removal that brings a former root back": Scenario(is_removal=True, former=(FORMER,)),
}


class Stage:
    """A device in a scenario: brought to its start, run, and looked at."""

    def __init__(self, network: Network, capabilities: Any, scenario: Scenario, state: Path) -> None:
        self.network, self.scenario = network, scenario
        self.start = self._wanted(capabilities, scenario.shape_before or scenario.shape, *BEFORE)
        self.goal = self._wanted(capabilities, scenario.shape, *scenario.tenants, budget=scenario.budget)
        self.journal = Journal(state, network.device)
        state.mkdir()

    def _wanted(self, capabilities: Any, shape: ShapeChoice, *tenants: Any, budget: int = 10 * GBIT) -> Wanted:
        queues = self.scenario.shaped_queues if shape is ShapeChoice.MQ else 1
        return wanted(self.network.device, capabilities, *tenants, budget=budget, shape=shape, shaped_queues=queues)

    def set(self) -> None:
        """Bring the device to the scenario's start, whatever is there."""
        found = self.network.read()
        root = [DeleteRoot(found.root.handle)] if found.root is not None and found.root.handle.major else []
        self._send(*root, *([DeleteHook()] if found.hook else []))
        self._send(*map(RestoreQdisc, self.scenario.former))
        if self.scenario.has_tree:
            done = self._run_to(self.start, Permission.TAKE_OVER)
            assert done.exit_code == 0
            self._rebuild_root_otherwise()

    def _rebuild_root_otherwise(self) -> None:
        qdisc = replace(root_qdisc(), direct_qlen_packets=self.scenario.direct_qlen_packets)
        if qdisc != root_qdisc():
            rest = [op for op in plan(self.start, self.network.read()).operations if not isinstance(op, AddRoot)]
            self._send(DeleteRoot(ROOT_HANDLE), AddRoot(qdisc), *rest)

    def _send(self, *operations: Operation) -> None:
        with TcClient() as client:
            assert not any(client.send(operations, self.network.device.ifindex))

    def _run_to(self, goal: Wanted, permission: Permission, *, lives: int = -1) -> Applied:
        with TcClient() as client:
            control = Dying(client, self.network, lives=lives)
            return apply_tree(goal, control, self.journal, permission=permission, clock=SystemClock())

    def run(self, *, lives: int = -1) -> int:
        """Run it; with lives, until the process is killed. Return the exit code of a run that ended."""
        if not self.scenario.is_removal:
            return self._run_to(self.goal, self.scenario.permission, lives=lives).exit_code
        with TcClient() as client:
            control = Dying(client, self.network, lives=lives)
            return remove_tree(control, self.journal, clock=SystemClock()).exit_code

    def is_at_goal(self) -> bool:
        """Whether the device is exactly as it should be at the end."""
        found = self.network.read()
        if not self.scenario.is_removal:
            return differences(self.goal, found) == []
        return tuple(q for q in found.verbatim if q.handle.major) == self.scenario.former and not found.filters


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
@pytest.mark.case("F14")
def test_traffic_flows_after_a_kill_at_any_step_and_the_next_run_finishes(
    network: Network,
    capabilities: Any,
    tmp_path: Path,
    in_child: Callable[[Callable[[], int]], Any],
    scenario: Scenario,
) -> None:
    """Case F14."""
    with network.in_world():
        accepting = listener(socket.AF_INET, WORLD[socket.AF_INET])
    with accepting, socket.create_connection(accepting.getsockname()) as running, accepting.accept()[0] as far_end:
        set_mark(running, ACME.minor << 16)
        killed = 0
        while True:
            stage = Stage(network, capabilities, scenario, tmp_path / str(killed))
            stage.set()
            ended = in_child(lambda stage=stage, lives=killed: stage.run(lives=lives))  # type: ignore[misc]
            assert_traffic_flows(network, running, far_end)
            if ended.status == 0:
                break
            assert ended.status == -signal.SIGKILL, ended.stderr
            killed += 1
            assert stage.run() == 0
            assert stage.is_at_goal()
            assert_traffic_flows(network, running, far_end)
            assert stage.run() == 0
        assert stage.is_at_goal()
    assert killed >= (1 if scenario.is_removal else 3)


def assert_traffic_flows(network: Network, running: socket.socket, far_end: socket.socket) -> None:
    """Whoever sends, with or without a mark, over a new connection or one that was there before."""
    assert transfer(running, far_end, UPLOAD_BYTES) == UPLOAD_BYTES
    for mark in MARKS:
        assert upload(network, socket.AF_INET, mark=mark, size=UPLOAD_BYTES) == UPLOAD_BYTES
    assert upload(network, FAMILIES[1], mark=MARKS[1], size=UPLOAD_BYTES) == UPLOAD_BYTES
