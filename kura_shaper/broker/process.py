"""What the broker and the router are alike in as processes: their credentials checked, and their end by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def problems_with(*reads: Callable[[], object]) -> tuple[str, ...]:
    """Return what is wrong with each thing that is read, one line each; the network is not asked."""
    found = []
    for read in reads:
        try:
            read()
        except UsageError as error:
            found.append(str(error))
    return tuple(found)


def stop_by_signals(stop: Callable[[], None], *, is_stopping: Callable[[], bool], log: logging.Logger) -> None:
    """Let the first signal stop what runs in this loop in its own time, and a second one end the process at once."""
    loop = asyncio.get_running_loop()

    def come(number: signal.Signals) -> None:
        if is_stopping():
            # Whoever sends a second one does not want to wait for anything.
            os._exit(128 + number)
        log_event(log, "stopping", signal=number.name)
        stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, come, number)
