"""`kura-shaper top` on a real device: on a terminal, in a pipe, and whatever becomes of the device meanwhile."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from kernel_devices import delete_link, make_wire_again
from kernel_flood import flooding
from kernel_terminal import terminal
from kernel_traffic import send_datagrams, warm_up
from kernel_trees import ACME, DOCUMENT, GATEWAY_PORT, GBIT, MBIT, ZETA, tenant, wanted

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.top.reading import NoReading, Reading, State
from kura_shaper.top.watch import DeviceWatch
from kura_shaper.tree.diff import plan
from kura_shaper.tree.operations import DeleteRoot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Cli, Network

    from kura_shaper.tree.build import Capabilities

pytestmark = pytest.mark.privileged

TOP = [sys.executable, "-m", "kura_shaper", "top", "--device=nic0"]
CEILING = 80 * MBIT
LEAVE_ALTERNATE_SCREEN = b"\x1b[?1049l"


def put(network: Network, capabilities: Capabilities) -> None:
    """Put a tree of two tenants on the device."""
    tenants = tenant(ACME, floor=20 * MBIT, ceiling=CEILING), tenant(ZETA, floor=0, ceiling=300 * MBIT)
    made = wanted(network.device, capabilities, *tenants, budget=GBIT)
    found = execute(plan(made, network.read()).operations, network.control(), clock=SystemClock())
    assert {outcome.status for outcome in found} == {Status.DONE}


def take_away(network: Network) -> None:
    """Remove the tree."""
    (htb,) = network.read().htbs
    assert network.client().send([DeleteRoot(htb.handle)], network.device.ifindex) == [None]


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """A document that names both tenants."""
    file = tmp_path / "tenants.yaml"
    file.write_text(DOCUMENT)
    return file


def row(screen: str, name: str) -> list[str]:
    """The cells of a tenant's line, none when it has none."""
    return next((line.split() for line in screen.splitlines() if line.startswith(name)), [])


def rate_of(screen: str, name: str) -> str:
    cells = row(screen, name)
    return cells[2] if cells else ""


def test_a_view_shows_marked_traffic_and_takes_keys(network: Network, capabilities: Capabilities, names: Path) -> None:
    put(network, capabilities)
    warm_up(network)
    with (
        flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=ACME.minor << 16, flows=4),
        terminal([*TOP, f"--tenants={names}", "--interval=0.5"]) as view,
    ):
        screen = view.until(lambda shown: rate_of(shown, "acme").endswith("M"))
        assert screen.splitlines()[0].startswith("nic0  shape single  ")
        assert "of budget 1G (" in screen
        assert row(screen, "acme")[1] == "0x2a7"
        assert row(screen, "acme")[3:5] == ["20M", "80M"]
        assert rate_of(screen, "zeta") == "0"
        # Never more than the ceiling and its bucket, and most of it is borrowed: the floor is a quarter.
        assert float(rate_of(screen, "acme")[:-1]) * MBIT <= CEILING * 1.05
        assert int(row(screen, "acme")[6].rstrip("%")) > 50
        assert screen.index("acme ") < screen.index("zeta ")
        view.type("c")
        view.until(lambda shown: shown.index("zeta ") < shown.index("acme "))
        view.type("/ACM\r")
        view.until(lambda shown: "'ACM': 1 of 2" in shown and not row(shown, "zeta"))
        view.type("\x1b")
        view.until(lambda shown: row(shown, "zeta"))
        view.resize(60, 10)
        view.until(lambda shown: len(shown.splitlines()) == 10 and row(shown, "acme") and "TREND" not in shown)
        view.type("?")
        view.until(lambda shown: "what it may never exceed" in shown)
        view.type("x")
        view.until(lambda shown: row(shown, "acme"))
        view.type("q")
        assert view.ended() == 0
        assert LEAVE_ALTERNATE_SCREEN in view.sent


def test_a_view_tells_a_tree_that_is_rebuilt_gone_and_a_device_that_vanishes(
    network: Network, capabilities: Capabilities
) -> None:
    put(network, capabilities)
    send_datagrams(socket.AF_INET, mark=ACME.minor << 16, count=20)
    with terminal([*TOP, "--interval=0.3"], columns=140) as view:
        view.until(lambda shown: rate_of(shown, "0x2a7") == "0")
        take_away(network)
        put(network, capabilities)
        view.until(lambda shown: "counters began again" in shown or "is back" in shown)
        view.until(lambda shown: rate_of(shown, "0x2a7") == "0")
        take_away(network)
        view.until(lambda shown: "no tree of ours; the root qdisc is" in shown and not row(shown, "0x2a7"))
        delete_link("nic0")
        screen = view.until(lambda shown: "there is no device nic0 now" in shown)
        assert " ago" in screen
        make_wire_again(network)
        view.until(lambda shown: "no tree of ours; the root qdisc is" in shown)
        put(network, capabilities)
        view.until(lambda shown: "a tree of ours is back" in shown and rate_of(shown, "0x2a7") == "0")
        view.process.send_signal(signal.SIGTERM)
        assert view.ended() == 0
        assert LEAVE_ALTERNATE_SCREEN in view.sent


