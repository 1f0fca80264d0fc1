"""GET over TLS, as much of it as a pod needs to ask its API server: a page, or lines without end.

HTTP/1.1 itself is h11's; every request has a connection of its own. A client that can do everything takes 10 MB, which
is a fifth of what a broker is made of.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import h11

from kura_shaper import __version__
from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Mapping

    from kura_shaper.tenants.kubernetes.login import PodLogin

CONNECT_WITHIN_S = 10
# One object is a line of a watch, and etcd keeps none above 1.5 MB.
LINE_BYTES_MAX = 4 << 20
_HEAD_BYTES_MAX = 64 << 10
_PIECE_BYTES_MAX = 256 << 10
_SHOWN_CHARACTERS = 300


@contextmanager
def unreached(*others: type[Exception]) -> Iterator[None]:
    """Turn everything that a connection may end by into one error."""
    causes: tuple[type[Exception], ...] = (OSError, ValueError, h11.ProtocolError, *others)
    try:
        yield
    except causes as error:
        words = " ".join(str(error).split())[:_SHOWN_CHARACTERS] or type(error).__name__
        raise ApiError(f"the API server can't be reached: {words}") from error


class _Exchange:
    """A request and what comes of it, with the time that it may take: each read, and all of them."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, idle_s: float, until_s: float
    ) -> None:
        self._reader, self._writer, self._idle_s, self._until_s = reader, writer, idle_s, until_s
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)

    def ask(self, request: h11.Request) -> None:
        """Send a request without a body. Raises ProtocolError when a header may not be as it is."""
        for event in (request, h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """Return what comes next. Raises ProtocolError when that is not HTTP, or cut off."""
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            limit_s = min(asyncio.get_running_loop().time() + self._idle_s, self._until_s)
            async with asyncio.timeout_at(limit_s):
                self._http.receive_data(await self._reader.read(_PIECE_BYTES_MAX))

    async def head(self) -> h11.Response:
        """Return the head of the answer."""
        while not isinstance(event := await self.event(), h11.Response):
            # Whatever is no head of an answer is an error of the library; but some come before the real one (1xx).
            continue
        return event

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while isinstance(event := await self.event(), h11.Data):
            yield bytes(event.data)


class Answer:
    """See wire.Answer."""

    def __init__(self, exchange: _Exchange, head: h11.Response) -> None:
        self._exchange, self._head = exchange, head

    @property
    def status(self) -> int:
        """See wire.Answer."""
        return self._head.status_code

    @property
    def retry_after_ns(self) -> int:
        """See wire.Answer."""
        found = dict(self._head.headers).get(b"retry-after", b"")
        return retry_after_ns(found.decode("latin-1"))

    async def body(self) -> bytes:
        """See wire.Answer."""
        with unreached():
            return b"".join([piece async for piece in self._exchange.pieces()])

    async def lines(self) -> AsyncIterator[bytes]:
        """See wire.Answer."""
        waiting = bytearray()
        with unreached():
            async for piece in self._exchange.pieces():
                begin = len(waiting)
                waiting += piece
                while (end := waiting.find(b"\n", begin)) >= 0:
                    line = bytes(waiting[: end + 1])
                    del waiting[: end + 1]
                    begin = 0
                    yield line
                if len(waiting) > LINE_BYTES_MAX:
                    raise ValueError("a line is too long")
            if waiting:
                yield bytes(waiting)


def retry_after_ns(text: str) -> int:
    """Return how long a server asks to be left alone; a date, and more than 99 s, is not heeded."""
    return int(text) * 1_000_000_000 if text.isascii() and text.isdecimal() and len(text) <= 2 else 0


@asynccontextmanager
async def get(
    login: PodLogin,
    path: str,
    query: Mapping[str, str],
    *,
    context: ssl.SSLContext,
    idle_s: float,
    total_s: float | None,
) -> AsyncIterator[Answer]:
    """Ask, and yield the answer when its head is there. Raises ApiError; so does what is done with the answer."""
    now_s = asyncio.get_running_loop().time()
    until_s = math.inf if total_s is None else now_s + total_s
    writer: asyncio.StreamWriter | None = None
    try:
        with unreached():
            url = urlsplit(login.host)
            async with asyncio.timeout_at(min(now_s + CONNECT_WITHIN_S, until_s)):
                reader, writer = await asyncio.open_connection(
                    url.hostname, url.port, ssl=context, limit=_PIECE_BYTES_MAX
                )
            exchange = _Exchange(reader, writer, idle_s=idle_s, until_s=until_s)
            exchange.ask(_request(url.netloc, path, query, authorization=await login.authorization()))
            answer = Answer(exchange, await exchange.head())
        yield answer
    finally:
        if writer is not None:
            # A server that is not listened to any more is owed nothing, and to say goodbye would take time.
            writer.transport.abort()


def _request(authority: str, path: str, query: Mapping[str, str], *, authorization: str) -> h11.Request:
    headers = [
        ("Host", authority),
        ("User-Agent", f"kura-shaper/{__version__}"),
        ("Accept", "application/json"),
        ("Authorization", authorization),
        ("Connection", "close"),
    ]
    try:
        return h11.Request(method="GET", target=f"{path}?{urlencode(query)}", headers=headers)
    except (h11.LocalProtocolError, UnicodeError):
        # What the library says has the header in it, and so the token.
        raise ValueError("the token or the path has characters that no header may have") from None
