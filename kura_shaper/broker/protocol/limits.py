"""The numbers of event bus v1: bounds, defaults and deadlines, each with its unit in its name."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 1
MEDIA_TYPE = "application/vnd.continuum.bus.v1"
STREAM_MEDIA_TYPE = "application/octet-stream"
SESSION_PATH = "/bus/v1/session"
STREAMS_PATH = "/bus/v1/streams/"

KIB, MIB = 1 << 10, 1 << 20
MS_NS, SECOND_NS = 1_000_000, 1_000_000_000
# What every JSON reader keeps exactly (RFC 8259, section 6).
INTEGER_MAX = 2**53 - 1

FRAME_BYTES_MIN, FRAME_BYTES_MAX = 4 * KIB, MIB
FRAME_BYTES_BEFORE_WELCOME = 64 * KIB
JSON_DEPTH_MAX = 16

STREAMS_MAX, STREAMS_DEFAULT = 4096, 256
STREAM_BUFFER_BYTES_MIN, STREAM_BUFFER_BYTES_MAX = 16 * KIB, MIB
SESSION_BUFFER_BYTES = 64 * MIB
CHUNK_OVERHEAD_BYTES = 64
# How far a router may send ahead of a publisher's socket.
STREAM_WINDOW_BYTES = 64 * KIB

HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX, HEARTBEAT_MS_DEFAULT = 1_000, 60_000, 10_000
IDLE_MS_MIN, IDLE_MS_MAX, IDLE_MS_DEFAULT = 3_000, 300_000, 30_000
DRAIN_MS_MAX = 3_600_000
HELLO_WITHIN_NS = WELCOME_WITHIN_NS = 10 * SECOND_NS
# A router forgets a subscribe that has not become a stream by then.
STREAM_OPEN_WITHIN_NS = 30 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session may take: streams that are open or being opened, and bytes that wait in each."""

    max_streams: int = STREAMS_DEFAULT
    max_stream_buffer_bytes: int = STREAM_BUFFER_BYTES_MAX

    def lowered_by(self, other: Limits) -> Limits:
        """Return what both allow."""
        return Limits(
            min(self.max_streams, other.max_streams),
            min(self.max_stream_buffer_bytes, other.max_stream_buffer_bytes),
        )
