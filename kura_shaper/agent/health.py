"""The agent's small web server: /metrics, /healthz, /readyz and /statusz, on loopback unless told otherwise."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kura_shaper import __version__
from kura_shaper.agent.keeper import Verdict
from kura_shaper.agent.metrics import AgentMetrics
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from kura_shaper.agent.view import AgentView, DeviceView
    from kura_shaper.clock import Clock
    from kura_shaper.tenants.document import Endpoint

_SECOND_NS = 1_000_000_000
# A look at 5,000 classes that has to be taken again, and a removal that waits for a class to fall silent.
_ALIVE_WITHIN_S = 60
_REQUEST_S, _REQUESTS_MAX = 10, 256
_LOG = logging.getLogger("kura_shaper.agent")


class Health:
    """What the probes are told."""

    def __init__(self, view: AgentView, clock: Clock) -> None:
        self._view, self._clock = view, clock

    def why_dead(self) -> str:
        """Return why the agent should be started again, "" while it works. A bad source or kernel is no reason."""
        now_ns = self._clock.now_ns()
        turned_s = (now_ns - self._view.alive_at_ns) / _SECOND_NS
        if turned_s > _ALIVE_WITHIN_S:
            return f"the loop has not turned for {turned_s:.0f} s"
        # Read once: the look may end meanwhile.
        began_ns = self._view.look_began_ns
        looking_s = (now_ns - began_ns) / _SECOND_NS if began_ns else 0
        return f"a look has taken {looking_s:.0f} s" if looking_s > _ALIVE_WITHIN_S else ""

    def why_not_ready(self) -> str:
        """Return why this node does not keep its promises, "" when it does."""
        view = self._view
        if dead := self.why_dead():
            return dead
        if (disabled := view.disabled) is not None:
            return f"held off: {disabled.reason}"
        if view.waiting_for:
            return f"waiting for {view.waiting_for}"
        for name, device in view.devices.items():
            looked = device.looked
            if looked is None:
                return f"{name}: not looked at yet"
            if looked.verdict is Verdict.WOULD_CHANGE:
                if not view.observes:
                    return f"{name}: held off until now"
            elif not looked.verdict.is_well:
                return f"{name}: {'; '.join(looked.reasons)}"
        return ""

    def status(self) -> dict[str, Any]:
        """Return everything that a person would ask, as JSON has it."""
        view, told, disabled, reason = self._view, self._view.told, self._view.disabled, self.why_not_ready()
        return {
            "version": __version__,
            "ready": not reason,
            "reason": reason,
            "disabled": asdict(disabled) if disabled else None,
            "observing": view.observes,
            "source": {
                "valid": told.is_valid,
                "age_s": self._age_s(told.current_at_ns),
                "tenants": len(told.document.tenants) if told.document else None,
                "problems": list(told.problems),
            },
            "problems": list(view.problems),
            "retransmits": view.retransmits.way if view.retransmits else None,
            "devices": {name: self._device(device) for name, device in view.devices.items()},
        }

    def _device(self, device: DeviceView) -> dict[str, Any]:
        looked = device.looked
        if looked is None:
            return {"verdict": None}
        return {
            "verdict": looked.verdict,
            "reasons": list(looked.reasons),
            "operations": list(looked.operations[:50]),
            "pending": looked.pending,
            "shape": looked.shape,
            "why_shape": looked.why_shape,
            "steering": asdict(looked.proof) if looked.proof else None,
            "foreign": list(looked.foreign),
            "findings": list(looked.findings),
            "budget": str(device.budget) if device.budget else None,
            "age_s": self._age_s(device.looked_at_ns),
        }

    def _age_s(self, then_ns: int) -> float | None:
        return (self._clock.now_ns() - then_ns) / _SECOND_NS if then_ns else None


class HealthServer:
    """Serves until it is closed. Raises UsageError when the address can't be had."""

    def __init__(self, endpoint: Endpoint, view: AgentView, clock: Clock, *, closes_within_s: float = 0.5) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(AgentMetrics(view, clock))
        health = Health(view, clock)
        handler = type("_Handler", (_Handler,), {"registry": registry, "health": health})
        try:
            self._server = _server_of(endpoint)((endpoint.host, endpoint.port), handler)
        except OSError as error:
            raise UsageError(f"listen {endpoint}: {error.strerror}", remedy="choose another address or port") from error
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


def _server_of(endpoint: Endpoint) -> type[_Server]:
    return _ServerOfIpv6 if ":" in endpoint.host else _Server


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
