"""Connections of nobody: they have few places for a short time, and keep nobody out."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from bus_rig import in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import ANY_PORT, RouterRig, bus_settings, routing

from kura_shaper.broker.process import take_descriptors
from kura_shaper.broker.router.program import descriptors_of
from kura_shaper.broker.router.settings import Subscription
from kura_shaper.broker.router.strangers import STRANGERS_MAX, STRANGERS_OF_A_SOURCE_MAX, source_of
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Silent:
    """Connections that say nothing, or what they are told to, from one address of the loopback or another."""

    def __init__(self, rig: RouterRig) -> None:
        self._rig = rig
        self._made: list[socket.socket] = []

    async def connect(self, number: int, host: str, data: bytes = b"") -> None:
        for _ in range(number):
            made = socket.socket()
            made.setblocking(False)
            made.bind((host, 0))
            await loop().sock_connect(made, ("127.0.0.1", self._rig.bus.port))
            if data:
                made.send(data)
            self._made.append(made)

    @property
    def closed(self) -> int:
        """How many the router has closed."""
        return sum(_is_closed(each) for each in self._made)

    def close(self) -> None:
        for each in self._made:
            each.close()


def _is_closed(made: socket.socket) -> bool:
    try:
        return made.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def silent(rig: RouterRig) -> Iterator[Silent]:
    made = Silent(rig)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.case("ER76")
@in_flowing_time
async def test_silent_connections_without_end_keep_no_client_out_and_are_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routing(max_sessions=2) as rig, client(rig) as first:
        await first.session(replace(HELLO, client_id="first"))
        with silent(rig) as many, caplog.at_level(logging.WARNING):
            for source in range(2, 6):
                await many.connect(STRANGERS_OF_A_SOURCE_MAX, f"127.0.0.{source}", b"\x16\x03\x01"[: source % 4])
            await until(lambda: rig.bus.strangers == STRANGERS_MAX)
            async with client(rig) as second:
                await second.session(replace(HELLO, client_id="second"))
                assert set(rig.bus.by_client) == {"first", "second"}
                assert rig.bus.strangers <= STRANGERS_MAX
            assert many.closed > 0
        told = [each for each in caplog.records if each.getMessage() == "strangers_full"]
        assert len(told) == 1


@pytest.mark.case("ER76")
@in_flowing_time
async def test_one_source_has_only_some_of_the_places() -> None:
    async with routing() as rig:
        with silent(rig) as many:
            await many.connect(STRANGERS_OF_A_SOURCE_MAX, "127.0.0.2")
            await until(lambda: rig.bus.strangers == STRANGERS_OF_A_SOURCE_MAX)
            await many.connect(20, "127.0.0.2")
            await until(lambda: many.closed == 20)
            assert rig.bus.strangers == STRANGERS_OF_A_SOURCE_MAX
            async with client(rig) as raw:
                await raw.session()


@pytest.mark.case("ER76")
@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_stranger_that_does_not_get_on_is_closed_after_five_seconds(data: bytes) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing() as rig, client(rig) as raw:
            with silent(rig) as one:
                await one.connect(1, "127.0.0.1", data)
                await until(lambda: rig.bus.strangers == 2)
                await loop().advance(2.0)
                assert one.closed == 0
                await loop().advance(3.5)
                await until(lambda: one.closed == 1)
            # TLS and a preface are no token.
            await until(lambda: raw.is_closed)
            assert rig.bus.strangers == 0

    run()


@pytest.mark.case("ER76")
@in_flowing_time
async def test_who_was_let_in_has_a_place_of_its_own_and_gives_it_back() -> None:
    async with routing() as rig:
        rig.bus._door._places = 1
        async with client(rig) as first:
            await first.session()
            assert rig.bus.strangers == 0
            async with client(rig) as second:
                assert await second.status(second.request()) == 503
                await until(lambda: second.is_closed)
            assert "raw" in rig.bus.by_client
        await until(lambda: not rig.bus._connections)
        async with client(rig) as third:
            await third.session()


@pytest.mark.case("ER76")
def test_a_network_of_ipv6_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2")
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1") != source_of("10.0.0.2")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let nothing be opened any more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.case("ER77")
@pytest.mark.parametrize("port_of", ["bus", "served"])
def test_without_descriptors_whoever_comes_waits_and_it_is_told_of_once(
    port_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing(serve=ANY_PORT) as rig:
            assert rig.bus.served
            port = {"bus": rig.bus.port, "served": rig.bus.served.port}[port_of]
            await asyncio.sleep(0)
            counts = rig.bus.counts
            with socket.create_connection(("127.0.0.1", port)):
                with no_descriptors():
                    await until(lambda: bool(caplog.records))
                    await loop().advance(5.0)
                    assert counts.served_connections == rig.bus.strangers == 0
                await loop().advance(0.5)
                await until(lambda: counts.served_connections + rig.bus.strangers == 1)

    with caplog.at_level(logging.WARNING):
        run()
    assert [each.getMessage() for each in caplog.records] == ["accept_failed"]
    assert "open files" in caplog.records[0].fields["reason"]  # type: ignore[attr-defined]


@pytest.mark.case("ER77")
def test_too_few_descriptors_are_said_before_anything_is_served() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with suppress(UsageError):
            take_descriptors(soft + 1, key="max_sessions")
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft + 1
        if hard == resource.RLIM_INFINITY:
            pytest.skip("nothing is too many here")
        with pytest.raises(UsageError, match=rf"max_sessions needs {hard + 1} descriptors"):
            take_descriptors(hard + 1, key="max_sessions")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.case("ER77")
def test_a_router_counts_a_descriptor_for_each_connection_that_there_may_be(tmp_path: Path) -> None:
    told = bus_settings(tmp_path, max_sessions=10)
    least = descriptors_of(told)
    assert least > 10 + STRANGERS_MAX
    assert descriptors_of(replace(told, max_sessions=15)) == least + 5
    exposed = tuple(Subscription(f"tcp://10.0.0.{n}:5", "dynamo", expose=ANY_PORT) for n in range(1, 4))
    assert descriptors_of(replace(told, subscriptions=exposed)) == least + 3 * 65
    # No more than there may be streams.
    assert descriptors_of(replace(told, subscriptions=exposed, max_streams=5)) == least + 3 + 50
