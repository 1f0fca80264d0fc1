"""DATA frames that are made beside the library: the same bytes, the same windows, in the same order."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.errors
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.broker.data_frames import DataFrames

HEAD = [(":method", "POST"), (":scheme", "https"), (":authority", "a"), (":path", "/")]


def ends() -> tuple[h2.connection.H2Connection, h2.connection.H2Connection]:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    server.receive_data(client.data_to_send())
    return client, server


@given(st.lists(st.tuples(st.sampled_from([1, 3]), st.binary(max_size=4_000)), max_size=8), st.booleans())
def test_they_are_what_the_library_would_have_sent(pieces: list[tuple[int, bytes]], resets: bool) -> None:
    (ours, server), (plain, _) = ends(), ends()
    frames = DataFrames(ours)
    for stream in (1, 3):
        ours.send_headers(stream, HEAD)
        plain.send_headers(stream, HEAD)
    for stream, data in pieces:
        frames.put(stream, data)
        plain.send_data(stream, data)
        ours.ping(b"12345678")
        plain.ping(b"12345678")
    for made in (ours, plain):
        made.end_stream(1)
        if resets:
            made.reset_stream(3, h2.errors.ErrorCodes.CANCEL)
    sent = frames.take()
    assert sent == plain.data_to_send()
    assert ours.outbound_flow_control_window == plain.outbound_flow_control_window
    server.receive_data(sent)
    assert frames.take() == b""


def test_there_is_room_for_what_both_windows_let_through_and_none_on_a_stream_that_ended() -> None:
    ours, _ = ends()
    frames = DataFrames(ours)
    ours.send_headers(1, HEAD)
    assert frames.room_bytes(1) == 65_535
    frames.put(1, bytes(10_000))
    assert frames.room_bytes(1) == 55_535
    ours.send_headers(3, HEAD)
    assert frames.room_bytes(3) == 55_535
    ours.reset_stream(1)
    assert frames.room_bytes(1) == 0
    assert frames.room_bytes(5) == 0
