"""Refusals are all counted, and logged once in a window for each code: a router can't flood the log.

A line has the target as a hash by a key of this process, so that two lines can be told to be of one target, and
nothing be learnt of a cluster by who may read logs; or in clear, where that is asked for.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from enum import Enum
from typing import TYPE_CHECKING

from kura_shaper.broker.counts import count
from kura_shaper.broker.protocol.codes import UNKNOWN, RefusalCode, label_of
from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.broker.seldom import Seldom
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN_CHARACTERS, _HASH_BYTES = 256, 6
_log = logging.getLogger("kura_shaper.broker")


class Targets(Enum):
    """How a line names the target of a refusal."""

    HASHED = "hashed"
    CLEAR = "clear"


class RefusalLog:
    """Notes refusals. The first of each code in a window is logged, with how many the last window kept quiet."""

    def __init__(
        self, counter: dict[str, int], *, now_ns: Callable[[], int], targets: Targets = Targets.HASHED
    ) -> None:
        self._counter, self._targets = counter, targets
        self._seldom = Seldom(now_s=lambda: now_ns() / SECOND_NS)
        self._key = secrets.token_bytes(32)

    def note(self, code: str, message: str = "", target: str = "") -> None:
        """Count a refusal, and log it if it is the first of its kind for a while."""
        count(self._counter, code)
        label = label_of(code, RefusalCode)
        suppressed = self._seldom.suppressed(label)
        if suppressed is None:
            return
        if not message and label != UNKNOWN:
            message = RefusalCode(label).words
        fields = {"target": self._shown(target)} if target else {}
        log_event(
            _log, "stream_refused", level=logging.WARNING, code=label, message=message, suppressed=suppressed, **fields
        )

    def _shown(self, target: str) -> str:
        """Return what a line has of a target that came from a router, so it may be anything."""
        if self._targets is Targets.CLEAR:
            return target[:_SHOWN_CHARACTERS]  # the log itself escapes what a terminal would heed
        return hashlib.blake2b(
            target.encode(errors="surrogatepass"), key=self._key, digest_size=_HASH_BYTES
        ).hexdigest()
