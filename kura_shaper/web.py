"""The small web server of a service: pages that are made when they are asked for, such as /metrics and /healthz.

It holds up nobody: who says nothing gets a thread for a while, of which there are only so many.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client.registry import Collector

    Pages = Mapping[str, Callable[[str], "Page"]]

_REQUEST_S, _REQUESTS_MAX = 10, 256
_LOG = logging.getLogger("kura_shaper.web")


@dataclass(frozen=True, slots=True)
class Page:
    """What a path is answered with."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


def text_page(words: str, *, status: int = 200) -> Page:
    """Return a page of one line."""
    return Page(status, f"{words}\n".encode(errors="replace"))


def json_page(value: object) -> Page:
    """Return a page of JSON, for people too."""
    return Page(200, f"{json.dumps(value, indent=2, default=str)}\n".encode(), "application/json")


def metrics_page(collector: Collector) -> Callable[[str], Page]:
    """Return the page of a collector, in the format that the other side accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    def made(accept: str) -> Page:
        encode, kind = choose_encoder(accept)
        return Page(200, encode(registry), kind)

    return made


class PageServer:
    """Serves until it is closed. Raises UsageError when the address can't be had.

    Each page gets what the request accepts (its field Accept, "" without).
    """

    def __init__(self, host: str, port: int, pages: Pages, *, closes_within_s: float = 0.5) -> None:
        handler = type("_Handler", (_Handler,), {"pages": pages})
        kind = _ServerOfIpv6 if ":" in host else _Server
        try:
            self._server = kind((host, port), handler)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise UsageError(f"listen {where}: {error.strerror}", remedy="choose another address or port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(closes_within_s,), name="web", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that was had."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class Health(Protocol):
    """What probes are told."""

    def why_dead(self) -> str:
        """Return why the program should be started again, "" while it works."""
        ...

    def why_not_ready(self) -> str:
        """Return why it does not do what it is for, "" when it does."""
        ...

    def status(self) -> dict[str, Any]:
        """Return everything that a person would ask, as JSON has it."""
        ...


class ProbeServer(PageServer):
    """/metrics, /healthz, /readyz and /statusz of a program. Raises UsageError when the address can't be had."""

    def __init__(
        self, host: str, port: int, *, collector: Collector, health: Health, closes_within_s: float = 0.5
    ) -> None:
        """Serve from now on."""
        pages: Pages = {
            "/metrics": metrics_page(collector),
            "/healthz": lambda _: _answer(health.why_dead(), status=500),
            "/readyz": lambda _: _answer(health.why_not_ready(), status=503),
            "/statusz": lambda _: json_page(health.status()),
        }
        super().__init__(host, port, pages, closes_within_s=closes_within_s)


def _answer(why_not: str, *, status: int) -> Page:
    return text_page(why_not, status=status) if why_not else text_page("ok")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_REQUESTS_MAX)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind, and ask no name server for this host's name, which may take its time."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, of which there are only so many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's own
        """Say nothing of who left before its answer; anything else is a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            _LOG.exception("request_failed")


class _ServerOfIpv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    pages: Pages

    def do_GET(self) -> None:
        make = self.pages.get(self.path.partition("?")[0])
        page = make(self.headers.get("Accept") or "") if make else text_page(" ".join(self.pages), status=404)
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's own name
        """Say nothing."""
