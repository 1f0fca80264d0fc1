"""Why a client got nothing, or not enough: one word from a fixed list, and a line for people.

What sockets, TLS and HTTP/2 raise is mapped here and nowhere else. The word tells where to
look: at the name server, the network, the certificate, the gateway's map of names, the
tenant's own server, or at the machine that asked.
"""

from __future__ import annotations

import errno
import socket
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import h2.exceptions

from kura_shaper.errors import KuraShaperError

if TYPE_CHECKING:
    from collections.abc import Iterator

_DETAIL_CHARACTERS_MAX = 200


class Reason(StrEnum):
    """Where it went wrong. Also the label of a metric, so this list is all there is."""

    DNS = "dns"  # the name has no address, or none of the family that was asked for
    CONNECT = "connect"  # nobody answers at the address, or it refuses
    TLS = "tls"  # TLS says no: the certificate, the version, an alert
    HANDSHAKE = "handshake"  # the connection was closed, or was silent, before TLS was up
    ALPN = "alpn"  # TLS is up and does not speak the wanted protocol
    STATUS = "status"  # an answer, and another one than expected
    PROTOCOL = "protocol"  # an answer that breaks the rules of HTTP
    RESET = "reset"  # the other side ended it in the middle
    STALL = "stall"  # bytes came, and then no more
    TIMEOUT = "timeout"  # asked, and no byte came in time
    REFUSED = "refused"  # this machine's own kernel forbids the connection
    LOCAL = "local"  # this machine could not try: descriptors, ports, memory, files


# The two say nothing about the target.
OURS = frozenset({Reason.REFUSED, Reason.LOCAL})


class Phase(StrEnum):
    """How far a connection has come; what an error means depends on it."""

    CONNECTING = "connecting"
    SECURING = "securing"
    READING = "reading"


class ClientError(KuraShaperError):
    """A client's end: the reason, and a line for people that is safe to print."""

    code = "client"
    exit_code = 1

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(one_line(detail))
        self.reason = reason

    @property
    def failure(self) -> Failure:
        """The same as a value."""
        return Failure(self.reason, self.message)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a stream failed, and how many streams did for this reason."""

    reason: Reason
    detail: str
    count: int = 1

    def __str__(self) -> str:
        times = f"{self.count} times: " if self.count > 1 else ""
        return f"{self.reason}: {times}{self.detail}"


def one_line(text: str) -> str:
    """Return a text that came from elsewhere as one short line that is safe to print."""
    line = "".join(character if character.isprintable() else "?" for character in text)
    return line if len(line) <= _DETAIL_CHARACTERS_MAX else line[: _DETAIL_CHARACTERS_MAX - 1] + "…"


@contextmanager
def translated(phase: Phase) -> Iterator[None]:
    """Turn what the block raises into a ClientError of a phase."""
    try:
        yield
    except h2.exceptions.ProtocolError as error:
        words = f"{type(error).__name__} {error}".strip()
        raise ClientError(Reason.PROTOCOL, f"breaks the rules of HTTP/2: {words}") from error
    except socket.gaierror as error:
        raise ClientError(Reason.DNS, error.strerror or "the name can't be resolved") from error
    except ssl.SSLError as error:
        raise _of_tls(error, phase) from error
    except OSError as error:
        raise _of_system(error, phase) from error


_OWN_LIMITS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
    *(errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENOENT, errno.EISDIR),
}
_FORBIDDEN = {errno.EPERM, errno.EACCES}


def _of_system(error: OSError, phase: Phase) -> ClientError:
    words = error.strerror or str(error) or type(error).__name__
    if error.errno in _OWN_LIMITS:
        return ClientError(Reason.LOCAL, f"this machine could not try: {words}")
    if error.errno in _FORBIDDEN:
        return ClientError(Reason.REFUSED, f"this machine does not let the probe connect: {words}")
    if phase is Phase.CONNECTING and isinstance(error, ConnectionResetError):
        # It was up, and gone before connect() had looked; a moment later it would be told of the next phase.
        phase = Phase.SECURING
    match phase:
        case Phase.CONNECTING:
            return ClientError(Reason.CONNECT, "no answer in time" if isinstance(error, TimeoutError) else words)
        case Phase.SECURING:
            return ClientError(Reason.HANDSHAKE, f"closed before TLS was up: {words}")
        case _:
            return ClientError(Reason.RESET, f"closed in the middle: {words}")


def _of_tls(error: ssl.SSLError, phase: Phase) -> ClientError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return ClientError(Reason.TLS, f"the certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        if phase is Phase.SECURING:
            return ClientError(Reason.HANDSHAKE, "closed before TLS was up, as a gateway does for a name it lacks")
        return ClientError(Reason.RESET, "closed in the middle")
    words = (error.reason or str(error)).lower().replace("_", " ")
    if "no application protocol" in words:
        return ClientError(Reason.ALPN, "offers none of the wanted protocols")
    if "wrong version number" in words or "packet length too long" in words or "record layer failure" in words:
        return ClientError(Reason.TLS, "what answers does not speak TLS")
    return ClientError(Reason.TLS, f"TLS says no: {words}")
