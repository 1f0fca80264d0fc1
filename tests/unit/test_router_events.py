"""Dynamo's events in messages, numbers that jump, and events as lines."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kura_shaper.broker.router.dynamo import Event, EventError, EventFault, decode_event, encode_event, shown_payload
from kura_shaper.broker.router.output import WAITING_MAX, LineOutput, _text_line, json_line
from kura_shaper.broker.router.seldom import SeldomLog
from kura_shaper.broker.router.sequences import Arrival, Sequences

EVENT = Event("kv-events", 2**64 - 1, 7, 1_700_000_000_123, b"\x81\xa1k\x01")
# As `rmp_serde::to_vec_named` writes the envelope of EVENT with a field that newer workers have.
ENVELOPE = (
    b"\x86\xacpublisher_id\xcf" + b"\xff" * 8 + b"\xa8sequence\x07\xacpublished_at\xcf\x00\x00\x01\x8b\xcf\xe5\x68\x7b"
    b"\xa5topic\xa9kv-events\xa7payload\xc4\x04\x81\xa1k\x01\xafpublished_at_ns\xcf\x17\x97\x9c\xfe\x36\x2a\x00\x00"
)


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the log reach the test, whatever a command before it had done."""
    monkeypatch.setattr(logging.getLogger("kura_shaper"), "handlers", [])


def message(envelope: bytes = ENVELOPE, *, version: int = 1, length: int | None = None) -> list[bytes]:
    frame = bytes((version,)) + (len(envelope) if length is None else length).to_bytes(4, "big") + envelope
    return [b"kv-events", b"\xff" * 8, (7).to_bytes(8, "big"), frame]


def fault_of(parts: list[bytes]) -> EventFault:
    with pytest.raises(EventError) as raised:
        decode_event(parts)
    return raised.value.fault


@pytest.mark.case("ER15")
def test_an_event_is_read_as_a_worker_writes_it() -> None:
    assert decode_event(message()) == EVENT


@pytest.mark.case("ER15")
def test_what_is_written_is_read_back() -> None:
    assert decode_event(encode_event(EVENT)) == EVENT


@pytest.mark.case("ER44")
@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([], EventFault.PARTS),
        (message()[:3], EventFault.PARTS),
        ([*message(), b""], EventFault.PARTS),
        ([b"t", b"1234567", *message()[2:]], EventFault.PARTS),
        ([b"t" * 2_000, *message()[1:]], EventFault.TOPIC),
        ([b"\xff\xfe", *message()[1:]], EventFault.ENVELOPE),
        ([*message()[:3], b"\x01\0\0"], EventFault.LENGTH),
        (message(version=2), EventFault.VERSION),
        (message(length=len(ENVELOPE) + 1), EventFault.LENGTH),
        (message(length=len(ENVELOPE) - 1), EventFault.ENVELOPE),
        (message(b""), EventFault.ENVELOPE),
        (message(b"\x91" * 100_000), EventFault.ENVELOPE),
        (message(b"\xdf\xff\xff\xff\xff"), EventFault.ENVELOPE),
        (message(b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01"), EventFault.ENVELOPE),
        ([b"kv-events", bytes(8), *message()[2:]], EventFault.MISMATCH),
        ([*message()[:2], bytes(8), message()[3]], EventFault.MISMATCH),
    ],
)
def test_a_message_that_is_no_event_is_told_apart(parts: list[bytes], fault: EventFault) -> None:
    assert fault_of(parts) is fault


@pytest.mark.case("ER44")
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_any_message_is_an_event_or_none(parts: list[bytes]) -> None:
    with pytest.raises(EventError):
        decode_event(parts)


@pytest.mark.case("ER15")
def test_a_payload_is_shown_as_what_it_says_or_as_its_bytes() -> None:
    def shown(payload: bytes) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(msgspec.json.encode(shown_payload(payload)))
        return found

    assert shown(msgspec.msgpack.encode({"blocks": [2**64 - 1], "raw": b"\0"})) == {
        "payload": {"blocks": [2**64 - 1], "raw": "AA=="}
    }
    for odd in (b"", b"\xc1", b"\xd4\x05\x00", b"\x81\x91\x01\x02", b"\x91" * 100_000):
        assert list(shown(odd)) == ["payload_base64"]


# Numbers.


@pytest.mark.case("ER39")
def test_a_number_that_jumps_says_how_many_are_missing() -> None:
    made = Sequences()
    found = [made.note(1, "t", number) for number in (5, 6, 9, 10)]
    assert found == [(Arrival.FIRST, 0), (Arrival.NEXT, 0), (Arrival.AFTER_A_GAP, 2), (Arrival.NEXT, 0)]
    assert made.known[1, "t"].missed == 2


@pytest.mark.case("ER45")
def test_each_publisher_and_topic_is_counted_for_itself() -> None:
    made = Sequences()
    assert {made.note(publisher, topic, 3)[0] for publisher in (1, 2) for topic in "ab"} == {Arrival.FIRST}


