"""What a publisher says in ZMTP 3.1, as bytes by hand."""

from __future__ import annotations

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"


def message(*parts: bytes) -> bytes:
    """Return the frames of a message."""
    last = len(parts) - 1
    return b"".join(bytes(((at < last) | 2,)) + len(part).to_bytes(8, "big") + part for at, part in enumerate(parts))
