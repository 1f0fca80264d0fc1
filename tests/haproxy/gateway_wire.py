"""The gateway's node as its clients find it: at the other end of a wire, behind a device that has the tree.

The servers are those of the lab, and so are the clients that read as fast as they can:
processes of their own, so that neither waits for the test. What the device and each class
sent is read every 100 ms meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway_rig import HTTPS_PORT, PEER_PORT, GatewayRig, Namespace, running_gateway
from pyroute2 import IPRoute

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.probe import probe
from kura_shaper.lab.isolation import inside
from kura_shaper.lab.nic import DeviceBytes
from kura_shaper.lab.servers import ServerSpec
from kura_shaper.lab.traffic import Application, Security, TrafficSpec
from kura_shaper.measure import ByteSampler, Samples
from kura_shaper.tenants.document import Backends, Endpoint, Tenant, TenantsDocument
from kura_shaper.tree.build import ShapeChoice, TreeSettings, Wanted, build, owners_of
from kura_shaper.tree.diff import plan
from kura_shaper.tree.preflight import Permission
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any, Self

    import trustme

NIC = "nic0"
NODE, WORLD = "10.71.0.1", "10.71.0.2"
NODE6, WORLD6 = "fd71::1", "fd71::2"
CEILING = Rate.parse("100M")
# The budget is the device's, so that only the ceiling holds the tenant back.
_BUDGET = Rate.parse("4G")
_START_S = 10.0
# A packet that was under way when a counter was read, as in tests/kernel/kernel_flood.py.
_UNDER_WAY_BYTES = 65_536


def _tenant(name: str, class_id: int, *, ceiling: Rate) -> Tenant:
    """A tenant whose server tells HTTP/1.1 and HTTP/2 apart itself."""
    server, peer = Endpoint("127.0.0.1", 4000), Endpoint("127.0.0.1", 6000)
    backends = Backends(http=server, grpc=server, peer=peer)
    return Tenant(name, class_id, Rate(0), ceiling, (f"{name}.kura.test",), (f"peer.{name}.kura.test",), (), backends)


ACME = _tenant("acme", 0x2A7, ceiling=CEILING)
BETA = _tenant("beta", 0x2A8, ceiling=_BUDGET)
DOCUMENT = TenantsDocument("test", (ACME, BETA))


class Wire:
    """The node's device `nic0`, the world at its other end, and the tree that a test puts on it."""

    def __init__(self, near: GatewayRig) -> None:
        """Make the wire. The tree comes with `shape`."""
        self.near = near
        self.world = Namespace()
        # The gateway as a client in the world has it.
        self.rig = replace(near, clients=self.world, address=NODE)
        with closing(os.open(self.world.network, os.O_RDONLY | os.O_CLOEXEC)) as world, inside(near.namespace.network):
            _make_wire(world)
        ends = ((near.namespace, NIC, NODE, NODE6), (self.world, "up0", WORLD, WORLD6))
        for namespace, device, address, address6 in ends:
            namespace.run("ip", "addr", "add", f"{address}/24", "dev", device)
            namespace.run("ip", "addr", "add", f"{address6}/64", "dev", device, "nodad")
            namespace.run("ip", "link", "set", device, "up")
        with inside(near.namespace.network):
            self._client = TcClient()
            self._device = read_device(NIC)
            self._control = KernelTrafficControl(self._client, self._device, clock=SystemClock())
        self._bytes = DeviceBytes(near.namespace.network, [NIC])
        self._owners: Mapping[int, str] = {}
        self._made: Wanted | None = None

    def close(self) -> None:
        """Close what reads counters, and end the world."""
        self._bytes.close()
        self._client.close()
        self.world.close()

    def shape(self, document: TenantsDocument | None = None) -> None:
        """Put the tree of a document on the device, that of the gateway when none is given."""
        document = document or self.near.document
        settings = TreeSettings(_BUDGET, shape=ShapeChoice.SINGLE)
        self._made = build(document, self._device, settings=settings, capabilities=probe())
        with inside(self.near.namespace.network):
            actual = self._control.snapshot()
            todo = plan(self._made, actual, Permission.DISRUPTION)
            assert not todo.refusals, todo.refusals
            outcomes = execute(todo.operations, self._control, clock=SystemClock())
        assert {outcome.status for outcome in outcomes} <= {Status.DONE}, outcomes
        self._owners = owners_of(document)

    def counters(self) -> dict[str, int]:
        """Return the bytes that left so far: of the device, and of each class by its owner's name."""
        sent = {NIC: self._bytes()[f"{NIC}.tx"]}
        if self._owners:
            snapshot = self._control.snapshot()
            assert isinstance(snapshot, Snapshot), snapshot
            sent |= {
                self._owners[classid.minor]: counters.sent_bytes for classid, counters in snapshot.counters.items()
            }
        return sent

    def allowance_bytes(self, tenant: Tenant) -> int:
        """Return what may pass above the ceiling in any window: the bucket, and what was under way."""
        assert self._made is not None
        return _UNDER_WAY_BYTES + next(
            spec.cburst_bytes for spec in self._made.tree.classes if spec.classid.minor == tenant.class_id
        )

    def reading(self) -> ByteSampler:
        """Return what reads the counters every 100 ms while a block runs."""
        return ByteSampler([self.counters])

    def assert_ceiling_held(self, samples: Samples, tenant: Tenant = ACME) -> None:
        """Fail when in any window more left than the ceiling allows, or so little that nothing was tested."""
        for counter in (NIC, tenant.name):
            series = samples.series(counter)
            excess = series.excess(tenant.ceiling, burst_bytes=self.allowance_bytes(tenant))
            assert excess.excess_bytes <= 0, (counter, excess, series.windows())
        # The other bound is soft: a busy machine may not send as much as it is allowed to.
        assert samples.series(tenant.name).whole().rate >= tenant.ceiling.scaled(1, 4)


