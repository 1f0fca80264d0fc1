"""apply, status and uninstall on a real device: idempotent, careful of what is not ours, and reversible."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_trees import ACME, DOCUMENT
from pyroute2 import IPRoute

from kura_shaper.kernel import wire
from kura_shaper.kernel.journal import Former, Journal
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.tree.build import root_qdisc
from kura_shaper.tree.model import ROOT, Device, Handle, HtbQdisc, MqQdisc, OtherQdisc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Cli, Ended, Network

    from kura_shaper.tree.snapshot import Snapshot

pytestmark = pytest.mark.privileged

TC_GROUP = 1 << 3  # RTNLGRP_TC


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(DOCUMENT)
    return path


@pytest.fixture(params=["single", "mq"])
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def our_root(shape: str) -> HtbQdisc | MqQdisc:
    return root_qdisc() if shape == "single" else MqQdisc(Handle(0x1F))


@pytest.fixture
def apply(cli: Cli, tenants: Path, shape: str) -> Callable[..., Ended]:
    """Return what applies the document to `nic0` in either shape, with further options."""
    fixed = ("--tenants", str(tenants), "--device", "nic0", "--budget", "10G", "--shape", shape)
    return lambda *options, **how: cli("apply", *fixed, *options, **how)


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    """Return a socket that hears of every change of a qdisc, class or filter."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as listening:
        listening.bind((0, TC_GROUP))
        yield listening


def tc(command: str) -> None:
    """Run one command of tc; skip the test where the kernel lacks what it is about."""
    done = subprocess.run(["tc", *shlex.split(command)], capture_output=True, text=True, check=False)
    if "kind is unknown" in done.stderr:
        pytest.skip(f"this kernel lacks it: tc {command}")
    assert done.returncode == 0, done.stderr


def state_of(found: Snapshot) -> tuple[object, ...]:
    # The verbatim bytes of an HTB have its counter of direct packets in them.
    verbatim = tuple(q for q in found.verbatim if q.kind != "htb")
    return (found.root, dict(found.classes), dict(found.leaves), found.filters, verbatim)


def count_waiting(heard: socket.socket) -> int:
    count = 0
    while select.select([heard], [], [], 0)[0]:
        heard.recv(65_536)
        count += 1
    return count


# Once and again.


@pytest.mark.case("G6")
def test_a_second_apply_makes_no_operation_and_the_kernel_hears_nothing(
    network: Network, apply: Callable[..., Ended], heard: socket.socket
) -> None:
    """Case G6."""
    first = apply()
    assert (first.status, first.stderr) == (0, "")
    assert count_waiting(heard) >= first.stdout.count("\ndone ")
    before = network.read()
    second = apply()
    assert (second.status, second.stderr) == (0, "")
    assert second.stdout.endswith("nic0: 0 operations\n")
    assert count_waiting(heard) == 0
    assert state_of(network.read()) == state_of(before)


def test_plan_and_dry_run_say_the_same_and_change_nothing(
    network: Network, cli: Cli, tenants: Path, apply: Callable[..., Ended], heard: socket.socket, shape: str
) -> None:
    asked = ("--tenants", str(tenants), "--device", "nic0", "--budget", "10G", "--shape", shape)
    planned, dry = cli("plan", *asked), apply("--dry-run")
    assert (planned.status, planned.stderr) == (1, "")
    assert planned == dry
    assert count_waiting(heard) == 0
    apply()
    assert cli("plan", *asked).status == 0


def test_the_outcome_is_one_json_object_with_a_status_for_each_operation(
    network: Network, apply: Callable[..., Ended]
) -> None:
    outcome = json.loads(apply("--json").stdout)
    assert {operation["status"] for operation in outcome["operations"]} == {"done"}
    assert outcome["impact"] == "device-loss"
    assert json.loads(apply("--json").stdout)["operations"] == []


