"""What every command writes to stdout by. It imports next to nothing: a service needs no more of this than that."""

from __future__ import annotations

import json
import os
import sys

import typer


def say(text: str, *, newline: bool = True) -> bool:
    """Write to stdout. A reader that has seen enough (`| head`) is no error, and no news of what was done.

    Return whether it was written, for who would otherwise go on for ever.
    """
    try:
        typer.echo(text, nl=newline)
    except BrokenPipeError:
        # What is still buffered, and what follows, has no place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except OSError as error:
        sys.stderr.write(f"kura-shaper: the output can't be written: {error.strerror}\n")
        return False
    return True


def print_json(value: object) -> None:
    """Write one JSON object to stdout."""
    say(json.dumps(value, indent=2))
