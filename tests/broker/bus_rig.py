"""A broker with a real TLS and HTTP/2 router, real TCP publishers, and time that a test moves.

The router is in the test's own process and event loop. It speaks by the router's end of the protocol, does what
a test tells it, and keeps all that it heard. `SteppedLoop` is an event loop whose clock stands still and
jumps when it is told to, so a deadline of ten seconds is over at once and sockets stay real.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import tempfile
import threading
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ParamSpec

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hyperframe.frame
import trustme

from kura_shaper.broker.credentials import Credentials
from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.codec import encode_object
from kura_shaper.broker.protocol.frames import (
    StreamClosed,
    StreamOpened,
    StreamRefused,
    Welcome,
    WelcomeLimits,
    ZmqEndpoint,
)
from kura_shaper.broker.protocol.goaway import encode_goaway
from kura_shaper.broker.protocol.limits import MEDIA_TYPE, SECOND_NS, SESSION_PATH, STREAMS_PATH
from kura_shaper.broker.protocol.router_session import Claim, RouterSession
from kura_shaper.broker.resolve import Resolver
from kura_shaper.broker.service import Broker, OnTerminal, time_slept_s
from kura_shaper.broker.settings import BrokerSettings, BusUrl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

P = ParamSpec("P")

LIMIT_S = 90
TOKEN = "tok-5f0a3c-secret"
NAMESPACE = "dynamo"
# The most that a test router may be ahead, and what a broker may send it, unless a test says otherwise.
WIDE = 16 << 20


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still but for what a test moves it, however slow the machine is."""

    ahead_s = 0.0

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        super().__init__()

    def time(self) -> float:
        """See asyncio."""
        return self._began_s + self.ahead_s

    async def advance(self, seconds: float, *, step_s: float = 0.25) -> None:
        """Move on in steps, with everything that is due done before, in between and after."""
        await self._settle()
        while seconds > 0:
            self.ahead_s += min(step_s, seconds)
            seconds -= step_s
            await self._settle()

    async def _settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        await pause()


def loop() -> SteppedLoop:
    """Return the loop that a test runs in."""
    found = asyncio.get_running_loop()
    assert isinstance(found, SteppedLoop)
    return found


class FlowingLoop(SteppedLoop):
    """One whose time runs as always, and jumps when a test moves it: what other threads and processes do takes time."""

    def time(self) -> float:
        """See asyncio."""
        return time.monotonic() + self.ahead_s


def in_a_loop(
    test: Callable[P, Coroutine[Any, Any, None]], *, loop_factory: Callable[[], SteppedLoop] = SteppedLoop
) -> Callable[P, None]:
    """Run a test that is a coroutine, and fail it when it waits for what never comes, in real time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        expired = threading.Event()

        async def bounded() -> None:
            work = asyncio.ensure_future(test(*args, **kwargs))
            # In real time, which a thread has, whatever the loop's own clock says.
            alarm = asyncio.ensure_future(asyncio.to_thread(expired.wait, LIMIT_S))
            either: list[asyncio.Future[Any]] = [work, alarm]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            was_done = work.done()
            expired.set()
            work.cancel()
            await asyncio.gather(work, alarm, return_exceptions=True)
            assert was_done, f"waits for what does not come within {LIMIT_S} s"
            work.result()

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(bounded())

    return run


def in_flowing_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test whose other end lives in real time, as libzmq's threads and processes do."""
    return in_a_loop(test, loop_factory=FlowingLoop)


async def pause() -> None:
    """Let everything else go on, and a little real time pass, for what is on its way through the kernel."""
    await asyncio.sleep(0)
    time.sleep(0.0003)


async def until(what: Callable[[], bool]) -> None:
    """Return when something holds."""
    while not what():
        await pause()


@functools.cache
def authority() -> trustme.CA:
    """Return an authority that the broker trusts."""
    return trustme.CA()


