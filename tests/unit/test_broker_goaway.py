"""GOAWAY frames are taken out of HTTP/2, wherever the bytes are cut, and nothing else is."""

from __future__ import annotations

from random import Random

import h2.config
import h2.connection
import h2.events
import pytest

from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.goaway import LAST_STREAM_MAX, FrameSplitter, GoAway, encode_goaway

PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def connection(*, client: bool) -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=client))
    made.initiate_connection()
    return made


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


@pytest.mark.case("EP14")
def test_a_live_stream_goes_on_after_a_goaway() -> None:
    client, server = connection(client=True), connection(client=False)
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "https"), (":authority", "a")])
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(":status", "200")])
    splitter = FrameSplitter(max_frame_bytes=16_384)
    passed, goaways = splitter.feed(server.data_to_send() + encode_goaway())
    client.receive_data(passed)
    assert goaways == (GoAway(LAST_STREAM_MAX, 0),)
    client.send_data(1, b"up")
    server.receive_data(client.data_to_send())
    server.send_data(1, b"down")
    passed, goaways = splitter.feed(server.data_to_send())
    assert goaways == ()
    assert [each.data for each in client.receive_data(passed) if isinstance(each, h2.events.DataReceived)] == [b"down"]


@pytest.mark.case("EP14")
def test_bytes_are_passed_on_in_order_wherever_they_are_cut() -> None:
    others = [frame(kind, bytes(length)) for kind, length in ((0, 0), (0, 5_000), (1, 9), (4, 6), (8, 4), (6, 8))]
    for seed in range(200):
        random = Random(seed)
        frames = random.choices([*others, encode_goaway(random.randint(0, 99), 7)], k=10)
        preface = bytes(PREFACE_BYTES)
        data = preface + b"".join(frames)
        splitter = FrameSplitter(max_frame_bytes=16_384, preface_bytes=PREFACE_BYTES)
        passed, found = b"", 0
        while data:
            size = random.choice([1, 8, 9, 10, 100, 4_000])
            more, goaways = splitter.feed(data[:size])
            data = data[size:]
            passed += more
            found += len(goaways)
        assert passed == preface + b"".join(each for each in frames if each in others)
        assert found == sum(each not in others for each in frames)


@pytest.mark.parametrize("bad", [frame(7, bytes(7)), (16_385).to_bytes(3, "big") + bytes(6)])
def test_a_frame_that_is_too_long_and_a_goaway_that_is_too_short_end_the_connection(bad: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        FrameSplitter(max_frame_bytes=16_384).feed(bad)


def test_debug_data_of_a_goaway_is_dropped_and_its_reserved_bit_ignored() -> None:
    data = frame(7, b"\x80\0\0\x05\0\0\0\x02" + b"why" * 100)
    assert FrameSplitter(max_frame_bytes=16_384).feed(data) == (b"", (GoAway(5, 2),))
