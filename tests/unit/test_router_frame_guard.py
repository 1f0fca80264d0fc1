"""What frames of a client cost, and that whatever it sends is a request or an error of its own."""

from __future__ import annotations

from random import Random

import h2.config
import h2.connection
import h2.errors
import pytest

from kura_shaper.broker.protocol.limits import KIB, STREAMS_MAX
from kura_shaper.broker.router.frame_guard import (
    BUDGET_UNITS,
    HEADER_BLOCK_BYTES_MAX,
    SENT_EARNS_UNITS,
    STRANGER_FRAMES_MAX,
    STREAM_EARNS_UNITS,
    FloodError,
    FrameGuard,
)
from kura_shaper.broker.router.http2 import Body, ClientFailedError, Http2Server

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4


def admitted(now_s: list[float]) -> FrameGuard:
    guard = FrameGuard(now_s=lambda: now_s[0])
    guard.admit()
    return guard


@pytest.mark.case("ER70")
def test_streams_that_were_asked_for_cost_a_broker_nothing_however_fast_they_come_and_go() -> None:
    guard = admitted([0.0])
    for _ in range(20 * STREAMS_MAX):
        guard.earn(STREAM_EARNS_UNITS)
        for kind, flags, size in (
            (HEADERS, END_HEADERS, 300),
            (DATA, 0, 16 * KIB),
            (WINDOW_UPDATE, 0, 4),
            (WINDOW_UPDATE, 0, 4),
            (DATA, END_STREAM, 0),
            (RST_STREAM, 0, 4),
        ):
            guard.on_frame(kind, flags, size)
    # A publisher is written to without end, and each frame may be given credit for.
    for _ in range(2 * BUDGET_UNITS):
        guard.earn(SENT_EARNS_UNITS)
        guard.on_frame(WINDOW_UPDATE, 0, 4)
        guard.on_frame(WINDOW_UPDATE, 0, 4)


@pytest.mark.case("ER70")
@pytest.mark.parametrize(
    ("kind", "most"),
    [(SETTINGS, 64), (PING, 2_048), (HEADERS, 8_192), (RST_STREAM, 32_768), (DATA, 32_768), (0x77, 32_768)],
)
def test_frames_that_bring_nothing_use_up_what_fills_again_in_four_seconds(kind: int, most: int) -> None:
    now_s = [0.0]
    guard = admitted(now_s)
    for _ in range(2):
        for _ in range(most):
            guard.on_frame(kind, END_HEADERS if kind == HEADERS else 0, 0)
        with pytest.raises(FloodError):
            guard.on_frame(kind, 0, 0)
        guard._left_units = 0
        now_s[0] += 4.0


@pytest.mark.case("ER70")
def test_a_stranger_has_so_many_frames_of_any_kind_and_no_more_with_time() -> None:
    now_s = [0.0]
    guard = FrameGuard(now_s=lambda: now_s[0])
    for _ in range(STRANGER_FRAMES_MAX):
        guard.on_frame(DATA, 0, 100)
    now_s[0] += 1_000
    with pytest.raises(FloodError):
        guard.on_frame(DATA, 0, 100)


@pytest.mark.case("ER71")
def test_a_header_block_is_counted_from_its_first_frame_to_its_last_one() -> None:
    guard = admitted([0.0])
    for _ in range(3):
        guard.on_frame(HEADERS, 0, 1)
        guard.on_frame(CONTINUATION, END_HEADERS, HEADER_BLOCK_BYTES_MAX - 1)
    guard.on_frame(HEADERS, 0, HEADER_BLOCK_BYTES_MAX)
    with pytest.raises(FloodError):
        guard.on_frame(CONTINUATION, 0, 1)


class Answering:
    """Answers every other request, and hears the bodies of the rest."""

    def __init__(self) -> None:
        self.http = Http2Server(self, max_streams=32, stream_window_bytes=64 * KIB, now_s=lambda: 0.0)
        self.requests = 0

    def on_request(self, http_id: int, headers: dict[str, str]) -> Body | None:
        self.requests += 1
        self.http.admit()
        if self.requests % 2:
            self.http.respond(http_id, 401, [], body=b"no")
            return None
        self.http.respond(http_id, 200)
        return Hearing(self.http, http_id)


class Hearing:
    """A Body."""

    def __init__(self, http: Http2Server, http_id: int) -> None:
        self._http, self._http_id = http, http_id

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        self._http.give_credit(self._http_id, credit_bytes)

    def on_end(self) -> None:
        self._http.finish(self._http_id)
        self._http.release(self._http_id)

    def on_reset(self) -> None:
        self._http.finish(self._http_id)

    def on_window(self) -> None: ...


def spoken(random: Random) -> bytearray:
    """Return what a client says that opens streams, ends some of them, and resets others."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    head = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/"), ("x-a", "b" * 50)]
    for _ in range(8):
        http_id = client.get_next_available_stream_id()
        client.send_headers(http_id, head)
        client.send_data(http_id, random.randbytes(random.randrange(200)))
        match random.randrange(4):
            case 0:
                client.end_stream(http_id)
            case 1:
                client.reset_stream(http_id, h2.errors.ErrorCodes.CANCEL)
            case 2:
                client.increment_flow_control_window(1_000, http_id)
    return bytearray(client.data_to_send())


@pytest.mark.case("ER72")
@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_client_sends_is_a_request_or_an_error_of_its_own(seed: int) -> None:
    random, failed, requests = Random(seed), 0, 0
    for _ in range(100):
        data = spoken(random)
        for _ in range(random.randrange(4)):
            data[random.randrange(24, len(data))] = random.randrange(256)
        answering = Answering()
        http = answering.http
        try:
            while data or http.has_unread:
                size = random.randrange(1, 400)
                http.receive(bytes(data[:size]))
                del data[:size]
        except ClientFailedError:
            failed += 1
        assert http.data_to_send()
        http.break_off()
        http.lose()
        requests += answering.requests
    assert 10 < failed < 95
    assert requests > 100
