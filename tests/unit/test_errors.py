"""Errors say what is wrong, where, and what to do, in one line."""

from __future__ import annotations

import pytest

from kura_shaper.errors import (
    DocumentError,
    KuraShaperError,
    QuantityError,
    RefusedError,
    StateUnknownError,
    UsageError,
)


@pytest.mark.parametrize(
    ("kind", "code", "exit_code"),
    [
        (KuraShaperError, "error", 3),
        (UsageError, "usage", 2),
        (QuantityError, "quantity", 2),
        (DocumentError, "document", 2),
        (RefusedError, "refused", 3),
        (StateUnknownError, "state_unknown", 4),
    ],
)
def test_every_error_has_a_code_and_the_exit_code_of_its_kind(
    kind: type[KuraShaperError], code: str, exit_code: int
) -> None:
    error = kind("no")
    assert (error.code, error.exit_code) == (code, exit_code)
    assert isinstance(error, KuraShaperError)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("no such device"), "no such device"),
        (UsageError("no such device", remedy="name one"), "no such device; name one"),
        (DocumentError("is empty"), "is empty"),
        (DocumentError("is empty", file="t.yaml"), "t.yaml: is empty"),
        (DocumentError("is empty", file="t.yaml", line=7), "t.yaml:7: is empty"),
        (
            DocumentError("has no value", file="t.yaml", line=7, path="tenants[1].floor", remedy="give one"),
            "t.yaml:7: tenants[1].floor: has no value; give one",
        ),
        (DocumentError("has no value", path="tenants[1].floor"), "tenants[1].floor: has no value"),
    ],
)
def test_the_text_of_an_error_is_place_then_message_then_remedy(error: KuraShaperError, line: str) -> None:
    assert str(error) == line


def test_the_parts_of_an_error_stay_readable_by_programs() -> None:
    error = DocumentError("has no value", file="t.yaml", line=7, path="region", remedy="give one")
    assert (error.message, error.file, error.line, error.path, error.remedy) == (
        "has no value",
        "t.yaml",
        7,
        "region",
        "give one",
    )


def test_a_quantity_error_is_a_value_error_for_those_who_expect_one() -> None:
    assert issubclass(QuantityError, ValueError)
