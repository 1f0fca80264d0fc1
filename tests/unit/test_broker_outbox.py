"""Who is framed next: the session first, streams in turn, small pieces together, and nobody without room."""

from __future__ import annotations

from kura_shaper.broker.outbox import Outbox
from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.limits import KIB, MIB

SESSION = 1


class Http:
    """A connection with windows that a test sets."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.data_room_bytes, self.frame_bytes_max = MIB, 64 * KIB
        self.rooms: dict[int, int] = {}

    def stream_room_bytes(self, http_id: int) -> int:
        return self.rooms.get(http_id, MIB)

    def send(self, http_id: int, data: bytes) -> None:
        self.sent.append((http_id, len(data)))
        if http_id in self.rooms:
            self.rooms[http_id] -= len(data)
        if http_id != SESSION:
            self.data_room_bytes -= len(data)


class Stream:
    """A stream with something to send."""

    def __init__(self, http_id: int, *pieces: int) -> None:
        self.http_id, self.sent_bytes, self.drained = http_id, 0, 0
        self.buffer = StreamBuffer(MIB, Budget())
        for size in pieces:
            assert self.buffer.put(bytes(size))

    def on_drained(self) -> None:
        self.drained += 1


def outbox(http: Http, *streams: Stream) -> Outbox:
    made = Outbox(http)
    made.begin_session(SESSION)
    for stream in streams:
        made.put(stream)
        made.put(stream)  # twice is once
    return made


def test_streams_take_turns_of_16_kib() -> None:
    http = Http()
    streams = [Stream(3, 40 * KIB), Stream(5, 40 * KIB), Stream(7, 10)]
    outbox(http, *streams).fill(MIB)
    assert http.sent == [
        *((3, 16 * KIB), (5, 16 * KIB), (7, 10), (3, 16 * KIB), (5, 16 * KIB)),
        *((3, 8 * KIB), (5, 8 * KIB)),
    ]
    assert [(stream.drained, stream.sent_bytes) for stream in streams] == [(1, 40 * KIB), (1, 40 * KIB), (1, 10)]


def test_a_stream_that_is_ready_alone_takes_whole_frames_of_many_pieces() -> None:
    http = Http()
    outbox(http, Stream(3, *[100] * 1_500)).fill(MIB)
    assert http.sent == [(3, 64 * KIB), (3, 64 * KIB), (3, 150_000 - 128 * KIB)]


def test_the_session_goes_first_and_also_when_data_has_no_room() -> None:
    http = Http()
    http.data_room_bytes = 0
    made = outbox(http, Stream(3, 10))
    made.put_session(bytes(100))
    assert made.fill(MIB) == 0
    assert http.sent == [(SESSION, 100)]
    http.data_room_bytes = 4
    made.put_session(bytes(5))
    assert made.fill(MIB) == 4
    assert http.sent[1:] == [(SESSION, 5), (3, 4)]


def test_what_the_session_has_to_say_waits_for_its_stream_and_its_window() -> None:
    http = Http()
    made = Outbox(http)
    made.put_session(bytes(100))
    made.fill(MIB)
    assert http.sent == []
    http.rooms[SESSION] = 60
    made.begin_session(SESSION)
    made.fill(MIB)
    assert (http.sent, made.session_bytes) == ([(SESSION, 60)], 40)


def test_a_stream_without_room_waits_apart_and_holds_nobody_up() -> None:
    http = Http()
    http.rooms[3] = 0
    stuck, free = Stream(3, 10), Stream(5, 10)
    made = outbox(http, stuck, free)
    assert made.fill(MIB) == 10
    assert http.sent == [(5, 10)]
    http.rooms[3] = 10
    assert made.fill(MIB) == 0  # until it is said that there is room
    made.put(stuck)
    assert made.fill(MIB) == 10


def test_a_batch_ends_where_it_should_and_goes_on_with_the_next_stream() -> None:
    http = Http()
    made = outbox(http, Stream(3, 64 * KIB), Stream(5, 64 * KIB))
    assert made.fill(20 * KIB) == 32 * KIB
    assert made.fill(1) == 16 * KIB
    assert [http_id for http_id, _ in http.sent] == [3, 5, 3]


def test_a_stream_that_is_removed_sends_no_more() -> None:
    http = Http()
    stream = Stream(3, 10)
    made = outbox(http, stream)
    made.remove(stream)
    made.remove(stream)
    assert made.fill(MIB) == 0
