"""Dynamo's events as they stand in messages of ZeroMQ.

A message has four parts: the topic; the publisher's id and its sequence number, 8 bytes each, big
endian; and a frame: one byte version, 4 bytes length, and an envelope in MessagePack, a map of
`publisher_id`, `sequence`, `published_at` (milliseconds since 1970), `topic` and `payload`
(https://github.com/ai-dynamo/dynamo, lib/runtime/src/transports/event_plane). The ids stand in it twice, and
differ only in what is forged or broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

FRAME_VERSION = 1
_PARTS, _ID_BYTES, _HEADER_BYTES = 4, 8, 5
_TOPIC_BYTES_MAX = 1024
_UINT64_MAX = 2**64 - 1


class EventFault(StrEnum):
    """Why a message is no event."""

    PARTS = "parts"
    TOPIC = "topic"
    VERSION = "version"
    LENGTH = "length"
    ENVELOPE = "envelope"
    MISMATCH = "mismatch"


class EventError(Exception):
    """A message that is no event. The message has nothing of what it held."""

    def __init__(self, fault: EventFault) -> None:
        super().__init__(f"no event of Dynamo: {fault}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Event:
    """One event. The payload is MessagePack by convention, and kept as it is."""

    topic: str
    publisher_id: int
    sequence: int
    published_at_ms: int
    payload: bytes


class _Envelope(msgspec.Struct):
    publisher_id: int
    sequence: int
    published_at: int
    payload: bytes


_envelopes = msgspec.msgpack.Decoder(_Envelope)


def decode_event(parts: Sequence[bytes]) -> Event:
    """Return the event that a message holds. Raises EventError."""
    if len(parts) != _PARTS or len(parts[1]) != _ID_BYTES or len(parts[2]) != _ID_BYTES:
        raise EventError(EventFault.PARTS)
    topic, frame = parts[0], parts[3]
    if len(topic) > _TOPIC_BYTES_MAX:
        raise EventError(EventFault.TOPIC)
    if len(frame) < _HEADER_BYTES:
        raise EventError(EventFault.LENGTH)
    if frame[0] != FRAME_VERSION:
        raise EventError(EventFault.VERSION)
    end = _HEADER_BYTES + int.from_bytes(frame[1:_HEADER_BYTES], "big")
    if end > len(frame):
        raise EventError(EventFault.LENGTH)
    try:
        envelope = _envelopes.decode(memoryview(frame)[_HEADER_BYTES:end])
        text = topic.decode()
    # Depth without end is a RecursionError, bytes that are no UTF-8 are a ValueError.
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise EventError(EventFault.ENVELOPE) from error
    publisher_id, sequence = int.from_bytes(parts[1], "big"), int.from_bytes(parts[2], "big")
    if (envelope.publisher_id, envelope.sequence) != (publisher_id, sequence):
        raise EventError(EventFault.MISMATCH)
    if not 0 <= envelope.published_at <= _UINT64_MAX:
        raise EventError(EventFault.ENVELOPE)
    return Event(text, publisher_id, sequence, envelope.published_at, envelope.payload)


def encode_event(event: Event) -> tuple[bytes, ...]:
    """Return an event as a message, as a worker of Dynamo sends it."""
    envelope = msgspec.msgpack.encode(
        {
            "publisher_id": event.publisher_id,
            "sequence": event.sequence,
            "published_at": event.published_at_ms,
            "topic": event.topic,
            "payload": event.payload,
        }
    )
    frame = bytes((FRAME_VERSION,)) + len(envelope).to_bytes(4, "big") + envelope
    return (event.topic.encode(), event.publisher_id.to_bytes(8, "big"), event.sequence.to_bytes(8, "big"), frame)


def shown_payload(payload: bytes) -> dict[str, Any]:
    """Return a payload for JSON: what its MessagePack says, or the bytes in base64 where that is none."""
    try:
        found = msgspec.msgpack.decode(payload)
        # What JSON can't hold (keys that are lists, extensions) is found out here, and not while it is written.
        return {"payload": msgspec.Raw(msgspec.json.encode(found))}
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
        return {"payload_base64": payload}
