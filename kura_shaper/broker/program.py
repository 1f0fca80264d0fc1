"""The broker as a process: its event loop, its signals, its web server, and the status that it ends with."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kura_shaper.broker.dial import require_mark
from kura_shaper.broker.directory import MetadataDirectory
from kura_shaper.broker.health import BrokerHealth
from kura_shaper.broker.kubeconfig import require_kubeconfig
from kura_shaper.broker.memory import share_one_arena
from kura_shaper.broker.metrics import BrokerMetrics
from kura_shaper.broker.process import SIGNALS, problems_with, require_descriptors, stop_by_signals, take_descriptors
from kura_shaper.broker.service import Broker, OnTerminal
from kura_shaper.log import event as log_event
from kura_shaper.tenants.kubernetes.access import Access, HttpApi
from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
from kura_shaper.web import ProbeServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kura_shaper.broker.credentials import Credentials
    from kura_shaper.broker.refusals import Targets
    from kura_shaper.broker.settings import BrokerSettings

# Beside one descriptor for each stream: the bus, the API server, the web server, lookups, logs.
_DESCRIPTORS = 64
# So that what starts all brokers of a fleet at once does not have all of them dial at once.
_START_WITHIN_S = 1.0
_log = logging.getLogger("kura_shaper.broker")


def problems_of(
    settings: BrokerSettings, credentials: Credentials, *, kubeconfig: Path | None = None
) -> tuple[str, ...]:
    """Return what is wrong with token, CA bundle, kubeconfig and limits, one line each; the network is not asked."""
    reads: list[Callable[[], object]] = [credentials.read_token, credentials.read_context]
    if kubeconfig is not None:
        reads.append(partial(require_kubeconfig, "--kubeconfig", kubeconfig))
    return problems_with(*reads, partial(require_descriptors, _descriptors(settings), key="max_streams"))


class EarlySignals:
    """Notes a signal that comes before there is a broker to stop."""

    def __init__(self) -> None:
        self.came = False
        for number in SIGNALS:
            signal.signal(number, self._come)

    def _come(self, *_: object) -> None:
        self.came = True


def run_broker(
    settings: BrokerSettings,
    credentials: Credentials,
    *,
    kubeconfig: Path | None,
    early: EarlySignals,
    on_terminal: OnTerminal,
    targets: Targets,
) -> None:
    """Run a broker until a signal. Raises UsageError, MarkRefusedError, and with GIVE_UP RefusedError."""
    share_one_arena()
    take_descriptors(_descriptors(settings), key="max_streams")
    require_mark(settings.so_mark)
    if not settings.allowed_cidrs:
        remedy = "set allowed_cidrs to the pods' network"
        log_event(_log, "any_address_is_allowed", level=logging.WARNING, remedy=remedy)
    for network in settings.allowed_cidrs:
        if network.prefixlen == 0:
            remedy = "set allowed_cidrs to the pods' network alone"
            log_event(_log, "any_address_is_allowed", level=logging.WARNING, network=str(network), remedy=remedy)
    asyncio.run(_run(settings, credentials, kubeconfig, early=early, on_terminal=on_terminal, targets=targets))


def _descriptors(settings: BrokerSettings) -> int:
    return settings.max_streams + _DESCRIPTORS


async def _run(
    settings: BrokerSettings,
    credentials: Credentials,
    kubeconfig: Path | None,
    *,
    early: EarlySignals,
    on_terminal: OnTerminal,
    targets: Targets,
) -> None:
    random, clock = Random(), SystemAsyncClock()  # noqa: S311 - it spreads retries
    async with HttpApi(Access(kubeconfig, clock=clock)) as api:
        directory = MetadataDirectory(api, settings.watch_namespaces, clock=clock, random=random)
        broker = Broker(
            settings,
            credentials,
            directory,
            random=random,
            on_terminal=on_terminal,
            targets=targets,
            start_within_s=_START_WITHIN_S,
        )
        stop_by_signals(broker.stop, is_stopping=lambda: broker.view.is_stopping, log=_log)
        if early.came:
            broker.stop()
        listen = settings.metrics_listen
        server = ProbeServer(
            listen.host,
            listen.port,
            collector=BrokerMetrics(broker, directory),
            health=BrokerHealth(broker, directory),
        )
        try:
            log_event(_log, "started", client_id=settings.client_id, listen=f"{listen.host}:{server.port}")
            await broker.run()
            log_event(_log, "stopped")
        finally:
            # The web server's end waits for its thread, which no stream has to wait for any more.
            server.close()
