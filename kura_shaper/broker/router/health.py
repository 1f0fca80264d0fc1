"""What the router's probes are told, and what a person who looks is shown.

Ready means that it listens and does not leave, whether brokers are there or not: it is they who come to it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kura_shaper import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.router.discovery import Discovery
    from kura_shaper.broker.router.feed import Feed
    from kura_shaper.broker.router.service import EventBus
    from kura_shaper.broker.router.session import ClientSession

_ALIVE_WITHIN_S = 60.0
_SEQUENCES_SHOWN = 64


class RouterHealth:
    """Asked from the threads of a web server."""

    def __init__(self, bus: EventBus, discovery: Discovery, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._discovery, self._now_s = bus, discovery, now_s

    def why_dead(self) -> str:
        """See web.Health."""
        still_s = self._now_s() - self._bus.turned_s
        return f"the event loop has not turned for {still_s:.0f} s" if still_s > _ALIVE_WITHIN_S else ""

    def why_not_ready(self) -> str:
        """See web.Health."""
        return self.why_dead() or ("it leaves" if self._bus.is_stopping else "")

    def status(self) -> dict[str, Any]:
        """See web.Health. Endpoints and ids are here and in no label; tokens are nowhere."""
        bus, why = self._bus, self.why_not_ready()
        return {
            "version": __version__,
            "ready": not why,
            "reason": why,
            "stopping": bus.is_stopping,
            "sessions": [_session(session) for session in tuple(bus.by_client.values())],
            "feeds": [_feed(feed) for feed in bus.feeds],
            "discovery": {
                "namespaces": len(bus.settings.discover),
                "namespaces_synced": self._discovery.namespaces_synced,
                "age_s": round(self._discovery.age_s, 3),
                "publishers": self._discovery.publishers,
                "not_read": bus.feeds_beyond,
            },
            "served": {"listen": f"{bus.served.listen.host}:{bus.served.port}", "clients": len(bus.served.clients)}
            if bus.served
            else None,
            "ports": [
                {
                    "listen": f"{port.listen.host}:{port.port}",
                    "endpoint": port.wanted.name,
                    "connections": len(port.connections),
                }
                for port in bus.ports
            ],
        }


def _session(session: ClientSession) -> dict[str, Any]:
    now_ns = session.now_ns()
    hello = session.protocol.hello
    return {
        "client_id": session.client_id,
        "role": session.role,
        "software": f"{hello.software.name} {hello.software.version}" if hello else "",
        "dynamo_namespaces": session.namespaces,
        "age_s": round(now_ns / 1e9 - session.began_s, 3),
        "silence_s": round((now_ns - session.protocol.heard_ns) / 1e9, 3),
        "draining": session.protocol.is_draining,
        "streams": [
            {
                "id": tunnel.stream_id,
                "state": tunnel.state.value,
                "endpoint": str(tunnel.target),
                "received_bytes": tunnel.received_bytes,
                "sent_bytes": tunnel.sent_bytes,
            }
            for tunnel in tuple(session.tunnels.values())
        ],
    }


def _feed(feed: Feed) -> dict[str, Any]:
    session, known = feed.session, feed.sequences.known
    return {
        "endpoint": feed.wanted.name,
        "dynamo_namespace": feed.wanted.dynamo_namespace,
        "topics": feed.wanted.topics,
        "read": feed.is_read,
        "over": session.client_id if session else None,
        "last_failure": feed.last_failure,
        "publishers": len(known),
        # Their numbers made room for those of others: each is `first` when it comes back, whatever it lacks.
        "publishers_forgotten": feed.sequences.forgotten,
        "sequences": [
            {
                "publisher_id": publisher_id,
                "topic": topic,
                "last": each.last,
                "received": each.received,
                "missed": each.missed,
                "gaps": each.gaps,
                "late": each.late,
                "duplicates": each.duplicates,
                "restarts": each.restarts,
            }
            for (publisher_id, topic), each in list(known.items())[-_SEQUENCES_SHOWN:]
        ],
    }