@functools.cache
def server_context() -> ssl.SSLContext:
    """Return what the router serves with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("127.0.0.1", "localhost").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


@dataclass(slots=True)
class DataStream:
    """A data stream as the router has it."""

    stream_id: str
    http_id: int
    headers: dict[str, str]
    received: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None
    # Bytes to send that the windows did not let through yet.
    waiting: bytearray = field(default_factory=bytearray)
    sent: int = 0
    # What was received and not granted again.
    owed: int = 0


@dataclass(slots=True)
class Script:
    """What the router does by itself; a test changes it before or while it runs."""

    welcome: Welcome | None = field(
        default_factory=lambda: Welcome(
            session_id="s-01",
            limits=WelcomeLimits(4_096, 1 << 20),
            heartbeat_interval_ms=10_000,
            idle_timeout_ms=30_000,
        )
    )
    session_status: int = 200
    session_body: bytes = b""
    session_headers: tuple[tuple[str, str], ...] = ()
    content_type: str = MEDIA_TYPE
    answers_streams: bool = True
    stream_status: int | None = None
    stream_body: bytes = b""
    grants: bool = True
    stream_window: int = WIDE
    connection_window: int = WIDE
    max_frame_size: int = 65_536
    max_concurrent: int = 10_000
    beats: bool = True
    # The token that is let in, where not every one is, and what a stream with another is answered.
    token: str = ""
    login_status: int = 401
    session_window: int = WIDE


class Peer(asyncio.Protocol):
    """One connection of a broker."""

    def __init__(self, router: RouterRig) -> None:
        self.router, self.script = router, router.script
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8", validate_inbound_headers=False)
        )
        self.session = RouterSession(now_ns=lambda: int(loop().time() * SECOND_NS), random=Random(3))
        self.session_headers: dict[str, str] = {}
        self.never_indexed: set[str] = set()
        self.told: list[Any] = []
        self.streams: dict[str, DataStream] = {}
        self.by_http: dict[int, DataStream] = {}
        self.requests: list[str] = []
        self.session_http_id = 0
        self.raw = bytearray()
        self.lost = False
        self.session_ended = False
        self._session_out = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        script = self.script
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: script.max_concurrent,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: script.stream_window,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: script.max_frame_size,
            },
        )
        # The library takes its own first settings for acknowledged only when it made them.
        self._h2.max_inbound_frame_size = script.max_frame_size
        self._h2.initiate_connection()
        if script.connection_window > 65_535:
            self._h2.increment_flow_control_window(script.connection_window - 65_535)
        self.flush()
        self.router.peers.append(self)

    def data_received(self, data: bytes) -> None:
        self.raw += data[: max(0, 20_000 - len(self.raw))]
        for event in self._h2.receive_data(data):
            self._take(event)
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self._timer:
            self._timer.cancel()

    # What a test makes it do.

    def subscribe(self, endpoint: str, *, stream_id: str | None = None, **options: Any) -> str:
        """Ask for a publisher."""
        made = self.session.subscribe(ZmqEndpoint(endpoint, NAMESPACE), stream_id=stream_id, **options)
        self.flush()
        return made

    def unsubscribe(self, stream_id: str) -> None:
        """End a stream in silence."""
        self.session.unsubscribe(stream_id)
        self.flush()

    def unsubscribe_and_send(self, stream_id: str, data: bytes) -> None:
        """End a stream in silence, and send on it what comes with the same bytes."""
        self.session.unsubscribe(stream_id)
        self._h2.send_data(self.session_http_id, self.session.data_to_send())
        self.send(stream_id, data)

    def say_object(self, value: dict[str, Any]) -> None:
        """Say anything on the session's stream."""
        self.say_bytes(encode_object(value))

    def say_bytes(self, data: bytes) -> None:
        """Say any bytes on the session's stream."""
        self._session_out += data
        self.flush()

    def send(self, stream_id: str, data: bytes) -> None:
        """Send on a data stream as far as windows let it, the rest later."""
        self.streams[stream_id].waiting += data
        self._pump()
        self.flush()

    def end(self, stream_id: str) -> None:
        """End a data stream's answer."""
        self.streams[stream_id].waiting.clear()
        self._h2.end_stream(self.streams[stream_id].http_id)
        self.session.forget(stream_id)
        self.flush()

    def reset(self, stream_id: str) -> None:
        """Reset a data stream."""
        self.streams[stream_id].waiting.clear()
        self._h2.reset_stream(self.streams[stream_id].http_id, h2.errors.ErrorCodes.CANCEL)
        self.session.forget(stream_id)
        self.flush()

    def answer(self, stream_id: str, status: int = 200, *, body: bytes = b"") -> None:
        """Answer the request of a data stream that was not answered by itself."""
        self._answer(self.streams[stream_id], status, body)
        self.flush()

    def grant(self, size: int, stream_id: str | None = None) -> None:
        """Let the broker send so much more, on a stream or on the connection."""
        self._h2.increment_flow_control_window(size, self.streams[stream_id].http_id if stream_id else None)
        self.flush()

    def grant_owed(self, stream_id: str) -> None:
        """Give a stream back what it sent."""
        stream = self.streams[stream_id]
        if stream.owed:
            self._h2.acknowledge_received_data(stream.owed, stream.http_id)
            stream.owed = 0
        self.flush()

    def change_settings(self, **values: int) -> None:
        """Say other settings of HTTP/2."""
        self._h2.update_settings({h2.settings.SettingCodes[key.upper()]: value for key, value in values.items()})
        self.flush()

    def go_away(self, *, last: int = 2**31 - 1, code: int = 0) -> None:
        """Send a GOAWAY by hand: the library would end everything with it."""
        self.flush()
        assert self._transport
        self._transport.write(encode_goaway(last, code))

    def ping(self, count: int) -> None:
        """Ask for so many answers, by hand: the library would keep account of each."""
        assert self._transport
        self._transport.write((b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)) * count)

    def stall(self) -> None:
        """Read nothing more."""
        assert self._transport
        self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        assert self._transport
        self._transport.resume_reading()

    def write_raw(self, data: bytes) -> None:
        """Write any bytes in place of HTTP/2."""
        self.flush()
        assert self._transport
        self._transport.write(data)

    def abort(self) -> None:
        """Break the connection."""
        assert self._transport
        self._transport.abort()

    def frames(self, kind: type) -> list[Any]:
        """Return what was told of one kind."""
        return [each for each in self.told if isinstance(each, kind)]

    async def outcome(self, stream_id: str) -> Any:
        """Return what a subscribe came to: StreamOpened or StreamRefused."""
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = [
                each
                for each in self.told
                if isinstance(each, StreamOpened | StreamRefused) and each.stream_id == stream_id
            ]
            return bool(found)

        await until(is_there)
        return found[-1]

    async def refusal(self, endpoint: str, **options: Any) -> str:
        """Return the code that a subscribe is refused with."""
        told = await self.outcome(self.subscribe(endpoint, **options))
        assert isinstance(told, StreamRefused), told
        return told.code

    async def closed(self, stream_id: str) -> StreamClosed:
        """Return how a stream was closed."""
        await until(lambda: any(each.stream_id == stream_id for each in self.frames(StreamClosed)))
        found: StreamClosed = next(each for each in self.frames(StreamClosed) if each.stream_id == stream_id)
        return found

    async def opened(self, endpoint: str, **options: Any) -> str:
        """Return the id of a stream that was opened."""
        stream_id = self.subscribe(endpoint, **options)
        told = await self.outcome(stream_id)
        assert isinstance(told, StreamOpened), told
        return stream_id

    # What it does by itself.

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._request(event)
            case h2.events.DataReceived(stream_id=http_id) if http_id == self.session_http_id:
                if self.script.session_window:
                    self._h2.acknowledge_received_data(event.flow_controlled_length or 0, http_id)
                self._session(self.session.receive(event.data or b""))
            case h2.events.DataReceived(stream_id=http_id) if http_id in self.by_http:
                stream = self.by_http[http_id]
                stream.received += event.data or b""
                if self.script.grants:
                    self._h2.acknowledge_received_data(event.flow_controlled_length or 0, http_id)
                else:
                    stream.owed += event.flow_controlled_length or 0
            case h2.events.StreamEnded(stream_id=http_id) if http_id == self.session_http_id:
                self.session_ended = True
            case h2.events.StreamEnded(stream_id=http_id) if http_id in self.by_http:
                self.by_http[http_id].ended = True
                with suppress(h2.exceptions.ProtocolError):
                    if self.script.answers_streams:
                        self._h2.end_stream(http_id)
            case h2.events.StreamReset(stream_id=http_id) if http_id in self.by_http:
                self.by_http[http_id].reset = int(event.error_code or 0)
                self.by_http[http_id].waiting.clear()
            case h2.events.WindowUpdated():
                self._pump()

    def _request(self, event: h2.events.RequestReceived) -> None:
        headers = {str(name): str(value) for name, value in event.headers or []}
        self.never_indexed |= {str(each[0]) for each in event.headers or [] if not getattr(each, "indexable", True)}
        path, http_id = headers[":path"], event.stream_id or 0
        self.requests.append(path)
        if path.endswith(SESSION_PATH):
            self._begin_session(http_id, headers)
            return
        stream_id = path.rpartition(STREAMS_PATH)[2]
        stream = DataStream(stream_id, http_id, headers)
        self.streams[stream_id] = self.by_http[http_id] = stream
        if self.script.token and headers["authorization"] != f"Bearer {self.script.token}":
            self._answer(stream, self.script.login_status, b"")
            return
        if self.script.answers_streams:
            claim = self.session.claim(stream_id)
            status = self.script.stream_status or claim.value
            with suppress(h2.exceptions.ProtocolError):  # reset in the same read
                self._answer(stream, status, self.script.stream_body)

    def _answer(self, stream: DataStream, status: int, body: bytes) -> None:
        if status == 200 and not self.script.answers_streams:
            assert self.session.claim(stream.stream_id) is Claim.ACCEPTED
        head = [(":status", str(status)), ("content-type", "application/octet-stream")]
        self._h2.send_headers(stream.http_id, head, end_stream=status != 200 and not body)
        if status != 200 and body:
            self._h2.send_data(stream.http_id, body, end_stream=True)

    def _begin_session(self, http_id: int, headers: dict[str, str]) -> None:
        self.session_http_id, self.session_headers = http_id, headers
        if self.script.session_window:
            self._h2.increment_flow_control_window(self.script.session_window, http_id)
        script = self.script
        if script.session_status == 0:
            return
        head = [(":status", str(script.session_status)), ("content-type", script.content_type), *script.session_headers]
        self._h2.send_headers(http_id, head, end_stream=script.session_status != 200 and not script.session_body)
        if script.session_body:
            self._h2.send_data(http_id, script.session_body, end_stream=True)

    def _session(self, told: tuple[events.Event, ...]) -> None:
        for event in told:
            self.told.append(event)
            if isinstance(event, events.Greeted) and self.script.welcome and self.script.session_status == 200:
                self.session.welcome(self.script.welcome)
                self._plan()

    def _plan(self) -> None:
        if self.script.beats and self.session.next_due_ns is not None and not self.lost:
            self._timer = loop().call_at(self.session.next_due_ns / SECOND_NS, self._tick)

    def _tick(self) -> None:
        if not self.lost and self.script.beats:
            self._session(self.session.tick())
            self.flush()
            self._plan()

    def _pump(self) -> None:
        for stream in self.by_http.values():
            while stream.waiting and stream.reset is None:
                try:
                    room = min(self._h2.local_flow_control_window(stream.http_id), self._h2.max_outbound_frame_size)
                except h2.exceptions.StreamClosedError:
                    break
                if room <= 0:
                    break
                part = bytes(stream.waiting[:room])
                try:
                    self._h2.send_data(stream.http_id, part)
                except h2.exceptions.StreamClosedError:  # nobody was told of its end yet
                    stream.waiting.clear()
                    break
                del stream.waiting[:room]
                stream.sent += len(part)

    def flush(self) -> None:
        """Send everything."""
        if self._transport is None or self.lost:
            return
        self._session_out += self.session.data_to_send()
        while self._session_out and self.session_http_id:
            room = min(self._h2.local_flow_control_window(self.session_http_id), self._h2.max_outbound_frame_size)
            if room <= 0:
                break
            self._h2.send_data(self.session_http_id, bytes(self._session_out[:room]))
            del self._session_out[:room]
        if data := self._h2.data_to_send():
            self._transport.write(data)


