"""Drift under load: whatever somebody does to the tree is mended within two seconds, and no connection is lost."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from kernel_agent import AgentThread, Files, Stream, streaming, until
from kernel_events import hearing
from kernel_flood import flooding
from kernel_trees import ACME, BUDGET, ZETA, differences, document
from test_tcx import attach_foreign

from kura_shaper.agent.keeper import DriftKind, Verdict
from kura_shaper.kernel import bpf
from kura_shaper.kernel.errors import NotThereError
from kura_shaper.kernel.sysfs import DeviceSysfs
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, Wanted, build
from kura_shaper.tree.model import EGRESS, Handle, HtbQdisc, Leaf, SteeringKind
from kura_shaper.tree.observe import in_force
from kura_shaper.tree.operations import (
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteHook,
    DeleteLeaf,
    DeleteRoot,
    SetLeaf,
)
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Network

    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

WITHIN_S = 2.0
MARKS = (ACME.minor << 16, ZETA.minor << 16)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write()
    return made


class Rig:
    """An agent that keeps `nic0`, and two tenants' connections through it."""

    def __init__(
        self, network: Network, running: AgentThread, streams: list[Stream], wanted: Callable[[], Wanted]
    ) -> None:
        self.network, self.running, self.streams, self._wanted = network, running, streams, wanted

    def hand(self, *operations: Operation) -> None:
        """Somebody else does something."""
        refused = self.network.client().send(operations, self.network.device.ifindex)
        assert not any(refused), refused

    def mended(self, meddle: Callable[[], object], *kinds: DriftKind) -> float:
        """Let somebody meddle and return how long it took to be mended; it counts as these kinds, once each."""
        self.running.settle()
        # The hour's limit has tests of its own.
        self.running.keeper()._rebuilds_ns.clear()
        tally = self.running.keeper().tally
        before, repairs = dict(tally.drift), tally.repairs
        began = time.monotonic()
        meddle()
        until(lambda: tally.repairs > repairs, within_s=20, what=str(self.running.looked()))
        took = time.monotonic() - began
        self.running.settle()
        assert differences(self._wanted(), self.network.read()) == []
        for stream in self.streams:
            stream.assert_goes_on()
        grown = {kind: count - before.get(kind, 0) for kind, count in tally.drift.items()}
        assert {kind for kind, count in grown.items() if count} == {*kinds}
        assert max(grown.values()) == 1
        assert tally.repairs == repairs + 1
        assert tally.installs == 1
        return took


def rig_of(network: Network, files: Files, capabilities: Capabilities, **settings: Any) -> Iterator[Rig]:
    shape = settings.get("shape", ShapeChoice.SINGLE)

    def wanted() -> Wanted:
        tree = TreeSettings(Rate(10**10), shape=shape, shaped_queues=settings.get("shaped_queues", 1))
        found = in_force(network.read())
        return build(document(), network.device, settings=tree, capabilities=capabilities, in_force=found)

    with AgentThread(files, capabilities, **settings) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well, what="the first tree")
        with streaming(network, *MARKS) as streams:
            yield Rig(network, running, streams, wanted)


@pytest.fixture
def rig(network: Network, files: Files, capabilities: Capabilities) -> Iterator[Rig]:
    yield from rig_of(network, files, capabilities)


def edited(found: Snapshot, classid: Handle) -> ChangeClass:
    """What somebody makes of a class."""
    spec = found.classes[classid]
    return ChangeClass(replace(spec, ceil=Rate(spec.ceil.bits_per_second - 8_000_000)))


