"""scripts/bench keeps to the contract: names, JSON, exit codes, and a reason for what it leaves out."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ended

pytestmark = pytest.mark.privileged

# What scripts/bench starts once the environment is set up.
BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
NAMES = {"program-1000", "program-10000", "change-one", "dump-1000", "dump-10000", "datapath"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS), *arguments], capture_output=True, text=True, check=False)


def test_a_measurement_is_an_object_with_both_numbers_and_their_ratio() -> None:
    done = bench("change-one", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [(each["name"], each["peer_name"], each["unit"]) for each in found] == [
        ("change-one", "one tc process", "ms"),
        ("change-one", "pyroute2", "ms"),
    ]
    for each in found:
        assert {"name", "ours", "peer", "peer_name", "ratio", "unit"} <= each.keys()
        assert each["ratio"] == pytest.approx(each["ours"] / each["peer"], abs=0.001)
        # Case G5: one process for each command is slow. What is measured is far below these.
        assert each["ours"] < 10
        assert each["ratio"] < 1 / 3


def test_an_unknown_name_is_a_mistake_that_lists_the_known_ones() -> None:
    done = bench("program-7")
    assert (done.returncode, done.stdout) == (2, "")
    assert all(name in done.stderr for name in NAMES)


def test_without_privilege_each_benchmark_is_left_out_with_the_reason(
    in_child: Callable[[Callable[[], None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    def unprivileged() -> None:
        drop_capabilities()
        sys.argv = ["bench", "change-one", "dump-1000", "--json"]
        sys.path.insert(0, str(BENCHMARKS))
        runpy.run_path(str(BENCHMARKS), run_name="__main__")

    ended = in_child(unprivileged)
    assert (ended.status, json.loads(ended.stdout)) == (0, [])
    for name in ("change-one", "dump-1000"):
        assert f"bench: {name} is skipped: making a network namespace: the kernel says EPERM" in ended.stderr
