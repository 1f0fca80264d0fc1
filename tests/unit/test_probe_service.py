"""The probe as a service: who is due when, what it tells Prometheus, and how it ends."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kura_shaper.clock import FakeClock
from kura_shaper.probe.failures import Failure, Reason
from kura_shaper.probe.metrics import ProbeMetrics
from kura_shaper.probe.report import EXIT_STATUS, remarks, row, to_json, worst
from kura_shaper.probe.service import ProbeService
from kura_shaper.probe.target import Load, Measured, Protocol, Target, Verdict
from kura_shaper.probe.task import Task
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 1_000_000_000
PATIENCE_S = 10.0
NOW_S = 1_700_000_000.0


def tasks(count: int) -> tuple[Task, ...]:
    return tuple(
        Task(Target(name=f"t{number}", host="a.test", tenant="acme", protocol=Protocol.HTTP2), Load())
        for number in range(count)
    )


class Probe:
    """A service at a clock that a test moves, whose measurements end when they begin unless they are held."""

    def __init__(self, count: int, *, interval_s: int = 30, measure: Callable[[Task], Measured] | None = None) -> None:
        self.clock = FakeClock(1_000 * SECOND)
        self.begun: list[tuple[str, int]] = []
        self.held: dict[str, threading.Event] = {}
        self._measure = measure or (lambda task: Measured(target=task.target))
        self.service = ProbeService(
            tasks(count), self._one, interval_ns=interval_s * SECOND, clock=self.clock, unix_time_s=lambda: NOW_S
        )

    def _one(self, task: Task, cancelled: threading.Event) -> Measured:
        self.begun.append((task.target.name, self.clock.now_ns() // SECOND - 1_000))
        if held := self.held.get(task.target.name):
            held.wait(PATIENCE_S)
        return self._measure(task)

    def turn(self) -> int:
        """Step once, let what began end unless it is held, and return when the next step is due."""
        due_ns = self.service.step()
        for watched in self.service.watched:
            if watched.thread is not None and watched.task.target.name not in self.held:
                watched.thread.join(PATIENCE_S)
        return due_ns

    def run_for(self, seconds: int) -> None:
        end_ns = self.clock.now_ns() + seconds * SECOND
        while self.clock.now_ns() < end_ns:
            self.clock.wait_ns(self.turn())

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return the samples that a scrape has now, by name and by the labels that are not fixed here."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ProbeMetrics(self.service))
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                own = [sample.labels[key] for key in ("target", "reason", "spoken") if key in sample.labels]
                found[sample.name.removeprefix("kura_shaper_probe_"), " ".join(own)] = sample.value
        return found


def test_rounds_are_spread_over_the_interval() -> None:
    probe = Probe(3)
    probe.run_for(61)
    assert sorted(probe.begun, key=lambda each: each[1]) == [
        ("t0", 0), ("t1", 10), ("t2", 20), ("t0", 30), ("t1", 40), ("t2", 50), ("t0", 60),
    ]  # fmt: skip


def test_a_target_that_takes_long_delays_nobody_and_is_left_out_meanwhile() -> None:
    probe = Probe(2)
    probe.held["t0"] = threading.Event()
    probe.run_for(100)
    assert [at_s for name, at_s in probe.begun if name == "t1"] == [15, 45, 75]
    assert [at_s for name, at_s in probe.begun if name == "t0"] == [0]
    slow = probe.service.watched[0]
    assert (slow.skipped, slow.rounds) == (3, 0)
    probe.held.pop("t0").set()
    assert slow.thread is not None
    slow.thread.join(PATIENCE_S)
    probe.run_for(30)
    # In its own place again.
    assert [at_s for name, at_s in probe.begun if name == "t0"] == [0, 120]


def test_a_machine_that_slept_makes_up_for_nothing() -> None:
    probe = Probe(2)
    probe.run_for(30)
    probe.begun.clear()
    probe.clock.wait_ns(3_601 * SECOND)
    probe.run_for(30)
    assert sorted(probe.begun) == [("t0", 3_660), ("t1", 3_645)]


def test_the_loop_turns_though_nothing_is_due() -> None:
    probe = Probe(1, interval_s=300)
    assert probe.turn() == 5 * SECOND
    probe.clock.wait_ns(60 * SECOND)
    assert probe.service.why_dead() == ""
    probe.clock.wait_ns(SECOND)
    assert "61 s" in probe.service.why_dead()
    probe.turn()
    assert probe.service.why_dead() == ""


FINE = Measured(
    target=tasks(1)[0].target,
    address="192.0.2.1:443",
    spoken="h2",
    status=200,
    resolve_ns=1_000_000,
    connect_ns=2_000_000,
    handshake_ns=3_000_000,
    first_byte_ns=4_000_000,
    certificate_ends_at_s=1_800_000_000,
    streams=4,
    received_bytes=1_000,
    rate=Rate(5_000_000),
    window_ns=SECOND,
    busy_percent=7,
)
BROKEN = replace(FINE, rate=None, status=421, failures=(Failure(Reason.STATUS, "status 421", 2),))


def test_a_result_is_told_and_every_reason_is_there_from_the_beginning() -> None:
    probe = Probe(1, measure=lambda task: FINE)
    assert probe.metrics()["failures_total", "t0 stall"] == 0
    assert ("up", "t0") not in probe.metrics()
    probe.turn()
    found = probe.metrics()
    assert {name: found[name, "t0"] for name in ("up", "status", "rounds_total", "received_bytes_total")} == {
        "up": 1, "status": 200, "rounds_total": 1, "received_bytes_total": 1_000,
    }  # fmt: skip
    assert found["handshake_seconds", "t0"] == 0.003
    assert found["first_byte_seconds", "t0"] == 0.004
    assert found["rate_bits_per_second", "t0"] == 5_000_000
    assert found["busy_ratio", "t0"] == 0.07
    assert found["certificate_not_after_timestamp_seconds", "t0"] == 1_800_000_000
    assert found["last_success_timestamp_seconds", "t0"] == NOW_S
    assert found["spoken_info", "t0 h2"] == 1
    assert {label for name, label in found if name == "failures_total"} == {f"t0 {reason}" for reason in Reason}


def test_a_failure_is_counted_by_its_reason_and_what_was_not_reached_is_absent() -> None:
    probe = Probe(1, measure=lambda task: BROKEN)
    probe.run_for(60)
    found = probe.metrics()
    assert (found["up", "t0"], found["status", "t0"], found["failures_total", "t0 status"]) == (0, 421, 4)
    assert ("rate_bits_per_second", "t0") not in found
    assert ("last_success_timestamp_seconds", "t0") not in found
    assert found["last_round_timestamp_seconds", "t0"] == NOW_S


def test_an_old_result_is_absent_and_what_was_counted_stays() -> None:
    probe = Probe(1, measure=lambda task: FINE)
    probe.turn()
    probe.clock.wait_ns(3 * 30 * SECOND + tasks(1)[0].longest_ns)
    assert ("up", "t0") in probe.metrics()
    probe.clock.wait_ns(1)
    found = probe.metrics()
    assert not {name for name, _ in found} & {"up", "status", "rate_bits_per_second", "spoken_info"}
    assert found["rounds_total", "t0"] == 1


def test_a_fault_of_our_own_is_a_failure_of_this_machine() -> None:
    def fail(task: Task) -> Measured:
        raise ValueError("on purpose")

    probe = Probe(1, measure=fail)
    probe.turn()
    last = probe.service.watched[0].last
    assert last is not None
    assert (last.verdict, last.failures[0].reason) == (Verdict.UNKNOWN, Reason.LOCAL)
    assert not probe.service.watched[0].is_running


def test_only_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    results = [FINE, BROKEN, BROKEN, FINE]
    probe = Probe(1, measure=lambda task: results.pop(0))
    with caplog.at_level(logging.INFO, logger="kura_shaper.probe"):
        probe.run_for(120)
    assert [record.message for record in caplog.records] == ["target_failed", "target_fine"]
    assert caplog.records[0].fields["failures"] == ["status: 2 times: status 421"]  # type: ignore[attr-defined]


def test_stopping_cuts_what_is_under_way_and_counts_it_for_nothing() -> None:
    begun = threading.Event()

    def wait(task: Task, cancelled: threading.Event) -> Measured:
        begun.set()
        assert cancelled.wait(PATIENCE_S)
        return BROKEN

    service = ProbeService(tasks(1), wait, interval_ns=30 * SECOND, clock=FakeClock(SECOND))
    running = threading.Thread(target=service.run)
    running.start()
    assert begun.wait(PATIENCE_S)
    service.stop()
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert service.watched[0].thread is not None
    assert not service.watched[0].thread.is_alive()
    assert service.watched[0].rounds == 0


# Text and JSON.


def test_a_row_has_what_people_ask_and_dashes_for_what_was_not_reached() -> None:
    assert row(FINE) == ("t0", "h2", "200", "2.0 ms", "3.0 ms", "4.0 ms", "5.0", "4", "fine")
    nothing = Measured(target=FINE.target, failures=(Failure(Reason.DNS, "no address"),))
    assert row(nothing) == ("t0", "-", "-", "-", "-", "-", "-", "-", "failed")
    grpc = replace(FINE, target=replace(FINE.target, protocol=Protocol.GRPC), grpc_status=5)
    assert row(grpc)[2] == "5 NOT_FOUND"


def test_remarks_say_why() -> None:
    slow = replace(FINE, target=replace(FINE.target, min_rate=Rate(6_000_000)))
    assert list(remarks(FINE)) == []
    assert list(remarks(BROKEN)) == ["failure[status]: t0: 2 times: status 421"]
    assert list(remarks(slow)) == ["slow: t0: 5.0 Mbit/s, at least 6M wanted"]
    assert "busy 95 %" in next(remarks(replace(slow, busy_percent=95)))
    assert "too little came" in next(remarks(replace(slow, rate=None)))


def test_json_has_units_in_names_and_null_for_what_was_not_reached() -> None:
    found = json.loads(json.dumps(to_json(FINE)))
    assert (found["handshake_ms"], found["rate_bits_per_second"], found["window_ms"]) == (3.0, 5_000_000, 1_000.0)
    assert found["certificate_ends_at"] == "2027-01-15T08:00:00+00:00"
    nothing = to_json(Measured(target=FINE.target))
    assert {nothing[key] for key in ("address", "status", "connect_ms", "rate_bits_per_second")} == {None}
    assert to_json(BROKEN)["failures"] == [{"reason": "status", "detail": "status 421", "count": 2}]


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ((FINE,), 0),
        ((FINE, BROKEN), 1),
        ((replace(FINE, target=replace(FINE.target, min_rate=Rate(6_000_000))),), 1),
        ((replace(FINE, failures=(Failure(Reason.REFUSED, "x"),)), FINE), 3),
        ((replace(FINE, failures=(Failure(Reason.LOCAL, "x"),)), FINE), 4),
        ((replace(FINE, failures=(Failure(Reason.LOCAL, "x"),)), BROKEN), 1),
    ],
)
def test_the_worst_is_the_exit_status(results: tuple[Measured, ...], status: int) -> None:
    assert EXIT_STATUS[worst(results)] == status
