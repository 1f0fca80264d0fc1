"""Clients of the role kv_listener: welcomed, asked for their sources alone, and harmless whatever they announce."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import NAMESPACE, in_a_loop, in_flowing_time, loop, until
from raw_client import HELLO, client
from router_rig import RouterRig, ZmqPublisher, routing
from zmtp_bytes import GREETING, READY, message

from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.frames import StreamRefused
from kura_shaper.broker.router.dynamo import Event, encode_event
from kura_shaper.broker.router.settings import Subscription

if TYPE_CHECKING:
    from raw_client import RawClient

LISTENER = replace(HELLO, client_id="listener", role="kv_listener")
SOURCE = Subscription("", NAMESPACE, ("",), source="b0")


def asked_of(raw: RawClient) -> list[dict[str, Any]]:
    return [each for each in raw.objects() if each["type"] == "subscribe"]


async def serve(rig: RouterRig, raw: RawClient, session_id: str) -> None:
    """Serve a source as a publisher does, and have three of its events arrive."""
    stream_id = asked_of(raw)[-1]["stream_id"]
    http_id = await raw.open(stream_id, session_id)
    raw.send(http_id, GREETING + READY)
    await until(lambda: rig.bus.feeds[0].is_read)
    for number in range(3):
        raw.send(http_id, message(*encode_event(Event("kv-events", 9, number, 1, b"\x80"))))
    await until(lambda: rig.output.numbers()[-3:] == [0, 1, 2])


@pytest.mark.case("ER19")
@in_flowing_time
async def test_a_source_is_asked_of_a_listener_by_its_name_and_read_as_a_publisher_is() -> None:
    async with routing(subscriptions=(SOURCE,)) as rig:
        await rig.start_broker("a")
        assert rig.bus.feeds[0].session is None
        async with client(rig) as raw:
            welcome = await raw.session(LISTENER)
            await raw.asked()
            assert [each["target"] for each in asked_of(raw)] == [{"kind": "announced_source", "source": "b0"}]
            await serve(rig, raw, welcome.session_id)
            assert {(endpoint, missed) for _, endpoint, missed in rig.output.found} == {("source:b0", 0)}
        await until(lambda: "listener" not in rig.bus.by_client)
        # No broker is asked for it, here or at any other time.
        assert rig.bus.counts.subscribes == 1


@pytest.mark.case("ER19")
@in_flowing_time
async def test_a_listener_is_never_asked_for_a_publisher_nor_for_another_namespaces_source() -> None:
    publisher = ZmqPublisher()
    other = replace(SOURCE, dynamo_namespace="other")
    wanted = (Subscription(publisher.endpoint, NAMESPACE, ("x",)), other)
    async with routing(publisher, subscriptions=wanted) as rig, client(rig) as raw:
        await raw.session(LISTENER)
        await rig.start_broker("a")
        await until(lambda: rig.bus.feeds[0].is_read)
        assert asked_of(raw) == []
        assert rig.bus.feeds[1].session is None


@pytest.mark.case("ER19")
@in_a_loop
async def test_an_announce_has_what_was_refused_asked_for_at_once() -> None:
    async with routing(subscriptions=(SOURCE,)) as rig, client(rig) as raw:
        welcome = await raw.session(LISTENER)
        for number in range(1, 6):
            (*_, last) = await raw.asked(number)
            raw.send(raw.session_http_id, encode(StreamRefused(last.stream_id, "target_not_advertised", True)))
            await until(lambda number=number: rig.bus.counts.refusals["target_not_advertised"] == number)  # type: ignore[misc]
            # Later and later, as of a broker: the fifth time only after some seconds.
            await loop().advance(0.6 * 2**number)
        raw.send(raw.session_http_id, encode(StreamRefused((await raw.asked(6))[-1].stream_id, "internal", True)))
        await until(lambda: rig.bus.counts.refusals["internal"] == 1)
        raw.send(raw.session_http_id, encode_object({"type": "announce", "source": "b0"}))
        # No time passes here: it is the announce that has it asked for.
        await raw.asked(7)
        await serve(rig, raw, welcome.session_id)


@pytest.mark.case("ER19")
@pytest.mark.parametrize(
    "said",
    [
        {"type": "announce"},
        {"type": "announce", "source": "b0"},
        {"type": "announce", "source": 7, "sources": [{}, None]},
        {"type": "announce", "source": "\x1b[2J" * 1_000},
        {"type": "withdraw"},
        {"type": "withdraw", "source": "b0"},
        {"type": "withdraw", "source": "never announced"},
    ],
)
def test_whatever_a_listener_announces_or_withdraws_does_no_harm(said: dict[str, Any]) -> None:
    @in_flowing_time
    async def run() -> None:
        async with routing(subscriptions=(SOURCE,)) as rig, client(rig) as raw:
            welcome = await raw.session(LISTENER)
            await raw.asked()
            for number in range(1, 501):
                raw.send(raw.session_http_id, encode_object(said))
                await until(lambda number=number: rig.bus.counts.frames_ignored == number)  # type: ignore[misc]
            # Asked once, since it is asked already.
            assert len(asked_of(raw)) == 1
            await serve(rig, raw, welcome.session_id)

    run()
