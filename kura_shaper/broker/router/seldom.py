"""The router's warnings of what may come without end."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kura_shaper.broker.seldom import Seldom
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("kura_shaper.broker.router")


class SeldomLog:
    """Who has a peer that can't be trusted warns through it. A kind is one of a closed set, so that few are known."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._seldom = Seldom(now_s=now_s)

    def warn(self, event: str, kind: str = "", **fields: object) -> None:
        """Log an event with its fields, if none of its kind was logged within a minute."""
        suppressed = self._seldom.suppressed((event, kind))
        if suppressed is not None:
            log_event(_log, event, level=logging.WARNING, **fields, suppressed=suppressed)
