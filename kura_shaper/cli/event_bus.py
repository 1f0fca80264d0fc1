"""event-bus: the reference router, the far end of the event bus tunnel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kura_shaper.cli.event_broker import log_as, say_checked
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from kura_shaper.broker.router.output import ProcessOutput

_EPILOG = """Example: kura-shaper event-bus --config /etc/event-bus/config.yaml --json

Exit codes: 0 after a first signal, 130 at a second one that is SIGINT, 143 at one that is SIGTERM; 2 settings or\
 credentials."""


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("event-bus", epilog=_EPILOG)(event_bus)


def event_bus(
    context: typer.Context,
    config: Annotated[
        Path, typer.Option("--config", metavar="F", help="Settings, YAML.", envvar="KURA_SHAPER_BUS_CONFIG")
    ],
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check settings, certificate, tokens, kubeconfigs, and leave.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Events as one JSON object a line; with --check-config one object.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no events, only count them.")] = False,
) -> None:
    """Serve brokers, read the publishers that are wanted through them, and print their events, until a signal.

    When whoever reads stdout is gone, so is the router, with 0, unless the settings have it serve or expose as well.
    Events that do not fit are dropped, and the next line says how many (dropped_before).

    With serve: 127.0.0.1:9466 in the settings, other programs get the events as well: whoever connects there has each
    as one JSON object a line, and is cut off when it reads too slowly.

    SIGUSR1 asks every broker to come anew (rebalance), never two of one namespace at once. SIGHUP rereads certificate,
    key, tokens and the subscriptions of the settings: what stays wanted is not disturbed, and what can't be used is
    told and changes nothing. A token that is taken out ends no session that began with it. A first SIGTERM or SIGINT
    asks brokers to leave, at most for drain_deadline; a second one ends at once.
    """
    try:
        from kura_shaper.broker.entries import SettingsError
        from kura_shaper.broker.router.credentials import ServerCredentials
        from kura_shaper.broker.router.output import LineOutput, NoOutput
        from kura_shaper.broker.router.program import doubts_of, problems_of, run_router
        from kura_shaper.broker.router.settings import load_settings
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", remedy="install kura-shaper[broker]") from error
    if check_config:
        try:
            checked = load_settings(config)
            credentials = ServerCredentials(checked)
            problems = (*problems_of(checked, credentials), *doubts_of(credentials))
        except SettingsError as error:
            problems = error.problems
        say_checked(config, problems, as_json=as_json)
        return
    settings = load_settings(config)
    credentials = ServerCredentials(settings)
    if problems := problems_of(settings, credentials):
        raise SettingsError(problems)
    log_as(context, style=settings.log_format, level=settings.log_level)
    output: ProcessOutput = NoOutput() if quiet else LineOutput(sys.stdout.buffer, as_json=as_json)
    run_router(settings, credentials, config=config, output=output)
