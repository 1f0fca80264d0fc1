"""The machines of the lab as network namespaces: a node with a NIC, pods behind it, a client beyond it.

    client  up0 ------- nic0  node  pod-0 ------- eth0  pod of the first tenant
                                    pod-1 ------- eth0  pod of the second tenant
                                    pod-2 ------- eth0  `local`, a reader on the same node

`nic0` stands for the physical device: it has several transmit queues, sends single segments
and carries the node's default routes. Pods hang on /32 and /128 routes as under a CNI. What a
topology looks like is a value (`plan`); a `Lab` makes it and owns the processes in it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyroute2 import IPRoute, netns
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.lab.isolation import NETNS_DIR, SCRATCH_DIR, inside
from kura_shaper.lab.nic import count_wire_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

NIC: Final = "nic0"
UPLINK: Final = "up0"
_NIC_NETWORKS = (IPv4Network("10.60.0.0/24"), IPv6Network("fd4b:7572:6100::/64"))
_POD_NETWORKS = (IPv4Network("10.61.0.0/16"), IPv6Network("fd4b:7572:6101::/64"))
_FIRST_POD_HOST = 257
_MAX_TENANTS = 1_000
_IFA_F_NODAD = 0x02
_RT_SCOPE_LINK = 253
_LOG_TAIL_BYTES = 800


class Family(enum.Enum):
    """An address family."""

    V4 = "v4"
    V6 = "v6"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The IPv4 and the IPv6 address of a place."""

    v4: IPv4Address
    v6: IPv6Address

    def of(self, family: Family) -> str:
        """Return the address of that family as text."""
        return str(self.v4 if family is Family.V4 else self.v6)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A named network namespace; within the run `ip netns exec NAME` reaches it too."""

    name: str

    @property
    def path(self) -> Path:
        """The file that it is bound to."""
        return NETNS_DIR / self.name


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod: its role (a tenant's name, or `local`) and the name that its veth has on the node."""

    role: str
    namespace: Namespace
    addresses: Addresses
    host_device: str


@dataclass(frozen=True, slots=True)
class LabSpec:
    """What is wanted: a pod for each tenant, and a NIC with so many transmit queues."""

    tenants: tuple[str, ...]
    tx_queues: int = 4
    mtu_bytes: int = 1_500


