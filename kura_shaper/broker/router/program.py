"""The router as a process: its event loop, its signals, its web server, and the status that it ends with."""

from __future__ import annotations

import asyncio
import logging
import signal
from random import Random
from typing import TYPE_CHECKING

from kura_shaper.broker.process import problems_with, stop_by_signals
from kura_shaper.broker.router.health import RouterHealth
from kura_shaper.broker.router.metrics import RouterMetrics
from kura_shaper.broker.router.reread import Rereading
from kura_shaper.broker.router.service import EventBus
from kura_shaper.log import event as log_event
from kura_shaper.web import ProbeServer

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.broker.router.output import EventOutput
    from kura_shaper.broker.router.settings import RouterSettings

_log = logging.getLogger("kura_shaper.broker.router")


def problems_of(credentials: ServerCredentials) -> tuple[str, ...]:
    """Return what is wrong with certificate, key and tokens, one line each."""
    return problems_with(credentials.read_context, credentials.read_tokens)


def run_router(settings: RouterSettings, credentials: ServerCredentials, *, config: Path, output: EventOutput) -> None:
    """Run a router until a signal; `config` is read again at SIGHUP. Raises UsageError when an address can't be had."""
    asyncio.run(_run(settings, credentials, config, output=output))


async def _run(settings: RouterSettings, credentials: ServerCredentials, config: Path, *, output: EventOutput) -> None:
    credentials.load()
    bus = EventBus(settings, credentials, output=output, random=Random())  # noqa: S311 - it spreads retries
    stop_by_signals(bus.stop, is_stopping=lambda: bus.is_stopping, log=_log)
    rereading = Rereading(config, credentials, bus)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, rereading.ask)
    loop.add_signal_handler(signal.SIGUSR1, bus.rebalance)
    listen = settings.metrics_listen
    server = ProbeServer(listen.host, listen.port, collector=RouterMetrics(bus), health=RouterHealth(bus))
    started = asyncio.Event()
    beside = [
        asyncio.ensure_future(_tell_started(bus, started, metrics=f"{listen.host}:{server.port}")),
        asyncio.ensure_future(rereading.run(started)),
    ]
    try:
        await bus.run(started)
        log_event(_log, "stopped")
    finally:
        for task in beside:
            task.cancel()
        output.close()
        server.close()


async def _tell_started(bus: EventBus, started: asyncio.Event, *, metrics: str) -> None:
    await started.wait()
    log_event(_log, "started", listen=f"{bus.settings.listen.host}:{bus.port}", metrics=metrics)
