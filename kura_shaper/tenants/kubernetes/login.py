"""Where the API server is and who we are, as a pod's service account or a kubeconfig says.

A pod is told by two variables and two files, which are read here. A kubeconfig may log in by a program, a
certificate or a cloud, which the official client knows all about; it takes half a second and 45 MB to import, so
nobody pays for it but who has a kubeconfig.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kura_shaper.tenants.kubernetes.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST, PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_REMEDY = "give --kubeconfig, or run in a pod"


class Login(Protocol):
    """What it takes to ask an API server."""

    @property
    def host(self) -> str:
        """Where it is: scheme, host and port, and perhaps a path before all others."""
        ...

    @property
    def proxy(self) -> str | None:
        """The URL of what is between."""
        ...

    @property
    def tls_server_name(self) -> str | None:
        """The name in its certificate where that is not the host."""
        ...

    @property
    def certificates(self) -> tuple[Path, ...]:
        """The files that `context` reads. When their content changes, it has to be asked again."""
        ...

    async def authorization(self) -> str:
        """Return the header of a request; empty when none is sent."""
        ...

    def context(self) -> ssl.SSLContext:
        """Return whom to trust and what to show. Raises OSError, and ssl.SSLError with it."""
        ...


@dataclass(frozen=True, slots=True)
class PodLogin:
    """A pod's account, as it was when this was made."""

    host: str
    token: str
    ca: Path
    proxy: None = None
    tls_server_name: None = None

    @property
    def certificates(self) -> tuple[Path, ...]:
        """See Login."""
        return (self.ca,)

    async def authorization(self) -> str:
        """See Login."""
        return f"bearer {self.token}"

    def context(self) -> ssl.SSLContext:
        """See Login."""
        return ssl.create_default_context(cafile=self.ca)


class KubeconfigLogin:
    """What the official client made of a kubeconfig; it renews by itself what it has to."""

    def __init__(self, configuration: Any) -> None:
        self._configuration = configuration
        self.host: str = configuration.host
        self.proxy: str | None = configuration.proxy
        self.tls_server_name: str | None = configuration.tls_server_name

    @property
    def certificates(self) -> tuple[Path, ...]:
        """See Login."""
        made = self._configuration
        return tuple(Path(file) for file in (made.ssl_ca_cert, made.cert_file, made.key_file) if file)

    async def authorization(self) -> str:
        """See Login."""
        token: str | None = await self._configuration.get_api_key_with_prefix("BearerToken")
        return token.strip() if token else ""

    def context(self) -> ssl.SSLContext:
        """See Login."""
        from kubernetes.aio.client.rest import RESTClientObject

        # It makes no connection until it is used, and it is not.
        made: ssl.SSLContext = RESTClientObject(self._configuration).ssl_context
        return made


def of_pod(environ: Mapping[str, str], service_account: Path) -> PodLogin:
    """Return the login of the pod that this runs in. Raises ApiError with what is missing, in one line."""
    host, port, ca = environ.get(HOST, ""), environ.get(PORT, ""), service_account / "ca.crt"
    try:
        token, ca_bytes = (service_account / "token").read_text().strip(), ca.stat().st_size
    except (OSError, ValueError) as error:
        raise _unusable("the service account", error) from error
    missing = (
        ("" if host and port else f"{HOST} or {PORT} is not set")
        or ("" if token else "its token is empty")
        or ("" if ca_bytes else "its ca.crt is empty")
    )
    if missing:
        raise _unusable("the service account", missing)
    bracketed = f"[{host}]" if ":" in host or "%" in host else host
    return PodLogin(f"https://{bracketed}:{port}", token, ca)


async def of_kubeconfig(path: str, *, name: object, remedy: str = _REMEDY) -> KubeconfigLogin:
    """Return the login of a kubeconfig, or of several as KUBECONFIG lists them.

    Raises ApiError, which says `name`, and as its remedy what to do when it can't be used.
    """
    try:
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config import ConfigException, load_kube_config
        from yaml import YAMLError
    except ImportError as error:
        raise ApiError("the Kubernetes client is not installed", remedy="install kura-shaper[kubernetes]") from error
    found = Configuration()
    try:
        if os.pathsep not in path:
            Path(path).stat()  # the client only logs that there is none
        await load_kube_config(path, client_configuration=found, persist_config=False)
    # A kubeconfig that is not of the shape that is expected fails in every way there is.
    except (TypeError, KeyError, AttributeError) as error:
        raise _unusable(name, "it is no kubeconfig", remedy=remedy) from error
    except (ConfigException, YAMLError, OSError, ValueError) as error:
        raise _unusable(name, error, remedy=remedy) from error
    return KubeconfigLogin(found)


def _unusable(what: object, why: object, *, remedy: str = _REMEDY) -> ApiError:
    return ApiError(f"{what} can't be used: {' '.join(str(why).split())}", remedy=remedy)
