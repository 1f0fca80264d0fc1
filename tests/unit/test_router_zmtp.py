"""The bounded subscriber of ZMTP: both versions, messages however they are cut, and peers that misbehave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.broker.router.zmtp import Message, Ponged, Subscribed, ZmtpError, ZmtpFault, ZmtpSubscriber

NULL = b"NULL".ljust(20, b"\0")
MOST = 1_000


def greeting(minor: int = 1, *, major: int = 3, mechanism: bytes = NULL) -> bytes:
    return b"\xff" + bytes(7) + b"\x01\x7f" + bytes((major, minor)) + mechanism + b"\x01" + bytes(31)


def command(name: bytes, rest: bytes = b"") -> bytes:
    body = bytes((len(name),)) + name + rest
    return (b"\x04" + bytes((len(body),)) if len(body) < 256 else b"\x06" + len(body).to_bytes(8, "big")) + body


def ready(kind: bytes = b"PUB") -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


def part(body: bytes, *, more: bool = False, long: bool = False) -> bytes:
    flags = int(more)
    if long or len(body) > 255:
        return bytes((flags | 2,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def subscriber(*topics: bytes) -> ZmtpSubscriber:
    return ZmtpSubscriber(topics or (b"kv",), max_message_bytes=MOST)


def in_traffic(minor: int = 1) -> ZmtpSubscriber:
    made = subscriber()
    made.receive(greeting(minor) + ready())
    made.data_to_send()
    return made


def fault_of(made: ZmtpSubscriber, data: bytes) -> ZmtpFault:
    with pytest.raises(ZmtpError) as raised:
        made.receive(data)
    return raised.value.fault


def test_the_greeting_is_said_at_once_and_is_64_bytes_of_version_3_1() -> None:
    said = subscriber().data_to_send()
    assert said == b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + NULL + bytes(32)


@pytest.mark.case("ER14")
def test_a_peer_of_3_1_is_subscribed_to_by_a_command() -> None:
    made = subscriber(b"a", b"")
    made.data_to_send()
    assert made.receive(greeting(1) + ready()) == [Subscribed(1)]
    said = made.data_to_send()
    assert said.endswith(command(b"SUBSCRIBE", b"a") + command(b"SUBSCRIBE"))
    assert said.startswith(command(b"READY", b"\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0"))


@pytest.mark.case("ER14")
def test_a_peer_of_3_0_is_subscribed_to_by_a_message() -> None:
    made = subscriber(b"a")
    made.receive(greeting(0) + ready(b"XPUB"))
    assert made.data_to_send().endswith(b"\x00\x02\x01a")
    assert not made.ping()


@pytest.mark.case("ER14")
def test_a_later_major_version_is_spoken_to_as_3_1() -> None:
    assert subscriber().receive(greeting(0, major=4) + ready()) == [Subscribed(1)]


def test_parts_become_messages() -> None:
    made = in_traffic()
    data = part(b"kv", more=True) + part(b"", more=True) + part(b"x" * 300) + part(b"kv", long=True)
    assert made.receive(data) == [Message((b"kv", b"", b"x" * 300)), Message((b"kv",))]
    assert made.kept_bytes == 0


@pytest.mark.case("ER14")
@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=5), st.data())
def test_messages_are_the_same_wherever_they_are_cut(messages: list[list[bytes]], data: st.DataObject) -> None:
    parts = [part(body, more=at < len(each) - 1) for each in messages for at, body in enumerate(each)]
    whole = greeting() + ready() + b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    made = subscriber()
    found = [each for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) for each in made.receive(whole[a:b])]
    assert found == [Subscribed(1), *(Message(tuple(each)) for each in messages)]


@pytest.mark.case("ER49")
@given(st.binary(max_size=400), st.sampled_from([b"", greeting(), greeting() + ready()]))
def test_any_bytes_are_messages_or_end_it_and_nothing_grows(data: bytes, before: bytes) -> None:
    made = ZmtpSubscriber([b"kv"], max_message_bytes=50)
    try:
        for at in range(0, len(before + data), 7):
            made.receive((before + data)[at : at + 7])
    except ZmtpError:
        return
    assert made.kept_bytes <= 8 * 1024 + 9 + 50


@pytest.mark.case("ER47")
@pytest.mark.case("ER46")
@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"GET / HTTP/1.1\r\n", ZmtpFault.GREETING),
        (b"\xff" + bytes(8) + b"\x00", ZmtpFault.GREETING),
        (b"\xff" + bytes(8) + b"\x7f\x01", ZmtpFault.VERSION),
        (greeting(mechanism=b"CURVE".ljust(20, b"\0")), ZmtpFault.MECHANISM),
        (greeting() + part(b"early"), ZmtpFault.HANDSHAKE),
        (greeting() + ready(b"REP"), ZmtpFault.HANDSHAKE),
        (greeting() + command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xffPUB"), ZmtpFault.HANDSHAKE),
        (greeting() + command(b"READY", b"\x00\0\0\0\0"), ZmtpFault.HANDSHAKE),
        (greeting() + command(b"PING", b"\0\0"), ZmtpFault.HANDSHAKE),
        (greeting() + command(b"ERROR", b"\x02no"), ZmtpFault.PEER_ERROR),
        (greeting() + ready() + ready(), ZmtpFault.HANDSHAKE),
        (greeting() + b"\x06" + (1 << 40).to_bytes(8, "big"), ZmtpFault.TOO_LARGE),
    ],
)
def test_a_handshake_that_is_none_ends_it(data: bytes, fault: ZmtpFault) -> None:
    assert fault_of(subscriber(), data) is fault


@pytest.mark.case("ER48")
@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\x08\x00", ZmtpFault.FRAME),
        (b"\x05\x00", ZmtpFault.FRAME),
        (b"\x02" + b"\xff" * 8, ZmtpFault.TOO_LARGE),
        (part(bytes(MOST + 1))[:9], ZmtpFault.TOO_LARGE),
        (part(bytes(MOST), more=True) + part(b"x"), ZmtpFault.TOO_LARGE),
        (part(b"", more=True) * 16 + part(b""), ZmtpFault.TOO_MANY_PARTS),
        (command(b""), ZmtpFault.COMMAND),
        (b"\x04\x00", ZmtpFault.COMMAND),
        (b"\x04\x03\x09PI", ZmtpFault.COMMAND),
        (command(b"PING", b"\0"), ZmtpFault.COMMAND),
        (command(b"PING", bytes(19)), ZmtpFault.COMMAND),
    ],
)
def test_traffic_that_is_none_ends_it(data: bytes, fault: ZmtpFault) -> None:
    assert fault_of(in_traffic(), data) is fault


@pytest.mark.case("ER50")
def test_a_message_as_large_as_may_be_is_taken() -> None:
    assert in_traffic().receive(part(bytes(MOST))) == [Message((bytes(MOST),))]


@pytest.mark.case("ER50")
def test_a_frame_is_refused_by_its_head_before_its_body_is_kept() -> None:
    made = in_traffic()
    assert fault_of(made, b"\x02" + (MOST + 1).to_bytes(8, "big")) is ZmtpFault.TOO_LARGE


def test_a_ping_is_answered_with_what_it_wants_to_see_again() -> None:
    made = in_traffic()
    made.receive(command(b"PING", b"\x00\x0acontext"))
    assert made.data_to_send() == command(b"PONG", b"context")


@pytest.mark.case("ER48")
def test_a_peer_that_asks_and_is_not_answered_in_time_is_let_go() -> None:
    made = in_traffic()
    assert fault_of(made, command(b"PING", bytes(18)) * 5_000) is ZmtpFault.FLOOD


def test_a_ping_of_ours_is_answered() -> None:
    made = in_traffic()
    assert made.ping()
    assert made.data_to_send() == command(b"PING", b"\0\0")
    assert made.receive(command(b"PONG")) == [Ponged()]


@pytest.mark.case("ER48")
def test_a_command_of_a_later_version_is_ignored() -> None:
    assert in_traffic().receive(command(b"LATER", b"x" * 300)) == []


def test_the_words_of_an_error_have_nothing_of_what_the_peer_sent() -> None:
    with pytest.raises(ZmtpError) as raised:
        subscriber().receive(greeting() + command(b"ERROR", b"\x08\x1b[31mbad"))
    assert "bad" not in str(raised.value)
