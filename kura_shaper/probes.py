"""A program's small web server: /metrics, /healthz, /readyz and /statusz, each answered in a thread of its own."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_REQUEST_S, _REQUESTS_MAX = 10, 256
_LOG = logging.getLogger("kura_shaper.probes")


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


class ProbeServer:
    """Serves until it is closed. Raises UsageError when the address can't be had."""

    def __init__(
        self, host: str, port: int, *, collector: Collector, health: Health, closes_within_s: float = 0.5
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        handler = type("_Handler", (_Handler,), {"registry": registry, "health": health})
        try:
            self._server = _server_of(host)((host, port), handler)
        except OSError as error:
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise UsageError(f"listen {place}: {error.strerror}", remedy="choose another address or port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(closes_within_s,), name="health", daemon=True
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


def _server_of(host: str) -> type[_Server]:
    return _ServerOfIpv6 if ":" in host else _Server


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    registry: CollectorRegistry
    health: Health

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, kind = choose_encoder(self.headers.get("Accept") or "")
                self._answer(200, encode(self.registry), kind)
            case "/healthz":
                why = self.health.why_dead()
                self._answer(500 if why else 200, _line(why or "ok"))
            case "/readyz":
                why = self.health.why_not_ready()
                self._answer(503 if why else 200, _line(why or "ok"))
            case "/statusz":
                body = json.dumps(self.health.status(), indent=2, default=str)
                self._answer(200, f"{body}\n".encode(), "application/json")
            case _:
                self._answer(404, b"/metrics /healthz /readyz /statusz\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's own name
        """Say nothing."""


def _line(words: str) -> bytes:
    return f"{words}\n".encode(errors="replace")
