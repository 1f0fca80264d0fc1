"""event-broker: the end of the event bus tunnel that lives in the cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kura_shaper.cli import stdout
from kura_shaper.errors import UsageError
from kura_shaper.log import LogFormat, LogLevel, configure

_EPILOG = """Example: kura-shaper event-broker --config /etc/event-broker/config.yaml

Exit codes: 0 after a first signal, 130 at a second one that is SIGINT, 143 at one that is SIGTERM; 2 settings,\
 credentials or limits; 3 so_mark refused, or --exit-on-terminal."""


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("event-broker", epilog=_EPILOG)(event_broker)


def event_broker(
    context: typer.Context,
    config: Annotated[
        Path, typer.Option("--config", metavar="F", help="Settings, YAML.", envvar="KURA_SHAPER_BROKER_CONFIG")
    ],
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check settings, token, CA bundle, kubeconfig, and leave.")
    ] = False,
    exit_on_terminal: Annotated[
        bool, typer.Option("--exit-on-terminal", help="End with 3 when only other settings will do.")
    ] = False,
    log_targets: Annotated[
        bool, typer.Option("--log-targets", help="Log the targets of refusals in clear, and not as a hash.")
    ] = False,
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", metavar="P", help="Outside a cluster: how to reach it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --check-config: one JSON object on stdout.")] = False,
) -> None:
    """Relay the bytes of a cluster's publishers to a router outside of it, until a signal.

    A first SIGTERM or SIGINT lets streams finish, at most for drain_deadline; a second one ends at once.
    """
    try:
        from kura_shaper.broker.credentials import Credentials
        from kura_shaper.broker.entries import SettingsError
        from kura_shaper.broker.program import EarlySignals, problems_of, run_broker
        from kura_shaper.broker.refusals import Targets
        from kura_shaper.broker.service import OnTerminal
        from kura_shaper.broker.settings import load_settings
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", remedy="install kura-shaper[broker,kubernetes]") from error
    if check_config:
        warnings: tuple[str, ...] = ()
        try:
            settings = load_settings(config)
            credentials = Credentials(settings)
            problems = problems_of(settings, credentials, kubeconfig=kubeconfig)
            warnings = credentials.warnings(now_s=time.time())
        except SettingsError as error:
            problems = error.problems
        say_checked(config, problems, warnings=warnings, as_json=as_json)
        return
    early = EarlySignals()
    settings = load_settings(config)
    credentials = Credentials(settings)
    if problems := problems_of(settings, credentials, kubeconfig=kubeconfig):
        raise SettingsError(problems)
    log_as(context, style=settings.log_format, level=settings.log_level)
    on_terminal = OnTerminal.GIVE_UP if exit_on_terminal else OnTerminal.STAY_AWAY
    targets = Targets.CLEAR if log_targets else Targets.HASHED
    run_broker(settings, credentials, kubeconfig=kubeconfig, early=early, on_terminal=on_terminal, targets=targets)


def say_checked(config: Path, problems: tuple[str, ...], *, warnings: tuple[str, ...] = (), as_json: bool) -> None:
    """Print what a check of settings found, and leave with 2 when it found a problem."""
    if as_json:
        stdout.print_json({"valid": not problems, "problems": list(problems), "warnings": list(warnings)})
    else:
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            stdout.say(f"{config}: fine")
    if problems:
        raise typer.Exit(UsageError.exit_code)


def log_as(context: typer.Context, *, style: LogFormat, level: LogLevel) -> None:
    """Log as the settings say, but for what the command line or the environment says."""
    root = context.find_root()
    given = {
        name: root.params[name]
        for name in ("log_format", "log_level")
        if (source := root.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    configure(given.get("log_format", style), given.get("log_level", level))
