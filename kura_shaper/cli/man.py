"""man: manual pages, made from the same descriptions that `--help` shows.

Pages are roff with the man macros (man(7)), and the same for the same version: they carry no date.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kura_shaper import __version__
from kura_shaper.cli import show
from kura_shaper.errors import RefusedError, UsageError

_SECTION = 1
# What comes before those that only one command has, at the end of its epilog.
EXIT_CODES = "\n\nExit codes: "
_EXIT_CODES = (
    ("0", "fine"),
    ("1", "there are findings or differences"),
    ("2", "usage, a document or settings are wrong"),
    ("3", "the kernel, the gateway or the cluster refused"),
    ("4", "the state could not be read"),
)


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command("man", epilog="Example: kura-shaper man apply | man -l -")(man)


def man(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="e.g. tenants lint.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the pages of all commands there instead.")
    ] = None,
) -> None:
    """Print the manual page of a command, of kura-shaper itself without one."""
    found = pages(context.find_root().command)
    if out is not None:
        _write(found, out)
        return
    name = "-".join(("kura-shaper", *(command or ())))
    if name not in found:
        words = " ".join(command or ())
        raise UsageError(f"there is no command {words[:64]!r}", remedy="see `kura-shaper --help`")
    show.say(found[name].rstrip("\n"))


def _write(found: dict[str, str], directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (directory / f"{name}.{_SECTION}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{directory}: {error.strerror}", remedy="choose a directory that can be written") from error


def pages(root: Any) -> dict[str, str]:
    """Return the page of every command below a click command and of itself, as roff, by the page's name."""
    # Context and Command are click's own, of which typer may carry a copy.
    made = dict(
        _pages(
            _Command("kura-shaper", root, root.context_class(root, info_name="kura-shaper", **root.context_settings))
        )
    )
    return {name: page + _see_also(name, made) for name, page in made.items()}


@dataclass(frozen=True, slots=True)
class _Command:
    """A command, what it is called with all words before it, and the context that knows its options."""

    name: str
    command: Any
    context: Any

    @property
    def page(self) -> str:
        return self.name.replace(" ", "-")


def _pages(of: _Command) -> Iterator[tuple[str, str]]:
    yield of.page, _page(of)
    for name, command in sorted(getattr(of.command, "commands", {}).items()):
        if not command.hidden:
            context = command.context_class(command, parent=of.context, info_name=name, **command.context_settings)
            yield from _pages(_Command(f"{of.name} {name}", command, context))


def _page(of: _Command) -> str:
    command = of.command
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    parts = [
        f'.TH {_quoted(of.page.upper())} {_SECTION} "" {_quoted(f"kura-shaper {__version__}")} "kura-shaper"',
        # Neither hyphens of its own nor wide gaps: what is shown is copied into shells.
        ".nh",
        ".ad l",
        ".SH NAME",
        f"{_text(of.page)} \\- {_text(_first_sentence(paragraphs[0]))}",
        ".SH SYNOPSIS",
        f".B {_text(of.name)}",
        f"{_text(' '.join(command.collect_usage_pieces(of.context)))}",
        ".SH DESCRIPTION",
        *_spaced(paragraphs),
    ]
    parts += _section("ARGUMENTS", list(_parameters(of, "argument")))
    parts += _section("OPTIONS", list(_parameters(of, "option")))
    parts += _section("COMMANDS", list(_commands(of)))
    examples, _, exits = (command.epilog or "").partition(EXIT_CODES)
    own = _spaced([f"Of this command: {' '.join(exits.split())}"]) if exits else ()
    parts += _section("EXIT STATUS", [*(line for each in _EXIT_CODES for line in _entry(*each)), *own])
    if examples.startswith("Example"):
        example = examples.partition(": ")[2]
        parts += [".SH EXAMPLES", ".nf", *(f".B {_text(line.strip())}" for line in example.splitlines()), ".fi"]
    return "\n".join(parts) + "\n"


def _see_also(name: str, made: dict[str, str]) -> str:
    """Return the section that leads to the page above and to those beside it."""
    above = name.rpartition("-")[0] if name != "kura-shaper" else ""
    while above and above not in made:
        above = above.rpartition("-")[0]
    others = [other for other in made if other == above or (other != name and other.startswith(f"{name}-"))]
    if not others:
        return ""
    return ".SH SEE ALSO\n" + ",\n".join(f".BR {_text(other)} ({_SECTION})" for other in others) + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f".SH {title}", *lines] if lines else []


def _spaced(paragraphs: list[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield ".PP"
        yield _text(paragraph)


def _parameters(of: _Command, kind: str) -> Iterator[str]:
    for parameter in of.command.get_params(of.context):
        record = parameter.get_help_record(of.context)
        if parameter.param_type_name == kind and record:
            yield from _entry(*record)


def _commands(of: _Command) -> Iterator[str]:
    for name, command in sorted(getattr(of.command, "commands", {}).items()):
        if not command.hidden:
            yield from _entry(f"{of.name} {name}", _first_sentence(" ".join((command.help or "").split())))


def _entry(term: str, words: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_text(term)}"
    yield _text(" ".join(words.split()))


def _first_sentence(words: str) -> str:
    head, dot, _ = words.partition(". ")
    return head.rstrip(".") if dot else words.rstrip(".")


def _text(words: str) -> str:
    """Return words that roff shows as they are: groff_char(7), and no line that begins a request."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("^", "\\(ha")
    escaped = escaped.replace("~", "\\(ti").replace("'", "\\(aq")
    return f"\\&{escaped}" if escaped[:1] in {".", "\\"} and not escaped.startswith("\\-") else escaped


def _quoted(words: str) -> str:
    return '"{}"'.format(_text(words).replace('"', "\\(dq"))
