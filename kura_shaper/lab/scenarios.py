"""What the lab shows: the failure as it is today, and the four ways in which it is closed.

today    paths A (direct), B (bypass) and C (local) of the report that this product
         answers, with pacing keyed by the pod
shaped   path B and the peer plane under our tree, which holds alone, then with bwlim
floors   three tenants that all want everything
foreign  somebody else's server on a gateway port
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.haproxy.options import BandwidthLimit
from kura_shaper.lab import today
from kura_shaper.lab.apply import apply_tree
from kura_shaper.lab.measure import CLIENT_DURATION_MS, NIC_TX, ClassBytes, Measurement, measure
from kura_shaper.lab.servers import ServerSpec
from kura_shaper.lab.topology import NIC, Family
from kura_shaper.lab.traffic import Application, Security, TrafficSpec
from kura_shaper.lab.world import HTTPS_PORT, OBJECT_PORT, PEER_PORT, SERVERS_MODULE, World
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import Device, Shape
from kura_shaper.tree.params import burst_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kura_shaper.lab.topology import Namespace
    from kura_shaper.lab.world import LabTenant
    from kura_shaper.units import Rate

UNATTRIBUTED = f"class.{ReservedClass.UNATTRIBUTED.name.lower()}"
_LOCAL_STREAMS = 1


class Scenario(StrEnum):
    """What to show."""

    TODAY = "today"
    SHAPED = "shaped"
    FLOORS = "floors"
    FOREIGN = "foreign"


class Path(StrEnum):
    """Which way the bytes take; the first three are the report's A, B and C."""

    DIRECT = "direct"
    BYPASS = "bypass"
    LOCAL = "local"
    SHAPED = "shaped"
    SHAPED_HTTP2 = "shaped_http2"
    SHAPED_GRPC = "shaped_grpc"
    SHAPED_IPV6 = "shaped_ipv6"
    SHAPED_BWLIM = "shaped_bwlim"
    PEER = "peer"
    FLOORS = "floors"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class LabSettings:
    """What a run measures: the first tenant's ceiling, the node's budget, streams, and how long a point lasts."""

    ceiling: Rate
    budget: Rate
    streams: tuple[int, ...] = (1, 4, 8)
    duration_ms: int = 1_000
    scenarios: tuple[Scenario, ...] = tuple(Scenario)
    shape: Shape = Shape.SINGLE


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point. counter is what its rate is read from, limit what it is held against, if anything."""

    path: Path
    streams: int
    measurement: Measurement
    counter: str = NIC_TX
    limit: Rate | None = None
    burst_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A world, what to measure in it, and whom to tell before each point."""

    world: World
    settings: LabSettings
    tell: Callable[[str], None]

    @property
    def tenant(self) -> LabTenant:
        """The tenant that is held to the ceiling."""
        return self.world.tenants[0]

    def point(
        self,
        path: Path,
        clients: list[tuple[Namespace, TrafficSpec]],
        *,
        counter: str = NIC_TX,
        limit: Rate | None = None,
        classes: ClassBytes | None = None,
    ) -> Point:
        """Measure one point."""
        streams = sum(spec.streams for _, spec in clients)
        self.tell(f"{path}, {in_words(streams)}")
        lab = self.world.lab
        devices = [NIC, *(pod.host_device for pod in lab.topology.pods)]
        measurement = measure(lab, clients, devices=devices, duration_ms=self.settings.duration_ms, classes=classes)
        burst = burst_allowance_bytes(limit, senders=len(clients)) if limit else 0
        return Point(path, streams, measurement, counter, limit, burst)

    def through_gateway(
        self,
        tenant: LabTenant,
        streams: int,
        *,
        application: Application = Application.HTTP1,
        family: Family = Family.V4,
    ) -> tuple[Namespace, TrafficSpec]:
        """Return a client beyond the NIC that reads a tenant's objects through the gateway."""
        return self._client(tenant.host, HTTPS_PORT, streams, application=application, family=family)

    def through_peer_plane(self, tenant: LabTenant, streams: int) -> tuple[Namespace, TrafficSpec]:
        """Return a client beyond the NIC on the peer plane, whose TLS the gateway passes through."""
        return self._client(tenant.peer_host, PEER_PORT, streams, application=Application.HTTP1, family=Family.V4)

    def _client(
        self, host: str, port: int, streams: int, *, application: Application, family: Family
    ) -> tuple[Namespace, TrafficSpec]:
        topology = self.world.lab.topology
        spec = TrafficSpec(
            application=application,
            address=topology.node_addresses.of(family),
            port=port,
            sni=host,
            ca_file=str(self.world.ca_path),
            connections=streams,
            duration_ms=CLIENT_DURATION_MS,
        )
        return topology.client, spec

    def to_pod(self, where: Namespace, streams: int, *, port: int = OBJECT_PORT) -> tuple[Namespace, TrafficSpec]:
        """Return a client in a namespace that reads straight from the tenant's pod."""
        spec = TrafficSpec(
            application=Application.HTTP1,
            security=Security.PLAIN,
            address=self.world.lab.topology.pod(self.tenant.name).addresses.of(Family.V4),
            port=port,
            host=self.tenant.host,
            connections=streams,
            duration_ms=CLIENT_DURATION_MS,
        )
        return where, spec


def in_words(streams: int) -> str:
    """Return a number of streams for people."""
    return f"{streams} {'stream' if streams == 1 else 'streams'}"


