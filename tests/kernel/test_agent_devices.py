"""What becomes of devices under an agent: gone and made anew, renamed, down and up, further ones, and lost events."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from kernel_agent import AgentThread, Files, streaming, until
from kernel_devices import add_device, delete_link, make_wire_again, rename_link, set_link
from kernel_events import hearing
from kernel_trees import ACME, DOCUMENT, ROOT_HANDLE, ZETA, differences, wanted
from pyroute2 import IPRoute

from kura_shaper.agent.events import KernelEvents
from kura_shaper.agent.keeper import DriftKind, Verdict
from kura_shaper.clock import SystemClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.links import read_device
from kura_shaper.tree.model import ROOT, Handle, OtherQdisc
from kura_shaper.tree.operations import DeleteClass, DeleteRoot, RestoreQdisc
from kura_shaper.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Network

    from kura_shaper.tree.build import Capabilities
    from kura_shaper.tree.model import Device

pytestmark = pytest.mark.privileged

WITHIN_S = 3.0


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write()
    return made


@pytest.fixture
def running(network: Network, files: Files, capabilities: Capabilities) -> Iterator[AgentThread]:
    with AgentThread(files, capabilities) as made:
        until(lambda: is_kept(made))
        made.settle()
        yield made


def is_kept(running: AgentThread, name: str = "nic0") -> bool:
    looked = running.looked(name)
    return looked is not None and looked.verdict.is_well


def read(device: Device) -> Snapshot:
    with TcClient() as client:
        found = KernelTrafficControl(client, device, clock=SystemClock()).snapshot()
    assert isinstance(found, Snapshot)
    return found


@pytest.mark.case("F26")
def test_a_device_that_is_deleted_and_made_anew_is_shaped_within_seconds(
    network: Network, capabilities: Capabilities, running: AgentThread
) -> None:
    """Case F26."""
    for _ in range(3):
        delete_link("nic0")
        until(lambda: "no such network device" in str(running.agent.view.problems), within_s=WITHIN_S)
        assert not running.agent.view.devices
        make_wire_again(network)
        until(lambda: is_kept(running), within_s=WITHIN_S, what="it is kept")
        running.settle()
        assert differences(wanted(network.device, capabilities), network.read()) == []
        assert running.keeper().tally.installs == 1
        assert sum(running.keeper().tally.drift.values()) == 0


@pytest.mark.case("F31")
def test_a_device_that_is_renamed_is_kept_under_its_new_name_with_its_counts(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    """Case F31."""
    with IPRoute() as ip:
        ip.route("add", dst="0.0.0.0/0", gateway="10.70.0.2")
    with AgentThread(files, capabilities, devices=()) as running:
        until(lambda: is_kept(running))
        with hearing():
            rename_link("nic0", "lan0")
            with IPRoute() as ip:  # a link that was down has lost its routes
                ip.route("replace", dst="0.0.0.0/0", gateway="10.70.0.2")
            until(lambda: is_kept(running, "lan0"), within_s=WITHIN_S)
        assert [*running.agent.view.devices] == ["lan0"]
        tally = running.keeper("lan0").tally
        assert (tally.installs, tally.repairs) == (1, 0)
        refused = network.client().send([DeleteRoot(ROOT_HANDLE)], network.device.ifindex)
        assert refused == [None]
        until(lambda: tally.repairs == 1, within_s=WITHIN_S)
        assert tally.drift == {DriftKind.ROOT: 1}
        rename_link("lan0", "nic0")


def test_a_link_that_goes_down_and_up_keeps_its_tree_and_its_counts(network: Network, running: AgentThread) -> None:
    for _ in range(5):
        set_link("nic0", state="down")
        until(lambda: not running.agent.view.devices["nic0"].device.is_up, within_s=WITHIN_S)
        set_link("nic0", state="up")
        until(lambda: running.agent.view.devices["nic0"].device.is_up, within_s=WITHIN_S)
    running.settle()
    tally = running.keeper().tally
    assert (tally.installs, tally.changes, tally.repairs) == (1, 0, 0)
    assert network.read().root is not None


def test_a_device_that_takes_larger_packets_gets_larger_buckets_and_that_is_no_drift(
    network: Network, running: AgentThread
) -> None:
    with IPRoute() as ip:
        ip.link("set", index=network.device.ifindex, gso_max_size=16_384)
    until(lambda: running.keeper().tally.changes, within_s=WITHIN_S)
    running.settle()
    assert differences(wanted(read_device("nic0"), running.agent._capabilities), network.read()) == []
    assert (running.keeper().tally.changes, running.keeper().tally.repairs) == (1, 0)


def test_a_second_device_is_kept_beside_the_first_and_neither_minds_the_other(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    with AgentThread(files, capabilities, devices=("nic0", "nic1")) as running:
        until(lambda: is_kept(running) and "nic1" in str(running.agent.view.problems))
        add_device("nic1", "veth", num_tx_queues=2, peer={"ifname": "up1"})
        for name in ("up1", "nic1"):
            set_link(name, state="up")
        until(lambda: "nic1" in running.agent.view.devices and is_kept(running, "nic1"), within_s=WITHIN_S)
        running.settle()
        second = read_device("nic1")
        assert differences(wanted(second, capabilities), read(second)) == []
        with TcClient() as client:
            assert client.send([RestoreQdisc(OtherQdisc("pfifo", Handle(9), ROOT))], second.ifindex) == [None]
        until(lambda: not is_kept(running, "nic1"), within_s=WITHIN_S)
        assert running.agent.view.devices["nic1"].looked.verdict is Verdict.WAITS  # type: ignore[union-attr]
        assert network.client().send([DeleteRoot(ROOT_HANDLE)], network.device.ifindex) == [None]
        until(lambda: running.keeper().tally.repairs == 1, within_s=WITHIN_S)
        assert read(second).root == OtherQdisc("pfifo", Handle(9), ROOT, options=read(second).verbatim[0].options)
        delete_link("nic1")
        until(lambda: [*running.agent.view.devices] == ["nic0"], within_s=WITHIN_S)
        assert is_kept(running)


def test_a_default_route_that_comes_later_brings_its_device_at_once(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    with AgentThread(files, capabilities, devices=()) as running:
        until(lambda: running.agent.view.looks)
        assert running.agent.view.waiting_for == "a device to shape"
        with IPRoute() as ip:
            ip.route("add", dst="0.0.0.0/0", gateway="10.70.0.2")
            until(lambda: is_kept(running), within_s=WITHIN_S)
            tally = running.keeper().tally
            ip.route("del", dst="0.0.0.0/0", gateway="10.70.0.2")
            running.settle()
            assert is_kept(running)
            assert running.keeper().tally is tally


def test_a_device_that_can_not_be_read_for_a_moment_keeps_its_counts(
    network: Network, running: AgentThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case F23: a transient failure strips nothing."""
    keeper = running.keeper()

    def fail(_: str) -> Device:
        raise StateUnknownError("network devices can't be read")

    with monkeypatch.context() as patch:
        patch.setattr("kura_shaper.agent.loop.read_device", fail)
        running.agent.wake("test")
        until(lambda: running.agent.view.problems)
        assert network.client().send([DeleteRoot(ROOT_HANDLE)], network.device.ifindex) == [None]
        until(lambda: keeper.tally.repairs == 1, within_s=WITHIN_S)
    assert running.keeper() is keeper
    until(lambda: not running.agent.view.problems)


