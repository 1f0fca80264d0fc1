"""The programs that are measured: a broker, and relays as plain as the language has them. Each is a process of its own.

    relays.py broker|tcp|tls|router|subscriber '{"...": ...}'

A relay connects to a publisher and to a sink as often as it is told, and passes bytes on. Each ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from random import Random
from typing import Any

import zmq

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.router.credentials import ServerCredentials
from kura_shaper.broker.router.dynamo import Event, decode_event
from kura_shaper.broker.router.output import NoOutput
from kura_shaper.broker.router.sequences import Sequences
from kura_shaper.broker.router.service import EventBus
from kura_shaper.broker.router.settings import RouterSettings, Subscription
from kura_shaper.broker.service import Broker
from kura_shaper.broker.settings import BrokerSettings, BusUrl
from kura_shaper.tenants.document import Endpoint

_TRANSPORT_BYTES = 64 * 1024


class EverythingAdvertised:
    """A directory that knows every endpoint: what is measured is the relay, not the metadata."""

    is_current = True

    def is_advertised(self, endpoint: str, dynamo_namespace: str) -> bool:
        """See Advertised."""
        del endpoint, dynamo_namespace
        return True

    async def run(self) -> None:
        """See Directory."""
        await asyncio.Event().wait()

    async def synced(self) -> None:
        """See Directory."""


async def broker(told: dict[str, Any]) -> None:
    """The broker itself, but for its metadata."""
    settings = BrokerSettings(
        bus_url=BusUrl("127.0.0.1", told["sink"]),
        client_id="bench",
        kubernetes_namespace="bench",
        watch_namespaces=("bench",),
        dynamo_namespaces=("bench",),
        token_file=Path(told["token_file"]),
        ca_bundle=Path(told["ca"]),
        allowed_cidrs=(ip_network("127.0.0.0/8"),),
    )
    made = Broker(settings, Credentials(settings), EverythingAdvertised(), random=Random())
    await made.run()


class Half(asyncio.Protocol):
    """One side of a plain relay: what comes is written to the other side, as long as that takes it."""

    def __init__(self) -> None:
        self.other: Half | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=_TRANSPORT_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()


async def relay(told: dict[str, Any], context: ssl.SSLContext | None) -> None:
    """A relay of bytes, to a sink with TLS or without."""
    loop = asyncio.get_running_loop()
    for _ in range(told["streams"]):
        sink, publisher = Half(), Half()
        sink.other, publisher.other = publisher, sink
        name = {"ssl": context, "server_hostname": "localhost"} if context else {}
        await loop.create_connection(lambda sink=sink: sink, "127.0.0.1", told["sink"], **name)  # type: ignore[misc]
        await loop.create_connection(lambda publisher=publisher: publisher, "127.0.0.1", told["publisher"])  # type: ignore[misc]
    await asyncio.Event().wait()


class Counting(NoOutput):
    """Counts what it is given."""

    def put(self, event: Event, *, endpoint: str, missed: int) -> bool:
        """See EventOutput."""
        READ.append(event.sequence)
        return super().put(event, endpoint=endpoint, missed=missed)


# The numbers of the events that a reader has read.
READ: list[int] = []


async def router(told: dict[str, Any]) -> None:
    """The reference router, which counts the events of one publisher."""
    scratch = Path(told["scratch"])
    settings = RouterSettings(
        listen=Endpoint("127.0.0.1", told["sink"]),
        certificate=scratch / "tls.crt",
        private_key=scratch / "tls.key",
        token_file=Path(told["token_file"]),
        subscriptions=(Subscription(f"tcp://127.0.0.1:{told['publisher']}", "bench", ("kv-events",)),),
    )
    credentials = ServerCredentials(settings)
    credentials.load()
    await EventBus(settings, credentials, output=Counting(), random=Random()).run()


async def subscriber(told: dict[str, Any]) -> None:
    """A subscriber of libzmq that reads the same."""
    await asyncio.get_running_loop().run_in_executor(None, subscribe, told["publisher"])


def subscribe(port: int) -> None:
    """Read events for ever, and note what is missing."""
    with zmq.Context() as context, context.socket(zmq.SUB) as made:
        made.setsockopt(zmq.RCVHWM, 100_000)
        made.subscribe(b"kv-events")
        made.connect(f"tcp://127.0.0.1:{port}")
        sequences = Sequences()
        while True:
            event = decode_event(made.recv_multipart())
            sequences.note(event.publisher_id, event.topic, event.sequence)
            READ.append(event.sequence)


PROGRAMS = {"broker": broker, "router": router, "subscriber": subscriber}


async def run(kind: str, told: dict[str, Any]) -> None:
    """Run one of them until the standard input ends."""
    context = None
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(told["ca"])
    work = asyncio.ensure_future(PROGRAMS[kind](told) if kind in PROGRAMS else relay(told, context))
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
    print(len(READ), flush=True)
    os._exit(0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(run(sys.argv[1], json.loads(sys.argv[2])))
