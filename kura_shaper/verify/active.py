"""Load that somebody makes from outside the node while it is looked at: the seam for clients of any kind.

A client knows its tenant and makes load with a number of streams for a while. It runs beside the looking, so
every check of traffic judges this load too; what it received is held against what the tenant's class counted.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kura_shaper.errors import KuraShaperError
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """What a client received over so many streams, all of which flowed, from start to end. Times are the node's.

    path says which way, of words of our own and the number of the URL. A control goes a way that is not the
    tenant's to be held on, such as from the node itself: it is shown beside the others and not judged.
    """

    streams: int
    start_ns: int
    end_ns: int
    received_bytes: int
    failures: int = 0
    path: str = ""
    is_control: bool = False

    @property
    def duration_ns(self) -> int:
        """How long it was."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Load:
    """All steps of one tenant's load."""

    tenant: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Where:
    """What load is to ask for, and where it comes from.

    launcher is the command that starts the client elsewhere ("" for here), connect_to the gateway's addresses
    where its name has others (one for each version of IP), ca_file whom the client trusts.
    """

    url: str
    launcher: str = ""
    connect_to: tuple[str, ...] = ()
    ca_file: Path | None = None


class LoadClient(Protocol):
    """Makes load of one tenant."""

    @property
    def tenant(self) -> str:
        """Whose load it is."""
        ...

    def run(self, streams: int) -> Step:
        """Make load over so many streams for a while, and return when it is over.

        Payload counts from the moment on that each stream has its first byte. Raises KuraShaperError.
        """
        ...


class LoadRun:
    """The steps of one tenant's clients, one after the other, in a thread of their own."""

    def __init__(self, clients: Sequence[LoadClient], streams: Sequence[int]) -> None:
        self._clients, self._streams = tuple(clients), tuple(streams)
        self._steps: list[Step] = []
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the last step is over, or one failed."""
        return not self._thread.is_alive()

    def result(self) -> Load | Unknown:
        """Wait for the end, and return what came of it."""
        self._thread.join()
        return Unknown(self._failed) if self._failed else Load(self._clients[0].tenant, tuple(self._steps))

    def _run(self) -> None:
        streams = 0
        try:
            for client in self._clients:
                for streams in self._streams:
                    self._steps.append(client.run(streams))
        except (KuraShaperError, OSError) as error:
            self._failed = f"no load over {streams} streams: {error}"