@dataclass(frozen=True, slots=True)
class Topology:
    """Every name and address of a lab."""

    spec: LabSpec
    node: Namespace
    client: Namespace
    node_addresses: Addresses
    client_addresses: Addresses
    pod_gateway: Addresses
    pods: tuple[Pod, ...]
    local: Pod

    def pod(self, tenant: str) -> Pod:
        """Return the pod of a tenant. Raises UsageError when there is none."""
        for pod in self.pods:
            if pod.role == tenant:
                return pod
        raise UsageError(f"the lab has no tenant {tenant!r}", remedy=f"known: {', '.join(self.spec.tenants)}")

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace of the lab."""
        return (self.node, self.client, *(pod.namespace for pod in (*self.pods, self.local)))


def plan(spec: LabSpec, run_id: str) -> Topology:
    """Return the names and addresses of a lab.

    Raises UsageError when it can't be made: no tenant, a repeated name, too many, no queue.
    """
    if not 1 <= len(spec.tenants) <= _MAX_TENANTS or len(set(spec.tenants)) < len(spec.tenants):
        raise UsageError(f"a lab needs 1 to {_MAX_TENANTS} tenants with different names, not {spec.tenants[:8]}")
    if spec.tx_queues < 1:
        raise UsageError(f"a NIC has 1 or more transmit queues, not {spec.tx_queues}")
    pods = [
        Pod(
            role=role,
            namespace=Namespace(f"ks-{run_id}-{name}"),
            addresses=_host(_POD_NETWORKS, _FIRST_POD_HOST + index),
            host_device=f"pod-{index}",
        )
        for index, (role, name) in enumerate([*((name, f"pod-{name}") for name in spec.tenants), ("local", "local")])
    ]
    return Topology(
        spec=spec,
        node=Namespace(f"ks-{run_id}-node"),
        client=Namespace(f"ks-{run_id}-client"),
        node_addresses=_host(_NIC_NETWORKS, 1),
        client_addresses=_host(_NIC_NETWORKS, 2),
        pod_gateway=_host(_POD_NETWORKS, 1),
        pods=tuple(pods[:-1]),
        local=pods[-1],
    )


def _host(networks: tuple[IPv4Network, IPv6Network], number: int) -> Addresses:
    return Addresses(networks[0][number], networks[1][number])


class LabProcess:
    """A process in a namespace of the lab. What it prints and doesn't say as an event is in `log`."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], *, log: Path) -> None:
        self.name = name
        self.child = child
        self.log = log
        self._unread = b""

    def wait_event(self, event: str, *, timeout_s: float) -> dict[str, Any]:
        """Return the next line of JSON on its output whose `event` is this; others are dropped.

        Raises StateUnknownError when the process ends first or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if not found:
                self._unread += self._read(deadline_s, event)
                continue
            self._unread = rest
            record = json.loads(line) if line.startswith(b"{") else {}
            if record.get("event") == event:
                return dict(record)

    def _read(self, deadline_s: float, event: str) -> bytes:
        if self.child.stdout is None:
            raise UsageError(f"{self.name} has no events")
        poll = select.poll()
        poll.register(self.child.stdout, select.POLLIN)
        in_time = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1_000)
        part = os.read(self.child.stdout.fileno(), 65_536) if in_time else b""
        if not part:
            words = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            problem = f"ended before {event!r}" if in_time else f"did not say {event!r} in time"
            raise StateUnknownError(f"{self.name} {problem}", remedy=words)
        return part

    def stop(self, *, grace_s: float = 2.0) -> int:
        """End it with SIGTERM, or SIGKILL when it stays, with all that it started; return its status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.terminate()
            self.child.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        return self.child.wait()


