"""The command `kura-shaper`: its groups put together, and errors turned into exit codes.

0 fine; 1 findings or differences; 2 usage, document or settings; 3 the kernel, the
gateway or the cluster refused; 4 the state could not be read.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from kura_shaper import __version__
from kura_shaper.cli import gateway, lab, tenants, tree
from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.log import LogFormat, LogLevel, configure

app = typer.Typer(
    name="kura-shaper",
    help="Keeps a multi-tenant node's egress promises where the bytes really leave it.",
    epilog="Exit codes: 0 fine, 1 findings or differences, 2 usage or document, 3 refused, 4 state unknown.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tree.register(app)
gateway.register(app)
app.add_typer(tenants.app, name="tenants")
app.add_typer(lab.app, name="lab")


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


def run() -> None:
    """Run the command line; every error on purpose is one line on stderr and an exit code."""
    try:
        app()
    except KuraShaperError as error:
        sys.stderr.write(f"kura-shaper: error[{error.code}]: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has seen enough, e.g. `kura-shaper status | head`. What is still buffered has no place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception:
        # A fault of ours says nothing about the device, so it must not look like "differences".
        traceback.print_exc()
        sys.stderr.write(
            "kura-shaper: error[internal]: this is a fault of kura-shaper; please report the lines above\n"
        )
        sys.exit(StateUnknownError.exit_code)
