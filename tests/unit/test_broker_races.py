"""Any bytes, and any order of events: no crash, no hang, one outcome for each subscribe, nothing left."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from bus_corpus import HELLO, PUBLISHER, VALID, WELCOME
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.broker_session import BrokerSession, StreamState
from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.codes import CloseCode, RefusalCode, SessionCode
from kura_shaper.broker.protocol.frames import Frame, StreamClosed, StreamOpened, StreamRefused, object_of
from kura_shaper.broker.protocol.router_session import Claim, RouterSession
from kura_shaper.clock import FakeClock

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def broker(clock: FakeClock) -> BrokerSession:
    made = BrokerSession(HELLO, now_ns=clock.now_ns, random=Random(1), buffered_bytes=lambda: 0)
    made.data_to_send()
    return made


def fed(session: BrokerSession | RouterSession, pieces: list[bytes]) -> list[events.Event]:
    return [event for piece in pieces for event in session.receive(piece)]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return a frame as an object, one of its fields another value or gone."""
    made = object_of(draw(st.sampled_from(list(VALID.values()))))
    key = draw(st.sampled_from(list(made)))
    if draw(st.booleans()):
        return made | {key: draw(JSON)}
    return {each: value for each, value in made.items() if each != key}


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=5)))
    return [data[begin:end] for begin, end in zip([0, *at], [*at, len(data)], strict=True)]


def check_ended_well(session: BrokerSession | RouterSession, found: list[events.Event]) -> None:
    failed = [event for event in found if isinstance(event, events.Failed)]
    assert len(failed) <= 1
    assert session.has_ended == bool(failed or [event for event in found if isinstance(event, events.PeerFailed)])
    if failed:
        assert failed[0].code in {SessionCode.PROTOCOL_ERROR, SessionCode.UNSUPPORTED_VERSION}
        # The peer's own end reads it as an error and nothing else.
        assert b'"error"' in session.data_to_send()
        assert session.receive(b"anything") == ()


@pytest.mark.case("EB50")
@settings(max_examples=200, deadline=None)
@given(data=st.data(), junk=st.binary(max_size=300))
def test_any_bytes_are_frames_or_end_the_session(data: st.DataObject, junk: bytes) -> None:
    for session in (broker(FakeClock()), RouterSession(now_ns=FakeClock().now_ns, random=Random(1))):
        check_ended_well(session, fed(session, data.draw(cut(junk))))


@pytest.mark.case("EB50")
@settings(max_examples=300, deadline=None)
@given(data=st.data(), objects=st.lists(mutated(), min_size=1, max_size=4))
def test_frames_that_are_almost_right_end_the_session_or_are_taken(
    data: st.DataObject, objects: list[dict[str, Any]]
) -> None:
    payload = b"".join(_encoded(each) for each in objects)
    for session, first in (
        (broker(FakeClock()), WELCOME),
        (RouterSession(now_ns=FakeClock().now_ns, random=Random(1)), HELLO),
    ):
        found = fed(session, data.draw(cut(encode(first) + payload)))
        check_ended_well(session, found)


def _encoded(value: dict[str, Any]) -> bytes:
    try:
        return encode_object(value)
    except UnicodeEncodeError:  # half a surrogate pair, which only escapes can say
        return encode(VALID["heartbeat"])


@pytest.mark.case("EB50")
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_frames_are_the_same_wherever_they_are_cut(data: st.DataObject) -> None:
    from_router = ["welcome", "subscribe", "heartbeat", "unsubscribe", "subscribe_lowered", "drain", "error"]
    payload = b"".join(encode(VALID[name]) for name in from_router)
    whole = fed(broker(FakeClock()), [payload])
    assert fed(broker(FakeClock()), data.draw(cut(payload))) == whole