def changed_leaf(found: Snapshot) -> SetLeaf:
    leaf = found.leaves[ACME]
    assert isinstance(leaf, Leaf)
    parameters: Any = leaf.parameters
    field = "limit_bytes" if hasattr(parameters, "limit_bytes") else "limit_packets"
    return SetLeaf(
        replace(leaf, parameters=replace(parameters, **{field: getattr(parameters, field) // 2})), in_place=True
    )


SINGLE: dict[str, tuple[Callable[[Snapshot], tuple[Operation, ...]], DriftKind]] = {
    "root deleted": (lambda found: (DeleteRoot(Handle(0x20)),), DriftKind.ROOT),
    "class edited": (lambda found: (edited(found, ACME),), DriftKind.CLASS),
    "budget edited": (lambda found: (edited(found, BUDGET),), DriftKind.CLASS),
    "filter removed": (lambda found: (DeleteFilter(found.filters[0]),), DriftKind.FILTER),
    "leaf changed": (lambda found: (changed_leaf(found),), DriftKind.LEAF),
    "leaf removed": (lambda found: (DeleteLeaf(ACME, found.leaves[ACME].handle),), DriftKind.LEAF),
}


@pytest.mark.case("F24")
@pytest.mark.parametrize(("meddle", "kind"), SINGLE.values(), ids=SINGLE.keys())
def test_drift_is_mended_within_two_seconds_and_no_connection_is_lost(
    rig: Rig, meddle: Callable[[Snapshot], tuple[Operation, ...]], kind: DriftKind
) -> None:
    """Case F24."""
    operations = meddle(rig.network.read())
    assert rig.mended(lambda: rig.hand(*operations), kind) < WITHIN_S


def test_a_class_that_was_removed_with_its_tenant_sending_comes_back(rig: Rig) -> None:
    assert rig.mended(lambda: rig.hand(DeleteClass(ZETA)), DriftKind.CLASS) < WITHIN_S


def test_thirty_roots_that_are_deleted_come_back_at_once(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.running.settle()
    tally, took = rig.running.keeper().tally, []
    for number in range(1, 31):
        rig.running.keeper()._rebuilds_ns.clear()
        rig.hand(DeleteRoot(Handle(0x20)))
        took.append(until(lambda number=number: tally.repairs == number, within_s=20))  # type: ignore[misc]
    with capsys.disabled():
        stall = max(stream.stall_ns for stream in rig.streams) / 1e9
        print(f"\nroot back: p50 {statistics.median(took):.3f} s, p99 {max(took):.3f} s; longest pause {stall:.3f} s")
    assert max(took) < WITHIN_S
    assert tally.drift == {DriftKind.ROOT: 30}
    for stream in rig.streams:
        stream.assert_goes_on()


def test_a_look_of_its_own_makes_no_second_one(rig: Rig) -> None:
    rig.running.settle()
    rig.hand(edited(rig.network.read(), ACME))
    until(lambda: rig.running.keeper().tally.repairs)
    rig.running.settle()
    with hearing() as heard:
        looks = rig.running.agent.view.looks
        until(lambda: rig.running.agent.view.looks > looks + 1 or rig.streams[0].received_bytes > 10**6, within_s=30)
        assert rig.running.agent.view.looks <= looks + 1
        assert heard() == 0


# Shape mq.


@pytest.fixture(params=[SteeringKind.BPF, SteeringKind.SKBEDIT, SteeringKind.TCX])
def steered(
    request: pytest.FixtureRequest, network: Network, files: Files, capabilities: Capabilities
) -> Iterator[Rig]:
    """A rig in shape mq, for each way of steering that this kernel has."""
    if request.param not in capabilities.steering:
        pytest.skip(f"this kernel can't steer by {request.param}")
    only = replace(capabilities, steering=frozenset({request.param}))
    yield from rig_of(network, files, only, shape=ShapeChoice.MQ)


@pytest.fixture
def steered_before_the_hook(network: Network, files: Files, capabilities: Capabilities) -> Iterator[Rig]:
    """A rig in shape mq, steered by tcx."""
    if SteeringKind.TCX not in capabilities.steering:
        pytest.skip("this kernel can't steer by tcx")
    only = replace(capabilities, steering=frozenset({SteeringKind.TCX}))
    yield from rig_of(network, files, only, shape=ShapeChoice.MQ)


def test_what_steers_is_put_back_when_somebody_takes_it(steered: Rig) -> None:
    found = steered.network.read()
    ours = [f for f in found.filters if f.parent == EGRESS]
    if ours:
        assert steered.mended(lambda: steered.hand(*map(DeleteFilter, ours)), DriftKind.FILTER) < WITHIN_S
        assert steered.mended(lambda: steered.hand(DeleteHook()), DriftKind.HOOK) < WITHIN_S
    else:
        ifindex = steered.network.device.ifindex
        assert steered.mended(lambda: bpf.unsteer_tcx(ifindex), DriftKind.STEERING) < WITHIN_S
    looked = steered.running.looked()
    assert looked is not None
    assert looked.proof is not None
    assert looked.proof.is_proven


def test_the_htb_of_a_queue_that_somebody_took_comes_back(steered: Rig) -> None:
    (htb,) = [q for q in steered.network.read().queues.values() if isinstance(q, HtbQdisc)]
    took = steered.mended(lambda: steered.hand(DeleteLeaf(htb.parent, htb.handle)), DriftKind.QUEUE)
    assert took < WITHIN_S


def test_a_program_put_before_ours_is_seen_though_no_event_tells(steered_before_the_hook: Rig) -> None:
    rig = steered_before_the_hook
    assert rig.mended(lambda: attach_foreign(rig.network.device.ifindex), DriftKind.STEERING) < WITHIN_S
    looked = rig.running.looked()
    assert looked is not None
    assert (looked.foreign, looked.verdict) == (("tcx",), Verdict.IN_STEP)


def test_a_queue_that_is_given_to_processors_is_seen_though_no_event_tells(steered_before_the_hook: Rig) -> None:
    rig = steered_before_the_hook
    with DeviceSysfs("nic0", rig.network.device.ifindex) as sysfs:
        try:
            sysfs.set_xps_mask(1, 0)
        except NotThereError:
            pytest.skip("this kernel has no XPS")

    def give() -> None:
        with DeviceSysfs("nic0", rig.network.device.ifindex) as sysfs:
            sysfs.set_xps_mask(1, 1)

    assert rig.mended(give, DriftKind.STEERING) < WITHIN_S


def test_a_program_before_the_hook_that_ends_the_chain_makes_ours_a_link_before_it(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    hook = capabilities.steering - {SteeringKind.TCX}
    if not hook or SteeringKind.TCX not in capabilities.steering:
        pytest.skip("this kernel can't steer both at the hook and by tcx")
    with AgentThread(files, capabilities, shape=ShapeChoice.MQ) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well, what="the first tree")
        running.settle()
        attach_foreign(network.device.ifindex)
        took = until(lambda: running.keeper().tally.repairs, within_s=20, what=str(running.looked()))
        assert took < WITHIN_S
        running.settle()
        tcx = network.read().tcx
        assert tcx is not None
        assert [program.is_ours for program in tcx.programs] == [True, False]


def test_several_shaped_queues_are_balanced_and_that_is_no_news(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    if not capabilities.steering:
        pytest.skip("this kernel can't steer")
    budgets = [Handle(0x20 + queue, BUDGET.minor) for queue in range(2)]

    def total() -> int:
        found = network.read()  # one share may be of before a move and the other of after it
        return sum(found.classes[classid].ceil.bits_per_second for classid in budgets)

    with AgentThread(files, capabilities, shape=ShapeChoice.MQ, shaped_queues=2, budget=Rate(10**8)) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well, what="the first tree")
        running.settle()
        homes = {classid.minor: classid.major for classid in network.read().classes}
        busy = homes[ACME.minor] - 0x20
        before = network.read().classes[budgets[busy]].ceil
        looks = running.agent.view.looks
        with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=ACME.minor << 16, flows=1):
            until(lambda: network.read().classes[budgets[busy]].ceil > before, what="the budget follows")
        assert running.agent.view.looks <= looks + 2
        until(lambda: total() == 10**8, what="the shares add up")
        assert (running.keeper().tally.repairs, running.keeper().tally.changes) == (0, 0)
        spec = network.read().classes[budgets[1 - busy]]
        refused = network.client().send(
            [ChangeClass(replace(spec, ceil=Rate(9 * 10**7), floor=Rate(9 * 10**7)))], network.device.ifindex
        )
        assert not any(refused)
        repairs = running.keeper().tally.repairs
        until(lambda: running.keeper().tally.repairs > repairs, what="a share edited by hand")
        until(lambda: total() == 10**8, what="the shares add up again")


def test_shares_that_were_moved_are_adopted_as_they_are(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    if not capabilities.steering:
        pytest.skip("this kernel can't steer")
    budgets = [Handle(0x20 + queue, BUDGET.minor) for queue in range(2)]
    settings: dict[str, Any] = {"shape": ShapeChoice.MQ, "shaped_queues": 2, "budget": Rate(10**8)}

    def shares() -> list[Rate]:
        return [network.read().classes[classid].ceil for classid in budgets]

    with AgentThread(files, capabilities, **settings) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well, what="the first tree")
        running.settle()
        before = shares()
        with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=ACME.minor << 16, flows=1):
            until(lambda: shares() != before, what="the budget follows")
    assert sum(share.bits_per_second for share in shares()) == 10**8
    with AgentThread(files, capabilities, **settings) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well, what=str(running.looked()))
        running.settle()
        tally = running.keeper().tally
        assert (tally.installs, tally.changes, tally.repairs) == (0, 0, 0)
