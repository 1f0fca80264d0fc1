"""The router's metrics, built at each scrape from what it counts. Every label value is from a closed set."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from kura_shaper import __version__
from kura_shaper.broker.families import Families
from kura_shaper.broker.process import lag_s
from kura_shaper.broker.protocol.codes import Role
from kura_shaper.broker.router.tunnel import TunnelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from kura_shaper.broker.router.discovery import Discovery
    from kura_shaper.broker.router.service import EventBus

PREFIX = "continuum_event_bus_"
_FAMILIES = Families(PREFIX)
_gauge, _labelled = _FAMILIES.gauge, _FAMILIES.labelled
# Name, words, label, and the counter of RouterCounts.
_BY_LABEL = (
    ("connection_faults", "Connections that ended by what the client sent", "reason", "connection_faults"),
    ("answers", "Answers to requests of clients", "status", "answers"),
    ("session_ends", "Sessions that ended", "code", "session_ends"),
    ("refusals", "Subscribes that brokers refused", "code", "refusals"),
    ("streams_closed", "Streams that brokers closed", "code", "closes"),
    ("tunnel_ends", "Tunnels that ended", "reason", "tunnel_ends"),
    ("arrivals", "What the sequence numbers of events said", "kind", "arrivals"),
    ("events_dropped", "Events that were not passed on", "reason", "dropped"),
    ("bad_events", "Messages that were no events", "reason", "bad_events"),
    ("bad_publishers", "Publishers that could not be read", "reason", "bad_publishers"),
    ("served_cut_off", "Readers of the served events that were cut off", "reason", "served_cut_off"),
    ("credential_reloads", "Readings of tokens and certificate", "result", "credential_reloads"),
    ("settings_reloads", "Readings of the settings that were asked for", "result", "settings_reloads"),
    ("rebalanced", "Brokers in rebalances that were asked for", "outcome", "rebalanced"),
)
_PLAIN = (
    ("connections", "Connections that were made", "connections"),
    ("connections_refused", "Connections that were closed at once", "connections_refused"),
    ("sessions", "Sessions that were welcomed", "sessions"),
    ("subscribes", "Subscribes that were asked for", "subscribes"),
    ("frames_ignored", "Frames of no known type", "frames_ignored"),
    ("heartbeats_received", "Heartbeats of clients", "heartbeats_received"),
    ("events", "Events that came", "events"),
    ("events_missed", "Events that are missing by their numbers", "events_missed"),
    ("sequences_forgotten", "Publishers whose numbers were forgotten for those of others", "sequences_forgotten"),
    ("local_connections", "Connections to exposed ports", "local_connections"),
    ("served_connections", "Connections of readers of the served events", "served_connections"),
)


class RouterMetrics:
    """A collector of prometheus_client."""

    def __init__(self, bus: EventBus, discovery: Discovery, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._discovery, self._now_s = bus, discovery, now_s

    def collect(self) -> Iterator[Metric]:
        """Yield every series."""
        counts = self._bus.counts
        yield InfoMetricFamily(f"{PREFIX}build", "This program", {"version": __version__})
        for name, words, field in _PLAIN:
            yield CounterMetricFamily(f"{PREFIX}{name}", words, getattr(counts, field))
        for name, words, label, field in _BY_LABEL:
            yield _labelled(name, words, label, getattr(counts, field))
        relayed = {"from_broker": counts.from_broker_bytes, "to_broker": counts.to_broker_bytes}
        yield _labelled("bytes", "Bytes of data streams", "direction", relayed)
        yield from self._gauges()
        yield from self._discovered()

    def _gauges(self) -> Iterator[Metric]:
        bus = self._bus
        sessions = tuple(bus.by_client.values())
        states = [tunnel.state for session in sessions for tunnel in tuple(session.tunnels.values())]
        clients = GaugeMetricFamily(f"{PREFIX}clients", "Sessions that are there", labels=["role"])
        for role in Role:
            clients.add_metric([role], sum(session.role == role for session in sessions))
        yield clients
        yield _gauge("strangers", "Connections that have shown no token yet", bus.strangers)
        yield _gauge("streams_open", "Data streams that are open", states.count(TunnelState.OPEN))
        yield _gauge("streams_asked", "Subscribes that are no streams yet", states.count(TunnelState.ASKED))
        yield _gauge("feeds", "Publishers whose events are wanted", len(bus.feeds))
        yield _gauge("feeds_read", "Publishers that are subscribed to", sum(feed.is_read for feed in bus.feeds))
        yield _gauge("served_clients", "Readers of the served events", len(bus.served.clients) if bus.served else 0)
        lag = lag_s(bus.counts.loop_lag_s, turned_s=bus.turned_s, now_s=self._now_s())
        yield _gauge("event_loop_lag_seconds", "How late the event loop is", lag)

    def _discovered(self) -> Iterator[Metric]:
        found = self._discovery
        counts = found.counts
        yield _gauge("publishers_discovered", "Publishers that are advertised and wanted", found.publishers)
        beyond = self._bus.feeds_beyond
        yield _gauge("publishers_beyond", "Publishers that are advertised and too many to be read", beyond)
        yield _gauge("discovery_namespaces_synced", "Kubernetes namespaces that were listed", found.namespaces_synced)
        yield _gauge("discovery_age_seconds", "Time since nothing was known to be missing", found.age_s)
        yield _labelled("discovery_lists", "Lists of metadata", "result", counts.lists)
        yield _labelled("discovery_watch_restarts", "Ends of watches of metadata", "reason", counts.watch_restarts)
        yield _labelled("discovery_skipped", "Metadata that was not taken", "reason", counts.skipped)
