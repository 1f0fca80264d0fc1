"""From a subscribe to a stream: resolve, connect, a place on the connection, the router's answer. Each in its time.

The stages together may take as long as the router waits, to the second, so all of it has a
deadline of its own, below that.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.broker.counts import Stage
from kura_shaper.broker.dial import DialError, connect_any
from kura_shaper.broker.protocol.codes import RefusalCode
from kura_shaper.broker.resolve import ResolveError
from kura_shaper.broker.security import StreamRefusedError, TargetCheck
from kura_shaper.errors import KuraShaperError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from kura_shaper.broker.counts import Times
    from kura_shaper.broker.endpoint import PublisherAddress
    from kura_shaper.broker.failures import FailedDials
    from kura_shaper.broker.protocol.frames import ZmqEndpoint
    from kura_shaper.broker.resolve import Resolver

RESOLVE_WITHIN_S, CONNECT_WITHIN_S, SLOT_WITHIN_S, HEAD_WITHIN_S = 5.0, 10.0, 5.0, 10.0
OPEN_WITHIN_S = 28.0
_TIMED_OUT = {
    Stage.RESOLVE: RefusalCode.RESOLVE_FAILED,
    Stage.CONNECT: RefusalCode.CONNECT_FAILED,
    Stage.SLOT: RefusalCode.STREAM_SLOT_TIMEOUT,
    Stage.HEAD: RefusalCode.OPEN_TIMEOUT,
}
# One text for every way not to be connected: a router can't tell a closed port from a silent host by it.
_NOT_CONNECTED = "the publisher could not be connected to"


@dataclass(frozen=True, slots=True)
class Publishers:
    """How publishers are reached."""

    check: TargetCheck
    resolver: Resolver
    connect_timeout_s: float
    failed: FailedDials
    so_mark: int | None = None


class StageClock:
    """Knows the stage that an opening is in, and notes how long each took."""

    def __init__(self, times: dict[str, Times], now_s: Callable[[], float]) -> None:
        self._times, self._now_s = times, now_s
        self._began_s = now_s()
        self.stage = Stage.RESOLVE

    @contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        """Be in a stage; one that fails is noted as well."""
        self.stage, began_s = stage, self._now_s()
        try:
            yield
        finally:
            self._times[stage].note(self._now_s() - began_s)

    def done(self) -> None:
        """All of it is over."""
        self._times[Stage.TOTAL].note(self._now_s() - self._began_s)

    @property
    def refusal(self) -> StreamRefusedError:
        """What it means that the time of the present stage is over."""
        return StreamRefusedError(_TIMED_OUT[self.stage], "it took too long")


async def connect_publisher(
    publishers: Publishers, address: PublisherAddress, target: ZmqEndpoint, stages: StageClock
) -> socket.socket:
    """Return a socket connected to a publisher that passed every check. Raises StreamRefusedError, TimeoutError."""
    check, name = publishers.check, str(address)
    if publishers.failed.has(name):
        raise StreamRefusedError(RefusalCode.CONNECT_FAILED, _NOT_CONNECTED)
    with stages.during(Stage.RESOLVE):
        try:
            async with asyncio.timeout(RESOLVE_WITHIN_S):
                candidates = await publishers.resolver.resolve(address)
        except ResolveError as error:
            raise StreamRefusedError(RefusalCode.RESOLVE_FAILED, str(error)) from error
    candidates = check.allowed(candidates)
    check.require_advertised(address, target)
    with stages.during(Stage.CONNECT):
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                return await connect_any(
                    (each for each in candidates if check.addresses.allows(each.ip)),
                    so_mark=publishers.so_mark,
                    each_within_s=publishers.connect_timeout_s,
                )
        except TimeoutError:
            publishers.failed.note(name)
            raise
        except (DialError, KuraShaperError) as error:
            publishers.failed.note(name)
            raise StreamRefusedError(RefusalCode.CONNECT_FAILED, _NOT_CONNECTED) from error
