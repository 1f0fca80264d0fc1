"""Frames as bytes: what both ends write and read, what they refuse, and the files that say the same to others."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from bus_corpus import DATA, HELLO, INVALID_BYTES, INVALID_OBJECTS, TOLERATED, VALID, WELCOME, made, text_of

from kura_shaper.broker.protocol.codec import FrameDecoder, UnknownFrame, encode, encode_object
from kura_shaper.broker.protocol.codes import CloseCode, RefusalCode, SessionCode, label_of
from kura_shaper.broker.protocol.errors import ProtocolViolationError
from kura_shaper.broker.protocol.frames import (
    Frame,
    Heartbeat,
    OtherTarget,
    StreamClosed,
    StreamRefused,
    Subscribe,
    object_of,
)

VALIDATOR = jsonschema.Draft202012Validator(made()["schema.json"])
# Rules between two fields and on how a value is written, which JSON Schema can't say; and `$`, which in Python's
# regular expressions stands before a line end as well, in those of JavaScript not.
BEYOND_SCHEMA = {
    "seq is a float",
    "stream id with a line end",
    "welcome that is idle too soon",
    "hello whose versions are the wrong way round",
    "half a surrogate pair",
}
# The frames of the specification's example, whole.
EXAMPLES = [
    (
        "00000138",
        (
            b'{"type":"hello","protocol_min":1,"protocol_max":1,"role":"broker","client_id":"gpu-a-1","instance_id":'
            b'"6f1c0d5e9a7b4c3d8e2f1a0b9c8d7e6f","kubernetes_namespace":"gpu","dynamo_namespaces":["dynamo"],"limits":'
            b'{"max_streams":256,"max_stream_buffer_bytes":1048576},"software":{"name":"kura-shaper","version":"0.1.0"}}'
        ),
        HELLO,
    ),
    (
        "000000c6",
        (
            b'{"type":"welcome","protocol_version":1,"session_id":"s-01","limits":{"max_streams":64,'
            b'"max_stream_buffer_bytes":262144,"max_frame_bytes":65536},"heartbeat_interval_ms":10000,'
            b'"idle_timeout_ms":30000}'
        ),
        WELCOME,
    ),
    (
        "00000086",
        (
            b'{"type":"subscribe","stream_id":"k1","target":{"kind":"zmq_endpoint","endpoint":"tcp://10.244.1.7:41235",'
            b'"dynamo_namespace":"dynamo"}}'
        ),
        VALID["subscribe"],
    ),
    ("00000029", b'{"type":"stream_opened","stream_id":"k1"}', VALID["stream_opened"]),
    (
        "00000058",
        b'{"type":"stream_refused","stream_id":"k2","code":"unsupported_target","retryable":false}',
        VALID["stream_refused"],
    ),
    ("0000002d", b'{"type":"heartbeat","seq":1,"open_streams":1}', VALID["heartbeat"]),
    (
        "00000072",
        (
            b'{"type":"stream_closed","stream_id":"k1","code":"buffer_overflow","bytes_to_router":262080,'
            b'"bytes_to_upstream":71}'
        ),
        VALID["stream_closed"],
    ),
    ("00000039", b'{"type":"drain","reason":"rebalance","deadline_ms":20000}', VALID["drain"]),
    ("0000003b", b'{"type":"draining","reason":"shutdown","deadline_ms":25000}', VALID["draining"]),
    (
        "0000004e",
        b'{"type":"error","code":"superseded","message":"client_id connected elsewhere"}',
        VALID["error"],
    ),
]


def read(data: bytes, *, limit: int = 65_536) -> Frame | UnknownFrame | None:
    decoder = FrameDecoder(max_frame_bytes=limit)
    decoder.feed(data)
    return decoder.next_frame()


@pytest.mark.parametrize(("prefix", "payload", "frame"), EXAMPLES, ids=lambda each: "")
def test_the_examples_of_the_specification_are_read_and_written_to_the_byte(
    prefix: str, payload: bytes, frame: Frame
) -> None:
    assert encode(frame) == bytes.fromhex(prefix) + payload
    assert read(encode(frame)) == frame


def test_a_target_that_no_broker_serves_is_a_target_all_the_same() -> None:
    wanted = {"type": "subscribe", "stream_id": "k2", "target": {"kind": "announced_source", "source": "b0"}}
    assert read(encode_object(wanted)) == Subscribe("k2", OtherTarget("announced_source"))


@pytest.mark.parametrize("name", VALID)
def test_every_frame_reads_back_as_it_was_written_and_follows_the_schema(name: str) -> None:
    assert read(encode(VALID[name])) == VALID[name]
    VALIDATOR.validate(json.loads(encode(VALID[name])[4:]))


@pytest.mark.parametrize("name", INVALID_OBJECTS)
@pytest.mark.case("EB50")
def test_an_object_that_is_no_frame_is_refused_by_decoder_and_schema(name: str) -> None:
    payload = json.dumps(INVALID_OBJECTS[name]).encode()
    with pytest.raises(ProtocolViolationError):
        read(len(payload).to_bytes(4, "big") + payload)
    assert VALIDATOR.is_valid(json.loads(payload)) == (name in BEYOND_SCHEMA)


@pytest.mark.parametrize("name", INVALID_BYTES)
@pytest.mark.case("EB50")
def test_bytes_that_are_no_frame_are_refused(name: str) -> None:
    with pytest.raises(ProtocolViolationError) as caught:
        read(INVALID_BYTES[name])
    assert caught.value.session_code is SessionCode.PROTOCOL_ERROR
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", TOLERATED)
@pytest.mark.case("EB51")
def test_what_a_later_version_may_say_is_no_error(name: str) -> None:
    assert read(TOLERATED[name]) is not None


@pytest.mark.case("EB51")
def test_an_unknown_type_is_told_by_its_name_and_an_unknown_field_is_not_there() -> None:
    assert read(TOLERATED["unknown type"]) == UnknownFrame("announce")
    assert read(TOLERATED["unknown inner field"]) == WELCOME


@pytest.mark.case("EB50")
def test_frames_may_be_cut_between_any_two_bytes() -> None:
    data = b"".join(map(encode, VALID.values()))
    for size in (1, 2, 3, 5, 7, 1000, len(data)):
        decoder, found = FrameDecoder(), []
        for at in range(0, len(data), size):
            decoder.feed(data[at : at + size])
            while (frame := decoder.next_frame()) is not None:
                found.append(frame)
        assert found == list(VALID.values())


def test_a_length_is_refused_before_its_bytes_are_there() -> None:
    decoder = FrameDecoder(max_frame_bytes=4_096)
    decoder.feed((4_097).to_bytes(4, "big"))
    with pytest.raises(ProtocolViolationError):
        decoder.next_frame()


def test_a_frame_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    payload = b'{"type":"heartbeat","seq":1}'.ljust(65_536)
    assert read(len(payload).to_bytes(4, "big") + payload) == Heartbeat(1)
    with pytest.raises(ProtocolViolationError):
        read((len(payload) + 1).to_bytes(4, "big") + payload + b" ")


def test_a_limit_that_changes_counts_from_the_next_frame_on() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode(HELLO) * 2)
    assert decoder.next_frame() == HELLO
    decoder.max_frame_bytes = 64
    with pytest.raises(ProtocolViolationError):
        decoder.next_frame()


@pytest.mark.parametrize(
    "frame",
    [
        Heartbeat(-1),
        Subscribe("a/b", OtherTarget("x")),
        StreamRefused("k", "Not A Code", retryable=True),
        StreamRefused("k", "internal", retryable=True, message="x" * 257),
    ],
)
def test_what_the_other_end_would_refuse_is_never_written(frame: Frame) -> None:
    with pytest.raises(ProtocolViolationError):
        encode(frame)


def test_a_refusal_says_whether_it_may_be_tried_again_and_keeps_its_message_short() -> None:
    made_of = {code: StreamRefused.of("k", code, "x" * 1000) for code in RefusalCode}
    assert {code for code, frame in made_of.items() if not frame.retryable} == {
        RefusalCode.DUPLICATE_STREAM,
        RefusalCode.UNSUPPORTED_TARGET,
        RefusalCode.INVALID_TARGET,
        RefusalCode.NAMESPACE_NOT_COVERED,
        RefusalCode.ADDRESS_NOT_ALLOWED,
        RefusalCode.STREAM_REJECTED,
    }
    assert all(len(frame.message or "") == 256 for frame in made_of.values())


def test_a_code_of_a_later_version_is_kept_and_its_label_is_unknown() -> None:
    frame = read(encode_object(object_of(VALID["stream_closed"]) | {"code": "quota_exceeded"}))
    assert isinstance(frame, StreamClosed)
    assert label_of(frame.code, CloseCode) == "unknown"
    assert label_of("upstream_closed", CloseCode) == "upstream_closed"


@pytest.mark.parametrize("file", made())
def test_the_published_files_say_what_the_code_does(file: str) -> None:
    assert (DATA / file).read_text() == text_of(made()[file]), "python tests/unit/bus_corpus.py writes them anew"


def test_published_frames_read_as_the_objects_beside_them() -> None:
    found: list[dict[str, Any]] = json.loads((DATA / "valid.json").read_text())
    for each in found:
        frame = read(bytes.fromhex(each["hex"]))
        assert frame is not None
        assert not isinstance(frame, UnknownFrame)
        assert object_of(frame) | {} == each["object"] | _tuples(each["object"])


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(item) for key, item in value.items() if isinstance(item, list)}
