"""Warnings of what may come without end: the first of a kind in a minute, with how many were kept quiet."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 60.0
_log = logging.getLogger("kura_shaper.broker.router")


class SeldomLog:
    """Who has a peer that can't be trusted warns through it. A kind is one of a closed set, so that few are known."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    def warn(self, event: str, kind: str = "", **fields: object) -> None:
        """Log an event with its fields, if none of its kind was logged within a minute."""
        key, now_s = (event, kind), self._now_s()
        began_s, suppressed = self._windows.get(key, (now_s - WINDOW_S, 0))
        if now_s - began_s < WINDOW_S:
            self._windows[key] = (began_s, suppressed + 1)
            return
        self._windows[key] = (now_s, 0)
        log_event(_log, event, level=logging.WARNING, **fields, suppressed=suppressed)