def test_the_command_of_the_package_is_what_was_tried_here(network: Network, tenants: Path, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("kura-shaper")
    options = ["--tenants", str(tenants), "--device", "nic0", "--budget", "10G", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run([command, "apply", *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ACME in network.read().classes


# What is not ours.


FORMER: list[tuple[str, list[str]]] = [
    ("a plain fifo", ["qdisc add dev nic0 root handle 5: pfifo limit 77"]),
    ("a shaper", ["qdisc add dev nic0 root handle 5: tbf rate 5mbit burst 9k limit 50k"]),
    (
        "queues of their own",
        [
            "qdisc add dev nic0 root handle 5: mq",
            "qdisc add dev nic0 parent 5:2 handle 52: bfifo limit 52k",
            "qdisc add dev nic0 parent 5:4 handle 54: tbf rate 5mbit burst 9k limit 50k",
        ],
    ),
    ("a fair queue", ["qdisc add dev nic0 root handle 5: fq_codel limit 777 flows 64 target 7ms noecn"]),
    ("a paced queue", ["qdisc add dev nic0 root handle 5: fq limit 777 flow_limit 55 maxrate 5mbit"]),
    ("bands", ["qdisc add dev nic0 root handle 5: prio bands 5"]),
]


@pytest.mark.parametrize("commands", [c for _, c in FORMER], ids=[what for what, _ in FORMER])
@pytest.mark.case("E11")
def test_a_root_of_somebody_else_stays_unless_it_is_taken_over_and_then_comes_back_whole(
    network: Network, cli: Cli, apply: Callable[..., Ended], our_root: HtbQdisc | MqQdisc, commands: list[str]
) -> None:
    """Case E11."""
    for command in commands:
        tc(command)
    before = network.read()
    refused = apply()
    assert refused.status == 3
    assert "refused[foreign-root]: nic0 has a root qdisc of somebody else's" in refused.stderr
    assert state_of(network.read()) == state_of(before)

    assert apply("--take-over").status == 0
    assert network.read().root == our_root
    gone = cli("uninstall", "--device", "nic0")
    assert (gone.status, gone.stderr) == (0, "")
    assert alike(chosen(network.read()), chosen(before))
    assert list(cli.state.glob("*.json")) == []


def chosen(found: Snapshot) -> list[OtherQdisc]:
    return sorted((qdisc for qdisc in found.verbatim if qdisc.handle.major), key=lambda q: (q.handle, q.parent))


def alike(some: list[OtherQdisc], others: list[OtherQdisc]) -> bool:
    """Whether they are the same, but for a microsecond that codel loses of a time each time it is set."""

    def values(qdisc: OtherQdisc) -> dict[int, bytes]:
        return {kind: qdisc.options[a:b] for kind, (a, b) in wire.spans(qdisc.options, 0, len(qdisc.options)).items()}

    def near(one: bytes, other: bytes) -> bool:
        return abs(int.from_bytes(one, sys.byteorder) - int.from_bytes(other, sys.byteorder)) <= 1

    for one, other in zip(some, others, strict=True):
        if (one.kind, one.handle, one.parent) != (other.kind, other.handle, other.parent):
            return False
        if one.kind != "fq_codel" and one.options != other.options:
            return False
        if one.kind == "fq_codel" and not all(near(v, values(other)[k]) for k, v in values(one).items()):
            return False
    return True


# An HTB without its classes shapes nothing; an hfsc, drr or qfq without them drops every packet.
@pytest.mark.parametrize("kind", ["htb", "hfsc", "drr", "qfq"])
def test_a_former_root_with_classes_does_not_come_back_and_is_said_to_be_lost(
    network: Network, cli: Cli, apply: Callable[..., Ended], kind: str
) -> None:
    tc(f"qdisc add dev nic0 root handle 5: {kind}" + (" default 7" if kind == "htb" else ""))
    assert apply("--take-over").status == 0
    gone = cli("uninstall", "--device", "nic0")
    assert (gone.status, gone.stderr) == (0, "")
    assert "1 qdiscs had classes or hung below some, which are not kept: they do not come back" in gone.stdout
    assert chosen(network.read()) == []
    assert list(cli.state.glob("*.json")) == []


def test_without_a_former_root_the_kernels_own_comes_back(
    network: Network, cli: Cli, apply: Callable[..., Ended]
) -> None:
    before = network.read()
    apply()
    assert cli("uninstall", "--device", "nic0").status == 0
    assert state_of(network.read()) == state_of(before)
    again = cli("uninstall", "--device", "nic0")
    assert again.status == 0
    assert "is not of our making: nothing to remove" in again.stdout


def test_uninstall_leaves_a_root_of_somebody_else_alone(network: Network, cli: Cli, heard: socket.socket) -> None:
    tc("qdisc add dev nic0 root handle 20: htb default 3")
    count_waiting(heard)
    assert cli("uninstall", "--device", "nic0").status == 0
    assert count_waiting(heard) == 0


@pytest.mark.parametrize("kind", ["clsact", "ingress"])
def test_programs_of_others_on_the_hooks_stay_through_apply_and_uninstall(
    network: Network, cli: Cli, apply: Callable[..., Ended], kind: str
) -> None:
    tc(f"qdisc add dev nic0 {kind}")
    tc("filter add dev nic0 ingress prio 1 protocol all bpf da bytecode '1,6 0 0 0'")

    def programs() -> str:
        shown = subprocess.run(["tc", "filter", "show", "dev", "nic0", "ingress"], capture_output=True, text=True)
        return shown.stdout

    before = programs()
    assert "bytecode" in before
    assert apply().status == 0
    assert programs() == before
    gone = cli("uninstall", "--device", "nic0")
    assert gone.status == 0
    assert "do not come back" not in gone.stdout
    assert programs() == before


def test_a_root_of_ours_with_other_parameters_is_rebuilt_only_with_leave(
    network: Network, apply: Callable[..., Ended], our_root: HtbQdisc | MqQdisc
) -> None:
    tc("qdisc add dev nic0 root handle 20: htb default 2 direct_qlen 5")
    before = network.read()
    refused = apply()
    assert refused.status == 3
    assert "refused[rebuild-needed]" in refused.stderr
    assert state_of(network.read()) == state_of(before)
    assert apply("--allow-disruption").status == 0
    assert network.read().root == our_root


# Drift.


EDITED = "htb rate 25mbit ceil 9gbit burst 64k cburst 64k quantum 1514"
DRIFT: list[tuple[str, str]] = [
    ("a ceil edited", f"class change dev nic0 classid 20:2a7 {EDITED}"),
    ("a leaf replaced", "qdisc replace dev nic0 parent 20:2a7 handle 99: pfifo limit 3"),
    ("a filter deleted", "filter del dev nic0 parent 20: prio 100"),
    ("a class too many", "class add dev nic0 parent 20:3 classid 20:fff htb rate 1mbit"),
]


@pytest.mark.parametrize("command", [c for _, c in DRIFT], ids=[what for what, _ in DRIFT])
def test_what_was_edited_by_hand_shows_as_drift_and_only_that_is_mended(
    network: Network, cli: Cli, tenants: Path, apply: Callable[..., Ended], command: str
) -> None:
    def status() -> Ended:
        return cli("status", "--device", "nic0", "--tenants", str(tenants))

    apply()
    before = network.read()
    assert status().status == 0
    tc(command)
    drifted = status()
    assert drifted.status == 1
    assert drifted.stdout.count("drift: ") == 1
    mended = apply()
    assert mended.status == 0
    assert "nic0: 1 operations" in mended.stdout
    assert status().status == 0
    after = network.read()
    assert (after.classes, after.leaves, after.filters) == (before.classes, before.leaves, before.filters)


@pytest.mark.case("D12")
def test_a_root_deleted_by_hand_is_no_tree_of_ours_and_is_made_again(
    network: Network, cli: Cli, tenants: Path, apply: Callable[..., Ended]
) -> None:
    """Case D12."""
    apply()
    tc("qdisc del dev nic0 root")
    gone = cli("status", "--device", "nic0", "--tenants", str(tenants))
    assert (gone.status, gone.stdout) == (1, "nic0: no tree of ours; the root qdisc is noqueue 0:\n")
    assert apply().status == 0
    assert ACME in network.read().classes


def test_status_shows_what_the_kernel_has(
    network: Network, cli: Cli, tenants: Path, apply: Callable[..., Ended], shape: str
) -> None:
    apply()
    shown = json.loads(cli("status", "--device", "nic0", "--tenants", str(tenants), "--json").stdout)
    assert (shown["ours"], shown["shape"], shown["drift"]) == (True, shape, [])
    acme = next(c for c in shown["classes"] if c["owner"] == "acme")
    assert acme["class"] == "0x2a7"
    assert (acme["floor_bits_per_second"], acme["ceil_bits_per_second"]) == (25_000_000, 1_500_000_000)


# Names, privilege, and others who are at it.


@pytest.mark.parametrize("name", ["$(reboot)", "a;b|c&d", "`id`>x", "'\"\\*?[", "..x", "-rf", "nîc0", "{0}x"])
def test_a_device_name_reaches_no_shell_and_no_other_file(network: Network, cli: Cli, tenants: Path, name: str) -> None:
    with IPRoute() as ip:
        ip.link("add", ifname=name, kind="veth", peer={"ifname": "other"})
    options = ("--tenants", str(tenants), f"--device={name}", "--budget", "10G")
    done = cli("apply", *options)
    assert (done.status, done.stderr) == (0, "")
    stem = f"{name}.{Path('/proc/thread-self/ns/net').stat().st_ino}"
    assert sorted(p.name for p in cli.state.iterdir()) == sorted([f"{stem}.json", f"{stem}.lock"])
    assert cli("status", f"--device={name}", "--tenants", str(tenants)).status == 0
    assert cli("uninstall", f"--device={name}").status == 0
    assert network.read().root == OtherQdisc("noqueue", Handle(0), ROOT)


NO_SUCH_NAMES = ["", "nic7", "../../etc/passwd", "a b", "a:1", ".", "..", "n" * 16, "a\nb", "a/b"]


@pytest.mark.parametrize(
    ("command", "name"),
    [*(("status", name) for name in NO_SUCH_NAMES), *((c, "nic7") for c in ("plan", "apply", "uninstall"))],
)
def test_a_device_that_is_not_there_is_a_mistake_of_usage(
    network: Network, cli: Cli, tenants: Path, command: str, name: str
) -> None:
    more = ("--tenants", str(tenants), "--budget", "10G") if command in ("plan", "apply") else ()
    done = cli(command, f"--device={name}", *more)
    assert done.status == 2
    assert done.stdout == ""
    assert not cli.state.exists()


@pytest.mark.parametrize("command", ["apply", "uninstall"])
def test_without_privilege_nothing_is_changed_and_the_reason_is_said(
    network: Network,
    cli: Cli,
    tenants: Path,
    apply: Callable[..., Ended],
    drop_capabilities: Callable[[], None],
    command: str,
) -> None:
    apply()
    before = network.read()
    more = ("--tenants", str(tenants), "--budget", "9G") if command == "apply" else ()
    done = cli(command, "--device", "nic0", *more, before=drop_capabilities)
    assert done.status == 3
    assert "EPERM" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert state_of(network.read()) == state_of(before)


def test_while_one_run_programs_a_device_another_is_refused(
    network: Network, cli: Cli, apply: Callable[..., Ended], heard: socket.socket
) -> None:
    with Journal(cli.state, network.device).locked():
        for refused in (apply(), cli("uninstall", "--device", "nic0")):
            assert refused.status == 3
            assert "another run is programming this device" in refused.stderr
    assert count_waiting(heard) == 0
    assert apply().status == 0


def test_a_run_that_was_killed_holds_the_device_no_longer(
    network: Network, cli: Cli, apply: Callable[..., Ended], in_child: Callable[..., Ended]
) -> None:
    def hold_and_die() -> None:
        with Journal(cli.state, network.device).locked():
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(hold_and_die).status == -signal.SIGKILL
    assert apply().status == 0


# The journal.


def test_a_damaged_journal_stops_uninstall_before_it_changes_anything(
    network: Network, cli: Cli, apply: Callable[..., Ended]
) -> None:
    tc("qdisc add dev nic0 root handle 5: pfifo limit 77")
    apply("--take-over")
    before = network.read()
    (journal,) = cli.state.glob("*.json")
    journal.write_text(journal.read_text()[:-20])
    done = cli("uninstall", "--device", "nic0")
    assert done.status == 4
    assert "can't be read" in done.stderr
    assert state_of(network.read()) == state_of(before)


def test_the_journal_of_another_network_namespace_is_not_used(network: Network, tmp_path: Path) -> None:
    former = Former((OtherQdisc("pfifo", Handle(5), ROOT),))
    device = Device("nic0", network.device.ifindex)
    in_new_namespace(lambda: Journal(tmp_path, device).write(former))
    here = Journal(tmp_path, device)
    assert here.read() is None
    # Nor is it overwritten: the other device's owner may still want it.
    here.write(former)
    assert len(list(tmp_path.glob("nic0.*.json"))) == 2


@pytest.mark.parametrize("change", [{"ifindex": 77}, {"boot_id": "another"}, {"device": "nic1"}, {"version": 99}])
def test_the_journal_of_another_device_or_boot_is_not_used(
    network: Network, tmp_path: Path, change: dict[str, Any]
) -> None:
    journal = Journal(tmp_path, network.device)
    journal.write(Former((OtherQdisc("pfifo", Handle(5), ROOT),)))
    assert journal.read() is not None
    path = journal.path
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert journal.read() is None


def test_the_first_former_state_is_kept_through_later_applies(
    network: Network, cli: Cli, apply: Callable[..., Ended]
) -> None:
    tc("qdisc add dev nic0 root handle 5: pfifo limit 77")
    before = network.read()
    apply("--take-over")
    # Our root goes by hand, and the kernel's default is what the next apply finds.
    tc("qdisc del dev nic0 root")
    assert apply().status == 0
    assert cli("uninstall", "--device", "nic0").status == 0
    assert network.read().verbatim == before.verbatim
