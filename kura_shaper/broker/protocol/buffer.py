"""What waits for a router that does not read, counted to the byte.

Each piece costs its length and 64 bytes more, which is what it takes to keep it, so a publisher of
tiny pieces can't take more memory than is counted. A piece that would go beyond what a stream or
the session may keep is refused, and one that fits exactly is not.
"""

from __future__ import annotations

from collections import deque

from kura_shaper.broker.protocol.limits import CHUNK_OVERHEAD_BYTES, SESSION_BUFFER_BYTES


class Budget:
    """The bytes that all streams of a session keep, and the most that they ever kept."""

    def __init__(self, limit_bytes: int = SESSION_BUFFER_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.high_water_bytes = 0
        # What is framed or said and not yet the kernel's is held as well, or a stalled connection would pass the limit.
        self.outside_bytes = 0

    def take(self, cost_bytes: int) -> bool:
        """Take so much if it is there."""
        used_bytes = self.used_bytes + cost_bytes
        held_bytes = used_bytes + self.outside_bytes
        if held_bytes > self.limit_bytes:
            return False
        self.used_bytes = used_bytes
        if held_bytes > self.high_water_bytes:
            self.high_water_bytes = held_bytes
        return True

    def give_back(self, cost_bytes: int) -> None:
        """Return so much."""
        self.used_bytes -= cost_bytes


class StreamBuffer:
    """The pieces of one stream that wait to be sent, in order."""

    def __init__(self, limit_bytes: int, budget: Budget) -> None:
        self.limit_bytes = limit_bytes
        self._budget = budget
        self._pieces: deque[bytes] = deque()
        self._sent_of_first = 0
        self.length_bytes = 0
        self.charged_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def put(self, piece: bytes) -> bool:
        """Keep a piece; False when it is more than may be kept, and then it is not."""
        cost_bytes = len(piece) + CHUNK_OVERHEAD_BYTES
        if self.charged_bytes + cost_bytes > self.limit_bytes or not self._budget.take(cost_bytes):
            return False
        self._pieces.append(piece)
        self.length_bytes += len(piece)
        self.charged_bytes += cost_bytes
        return True

    def take(self, most_bytes: int) -> bytes:
        """Return the next bytes, at most so many; pieces are joined, and given back when all of them is taken."""
        first = self._pieces[0]
        is_all = len(first) == most_bytes or (len(self._pieces) == 1 and len(first) < most_bytes)
        if not is_all or self._sent_of_first:
            return self._join(most_bytes)
        self._pieces.popleft()
        self._uncharge(len(first), pieces=1)
        return first

    def _join(self, most_bytes: int) -> bytes:
        parts: list[bytes | memoryview] = []
        left_bytes, whole = most_bytes, 0
        while left_bytes and self._pieces:
            first = self._pieces[0]
            end = min(len(first), self._sent_of_first + left_bytes)
            parts.append(memoryview(first)[self._sent_of_first : end])
            left_bytes -= end - self._sent_of_first
            if end < len(first):
                self._sent_of_first = end
                break
            self._pieces.popleft()
            self._sent_of_first = 0
            whole += 1
        self._uncharge(most_bytes - left_bytes, pieces=whole)
        return b"".join(parts)

    def drop(self) -> None:
        """Forget everything, and give all of it back."""
        self._pieces.clear()
        self._sent_of_first = 0
        self._budget.give_back(self.charged_bytes)
        self.length_bytes = self.charged_bytes = 0

    def _uncharge(self, length_bytes: int, *, pieces: int) -> None:
        cost_bytes = length_bytes + pieces * CHUNK_OVERHEAD_BYTES
        self.length_bytes -= length_bytes
        self.charged_bytes -= cost_bytes
        self._budget.give_back(cost_bytes)
