"""What a watch tells Prometheus: whether the gateway is in step, and how many old workers still serve.

HAProxy's own exporter has the traffic. It can't tell of old workers, since each worker
knows itself alone; here the master is asked at each scrape, so nothing freezes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.master import read_workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from kura_shaper.clock import Clock
    from kura_shaper.haproxy.master import Master
    from kura_shaper.haproxy.watch import WatchState

_PREFIX = "kura_shaper_gateway_"
_SECOND_NS = 1e9


class WatchMetrics:
    """A collector of prometheus_client."""

    def __init__(self, state: WatchState, master: Master, clock: Clock) -> None:
        self._state, self._master, self._clock = state, master, clock

    def collect(self) -> Iterator[Metric]:
        """Yield every series; those of a gateway that does not answer are absent."""
        state = self._state
        yield _gauge(
            "source_valid", "1 when the tenants document can be used, 0 when the last good one is", state.source_valid
        )
        if state.source_read_ns:
            yield _gauge(
                "source_age_seconds", "Time since the document in use was read", self._since(state.source_read_ns)
            )
        yield _gauge("in_step", "1 when the gateway has what the document says", state.in_step)
        if state.last_good_ns:
            words = "Time since the gateway was last seen to have what the document says"
            yield _gauge("in_step_age_seconds", words, self._since(state.last_good_ns))
        yield _gauge("reload_pending", "1 while a reload waits for its turn", state.reload_pending)
        yield _gauge("tenants", "Tenants in the document in use", state.tenants)
        words = "Hostnames without a certificate, and certificates that are out of date"
        yield _gauge("certificate_findings", words, state.certificate_findings)
        yield CounterMetricFamily(f"{_PREFIX}apply_failures", "Applies that failed", value=state.failures)
        decisions = CounterMetricFamily(f"{_PREFIX}applies", "Applies that changed something", labels=["decision"])
        for kind, count in state.decisions.items():
            decisions.add_metric([kind], count)
        yield decisions
        yield InfoMetricFamily(f"{_PREFIX}generation", "The generation in force", {"generation": state.generation})
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        try:
            workers = read_workers(self._master)
        except KuraShaperError:
            yield _gauge("up", "1 when the gateway's master answers and has a worker", 0)
            return
        yield _gauge("up", "1 when the gateway's master answers and has a worker", 1)
        yield _gauge("old_workers", "Workers of before a reload that still serve", len(workers.old))
        yield _gauge("worker_age_seconds", "Time since the last reload or start", workers.current.age_s)

    def _since(self, then_ns: int) -> float:
        return (self._clock.now_ns() - then_ns) / _SECOND_NS


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}{name}", words, value=float(value))
