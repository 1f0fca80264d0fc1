"""The API server over HTTP.

Who we are is asked anew for each request, since a pod's token is good for an hour and its file is replaced before.
With a kubeconfig the requests are aiohttp's, which knows proxies and takes its time to import: only then.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper import __version__
from kura_shaper.tenants.kubernetes import http, login
from kura_shaper.tenants.kubernetes.login import PodLogin

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    import aiohttp

    from kura_shaper.tenants.kubernetes.login import Login
    from kura_shaper.tenants.kubernetes.pace import AsyncClock
    from kura_shaper.tenants.kubernetes.wire import Answer

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# One object is a line of a watch, and etcd keeps none above 1.5 MB; aiohttp takes twice this.
_LINE_BYTES = 2 << 20
# A kubeconfig may start a program to log in, which is not done for each page of a list.
_KUBECONFIG_GOOD_NS = 60_000_000_000
_USERS_KUBECONFIG = Path("~/.kube/config")
_UNAUTHORIZED = 401


class Access:
    """Where the API server is, and credentials that are current when they are asked for."""

    def __init__(
        self,
        kubeconfig: Path | None = None,
        *,
        clock: AsyncClock,
        environ: Mapping[str, str] = os.environ,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> None:
        """A kubeconfig that is given counts; else the pod that this runs in, else the kubeconfig of the user."""
        self._kubeconfig, self._clock, self._environ = kubeconfig, clock, environ
        self._service_account = service_account
        self._known: Login | None = None
        self._known_at_ns = 0

    @property
    def is_in_cluster(self) -> bool:
        """Whether a pod's service account is used."""
        return self._kubeconfig is None and bool(self._environ.get(login.HOST))

    async def login(self) -> Login:
        """Return where the API server is and who we are, as it is now. Raises ApiError where that is not known."""
        age_ns = self._clock.now_ns() - self._known_at_ns
        if self._known is None or self.is_in_cluster or age_ns >= _KUBECONFIG_GOOD_NS:
            self._known = await self._load()
            self._known_at_ns = self._clock.now_ns()
        return self._known

    def forget(self) -> None:
        """Read everything anew the next time: it was refused."""
        self._known = None

    async def _load(self) -> Login:
        if self.is_in_cluster:
            return login.of_pod(self._environ, self._service_account)
        if self._kubeconfig is not None:
            remedy = "give a kubeconfig that can be used"
            return await login.of_kubeconfig(str(self._kubeconfig), name=self._kubeconfig, remedy=remedy)
        path = self._environ.get("KUBECONFIG") or str(_USERS_KUBECONFIG.expanduser())
        return await login.of_kubeconfig(path, name="the kubeconfig")


def _mapped() -> AbstractContextManager[None]:
    """Turn everything that a connection of aiohttp may end by into one error."""
    import aiohttp
    from aiohttp.http import HttpProcessingError

    # A line that is too long is a ValueError or, in newer versions, an error of its own.
    return http.unreached(aiohttp.ClientError, HttpProcessingError)


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def retry_after_ns(self) -> int:
        return http.retry_after_ns(self._response.headers.get("Retry-After", ""))

    async def body(self) -> bytes:
        with _mapped():
            return await self._response.read()

    async def lines(self) -> AsyncIterator[bytes]:
        with _mapped():
            async for line in self._response.content:
                yield line


class HttpApi:
    """An API server that is asked over HTTP, within `async with`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        # The last one is in use. Others may still have a watch, so they are closed at the end.
        self._sessions: list[aiohttp.ClientSession] = []
        self._certificates: tuple[bytes, ...] = ()
        self._context: ssl.SSLContext | None = None

    async def __aenter__(self) -> HttpApi:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions:
            await session.close()

    @asynccontextmanager
    async def get(
        self, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """See wire.Api."""
        found = await self._access.login()
        opened: AbstractAsyncContextManager[Answer]
        if isinstance(found, PodLogin):
            opened = http.get(found, path, query, context=self._trusted(found), idle_s=idle_s, total_s=total_s)
        else:
            opened = self._get(found, path, query, idle_s=idle_s, total_s=total_s)
        async with opened as answer:
            if answer.status == _UNAUTHORIZED:
                self._access.forget()
            yield answer

    @asynccontextmanager
    async def _get(
        self, found: Login, path: str, query: Mapping[str, str], *, idle_s: float, total_s: float | None
    ) -> AsyncIterator[_HttpAnswer]:
        import aiohttp

        session = self._session(found)
        headers = {"Accept": "application/json", "User-Agent": f"kura-shaper/{__version__}"}
        if authorization := await found.authorization():
            headers["Authorization"] = authorization
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=http.CONNECT_WITHIN_S, sock_read=idle_s)
        with _mapped():
            response = await session.get(
                found.host + path,
                params=query,
                headers=headers,
                allow_redirects=False,
                proxy=found.proxy,
                server_hostname=found.tls_server_name,
                timeout=timeout,
            )
        async with response:
            yield _HttpAnswer(response)

    def _trusted(self, found: Login) -> ssl.SSLContext:
        """Return the context of a login, made anew when its certificates were replaced."""
        with http.unreached():
            certificates = tuple(file.read_bytes() for file in found.certificates)
            if self._context is None or certificates != self._certificates:
                self._context, self._certificates = found.context(), certificates
        return self._context

    def _session(self, found: Login) -> aiohttp.ClientSession:
        """Return a session with the certificates of a login."""
        import aiohttp

        before, context = self._context, self._trusted(found)
        if not self._sessions or context is not before:
            # Each watch keeps a connection, and whoever watches knows how many.
            connector = aiohttp.TCPConnector(ssl=context, limit=0)
            self._sessions.append(aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES))
        return self._sessions[-1]
