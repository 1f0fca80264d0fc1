"""The command `kura-shaper`: its groups put together, and errors turned into exit codes.

0 fine; 1 findings or differences; 2 usage, document or settings; 3 the kernel, the
gateway or the cluster refused; 4 the state could not be read.
"""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from kura_shaper import __version__
from kura_shaper.cli import stdout
from kura_shaper.cli.commands import LazyGroup
from kura_shaper.errors import KuraShaperError, StateUnknownError, UsageError
from kura_shaper.log import LogFormat, LogLevel, configure

app = typer.Typer(
    name="kura-shaper",
    cls=LazyGroup,
    help="Keeps a multi-tenant node's egress promises where the bytes really leave it.",
    epilog="Exit codes: 0 fine, 1 findings or differences, 2 usage or document, 3 refused, 4 state unknown.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kura-shaper {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    _version_wanted: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_version, is_eager=True)
    ] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="How log lines look.", envvar="KURA_SHAPER_LOG_FORMAT")
    ] = LogFormat.TEXT,
    log_level: Annotated[
        LogLevel, typer.Option(help="The least severe level to log.", envvar="KURA_SHAPER_LOG_LEVEL")
    ] = LogLevel.WARNING,
) -> None:
    configure(log_format, log_level)


# The library's own error for an option that is missing or can't be read; it exports only this child of it.
_BadUsage: type[Exception] = typer.BadParameter.__mro__[1]


def run() -> None:
    """Run the command line; every error on purpose is one line on stderr and an exit code."""
    # So that what a command has to undo is undone.
    signal.signal(signal.SIGTERM, _leave)
    try:
        status = app(standalone_mode=False)
    except KuraShaperError as error:
        _fail(error.code, str(error), error.exit_code)
    except _BadUsage as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kura-shaper"
        words = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).replace("Value error, ", "")
        if not words:
            sys.exit(UsageError.exit_code)  # without arguments: the help has been shown
        _fail("usage", f"{words.rstrip('.')}; see `{command} --help`", UsageError.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except Exception:
        # A fault of ours says nothing about the device, so it must not look like "differences".
        traceback.print_exc()
        _fail("internal", "this is a fault of kura-shaper; please report the lines above", StateUnknownError.exit_code)
    sys.exit(status if isinstance(status, int) else 0)


def _leave(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _fail(code: str, words: str, status: int) -> NoReturn:
    sys.stderr.write(f"kura-shaper: error[{code}]: {words}\n")
    if "--json" in sys.argv:
        stdout.print_json({"error": {"code": code, "message": words}})
    sys.exit(status)
