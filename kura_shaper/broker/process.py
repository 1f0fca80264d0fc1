"""What the broker and the router are alike in as processes: credentials and descriptors, and their end by a signal."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    import logging
    from collections.abc import AsyncIterator, Callable

# How often a loop notes that it turns.
TURN_EVERY_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def turns() -> AsyncIterator[float]:
    """Yield again and again, each time that this loop comes to it, how late it is in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + TURN_EVERY_S
        await asyncio.sleep(TURN_EVERY_S)
        yield max(0.0, loop.time() - due_s)


def lag_s(measured_s: float, *, turned_s: float, now_s: float) -> float:
    """Return how late a loop is, for another thread: what it measured last, or more when its next turn is overdue."""
    return max(measured_s, now_s - turned_s - TURN_EVERY_S)


def problems_with(*reads: Callable[[], object]) -> tuple[str, ...]:
    """Return what is wrong with each thing that is read, one line each; the network is not asked."""
    found = []
    for read in reads:
        try:
            read()
        except UsageError as error:
            found.append(str(error))
    return tuple(found)


def require_descriptors(wanted: int, *, key: str) -> None:
    """Raise UsageError when there can't be room for so many descriptors. `key` is the setting that asks so."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        remedy = f"raise the limit of open files to {wanted}"
        raise UsageError(f"{key} needs {wanted} descriptors, and {hard} are allowed", remedy=remedy)


def take_descriptors(wanted: int, *, key: str) -> None:
    """Have room for so many descriptors. Raises UsageError when there can't be."""
    require_descriptors(wanted, key=key)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
