"""The table of faults in tests/README.md names tests that exist, and every demanded one has its mark."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kura_shaper.broker.router.faults import Fault

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "README.md"
DEMANDED = [
    *(f"D{number}" for number in range(1, 17) if number != 15),
    *(f"E{number}" for number in range(1, 12) if number != 5),
    *(f"C{number}" for number in range(1, 12) if number != 9),
    *(f"F{number}" for number in range(20, 56) if number not in (34, 53, 54)),
    *("G1", "G5", "G6", "G7"),
    *(f"EB{number}" for number in range(1, 53) if number != 29),
    *(f"EP{number}" for number in range(1, 27) if number not in (11, 13, 21)),
    *(f"ED{number}" for number in range(1, 22) if number not in (17, 20)),
    *(f"ER{number}" for number in range(1, 79)),
    *(f"ER{number}" for number in range(90, 97)),
]
# B, P, D and R below E are the broker's: what it does, faults of other tunnels, shapes of metadata, the router.
_ROW = re.compile(r"\| ([A-G]\d+|E[BPDR]\d+) \| [^|]+ \| (.+) \|")
_TITLE = re.compile(r"\| (\w+) \| ([^|]+) \|")
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
# The marks of a test stand right above it, among its other decorators.
_MARKED = re.compile(r"((?:^@.*\n(?:[ )\]].*\n)*)+)^(?:async )?def (test_\w+)\(", re.MULTILINE)
_CASE = re.compile(r'mark\.case\("(\w+)"\)')


@cache
def marked() -> dict[str, set[str]]:
    """Return the tests of each id, as the table would name them."""
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for decorators, name in _MARKED.findall(path.read_text()):
            for case in _CASE.findall(decorators):
                found.setdefault(case, set()).add(f"{path.relative_to(TESTS)}::{name}")
    return found


@cache
def rows() -> dict[str, str]:
    """Return what the table says of each id."""
    found = _ROW.findall(TABLE.read_text())
    assert len(found) == len(dict(found)), "an id stands in the table twice"
    return dict(found)


@pytest.mark.parametrize("case", DEMANDED)
def test_a_demanded_fault_has_a_test_that_says_so_and_a_row(case: str) -> None:
    assert case in rows()
    assert marked().get(case) or "cannot occur here" in rows()[case]


def test_the_table_names_exactly_the_tests_that_are_marked() -> None:
    named = {case: {f"{path}::{name}" for path, name in _TEST.findall(says)} for case, says in rows().items()}
    assert {case: tests for case, tests in named.items() if tests} == marked()


def test_each_fault_that_the_router_can_be_told_has_a_row() -> None:
    titles = " ".join(title for case, title in _TITLE.findall(TABLE.read_text()) if case.startswith("ER"))
    assert not [fault for fault in Fault if not re.search(rf"fault (?:[\w-]+, )?{fault}\b[:,]", titles)]


def test_no_mark_is_lost_on_what_is_no_test() -> None:
    others = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    written = sum(len(_CASE.findall(path.read_text())) for path in others)
    assert sum(map(len, marked().values())) == written
