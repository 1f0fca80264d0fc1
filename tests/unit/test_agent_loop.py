"""The loop's own doing: what it waits for, when it tries again, what it says, and that no wake gets lost."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from agent_view import IN_STEP, SECOND, device_view

from kura_shaper.agent.devices import _Repeated
from kura_shaper.agent.keeper import Looked, Verdict
from kura_shaper.agent.loop import Agent
from kura_shaper.agent.settings import AgentSettings, KubernetesSource
from kura_shaper.agent.source import FileSource, Told
from kura_shaper.cli.agent import _Signals
from kura_shaper.clock import FakeClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.tree.build import Capabilities
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCUMENT = "apiVersion: kura-shaper/v1\nkind: Tenants\nregion: us-east\ntenants: []\n"
NOWHERE = ("no-such-device",)


class Quiet:
    """A kernel that tells nothing."""

    def drain(self, *_: object) -> frozenset[str]:
        return frozenset()


class Rig:
    """An agent on a device that is not there."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.path, self.clock = directory / "tenants.yaml", FakeClock(1000 * SECOND)
        self.path.write_text(DOCUMENT)
        defaults: dict[str, Any] = {"file": self.path, "budget": Rate(10**9), "devices": NOWHERE}
        chosen = AgentSettings(**defaults | {"node_file": directory / "disabled"} | settings)
        self.source: Any = FileSource(self.path, None, clock=self.clock)
        self.agent = Agent(chosen, self.source, Capabilities(), clock=self.clock)

    def close(self) -> None:
        self.agent._wake_end()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


# What it waits for.


