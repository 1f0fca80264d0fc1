"""What a probe tells Prometheus. Labels are the configured targets', and reasons from a fixed list.

A result that is old is absent, so nothing freezes; what was not reached is absent, never zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from kura_shaper import __version__
from kura_shaper.probe.failures import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from kura_shaper.probe.service import ProbeService, Watched
    from kura_shaper.probe.target import Measured

_PREFIX = "kura_shaper_probe_"
_LABELS = ("tenant", "target", "protocol")
_SECOND_NS = 1e9


def _seconds(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else duration_ns / _SECOND_NS


def _up(measured: Measured) -> float | None:
    return float(not measured.failures)


def _rate(measured: Measured) -> float | None:
    return None if measured.rate is None else float(measured.rate.bits_per_second)


def _busy(measured: Measured) -> float | None:
    return None if measured.rate is None else measured.busy_percent / 100


# Name, words, and how it is read from a result.
_OF_THE_LAST: tuple[tuple[str, str, Callable[[Measured], float | None]], ...] = (
    ("up", "1 when the last round had no failure", _up),
    ("resolve_seconds", "Time to the addresses of the name", lambda m: _seconds(m.resolve_ns)),
    ("connect_seconds", "Time to a TCP connection", lambda m: _seconds(m.connect_ns)),
    ("handshake_seconds", "Time of the TLS handshake", lambda m: _seconds(m.handshake_ns)),
    ("first_byte_seconds", "From the request to the first byte of payload", lambda m: _seconds(m.first_byte_ns)),
    ("rate_bits_per_second", "Payload of all streams while all flow", _rate),
    ("status", "Status of HTTP", lambda m: m.status),
    ("grpc_status", "Status of gRPC", lambda m: m.grpc_status),
    ("busy_ratio", "How much of a processor the probe itself took meanwhile", _busy),
    (
        "certificate_not_after_timestamp_seconds",
        "The last second, Unix time, that the certificate is for",
        lambda m: m.certificate_ends_at_s,
    ),
)


class ProbeMetrics:
    """A collector of prometheus_client."""

    def __init__(self, service: ProbeService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield every series that is known at this moment."""
        with self._service.lock:
            families = [*self._of_the_last(), *self._of_all_rounds()]
        yield InfoMetricFamily(f"{_PREFIX}build", "This program", {"version": __version__})
        yield GaugeMetricFamily(
            f"{_PREFIX}interval_seconds",
            "Time between two rounds of a target",
            value=self._service.interval_ns / _SECOND_NS,
        )
        yield from families

    def _of_the_last(self) -> Iterator[Metric]:
        fresh = [(each, each.last) for each in self._service.watched if self._service.is_fresh(each)]
        for name, words, read in _OF_THE_LAST:
            family = GaugeMetricFamily(f"{_PREFIX}{name}", words, labels=_LABELS)
            for watched, last in fresh:
                value = read(last) if last else None
                if value is not None:
                    family.add_metric(_labels(watched), value)
            yield family
        spoken = InfoMetricFamily(f"{_PREFIX}spoken", "What TLS agreed on", labels=_LABELS)
        for watched, last in fresh:
            if last and last.spoken:
                spoken.add_metric(_labels(watched), {"spoken": last.spoken})
        yield spoken

    def _of_all_rounds(self) -> Iterator[Metric]:
        watched = self._service.watched
        yield _counter("rounds", "Measurements that ended", watched, lambda each: each.rounds)
        yield _counter("skipped_rounds", "Rounds left out for one that ran", watched, lambda each: each.skipped)
        yield _counter("received_bytes", "Payload that was read", watched, lambda each: each.received_bytes)
        failures = CounterMetricFamily(
            f"{_PREFIX}failures", "Streams that failed, by where it went wrong", labels=(*_LABELS, "reason")
        )
        for each in watched:
            for reason in Reason:
                failures.add_metric((*_labels(each), reason), each.failures[reason])
        yield failures
        yield _gauge(
            "last_round_timestamp_seconds", "When the last round ended, Unix time", watched, lambda e: e.last_at_s
        )
        yield _gauge(
            "last_success_timestamp_seconds",
            "When the last round without a failure ended",
            watched,
            lambda e: e.last_success_s,
        )
        yield _gauge(
            "min_rate_bits_per_second",
            "The least rate that is fine",
            watched,
            lambda e: e.task.target.min_rate.bits_per_second if e.task.target.min_rate else 0,
        )


def _labels(watched: Watched) -> tuple[str, str, str]:
    target = watched.task.target
    return target.tenant, target.name, target.protocol.value


def _counter(
    name: str, words: str, watched: tuple[Watched, ...], read: Callable[[Watched], float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_PREFIX}{name}", words, labels=_LABELS)
    for each in watched:
        family.add_metric(_labels(each), read(each))
    return family


def _gauge(name: str, words: str, watched: tuple[Watched, ...], read: Callable[[Watched], float]) -> GaugeMetricFamily:
    """Return a gauge of those targets for which it is not 0."""
    family = GaugeMetricFamily(f"{_PREFIX}{name}", words, labels=_LABELS)
    for each in watched:
        if value := read(each):
            family.add_metric(_labels(each), value)
    return family
