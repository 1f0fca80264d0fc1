"""Shape mq on a real device: steering that is proven, and everything that can defeat it, seen and mended."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import drop_sys_admin, run_in_child
from kernel_devices import delete_link, make_wire_again, rename_link, set_link, set_live_tx_queues
from kernel_flood import flooding, mean_bits_per_second, windows
from kernel_traffic import FAMILIES, counted, read_when_sent, send_datagrams, warm_up
from kernel_trees import ACME, DOCUMENT, GBIT, ZETA, document, tenant, wanted

from kura_shaper.clock import SystemClock
from kura_shaper.kernel import bpf
from kura_shaper.kernel.apply import apply_document
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.prove import Proof, prove_steering
from kura_shaper.kernel.sysfs import DeviceSysfs
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.ebpf import EbpfProgram
from kura_shaper.tree.model import EGRESS, Handle, HtbQdisc, Leaf, OtherQdisc, SteeringKind
from kura_shaper.tree.observe import in_force, observe
from kura_shaper.tree.operations import AddHook, SetQueue
from kura_shaper.tree.preflight import Permission
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Cli, Ended, Network

    from kura_shaper.tree.build import Wanted

pytestmark = pytest.mark.privileged


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture
def run(cli: Cli, tenants: Path) -> Callable[..., Ended]:
    """Return what runs a command on `nic0` with the document."""

    def command(name: str, *options: str) -> Ended:
        fixed = ["--device", "nic0", "--tenants", str(tenants)]
        return cli(name, *fixed, *(["--budget", "10G"] if name != "status" else []), *options)

    return command


@pytest.fixture(params=list(SteeringKind))
def kind(request: pytest.FixtureRequest, capabilities: Capabilities) -> SteeringKind:
    """Each way of steering that this kernel has."""
    chosen: SteeringKind = request.param
    if chosen not in capabilities.steering:
        pytest.skip(f"this kernel can't steer by {chosen}")
    return chosen


def by(capabilities: Capabilities, kind: SteeringKind) -> Capabilities:
    return Capabilities(capabilities.leaves, capabilities.classifiers, frozenset({kind}))


def put(network: Network, made: Wanted, permission: Permission = Permission.NONE) -> None:
    planned = plan(made, network.read(), permission)
    assert planned.refusals == ()
    outcomes = execute(planned.operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in outcomes} <= {Status.DONE}, outcomes
    assert plan(made, network.read()).operations == ()


def prove(network: Network) -> Proof:
    return prove_steering(network.control(), document().marks, clock=SystemClock())


def faults(network: Network) -> tuple[str, ...]:
    state = observe(network.read(), None).steering
    assert state is not None
    return state.faults


def mq(network: Network, capabilities: Capabilities, kind: SteeringKind, *, queues: int = 1) -> Wanted:
    return wanted(network.device, by(capabilities, kind), shape=ShapeChoice.MQ, shaped_queues=queues)


# The shape itself.


@pytest.mark.parametrize("queues", [1, 2, 4])
def test_every_way_of_steering_brings_each_mark_to_its_own_queue(
    network: Network, capabilities: Capabilities, kind: SteeringKind, queues: int
) -> None:
    tenants = [tenant(Handle(0x20, 0x100 + n), floor=0) for n in range(8)]
    made = wanted(network.device, by(capabilities, kind), *tenants, shape=ShapeChoice.MQ, shaped_queues=queues)
    warm_up(network)
    put(network, made)
    assert prove(network) == Proof(is_proven=True)
    homes = {spec.classid.minor: spec.classid for spec in made.tree.classes if spec.classid.minor >= 0x100}
    assert {home.major - 0x20 for home in homes.values()} == set(range(queues))
    for minor, home in homes.items():
        before = network.read()
        for family in FAMILIES:
            for _ in range(3):  # each from another port, hence another flow
                send_datagrams(family, mark=minor << 16, count=2)
        assert counted(before, read_when_sent(network)).get(home, (0, 0))[0] == 12


def test_payload_without_a_mark_from_a_gateway_port_comes_under_the_budget_of_the_first_queue(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind, queues=2)
    warm_up(network)
    put(network, made)
    before = network.read()
    for family in FAMILIES:
        send_datagrams(family, source_port=443, count=5)
    assert counted(before, read_when_sent(network))[Handle(0x20, 0x11)][0] == 10


def test_host_traffic_keeps_off_the_shaped_queues(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind)
    warm_up(network)
    put(network, made)
    before = network.read()
    for _ in range(40):
        send_datagrams(socket.AF_INET, count=1)
    after = read_when_sent(network)
    host = Handle(0x20, 0x02)
    assert after.counters[host].sent_packets - before.counters[host].sent_packets == 0


def test_what_the_host_sends_on_a_shaped_queue_is_not_held_to_the_budget(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind)
    host = next(c for c in made.tree.classes if c.classid == Handle(0x20, 0x02))
    assert host.parent == Handle(0x20, 0x01)
    assert host.ceil > Rate(10 * GBIT)


# What can defeat steering (D16, F16, and an index beyond the live queues).


@pytest.mark.case("D16")
def test_xps_that_is_set_again_is_seen_and_cleared_where_it_matters(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    """Case D16."""
    made = mq(network, capabilities, kind)
    put(network, made)
    set_xps(network, 2, 1)
    if not kind.needs_xps_off:
        assert faults(network) == ()
        assert prove(network).is_proven
        return
    assert faults(network) == ("XPS is set on tx queue 2 and overrides steering",)
    assert "XPS is set on tx queue 2" in prove(network).reason
    planned = plan(made, network.read())
    assert [op.describe() for op in planned.operations] == ["clear XPS of tx queue 2"]
    put(network, made)
    assert prove(network).is_proven


def set_xps(network: Network, queue: int, mask: int) -> None:
    with DeviceSysfs(network.device.name, network.device.ifindex) as sysfs:
        if not Path("/sys/class/net/lo/queues/tx-0/xps_cpus").exists():
            pytest.skip("this kernel has no XPS")
        sysfs.set_xps_mask(queue, mask)


def test_xps_masks_come_back_with_uninstall(network: Network, cli: Cli, run: Callable[..., Ended]) -> None:
    set_xps(network, 1, 1)
    set_xps(network, 3, 2)
    applied = run("apply", "--shape", "mq")
    assert applied.status == 0, applied
    with DeviceSysfs("nic0", network.device.ifindex) as sysfs:
        cleared = "clear XPS of tx queue 1" in applied.stdout
        assert sysfs.xps_masks() == ({} if cleared else {1: 1, 3: 2})
        assert cli("uninstall", "--device", "nic0").status == 0
        assert sysfs.xps_masks() == {1: 1, 3: 2}
    assert network.read().hook is None


FOREIGN = EbpfProgram(((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0)))  # r0 = 0, TCX_PASS; exit


@pytest.fixture
def foreign_tcx(network: Network, capabilities: Capabilities) -> Callable[[], int]:
    """Return what puts a program of somebody else's first, which ends the chain."""
    if SteeringKind.TCX not in capabilities.steering:
        pytest.skip("this kernel lacks tcx")

    class Theirs(EbpfProgram):
        @property
        def name(self) -> str:
            return "cil_to_netdev"

    def attach() -> int:
        return bpf.attach_first(bpf.load_steering(Theirs(FOREIGN.instructions)), network.device.ifindex)

    return attach


