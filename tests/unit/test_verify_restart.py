"""A restart is over when others are there than before, twice in a row; what never comes is said."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from verify_values import observed, report

from kura_shaper.cli.verify_after import Around, restart_asked
from kura_shaper.clock import FakeClock
from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.kernel.processes import read_named
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.restart import Part, Restart, run_command, see_restart

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OLD, NEW, OTHER = (10, 100), (11, 200), (12, 300)
SECOND_NS = 1_000_000_000


class Readings:
    """What is read one after the other; the last one stays."""

    def __init__(self, *rows: set[tuple[int, int]]) -> None:
        self.rows, self.taken = rows, 0

    def __call__(self) -> frozenset[tuple[int, int]]:
        self.taken += 1
        return frozenset(self.rows[min(self.taken, len(self.rows)) - 1])


@pytest.mark.parametrize(
    ("rows", "readings"),
    [
        ([{OLD}, {OLD}, set(), {NEW}, {NEW}], 5),
        # A worker that came beside the old one is no restart before that has gone.
        ([{OLD}, {OLD, NEW}, {OLD, NEW}, {NEW}, {NEW}], 5),
        # One that comes and goes again is not back.
        ([{OLD}, {NEW}, set(), {OTHER}, {OTHER}], 5),
        # A master that stays, and another worker.
        ([{OLD, OTHER}, {OTHER, NEW}, {OTHER, NEW}], 3),
        # The same number, given again to another process.
        ([{OLD}, {(10, 500)}, {(10, 500)}], 3),
    ],
)
def test_a_part_is_back_when_others_are_there_twice(rows: list[set[tuple[int, int]]], readings: int) -> None:
    read = Readings(*rows)
    see_restart(Restart(Part.GATEWAY), read, clock=FakeClock())
    assert read.taken == readings


def test_a_command_is_run_once_and_after_the_first_reading() -> None:
    made: list[Sequence[str]] = []
    read = Readings({OLD}, {NEW})

    def make(command: tuple[str, ...]) -> None:
        assert read.taken == 1
        made.append(command)

    see_restart(Restart(Part.AGENT, ("systemctl", "restart", "x y")), read, clock=FakeClock(), make=make)
    assert made == [("systemctl", "restart", "x y")]


def test_what_never_comes_is_unknown_after_its_time() -> None:
    clock = FakeClock()
    with pytest.raises(StateUnknownError, match="not seen to be restarted within 5 s"):
        see_restart(Restart(Part.CILIUM, within_ns=5 * SECOND_NS), Readings({OLD}), clock=clock)
    assert clock.now_ns() == 5 * SECOND_NS


def test_a_part_that_does_not_run_is_no_part_to_wait_for() -> None:
    with pytest.raises(UsageError, match="no cilium runs"):
        see_restart(Restart(Part.CILIUM), Readings(set()), clock=FakeClock())


def test_a_command_that_fails_is_refused_and_no_shell_is_asked(tmp_path: Path) -> None:
    beside = tmp_path / "made"
    with pytest.raises(RefusedError, match="ended with 3: why"):
        run_command((sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(RefusedError, match="can't be run"):
        run_command((f"/bin/true; touch {beside}",))
    run_command((sys.executable, "-c", "", ";", "touch", str(beside)))
    # Nor is somebody waited for whom it left running, with its output.
    run_command((sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '5'])"))
    assert not beside.exists()


@pytest.mark.parametrize(
    ("part", "command", "baseline", "within_s", "words"),
    [
        (None, "true", False, 1.0, "--restart needs --after"),
        (Part.NODE, "", False, 1.0, "--after node needs --baseline"),
        (Part.GATEWAY, "", True, 1.0, "makes its own baseline"),
        (Part.GATEWAY, "a 'b", False, 1.0, "can't be split"),
        (Part.GATEWAY, "", False, 0.0, "out of range"),
        (Part.GATEWAY, "", False, float("nan"), "out of range"),
    ],
)
def test_options_that_do_not_go_together(
    part: Part | None, command: str, baseline: bool, within_s: float, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        restart_asked(part, command, baseline=tmp_path if baseline else None, within_s=within_s)


@pytest.mark.parametrize("part", [Part.GATEWAY, Part.NODE])
def test_nothing_is_restarted_or_kept_when_there_is_nothing_to_compare_with(part: Part, tmp_path: Path) -> None:
    seen, made = report(observed(snapshot=Unknown("no permission"))), tmp_path / "made"
    restart = Restart(part, ("touch", str(made)))
    baseline = tmp_path / "baseline.json"
    around = Around(restart, baseline, seen.observed.question.document.gateway, 9469, tell=lambda *_: None)
    with pytest.raises(StateUnknownError, match="no permission"):
        around.report(lambda *_: seen, None)
    assert not made.exists()
    assert not baseline.exists()


def test_processes_are_told_by_name_and_start(tmp_path: Path) -> None:
    agent = "cilium-agent"
    for pid, name, state, started in (
        (7, agent, "S", 70),
        (8, agent, "R", 80),
        (9, "other", "S", 90),
        (6, agent, "Z", 60),
    ):
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "comm").write_text(f"{name}\n")
        (directory / "stat").write_text(f"{pid} ({name}) {state} {' '.join(['0'] * 18)} {started} 0\n")
    found = read_named("cilium-agent", tmp_path)
    assert [(process.pid, process.started_ticks) for process in found] == [(7, 70), (8, 80)]
