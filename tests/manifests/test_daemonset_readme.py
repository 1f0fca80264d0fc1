"""What daemonset/README.md says is there is there, and each command that it shows is one."""

from __future__ import annotations

import re
import shlex

import pytest
import typer
from manifest_tools import DAEMONSET, anchors

from kura_shaper.cli.main import app

README = (DAEMONSET / "README.md").read_text()
SHOWN = sorted(set(re.findall(r"`(kura-shaper [a-z][^`]*)`|-- (kura-shaper [^\n|]+)", README)))


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    page, _, anchor = link.partition("#")
    path = (DAEMONSET / page) if page else DAEMONSET / "README.md"
    assert path.exists()
    assert not anchor or anchor in anchors(path.read_text())


@pytest.mark.parametrize("path", sorted(set(re.findall(r"daemonset/[\w/.-]*\w", README))))
def test_a_path_is_there(path: str) -> None:
    assert (DAEMONSET.parent / path).exists()


@pytest.mark.parametrize("command", [one or other for one, other in SHOWN])
def test_a_command_is_taken(command: str) -> None:
    words = [word.replace("DEVICE", "eth0") for word in shlex.split(command)][1:]
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    taken = found.commands[words[0]]
    options = {name for each in taken.params for name in each.opts}
    assert {word for word in words[1:] if word.startswith("--")} <= options


def test_the_exit_codes_of_break_glass_are_told() -> None:
    script = (DAEMONSET / "break-glass.sh").read_text()
    (table,) = re.findall(r"\| exit code \| phase \| \|\n(.+?)\n\n", README, re.DOTALL)
    told = set(re.findall(r"^\| (\d) \|", table, re.MULTILINE))
    assert told == {"0", *re.findall(r"\bdie (\d)", script)}