def test_a_program_that_may_not_be_looked_at_counts_as_somebodys(
    network: Network, tmp_path: Path, capabilities: Capabilities, foreign_tcx: Callable[[], int]
) -> None:
    """Opening it takes CAP_SYS_ADMIN. A tree that needs the hook must not be begun, and left half made."""
    foreign_tcx()
    settings = TreeSettings(Rate.parse("10G"))
    journal = Journal(tmp_path, network.device)

    def work() -> None:
        drop_sys_admin()
        skbedit_or_bpf = replace(capabilities, steering=capabilities.steering - {SteeringKind.TCX})
        control = network.control()
        applied = apply_document(
            parse_tenants(DOCUMENT, file="t"),
            control,
            journal,
            settings=settings,
            capabilities=skbedit_or_bpf,
            clock=SystemClock(),
        )
        assert applied.exit_code == 0, applied
        assert [note.message for note in applied.plan.notes if "that can't be read" in note.message]

    ended = run_in_child(work)
    assert ended.status == 0, ended.stderr
    assert isinstance(network.read().root, HtbQdisc)


@pytest.mark.case("F16")
def test_where_a_program_of_the_cni_ends_the_chain_ours_goes_first(
    network: Network, run: Callable[..., Ended], foreign_tcx: Callable[[], int]
) -> None:
    """Case F16."""
    foreign_tcx()
    applied = run("apply", "--shape", "mq")
    assert applied.status == 0, applied
    assert "steering by tcx, since tcx program cil_to_netdev runs ahead of the egress hook" in applied.stdout
    assert prove(network).is_proven
    shown = json.loads(run("status", "--json").stdout)
    assert shown["steering"]["ok"] is True
    assert shown["steering"]["way"] == "tcx"
    assert "what was open before" in shown["steering"]["limits"]
    assert run("apply", "--shape", "mq").stdout.endswith("nic0: 0 operations\n")


