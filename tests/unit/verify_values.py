"""A healthy node as `verify` reads it, and what the checks say of it once a value is changed."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from strategies import ETH0, case, kernel_with, tenant

from kura_shaper.kernel.byways import Link, Port
from kura_shaper.kernel.processes import Holders, Process
from kura_shaper.kernel.sockets import Connection, Listener
from kura_shaper.kernel.softnet import Softnet
from kura_shaper.measure import Reading, Series
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.observe import Asked
from kura_shaper.verify.expect import observed_of
from kura_shaper.verify.observed import NodeReading, Question, Sockets, Traffic
from kura_shaper.verify.run import Report, Settings, judge
from kura_shaper.verify.values import Phase

if TYPE_CHECKING:
    from kura_shaper.verify.observed import Observed

ACME, BETA = tenant(0x2A7), tenant(0x2B0)
FLEET = case(ACME, BETA)
QUESTION = Question(FLEET.document, Asked(budget=FLEET.settings.budget))
LISTENERS = tuple(Listener("tcp", ip_address("0.0.0.0"), port, port) for port in FLEET.document.gateway.ports)
_PROCESS = Process(71, "haproxy", "/usr/sbin/haproxy", can_mark=True)
HOLDERS = {one.inode: (_PROCESS,) for one in LISTENERS}
LINKS = (Link("lo", 1), Link("eth0", ETH0.ifindex))
NODE = NodeReading(
    device=ETH0,
    snapshot=kernel_with(FLEET.wanted()).snapshot(),
    links=LINKS,
    port=Port(25_000_000_000),
    default_devices=("eth0",),
    listeners=LISTENERS,
    holders=Holders(HOLDERS),
)
MS = 1_000_000
_CLASSES = (ReservedClass.BUDGET, ReservedClass.UNATTRIBUTED, ReservedClass.UNKNOWN, ACME.class_id, BETA.class_id)


def series(*points: tuple[int, int]) -> Series:
    """Return readings of (ms, bytes)."""
    return Series("a counter", tuple(Reading(at * MS, count) for at, count in points))


STILL = series((0, 7), (1_000, 7))
PEER = ip_address("203.0.113.7")


def connection(mark: int | None, sent_bytes: int, *, cookie: int = 1, **changes: Any) -> Connection:
    """Return a connection of a client in the world."""
    made = Connection(cookie, ip_address("198.51.100.1"), 443, PEER, 40_000 + cookie, 9, mark, sent_bytes)
    return replace(made, **changes)


TRAFFIC = Traffic(
    start_ns=0,
    end_ns=1_000 * MS,
    window_ns=100 * MS,
    readings=11,
    sent=dict.fromkeys(_CLASSES, STILL),
    device=STILL,
    root=STILL,
    before=Sockets(()),
    after=Sockets(()),
    ways={str(PEER): ETH0.ifindex},
    softnet=(Softnet(5, 0), Softnet(5, 9)),
)


def observed(question: Question = QUESTION, traffic: Traffic = TRAFFIC, **node: Any) -> Observed:
    """Return a healthy node but for what is given."""
    return observed_of(question, replace(NODE, **node), traffic)


def report(seen: Observed, settings: Settings | None = None) -> Report:
    """Return the report on it."""
    chosen = settings or Settings()
    return Report(seen, chosen, tuple(judge(seen, chosen, (Phase.STATIC, Phase.PASSIVE))), "2026-01-02T03:04:05+00:00")


def codes_of(seen: Observed) -> list[str]:
    """Return the codes of every finding."""
    return [finding.code.name for finding in report(seen).findings]