def test_a_fault_of_ours_on_one_device_is_none_of_the_others(
    network: Network, files: Files, capabilities: Capabilities, caplog: pytest.LogCaptureFixture
) -> None:
    add_device("nic1", "veth", num_tx_queues=2, peer={"ifname": "up1"})
    for name in ("up1", "nic1"):
        set_link(name, state="up")
    with AgentThread(files, capabilities, devices=("nic1", "nic0")) as running:
        until(lambda: is_kept(running) and is_kept(running, "nic1"))
        keeper = running.keeper("nic1")
        keeper.look = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
        assert network.client().send([DeleteRoot(ROOT_HANDLE)], network.device.ifindex) == [None]
        until(lambda: running.keeper().tally.repairs == 1, within_s=WITHIN_S)
        until(lambda: not is_kept(running, "nic1"))
        assert "fault of the agent" in running.looked("nic1").reasons[0]  # type: ignore[union-attr]
        assert "ZeroDivisionError" in caplog.text


# Events.


def test_events_that_the_kernel_dropped_are_noticed(network: Network) -> None:
    events = KernelEvents()
    events._socket.setsockopt(socket.SOL_SOCKET, 33, 1)  # SO_RCVBUFFORCE, the least
    client = network.client()
    for _ in range(200):
        client.send([RestoreQdisc(OtherQdisc("pfifo", Handle(9), ROOT))], network.device.ifindex)
        client.send([DeleteRoot(Handle(9))], network.device.ifindex)
    assert "lost" in events.drain((network.device.ifindex,))
    assert events.drain((network.device.ifindex,)) == frozenset()
    client.send([RestoreQdisc(OtherQdisc("pfifo", Handle(9), ROOT))], network.device.ifindex)
    assert events.drain((network.device.ifindex,)) == {"tc"}
    assert events.drain(()) == frozenset()
    events.close()


