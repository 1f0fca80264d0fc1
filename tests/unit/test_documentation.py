"""Every command that the documentation shows is one that the program takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from kura_shaper.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "haproxy/README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("haproxy/overlays/*"))))


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL) if page.endswith(".md") else [text]
    rows = (row.strip("# ") for block in blocks for row in block.splitlines())
    return [re.split(r" +#| \| ", row)[0] for row in rows if row.startswith("kura-shaper ")]


SHOWN = [(page, command) for page in PAGES for command in commands(page)]


def test_there_are_some() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_a_command_that_is_shown_is_taken(page: str, command: str) -> None:
    words = shlex.split(command)[1:]
    found = typer.main.get_command(app)
    while hasattr(found, "commands"):
        while words[0].startswith("-"):
            words = words[2:]
        found, words = found.commands[words[0]], words[1:]
    # Raises for an option that is not there, one that is missing, or a value that can't be.
    found.make_context(command, words)
