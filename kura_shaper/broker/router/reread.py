"""The router's files read anew when an operator asks for it: certificate, key, tokens, and what is to be subscribed.

Each stands for itself. What can't be used is told, a line for each problem with its key, and the last good one stays.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kura_shaper.broker.entries import SettingsError
from kura_shaper.broker.router.settings import keys_that_differ, load_settings
from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.broker.router.credentials import ServerCredentials
    from kura_shaper.broker.router.service import EventBus

_log = logging.getLogger("kura_shaper.broker.router")


class Rereading:
    """Rereads when it is asked to; asked again meanwhile, once more after that."""

    def __init__(self, config: Path, credentials: ServerCredentials, bus: EventBus) -> None:
        self._config, self._credentials, self._bus = config, credentials, bus
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Reread soon."""
        self._asked.set()

    async def run(self, started: asyncio.Event) -> None:
        """Do as asked, from when the router listens until this is cancelled."""
        await started.wait()
        while True:
            await self._asked.wait()
            self._asked.clear()
            if self._bus.is_stopping:
                return
            self._credentials.reload(self._bus.counts)
            await self._reread_settings()

    async def _reread_settings(self) -> None:
        outcome = "failed"
        try:
            # In a thread: a file may be long, or on a disk that is slow.
            told = await asyncio.to_thread(load_settings, self._config)
            await self._bus.want(told.subscriptions)
        except SettingsError as error:
            for problem in error.problems:
                log_event(_log, "settings_bad", level=logging.ERROR, problem=problem)
        except UsageError as error:
            log_event(_log, "settings_bad", level=logging.ERROR, problem=error.message)
        else:
            outcome = "ok"
            log_event(_log, "settings_reread", subscriptions=len(told.subscriptions))
            if keys := keys_that_differ(self._bus.settings, told):
                log_event(_log, "settings_need_a_restart", level=logging.WARNING, keys=keys)
        self._bus.counts.settings_reloads[outcome] += 1