def test_without_a_device_it_waits_and_tries_again_ever_later(rig: Rig) -> None:
    waits = [rig.agent._look() // SECOND for _ in range(8)]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    view = rig.agent.view
    assert view.waiting_for == "a device to shape"
    assert "no-such-device" in view.problems[0]
    assert (view.looks, view.look_began_ns) == (8, 0)


def test_without_a_document_no_promise_is_invented(rig: Rig) -> None:
    rig.path.unlink()
    rig.agent._look()
    assert rig.agent.view.waiting_for == "a tenants document"


@pytest.mark.case("F06")
def test_without_a_budget_there_is_no_cap_and_no_loop_of_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case F06."""
    rig = Rig(tmp_path, file=None, budget=None, kubernetes=KubernetesSource("us-east"), devices=NOWHERE)
    document = rig.source.told().document

    class Cluster:
        def told(self) -> Told:
            return Told(document, is_valid=True, current_at_ns=rig.clock.now_ns())

    rig.agent._source = Cluster()
    monkeypatch.setattr("kura_shaper.agent.loop.Agent._find_devices", lambda *_: None)
    with caplog.at_level(logging.INFO, "kura_shaper"):
        waits = {rig.agent._look() // SECOND for _ in range(5)}
    assert rig.agent.view.waiting_for == "this node's budget"
    assert waits == {120}
    assert len(caplog.records) == 1
    rig.close()


def test_a_marker_is_read_at_each_look(rig: Rig, tmp_path: Path) -> None:
    found = []
    for is_there in (False, True, False):
        (tmp_path / "disabled").write_text("keep off")
        if not is_there:
            (tmp_path / "disabled").unlink()
        rig.agent._look()
        found.append(rig.agent.view.disabled is not None)
    assert found == [False, True, False]


def test_a_fault_of_ours_ends_nothing_and_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.source, "told", lambda: 1 / 0)
        assert rig.agent._look() == 2 * SECOND
        assert rig.agent.view.problems == ("a fault of the agent itself, see its log",)
        assert "ZeroDivisionError" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(rig.source, "told", lambda: (_ for _ in ()).throw(StateUnknownError("x is unknown")))
        assert rig.agent._look() == 4 * SECOND
        assert rig.agent.view.problems == ("x is unknown",)
    assert rig.agent.view.look_began_ns == 0


def test_a_device_that_asks_for_another_look_gets_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_view(rig.clock)
    monkeypatch.setattr("kura_shaper.agent.loop.Agent._look_at_all", lambda *_: True)
    rig.agent.view.devices = {"eth0": device, "eth1": device_view(rig.clock, looked=None)}
    assert rig.agent._look() == 120 * SECOND
    device.looked = replace(IN_STEP, again_in_ns=7 * SECOND)
    assert rig.agent._look() == 7 * SECOND


# What it says.


def test_only_what_changes_is_said(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kura_shaper"):
        for _ in range(3):
            rig.agent._look()
    assert [record.getMessage() for record in caplog.records] == ["devices", "waiting"]
    caplog.clear()
    failed = Looked(Verdict.FAILED, ("add class: EPERM",))
    with caplog.at_level(logging.INFO, "kura_shaper"):
        for looked in (failed, failed, IN_STEP, IN_STEP, replace(IN_STEP, foreign=("tcx",)), IN_STEP):
            rig.agent._tell("eth0", looked)
    assert [r.getMessage() for r in caplog.records] == ["device", "device_over", "foreign", "foreign_over"]


# Waking.


def test_no_wake_is_lost_while_others_are_taken(rig: Rig) -> None:
    reasons = [f"reason {number}" for number in range(2_000)]

    def wake() -> None:
        for reason in reasons:
            rig.agent.wake(reason)

    waker = threading.Thread(target=wake)
    waker.start()
    while waker.is_alive():
        rig.agent._hear(Quiet())  # type: ignore[arg-type]
    rig.agent._hear(Quiet())  # type: ignore[arg-type]
    assert {*reasons} <= rig.agent.view.wakes.keys()


def test_a_wake_of_an_agent_that_has_ended_is_no_error(rig: Rig) -> None:
    """Whoever wakes it is another thread; and its descriptor may be somebody else's by then."""
    for _ in range(20):
        running = threading.Thread(target=rig.agent.run)
        running.start()
        rig.agent._is_stopped = True
        rig.agent.wake("stop")
        running.join(5)
        assert not running.is_alive()
        rig.agent.wake("late")
        rig.agent._is_stopped = False


def test_a_wake_brings_the_next_look_near(rig: Rig) -> None:
    rig.agent._due.began(rig.clock.now_ns() + 120 * SECOND)
    rig.agent._hear(Quiet())  # type: ignore[arg-type]
    assert rig.agent._patience_s(None) == 5.0
    rig.agent.wake("test")
    rig.agent._hear(Quiet())  # type: ignore[arg-type]
    assert 0 < rig.agent._patience_s(None) <= 0.2


def test_routes_matter_only_where_they_choose_the_devices(rig: Rig, tmp_path: Path) -> None:
    class Routes(Quiet):
        def drain(self, *_: object) -> frozenset[str]:
            return frozenset({"route"})

    rig.agent._hear(Routes())  # type: ignore[arg-type]
    assert not rig.agent.view.wakes
    auto = Rig(tmp_path, devices=())
    auto.agent._hear(Routes())  # type: ignore[arg-type]
    assert auto.agent.view.wakes["route"] == 1
    auto.close()


@pytest.mark.parametrize("comes_before", [True, False])
def test_a_signal_ends_it_also_when_it_comes_while_it_begins(rig: Rig, comes_before: bool) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        signals = _Signals()
        if comes_before:
            signal.raise_signal(signal.SIGTERM)
        signals.are_for(rig.agent)
        if not comes_before:
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert rig.agent._is_stopped


# Threads that are begun again.


def test_work_that_ended_with_an_error_begins_again_and_other_work_takes_its_place() -> None:
    begun: list[str] = []

    def fail(_: threading.Event) -> None:
        begun.append("fail")
        raise OSError(24, "Too many open files")

    def wait(stop: threading.Event) -> None:
        begun.append("wait")
        stop.wait(10)

    repeated = _Repeated()
    for _ in range(3):
        repeated.start("a", fail, "a")
        deadline = time.monotonic() + 5
        while repeated.is_running and time.monotonic() < deadline:
            time.sleep(0.001)
    assert begun == ["fail"] * 3
    repeated.start("a", wait, "a")
    repeated.start("a", wait, "a")
    repeated.start("b", wait, "b")
    running = [repeated.is_running]
    for _ in range(2):
        repeated.stop()
        running.append(repeated.is_running)
    assert running == [True, False, False]
    assert begun[3:] == ["wait", "wait"]