def burst_allowance_bytes(limit: Rate, *, senders: int = 1) -> int:
    """Return what a window may have above limit x time: the bucket, and one GSO packet of each sender under way.

    Below a budget each tenant's floor has a bucket of its own, which HTB honours whatever the parent says.
    """
    device = Device(NIC, 0)
    return burst_bytes(limit, device) + senders * device.gso_max_bytes


def today_points(run: Run) -> Iterator[Point]:
    """Show the seed's table: A holds, B does not, C never meets the mechanism."""
    topology = run.world.lab.topology
    pod = topology.pod(run.tenant.name)
    today.install(run.world.lab, pod, run.settings.ceiling)
    gateway = run.world.start_gateway(BandwidthLimit.OFF)
    ceiling = run.settings.ceiling
    for streams in run.settings.streams:
        yield run.point(Path.DIRECT, [run.to_pod(topology.client, streams)], limit=ceiling)
    for streams in run.settings.streams:
        yield run.point(Path.BYPASS, [run.through_gateway(run.tenant, streams)])
    local = run.to_pod(topology.local.namespace, _LOCAL_STREAMS)
    # It never reaches the NIC, so it is read where it leaves the pod.
    yield run.point(Path.LOCAL, [local], counter=f"{pod.host_device}.rx")
    gateway.stop()
    today.remove(run.world.lab)


def shaped_points(run: Run) -> Iterator[Point]:
    """Hold path B by the tree alone over every protocol, then once with bwlim in front of it."""
    ceiling, tenant = run.settings.ceiling, run.tenant
    with _watched_tree(run) as classes:
        gateway = run.world.start_gateway(BandwidthLimit.OFF)
        protocols = {
            Path.SHAPED: Application.HTTP1,
            Path.SHAPED_HTTP2: Application.HTTP2,
        }
        for path, application in protocols.items():
            for streams in run.settings.streams:
                client = run.through_gateway(tenant, streams, application=application)
                yield run.point(path, [client], limit=ceiling, classes=classes)
        for streams in run.settings.streams:
            yield run.point(Path.PEER, [run.through_peer_plane(tenant, streams)], limit=ceiling, classes=classes)
        most = max(run.settings.streams)
        grpc = run.through_gateway(tenant, most, application=Application.GRPC)
        yield run.point(Path.SHAPED_GRPC, [grpc], limit=ceiling, classes=classes)
        ipv6 = run.through_gateway(tenant, most, family=Family.V6)
        yield run.point(Path.SHAPED_IPV6, [ipv6], limit=ceiling, classes=classes)
        gateway.stop()
        gateway = run.world.start_gateway(BandwidthLimit.ON)
        both = run.through_gateway(tenant, most)
        yield run.point(Path.SHAPED_BWLIM, [both], limit=ceiling, classes=classes)
        gateway.stop()


def floors_points(run: Run) -> Iterator[Point]:
    """Let all tenants want everything: the one with the largest floor opens the fewest connections."""
    with _watched_tree(run) as classes:
        gateway = run.world.start_gateway(BandwidthLimit.OFF)
        by_floor = sorted(run.world.tenants, key=lambda tenant: tenant.floor)
        clients = [run.through_gateway(tenant, 8 >> place) for place, tenant in enumerate(by_floor)]
        yield run.point(Path.FLOORS, clients, limit=run.settings.budget, classes=classes)
        gateway.stop()


def foreign_points(run: Run) -> Iterator[Point]:
    """Put somebody else's server on the gateway's port: it knows no mark."""
    topology = run.world.lab.topology
    with _watched_tree(run) as classes:
        server = run.world.lab.spawn_module(
            topology.node, SERVERS_MODULE, ServerSpec(object_port=0, stream_port=HTTPS_PORT).arguments()
        )
        server.wait_event("ready", timeout_s=10)
        spec = TrafficSpec(
            application=Application.TCP,
            security=Security.PLAIN,
            address=topology.node_addresses.of(Family.V4),
            port=HTTPS_PORT,
            connections=4,
            duration_ms=CLIENT_DURATION_MS,
        )
        yield run.point(Path.FOREIGN, [(topology.client, spec)], limit=run.settings.budget, classes=classes)
        server.stop()


def _watched_tree(run: Run) -> ClassBytes:
    """Put the tree in force and return the byte counters of its classes."""
    apply_tree(run.world, run.settings.budget, run.settings.shape)
    return ClassBytes(run.world.lab, run.world.document)


SCENARIOS: dict[Scenario, Callable[[Run], Iterator[Point]]] = {
    Scenario.TODAY: today_points,
    Scenario.SHAPED: shaped_points,
    Scenario.FLOORS: floors_points,
    Scenario.FOREIGN: foreign_points,
}


def run_scenarios(run: Run) -> Iterator[Point]:
    """Yield every point of the scenarios wanted, in the order of their story."""
    for scenario in Scenario:
        if scenario in run.settings.scenarios:
            yield from SCENARIOS[scenario](run)


def expected_points(settings: LabSettings) -> int:
    """Return how many points a run has."""
    of_streams = len(settings.streams)
    counts = {Scenario.TODAY: 2 * of_streams + 1, Scenario.SHAPED: 3 * of_streams + 3}
    return sum(counts.get(scenario, 1) for scenario in settings.scenarios)
