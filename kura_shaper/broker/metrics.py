"""The broker's metrics, built at each scrape from what it counts.

Every label value is from a closed set, and every series is there from the start: ids, hosts and
namespaces are in /statusz, never here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from kura_shaper import __version__
from kura_shaper.broker.counts import STAGE_BUCKETS_S
from kura_shaper.broker.families import Families
from kura_shaper.broker.process import lag_s
from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.broker.relay import RelayState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from kura_shaper.broker.directory import MetadataDirectory
    from kura_shaper.broker.service import Broker

PREFIX = "continuum_event_broker_"
_FAMILIES = Families(PREFIX)
_gauge, _labelled = _FAMILIES.gauge, _FAMILIES.labelled
# Name, words, label, and the counter of Counts.
_BY_LABEL = (
    ("refusals", "Subscribes that became no stream", "code", "refusals"),
    ("streams_closed", "Open streams that ended", "code", "stream_ends"),
    ("sessions", "Attempts to have a session", "outcome", "dials"),
    ("session_ends", "Sessions that ended", "code", "session_ends"),
    ("reconnects", "Waits before the next attempt", "kind", "reconnects"),
    ("credential_reloads", "Readings of token and CA bundle", "result", "credential_reloads"),
)


class BrokerMetrics:
    """A collector of prometheus_client, asked from the threads of a web server; `now_s` is as in BrokerHealth."""

    def __init__(
        self, broker: Broker, directory: MetadataDirectory, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._broker, self._directory, self._now_s = broker, directory, now_s

    def collect(self) -> Iterator[Metric]:
        """Yield every series."""
        yield InfoMetricFamily(f"{PREFIX}build", "This program", {"version": __version__})
        yield from self._counters()
        yield from self._streams()
        yield from self._session()
        yield from self._metadata()

    def _counters(self) -> Iterator[Metric]:
        counts = self._broker.counts
        for name, words, label, field in _BY_LABEL:
            yield _labelled(name, words, label, getattr(counts, field))
        relayed = {"to_router": counts.to_router_bytes, "to_upstream": counts.to_upstream_bytes}
        yield _labelled("bytes", "Bytes that were relayed", "direction", relayed)
        heartbeats = {"sent": counts.heartbeats_sent, "received": counts.heartbeats_received}
        yield _labelled("heartbeats", "Heartbeats", "direction", heartbeats)
        yield _labelled("frames_ignored", "Frames of no known type", "reason", {"unknown_type": counts.frames_ignored})
        errors = CounterMetricFamily(f"{PREFIX}errors", "Errors that ended a session", labels=["direction", "code"])
        for direction, by_code in (("sent", counts.errors_sent), ("received", counts.errors_received)):
            for code, number in by_code.items():
                errors.add_metric([direction, code], number)
        yield errors
        terminal = GaugeMetricFamily(
            f"{PREFIX}terminal_error", "1 while only other settings will do, until a welcome", labels=["code"]
        )
        for code, is_set in counts.terminal_error.items():
            terminal.add_metric([code], is_set)
        yield terminal
        yield _gauge("reconnect_delay_seconds", "The last wait before an attempt", counts.reconnect_wait_s)
        lag = lag_s(counts.loop_lag_s, turned_s=self._broker.view.turned_s, now_s=self._now_s())
        yield _gauge("event_loop_lag_seconds", "How late the event loop is", lag)

    def _streams(self) -> Iterator[Metric]:
        counts, session = self._broker.counts, self._broker.view.session
        yield CounterMetricFamily(f"{PREFIX}streams_opened", "Streams that were opened", counts.streams_opened)
        states = [relay.state for relay in tuple(session.relays.values())] if session else []
        opening = sum(state is RelayState.OPENING for state in states)
        yield _gauge("streams_open", "Streams that are open", len(states) - opening)
        yield _gauge("streams_opening", "Streams that are being opened", opening)
        yield _gauge("streams_limit", "Streams that may be open or being opened", self._broker.max_streams)
        times = HistogramMetricFamily(
            f"{PREFIX}stream_open_seconds", "How long the stages of opening a stream took", labels=["stage"]
        )
        for stage, each in counts.stages.items():
            buckets = [(str(bound), within) for bound, within in zip(STAGE_BUCKETS_S, each.within, strict=True)]
            times.add_metric([stage], [*buckets, ("+Inf", each.count)], each.sum_s)
        yield times

    def _session(self) -> Iterator[Metric]:
        broker, session = self._broker, self._broker.view.session
        is_up = session is not None and session.is_established
        now_ns = broker.now_ns()
        yield _gauge("session_up", "1 while the router has welcomed this broker", is_up)
        age_ns = now_ns - session.established_ns if session and is_up else 0
        yield _gauge("session_age_seconds", "How long the session is there", age_ns / SECOND_NS)
        silence_ns = now_ns - session.protocol.heard_ns if session and is_up else 0
        yield _gauge("router_silence_seconds", "How long the router said nothing", silence_ns / SECOND_NS)
        buffered = session.buffered_bytes if session else 0
        yield _gauge("buffered_bytes", "Bytes that wait for the router, with what it takes to keep them", buffered)
        high = session.budget.high_water_bytes if session else 0
        yield _gauge("buffer_high_water_bytes", "The most of these in this session", high)

    def _metadata(self) -> Iterator[Metric]:
        directory = self._directory
        counts = directory.counts
        yield _labelled("metadata_skipped", "Metadata that was not taken", "reason", counts.skipped)
        yield _labelled("metadata_lists", "Lists of a namespace", "outcome", counts.lists)
        yield _labelled("watch_restarts", "Watches that ended", "reason", counts.watch_restarts)
        yield _gauge("metadata_resources", "Resources that are known", directory.resources)
        yield _gauge(
            "metadata_publishers", "Publishers that are advertised, as often as they are", directory.references
        )
        yield _gauge("metadata_namespaces_synced", "Namespaces that were listed once", directory.namespaces_synced)
        words = "Time since it was last known that no metadata is missing"
        yield _gauge("metadata_snapshot_age_seconds", words, directory.age_s)