class RouterRig:
    """A router that listens on the loopback."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.peers: list[Peer] = []
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self, *, host: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None) -> None:
        """Listen."""
        self._server = await loop().create_server(
            lambda: Peer(self), host, port, ssl=context or server_context(), ssl_shutdown_timeout=1
        )

    async def stop(self) -> None:
        """Close everything."""
        assert self._server
        self._server.close()
        for peer in self.peers:
            if not peer.lost:
                peer.abort()
        await until(lambda: all(peer.lost for peer in self.peers))

    async def peer(self, number: int = 1) -> Peer:
        """Return a connection that is there, the first by default, when its session is welcomed or refused."""
        await until(lambda: len(self.peers) >= number and bool(self.peers[number - 1].told))
        return self.peers[number - 1]


class FakeDirectory:
    """Advertises what a test says."""

    def __init__(self) -> None:
        self.known: set[tuple[str, str]] = set()
        self.is_synced = asyncio.Event()
        self.is_synced.set()
        self.is_current = True

    def advertise(self, endpoint: str, namespace: str = NAMESPACE) -> None:
        """Advertise an endpoint."""
        self.known.add((endpoint, namespace))

    def withdraw(self, endpoint: str, namespace: str = NAMESPACE) -> None:
        """Advertise an endpoint no more."""
        self.known.discard((endpoint, namespace))

    def is_advertised(self, endpoint: str, dynamo_namespace: str) -> bool:
        """See Advertised."""
        return self.is_synced.is_set() and (endpoint, dynamo_namespace) in self.known

    async def run(self) -> None:
        """See Directory."""
        await asyncio.Event().wait()

    async def synced(self) -> None:
        """See Directory."""
        await self.is_synced.wait()


class Publisher:
    """A TCP server that does what a test says with whoever connects."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.accepted = 0
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        """How it is advertised."""
        assert self._server
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self, *, port: int = 0) -> None:
        """Listen."""
        self._server = await loop().create_server(lambda: Connection(self), "127.0.0.1", port)

    async def stop(self) -> None:
        """Close everything."""
        assert self._server
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()

    async def connection(self, number: int = 1) -> Connection:
        """Return a connection that is there, the first by default."""
        await until(lambda: len(self.connections) >= number)
        return self.connections[number - 1]