def test_a_program_of_the_cni_that_comes_later_is_seen_and_overtaken(
    network: Network, cli: Cli, run: Callable[..., Ended], foreign_tcx: Callable[[], int]
) -> None:
    assert run("apply", "--shape", "mq").status == 0
    foreign_tcx()
    shown = run("status")
    assert shown.status == 1
    assert "NOT proven: 16 of 16 marked frames did not come to tx queue 0" in shown.stdout or (
        "cil_to_netdev runs ahead of the egress hook and may end the chain before ours" in shown.stdout
    )
    assert run("apply", "--shape", "mq").status == 0
    assert run("status").status == 0
    assert observe(network.read(), None).steering is not None
    foreign_tcx()  # and once more, ahead of our link this time
    assert run("status").status == 1
    assert run("apply", "--shape", "mq").status == 0
    assert run("status").status == 0
    assert cli("uninstall", "--device", "nic0").status == 0
    after = network.read()
    assert after.tcx is not None
    assert [p.name for p in after.tcx.programs] == ["cil_to_netdev"] * 2


def test_steering_that_somebody_deleted_is_seen_and_put_back(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind)
    put(network, made)
    if kind is SteeringKind.TCX:
        bpf.unsteer_tcx(network.device.ifindex)
    else:
        tc("qdisc del dev nic0 clsact")
    assert faults(network) == ("nothing steers packets to the shaped queues",)
    assert not prove(network).is_proven
    put(network, made)
    assert prove(network).is_proven


@pytest.mark.case("D4")
def test_the_kernel_takes_a_queue_that_is_not_there_and_we_do_not(network: Network, capabilities: Capabilities) -> None:
    """Case D4."""
    settings = TreeSettings(Rate(GBIT), shape=ShapeChoice.MQ, shaped_queues=5)
    with pytest.raises(Exception, match="it has 4 live tx queues and 5 are to be shaped; shape at most 4"):
        build(document(), network.device, settings=settings, capabilities=capabilities)


