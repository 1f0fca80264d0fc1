"""One number of ours beside a peer's, and how it is taken: the best of several runs, in turns.

The best, since everything else on a machine only ever makes a run slower; in turns, so
that a slow minute hits both alike.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class SkippedError(Exception):
    """A benchmark can't run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What we took and what a peer took for the same. Less is better; a ratio below 1 means that we are faster."""

    name: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.ours / self.peer

    def to_json(self) -> dict[str, Any]:
        """Return it as the contract has it."""
        return {
            "name": self.name,
            "ours": self.ours,
            "peer": self.peer,
            "peer_name": self.peer_name,
            "ratio": round(self.ratio, 3),
            "unit": self.unit,
            "note": self.note,
        }

    def to_row(self) -> tuple[str, ...]:
        """Return it as a row of the table."""
        numbers = (f"{self.ours:.3g}", f"{self.peer:.3g}", self.peer_name, f"{self.ratio:.2f}")
        return (self.name, *numbers, self.unit, self.note)


def best_in_turns(name: str, runs: int, *contenders: Callable[[], float]) -> list[float]:
    """Return the least that each contender took in so many runs, one after the other in each."""
    least = [float("inf")] * len(contenders)
    for run in range(1, runs + 1):
        for number, contender in enumerate(contenders):
            progress(f"{name}: run {run} of {runs}, contender {number + 1} of {len(contenders)}")
            least[number] = min(least[number], contender())
    return least


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def require(command: str) -> None:
    """Raise SkippedError where a command is missing."""
    if shutil.which(command) is None:
        raise SkippedError(f"needs {command}")


def progress(text: str) -> None:
    """Show on a terminal what is going on, in one line; an empty text clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
