"""A source in a thread with an event loop of its own, for a program that has none."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from kura_shaper.tenants.kubernetes.source import ClusterSource, Snapshot

_log = logging.getLogger(__name__)


class FollowedCluster:
    """Runs a source within `with`; `api` is what it asks, which is closed at the end.

    The source calls its `on_change` in that thread. A fault of ours that ends it is in every
    snapshot from then on, so that nobody takes silence for good news.
    """

    def __init__(self, source: ClusterSource, api: AbstractAsyncContextManager[object]) -> None:
        self._source, self._api = source, api
        self._thread = threading.Thread(target=self._run, name="kubernetes", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._fault = ""

    def snapshot(self) -> Snapshot:
        """Return what is known now; never waits and never raises."""
        said = self._source.snapshot()
        return replace(said, failure=self._fault) if self._fault else said

    def __enter__(self) -> FollowedCluster:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._follow())
        except Exception as error:  # a fault of ours: told in every snapshot
            self._fault = f"following the cluster ended: {error!r}"
            log_event(_log, "cluster_lost", level=logging.ERROR, reason=self._fault)

    async def _follow(self) -> None:
        async with self._api:
            tasks = {asyncio.create_task(self._source.run()), asyncio.create_task(self._stop.wait())}
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for task in done:
                task.result()
