"""What can be changed in a gateway while it runs, as values, and how each is asked for.

No step cuts a connection: a map, a certificate and a server's address count for what
comes next.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kura_shaper.errors import KuraShaperError, RefusedError
from kura_shaper.haproxy.master import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.haproxy.master import Master

_NEW_VERSION = re.compile(r"New version created: (\d+)")


@dataclass(frozen=True, slots=True)
class ReplaceMap:
    """Give a loaded map, named by its path, other rows: all of them in one moment."""

    path: str
    rows: bytes

    def describe(self) -> str:
        """Return the step in words."""
        return f"map {_file(self.path)}: {len(self.rows.splitlines())} rows"

    def perform(self, master: Master) -> None:
        """Ask for it. Raises RefusedError, and what the master raises; the map then is as it was."""
        answer = master.ask(f"@1 prepare map {self.path}")
        version = _NEW_VERSION.search(answer)
        if version is None:
            raise _refused(self, answer)
        for payload in _chunks(self.rows.decode("ascii")):
            # Silence is success; a row that can't be parsed is named.
            _expect(self, master.ask(f"@1 add map @{version[1]} {self.path}", payload), "")
        _expect(self, master.ask(f"@1 commit map @{version[1]} {self.path}"), "")


@dataclass(frozen=True, slots=True)
class AddHost:
    """Let a certificate be served for one more host name."""

    list_path: str
    certificate: str
    host: str

    def describe(self) -> str:
        """Return the step in words."""
        return f"certificate for {self.host}"

    def perform(self, master: Master) -> None:
        """Ask for it. Raises RefusedError, and what the master raises."""
        answer = master.ask(f"@1 add ssl crt-list {self.list_path}", f"{self.certificate} {self.host}\n")
        _expect(self, answer, "Success!")


@dataclass(frozen=True, slots=True)
class RemoveHost:
    """Serve no certificate any more for a host name. `row_id` is what the gateway calls its row."""

    list_path: str
    row_id: str
    host: str

    def describe(self) -> str:
        """Return the step in words."""
        return f"no certificate any more for {self.host}"

    def perform(self, master: Master) -> None:
        """Ask for it. Raises RefusedError, and what the master raises."""
        _expect(self, master.ask(f"@1 del ssl crt-list {self.list_path} {self.row_id}"), "deleted in crtlist")


@dataclass(frozen=True, slots=True)
class ReplaceCertificate:
    """Load a certificate with its key anew, for handshakes from now on."""

    path: str
    pem: str

    def describe(self) -> str:
        """Return the step in words, without a secret."""
        return f"certificate {self.path}"

    def perform(self, master: Master) -> None:
        """Ask for it. Raises RefusedError, and what the master raises; the old one is then still served."""
        try:
            payload = "".join(f"{row}\n" for row in self.pem.splitlines() if row.strip())
            _expect(self, master.ask(f"@1 set ssl cert {self.path}", payload), "Transaction ")
            _expect(self, master.ask(f"@1 commit ssl cert {self.path}"), "Success!")
        except KuraShaperError:
            # An open transaction would be in the way of everybody's next one.
            with suppress(KuraShaperError):
                master.ask(f"@1 abort ssl cert {self.path}")
            raise


@dataclass(frozen=True, slots=True)
class MoveServer:
    """Send new requests of a server elsewhere. With `check_port` 0 it is checked at its own port."""

    name: str
    address: str
    port: int
    check_port: int = 0

    def describe(self) -> str:
        """Return the step in words."""
        return f"server {self.name}: {self.address} port {self.port}"

    def perform(self, master: Master) -> None:
        """Ask for it. The answer is in words for people: whether it holds is told by reading the server back."""
        master.ask(f"@1 set server {self.name} addr {self.address} port {self.port}")
        master.ask(f"@1 set server {self.name} check-port {self.check_port}")


Step: TypeAlias = ReplaceMap | AddHost | RemoveHost | ReplaceCertificate | MoveServer


def _expect(step: Step, answer: str, words: str) -> None:
    if words not in answer or (not words and answer.strip()):
        raise _refused(step, answer)


def _refused(step: Step, answer: str) -> RefusedError:
    words = " ".join(answer.split())[:200] or "nothing"
    return RefusedError(f"the gateway did not take {step.describe()}: it answers `{words}`")


def _chunks(text: str) -> Iterator[str]:
    """Yield whole lines of a text in pieces that the gateway's buffer holds."""
    start = 0
    while start < len(text):
        end = start + MAX_PAYLOAD_BYTES
        end = len(text) if end >= len(text) else text.rindex("\n", start, end) + 1
        yield text[start:end]
        start = end


def _file(path: str) -> str:
    return path.rpartition("/")[2]
