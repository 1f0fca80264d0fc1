"""A node with a tree, a gateway and clients, and runs of `verify` on it.

The gateway is a child process under the gateway's name: it alone holds the listening sockets, marks each
connection as its client asks, and sends what it is asked for. Whatever a test breaks, it breaks on this.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernel_flood import in_process
from kernel_traffic import NODE, WORLD, set_mark, warm_up
from kernel_trees import ACME, DOCUMENT, GATEWAY_PORT, PEER_PORT

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.observe import Asked
from kura_shaper.units import Rate
from kura_shaper.verify.collect import NodeReader
from kura_shaper.verify.observed import Question
from kura_shaper.verify.run import Report, Settings, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from conftest import Network

    from kura_shaper.haproxy.master import Master
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import SteeringKind

GATEWAY = "haproxy"
BUDGET = Rate(100_000_000)
# acme may use the budget up, so that what is broken is never its ceiling unless a test says so.
TENANTS = DOCUMENT.replace("ceiling: 1500M", "ceiling: 50M").replace("ceiling: 40G", "ceiling: 100M")
PATIENT = Settings(duration_ms=1_000)
STATIC = Settings(duration_ms=0)
_PR_SET_NAME = 15
_REQUEST = struct.Struct("!II")  # the mark to set, the bytes to send
_TIMEOUT_S = 10.0


def tc(command: str, *more: str) -> None:
    """Run tc."""
    subprocess.run(["tc", *command.split(), *more], check=True, capture_output=True)


def ip(command: str) -> None:
    """Run ip."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@dataclass(slots=True)
class VerifyRig:
    """The node of a test. `network` is where the test is."""

    network: Network
    capabilities: Capabilities
    document: TenantsDocument = field(default_factory=lambda: parse_tenants(TENANTS, file="tenants.yaml"))
    budget: Rate = BUDGET
    settings: TreeSettings = field(default_factory=lambda: TreeSettings(BUDGET, shape=ShapeChoice.SINGLE))

    def shape(
        self, shape: ShapeChoice = ShapeChoice.SINGLE, *, queues: int = 1, steering: SteeringKind | None = None
    ) -> Wanted:
        """Put the document's tree on the device and warm the way to the world up."""
        self.settings = TreeSettings(self.budget, shape=shape, shaped_queues=queues)
        kinds = frozenset({steering}) if steering else self.capabilities.steering
        capabilities = replace(self.capabilities, steering=kinds)
        made = build(self.document, self.network.device, settings=self.settings, capabilities=capabilities)
        todo = plan(made, self.network.read())
        assert not todo.refusals, todo.refusals
        outcomes = execute(todo.operations, self.network.control(), clock=SystemClock())
        assert {outcome.status for outcome in outcomes} == {Status.DONE}, outcomes
        warm_up(self.network)
        return made

    def question(self, **changes: Any) -> Question:
        """Return what is asked of the node."""
        return replace(Question(self.document, Asked(budget=self.budget)), **changes)

    def verify(
        self,
        settings: Settings = STATIC,
        *,
        meanwhile: Callable[[], object] = lambda: None,
        gateway: Master | None = None,
        throttle_map: Path | None = None,
        **changes: Any,
    ) -> Report:
        """Run the checks. `meanwhile` is called once the traffic is looked at, when all that stands still was read."""
        done = threading.Event()

        def tell(text: str, _passed_ms: int) -> None:
            if "traffic" in text and not done.is_set():
                done.set()
                meanwhile()

        paths = {"throttle_map": throttle_map} if throttle_map else {}
        with NodeReader("nic0", clock=SystemClock(), gateway=gateway, **paths) as reader:
            return run(self.question(**changes), reader, settings, tell=tell)


def only(report: Report, code: str) -> None:
    """Assert that a report has this finding, once or more, and no other."""
    found = [f"{finding.code.name}: {finding.message}" for finding in report.findings] or [
        f"{result.check.name}: {result.unknown or result.words}" for result in report.results
    ]
    assert {finding.code.name for finding in report.findings} == {code}, found
    assert report.exit_code == 1


@contextmanager
def gateway(
    ports: Sequence[int] = (GATEWAY_PORT, PEER_PORT), *, before: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Have a gateway listen on these ports until the end of the block; `before` is called in its process first."""
    is_up, say = os.pipe()

    def work() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, GATEWAY.encode())
        listeners = [_listener(family, port) for port in ports for family in (socket.AF_INET, socket.AF_INET6)]
        before()
        for each in listeners:
            threading.Thread(target=_accept, args=(each,), daemon=True).start()
        os.write(say, b"1")
        threading.Event().wait()

    try:
        with in_process(work):
            assert os.read(is_up, 1) == b"1"
            yield
    finally:
        os.close(is_up)
        os.close(say)


def _listener(family: socket.AddressFamily, port: int) -> socket.socket:
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    made.listen()
    return made


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    data = bytes(65_536)
    with suppress(OSError):
        mark, size = _REQUEST.unpack(connection.recv(_REQUEST.size, socket.MSG_WAITALL))
        if mark:
            with suppress(PermissionError):
                set_mark(connection, mark)
        while size:
            size -= connection.send(data[: min(size, len(data))])
        threading.Event().wait()


@contextmanager
def client(
    rig: VerifyRig, mark: int, size: int, *, port: int = GATEWAY_PORT, reads: bool = False
) -> Iterator[socket.socket]:
    """Have a client in the world, who asked for so many bytes; he has them all when the block begins.

    With reads he reads in the background instead, as fast as he can.
    """
    with ExitStack() as stack:
        with rig.network.in_world():
            made = stack.enter_context(socket.socket())
        made.settimeout(_TIMEOUT_S)
        made.connect((NODE[socket.AF_INET], port))
        made.sendall(_REQUEST.pack(mark, size))
        if not reads:
            _read(made, size)
        else:
            stack.enter_context(in_process(lambda: _read(made, size)))
        yield made


def _read(made: socket.socket, size: int) -> None:
    while size > 0:
        part = made.recv(1 << 20)
        assert part
        size -= len(part)


def mark_of(class_id: int = ACME.minor) -> int:
    """Return the mark of a class id."""
    return class_id << 16


def peer_of(made: socket.socket) -> str:
    """Return a client's address and port as HAProxy writes them."""
    host, port = made.getsockname()[:2]
    assert host == WORLD[socket.AF_INET]
    return f"{host}:{port}"