class Connection(asyncio.Protocol):
    """One connection of the broker to a publisher."""

    transport: asyncio.Transport

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.received = bytearray()
        self.lost = False
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._publisher.connections.append(self)
        self._publisher.accepted += 1

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def send(self, data: bytes) -> None:
        """Send, as fast as the broker reads."""
        for at in range(0, len(data), 1 << 18):
            if self.lost:
                return
            self.transport.write(data[at : at + (1 << 18)])
            await self._may_write.wait()


@dataclass(slots=True)
class Rig:
    """A broker, its router and its publishers."""

    router: RouterRig
    directory: FakeDirectory
    broker: Broker
    running: asyncio.Task[None]
    publishers: list[Publisher] = field(default_factory=list)

    async def publisher(self) -> Publisher:
        """Return a publisher that is advertised."""
        made = Publisher()
        await made.start()
        self.publishers.append(made)
        self.directory.advertise(made.endpoint)
        return made

    async def established(self) -> Peer:
        """Return the connection whose session is under way at both ends."""
        peer = await self.router.peer()
        await until(lambda: self.broker.view.session is not None and self.broker.view.session.is_established)
        return peer

    async def again(self, number: int = 2) -> Peer:
        """Return the next connection: the wait before it is skipped once it has begun."""
        await until(lambda: sum(self.broker.counts.reconnects.values()) >= number - 1)
        await loop().advance(self.broker.counts.reconnect_wait_s + 0.01)
        return await self.router.peer(number)

    async def stream(self) -> tuple[Peer, Publisher, Connection, str]:
        """Return a stream that is open, with both of its ends."""
        peer, publisher = await self.router.peer(), await self.publisher()
        stream_id = await peer.opened(publisher.endpoint)
        return peer, publisher, await publisher.connection(), stream_id


