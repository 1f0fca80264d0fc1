"""Log lines that anybody could cause without end: one a minute, with how many there would have been since the last."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 60.0
_log = logging.getLogger("kura_shaper.broker.router")


class Rarely:
    """One event of the log. `now_s` is any clock in seconds that goes forward."""

    def __init__(self, name: str, *, now_s: Callable[[], float]) -> None:
        self._name, self._now_s = name, now_s
        self._logged_s: float | None = None
        self._suppressed = 0

    def note(self, **fields: object) -> None:
        """Log it, or count it for the next time."""
        now_s = self._now_s()
        if self._logged_s is not None and now_s - self._logged_s < WINDOW_S:
            self._suppressed += 1
            return
        log_event(_log, self._name, level=logging.WARNING, suppressed=self._suppressed, **fields)
        self._logged_s, self._suppressed = now_s, 0
