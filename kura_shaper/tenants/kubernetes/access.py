"""The API server over HTTP.

Who we are is asked anew for each request, since a pod's token is good for an hour and its file is replaced before.
The requests are plain aiohttp, which takes its time to import, so it is imported when it is first needed.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper import __version__
from kura_shaper.tenants.kubernetes import login
from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from types import TracebackType

    import aiohttp

    from kura_shaper.tenants.kubernetes.login import Login
    from kura_shaper.tenants.kubernetes.pace import AsyncClock

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S = 10
# One object is a line of a watch, and etcd keeps none above 1.5 MB; aiohttp takes twice this.
_LINE_BYTES = 2 << 20
# A kubeconfig may start a program to log in, which is not done for each page of a list.
_KUBECONFIG_GOOD_NS = 60_000_000_000
_USERS_KUBECONFIG = Path("~/.kube/config")
_UNAUTHORIZED = 401
_SHOWN_CHARACTERS = 300


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
        path = str(self._kubeconfig or self._environ.get("KUBECONFIG") or _USERS_KUBECONFIG.expanduser())
        return await login.of_kubeconfig(path, name=self._kubeconfig or "the kubeconfig")


@contextmanager
def _mapped() -> Iterator[None]:
    """Turn everything that a connection may end by into one error."""
    import aiohttp
    from aiohttp.http import HttpProcessingError

    try:
        yield
    # A line that is too long is a ValueError or, in newer versions, an error of its own.
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:_SHOWN_CHARACTERS] or type(error).__name__
        raise ApiError(f"the API server can't be reached: {words}") from error


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def retry_after_ns(self) -> int:
        seconds = self._response.headers.get("Retry-After", "")
        return int(seconds) * 1_000_000_000 if seconds.isdecimal() and len(seconds) <= 2 else 0

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
    ) -> AsyncIterator[_HttpAnswer]:
        """See wire.Api."""
        import aiohttp

        found = await self._access.login()
        session = self._session(found)
        headers = {"Accept": "application/json", "User-Agent": f"kura-shaper/{__version__}"}
        if authorization := await found.authorization():
            headers["Authorization"] = authorization
        with _mapped():
            response = await session.get(
                found.host + path,
                params=query,
                headers=headers,
                allow_redirects=False,
                proxy=found.proxy,
                server_hostname=found.tls_server_name,
                timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S, sock_read=idle_s),
            )
        async with response:
            if response.status == _UNAUTHORIZED:
                self._access.forget()
            yield _HttpAnswer(response)

    def _session(self, found: Login) -> aiohttp.ClientSession:
        """Return a session with the certificates of a login, which are replaced now and then."""
        import aiohttp

        with _mapped():
            certificates = tuple(file.read_bytes() for file in found.certificates)
            if not self._sessions or certificates != self._certificates:
                connector = aiohttp.TCPConnector(ssl=found.context(), limit=8)
                self._sessions.append(aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES))
                self._certificates = certificates
        return self._sessions[-1]
