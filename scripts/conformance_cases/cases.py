"""Runs the tests that stand for an id in the table of tests/README.md, and tells for each id whether it holds.

An id fails when one of its tests fails, or did not run at all; it is skipped when none failed and one was skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"\| (E[BPDR]\d+) \| ([^|]+) \| (.+) \|")
_TEST = re.compile(r"`([\w/]+\.py::\w+)`")
_REASON_CHARACTERS, _REASONS_SHOWN = 300, 3
PASS, FAIL, SKIP = "pass", "fail", "skip"
_STATUS = {PASS: 0, FAIL: 1, SKIP: 4}
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    id: str
    title: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a case fares, and why where it does not hold."""

    case: Case
    outcome: str
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcomes:
    """A plugin of pytest that keeps how each test ended. A test's parameters are told together."""

    by_test: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        test = report.nodeid.partition("[")[0].removeprefix("tests/")
        if report.failed:
            self._note(test, FAIL, f"{report.nodeid}: {_last_line(report)}")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._note(test, SKIP, f"{report.nodeid}: {reason}")
        elif report.when == "call":
            self._note(test, PASS)

    def _note(self, test: str, outcome: str, reason: str = "") -> None:
        worse = [FAIL, SKIP, PASS]
        before = self.by_test.get(test, PASS)
        self.by_test[test] = min(before, outcome, key=worse.index)
        if reason:
            self.reasons.setdefault(test, []).append(reason[:_REASON_CHARACTERS])

    def judge(self, case: Case) -> Verdict:
        """Return how a case fares."""
        found = {test: self.by_test.get(test) for test in case.tests}
        if FAIL in found.values() or None in found.values():
            lost = [f"{test}: did not run" for test, outcome in found.items() if outcome is None]
            return Verdict(case, FAIL, (*lost, *self._why(case, FAIL)))
        if SKIP in found.values():
            return Verdict(case, SKIP, self._why(case, SKIP))
        return Verdict(case, PASS)

    def _why(self, case: Case, outcome: str) -> tuple[str, ...]:
        tests = [test for test in case.tests if self.by_test.get(test) == outcome]
        return tuple(reason for test in tests for reason in self.reasons.get(test, ()))


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).splitlines() or ["failed"]
    return lines[0].strip()


def read_cases(table: Path) -> dict[str, Case]:
    """Return the cases of the event bus by their ids, in the order of the table."""
    rows = _ROW.findall(table.read_text(encoding="utf-8"))
    cases = [Case(id_, title.strip(), tuple(_TEST.findall(tests))) for id_, title, tests in rows]
    return {case.id: case for case in cases if case.tests}


def chosen(cases: dict[str, Case], words: Sequence[str]) -> list[Case]:
    """Return the cases of some ids, or of all that begin with letters. Raises KeyError for a word that is neither."""
    if not words:
        return list(cases.values())
    found: dict[str, Case] = {}
    for word in words:
        of_word = {id_: case for id_, case in cases.items() if word in (id_, id_.rstrip("0123456789"))}
        if not of_word:
            raise KeyError(word)
        found |= of_word
    return list(found.values())


def run(cases: Sequence[Case], root: Path) -> tuple[list[Verdict], int]:
    """Run the tests of cases, and return how each fares, and pytest's status. What pytest says goes to stderr."""
    tests = sorted({f"{root}/tests/{test}" for case in cases for test in case.tests})
    outcomes = Outcomes()
    # It is this tree that is tested, whatever the environment has installed; workers of pytest take the path over.
    sys.path.insert(0, str(root))
    options = ["-q", "-n", "auto", "--continue-on-collection-errors", f"--rootdir={root}"]
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*options, *tests], plugins=[outcomes])
    return [outcomes.judge(case) for case in cases], int(status)


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Run what was asked for. 0 all hold, 1 one fails, 4 one was skipped, 2 an unknown id."""
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="e.g. EB12, or ER for all that begin so")
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else there")
    options = parser.parse_args(words)
    try:
        cases = chosen(read_cases(root / "tests" / "README.md"), options.ids)
    except KeyError as error:
        parser.error(f"there is no case {error.args[0]!r} in tests/README.md")
    verdicts, status = run(cases, root)
    if status == pytest.ExitCode.INTERRUPTED:
        return _INTERRUPTED
    found = {verdict.outcome for verdict in verdicts}
    whole = next(outcome for outcome in (FAIL, SKIP, PASS) if outcome in found)
    if options.json:
        print(json.dumps({"verdict": whole, "cases": [_as_json(verdict) for verdict in verdicts]}))
    else:
        for verdict in verdicts:
            print(f"{verdict.case.id:5} {verdict.outcome}  {verdict.case.title}")
            for reason in verdict.reasons[:_REASONS_SHOWN]:
                print(f"            {reason}")
    return _STATUS[whole]


def _as_json(verdict: Verdict) -> dict[str, Any]:
    case = verdict.case
    return {"id": case.id, "title": case.title, "outcome": verdict.outcome, "reasons": list(verdict.reasons)} | {
        "tests": list(case.tests)
    }
