"""Refusals are all counted, and logged once in a window for each code: a router can't flood the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kura_shaper.broker.counts import count
from kura_shaper.broker.protocol.codes import RefusalCode, label_of
from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_NS = 60 * SECOND_NS
_log = logging.getLogger("kura_shaper.broker")


class RefusalLog:
    """Notes refusals. The first of each code in a window is logged, with how many the last window kept quiet."""

    def __init__(self, counter: dict[str, int], *, now_ns: Callable[[], int]) -> None:
        self._counter, self._now_ns = counter, now_ns
        self._windows: dict[str, tuple[int, int]] = {}

    def note(self, code: str, message: str = "") -> None:
        """Count a refusal, and log it if it is the first of its kind for a while."""
        count(self._counter, code)
        label, now_ns = label_of(code, RefusalCode), self._now_ns()
        began_ns, suppressed = self._windows.get(label, (now_ns - WINDOW_NS, 0))
        if now_ns - began_ns < WINDOW_NS:
            self._windows[label] = (began_ns, suppressed + 1)
            return
        self._windows[label] = (now_ns, 0)
        log_event(_log, "stream_refused", level=logging.WARNING, code=label, message=message, suppressed=suppressed)