def settings(port: int, directory: Path, **changes: Any) -> BrokerSettings:
    """Return settings of a broker for a router on the loopback."""
    import ipaddress

    token, ca = directory / "token", directory / "ca.pem"
    if not token.exists():
        token.write_text(f"{TOKEN}\n")
    if not ca.exists():
        ca.write_bytes(authority().cert_pem.bytes())
    told: dict[str, Any] = {
        "bus_url": BusUrl("127.0.0.1", port),
        "client_id": "gpu-a-1",
        "kubernetes_namespace": "gpu",
        "watch_namespaces": ("gpu",),
        "dynamo_namespaces": (NAMESPACE,),
        "token_file": token,
        "ca_bundle": ca,
        "allowed_cidrs": (ipaddress.ip_network("127.0.0.0/8"),),
    }
    return BrokerSettings(**(told | changes))


@asynccontextmanager
async def running(
    script: Script | None = None,
    *,
    lookup: Callable[..., list[Any]] = socket.getaddrinfo,
    context: ssl.SSLContext | None = None,
    on_terminal: OnTerminal = OnTerminal.STAY_AWAY,
    start_within_s: float = 0.0,
    slept_s: Callable[[], float] = time_slept_s,
    through: Callable[[int], AbstractAsyncContextManager[int]] = nullcontext,
    **changes: Any,
) -> AsyncIterator[Rig]:
    """Run a broker with a router until the test is over; nothing is left then. Between both is what `through` makes."""
    router = RouterRig(script)
    faults: list[Any] = []
    loop().set_exception_handler(lambda _, context: faults.append(context))
    await router.start(context=context)
    with tempfile.TemporaryDirectory() as name:
        async with through(router.port) as port:
            told = settings(port, Path(name), **changes)
            directory = FakeDirectory()
            broker = Broker(
                told,
                Credentials(told),
                directory,
                random=Random(5),
                resolver=Resolver(lookup),
                on_terminal=on_terminal,
                start_within_s=start_within_s,
                slept_s=slept_s,
            )
            rig = Rig(router, directory, broker, asyncio.ensure_future(broker.run()))
            try:
                yield rig
            finally:
                rig.running.cancel()
                await asyncio.gather(rig.running, return_exceptions=True)
                for publisher in rig.publishers:
                    await publisher.stop()
                await router.stop()
                assert [str(each) for each in faults] == []


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Census:
    """What a broker holds, to be the same after something as before."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.before = self.now()

    def now(self) -> tuple[int, ...]:
        session = self._rig.broker.view.session
        assert session is not None
        h2 = session.link.http._h2
        return (
            len(asyncio.all_tasks()),
            descriptors(),
            session.budget.used_bytes,
            len(session.relays),
            session.protocol.stream_count,
            h2.open_outbound_streams,
            len(session.link.http._exchanges),
            len(session.link.http._waiting),
            len(session.link.outbox._ready),
        )

    async def is_as_before(self) -> None:
        """Return when all is as it was; the test's limit ends it otherwise."""
        await until(lambda: self.now() == self.before)


# As in the broker: nobody reads the trace.
hyperframe.frame.DataFrame.__repr__ = object.__repr__  # type: ignore[method-assign]
