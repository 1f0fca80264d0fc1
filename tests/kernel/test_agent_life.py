"""How an agent begins, ends, is killed and held off: whatever becomes of it, what the kernel has stays in force."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kernel_agent import AgentProcess, AgentThread, Files, streaming, until
from kernel_devices import delete_link, make_wire_again
from kernel_events import hearing
from kernel_trees import ACME, DOCUMENT, ZETA, differences, document, wanted

from kura_shaper.haproxy.binary import cache_directory
from kura_shaper.tree.model import Handle, HtbQdisc
from kura_shaper.tree.operations import ChangeClass, DeleteClass, DeleteFilter, DeleteLeaf, DeleteRoot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Cli, Network

    from kura_shaper.tree.build import Capabilities
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot

pytestmark = pytest.mark.privileged

KILLS = 200
MARKS = (ACME.minor << 16, ZETA.minor << 16)
BUSY_LINE = "  - {{name: t{0:x}, class: {0:#x}, floor: 1M, ceiling: {1}M}}\n"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.write()
    return made


def document_of(seed: int) -> str:
    """The two tenants, and some more that differ by the number."""
    chosen = random.Random(seed)
    ids = chosen.sample(range(0x300, 0x340), 20)
    return DOCUMENT + "".join(BUSY_LINE.format(each, chosen.randint(100, 900)) for each in sorted(ids))


# The beginning.


@pytest.mark.parametrize("shape", ["single", "mq"])
def test_an_agent_that_comes_later_adopts_what_is_there_without_a_write(
    network: Network, files: Files, capabilities: Capabilities, shape: str
) -> None:
    if shape == "mq" and not capabilities.steering:
        pytest.skip("this kernel can't steer")
    with AgentProcess(files, shape=shape) as first:
        first.ready()
        assert (first.metric("installs_total"), first.metric("in_step")) == (1, 1)
        assert first.stop() == 0
    before = network.read()
    with hearing() as heard, AgentProcess(files, shape=shape) as second:
        second.ready()
        until(lambda: second.metric("reconcile_seconds_count"))
        assert heard() == 0
        assert (second.metric("installs_total"), second.metric("repairs_total")) == (0, 0)
        assert second.metric("outside_bytes_total") is not None
        assert second.stop() == 0
        assert heard() == 0
    after = network.read()
    assert (after.classes, after.leaves, after.filters) == (before.classes, before.leaves, before.filters)


@pytest.mark.case("F29")
def test_after_a_reboot_it_begins_from_nothing_and_what_the_disk_says_of_before_is_no_matter(
    network: Network, files: Files, cli: Cli
) -> None:
    """Case F29."""
    with AgentProcess(files) as before:
        before.ready()
        assert before.stop() == 0
    # What a boot leaves: a bare device with another index, and the journal of the boot before.
    (journal,) = (files.directory / "state").glob("nic0.*.json")
    journal.write_text(json.dumps(json.loads(journal.read_text()) | {"boot_id": "another"}))
    delete_link("nic0")
    make_wire_again(network)
    with AgentProcess(files) as after:
        after.ready()
        assert (after.metric("installs_total"), after.metric("repairs_total")) == (1, 0)
        assert {ACME, ZETA} <= network.read().classes.keys()
        assert after.stop() == 0
    removed = cli("uninstall", "--device", "nic0", "--state-dir", str(files.directory / "state"))
    assert removed.status == 0
    assert network.read().has_default_root


@pytest.mark.parametrize("shape", ["single", "mq"])
def test_promtool_finds_nothing_wrong_with_a_scrape(
    network: Network, files: Files, capabilities: Capabilities, shape: str
) -> None:
    program = cache_directory() / "prometheus" / "bin" / "promtool"
    if not program.exists():
        pytest.skip(f"no promtool at {program}; scripts/setup brings it")
    if shape == "mq" and not capabilities.steering:
        pytest.skip("this kernel can't steer")
    with AgentProcess(files, shape=shape) as running:
        running.ready()
        until(lambda: running.metric("class_window_max_bits_per_second") is not None)
        text = running.ask("/metrics")[1]
    done = subprocess.run(
        [str(program), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    # Rates are in bit/s, as the names of the contract say.
    other = [line for line in done.stderr.splitlines() if not line.endswith('use base unit "bytes" instead of "bits"')]
    assert (done.stdout, other) == ("", [])
    assert done.returncode in {0, 3}


# The end.


@pytest.mark.case("F37")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_changes_nothing(network: Network, files: Files, number: int) -> None:
    with streaming(network, *MARKS) as streams, AgentProcess(files) as running:
        running.ready()
        before = network.read()
        with hearing() as heard:
            assert running.stop(number) == 0
            for stream in streams:
                stream.assert_goes_on()
            assert heard() == 0
        after = network.read()
        assert (after.root, after.classes, after.filters) == (before.root, before.classes, before.filters)
        assert all(after.counters[c].sent_bytes >= before.counters[c].sent_bytes for c in before.counters)


def meddle(network: Network, found: Snapshot, number: int) -> None:
    """Somebody breaks one part or another; what is gone already is no matter."""
    leaf = found.leaves.get(ACME)
    ways: list[list[Operation]] = [
        [DeleteRoot(Handle(0x20))],
        [DeleteClass(ZETA)],
        [DeleteFilter(f) for f in found.filters[:1]],
        [DeleteLeaf(ACME, leaf.handle)] if leaf else [],
        [ChangeClass(replace(found.classes[ACME], ceil=Rate(7 * 10**8)))] if ACME in found.classes else [],
    ]
    network.client().send(ways[number % len(ways)], network.device.ifindex)


@pytest.mark.slow
@pytest.mark.traffic
@pytest.mark.case("F35")
def test_kills_at_any_moment_of_changes_and_drift_leave_traffic_going_and_the_next_start_finishes(
    network: Network, files: Files, capabilities: Capabilities, in_child: Callable[..., object]
) -> None:
    """Case F35."""
    chosen = random.Random(4711)
    with streaming(network, *MARKS) as streams:
        for number in range(KILLS):
            pid = agent_in_child(files, capabilities)
            try:
                files.write(document_of(number))
                meddle(network, network.read(), number)
                time.sleep(chosen.uniform(0.0, 0.35))  # the moment of the kill is what varies
            finally:
                kill(pid)
            for stream in streams:
                stream.assert_goes_on()
        before = {classid for classid in network.read().classes if classid in (ACME, ZETA)}
        with AgentThread(files, capabilities) as running:
            until(lambda: (looked := running.looked()) and looked.verdict.is_well, what=str(running.looked()))
            running.settle()
            found = network.read()
        assert before <= found.classes.keys()
        assert isinstance(found.root, HtbQdisc)
        lines = [line for line in document_of(KILLS - 1).splitlines() if "class" in line]
        made = {int(line.split("class: ")[1].split(",")[0], 16) for line in lines}
        tenants = {classid.minor for classid in found.classes if classid.minor >= 0x100}
        assert made <= tenants
        # What left while a connection of it was open may still drain, nothing else may be there.
        assert tenants <= made | {*range(0x300, 0x340)}


def agent_in_child(files: Files, capabilities: Capabilities) -> int:
    """An agent in a forked process, which begins at once: no interpreter has to start."""
    pid = os.fork()
    if pid == 0:
        try:
            with AgentThread(files, capabilities) as running:
                running._thread.join()
        finally:
            os._exit(0)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# Held off.


def test_a_marker_holds_it_off_across_restarts_until_it_is_taken_away(network: Network, files: Files, cli: Cli) -> None:
    marker = ("--node-file", str(files.marker))
    with AgentProcess(files) as running:
        running.ready()
        assert cli("disable", *marker, "--reason", "incident 4711").status == 0
        until(lambda: running.metric("disabled") == 1, within_s=5)
        network.client().send([DeleteRoot(Handle(0x20))], network.device.ifindex)
        until(lambda: running.metric("pending_operations"), within_s=5)
        assert running.ask("/readyz") == (503, "held off: incident 4711\n")
        assert running.ask("/healthz")[0] == 200
        assert running.stop() == 0
    with hearing() as heard, AgentProcess(files) as running:
        until(lambda: running.metric("disabled") == 1)
        until(lambda: running.metric("pending_operations"))
        assert heard() == 0
        assert network.read().has_default_root
        ended = cli("enable", *marker)
        assert (ended.status, "incident 4711" in ended.stdout) == (0, True)
        running.ready(within_s=5)
        assert (running.metric("installs_total"), running.metric("repairs_total")) == (1, 0)
    assert cli("enable", *marker).stdout.endswith("the agent was not held off\n")


def test_an_agent_that_observes_says_what_it_would_do_and_writes_nothing(network: Network, files: Files) -> None:
    with hearing() as heard, AgentProcess(files, "--observe") as running:
        running.ready()
        device = running.status()["devices"]["nic0"]
        assert (device["verdict"], device["pending"] > 5) == ("would change", True)
        assert device["operations"][0].startswith("add root qdisc htb")
        assert (running.metric("in_step"), running.metric("config_present")) == (0, 0)
        files.write(document_of(1))
        until(lambda: running.status()["devices"]["nic0"]["pending"] > device["pending"], within_s=5)
        assert running.stop() == 0
        assert heard() == 0
    assert not (files.directory / "state").exists()


# Changes.


def test_fifty_changes_at_once_are_few_looks_and_the_last_one_counts(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    with AgentThread(files, capabilities) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well)
        looks = running.settle()
        for number in range(50):
            files.write(document_of(number))
        until(lambda: len(network.read().classes) > 20, within_s=5)
        running.settle()
        assert running.agent.view.looks - looks <= 6
        assert running.keeper().tally.changes <= 2
        found = {c.minor for c in network.read().classes if c.minor >= 0x300}
        assert all(f"class: {minor:#x}" in document_of(49) for minor in found)


@pytest.mark.case("F40")
def test_new_backends_and_hosts_of_fifty_tenants_write_nothing(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    """Case F40: pods that are replaced are no churn of the tree."""

    def text(generation: int) -> str:
        lines = (
            f"  - {{name: t{n}, class: {0x300 + n:#x}, floor: 1M, ceiling: 100M,"
            f" hosts: [t{n}-{generation}.kura.example],"
            f' backends: {{http: {{address: "10.0.{generation}.{n + 1}:4000"}}}}}}\n'
            for n in range(50)
        )
        return DOCUMENT + "".join(lines)

    files.write(text(0))
    with AgentThread(files, capabilities) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well)
        running.settle()
        with hearing() as heard:
            for generation in range(1, 6):
                files.write(text(generation))
                running.settle()
                told = running.agent.view.told.document
                assert told is not None
                assert told.tenants[-1].hosts == (f"t49-{generation}.kura.example",)
            assert heard() == 0
        tally = running.keeper().tally
        assert (tally.installs, tally.changes, tally.repairs, sum(tally.drift.values())) == (1, 0, 0, 0)


@pytest.mark.traffic
def test_another_budget_touches_no_leaf_and_loses_no_packet(
    network: Network, files: Files, capabilities: Capabilities
) -> None:
    with AgentThread(files, capabilities, budget=Rate(3 * 10**9)) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well)
        before = network.read()
        with streaming(network, *MARKS) as streams:
            for gigabits in (5, 1, 3):
                agent = running.agent
                agent._settings = replace(agent._settings, budget=Rate(gigabits * 10**9))
                running.settle()
                found = network.read()
                assert found.classes[Handle(0x20, 3)].ceil == Rate(gigabits * 10**9)
                assert {c: leaf.handle for c, leaf in found.leaves.items()} == {
                    c: leaf.handle for c, leaf in before.leaves.items()
                }
                for classid in (ACME, ZETA):
                    assert found.counters[classid].sent_bytes >= before.counters[classid].sent_bytes
                    assert found.counters[classid].dropped_packets == 0
            for stream in streams:
                stream.assert_goes_on()
        tally = running.keeper().tally
        assert (tally.installs, tally.changes, tally.repairs) == (1, 3, 0)


@pytest.mark.case("G4")
def test_a_document_that_breaks_changes_nothing_and_is_told(network: Network, files: Files) -> None:
    """Case G4."""
    with AgentProcess(files) as running:
        running.ready()
        before = network.read().classes
        files.write(DOCUMENT.replace("0x2a7", "7"))
        until(lambda: running.metric("source_valid") == 0, within_s=5)
        assert network.read().classes == before
        assert running.ask("/healthz")[0] == 200
        assert (running.metric("in_step"), running.metric("source_problems")) == (1, 1)
        files.tenants.unlink()
        until(lambda: "could not be read" in str(running.status()["source"]["problems"]), within_s=5)
        assert network.read().classes == before
        files.write(DOCUMENT.replace("1500M", "1400M"))
        until(lambda: running.metric("source_valid") == 1, within_s=5)
        until(lambda: network.read().classes[ACME].ceil == Rate(1_400_000_000), within_s=5)


def test_a_run_of_apply_beside_it_delays_it_and_both_end_well(
    network: Network, files: Files, cli: Cli, capabilities: Capabilities
) -> None:
    options = ("--device", "nic0", "--tenants", str(files.tenants), "--budget", "10G", "--shape", "single")
    with AgentThread(files, capabilities) as running:
        until(lambda: (looked := running.looked()) and looked.verdict.is_well)
        for number in range(5):
            files.write(document_of(number))
            assert cli("apply", *options, "--state-dir", str(files.directory / "state")).status in {0, 1, 3}
        running.settle()
        until(lambda: not running.keeper()._undone)
        assert (tally := running.keeper().tally).installs == 1, tally


def test_bad_settings_and_a_port_that_is_taken_end_it_with_2(files: Files, network: Network, cli: Cli) -> None:
    refused = cli("agent", "--file", str(files.tenants))
    assert (refused.status, "budget: node" in refused.stderr) == (2, True)
    assert cli("agent", "--file", str(files.tenants), "--budget", "fast").status == 2
    with AgentProcess(files) as running:
        running.ready()
        options = ("--devices", "nic0", "--budget", "1G", "--node-file", str(files.marker))
        refused = cli("agent", "--file", str(files.tenants), *options)
        assert refused.status == 2
        assert "127.0.0.1:9469" in refused.stderr
        assert running.is_running


def test_without_privilege_it_says_so_and_ends(
    files: Files, network: Network, cli: Cli, drop_capabilities: Callable[[], None]
) -> None:
    options = ("--devices", "nic0", "--budget", "1G", "--node-file", str(files.marker))
    refused = cli("agent", "--file", str(files.tenants), *options, before=drop_capabilities)
    assert refused.status in {2, 3, 4}
    assert refused.stderr.count("\n") <= 3


def test_the_tree_of_an_agent_is_that_of_apply(network: Network, files: Files, capabilities: Capabilities) -> None:
    with AgentThread(files, capabilities):
        made = wanted(network.device, capabilities)
        assert document().tenants
        until(lambda: not differences(made, network.read()), what="the tree")
