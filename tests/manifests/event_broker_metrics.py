"""What an event broker serves: all of its series are there from its start."""

from __future__ import annotations

import asyncio
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


@functools.cache
def scraped_of_a_broker() -> str:
    """Return a broker's /metrics."""

    async def serve() -> str:
        settings = load_settings(SETTINGS, {"POD_NAMESPACE": "gpu"})
        clock, random = FakeAsyncClock(), Random(1)
        api = FakeApi("DynamoWorkerMetadataList")
        directory = MetadataDirectory(api, settings.watch_namespaces, clock=clock, random=random)
        broker = Broker(settings, Credentials(settings, {}), directory, random=random)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(BrokerMetrics(broker, directory))
        return generate_latest(registry).decode()

    return asyncio.run(serve())
