"""GET over HTTP/1.1 and TLS, as much of it as a pod needs to ask its API server: a page, or lines without end.

Every request has a connection of its own. A library that can do everything takes 10 MB, which is a fifth of what
a broker is made of.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from kura_shaper import __version__
from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Mapping

    from kura_shaper.tenants.kubernetes.login import PodLogin

CONNECT_WITHIN_S = 10
# One object is a line of a watch, and etcd keeps none above 1.5 MB.
LINE_BYTES_MAX = 4 << 20
_HEADERS_MAX = 256
_PIECE_BYTES_MAX = 256 << 10
_SHOWN_CHARACTERS = 300


@contextmanager
def unreached(*others: type[Exception]) -> Iterator[None]:
    """Turn everything that a connection may end by into one error."""
    causes: tuple[type[Exception], ...] = (OSError, EOFError, ValueError, asyncio.LimitOverrunError, *others)
    try:
        yield
    except causes as error:
        words = " ".join(str(error).split())[:_SHOWN_CHARACTERS] or type(error).__name__
        raise ApiError(f"the API server can't be reached: {words}") from error


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    headers: dict[str, str]


class _Input:
    """What comes, with the time that it may take: each read, and all of them."""

    def __init__(self, reader: asyncio.StreamReader, *, idle_s: float, until_s: float) -> None:
        self._reader, self._idle_s, self._until_s = reader, idle_s, until_s

    async def line(self) -> bytes:
        """Return a line of a head, without its end."""
        async with self._limit():
            return (await self._reader.readuntil(b"\n")).strip()

    async def some(self, most: int) -> bytes:
        """Return what there is, nothing at the end."""
        async with self._limit():
            return await self._reader.read(most)

    async def head(self) -> _Head:
        """Return the head of an answer. Raises ValueError when it is none."""
        version, _, rest = (await self.line()).decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("it does not answer in HTTP/1.1")
        headers: dict[str, str] = {}
        while line := await self.line():
            if len(headers) == _HEADERS_MAX:
                raise ValueError("the head of an answer has no end")
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return _Head(int(rest[:3]), headers)

    def _limit(self) -> asyncio.Timeout:
        return asyncio.timeout_at(min(asyncio.get_running_loop().time() + self._idle_s, self._until_s))


class Answer:
    """See wire.Answer."""

    def __init__(self, read: _Input, head: _Head) -> None:
        self._read, self._head = read, head

    @property
    def status(self) -> int:
        """See wire.Answer."""
        return self._head.status

    @property
    def retry_after_ns(self) -> int:
        """See wire.Answer."""
        return retry_after_ns(self._head.headers.get("retry-after", ""))

    async def body(self) -> bytes:
        """See wire.Answer."""
        with unreached():
            return b"".join([piece async for piece in self._pieces()])

    async def lines(self) -> AsyncIterator[bytes]:
        """See wire.Answer."""
        waiting = bytearray()
        with unreached():
            async for piece in self._pieces():
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

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises EOFError when it is cut off."""
        headers = self._head.headers
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while size := int((await self._read.line()).partition(b";")[0], 16):
                async for piece in self._exactly(size):
                    yield piece
                await self._read.line()
        elif "content-length" in headers:
            async for piece in self._exactly(int(headers["content-length"])):
                yield piece
        else:
            while piece := await self._read.some(_PIECE_BYTES_MAX):
                yield piece

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size > 0:
            piece = await self._read.some(min(size, _PIECE_BYTES_MAX))
            if not piece:
                raise EOFError("the connection was closed in the middle of an answer")
            size -= len(piece)
            yield piece


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
            writer.write(_request(url.netloc, path, query, authorization=await login.authorization()))
            read = _Input(reader, idle_s=idle_s, until_s=until_s)
            answer = Answer(read, await read.head())
        yield answer
    finally:
        if writer is not None:
            # A server that is not listened to any more is owed nothing, and to say goodbye would take time.
            writer.transport.abort()


def _request(authority: str, path: str, query: Mapping[str, str], *, authorization: str) -> bytes:
    lines = (
        f"GET {path}?{urlencode(query)} HTTP/1.1",
        f"Host: {authority}",
        f"User-Agent: kura-shaper/{__version__}",
        "Accept: application/json",
        f"Authorization: {authorization}",
        "Connection: close",
    )
    if not all(line.isascii() and line.isprintable() for line in lines):
        raise ValueError("the token or the path has characters that no header may have")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
