"""Families of metrics under one prefix, as broker and router have them."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Families:
    """Makes families whose names begin alike."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        """Return a gauge without labels."""
        return GaugeMetricFamily(f"{self._prefix}{name}", words, float(value))

    def labelled(self, name: str, words: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        """Return a counter with a series for each value of a label."""
        made = CounterMetricFamily(f"{self._prefix}{name}", words, labels=[label])
        for value, number in values.items():
            made.add_metric([value], number)
        return made
