"""A request as HTTP/1.1 and HTTP/2 write it, and the answer that it expects."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kura_shaper import __version__
from kura_shaper.probe.failures import ClientError, Reason

AGENT: Final = f"kura-shaper/{__version__}"
_OK = 200
_REDIRECTS = range(300, 400)
# google.golang.org/grpc/codes, in the order of their numbers.
_GRPC_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


class Method(StrEnum):
    """How it is asked: a GET, or a gRPC call with one message."""

    GET = "GET"
    GRPC = "POST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `expected` is the status of HTTP, or for gRPC its own; None is what means success.

    `headers` may hold secrets: they are sent, and nothing else is done with them.
    """

    authority: str
    path: str
    scheme: str = "https"
    method: Method = Method.GET
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = b""
    expected: int | None = None

    def http1(self) -> bytes:
        """Return the request as HTTP/1.1 writes it."""
        fields = (("host", self.authority), ("user-agent", AGENT), ("accept", "*/*"), *self.headers)
        lines = (f"GET {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", "")
        return "\r\n".join(lines).encode("latin-1")

    def http2(self) -> tuple[tuple[str, str], ...]:
        """Return the fields of the request's head in HTTP/2."""
        head = (
            (":method", self.method.value),
            (":scheme", self.scheme),
            (":authority", self.authority),
            (":path", self.path),
            ("user-agent", AGENT),
        )
        grpc = (("content-type", "application/grpc"), ("te", "trailers")) if self.method is Method.GRPC else ()
        return (*head, *grpc, *self.headers)

    def require_status(self, status: int) -> None:
        """Raise ClientError when HTTP's status is another one than expected. No redirect is followed."""
        wanted = _OK if self.expected is None or self.method is Method.GRPC else self.expected
        if status != wanted:
            note = ", a redirect, which is not followed" if status in _REDIRECTS else ""
            raise ClientError(Reason.STATUS, f"status {status}{note}; expected {wanted}")

    def require_grpc_status(self, status: int) -> None:
        """Raise ClientError when gRPC's status is another one than expected."""
        wanted = self.expected or 0
        if status != wanted:
            raise ClientError(Reason.STATUS, f"gRPC status {grpc_name(status)}; expected {grpc_name(wanted)}")


def grpc_name(status: int) -> str:
    """Return a gRPC status as people know it."""
    return f"{status} {_GRPC_NAMES[status]}" if 0 <= status < len(_GRPC_NAMES) else str(status)


def grpc_message(resource: str) -> bytes:
    """Return a gRPC message whose field 1 is a text, as in google.bytestream.ReadRequest; "" is the empty one."""
    text = resource.encode()
    message = b"\x0a" + _varint(len(text)) + text if text else b""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _varint(number: int) -> bytes:
    septets = bytearray()
    while number >= 0x80:
        septets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*septets, number])
