"""Bytes between a publisher and a router, through a real broker, TLS and HTTP/2."""

from __future__ import annotations

import asyncio
import hashlib
import os

import pytest
from bus_rig import in_a_loop, running, until


@pytest.mark.case("EB12")
@in_a_loop
async def test_ten_mebibytes_come_through_whole_both_ways_at_once() -> None:
    async with running() as rig:
        peer, _, connection, stream_id = await rig.stream()
        stream = peer.streams[stream_id]
        up, down = os.urandom(10 << 20), os.urandom(10 << 20)
        peer.send(stream_id, down)
        sending = asyncio.ensure_future(connection.send(up))
        await until(lambda: len(stream.received) == len(up) or stream.reset is not None)
        await until(lambda: len(connection.received) == len(down))
        await sending
        assert hashlib.sha256(stream.received).digest() == hashlib.sha256(up).digest()
        assert hashlib.sha256(connection.received).digest() == hashlib.sha256(down).digest()
        assert rig.broker.counts.to_router_bytes == rig.broker.counts.to_upstream_bytes == 10 << 20
