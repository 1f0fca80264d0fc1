"""The two ends of a session with a clock that is moved by hand: terms, heartbeats, silence, drain, errors."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from bus_corpus import HELLO, INVALID_BYTES, INVALID_OBJECTS, PUBLISHER, WELCOME

from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.broker_session import BrokerSession, StreamState
from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.codes import CloseCode, DrainReason, RefusalCode, SessionCode
from kura_shaper.broker.protocol.errors import MisuseError
from kura_shaper.broker.protocol.frames import (
    Drain,
    Draining,
    Error,
    Frame,
    Heartbeat,
    OtherTarget,
    StreamClosed,
    StreamOpened,
    StreamRefused,
    Subscribe,
    Unsubscribe,
    WelcomeLimits,
)
from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.broker.protocol.router_session import Claim, RoutedState, RouterSession
from kura_shaper.clock import FakeClock


class Pair:
    """A broker and a router that hear all that the other says, at once, when `exchange` is called."""

    def __init__(self, *, hello: object = HELLO) -> None:
        self.clock = FakeClock(7)
        self.broker = BrokerSession(
            hello,  # type: ignore[arg-type]
            now_ns=self.clock.now_ns,
            random=Random(1),
            buffered_bytes=lambda: 12,
        )
        self.router = RouterSession(now_ns=self.clock.now_ns, random=Random(2))

    def exchange(self) -> tuple[list[events.Event], list[events.Event]]:
        """Return what the broker and what the router was told."""
        to_broker: list[events.Event] = []
        to_router: list[events.Event] = []
        while self.broker.has_data_to_send or self.router.has_data_to_send:
            to_router += self.router.receive(self.broker.data_to_send())
            to_broker += self.broker.receive(self.router.data_to_send())
        return to_broker, to_router

    def advance_s(self, seconds: float) -> None:
        self.clock.wait_ns(int(seconds * SECOND_NS))


def welcomed(welcome: object = WELCOME) -> Pair:
    pair = Pair()
    pair.exchange()
    pair.router.welcome(welcome)  # type: ignore[arg-type]
    pair.exchange()
    return pair


def opened(pair: Pair) -> str:
    stream_id = pair.router.subscribe(PUBLISHER)
    pair.exchange()
    assert pair.router.claim(stream_id) is Claim.ACCEPTED
    assert pair.broker.opened(stream_id)
    pair.exchange()
    return stream_id


def refusals(pair: Pair, *frames: Frame) -> list[RefusalCode]:
    found = pair.broker.receive(b"".join(map(encode, frames)))
    return [each.code for each in found if isinstance(each, events.SubscribeRefused)]


@pytest.mark.case("EB7")
def test_the_first_thing_that_a_broker_says_is_who_it_is() -> None:
    pair = Pair()
    assert pair.exchange()[1] == [events.Greeted(HELLO)]


@pytest.mark.case("EB9")
def test_the_terms_are_the_least_that_both_allow() -> None:
    pair = Pair()
    pair.exchange()
    pair.router.welcome(replace(WELCOME, limits=WelcomeLimits(4_096, 65_536, 4_096)))
    (event,) = pair.exchange()[0]
    assert isinstance(event, events.Welcomed)
    assert (event.limits.max_streams, event.limits.max_stream_buffer_bytes) == (256, 65_536)


@pytest.mark.case("EB9")
@pytest.mark.parametrize("name", [name for name in INVALID_OBJECTS if name.startswith("welcome")])
def test_a_welcome_out_of_bounds_ends_the_session(name: str) -> None:
    pair = Pair()
    pair.broker.data_to_send()
    (event,) = pair.broker.receive(encode_object(INVALID_OBJECTS[name]))
    assert isinstance(event, events.Failed)
    assert event.code is SessionCode.PROTOCOL_ERROR


def test_a_version_that_was_not_offered_ends_the_session() -> None:
    pair = Pair()
    (event,) = pair.broker.receive(encode(replace(WELCOME, protocol_version=2)))
    assert isinstance(event, events.Failed)
    assert event.code is SessionCode.UNSUPPORTED_VERSION


def test_a_router_refuses_a_hello_of_later_versions_alone() -> None:
    pair = Pair(hello=replace(HELLO, protocol_min=2, protocol_max=3))
    to_broker, to_router = pair.exchange()
    assert isinstance(to_router[0], events.Failed)
    assert isinstance(to_broker[0], events.PeerFailed)
    assert to_broker[0].error.code == SessionCode.UNSUPPORTED_VERSION


@pytest.mark.parametrize(
    "frames",
    [
        [Subscribe("a", PUBLISHER)],
        [Heartbeat(1)],
        [WELCOME, WELCOME],
        [HELLO],
        [WELCOME, StreamOpened("a")],
        [WELCOME, Draining("shutdown", 1)],
    ],
)
def test_what_comes_too_early_twice_or_from_the_wrong_side_ends_a_brokers_session(frames: list[Frame]) -> None:
    pair = Pair()
    pair.broker.data_to_send()
    last = pair.broker.receive(b"".join(map(encode, frames)))[-1]
    assert isinstance(last, events.Failed)
    assert last.code is SessionCode.PROTOCOL_ERROR
    assert pair.broker.has_ended
    assert b"protocol_error" in pair.broker.data_to_send()
    assert pair.broker.receive(encode(Heartbeat(1))) == ()
    assert pair.broker.next_due_ns is None


@pytest.mark.parametrize("frames", [[Heartbeat(1)], [HELLO, HELLO], [HELLO, Heartbeat(1)], [WELCOME]])
def test_what_comes_too_early_twice_or_from_the_wrong_side_ends_a_routers_session(frames: list[Frame]) -> None:
    pair = Pair()
    last = pair.router.receive(b"".join(map(encode, frames)))[-1]
    assert isinstance(last, events.Failed)
    assert last.code is SessionCode.PROTOCOL_ERROR


@pytest.mark.parametrize("name", INVALID_BYTES)
@pytest.mark.case("EB50")
def test_bytes_that_are_no_frame_end_the_session_and_the_peer_is_told(name: str) -> None:
    pair = welcomed()
    (event,) = pair.broker.receive(INVALID_BYTES[name])
    assert isinstance(event, events.Failed)
    assert event.code is SessionCode.PROTOCOL_ERROR
    (told,) = pair.router.receive(pair.broker.data_to_send())
    assert isinstance(told, events.PeerFailed)


@pytest.mark.case("EB51")
def test_a_frame_of_no_known_type_changes_nothing() -> None:
    pair = welcomed()
    assert pair.broker.receive(encode_object({"type": "announce"})) == (events.FrameIgnored("announce"),)
    assert not pair.broker.has_ended


@pytest.mark.case("EB10")
def test_heartbeats_come_at_the_interval_give_or_take_a_tenth_and_count_up() -> None:
    pair = welcomed()
    due, seen = [], []
    for _ in range(50):
        before_ns = pair.clock.now_ns()
        assert pair.broker.next_due_ns
        pair.advance_s((pair.broker.next_due_ns - before_ns) / SECOND_NS)
        pair.clock.wait_ns(1)
        due.append(pair.clock.now_ns() - before_ns)
        pair.broker.tick()
        seen += [event.seq for event in pair.exchange()[1] if isinstance(event, events.HeartbeatSeen)]
        pair.broker.receive(encode(Heartbeat(1)))
    assert seen == list(range(1, 51))
    assert all(9 * SECOND_NS <= each <= 11 * SECOND_NS + 1 for each in due)
    assert len(set(due)) > 40


def test_a_heartbeat_says_what_is_open_and_what_waits() -> None:
    pair = welcomed()
    opened(pair)
    pair.router.subscribe(PUBLISHER)
    pair.exchange()
    pair.advance_s(11)
    pair.broker.tick()
    assert pair.broker.data_to_send() == encode(Heartbeat(1, 1, 12))


@pytest.mark.case("EB11")
def test_silence_ends_a_session_at_the_timeout_and_half_a_frame_is_silence() -> None:
    pair = welcomed()
    pair.advance_s(29.9)
    pair.broker.receive(encode(Heartbeat(1))[:-1])
    pair.broker.tick()
    assert not pair.broker.has_ended
    pair.advance_s(0.1)
    (event,) = pair.broker.tick()
    assert isinstance(event, events.Failed)
    assert event.code is SessionCode.IDLE_TIMEOUT


@pytest.mark.parametrize("frame", [Heartbeat(1), Unsubscribe("gone"), Subscribe("a", OtherTarget("b"))])
@pytest.mark.case("EB11")
def test_any_whole_frame_breaks_a_silence(frame: Frame) -> None:
    pair = welcomed()
    pair.advance_s(29.9)
    pair.broker.receive(encode(frame))
    pair.advance_s(29.9)
    pair.broker.tick()
    assert not pair.broker.has_ended


def test_a_router_that_does_not_welcome_and_a_broker_that_does_not_greet_are_given_up_after_ten_seconds() -> None:
    pair = Pair()
    assert pair.broker.next_due_ns == pair.router.next_due_ns == pair.clock.now_ns() + 10 * SECOND_NS
    pair.advance_s(9.999)
    assert pair.broker.tick() == pair.router.tick() == ()
    pair.advance_s(0.001)
    assert isinstance(pair.broker.tick()[0], events.Failed)
    assert isinstance(pair.router.tick()[0], events.Failed)


def test_the_time_for_the_first_frame_begins_with_the_connection() -> None:
    pair = Pair()
    pair.advance_s(9)
    pair.broker.connected()
    pair.advance_s(9.999)
    assert pair.broker.tick() == ()
    pair.advance_s(0.001)
    assert pair.broker.tick()


def test_a_subscribe_is_asked_with_its_buffer_which_can_only_be_lowered() -> None:
    pair = welcomed()
    sizes = []
    for most in (None, 16_384, 1 << 30):
        pair.router.subscribe(PUBLISHER, max_stream_buffer_bytes=most)
        (event,) = pair.exchange()[0]
        assert isinstance(event, events.SubscribeAsked)
        sizes.append(event.max_buffer_bytes)
    assert sizes == [262_144, 16_384, 262_144]


@pytest.mark.case("EB14")
def test_the_checks_of_a_session_come_in_their_order() -> None:
    other, limit = OtherTarget("x"), WELCOME.limits.max_streams
    pair = welcomed()
    assert refusals(pair, *(Subscribe(f"a{at}", PUBLISHER) for at in range(limit - 1))) == []
    assert refusals(pair, Subscribe("b", other), Subscribe("a0", other)) == ["unsupported_target", "duplicate_stream"]
    assert refusals(pair, Subscribe("c", PUBLISHER), Subscribe("d", other), Subscribe("c", other)) == [
        "stream_limit",
        "duplicate_stream",
    ]
    assert refusals(pair, Drain("shutdown", 1_000), Subscribe("c", other)) == ["draining"]


@pytest.mark.case("EB15")
def test_an_announced_source_is_never_a_target() -> None:
    pair = welcomed()
    stream_id = pair.router.subscribe(OtherTarget("announced_source"))
    assert pair.exchange()[1] == [StreamRefused(stream_id, RefusalCode.UNSUPPORTED_TARGET, retryable=False)]
    assert pair.broker.stream_count == 0


@pytest.mark.case("EP19")
def test_a_place_is_taken_by_a_subscribe_and_given_back_by_every_end() -> None:
    pair = welcomed(replace(WELCOME, limits=WelcomeLimits(4, 16_384)))
    for at in range(1_000):
        asked = [Subscribe(f"{at}-{each}", PUBLISHER) for each in range(4)]
        assert refusals(pair, *asked, Subscribe("more", PUBLISHER)) == [RefusalCode.STREAM_LIMIT]
        for each in asked:
            match at % 4:
                case 0:
                    assert pair.broker.refuse(each.stream_id, RefusalCode.CONNECT_FAILED)
                case 1:
                    assert pair.broker.opened(each.stream_id)
                    assert pair.broker.closed(
                        each.stream_id, CloseCode.UPSTREAM_CLOSED, bytes_to_router=1, bytes_to_upstream=0
                    )
                case 2:
                    assert pair.broker.forget(each.stream_id)
                case _:
                    pair.broker.receive(encode(Unsubscribe(each.stream_id)))
        assert pair.broker.stream_count == 0
        pair.broker.data_to_send()


@pytest.mark.case("EB33")
def test_an_unsubscribe_ends_a_stream_in_silence_whether_it_is_open_or_not() -> None:
    pair = welcomed()
    stream_id = opened(pair)
    pending = pair.router.subscribe(PUBLISHER)
    pair.exchange()
    for each in (stream_id, pending):
        assert pair.router.unsubscribe(each)
        assert not pair.router.unsubscribe(each)
    assert pair.exchange() == ([events.UnsubscribeAsked(stream_id), events.UnsubscribeAsked(pending)], [])
    assert not pair.broker.opened(pending)
    assert not pair.broker.refuse(pending, RefusalCode.INTERNAL)
    assert not pair.broker.closed(stream_id, CloseCode.UPSTREAM_CLOSED, bytes_to_router=0, bytes_to_upstream=0)
    assert not pair.broker.has_data_to_send


def test_an_unsubscribe_of_what_is_not_there_is_nothing() -> None:
    pair = welcomed()
    assert pair.broker.receive(encode(Unsubscribe("never"))) == ()


def test_a_stream_that_was_closed_by_itself_says_what_it_carried() -> None:
    pair = welcomed()
    stream_id = opened(pair)
    pair.broker.closed(stream_id, CloseCode.BUFFER_OVERFLOW, bytes_to_router=5, bytes_to_upstream=6)
    assert pair.exchange()[1] == [StreamClosed(stream_id, "buffer_overflow", 5, 6)]
    assert pair.router.streams == {}
    assert pair.broker.streams == {}


@pytest.mark.case("EB36")
def test_a_second_drain_shortens_the_time_and_never_makes_it_longer() -> None:
    pair = welcomed()
    began_ns = pair.clock.now_ns()
    until = []
    for deadline_ms in (20_000, 30_000, 5_000, 10_000):
        pair.router.drain(DrainReason.REBALANCE, deadline_ms)
        (event,) = pair.exchange()[0]
        assert isinstance(event, events.DrainAsked)
        assert event.reason is DrainReason.REBALANCE
        until.append((event.until_ns - began_ns) // SECOND_NS)
    assert until == [20, 20, 5, 5]


def test_a_drain_for_a_reason_of_a_later_version_is_maintenance() -> None:
    (event,) = welcomed().broker.receive(encode(Drain("defragmentation", 1)))
    assert isinstance(event, events.DrainAsked)
    assert event.reason is DrainReason.MAINTENANCE


@pytest.mark.case("EB38")
def test_a_broker_that_leaves_says_so_refuses_what_is_new_and_still_ends_what_is_open() -> None:
    pair = welcomed()
    stream_id = opened(pair)
    pair.broker.start_draining(25_000)
    late = pair.router.subscribe(PUBLISHER)
    assert pair.exchange()[1] == [
        Draining("shutdown", 25_000),
        StreamRefused(late, RefusalCode.DRAINING, retryable=True),
    ]
    assert pair.broker.closed(stream_id, CloseCode.UPSTREAM_CLOSED, bytes_to_router=0, bytes_to_upstream=0)


def test_an_error_frame_ends_both_ends_and_says_when_to_come_back() -> None:
    pair = welcomed()
    pair.router.fail(SessionCode.OVERLOADED, "x" * 1000, retry_after_ms=2_000)
    (event,) = pair.exchange()[0]
    assert event == events.PeerFailed(Error("overloaded", "x" * 256, 2_000))
    assert pair.broker.has_ended
    assert pair.router.has_ended
    assert not pair.router.unsubscribe("a")
    assert not pair.broker.opened("a")


def test_a_router_forgets_a_subscribe_after_thirty_seconds_and_does_not_know_its_stream() -> None:
    pair = welcomed()
    stream_id = pair.router.subscribe(PUBLISHER)
    for _ in range(3):
        pair.advance_s(9.9)
        pair.exchange()
        assert pair.router.receive(encode(Heartbeat(1)))
        pair.router.tick()
    assert pair.router.streams == {stream_id: RoutedState.PENDING}
    assert pair.router.next_due_ns == pair.clock.now_ns() + SECOND_NS * 3 // 10
    pair.advance_s(0.3)
    assert events.OpenExpired(stream_id) in pair.router.tick()
    assert pair.router.claim(stream_id) is Claim.UNKNOWN


def test_a_data_stream_is_claimed_once() -> None:
    pair = welcomed()
    stream_id = pair.router.subscribe(PUBLISHER)
    assert [pair.router.claim(each) for each in (stream_id, stream_id, "other")] == [
        Claim.ACCEPTED,
        Claim.DUPLICATE,
        Claim.UNKNOWN,
    ]


@pytest.mark.parametrize(
    "frame",
    [StreamOpened("s1"), StreamClosed("s1", "upstream_closed", 0, 0)],
)
def test_a_broker_that_skips_a_step_ends_its_session(frame: Frame) -> None:
    pair = welcomed()
    pair.router.subscribe(PUBLISHER)
    (event,) = pair.router.receive(encode(frame))
    assert isinstance(event, events.Failed)


def test_frames_of_a_stream_that_is_gone_cross_with_its_end_and_are_nothing() -> None:
    pair = welcomed()
    frames: list[Frame] = [
        StreamOpened("x"),
        StreamRefused("x", "internal", retryable=True),
        StreamClosed("x", "y", 0, 0),
    ]
    assert pair.router.receive(b"".join(map(encode, frames))) == ()


def test_a_router_asks_for_no_more_than_it_may() -> None:
    pair = Pair()
    with pytest.raises(MisuseError):
        pair.router.subscribe(PUBLISHER)
    with pytest.raises(MisuseError):
        pair.router.welcome(WELCOME)
    pair = welcomed(replace(WELCOME, limits=WelcomeLimits(1, 16_384)))
    pair.router.subscribe(PUBLISHER, stream_id="a")
    with pytest.raises(MisuseError):
        pair.router.subscribe(PUBLISHER, stream_id="b")
    assert pair.router.forget("a")
    assert pair.router.subscribe(PUBLISHER, stream_id="a") == "a"


def test_the_states_of_a_stream_are_the_same_at_both_ends() -> None:
    pair = welcomed()
    stream_id = pair.router.subscribe(PUBLISHER)
    pair.exchange()
    assert pair.broker.streams == {stream_id: StreamState.OPENING}
    pair.router.claim(stream_id)
    assert pair.router.streams == {stream_id: RoutedState.CLAIMED}
    pair.broker.opened(stream_id)
    assert not pair.broker.opened(stream_id)
    pair.exchange()
    assert (pair.broker.streams, pair.router.streams) == (
        {stream_id: StreamState.OPEN},
        {stream_id: RoutedState.OPEN},
    )