@pytest.mark.traffic
def test_a_tenant_that_left_and_still_sends_keeps_its_ceiling_on_a_further_queue(
    network: Network, cli: Cli, tenants: Path, run: Callable[..., Ended]
) -> None:
    options = ("--shape", "mq", "--shaped-queues", "2")
    tenants.write_text(DOCUMENT.replace("ceiling: 40G", "ceiling: 100M"))
    assert run("apply", *options).status == 0
    (zeta,) = (c for c in network.read().classes if c.minor == ZETA.minor)
    assert zeta.major == 0x21
    warm_up(network)
    tenants.write_text("\n".join(line for line in tenants.read_text().splitlines() if "zeta" not in line))
    with flooding(network, socket.AF_INET, socket.SOCK_DGRAM, mark=ZETA.minor << 16, flows=4):
        for _ in range(2):
            busy = run("apply", *options)
            assert busy.status == 1
            assert "it still sends" in busy.stdout
        time.sleep(0.2)
        assert mean_bits_per_second(windows(network.sent_bytes, 3)) < 150e6
    gone = run("apply", *options)
    assert gone.status == 0
    assert zeta not in network.read().classes
    assert run("apply", *options).stdout.endswith("nic0: 0 operations\n")


def test_a_filter_of_somebody_elses_at_our_priority_stays(
    network: Network, cli: Cli, run: Callable[..., Ended]
) -> None:
    tc("qdisc add dev nic0 clsact")
    tc("filter add dev nic0 egress prio 11 protocol all bpf bytecode '1,6 0 0 4294967295'")
    theirs = network.read().filters
    refused = run("apply", "--shape", "mq")
    assert refused.status == 3
    assert "filter prio 11 on the egress hook of nic0 is somebody else's" in refused.stderr
    assert cli("uninstall", "--device", "nic0").status == 0
    assert run("apply", "--shape", "single").status == 0
    assert {*theirs} <= {*network.read().filters}


def test_proofs_at_the_same_time_do_not_fail_each_other(network: Network, run: Callable[..., Ended]) -> None:
    assert run("apply", "--shape", "mq").status == 0
    argv = [sys.executable, "-m", "kura_shaper", "status", "--device", "nic0"]
    together = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [each.wait(timeout=60) for each in together] == [0, 0, 0]


# Queues that come, go and are meddled with (D4, D5, D7, D8).