def test_lines_go_to_a_pipe_without_a_control_character(
    network: Network, capabilities: Capabilities, names: Path
) -> None:
    put(network, capabilities)
    command = [*TOP, f"--tenants={names}", "--interval=0.2", "--count=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr.count("kura-shaper: note: retransmits ") == done.stderr.count("\n") <= 1
    assert all(line.isascii() and line.isprintable() for line in done.stdout.splitlines())
    first, second = done.stdout.split("\n\n")[:2]
    assert [len(line) for line in first.splitlines()[2:]] == [len(line) for line in second.splitlines()[2:]]
    assert [line.split()[0] for line in first.splitlines()[2:]] == ["TENANT", "acme", "zeta"]
    assert rate_of(first, "acme") == "0"


def test_lines_go_on_until_the_pipe_or_somebody_ends_it(network: Network, capabilities: Capabilities) -> None:
    put(network, capabilities)
    command = [*TOP, "--interval=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert "nic0" in running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=30) == 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert "nic0" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
        assert running.returncode == 0


def test_json_is_what_happened_between_two_readings(
    network: Network, capabilities: Capabilities, cli: Cli, names: Path
) -> None:
    put(network, capabilities)
    warm_up(network)
    with flooding(network, socket.AF_INET, socket.SOCK_STREAM, mark=ACME.minor << 16, flows=2):
        send_datagrams(socket.AF_INET, source_port=GATEWAY_PORT, count=3)
        done = cli("top", "--device=nic0", f"--tenants={names}", "--interval=0.5", "--json")
    assert done.status == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["interval_ms"] > 0
    # A kernel without BTF counts by its sockets, and one without sock_diag not at all.
    is_counted = "can't be counted" not in found["retransmits_note"]
    assert found["unattributed_sent_bytes"] > 0
    first, second = found["tenants"]
    assert (first["tenant"], second["tenant"]) == ("acme", "zeta")
    assert 0 < first["bits_per_second"] <= CEILING * 1.05
    assert first["borrowed_share"] > 0.5
    assert (second["bits_per_second"], second["borrowed_share"]) == (0, None)
    assert second["retransmits"] == (0 if is_counted else None)
    assert found["bits_per_second"] >= first["bits_per_second"]


def test_it_reads_without_any_privilege_and_says_once_what_it_can_not_tell(
    network: Network, capabilities: Capabilities, cli: Cli, drop_capabilities: Callable[[], None]
) -> None:
    put(network, capabilities)
    before = network.read()
    done = cli("top", "--device=nic0", "--interval=0.1", "--count=3", before=drop_capabilities)
    assert done.status == 0, done.stderr
    assert rate_of(done.stdout, "0x2a7") == "0"
    assert row(done.stdout, "0x2a7")[-2] == "-"
    assert done.stderr.count("\n") == 1
    assert "retransmits can't be counted here: " in done.stderr
    after = network.read()
    assert (after.classes, after.filters, after.verbatim) == (before.classes, before.filters, before.verbatim)


def test_a_device_without_a_tree_is_a_finding(network: Network, cli: Cli) -> None:
    done = cli("top", "--device=nic0", "--interval=0.1", "--once")
    assert done.status == 1
    assert re.match(r"nic0  no tree of ours; the root qdisc is \w+", done.stdout)
    done = cli("top", "--device=nic0", "--interval=0.1", "--json")
    assert done.status == 1
    assert json.loads(done.stdout)["state"] == "no_tree"


def test_outside_bytes_are_those_beside_the_tree_alone(network: Network, capabilities: Capabilities) -> None:
    put(network, capabilities)
    with DeviceWatch("nic0", clock=SystemClock()) as watch:
        first = watch.read()
        send_datagrams(socket.AF_INET, mark=ACME.minor << 16, count=20)
        second = watch.read()
        assert isinstance(first, Reading)
        assert isinstance(second, Reading)
        assert first.device_bytes is not None
        assert second.device_bytes is not None
        (root,) = second.roots
        assert second.device_bytes - first.device_bytes == second.roots[root] - first.roots[root] > 0
        delete_link("nic0")
        assert isinstance(gone := watch.read(), NoReading)
        assert gone.state is State.GONE
