"""What the lab's node serves: three tenants, their servers, certificates and the real gateway."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import trustme

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.binary import find_haproxy
from kura_shaper.haproxy.generation import CONFIG_FILE
from kura_shaper.haproxy.options import GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.write import write_generation
from kura_shaper.lab.isolation import SCRATCH_DIR
from kura_shaper.lab.servers import ServerSpec
from kura_shaper.lab.topology import Family, Lab, LabProcess, LabSpec
from kura_shaper.tenants.file import parse_tenants

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.haproxy.options import BandwidthLimit
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.units import Rate

HTTPS_PORT, PEER_PORT, OBJECT_PORT = 443, 7443, 4000
_DOMAIN = "lab.example"
_GATEWAY_START_S = 10.0
SERVERS_MODULE = "kura_shaper.lab.servers"


@dataclass(frozen=True, slots=True)
class LabTenant:
    """A tenant of the lab."""

    name: str
    class_id: int
    floor: Rate
    ceiling: Rate

    @property
    def host(self) -> str:
        """Its hostname at the gateway."""
        return f"{self.name}.{_DOMAIN}"

    @property
    def peer_host(self) -> str:
        """Its hostname on the peer plane."""
        return f"peer.{self.host}"


def lab_tenants(ceiling: Rate, budget: Rate) -> tuple[LabTenant, ...]:
    """Return the three tenants: the first is held to the ceiling, the others may take all that is free.

    Their floors add up to two thirds of the budget, so that under contention both matter:
    what is promised, and who gets the rest.
    """
    return (
        LabTenant("acme", 0x2A7, ceiling.scaled(1, 4), ceiling),
        LabTenant("globex", 0x2A8, budget.scaled(5, 12), budget),
        LabTenant("initech", 0x2A9, budget.scaled(1, 6), budget),
    )


class World:
    """A standing lab with its tenants' servers running; the gateway is started on its own."""

    def __init__(self, lab: Lab, tenants: tuple[LabTenant, ...]) -> None:
        self.lab = lab
        self.tenants = tenants
        self.document_path = SCRATCH_DIR / "tenants.yaml"
        self.ca_path = SCRATCH_DIR / "ca.pem"
        self._certificates = _make_certificates(self.ca_path, tenants)
        self.document_path.write_text(self._document_text(), encoding="utf-8")
        self.document: TenantsDocument = parse_tenants(self._document_text(), file=str(self.document_path))
        self._gateways = 0

    def start_servers(self) -> None:
        """Start every tenant's backends and return when all of them listen."""
        spec = ServerSpec(object_port=OBJECT_PORT, peer_port=PEER_PORT, cert_file=self._certificates)
        pods = self.lab.topology.pods
        servers = [self.lab.spawn_module(pod.namespace, SERVERS_MODULE, spec.arguments()) for pod in pods]
        for server in servers:
            server.wait_event("ready", timeout_s=_GATEWAY_START_S)

    def start_gateway(self, limit: BandwidthLimit) -> LabProcess:
        """Start HAProxy in the node's own namespace and return when it serves.

        Raises HaproxyMissingError, VersionTooOldError, or StateUnknownError when it does not start.
        """
        binary = find_haproxy()
        self._gateways += 1
        directory = SCRATCH_DIR / f"gateway-{self._gateways}"
        run_directory = directory / "run"
        run_directory.mkdir(parents=True)
        options = GatewayOptions(
            haproxy_version=binary.version,
            directory=PurePosixPath(directory / "current"),
            run_directory=PurePosixPath(run_directory),
            certificate=PurePosixPath(self._certificates),
            user="nobody",
            group="nogroup",
            bandwidth_limit=limit,
            nbthread=2,
            maxconn=1_000,
        )
        write_generation(render(self.document, options), directory)
        return self._start_haproxy(binary.path, directory)

    def _start_haproxy(self, binary: Path, directory: Path) -> LabProcess:
        """Start it in the form that tells its supervisor when it serves (sd_notify), and wait for that."""
        address = str(directory / "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.bind(address)
            notify.settimeout(_GATEWAY_START_S)
            config = str(directory / "current" / CONFIG_FILE)
            argv = ["env", f"NOTIFY_SOCKET={address}", str(binary), "-Ws", "-db", "-f", config]
            process = self.lab.spawn(self.lab.topology.node, argv, name="haproxy")
            try:
                while b"READY=1" not in notify.recv(4096):
                    pass
            except TimeoutError as error:
                words = process.log.read_text(errors="replace")[-600:]
                raise StateUnknownError("the gateway did not start", remedy=" ".join(words.split())) from error
        return process

    def _document_text(self) -> str:
        head = ["apiVersion: kura-shaper/v1", "kind: Tenants", "region: lab", "tenants:"]
        return "\n".join([*head, *(line for tenant in self.tenants for line in self._tenant_text(tenant))]) + "\n"

    def _tenant_text(self, tenant: LabTenant) -> list[str]:
        address = self.lab.topology.pod(tenant.name).addresses.of(Family.V4)
        backends = {"http": OBJECT_PORT, "grpc": OBJECT_PORT, "peer": PEER_PORT}
        return [
            f"  - name: {tenant.name}",
            f"    class: {tenant.class_id:#x}",
            f"    floor: {tenant.floor}",
            f"    ceiling: {tenant.ceiling}",
            f"    hosts: [{tenant.host}]",
            f"    peer_hosts: [{tenant.peer_host}]",
            "    backends:",
            *(f'      {name}: {{address: "{address}:{port}"}}' for name, port in backends.items()),
        ]


def _make_certificates(ca_path: Path, tenants: tuple[LabTenant, ...]) -> Path:
    """Make an authority of this run and one certificate for every hostname; return the latter's path."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(ca_path))
    certificate = authority.issue_cert(*(host for t in tenants for host in (t.host, t.peer_host)))
    path = SCRATCH_DIR / "hosts.pem"
    path.touch(mode=0o600)
    certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
    return path


def lab_spec(tenants: tuple[LabTenant, ...], tx_queues: int) -> LabSpec:
    """Return what the lab's machines look like for these tenants."""
    return LabSpec(tuple(tenant.name for tenant in tenants), tx_queues=tx_queues)