class Race:
    """A broker and a router with bytes on the way in both directions, and everything that may happen at any time."""

    def __init__(self, random: Random) -> None:
        self.random, self.clock = random, FakeClock()
        self.broker = BrokerSession(HELLO, now_ns=self.clock.now_ns, random=random, buffered_bytes=lambda: 0)
        self.router = RouterSession(now_ns=self.clock.now_ns, random=random)
        self.router.receive(self.broker.data_to_send())
        self.router.welcome(WELCOME)
        self.broker.receive(self.router.data_to_send())
        self.to_router, self.to_broker = bytearray(), bytearray()
        self.asked: dict[str, list[Frame]] = {}
        self.silenced: set[str] = set()

    def step(self) -> None:
        self.random.choice(
            [
                self.subscribe,
                self.unsubscribe,
                self.go_on,
                self.go_on,
                self.router_ends_stream,
                self.deliver_to_router,
                self.deliver_to_broker,
            ]
        )()

    def subscribe(self) -> None:
        if len(self.router.streams) < WELCOME.limits.max_streams:
            # An id may come again once its stream is gone at the router.
            free = [each for each in ("a", "b", "c", "d") if each not in self.asked]
            if free:
                self.asked[self.router.subscribe(PUBLISHER, stream_id=free[0])] = []

    def unsubscribe(self) -> None:
        if live := list(self.router.streams):
            stream_id = self.random.choice(live)
            assert self.router.unsubscribe(stream_id)
            self.silenced.add(stream_id)

    def router_ends_stream(self) -> None:
        """The data stream of HTTP/2 is reset by the router; the broker sees it at any time later."""
        claimed = [each for each, state in self.broker.streams.items() if state is StreamState.OPEN]
        if claimed:
            stream_id = self.random.choice(claimed)
            self.broker.forget(stream_id)
            self.router.forget(stream_id)
            self.silenced.add(stream_id)

    def go_on(self) -> None:
        """The broker's work on a stream comes to something."""
        live = self.broker.streams
        if not live:
            return
        stream_id = self.random.choice(list(live))
        if live[stream_id] is StreamState.OPEN:
            self.broker.closed(stream_id, CloseCode.UPSTREAM_CLOSED, bytes_to_router=0, bytes_to_upstream=0)
        elif self.random.random() < 0.3:
            self.broker.refuse(stream_id, RefusalCode.CONNECT_FAILED)
        elif self.router.claim(stream_id) is Claim.ACCEPTED:
            self.broker.opened(stream_id)
        else:
            self.broker.refuse(stream_id, RefusalCode.UNKNOWN_STREAM)

    def deliver_to_router(self) -> None:
        self.to_router += self.broker.data_to_send()
        size = self.random.randint(0, len(self.to_router))
        for event in self.router.receive(bytes(self.to_router[:size])):
            assert isinstance(event, StreamOpened | StreamRefused | StreamClosed)
            self.asked[event.stream_id].append(event)
        del self.to_router[:size]

    def deliver_to_broker(self) -> None:
        self.to_broker += self.router.data_to_send()
        size = self.random.randint(0, len(self.to_broker))
        for event in self.broker.receive(bytes(self.to_broker[:size])):
            assert isinstance(event, events.SubscribeAsked | events.UnsubscribeAsked)
        del self.to_broker[:size]

    def settle(self) -> None:
        while self.broker.streams or self.to_router or self.to_broker or self.has_more:
            self.deliver_to_broker()
            self.go_on()
            self.deliver_to_router()

    @property
    def has_more(self) -> bool:
        return self.broker.has_data_to_send or self.router.has_data_to_send


@pytest.mark.case("EB52")
@pytest.mark.case("EP18")
def test_in_a_thousand_orders_of_events_each_subscribe_has_one_outcome_and_nothing_is_left() -> None:
    outcomes = set()
    for seed in range(1_000):
        race = Race(Random(seed))
        for _ in range(60):
            race.step()
        race.settle()
        assert race.broker.stream_count == 0
        assert race.router.streams == {}
        assert not race.broker.has_ended
        assert not race.router.has_ended
        for stream_id, told in race.asked.items():
            kinds = tuple(type(each) for each in told)
            outcomes.add((kinds, stream_id in race.silenced))
    whole = {(StreamRefused,), (StreamOpened, StreamClosed)}
    assert outcomes == {
        *((kinds, False) for kinds in whole),
        ((), True),
        ((StreamOpened,), True),
    }
