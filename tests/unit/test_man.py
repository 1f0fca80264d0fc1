"""Every command has a manual page with all that --help says, in roff that says nothing else."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import typer

from kura_shaper.cli.main import app
from kura_shaper.cli.man import _entry, _text, pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT = typer.main.get_command(app)
PAGES = pages(ROOT)


def commands(words: str = "kura-shaper", command: object = ROOT) -> Iterator[tuple[str, object]]:
    """Yield every command that is shown, with its page's name."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(f"{words}-{name}", below)


COMMANDS = dict(commands())


def test_every_command_has_its_page_and_no_page_is_of_another() -> None:
    assert PAGES.keys() == COMMANDS.keys()
    assert len(PAGES) > 12


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_option_and_where_to_read_on(name: str) -> None:
    page = PAGES[name]
    for parameter in COMMANDS[name].params:  # type: ignore[attr-defined]
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert f".B {_text(parameter.opts[0])}" in page
    for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"):
        assert f".SH {title}\n" in page
    for line in page.split(".SH SEE ALSO\n")[1].splitlines():
        assert line.split()[1].replace("\\-", "-") in PAGES


@pytest.mark.parametrize("name", ["event-broker", "event-bus"])
def test_the_status_after_a_second_signal_is_told_and_is_no_example(name: str) -> None:
    status, _, examples = PAGES[f"kura-shaper-{name}"].partition(".SH EXAMPLES\n")
    own = status.partition("Of this command: ")[2]
    assert "130" in own
    assert "143" in own
    assert examples.count(".B ") == 1


@pytest.mark.parametrize("name", PAGES)
def test_groff_finds_nothing_wrong(name: str) -> None:
    if not shutil.which("groff"):
        pytest.skip("no groff")
    command = ("groff", "-man", "-Tutf8", "-Kutf8", "-ww")
    done = subprocess.run(command, input=PAGES[name], capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [".so /etc/passwd", "'so x", "\\X'x'", "\\fBx", "a\n.so b"])
def test_words_are_shown_and_never_obeyed(words: str) -> None:
    lines = [line for line in _entry("term", words) if not line.startswith((".TP", ".B "))]
    assert len(lines) == 1
    assert not lines[0].startswith((".", "'"))
    if shutil.which("groff"):
        text = ".TH X 1\n.nh\n" + "\n".join(_entry("term", words)) + "\n"
        shown = subprocess.run(["groff", "-man", "-Tascii"], input=text, capture_output=True, text=True, check=True)
        assert " ".join(words.split()) in " ".join(shown.stdout.split())


def test_the_command_prints_one_page_or_writes_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["man", "tenants", "lint"], standalone_mode=False)
    assert capsys.readouterr().out == PAGES["kura-shaper-tenants-lint"]
    app(["man", "--out", str(tmp_path / "man1")], standalone_mode=False)
    assert {path.name: path.read_text() for path in (tmp_path / "man1").iterdir()} == {
        f"{name}.1": page for name, page in PAGES.items()
    }
    assert capsys.readouterr().out == ""