@pytest.mark.case("D5")
def test_a_queue_count_that_shrinks_and_grows_keeps_the_tenants_shaped(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    """Case D5: tenants live on the first queues, so what comes and goes at the end is the host's."""
    put(network, mq(network, capabilities, kind))
    for count in (2, 1, 4):
        set_live_tx_queues(network, count)
        assert prove(network).is_proven, count
        found = network.read()
        assert found.device.tx_queues == count
        settings = TreeSettings(Rate(10 * GBIT), shape=ShapeChoice.MQ)
        again = build(
            document(),
            found.device,
            settings=settings,
            capabilities=by(capabilities, kind),
            in_force=in_force(found),
        )
        planned = plan(again, found)
        assert planned.refusals == ()
        assert {str(op.impact) for op in planned.operations} <= {"hitless"}
        put(network, again)
        assert prove(network).is_proven, count


@pytest.mark.case("D5")
def test_shaped_queues_that_are_no_longer_live_are_a_fault(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    """Case D5."""
    put(network, mq(network, capabilities, kind, queues=3))
    set_live_tx_queues(network, 2)
    assert "3 queues are shaped and only 2 are live: the kernel ignores a queue beyond them" in faults(network)
    assert not prove(network).is_proven


@pytest.mark.parametrize("queue", [0, 1, 2])
@pytest.mark.case("D8")
def test_the_qdisc_of_a_queue_that_was_deleted_by_hand_is_put_back(
    network: Network, capabilities: Capabilities, kind: SteeringKind, queue: int
) -> None:
    """Case D8: the kernel leaves nothing in its place, and drops whatever comes to that queue."""
    made = mq(network, capabilities, kind, queues=2)
    put(network, made)
    handle = {0: "20:", 1: "21:"}.get(queue)
    tc(f"qdisc replace dev nic0 parent 1f:{queue + 1} handle 99: pfifo" if handle is None else "qdisc show")
    tc(f"qdisc del dev nic0 parent 1f:{queue + 1}")
    assert Handle(0x1F, queue + 1) not in network.read().queues
    planned = plan(made, network.read())
    if handle is None and len(made.tree.queues) == 2:
        pytest.skip("this kernel has neither fq nor fq_codel to put on a host queue")
    assert any(isinstance(op, SetQueue) for op in planned.operations)
    put(network, made)
    assert prove(network).is_proven


def test_somebody_elses_qdisc_on_a_shaped_queue_is_refused_until_a_rebuild_is_allowed(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind)
    put(network, made)
    tc("qdisc replace dev nic0 parent 1f:1 handle 99: pfifo limit 10")
    (refusal,) = plan(made, network.read()).refusals
    assert refusal.code == "rebuild-needed"
    assert "tx queue 0 of nic0 has pfifo 99:, not our HTB" in refusal.message
    put(network, made, Permission.DISRUPTION)
    assert prove(network).is_proven


def test_a_host_queue_with_another_qdisc_is_left_until_a_disruption_is_allowed(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    made = mq(network, capabilities, kind)
    put(network, made)
    tc("qdisc replace dev nic0 parent 1f:3 handle 99: pfifo limit 10")
    planned = plan(made, network.read())
    assert planned.operations == ()
    if any(isinstance(queue, Leaf) for queue in made.tree.queues):
        assert [note.code for note in planned.notes if note.code == "queue-default"]
        put(network, made, Permission.DISRUPTION)
        assert isinstance(network.read().queues[Handle(0x1F, 3)], Leaf)


# Links (D6, D9).


@pytest.mark.case("D6")
def test_a_link_that_goes_down_and_up_keeps_its_tree(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    """Case D6."""
    made = mq(network, capabilities, kind)
    put(network, made)
    set_link("nic0", state="down")
    assert prove_down(network) == "the link is down"
    assert plan(made, network.read()).operations == ()
    set_link("nic0", state="up")
    assert plan(made, network.read()).operations == ()
    assert prove(network).is_proven


def prove_down(network: Network) -> str:
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.kernel.device import KernelTrafficControl
    from kura_shaper.kernel.links import read_device

    with TcClient() as client:
        control = KernelTrafficControl(client, read_device("nic0"), clock=SystemClock())
        return prove_steering(control, document().marks, clock=SystemClock()).reason


def test_a_device_that_is_renamed_keeps_its_tree_under_its_new_name(
    network: Network, cli: Cli, tenants: Path, run: Callable[..., Ended]
) -> None:
    assert run("apply", "--shape", "mq").status == 0
    rename_link("nic0", "wan0")
    again = cli("apply", "--device", "wan0", "--tenants", str(tenants), "--budget", "10G", "--shape", "mq")
    assert again.stdout.endswith("wan0: 0 operations\n")
    assert cli("status", "--device", "wan0", "--tenants", str(tenants)).status == 0
    assert cli("uninstall", "--device", "wan0").status == 0


@pytest.mark.case("D9")
def test_a_device_that_is_made_again_gets_a_tree_of_its_own(
    network: Network, cli: Cli, tenants: Path, run: Callable[..., Ended]
) -> None:
    """Case D9, F-31: another index under the old name, whose journal says nothing of this one."""
    assert run("apply", "--shape", "mq").status == 0
    delete_link("nic0")
    make_wire_again(network)
    assert run("status").status == 1
    assert run("apply", "--shape", "mq").status == 0
    assert run("status").status == 0


# auto.


def test_auto_takes_mq_where_steering_is_proven_and_says_so(run: Callable[..., Ended], network: Network) -> None:
    applied = run("apply")
    assert applied.status == 0
    assert "shape mq: auto took it, steering by" in applied.stdout
    assert "proven       steering" in applied.stdout


def test_auto_keeps_the_shape_that_is_in_force(run: Callable[..., Ended], network: Network) -> None:
    assert run("apply", "--shape", "single").status == 0
    again = run("apply")
    assert "shape single: auto did not take mq, since single is in force" in again.stdout
    assert again.stdout.endswith("nic0: 0 operations\n")


def test_auto_falls_back_to_single_when_the_proof_fails_and_says_why(
    network: Network, capabilities: Capabilities, tmp_path: Path
) -> None:
    from kura_shaper.kernel.apply import apply_document
    from kura_shaper.kernel.journal import Journal

    applied = apply_document(
        document(),
        network.control(),
        Journal(tmp_path, network.device),
        settings=TreeSettings(Rate(GBIT)),
        capabilities=capabilities,
        clock=SystemClock(),
        prove=lambda control, marks, *, clock: Proof(is_proven=False, reason="frames went astray"),
    )
    assert applied.exit_code == 0
    assert isinstance(network.read().root, HtbQdisc)
    assert not [f for f in network.read().filters if f.parent == EGRESS]
    assert "shape single: steering was not proven: frames went astray" in [n.message for n in applied.plan.notes]


def test_auto_falls_back_to_single_when_the_kernel_refuses_what_steers(
    network: Network, capabilities: Capabilities, run: Callable[..., Ended]
) -> None:
    tc("qdisc add dev nic0 egress_block 7 clsact")  # whose filters have another address
    applied = run("apply")
    assert applied.status == 0, applied
    assert "shape single: steering was not proven: set filter prio 11 on the egress hook" in applied.stdout
    assert isinstance(network.read().root, HtbQdisc)
    assert run("apply").stdout.endswith("nic0: 0 operations\n")


@pytest.mark.case("G6")
def test_an_ingress_qdisc_is_a_named_conflict(network: Network, capabilities: Capabilities) -> None:
    """Case G6."""
    made = wanted(network.device, by(capabilities, SteeringKind.BPF), shape=ShapeChoice.MQ)
    tc("qdisc add dev nic0 ingress")
    (refusal,) = plan(made, network.read()).refusals
    assert refusal.code == "hook-taken"
    assert "excludes the clsact that steering needs" in refusal.message


@pytest.mark.case("G6")
def test_a_clsact_of_somebody_elses_is_used_and_stays(network: Network, cli: Cli, run: Callable[..., Ended]) -> None:
    """Case G6."""
    tc("qdisc add dev nic0 clsact")
    applied = run("apply", "--shape", "mq")
    assert applied.status == 0
    assert "add qdisc clsact" not in applied.stdout
    assert cli("uninstall", "--device", "nic0").status == 0
    hook = network.read().hook
    assert isinstance(hook, OtherQdisc)
    assert hook.kind == "clsact"


def test_a_filter_of_somebody_elses_on_the_hook_goes_on_being_reached(
    network: Network, run: Callable[..., Ended]
) -> None:
    """Ours let the chain go on, so what a CNI hangs behind them sees every packet."""
    tc("qdisc add dev nic0 clsact")
    tc("filter add dev nic0 egress prio 50 protocol all bpf da bytecode '1,6 0 0 0'")
    assert run("apply", "--shape", "mq").status == 0
    assert prove(network).is_proven
    warm_up(network)
    send_datagrams(socket.AF_INET, mark=ACME.minor << 16, count=3)
    assert network.read().counters[ACME].sent_packets >= 3
    assert ZETA in network.read().classes


@pytest.mark.case("D11")
def test_the_hook_is_part_of_the_one_batch_that_costs_the_devices_queue(
    network: Network, capabilities: Capabilities, kind: SteeringKind
) -> None:
    """Case D11."""
    operations = plan(mq(network, capabilities, kind, queues=2), network.read()).operations
    impacts = [str(op.impact) for op in operations]
    cut = impacts.index("hitless")
    assert set(impacts[cut:]) == {"hitless"}
    assert isinstance(operations[cut - 1], AddHook if kind is not SteeringKind.TCX else SetQueue)


def tc(command: str) -> None:
    import shlex

    subprocess.run(["tc", *shlex.split(command)], check=True, capture_output=True)