def test_drift_whose_events_were_lost_is_mended_all_the_same(
    network: Network, running: AgentThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells of the loss is enough: nothing is taken from the events themselves."""
    drain = KernelEvents.drain
    monkeypatch.setattr(KernelEvents, "drain", lambda self, *told: frozenset({"lost"} if drain(self, *told) else ()))
    assert network.client().send([DeleteClass(ZETA)], network.device.ifindex) == [None]
    until(lambda: running.keeper().tally.repairs == 1, within_s=WITHIN_S)
    assert running.agent.view.wakes["lost"] >= 1


def test_what_happens_on_other_devices_wakes_nobody(network: Network, running: AgentThread) -> None:
    add_device("nic1", "veth", peer={"ifname": "up1"})
    running.settle()
    index, wakes = read_device("nic1").ifindex, running.agent.view.wakes["tc"]
    for _ in range(20):
        assert network.client().send([RestoreQdisc(OtherQdisc("pfifo", Handle(9), ROOT))], index) == [None]
        assert network.client().send([DeleteRoot(Handle(9))], index) == [None]
    running.settle()
    assert running.agent.view.wakes["tc"] == wakes


@pytest.mark.case("F30")
def test_an_agent_beside_a_root_of_somebody_elses_waits_until_it_is_gone(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    theirs = RestoreQdisc(OtherQdisc("pfifo", Handle(9), ROOT))
    assert network.client().send([theirs], network.device.ifindex) == [None]
    with AgentThread(files, capabilities) as running, hearing() as heard:
        until(lambda: (looked := running.looked()) and looked.verdict is Verdict.WAITS)
        looked = running.looked()
        assert looked is not None
        assert looked.foreign == ("root",)
        assert heard() == 0
        assert network.client().send([DeleteRoot(Handle(9))], network.device.ifindex) == [None]
        until(lambda: is_kept(running), within_s=WITHIN_S)
        assert running.keeper().tally.installs == 1


def test_a_tenant_that_left_keeps_its_class_for_as_long_as_it_sends_and_others_come_meanwhile(
    network: Network, files: Files, running: AgentThread
) -> None:
    with streaming(network, ACME.minor << 16) as (stream,):
        zeta = "\n".join(line for line in DOCUMENT.splitlines() if "acme" not in line)
        files.write(zeta + "\n  - {name: newcomer, class: 0x2b0, floor: 1M, ceiling: 1G}\n")
        until(lambda: running.keeper().tally.changes == 1, within_s=10)
        until(lambda: (looked := running.looked()) and looked.pending == 1, within_s=10)
        found = network.read().classes
        assert {ACME, Handle(0x20, 0x2B0)} <= found.keys()
        assert is_kept(running)
        stream.assert_goes_on()
        assert (running.keeper().tally.repairs, sum(running.keeper().tally.drift.values())) == (0, 0)
    running.settle()
    until(lambda: ACME not in network.read().classes, within_s=10)
