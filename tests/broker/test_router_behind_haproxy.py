"""An independent HTTP/2 implementation in between: HAProxy ends TLS and HTTP/2 and begins both anew to the router.

It may put the requests of one connection on several, and those of several brokers on one.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from bus_rig import NAMESPACE, Publisher, authority, in_flowing_time, until
from router_rig import ANY_PORT, RouterRig, ZmqPublisher, routing

from kura_shaper.broker.router.settings import Subscription
from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.binary import HaproxyBinary, cache_directory, find_haproxy, read_version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CONFIG = """
global
    maxconn 200
    nbthread 1
    tune.h2.fe.initial-window-size 1048576
    tune.h2.be.initial-window-size 1048576
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout tunnel 60s
    option http-no-delay
    http-reuse {reuse}
frontend bus
    bind fd@{fd} ssl crt {scratch}/proxy.pem alpn h2
    default_backend router
backend router
    server router 127.0.0.1:{port} ssl verify required ca-file {scratch}/ca.pem sni str(localhost) alpn h2
"""


def newer_haproxy() -> HaproxyBinary:
    return read_version(cache_directory() / "haproxy-3.2" / "bin" / "haproxy")


def binaries() -> list[HaproxyBinary]:
    found: dict[tuple[int, int, int], HaproxyBinary] = {}
    for look in (find_haproxy, newer_haproxy):
        with suppress(KuraShaperError, OSError):
            binary = look()
            found[binary.version] = binary
    return list(found.values())


BINARIES = binaries()
each_proxy = pytest.mark.parametrize(
    ("binary", "reuse"),
    [
        pytest.param(binary, reuse, id=f"{'.'.join(map(str, binary.version))}-{reuse}")
        for binary in BINARIES
        for reuse in ("always", "never")
    ]
    or [pytest.param(None, "", marks=pytest.mark.skip(reason="no HAProxy: scripts/setup brings one"))],
)


@asynccontextmanager
async def proxy(binary: HaproxyBinary, reuse: str, rig: RouterRig) -> AsyncIterator[int]:
    """Run a proxy before a router, and yield its port. It inherits its listener, so no port is guessed."""
    issued = authority().issue_cert("127.0.0.1", "localhost")
    (rig.scratch / "proxy.pem").write_bytes(issued.private_key_and_cert_chain_pem.bytes())
    (rig.scratch / "ca.pem").write_bytes(authority().cert_pem.bytes())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.set_inheritable(True)
        fd, port = listener.fileno(), int(listener.getsockname()[1])
        config = rig.scratch / "haproxy.cfg"
        config.write_text(_CONFIG.format(fd=fd, scratch=rig.scratch, port=rig.bus.port, reuse=reuse))
        line = [str(binary.path), "-db", "-q", "-f", str(config)]
        with subprocess.Popen(line, pass_fds=[fd], start_new_session=True) as process:
            try:
                yield port
                assert process.poll() is None, "HAProxy ended"
            finally:
                process.kill()


@pytest.mark.case("ER22")
@each_proxy
def test_events_of_two_brokers_come_through_and_one_takes_over(binary: HaproxyBinary, reuse: str) -> None:
    @in_flowing_time
    async def run() -> None:
        publishers = [ZmqPublisher(number) for number in range(4)]
        async with routing(*publishers) as rig, proxy(binary, reuse, rig) as port:
            await rig.start_broker("a", port=port)
            await rig.start_broker("b", port=port)
            await rig.read()
            for each in publishers:
                await each.subscribed()
                for _ in range(200):
                    each.publish(payload=bytes(1_000))
            await until(lambda: len(rig.output.found) == 800)
            assert rig.output.missed == 0
            assert {len(session.tunnels) for session in rig.bus.by_client.values()} == {2}
            await rig.kill_broker("a")
            await until(lambda: set(rig.bus.by_client) == {"b"})
            await rig.read()
            for each in publishers:
                await each.subscribed(1)
            assert len(rig.bus.by_client["b"].tunnels) == 4

    run()


@pytest.mark.case("ER22")
@each_proxy
def test_a_refusal_keeps_its_code_on_the_way(binary: HaproxyBinary, reuse: str) -> None:
    @in_flowing_time
    async def run() -> None:
        publisher = ZmqPublisher()
        async with routing(publisher) as rig, proxy(binary, reuse, rig) as port:
            await rig.start_broker("a", port=port)
            await rig.read()
            # A subscribe that the router has forgotten when the broker comes with its stream.
            session = rig.bus.by_client["a"]
            tunnel = session.subscribe(rig.bus.feeds[0].target, Nobody())
            session.protocol.forget(tunnel.stream_id)
            broker, _ = rig.brokers["a"]
            await until(lambda: broker.counts.refusals["unknown_stream"] == 1)
            assert sum(broker.counts.refusals.values()) == 1

    run()


class Nobody:
    """A consumer that wants nothing."""

    def on_open(self) -> None:
        pass

    def on_bytes(self, data: bytes, credit_bytes: int) -> None:
        pass

    def on_sent(self) -> None:
        pass

    def on_over(self, end: object) -> None:
        pass


@pytest.mark.case("ER22")
@each_proxy
def test_whole_bytes_and_the_end_of_a_publisher_come_through(binary: HaproxyBinary, reuse: str) -> None:
    @in_flowing_time
    async def run() -> None:
        publisher = Publisher()
        await publisher.start()
        exposed = Subscription(publisher.endpoint, NAMESPACE, expose=ANY_PORT)
        wide = routing(subscriptions=(exposed,), stream_window_bytes=4 << 20)
        async with wide as rig, proxy(binary, reuse, rig) as port:
            rig.directory.advertise(publisher.endpoint)
            await rig.start_broker("a", port=port)
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.ports[0].port)
            connection = await publisher.connection()
            data = bytes(range(256)) * 2_048
            await connection.send(data)
            connection.transport.close()
            assert await reader.read() == data
            writer.close()
        await publisher.stop()

    run()
