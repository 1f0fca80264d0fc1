"""A lab's names and addresses are a value: no root is needed to look at them."""

import subprocess
import sys
from pathlib import Path

import pytest

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.lab.topology import Family, Lab, LabProcess, LabSpec, plan


def test_every_place_has_a_name_and_addresses_of_its_own() -> None:
    topology = plan(LabSpec(("acme", "beta")), "a1b2c3")
    names = [namespace.name for namespace in topology.namespaces]
    assert names == [
        "ks-a1b2c3-node",
        "ks-a1b2c3-client",
        "ks-a1b2c3-pod-acme",
        "ks-a1b2c3-pod-beta",
        "ks-a1b2c3-local",
    ]
    places = [pod.addresses for pod in (*topology.pods, topology.local)]
    places += [topology.node_addresses, topology.client_addresses, topology.pod_gateway]
    for family in Family:
        assert len({place.of(family) for place in places}) == len(places)
    assert topology.node.path == Path("/run/netns/ks-a1b2c3-node")


def test_a_tenant_is_found_by_name() -> None:
    topology = plan(LabSpec(("acme", "beta")), "x")
    assert topology.pod("beta").host_device == "pod-1"
    with pytest.raises(UsageError, match="no tenant 'gamma'; known: acme, beta"):
        topology.pod("gamma")


def test_tenants_may_have_the_names_of_the_labs_own_places() -> None:
    topology = plan(LabSpec(("local", "node", "client")), "x")
    assert len({namespace.name for namespace in topology.namespaces}) == 6
    assert topology.pod("local") is not topology.local


@pytest.mark.parametrize("tenants", [(), ("acme", "acme"), tuple(f"t{number}" for number in range(1_001))])
def test_a_lab_without_tenants_or_with_one_twice_or_too_many_is_refused(tenants: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="1 to 1000 tenants"):
        plan(LabSpec(tenants), "x")


def test_a_nic_without_queues_is_refused() -> None:
    with pytest.raises(UsageError, match="transmit queues"):
        plan(LabSpec(("acme",), tx_queues=0), "x")


def test_a_lab_outside_of_isolation_is_refused_before_it_makes_anything() -> None:
    with pytest.raises(UsageError, match="only inside run_isolated"), Lab(LabSpec(("acme",))):
        pass


def process(script: str, tmp_path: Path) -> LabProcess:
    log = tmp_path / "log"
    with log.open("wb") as errors:
        argv = [sys.executable, "-c", script]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    return LabProcess("script", child, log=log)


def test_events_are_told_in_order_and_other_output_is_passed_over(tmp_path: Path) -> None:
    script = """print('hello', '{"event": "one"}', '{"event": "two", "bytes": 7}', sep='\\n', flush=True)"""
    running = process(script, tmp_path)
    assert running.wait_event("two", timeout_s=10) == {"event": "two", "bytes": 7}
    assert running.child.wait(timeout=10) == 0


def test_a_process_that_ends_early_is_quoted(tmp_path: Path) -> None:
    running = process("import sys; sys.exit('no such port')", tmp_path)
    with pytest.raises(StateUnknownError, match="script ended before 'ready'; no such port"):
        running.wait_event("ready", timeout_s=10)
    assert running.child.wait(timeout=10) == 1


def test_a_silent_process_is_not_waited_for_without_end_and_is_killed_in_the_end(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)"
    )
    running = process(script, tmp_path)
    with pytest.raises(StateUnknownError, match="did not say 'ready' in time"):
        running.wait_event("ready", timeout_s=0.5)
    assert running.stop(grace_s=0.1) == -9
