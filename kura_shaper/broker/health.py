"""What the broker's probes are told, and what a person who looks is shown.

Ready means that the metadata is known, whatever the bus does: a router that is away is no reason to take
this pod out of anything. Dead means that the event loop stands still.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kura_shaper import __version__
from kura_shaper.broker.protocol.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.directory import MetadataDirectory
    from kura_shaper.broker.relay import Relay
    from kura_shaper.broker.service import Broker
    from kura_shaper.broker.session import BusSession

_ALIVE_WITHIN_S = 60.0


class BrokerHealth:
    """Asked from the threads of a web server. `now_s` is the monotonic clock that the broker notes its turns by."""

    def __init__(
        self, broker: Broker, directory: MetadataDirectory, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._broker, self._directory, self._now_s = broker, directory, now_s

    def why_dead(self) -> str:
        """See web.Health."""
        still_s = self._now_s() - self._broker.view.turned_s
        return f"the event loop has not turned for {still_s:.0f} s" if still_s > _ALIVE_WITHIN_S else ""

    def why_not_ready(self) -> str:
        """See web.Health."""
        if dead := self.why_dead():
            return dead
        if self._broker.view.is_synced:
            return ""
        return f"{self._directory.namespaces_synced} namespaces are listed, and not yet all of them"

    def status(self) -> dict[str, Any]:
        """See web.Health. Endpoints are here and in no label; the token is nowhere."""
        broker, directory = self._broker, self._directory
        view, why = broker.view, self.why_not_ready()
        return {
            "version": __version__,
            "ready": not why,
            "reason": why,
            "stopping": view.is_stopping,
            "session": _session(view.session, broker.now_ns()) if view.session else None,
            "last_end": {"code": view.last_end.code, "reason": view.last_end.message} if view.last_end else None,
            "recent_closes": list(broker.counts.recent_closes),
            "recent_refusals": list(broker.counts.recent_refusals),
            "metadata": {
                "resources": directory.resources,
                "publishers": directory.references,
                "namespaces_synced": directory.namespaces_synced,
                "age_s": round(directory.age_s, 3),
                "skipped": {reason: number for reason, number in directory.counts.skipped.items() if number},
            },
        }


def _session(session: BusSession, now_ns: int) -> dict[str, Any]:
    terms = session.protocol.terms
    return {
        "id": terms.session_id if terms else None,
        "age_s": (now_ns - session.established_ns) / SECOND_NS if session.is_established else None,
        "silence_s": (now_ns - session.protocol.heard_ns) / SECOND_NS,
        "draining": session.protocol.is_draining,
        "max_streams": session.protocol.limits.max_streams,
        "max_stream_buffer_bytes": session.protocol.limits.max_stream_buffer_bytes,
        "buffered_bytes": session.buffered_bytes,
        "streams": [_stream(relay, now_ns) for relay in tuple(session.relays.values())],
    }


def _stream(relay: Relay, now_ns: int) -> dict[str, Any]:
    return {
        "id": relay.stream_id,
        "state": relay.state.value,
        "endpoint": relay.target.endpoint[:256],
        "age_s": round(now_ns / SECOND_NS - relay.began_s, 3),
        "bytes_to_router": relay.sent_bytes,
        "bytes_to_upstream": relay.received_bytes,
        "buffered_bytes": relay.buffer.charged_bytes,
    }
