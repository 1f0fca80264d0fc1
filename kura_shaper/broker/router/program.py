"""The router as a process: its event loop, its signals, its web server, and the status that it ends with."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kura_shaper.broker.process import problems_with, stop_by_signals, take_descriptors
from kura_shaper.broker.router.discovery import Discovery, open_apis, require_kubeconfigs
from kura_shaper.broker.router.health import RouterHealth
from kura_shaper.broker.router.metrics import RouterMetrics
from kura_shaper.broker.router.output import NoOutput
from kura_shaper.broker.router.port import CONNECTIONS_MAX
from kura_shaper.broker.router.reread import Rereading
from kura_shaper.broker.router.service import SPARE_CONNECTIONS, EventBus
from kura_shaper.broker.router.serving import CLIENTS_MAX
from kura_shaper.broker.router.strangers import STRANGERS_MAX
from kura_shaper.log import event as log_event
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.web import ProbeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.broker.router.output import ProcessOutput
    from kura_shaper.broker.router.settings import RouterSettings

# Beside connections: the API servers, the web server, the files that are reread, logs.
_DESCRIPTORS = 128
_log = logging.getLogger("kura_shaper.broker.router")


def problems_of(settings: RouterSettings, credentials: ServerCredentials) -> tuple[str, ...]:
    """Return what is wrong with certificate, key, tokens and kubeconfigs, one line each; the network is not asked."""
    kubeconfigs = partial(require_kubeconfigs, settings)
    files = problems_with(*(partial(credentials.read_pem, key) for key in ("certificate", "private_key")))
    # What is wrong with both together can only be told when both are there.
    pair = () if files else (credentials.read_context,)
    return (*files, *problems_with(*pair, credentials.read_tokens, kubeconfigs))


def doubts_of(credentials: ServerCredentials) -> tuple[str, ...]:
    """Return what does not keep a router from starting, and will keep its clients away."""
    return problems_with(credentials.require_dates)


def run_router(
    settings: RouterSettings, credentials: ServerCredentials, *, config: Path, output: ProcessOutput
) -> None:
    """Run a router until a signal; `config` is read again at SIGHUP. Raises UsageError when an address can't be had."""
    take_descriptors(descriptors_of(settings), key="max_sessions, beside the exposed ports,")
    asyncio.run(_run(settings, credentials, config, output=output))


def descriptors_of(settings: RouterSettings) -> int:
    """Return how many descriptors a router needs at most. Each connection to an exposed port is a stream as well."""
    exposed = sum(each.expose is not None for each in settings.subscriptions)
    local = min(exposed * CONNECTIONS_MAX, settings.max_sessions * settings.max_streams)
    served = CLIENTS_MAX if settings.serve else 0
    return settings.max_sessions + SPARE_CONNECTIONS + STRANGERS_MAX + exposed + local + served + _DESCRIPTORS


async def _run(
    settings: RouterSettings, credentials: ServerCredentials, config: Path, *, output: ProcessOutput
) -> None:
    credentials.load()
    bus = EventBus(settings, credentials, output=output, random=Random())  # noqa: S311 - it spreads retries
    stop_by_signals(bus.stop, is_stopping=lambda: bus.is_stopping, log=_log)
    rereading = Rereading(config, credentials, bus)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, rereading.ask)
    loop.add_signal_handler(signal.SIGUSR1, bus.rebalance)

    def on_gone(why: str) -> None:
        # When it is found out at the very end there is no loop any more, and nothing to be done.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_on_reader_gone, bus, why)

    output.when_gone(on_gone)
    started = asyncio.Event()
    rereads = asyncio.ensure_future(rereading.run(started))
    try:
        async with _discovering(bus) as discovery, _serving(bus, discovery, started):
            await bus.run(started)
            log_event(_log, "stopped")
    finally:
        rereads.cancel()
        output.close()


def _on_reader_gone(bus: EventBus, why: str) -> None:
    """Nobody reads stdout any more: leave, unless there are other readers."""
    has_others = bus.served is not None or bool(bus.ports)
    told = "events are printed no more" if has_others else "nobody reads events, so it leaves"
    log_event(_log, "stdout_gone", level=logging.WARNING, reason=why, message=told)
    # What nobody is there for is not dropped.
    bus.output = bus.served or NoOutput()
    if not has_others:
        bus.stop()


@asynccontextmanager
async def _discovering(bus: EventBus) -> AsyncIterator[Discovery]:
    """Follow what is advertised where the settings say so."""
    clock = SystemAsyncClock()
    async with AsyncExitStack() as stack:
        apis = await open_apis(bus.settings, stack, clock)
        discovery = Discovery(bus.settings.discover, apis, bus, clock=clock, random=bus.random)
        following = asyncio.ensure_future(discovery.run())
        # It never ends by itself, unless it is broken, and then this is no router any more.
        following.add_done_callback(lambda _: bus.stop())
        try:
            yield discovery
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


@asynccontextmanager
async def _serving(bus: EventBus, discovery: Discovery, started: asyncio.Event) -> AsyncIterator[None]:
    """Serve metrics and probes, and say when the router has started."""
    listen = bus.settings.metrics_listen
    collector, health = RouterMetrics(bus, discovery), RouterHealth(bus, discovery)
    server = ProbeServer(listen.host, listen.port, collector=collector, health=health)
    telling = asyncio.ensure_future(_tell_started(bus, started, metrics=f"{listen.host}:{server.port}"))
    try:
        yield
    finally:
        telling.cancel()
        server.close()


async def _tell_started(bus: EventBus, started: asyncio.Event, *, metrics: str) -> None:
    await started.wait()
    log_event(_log, "started", listen=f"{bus.settings.listen.host}:{bus.port}", metrics=metrics)
