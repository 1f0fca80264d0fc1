"""What an event broker serves: all of its series are there from its start."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from pathlib import Path
from random import Random

from prometheus_client import CollectorRegistry, generate_latest

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.directory import MetadataDirectory
from kura_shaper.broker.metrics import BrokerMetrics
from kura_shaper.broker.service import Broker
from kura_shaper.broker.settings import load_settings
from kura_shaper.tenants.kubernetes.fake import FakeApi, FakeAsyncClock

SETTINGS = Path(__file__).parents[2] / "daemonset" / "event-broker" / "examples" / "minimal.yaml"


class Served:
    """A broker's /metrics. Nothing runs."""

    def __init__(self) -> None:
        self._broker, self._directory = asyncio.run(self._make())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(BrokerMetrics(self._broker, self._directory))

    @staticmethod
    async def _make() -> tuple[Broker, MetadataDirectory]:
        settings = load_settings(SETTINGS, {"POD_NAMESPACE": "gpu"})
        clock, random = FakeAsyncClock(), Random(1)
        api = FakeApi("DynamoWorkerMetadataList")
        directory = MetadataDirectory(api, settings.watch_namespaces, clock=clock, random=random)
        return Broker(settings, Credentials(settings, {}), directory, random=random), directory

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def count(self) -> None:
        """Count one more of everything."""
        for counts in (self._broker.counts, self._directory.counts):
            for field in dataclasses.fields(counts):
                found = getattr(counts, field.name)
                if isinstance(found, int):
                    setattr(counts, field.name, found + 1)
                elif isinstance(found, dict) and all(isinstance(each, int) for each in found.values()):
                    found.update({key: number + 1 for key, number in found.items()})
        for stage in self._broker.counts.stages.values():
            stage.note(0.01)


@functools.cache
def scraped_of_a_broker() -> str:
    """Return what a broker serves that has only just begun."""
    return Served().text()
