"""A way between broker and router that takes time, and the rate that gets through it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from bus_rig import WIDE, Connection, Rig, Script, loop, until

from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RTT_S = 0.1
NARROW_BYTES = 128 * KIB
_WAITING_BYTES = 512 * KIB


def long_way(window_bytes: int) -> Script:
    """Return a router that grants each stream such a window, and gives back what it has read at once."""
    return Script(stream_window=window_bytes, connection_window=2 * WIDE)


async def steady_rate(rig: Rig) -> float:
    """Return the bytes per second that come through one stream, once its window has gone round some times."""
    peer, _, connection, stream_id = await rig.stream()
    stream, relay = peer.streams[stream_id], rig.broker.view.session.relays[stream_id]  # type: ignore[union-attr]
    sending = asyncio.ensure_future(_flood(connection, lambda: relay.buffer.charged_bytes < _WAITING_BYTES))
    began_s = loop().time()
    await until(lambda: loop().time() - began_s >= 20 * RTT_S)
    began_s, before = loop().time(), len(stream.received)
    await until(lambda: loop().time() - began_s >= 20 * RTT_S)
    rate = (len(stream.received) - before) / (loop().time() - began_s)
    sending.cancel()
    assert stream.reset is None
    return rate


async def _flood(connection: Connection, has_room: object) -> None:
    """Send without end, but never more than may wait in a broker."""
    while True:
        if has_room():  # type: ignore[operator]
            await connection.send(bytes(64 * KIB))
        await asyncio.sleep(0)


@asynccontextmanager
async def delaying(port: int) -> AsyncIterator[int]:
    """Pass every connection on to a port of the loopback, each byte half of the time later. Yields the own port."""
    passing: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for each in (_pass(reader, back), _pass(there, writer)):
            task = loop().create_task(each)
            passing.add(task)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 20):
            loop().call_later(RTT_S / 2, writer.write, data)
    loop().call_later(RTT_S / 2, writer.close)