@pytest.mark.case("ER40")
def test_a_number_that_is_not_higher_is_a_repetition_of_who_took_over_and_a_new_beginning_else() -> None:
    made = Sequences()
    for number in (8, 9, 10):
        made.note(1, "t", number)
    made.begin_repeats()
    assert [made.note(1, "t", number)[0] for number in (9, 10, 11)] == [
        *(Arrival.DUPLICATE, Arrival.DUPLICATE, Arrival.NEXT)
    ]
    # In order: whoever has come beyond what was the last number then repeats nothing any more.
    assert [made.note(1, "t", number)[0] for number in (0, 1)] == [Arrival.RESTARTED, Arrival.NEXT]
    assert made.known[1, "t"].restarts == 1


@pytest.mark.case("ER92")
def test_when_the_stream_that_took_over_is_lost_nothing_is_a_repetition() -> None:
    made = Sequences()
    for number in (8, 9, 10):
        made.note(1, "t", number)
    made.begin_repeats()
    made.end_repeats()
    assert [made.note(1, "t", number)[0] for number in (0, 1)] == [Arrival.RESTARTED, Arrival.NEXT]


@pytest.mark.case("ER92")
def test_a_publisher_that_begins_anew_after_a_single_event_loses_none() -> None:
    assert told(0, 0, 1) == [Arrival.FIRST, Arrival.RESTARTED, Arrival.NEXT]


def told(*numbers: int, repeats: bool = False) -> list[Arrival]:
    made = Sequences()
    found = []
    for number in numbers:
        if repeats:
            made.begin_repeats()
        found.append(made.note(1, "t", number)[0])
    return found


@pytest.mark.case("ER41")
def test_a_number_that_was_missing_and_comes_late_is_no_new_beginning() -> None:
    made = Sequences()
    for number in (0, 5):
        made.note(1, "t", number)
    assert [made.note(1, "t", number)[0] for number in (3, 1, 6)] == [*(Arrival.LATE, Arrival.LATE, Arrival.NEXT)]
    # What came late once is there, so that it is none of those that are missing any more.
    made.begin_repeats()
    assert made.note(1, "t", 3)[0] is Arrival.DUPLICATE
    assert made.note(1, "t", 4)[0] is Arrival.LATE
    known = made.known[1, "t"]
    assert (known.missed, known.late, known.gaps, known.duplicates, known.restarts) == (4, 3, 1, 1, 0)


@pytest.mark.case("ER42")
def test_a_publisher_that_began_anew_has_no_numbers_missing_of_before() -> None:
    assert told(10, 15, 0, 1, 12, 13) == [
        *(Arrival.FIRST, Arrival.AFTER_A_GAP, Arrival.RESTARTED, Arrival.NEXT, Arrival.AFTER_A_GAP, Arrival.NEXT)
    ]
    # Of gaps without end the last few are known.
    assert told(*range(0, 100, 2), 1, 0)[-2:] == [Arrival.RESTARTED, Arrival.RESTARTED]
    assert told(*range(0, 100, 2), 97)[-1] is Arrival.LATE


@pytest.mark.case("ER43")
def test_after_the_last_of_all_numbers_comes_0() -> None:
    last = 2**64 - 1
    assert told(last - 1, last, 0, 1) == [Arrival.FIRST, Arrival.NEXT, Arrival.NEXT, Arrival.NEXT]
    assert told(last, 0, last, repeats=True)[-1] is Arrival.DUPLICATE
    made = Sequences()
    made.note(1, "t", last - 1)
    assert made.note(1, "t", 2) == (Arrival.AFTER_A_GAP, 3)
    assert [made.note(1, "t", number)[0] for number in (0, last, 1, 3)] == [
        *(Arrival.LATE, Arrival.LATE, Arrival.LATE, Arrival.NEXT)
    ]
    # Far from its end a lower number is a publisher that began anew.
    assert told(2**63, 0) == [Arrival.FIRST, Arrival.RESTARTED]


@pytest.mark.case("ER41")
@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.integers(1, 60))
def test_any_numbers_are_told_and_never_missed_below_none(numbers: list[int], takeover: int) -> None:
    made = Sequences()
    for place, number in enumerate(numbers):
        if place % takeover == 0:
            made.begin_repeats()
        assert made.note(1, "t", number)[1] >= 0
    for known in made.known.values():
        assert 0 <= known.late <= known.missed
        assert known.received + known.duplicates == len(numbers)


@pytest.mark.case("ER45")
def test_of_publishers_without_end_the_longest_unheard_is_forgotten() -> None:
    made = Sequences(most=100)
    for publisher in range(10_000):
        made.note(publisher, "t", 0)
    assert len(made.known) == 100
    assert made.forgotten == 9_900


# Lines.


def written(event: Event, *, as_json: bool) -> bytes:
    stream = io.BytesIO()
    output = LineOutput(stream, as_json=as_json)
    assert output.put(event, endpoint="tcp://10.0.0.1:5", arrival=Arrival.AFTER_A_GAP, missed=3)
    output.close()
    return stream.getvalue()


