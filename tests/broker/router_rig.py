"""The reference router with real brokers, and publishers of ZeroMQ that number their events as Dynamo's do."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import zmq
from bus_rig import NAMESPACE, TOKEN, FakeDirectory, authority, settings, until

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.resolve import Resolver
from kura_shaper.broker.router.credentials import ServerCredentials
from kura_shaper.broker.router.dynamo import Event, encode_event
from kura_shaper.broker.router.service import EventBus
from kura_shaper.broker.router.settings import RouterSettings, Subscription
from kura_shaper.broker.service import Broker
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kura_shaper.broker.router.sequences import Arrival

ANY_PORT = Endpoint("127.0.0.1", 0)
TOPIC = "kv-events"


@dataclass(slots=True)
class Kept:
    """An output that keeps everything; `most` of it, if a test says so."""

    found: list[tuple[Event, str, int]] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    most: int = 1_000_000

    def put(self, event: Event, *, endpoint: str, arrival: Arrival, missed: int) -> bool:
        """See EventOutput."""
        if len(self.found) >= self.most:
            return False
        self.found.append((event, endpoint, missed))
        self.arrivals.append(arrival)
        return True

    def close(self) -> None:
        """See EventOutput."""

    def numbers(self, topic: str = TOPIC) -> list[int]:
        """Return the numbers of the events of a topic, in the order in which they came."""
        return [event.sequence for event, _, _ in self.found if event.topic == topic]

    @property
    def missed(self) -> int:
        """How many were said to be missing."""
        return sum(missed for _, _, missed in self.found)


class ZmqPublisher:
    """A PUB socket of libzmq, as a worker of Dynamo has it."""

    def __init__(self, publisher_id: int = 42, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        if port is not None:
            self._socket.bind(f"tcp://{host}:{port}")
        self.port = port or self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{self.port}"
        self.publisher_id, self.next = publisher_id, 0
        self.subscribes = self.unsubscribes = 0

    def publish(self, topic: str = TOPIC, payload: bytes = b"\x81\xa1k\x01") -> int:
        """Publish the next event and return its number."""
        number, self.next = self.next, self.next + 1
        self._socket.send_multipart(encode_event(Event(topic, self.publisher_id, number, 1_700_000_000_000, payload)))
        return number

    def send(self, *parts: bytes) -> None:
        """Send any message."""
        self._socket.send_multipart(parts)

    async def subscribed(self, subscribes: int = 1, *, unsubscribes: int = 0) -> None:
        """Return when so many subscriptions came, and went, since the beginning."""

        def are_there() -> bool:
            while self._socket.poll(0):
                came = self._socket.recv()[:1] == b"\x01"
                self.subscribes += came
                self.unsubscribes += not came
            return self.subscribes >= subscribes and self.unsubscribes >= unsubscribes

        await until(are_there)

    def close(self) -> None:
        """Close it at once."""
        self._socket.close(0)
        self._context.term()


class Publishing:
    """Publishes all the time, on every publisher."""

    def __init__(self, *publishers: ZmqPublisher) -> None:
        self._publishers = publishers
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            for each in self._publishers:
                each.publish()
            await asyncio.sleep(0.001)

    async def __aenter__(self) -> Publishing:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


@dataclass(slots=True)
class RouterRig:
    """A router, its brokers and its publishers."""

    bus: EventBus
    output: Kept
    directory: FakeDirectory
    scratch: Path
    running: asyncio.Task[None]
    brokers: dict[str, tuple[Broker, asyncio.Task[None]]] = field(default_factory=dict)

    async def start_broker(self, client_id: str = "gpu-a-1", *, port: int = 0, **changes: Any) -> Broker:
        """Start a broker, and return it when it is welcomed."""
        told = settings(port or self.bus.port, self.scratch, client_id=client_id, **changes)
        broker = Broker(told, Credentials(told), self.directory, random=Random(5), resolver=Resolver())
        before = self.bus.by_client.get(client_id)
        self.brokers[client_id] = broker, asyncio.ensure_future(broker.run())
        await until(lambda: client_id in self.bus.by_client and self.bus.by_client[client_id] is not before)
        return broker

    async def kill_broker(self, client_id: str) -> None:
        """End a broker without a word, as a process that is killed ends."""
        broker, task = self.brokers.pop(client_id)
        session = broker.view.session
        assert session
        assert session.link._transport
        session.link._transport.abort()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def read(self) -> None:
        """Return when every feed is read."""
        await until(lambda: all(feed.is_read and feed.next is None for feed in self.bus.feeds))

    async def hear(self, publisher: ZmqPublisher) -> None:
        """Return when events of a publisher arrive, which heeds a subscription after a moment."""
        before = len(self.output.found)

        def arrives() -> bool:
            publisher.publish()
            return len(self.output.found) > before

        await until(arrives)


@asynccontextmanager
async def routing(
    *publishers: ZmqPublisher, topics: tuple[str, ...] = (TOPIC,), **changes: Any
) -> AsyncIterator[RouterRig]:
    """Run a router that reads publishers until the test is over; nothing is left then."""
    wanted = tuple(Subscription(each.endpoint, NAMESPACE, topics) for each in publishers)
    directory = FakeDirectory()
    for each in publishers:
        directory.advertise(each.endpoint)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        told = bus_settings(scratch, subscriptions=changes.pop("subscriptions", wanted), **changes)
        credentials = ServerCredentials(told)
        credentials.load()
        output = Kept()
        bus = EventBus(told, credentials, output=output, random=Random(7))
        started = asyncio.Event()
        rig = RouterRig(bus, output, directory, scratch, asyncio.ensure_future(bus.run(started)))
        try:
            await asyncio.wait(
                [rig.running, asyncio.ensure_future(started.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if rig.running.done():
                rig.running.result()
            yield rig
        finally:
            tasks = [rig.running, *(task for _, task in rig.brokers.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in publishers:
                each.close()


@asynccontextmanager
async def one_reading(**changes: Any) -> AsyncIterator[tuple[RouterRig, Broker, ZmqPublisher]]:
    """Run a router whose broker `a` reads one publisher, which has heard of it."""
    publisher = ZmqPublisher()
    async with routing(publisher, **changes) as rig:
        broker = await rig.start_broker("a")
        await rig.read()
        await publisher.subscribed()
        yield rig, broker, publisher


def bus_settings(scratch: Path, **changes: Any) -> RouterSettings:
    """Return settings of a router on the loopback, with its files in a directory."""
    certificate, key, tokens = scratch / "tls.crt", scratch / "tls.key", scratch / "tokens"
    issued = authority().issue_cert("127.0.0.1", "localhost")
    certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    tokens.write_text(f"other-token\n{TOKEN}\n")
    told: dict[str, Any] = {
        "listen": ANY_PORT,
        "certificate": certificate,
        "private_key": key,
        "token_file": tokens,
        "metrics_listen": ANY_PORT,
    }
    return RouterSettings(**(told | changes))
