"""What may come without end and is told seldom: the first of a kind in a minute, with how many were kept quiet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

WINDOW_S = 60.0


class Seldom:
    """Knows when each kind was told last. Kinds are of a closed set, so that few are known."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._windows: dict[Hashable, tuple[float, int]] = {}

    def suppressed(self, kind: Hashable) -> int | None:
        """Return how many of a kind were kept quiet since the last one told; None when this one is to be quiet too."""
        now_s = self._now_s()
        began_s, suppressed = self._windows.get(kind, (now_s - WINDOW_S, 0))
        if now_s - began_s < WINDOW_S:
            self._windows[kind] = (began_s, suppressed + 1)
            return None
        self._windows[kind] = (now_s, 0)
        return suppressed
