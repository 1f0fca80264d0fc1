"""A client of the bus by hand: HTTP/2 as it is told, for what no broker would do."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
from bus_rig import NAMESPACE, TOKEN, authority, until

from kura_shaper.broker.protocol.codec import FrameDecoder, UnknownFrame, encode
from kura_shaper.broker.protocol.frames import Frame, Hello, Software, StreamOpened, Subscribe, Welcome
from kura_shaper.broker.protocol.limits import MEDIA_TYPE, Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router_rig import RouterRig

HELLO = Hello(
    client_id="raw",
    instance_id="0" * 32,
    kubernetes_namespace="gpu",
    dynamo_namespaces=(NAMESPACE,),
    limits=Limits(),
    software=Software("test", "0"),
)


class RawClient:
    """A client of HTTP/2 that does what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.answers: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.is_closed = False
        # The error code of the router's GOAWAY.
        self.goaway: int | None = None
        self._decoder = FrameDecoder()
        self.frames: list[Frame | UnknownFrame] = []
        self.session_http_id = 0
        self._task = asyncio.ensure_future(self._read())
        self.flush()

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(65_536):
                for event in self.h2.receive_data(data):
                    self._take(event)
                self.flush()
        except (OSError, h2.exceptions.ProtocolError):
            pass
        self.is_closed = True

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived(stream_id=http_id):
                self.answers[http_id or 0] = {str(name): str(value) for name, value in event.headers or ()}
            case h2.events.DataReceived(stream_id=http_id):
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, http_id or 0)
                self.bodies[http_id or 0] = self.bodies.get(http_id or 0, b"") + (event.data or b"")
                if http_id == self.session_http_id:
                    self._decoder.feed(event.data or b"")
                    while (frame := self._decoder.next_frame()) is not None:
                        self.frames.append(frame)
            case h2.events.StreamEnded(stream_id=http_id) | h2.events.StreamReset(stream_id=http_id):
                self.ended.add(http_id or 0)
            case h2.events.ConnectionTerminated(error_code=code):
                self.goaway = code
                self.is_closed = True

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def request(self, path: str = "/bus/v1/session", **headers: str) -> int:
        """Send a request's head and return its id."""
        told = {
            ":method": "POST",
            ":scheme": "https",
            ":authority": "localhost",
            ":path": path,
            "authorization": f"Bearer {TOKEN}",
            "content-type": MEDIA_TYPE,
        }
        told |= {name.replace("_", "-"): value for name, value in headers.items()}
        http_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(http_id, [(name, value) for name, value in told.items() if value])
        self.flush()
        return http_id

    def send(self, http_id: int, data: bytes, *, end: bool = False) -> None:
        self.h2.send_data(http_id, data, end_stream=end)
        self.flush()

    async def status(self, http_id: int) -> int:
        await until(lambda: http_id in self.answers)
        return int(self.answers[http_id][":status"])

    async def session(self, hello: Hello = HELLO) -> Welcome:
        """Have a session."""
        self.session_http_id = self.request()
        self.send(self.session_http_id, encode(hello))
        await until(lambda: bool(self.frames))
        welcome = self.frames[0]
        assert isinstance(welcome, Welcome), welcome
        return welcome

    def objects(self) -> list[dict[str, Any]]:
        """Return what the router said on the session's stream, with all of its fields."""
        data, found = self.bodies.get(self.session_http_id, b""), []
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(json.loads(data[4 : 4 + size]))
            data = data[4 + size :]
        return found

    async def asked(self, number: int = 1) -> list[Subscribe]:
        """Return the subscribes, when there are so many."""

        def found() -> list[Subscribe]:
            return [each for each in self.frames if isinstance(each, Subscribe)]

        await until(lambda: len(found()) >= number)
        return found()

    async def open(self, stream_id: str, session_id: str) -> int:
        """Open the data stream of a subscribe as a broker does, and return its id in HTTP/2."""
        headers = {"x-bus-session": session_id, "content-type": "application/octet-stream"}
        http_id = self.request(f"/bus/v1/streams/{stream_id}", **headers)
        assert await self.status(http_id) == 200
        self.send(self.session_http_id, encode(StreamOpened(stream_id)))
        return http_id

    async def frame(self, kind: type) -> Frame | UnknownFrame:
        await until(lambda: any(isinstance(each, kind) for each in self.frames))
        return next(each for each in self.frames if isinstance(each, kind))

    async def close(self) -> None:
        self.writer.transport.abort()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def client(rig: RouterRig, *, alpn: tuple[str, ...] = ("h2",)) -> AsyncIterator[RawClient]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority().configure_trust(context)
    context.set_alpn_protocols(list(alpn))
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.bus.port, ssl=context, server_hostname="localhost")
    made = RawClient(reader, writer)
    try:
        yield made
    finally:
        await made.close()