class Lab:
    """A topology that stands for the length of a `with` block, and the processes in it.

    Only inside `run_isolated`, which takes away whatever this can't. Entering it raises
    UsageError elsewhere, and RefusedError when the kernel refuses a part.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.topology = plan(spec, secrets.token_hex(3))
        self._processes: list[LabProcess] = []

    def __enter__(self) -> Lab:
        if not SCRATCH_DIR.is_dir():
            raise UsageError("a lab stands only inside run_isolated")
        try:
            _raise(self.topology)
        except (NetlinkError, OSError) as error:
            self._clear()
            raise RefusedError(f"a part of the lab could not be made: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def _clear(self) -> None:
        for process in reversed(self._processes):
            process.stop(grace_s=0)
        for namespace in self.topology.namespaces:
            with contextlib.suppress(OSError):
                netns.remove(namespace.name)

    def spawn(self, namespace: Namespace, argv: Sequence[str], *, name: str = "") -> LabProcess:
        """Start a program in a namespace, with all its output in its log.

        It is killed at the latest when the lab ends. Raises UsageError when it can't be started.
        """
        return self._spawn(namespace, argv, name=name or Path(argv[0]).name, stdout=None)

    def spawn_module(self, namespace: Namespace, module: str, arguments: Sequence[str]) -> LabProcess:
        """Start a module with this interpreter, with its output read by `wait_event`; see `spawn`."""
        argv = [sys.executable, "-m", module, *arguments]
        return self._spawn(namespace, argv, name=module.rpartition(".")[2], stdout=subprocess.PIPE)

    def _spawn(self, namespace: Namespace, argv: Sequence[str], *, name: str, stdout: int | None) -> LabProcess:
        log = SCRATCH_DIR / f"{len(self._processes)}-{name}.log"
        with log.open("wb") as file, inside(namespace.path):
            try:
                child = subprocess.Popen(  # noqa: S603 - a list, started without a shell
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=file if stdout is None else stdout,
                    stderr=file,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"{argv[0]} could not be started: {error.strerror}") from error
        self._processes.append(LabProcess(name, child, log=log))
        return self._processes[-1]


def _raise(topology: Topology) -> None:
    for namespace in topology.namespaces:
        netns.create(namespace.name)
        with inside(namespace.path):
            _set_sysctls(forwarding="1" if namespace == topology.node else "0")
    pods = (*topology.pods, topology.local)
    with _links(topology.node) as node:
        _add_veth(node, NIC, peer=(UPLINK, topology.client), spec=topology.spec)
        count_wire_bytes(topology.node.path, NIC)
        _configure(node, NIC, addresses=topology.node_addresses, networks=_NIC_NETWORKS)
        for pod in pods:
            _add_veth(node, pod.host_device, peer=("eth0", pod.namespace), spec=topology.spec)
            _configure(node, pod.host_device, addresses=topology.pod_gateway)
            _route(node, pod.host_device, to=pod.addresses)
    with _links(topology.client) as client:
        _configure(client, UPLINK, addresses=topology.client_addresses, networks=_NIC_NETWORKS)
        _route(client, UPLINK, via=topology.node_addresses)
    with _links(topology.node) as node:
        _route(node, NIC, via=topology.client_addresses)
    for pod in pods:
        with _links(pod.namespace) as links:
            _configure(links, "eth0", addresses=pod.addresses)
            _route(links, "eth0", to=topology.pod_gateway)
            _route(links, "eth0", via=topology.pod_gateway)


@contextlib.contextmanager
def _links(namespace: Namespace) -> Iterator[Any]:
    """A netlink socket of a namespace, with its loopback up."""
    with inside(namespace.path), IPRoute() as links:
        links.link("set", index=1, state="up")
        yield links


def _set_sysctls(*, forwarding: str) -> None:
    settings = {
        "ipv4/ip_forward": forwarding,
        "ipv6/conf/all/forwarding": forwarding,
        "ipv6/conf/all/disable_ipv6": "0",
        "ipv6/conf/default/disable_ipv6": "0",
        # Addresses are usable at once: nobody else is there to have the same one.
        "ipv6/conf/default/accept_dad": "0",
        "ipv6/conf/default/accept_ra": "0",
        # A connection's fate must not teach the next one of the run.
        "ipv4/tcp_no_metrics_save": "1",
    }
    for key, value in settings.items():
        Path("/proc/sys/net", key).write_text(value, encoding="ascii")


def _add_veth(links: Any, name: str, *, peer: tuple[str, Namespace], spec: LabSpec) -> None:
    queues = spec.tx_queues if name == NIC else 1
    shape = {"num_tx_queues": queues, "num_rx_queues": queues, "mtu": spec.mtu_bytes}
    far_end = {"ifname": peer[0], "net_ns_fd": peer[1].name, **shape}
    links.link("add", ifname=name, kind="veth", peer=far_end, **shape)


def _configure(
    links: Any, device: str, *, addresses: Addresses, networks: tuple[IPv4Network, IPv6Network] | None = None
) -> None:
    """Bring a device up with its addresses, each alone (/32, /128) or in its network."""
    index = links.link_lookup(ifname=device)[0]
    v4_bits, v6_bits = (network.prefixlen for network in networks) if networks else (32, 128)
    links.addr("add", index=index, address=str(addresses.v4), prefixlen=v4_bits)
    links.addr("add", index=index, address=str(addresses.v6), prefixlen=v6_bits, flags=_IFA_F_NODAD)
    links.link("set", index=index, state="up")


def _route(links: Any, device: str, *, to: Addresses | None = None, via: Addresses | None = None) -> None:
    """Route a place on the link, or everything behind it, through a device."""
    index = links.link_lookup(ifname=device)[0]
    for family, default in ((Family.V4, "0.0.0.0/0"), (Family.V6, "::/0")):
        if to:
            links.route("add", oif=index, dst=to.of(family), scope=_RT_SCOPE_LINK)
        if via:
            links.route("add", oif=index, dst=default, gateway=via.of(family))