@pytest.mark.case("ER16")
def test_an_event_is_one_object_in_one_line() -> None:
    line = written(EVENT, as_json=True)
    assert line.endswith(b"}\n")
    assert json.loads(line) == {
        "endpoint": "tcp://10.0.0.1:5",
        "topic": "kv-events",
        "publisher_id": 2**64 - 1,
        "sequence": 7,
        "published_at_ms": 1_700_000_000_123,
        "arrival": "after a gap",
        "missed_before": 3,
        "dropped_before": 0,
        "payload": {"k": 1},
    }


@pytest.mark.case("ER96")
@given(st.text(max_size=20), st.text(max_size=20))
@example("\x1b[2J\nx\u202e", "")
@example("\x7f\x9b\u2066\U000e0041\U0001f600\u2028", "\x7f")
def test_a_hostile_event_stays_one_line_and_off_the_terminal(topic: str, said: str) -> None:
    hostile = Event(topic, 1, 1, 0, msgspec.msgpack.encode({"said": said}))
    line = json_line(hostile, "tcp://10.0.0.1:5", Arrival.NEXT, 0)
    assert line.decode()[:-1].isprintable()
    found = json.loads(line)
    assert (found["topic"], found["payload"]["said"]) == (topic, said)
    assert _text_line(hostile, "tcp://10.0.0.1:5", Arrival.NEXT, 0, 0).decode()[:-1].isprintable()


@pytest.mark.case("ER96")
def test_what_is_printable_is_printed_as_it_is() -> None:
    assert '"topic":"ключ 鍵"'.encode() in written(Event("ключ 鍵", 1, 1, 0, b""), as_json=True)


class Stuck(io.BytesIO):
    """A reader that reads nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.is_stuck = threading.Event(), threading.Event()

    def writelines(self, lines: Any) -> None:
        self.is_stuck.set()
        self.goes_on.wait(10)
        super().writelines(lines)


@pytest.mark.case("ER18")
def test_a_reader_that_reads_nothing_costs_events_beyond_a_bound_and_no_waiting() -> None:
    stream = Stuck()
    output = LineOutput(stream, as_json=True)
    output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)
    stream.is_stuck.wait(10)
    taken = sum(output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0) for _ in range(WAITING_MAX + 100))
    assert taken == WAITING_MAX
    stream.goes_on.set()
    output.close()
    assert stream.getvalue().count(b"\n") == WAITING_MAX + 1


@pytest.mark.case("ER91")
@pytest.mark.parametrize("as_json", [True, False])
def test_the_next_line_says_how_many_events_were_dropped_before_it(
    as_json: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stuck()
    output = LineOutput(stream, as_json=as_json)

    def put() -> bool:
        return output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)

    put()
    stream.is_stuck.wait(10)
    assert sum(put() for _ in range(WAITING_MAX + 7)) == WAITING_MAX
    stream.goes_on.set()
    while not put():
        pass
    put()
    output.close()
    *_, before, next_one, last = stream.getvalue().splitlines()
    if as_json:
        told = [json.loads(each)["dropped_before"] for each in (before, next_one, last)]
        assert told[0] == told[2] == 0
        assert told[1] >= 7
    else:
        assert b"dropped" not in before + last
        assert b" dropped before it)" in next_one
    # Once, however many they are.
    assert [each.message for each in caplog.records].count("events_dropped") == 1


@pytest.mark.case("ER91")
def test_events_that_no_line_follows_are_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stuck()
    output = LineOutput(stream, as_json=True, closes_within_s=0)
    output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)
    stream.is_stuck.wait(10)
    for _ in range(WAITING_MAX + 3):
        output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)
    output.close()
    stream.goes_on.set()
    assert caplog.records[-1].fields["at_the_end"] == 3  # type: ignore[attr-defined]


class Gone(io.BytesIO):
    """A reader that has left."""

    def writelines(self, lines: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.case("ER18")
def test_a_reader_that_left_is_no_error() -> None:
    output = LineOutput(Gone(), as_json=True)
    output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)
    output.close()
    assert output.is_broken
    assert not output.put(EVENT, endpoint="e", arrival=Arrival.NEXT, missed=0)
    told: list[str] = []
    output.when_gone(told.append)
    assert told == [os.strerror(errno.EPIPE)]


@pytest.mark.case("ER93")
def test_the_first_of_a_kind_in_a_minute_is_logged_with_how_many_were_not(caplog: pytest.LogCaptureFixture) -> None:
    times_s = iter((0.0, 1.0, 59.0, 60.0, 61.0, 61.0))
    made = SeldomLog(now_s=lambda: next(times_s))
    for kind in "aaaaab":
        made.warn("refused", kind, peer="p")
    fields = [each.fields for each in caplog.records]  # type: ignore[attr-defined]
    assert fields == [{"peer": "p", "suppressed": 0}, {"peer": "p", "suppressed": 2}, {"peer": "p", "suppressed": 0}]
