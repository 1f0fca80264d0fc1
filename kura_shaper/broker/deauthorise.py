"""Streams whose publisher is not advertised any more: ended after a while, where that is asked for.

By itself a broker asks the metadata only when a stream is opened. Here it is asked again and again. Only what is
known counts: while the API server is away nobody is known to have left, and the time begins anew after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.broker.relay import Relay
    from kura_shaper.broker.security import TargetCheck

LOOK_EVERY_S = 1.0


def end_what_left(relays: Iterable[Relay], check: TargetCheck, *, now_s: float, after_s: float) -> None:
    """End each open stream whose publisher is gone for so long."""
    for relay in tuple(relays):
        if relay.address is None or not check.is_gone(relay.address, relay.target):
            relay.gone_since_s = None
        elif relay.gone_since_s is None:
            relay.gone_since_s = now_s
        elif now_s - relay.gone_since_s >= after_s:
            relay.deauthorise()
