"""Lines of the log, as text and as JSON."""

from __future__ import annotations

import json
import logging
import re

import pytest

from kura_shaper.log import LogFormat, LogLevel, configure, event

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("kura_shaper")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))


def line(style: LogFormat, capsys: pytest.CaptureFixture[str], *, tenant: str) -> str:
    configure(style, LogLevel.INFO)
    event(logging.getLogger("kura_shaper.test"), "happened", tenant=tenant)
    return capsys.readouterr().err


@pytest.mark.parametrize("style", LogFormat)
def test_a_line_has_its_time_in_utc(style: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    found = line(style, capsys, tenant="acme")
    if style is LogFormat.TEXT:
        assert re.fullmatch(rf'{TIME} info happened tenant="acme"\n', found)
    else:
        told = json.loads(found)
        assert re.fullmatch(TIME, told.pop("time"))
        assert told == {"level": "info", "event": "happened", "tenant": "acme"}


@pytest.mark.parametrize("style", LogFormat)
def test_a_hostile_value_stays_one_line_and_off_the_terminal(
    style: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    found = line(style, capsys, tenant="\x1b[2J\n\x7f\x9b\u202e")
    assert found[:-1].isascii()
    assert found[:-1].isprintable()
