"""A reflector that runs against an API, and an API in memory behind HTTP, for tests."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any, ParamSpec

from aiohttp import web

from kura_shaper.tenants.kubernetes.reflector import Reflector, Resource, Timing
from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from kura_shaper.tenants.kubernetes.fake import FakeApi
    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Api

P = ParamSpec("P")

LIMIT_S = 20
INSTANCES = "/apis/kura.tuist.dev/v1alpha1/namespaces/kura/kurainstances"
EXACT = Timing(watch_s=2, idle_margin_s=1)


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine, and fail it when it waits for what never comes."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S * 6))

    # Fixtures are found by the signature, which a coroutine function has as well.
    return run


class Reflecting:
    """A reflector that runs, and its changes as somebody sees who is told of each."""

    def __init__(self, api: Api, clock: AsyncClock, *, path: str = INSTANCES, timing: Timing = EXACT) -> None:
        self.changes = 0
        self._changed = asyncio.Event()
        resource: Resource[Any] = Resource("things", path, lambda _namespace, _name, raw: raw.get("spec"))
        self.reflector = Reflector(
            api, resource, clock=clock, random=Random(1), timing=timing, on_change=self._on_change
        )

    def _on_change(self) -> None:
        self.changes += 1
        self._changed.set()

    @property
    def objects(self) -> dict[str, Any]:
        """What is known, by name."""
        return {name: spec for (_, name), spec in self.reflector.listing.objects.items()}

    async def until(self, what: Callable[[], bool]) -> None:
        """Return when something about what is known holds."""
        async with asyncio.timeout(LIMIT_S):
            while not what():
                self._changed.clear()
                await self._changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Reflecting]:
        """Run it; an error that ends it fails the test."""
        task = asyncio.create_task(self.reflector.run())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def served(
    api: FakeApi,
    *,
    before: Callable[[web.Request], Awaitable[web.StreamResponse | None]] | None = None,
    certificate: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve an API in memory over HTTP, and return its address. What `before` returns goes before."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if before and (early := await before(request)):
            return early
        async with api.get(request.path, dict(request.query), idle_s=0) as answer:
            if answer.status != 200 or "watch" not in request.query:
                headers = {"Retry-After": "7"} if answer.retry_after_ns else {}
                return web.Response(status=answer.status, body=answer.content, headers=headers)
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                async for line in answer.lines():
                    await response.write(line)
            except ApiError:
                assert request.transport
                request.transport.abort()
            return response

    app = web.Application()
    app.router.add_get("/{tail:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=certificate)
        await site.start()
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        api.end_watches()
        await runner.cleanup()
