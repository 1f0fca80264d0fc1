"""scripts/conformance: each id by the worst of its tests, with the reason, and a status that says it all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "conformance_cases"
TABLE = """
| id | what holds | tests |
|---|---|---|
| D1 | another table's | `a/test_a.py::test_fails` |
| EB1 | this holds | `a/test_a.py::test_passes` |
| EB2 | this does not | `a/test_a.py::test_passes`<br>`a/test_a.py::test_fails`<br>`a/test_a.py::test_is_skipped` |
| ER1 | this can't be told | `a/test_a.py::test_is_skipped`<br>`a/test_a.py::test_passes` |
| ER2 | this is not there | `a/test_a.py::test_is_nowhere` |
| ER3 | some of this | `a/test_a.py::test_of_three` |
"""
TESTS = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "what it says"
def test_is_skipped(): pytest.skip("no such thing here")
@pytest.mark.parametrize("number", range(3))
def test_of_three(number): assert number != 1
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "README.md").write_text(TABLE)
    (tmp_path / "tests" / "a" / "test_a.py").write_text(TESTS)
    return tmp_path


def conformance(tree: Path, *words: str) -> tuple[int, str, str]:
    line = f"import sys, pathlib; from cases import main; sys.exit(main(sys.argv[1:], pathlib.Path({str(tree)!r})))"
    done = subprocess.run(
        [sys.executable, "-c", line, *words], cwd=SCRIPT, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_each_id_is_told_by_the_worst_of_its_tests_and_why(tree: Path) -> None:
    status, said, _ = conformance(tree, "EB1", "EB2", "ER1", "ER3", "--json")
    assert status == 1
    found: dict[str, Any] = json.loads(said)
    assert found["verdict"] == "fail"
    cases = {case["id"]: case for case in found["cases"]}
    assert {id_: case["outcome"] for id_, case in cases.items()} == {
        "EB1": "pass",
        "EB2": "fail",
        "ER1": "skip",
        "ER3": "fail",
    }
    assert cases["EB1"]["title"] == "this holds"
    assert cases["EB2"]["reasons"] == ["tests/a/test_a.py::test_fails: AssertionError: what it says"]
    assert "no such thing here" in cases["ER1"]["reasons"][0]
    assert cases["ER3"]["reasons"][0].startswith("tests/a/test_a.py::test_of_three[1]: ")


def test_what_passes_is_a_line_with_its_title_and_what_is_skipped_has_a_status_of_its_own(tree: Path) -> None:
    assert conformance(tree, "EB1")[:2] == (0, "EB1   pass  this holds\n")
    status, said, _ = conformance(tree, "ER1", "EB1")
    assert status == 4
    assert said.splitlines()[0] == "ER1   skip  this can't be told"
    assert "no such thing here" in said.splitlines()[1]


def test_a_test_that_is_not_there_is_no_pass(tree: Path) -> None:
    status, said, _ = conformance(tree, "ER2")
    assert status == 1
    assert "did not run" in said


def test_an_id_that_there_is_none_of_is_said(tree: Path) -> None:
    for word in ("EB9", "D1", "E"):
        status, said, told = conformance(tree, word)
        assert (status, said) == (2, "")
        assert f"there is no case '{word}'" in told
