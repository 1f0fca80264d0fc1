"""The golden bytes of event bus v1 in tests/data/bus_v1, and how they are made.

`python tests/unit/bus_corpus.py` writes them anew; a test holds the files to what this makes.
The sessions are said as a router's author would see them: what comes from the broker, what goes to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kura_shaper.broker.protocol.codec import encode, encode_object
from kura_shaper.broker.protocol.codes import RefusalCode
from kura_shaper.broker.protocol.frames import (
    Drain,
    Draining,
    Error,
    Frame,
    Heartbeat,
    Hello,
    OtherTarget,
    Software,
    StreamClosed,
    StreamOpened,
    StreamRefused,
    Subscribe,
    Unsubscribe,
    Welcome,
    WelcomeLimits,
    ZmqEndpoint,
    object_of,
    sender_of,
)
from kura_shaper.broker.protocol.schema import bus_schema

DATA = Path(__file__).parents[1] / "data" / "bus_v1"
HELLO = Hello(
    client_id="gpu-a-1",
    instance_id="6f1c0d5e9a7b4c3d8e2f1a0b9c8d7e6f",
    kubernetes_namespace="gpu",
    dynamo_namespaces=("dynamo",),
    software=Software("kura-shaper", "0.1.0"),
)
WELCOME = Welcome(session_id="s-01", limits=WelcomeLimits(64, 262_144))
PUBLISHER = ZmqEndpoint("tcp://10.244.1.7:41235", "dynamo")
VALID: dict[str, Frame] = {
    "hello": HELLO,
    "welcome": WELCOME,
    "subscribe": Subscribe("k1", PUBLISHER),
    "stream_opened": StreamOpened("k1"),
    "subscribe_announced_source": Subscribe("k2", OtherTarget("announced_source")),
    "stream_refused": StreamRefused("k2", RefusalCode.UNSUPPORTED_TARGET, retryable=False),
    "stream_refused_with_message": StreamRefused.of("k-3_Z", RefusalCode.CONNECT_FAILED, "no publisher answered"),
    "heartbeat": Heartbeat(1, 1),
    "heartbeat_bare": Heartbeat(2**53 - 1),
    "heartbeat_full": Heartbeat(2, 0, 64 << 20),
    "stream_closed": StreamClosed("k1", "buffer_overflow", 262_080, 71),
    "subscribe_lowered": Subscribe("k4", ZmqEndpoint("tcp://[fd00::7]:5557", "team-ä"), 16_384),
    "unsubscribe": Unsubscribe("k1"),
    "unsubscribe_reason": Unsubscribe("k1", "worker is gone"),
    "drain": Drain("rebalance", 20_000),
    "drain_of_a_later_version": Drain("defragmentation", 0),
    "draining": Draining("shutdown", 25_000),
    "error": Error("superseded", "client_id connected elsewhere"),
    "error_overloaded": Error("overloaded", "", 2_000),
}
_BASE = {name: object_of(frame) for name, frame in VALID.items()}


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return _BASE[name] | changes


def _framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def _welcome_limits(**changes: Any) -> dict[str, Any]:
    return _with("welcome", limits=_BASE["welcome"]["limits"] | changes)


# Each is a violation whatever came before it; the default limit of 65,536 bytes is in force.
INVALID_OBJECTS: dict[str, dict[str, Any]] = {
    "no type": {},
    "type is a number": {"type": 7},
    "seq is a float": _with("heartbeat", seq=1.0),
    "seq is true": _with("heartbeat", seq=True),
    "seq is negative": _with("heartbeat", seq=-1),
    "seq is a text": _with("heartbeat", seq="1"),
    "seq is missing": {"type": "heartbeat"},
    "optional field is null": _with("heartbeat", open_streams=None),
    "stream id is a path": _with("unsubscribe", stream_id="../x"),
    "stream id is empty": _with("unsubscribe", stream_id=""),
    "stream id of 65 characters": _with("unsubscribe", stream_id="a" * 65),
    "stream id with a line end": _with("unsubscribe", stream_id="a\n"),
    "target is a text": _with("subscribe", target="tcp://10.0.0.1:1"),
    "target without a kind": _with("subscribe", target={"endpoint": "tcp://10.0.0.1:1", "dynamo_namespace": "d"}),
    "zmq target without an endpoint": _with("subscribe", target={"kind": "zmq_endpoint", "dynamo_namespace": "d"}),
    "endpoint is a list": _with("subscribe", target=_BASE["subscribe"]["target"] | {"endpoint": []}),
    "stream buffer below the least": _with("subscribe", max_stream_buffer_bytes=16_383),
    "welcome of no streams": _welcome_limits(max_streams=0),
    "welcome of 4097 streams": _welcome_limits(max_streams=4097),
    "welcome of a buffer below the least": _welcome_limits(max_stream_buffer_bytes=16_383),
    "welcome of a buffer above the most": _welcome_limits(max_stream_buffer_bytes=(1 << 20) + 1),
    "welcome of frames below the least": _welcome_limits(max_frame_bytes=4_095),
    "welcome of frames above the most": _welcome_limits(max_frame_bytes=(1 << 20) + 1),
    "welcome whose session id is no header": _with("welcome", session_id="a\r\nb: c"),
    "welcome that beats too often": _with("welcome", heartbeat_interval_ms=999),
    "welcome that is idle too soon": _with("welcome", heartbeat_interval_ms=10_000, idle_timeout_ms=19_999),
    "hello of no namespaces": _with("hello", dynamo_namespaces=[]),
    "hello with a namespace twice": _with("hello", dynamo_namespaces=["a", "a"]),
    "hello whose versions are the wrong way round": _with("hello", protocol_min=2, protocol_max=1),
    "deadline above an hour": _with("drain", deadline_ms=3_600_001),
    "half a surrogate pair": _with("unsubscribe", reason="\ud800"),
}
INVALID_BYTES: dict[str, bytes] = {
    "length 0": bytes(4),
    "length 1": b"\0\0\0\1{",
    "length above the limit": (65_537).to_bytes(4, "big"),
    "length of 4 GiB": b"\xff\xff\xff\xff",
    "no JSON": _framed(b"{]"),
    "no UTF-8": _framed(b'{"type":"heartbeat\xff","seq":1}'),
    "an array": _framed(b"[]"),
    "a text": _framed(b'"heartbeat"'),
    "a key twice": _framed(b'{"type":"heartbeat","seq":1,"seq":2}'),
    "an inner key twice": _framed(b'{"type":"heartbeat","seq":1,"x":{"a":1,"a":2}}'),
    "not a number": _framed(b'{"type":"heartbeat","seq":1,"x":NaN}'),
    "infinity": _framed(b'{"type":"heartbeat","seq":1,"x":-Infinity}'),
    "a number beyond 2^53-1": _framed(b'{"type":"heartbeat","seq":9007199254740992}'),
    "a number of 5000 digits": _framed(b'{"type":"heartbeat","seq":1,"x":' + b"9" * 5_000 + b"}"),
    "17 levels deep": _framed(b'{"type":"heartbeat","seq":1,"x":' + b"[" * 16 + b"]" * 16 + b"}"),
    "2,000 levels deep": _framed(b'{"type":"heartbeat","seq":1,"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}"),
}
# Ignored, or taken in spite of what is not known.
TOLERATED: dict[str, bytes] = {
    "unknown type": encode_object({"type": "announce", "source": "b0"}),
    "unknown field": encode_object(_with("heartbeat", mood={"a": [1, 2.5, None]})),
    "unknown inner field": encode_object(_welcome_limits(max_color=3)),
    "16 levels deep": _framed(b'{"type":"heartbeat","seq":1,"x":' + b"[" * 15 + b"]" * 15 + b"}"),
    "blanks between": _framed(b' { "type" : "heartbeat" , "seq" : 1 } '),
}
# What the two ends say in whole sessions.
SESSIONS: dict[str, tuple[str, ...]] = {
    "one stream that the publisher ends, and one that is refused": (
        *("hello", "welcome", "subscribe", "stream_opened", "subscribe_announced_source", "stream_refused"),
        *("heartbeat", "stream_closed"),
    ),
    "a rebalance": ("hello", "welcome", "subscribe", "stream_opened", "drain", "unsubscribe"),
    "a broker that is stopped": ("hello", "welcome", "draining"),
    "a broker that another one replaces": ("hello", "welcome", "error"),
}


def _json_framed(value: dict[str, Any]) -> bytes:
    return _framed(json.dumps(value).encode())


def made() -> dict[str, Any]:
    """Return every file by its name, as JSON has it."""
    frames = {name: encode(frame) for name, frame in VALID.items()}
    bad = {name: _json_framed(value) for name, value in INVALID_OBJECTS.items()} | INVALID_BYTES
    return {
        "schema.json": bus_schema(),
        "valid.json": [
            {"name": name, "sent_by": sender_of(frame).value, "hex": frames[name].hex(), "object": object_of(frame)}
            for name, frame in VALID.items()
        ],
        "invalid.json": [{"name": name, "hex": data.hex()} for name, data in bad.items()],
        "tolerated.json": [{"name": name, "hex": data.hex()} for name, data in TOLERATED.items()],
        "sessions.json": [
            {
                "name": name,
                "frames": [{"from": sender_of(VALID[each]).value, "hex": frames[each].hex()} for each in steps],
            }
            for name, steps in SESSIONS.items()
        ],
    }


def text_of(content: Any) -> str:
    """Return a file's text."""
    return json.dumps(content, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    for file, content in made().items():
        (DATA / file).write_text(text_of(content))
