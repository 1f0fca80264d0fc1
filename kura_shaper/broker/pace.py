"""A rate that no stream goes beyond on its way to the router, so that no publisher takes the link from all others.

It stands between the outbox and HTTP/2, and makes a stream's window look smaller than it is. So a stream that was
fast waits as one does that the router grants nothing: apart, and at no cost; what does not fit overflows, and its
publisher is not held back. Without a rate there is none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.broker.protocol.limits import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.outbox import Outgoing
    from kura_shaper.units import Rate

# A frame of less is not worth its head, and is what a stream's turn is as well.
_LEAST_BYTES = 16 * KIB
_BURST_S = 0.05
# Floating point may find a little missing when it is time; and a fast stream is not woken for each frame.
_WAIT_S_MIN = 0.001
_STREAMS_REMEMBERED = 8_192


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float
    is_awaited: bool = False


class Paced:
    """HTTP/2 as an outbox sees it, with a rate for each stream. `wake` is called when one that waited may go on."""

    def __init__(
        self,
        http: Outgoing,
        rate: Rate,
        *,
        now_s: Callable[[], float],
        call_later: Callable[[float, Callable[[int], None], int], object],
        wake: Callable[[int], None],
    ) -> None:
        self._http, self._now_s, self._call_later, self._wake = http, now_s, call_later, wake
        self._bytes_per_s = rate.bits_per_second / 8
        self._burst_bytes = max(4.0 * _LEAST_BYTES, self._bytes_per_s * _BURST_S)
        self._buckets: dict[int, _Bucket] = {}
        self.exempt_id = 0

    @property
    def data_room_bytes(self) -> int:
        """See Outgoing."""
        return self._http.data_room_bytes

    @property
    def frame_bytes_max(self) -> int:
        """See Outgoing."""
        return self._http.frame_bytes_max

    def stream_room_bytes(self, http_id: int) -> int:
        """See Outgoing. A stream that is too early is woken when it no longer is."""
        room_bytes = self._http.stream_room_bytes(http_id)
        if room_bytes <= 0 or http_id == self.exempt_id:
            return room_bytes
        bucket = self._filled(http_id)
        if bucket.tokens >= _LEAST_BYTES:
            return min(room_bytes, int(bucket.tokens))
        if not bucket.is_awaited:
            bucket.is_awaited = True
            wait_s = max(_WAIT_S_MIN, (_LEAST_BYTES - bucket.tokens) / self._bytes_per_s)
            self._call_later(wait_s, self._due, http_id)
        return 0

    def send(self, http_id: int, data: bytes) -> None:
        """See Outgoing."""
        if http_id != self.exempt_id:
            self._filled(http_id).tokens -= len(data)
        self._http.send(http_id, data)

    def _due(self, http_id: int) -> None:
        if http_id in self._buckets:
            self._buckets[http_id].is_awaited = False
        self._wake(http_id)

    def _filled(self, http_id: int) -> _Bucket:
        now_s, bucket = self._now_s(), self._buckets.get(http_id)
        if bucket is None:
            self._forget_full(now_s)
            bucket = self._buckets[http_id] = _Bucket(self._burst_bytes, now_s)
        bucket.tokens = min(self._burst_bytes, bucket.tokens + (now_s - bucket.at_s) * self._bytes_per_s)
        bucket.at_s = now_s
        return bucket

    def _forget_full(self, now_s: float) -> None:
        """Let go of buckets that are full by now, as one is that was never there: most of these streams have ended."""
        if len(self._buckets) >= _STREAMS_REMEMBERED:
            self._buckets = {
                http_id: each
                for http_id, each in self._buckets.items()
                if each.tokens + (now_s - each.at_s) * self._bytes_per_s < self._burst_bytes
            }