def _make_wire(world: int) -> None:
    with IPRoute() as ip:
        ip.link("add", ifname=NIC, kind="veth", num_tx_queues=1, peer={"ifname": "up0", "net_ns_fd": world})


@contextmanager
def gateway_on_a_wire(directory: Path, *, version: str, **changes: Any) -> Iterator[Wire]:
    """Yield a gateway for DOCUMENT with the lab's servers, whose clients are at the other end of a wire."""
    changes = {"document": DOCUMENT, "start_servers": start_lab_servers, "maxconn": 1_000, **changes}
    with running_gateway(directory, version=version, **changes) as near, ExitStack() as stack:
        wire = Wire(near)
        stack.callback(wire.close)
        yield wire


def start_lab_servers(stack: ExitStack, rig: GatewayRig, ca: trustme.CA) -> None:
    """Start one process that serves every tenant, and a peer that ends TLS itself."""
    certificate = rig.ca_file.with_name("peers.pem")
    hosts = [host for tenant in rig.document.tenants for host in tenant.peer_hosts]
    ca.issue_cert(*hosts).private_key_and_cert_chain_pem.write_to_path(str(certificate))
    spec = ServerSpec(object_port=4000, peer_port=6000, cert_file=certificate)
    _start(stack, rig.namespace, "kura_shaper.lab.servers", *spec.arguments(), event="ready")


class Clients:
    """Processes of the lab that read as fast as they can."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._stack = ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, *specs: TrafficSpec) -> None:
        """Start one process for each spec, and return when all their streams flow."""
        started = [self._spawn(spec) for spec in specs]
        for process, spec in zip(started, specs, strict=True):
            flowing = next_event(process, "flowing")
            if flowing["streams"] != spec.streams:
                process.terminate()
                said = process.communicate(timeout=20)[0].decode()
                raise AssertionError(f"{spec}: {said}; the gateway: {self._wire.near.log.read_text()[-3000:]}")

    def _spawn(self, spec: TrafficSpec) -> subprocess.Popen[bytes]:
        spec = replace(spec, ca_file=str(self._wire.rig.ca_file))
        process = _spawn(self._stack, self._wire.world, "kura_shaper.lab.traffic", *spec.arguments())
        self.processes.append(process)
        return process


def traffic(application: Application, *, connections: int, streams: int = 1, tenant: Tenant = ACME) -> TrafficSpec:
    """Return what a process of clients of a tenant does; it ends by itself within a minute."""
    is_peer = application is Application.TCP
    return TrafficSpec(
        # The peer's own protocol is HTTP/1.1 over TLS here.
        application=Application.HTTP1 if is_peer else application,
        address=NODE,
        port=PEER_PORT if is_peer else HTTPS_PORT,
        security=Security.TLS,
        sni=(tenant.peer_hosts if is_peer else tenant.hosts)[0],
        connections=connections,
        streams_per_connection=streams,
        duration_ms=60_000,
        # Hundreds of streams in one Python process take a while to flow on a machine of two processors.
        start_timeout_ms=40_000,
    )


def settle() -> None:
    """Let the bucket's first burst pass, and what waited elsewhere."""
    time.sleep(0.3)


def _spawn(stack: ExitStack, namespace: Namespace, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    process = namespace.spawn(sys.executable, "-m", module, *arguments, stdout=-1)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process


def _start(stack: ExitStack, namespace: Namespace, module: str, *arguments: str, event: str) -> None:
    next_event(_spawn(stack, namespace, module, *arguments), event)


def next_event(process: subprocess.Popen[bytes], event: str) -> dict[str, Any]:
    """Return the next event that a process of the lab says, which must be this one."""
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, f"{process.args!r} ended with {process.wait(5)}"
    found: dict[str, Any] = json.loads(said)
    assert found["event"] == event, found
    return found
