"""Every finding that `verify` can have has a test that breaks a world so that it appears, and has been written down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kura_shaper.verify.checks import CHECKS, codes

if TYPE_CHECKING:
    from kura_shaper.verify.values import Code

TESTS = Path(__file__).parents[1]
_MARK = re.compile(r'^@pytest\.mark\.finding\("([^"]+)"\)', re.MULTILINE)


def broken_on_purpose() -> set[str]:
    return {code for path in TESTS.rglob("test_*.py") for code in _MARK.findall(path.read_text())}


@pytest.mark.parametrize("code", codes())
def test_a_finding_has_a_test_that_breaks_a_world_for_it(code: str) -> None:
    assert code in broken_on_purpose()


def test_no_test_breaks_a_world_for_a_finding_that_is_not_there() -> None:
    assert broken_on_purpose() <= codes().keys()


def test_a_finding_belongs_to_one_check_and_has_a_short_stable_name() -> None:
    names = [code.name for check in CHECKS for code in check.codes]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+){1,3}", name) for name in names)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("code", codes().values(), ids=lambda code: code.name)
def test_a_finding_says_what_it_means_and_what_to_do(code: Code) -> None:
    for text in (code.meaning, code.remedy):
        assert len(text) > 20
        assert not text.endswith(".")
