"""What `kura-shaper top` says before it looks at anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_cli import call

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "nope0"], "no such network device"),
        (["--device", "lo", "--interval", "0"], "--interval"),
        (["--device", "lo", "--count", "0"], "--count"),
        (["--device", "lo", "--sort", "luck"], "--sort"),
        (["--device", "lo", "--json", "--count", "2"], "--json prints one object"),
        (["--device", "lo", "--tenants", "/nowhere/tenants.yaml"], "/nowhere/tenants.yaml"),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert call(monkeypatch, "top", *arguments) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert words in shown


def test_a_terminal_without_textual_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kura_shaper.cli.top.is_terminal", lambda: True)
    monkeypatch.setattr("kura_shaper.cli.top.find_spec", lambda _: None)
    assert call(monkeypatch, "top", "--device", "lo") == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "pip install 'kura-shaper[top]'" in shown
    assert "--plain" in shown
