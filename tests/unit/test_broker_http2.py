"""Whatever a router sends: the connection goes on, or is lost for a reason of one line. Nothing else comes of it."""

from __future__ import annotations

import pytest
from hpack import Encoder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kura_shaper.broker.http2 import SETTINGS_MAX, ConnectionFailedError, Http2Client
from kura_shaper.broker.protocol.goaway import encode_goaway

SETTINGS, PING, HEADERS, DATA = 0x4, 0x6, 0x1, 0x0
END_HEADERS = 0x4
STREAMS = 3


class Told:
    """An exchange that notes what it is told, and gives credit back as a stream does."""

    def __init__(self, http: Http2Client) -> None:
        self._http, self.http_id = http, 0
        self.statuses: list[int] = []
        self.windows = 0
        self.resets: list[str] = []

    def on_sent(self, http_id: int) -> None:
        self.http_id = http_id

    def on_response(self, status: int, headers: dict[str, str]) -> None:
        del headers
        self.statuses.append(status)

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        del data
        self._http.give_credit(self.http_id, credit_bytes)

    def on_end(self) -> None:
        self._http.finish(self.http_id)

    def on_reset(self, reason: str) -> None:
        self.resets.append(reason)

    def on_window(self) -> None:
        self.windows += 1


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def answer(*headers: tuple[bytes, bytes], stream: int = 1) -> bytes:
    return frame(HEADERS, Encoder().encode(headers), flags=END_HEADERS, stream=stream)


def connected() -> tuple[Http2Client, list[Told]]:
    """Return a connection whose router has said its settings, and requests that are under way."""
    http = Http2Client("router.example.net", max_streams=STREAMS)
    http.receive(frame(SETTINGS))
    told = [Told(http) for _ in range(STREAMS)]
    for each in told:
        http.request(each, "/bus/v1/session", [("authorization", "Bearer t")])
    http.data_to_send()
    return http, told


def reason(http: Http2Client, data: bytes) -> str:
    """Return why a connection was given up, "" when it was not; nothing that is done afterwards fails."""
    why = ""
    try:
        http.receive(data)
    except ConnectionFailedError as error:
        why = str(error)
        assert why.isprintable()
        assert len(why) < 100
    for http_id in (1, 3, 5):
        room_bytes = min(http.stream_room_bytes(http_id), http.data_room_bytes, http.frame_bytes_max)
        if room_bytes > 0:
            http.send(http_id, b"x" * min(room_bytes, 9))
        http.finish(http_id)
        http.release(http_id)
    http.ping()
    http.data_to_send()
    return why


HEADER = st.sampled_from([b":status", b":path", b"content-type", b"retry-after", b"\xff", b"A", b""]) | st.binary(
    max_size=6
)
VALUE = st.sampled_from([b"200", b"99999", "٢٠٠".encode(), b"\xff", b"\0", b" "]) | st.binary(max_size=8)
FRAME = st.builds(
    frame,
    st.integers(0, 11),
    st.binary(max_size=24),
    flags=st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]),
    stream=st.sampled_from([0, 1, 3, 5, 7, 2, 2**31 - 1]),
)
ANSWER = st.lists(st.tuples(HEADER, VALUE), max_size=4).map(lambda headers: answer(*headers))
ANYTHING = st.lists(st.binary(max_size=40) | FRAME | ANSWER, max_size=6).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(ANYTHING)
@example(answer((b":status", b"200"), (b"x", b"\xff")))
@example(answer((b":status", b"9" * 5_000)))
def test_any_bytes_leave_a_connection_or_a_reason_of_one_line(data: bytes) -> None:
    reason(connected()[0], data)


@pytest.mark.parametrize(
    "status", [b"9" * 5_000, "٢٠٠".encode(), b"20", b"099", b"600", b"-20", b"2e2"], ids=lambda status: repr(status[:8])
)
def test_a_status_that_is_none_is_told_to_nobody(status: bytes) -> None:
    http, told = connected()
    assert reason(http, answer((b":status", status))).startswith("HTTP/2: ")
    assert told[0].statuses == []


def test_a_header_that_is_no_text_ends_the_connection() -> None:
    http, told = connected()
    assert reason(http, answer((b":status", b"200"), (b"x-bus", b"\xff\xfe"))) == "HTTP/2: UnicodeDecodeError"
    assert told[0].statuses == []


def test_settings_that_change_time_and_again_end_the_connection_before_any_of_them_is_worked_on() -> None:
    change = frame(SETTINGS, b"\0\x04" + (1 << 16).to_bytes(4, "big"))
    http, told = connected()
    assert reason(http, change * SETTINGS_MAX) == ""
    # However many there were in one read, each stream is woken once.
    assert [each.windows for each in told] == [1] * STREAMS
    http, told = connected()
    assert reason(http, change * (SETTINGS_MAX + 1)) == "HTTP/2: the settings of HTTP/2 change time and again"
    assert [each.windows for each in told] == [0] * STREAMS


def test_of_many_goodbyes_the_one_that_serves_the_least_counts_and_an_error_counts_more() -> None:
    http, told = connected()
    http.receive(encode_goaway(5) + encode_goaway(3) + encode_goaway(5))
    assert [each.resets for each in told] == [[], [], ["the router goes away"]]
    assert http.is_leaving
    http, told = connected()
    assert reason(http, encode_goaway(1) + encode_goaway(5, 2)) == "GOAWAY with error 2"
    assert [each.resets for each in told] == [[], [], []]
