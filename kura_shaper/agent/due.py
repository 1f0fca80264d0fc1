"""When to look next: soon after an event, and otherwise when it is time."""

from __future__ import annotations

_MS = 1_000_000
# A burst of events is one look: short enough that drift is mended within two seconds, with room.
QUIET_NS, UNREST_MAX_NS = 200 * _MS, 1_000 * _MS


class Due:
    """A moment that events bring nearer: they are waited out until it is quiet, but never for more than a second."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns
        self._first_ns: int | None = None
        self._last_ns = 0

    @property
    def at_ns(self) -> int:
        """The moment, as things are now."""
        if self._first_ns is None:
            return self._at_ns
        return min(self._at_ns, self._last_ns + QUIET_NS, self._first_ns + UNREST_MAX_NS)

    def heard(self, now_ns: int) -> None:
        """Something may have changed."""
        if self._first_ns is None:
            self._first_ns = now_ns
        self._last_ns = now_ns

    def began(self, next_ns: int) -> None:
        """A look begins, which sees all that was told until now. Without a reason the next is then."""
        self._first_ns, self._at_ns = None, next_ns

    def no_later(self, at_ns: int) -> None:
        """Look at that moment even if nothing is heard."""
        self._at_ns = min(self._at_ns, at_ns)
