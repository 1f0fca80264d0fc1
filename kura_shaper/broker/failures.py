"""Publishers that could not be connected to a moment ago: they are refused again, and not dialled again.

A router that asks over and over would have each connect tell it whether a port is open by now, which is what
scanning is. What is refused by this is refused in the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.limits import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable

REMEMBERED_NS = SECOND_NS
TARGETS_MAX = 4_096


class FailedDials:
    """Remembers targets for a second, and the newest of them when there are too many."""

    def __init__(self, *, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        # In the order of time, so that what is first is forgotten first.
        self._failed_ns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._failed_ns)

    def note(self, target: str) -> None:
        """This target could not be connected to."""
        self._failed_ns.pop(target, None)
        self._failed_ns[target] = self._now_ns()
        if len(self._failed_ns) > TARGETS_MAX:
            del self._failed_ns[next(iter(self._failed_ns))]

    def has(self, target: str) -> bool:
        """Return whether that is less than a second ago."""
        failed_ns = self._failed_ns.get(target)
        if failed_ns is not None and self._now_ns() - failed_ns >= REMEMBERED_NS:
            del self._failed_ns[target]
            return False
        return failed_ns is not None
