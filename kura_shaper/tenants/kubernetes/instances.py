"""KuraInstances to a tenants document: values to values.

One account is one tenant, over all of its instances of the region: it has one class, and
replicas and instances never multiply what is promised to it. While they disagree, the
largest floor and the largest ceiling count, so that a rollout takes nothing away.

What can't be read is a problem of its own tenant. That tenant stays as it was in the last
good document, or is left out where there is none; it never becomes a tenant without a
limit, and nobody else notices. A region without any instance keeps the tenants that it had:
a wrong region or a lost definition looks the same, and an empty tree holds nobody back.

A document has one server for each protocol of a tenant, so of several instances the first
by name serves the names of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tenants import check
from kura_shaper.tenants.document import Backends, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.file import REGION_CHARACTERS_MAX
from kura_shaper.tenants.kubernetes.objects import CEILING_ANNOTATION, CLASS_PATH, Effect, Problem
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from ipaddress import IPv4Network, IPv6Network

    from kura_shaper.tenants.document import Endpoint
    from kura_shaper.tenants.kubernetes.objects import Instance

CEILING_PATH = f'spec.podAnnotations["{CEILING_ANNOTATION}"]'
DEFAULT_CEILING = Rate(1_500_000_000)
HTTP_PORT = 4000
PEER_PORT = 7443
_EMPTY = "is the region right? To let all go, remove last-good.json and start the agent anew"


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """What the objects of a region do not say themselves.

    `ceiling` is for accounts without one. `http_service` and `peer_service` name the Service
    that serves an instance, whose name replaces `{instance}`. Raises UsageError.
    """

    region: str
    marks: MarkLayout = field(default_factory=MarkLayout)
    gateway: Gateway = field(default_factory=Gateway)
    ceiling: Rate = DEFAULT_CEILING
    cluster_domain: str = "cluster.local"
    http_service: str = "{instance}-haproxy"
    peer_service: str = "{instance}"

    def __post_init__(self) -> None:
        check.label(self.region, characters_max=REGION_CHARACTERS_MAX)
        check.dns_name(self.cluster_domain)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The document that objects come to, and what is wrong with them."""

    document: TenantsDocument
    problems: tuple[Problem, ...]


@dataclass(slots=True)
class _Account:
    """The instances of one account, by namespace and name, and what has come of them so far."""

    name: str
    members: list[Instance]
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> list[Instance]:
        return [member for member in self.members if member.is_sound]

    def report(self, member: Instance, path: str, message: str, *, remedy: str, effect: Effect) -> None:
        self.problems.append(member.problem(path, message, remedy=remedy, effect=effect))

    def settle(self, effect: Effect) -> None:
        """Say of every problem that kept a tenant from being made what became of the tenant."""
        self.problems = [replace(p, effect=effect) if p.effect is Effect.LEFT_OUT else p for p in self.problems]


def compile_region(
    instances: Iterable[Instance], settings: RegionSettings, *, previous: TenantsDocument | None = None
) -> Compiled:
    """Return the document of a region and the problems of its objects; `previous` is the last good one."""
    ours = [instance for instance in instances if instance.region in ("", settings.region)]
    ours.sort(key=lambda instance: (instance.namespace, instance.name))
    accounts: dict[str, _Account] = {}
    for instance in ours:
        account = accounts.setdefault(instance.account, _Account(instance.account, []))
        account.members.append(instance)
        account.problems.extend(instance.problems)
    strangers = accounts.pop("", None)
    last = previous.tenants if previous and previous.region == settings.region else ()
    region = _Region(settings, {tenant.name: tenant for tenant in last})
    for _, account in sorted(accounts.items()):
        region.add(account)
    region.fall_back()
    problems = [problem for _, account in sorted(accounts.items()) for problem in account.problems]
    if not ours:
        problems += region.keep_all()
    if strangers:
        problems += strangers.problems + region.keep_all_but(accounts, because=strangers.problems[0])
    tenants = sorted(region.tenants, key=lambda tenant: tenant.class_id)
    document = TenantsDocument(settings.region, tuple(tenants), settings.marks, settings.gateway)
    return Compiled(document, tuple(problems))


@dataclass(slots=True)
class _Region:
    """Tenants that were accepted, and who holds what must be unique."""

    settings: RegionSettings
    last: dict[str, Tenant]
    tenants: list[Tenant] = field(default_factory=list)
    classes: dict[int, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    unsettled: list[_Account] = field(default_factory=list)

    def add(self, account: _Account) -> None:
        """Accept what an account says now. Accounts come by name, so the first of two with one class has it."""
        faults = any(problem.effect is Effect.LEFT_OUT for problem in account.problems)
        if (faults and account.name in self.last) or not account.sound:
            self.unsettled.append(account)
            return
        tenant = _merged(account, self.settings, self.last.get(account.name))
        if tenant is None or not self._has_class(account, tenant):
            self.unsettled.append(account)
            return
        account.settle(Effect.PART)
        self._accept(tenant, account.problems, account.sound[0])

    def fall_back(self) -> None:
        """Keep the last good tenant of every account that says nothing usable now, after all that do."""
        for account in self.unsettled:
            former = self.last.get(account.name)
            if former is None or former.class_id in self.classes or not self._fits(former):
                account.settle(Effect.LEFT_OUT)
                continue
            account.settle(Effect.LAST_GOOD)
            self._accept(former, account.problems, account.members[0])

    def keep_all_but(self, accounts: Iterable[str], *, because: Problem) -> list[Problem]:
        """Keep the tenants that nobody speaks of any more: the object that can't be read may be theirs."""
        problems: list[Problem] = []
        for name in sorted(self.last.keys() - set(accounts)):
            former = self.last[name]
            if former.class_id not in self.classes and self._fits(former):
                message = f"may be an instance of {name}, which has no other"
                problem = replace(because, message=message, effect=Effect.LAST_GOOD)
                problems.append(problem)
                self._accept(former, problems, None)
        return problems

    def keep_all(self) -> list[Problem]:
        """Keep every tenant of before, of which nobody speaks any more; one problem tells of them all."""
        kept = [former for former in self.last.values() if self._fits(former)]
        if not kept:
            return []
        name = self.settings.region
        problem = Problem("", name, "KuraInstances", f"are gone, {len(kept)} tenants stay", _EMPTY, Effect.LAST_GOOD)
        for former in kept:
            self._accept(former, [], None)
        return [problem]

    def _fits(self, tenant: Tenant) -> bool:
        return tenant.class_id <= self.settings.marks.class_id_max

    def _has_class(self, account: _Account, tenant: Tenant) -> bool:
        owner = self.classes.get(tenant.class_id)
        if owner is None:
            return True
        member = next(member for member in account.sound if member.class_id == tenant.class_id)
        message = f"class {tenant.class_id:#x} belongs to {owner} already"
        remedy = "the controller gives another: look at its log"
        account.report(member, CLASS_PATH, message, remedy=remedy, effect=Effect.LEFT_OUT)
        return False

    def _accept(self, tenant: Tenant, problems: list[Problem], member: Instance | None) -> None:
        """Take a tenant with the names that nobody has; `member` is the object to name where one is taken."""
        self.classes[tenant.class_id] = tenant.name
        hosts, peer_hosts = (
            tuple(host for host in names if self._claim(host, tenant, problems, member))
            for names in (tenant.hosts, tenant.peer_hosts)
        )
        self.tenants.append(replace(tenant, hosts=hosts, peer_hosts=peer_hosts))

    def _claim(self, host: str, tenant: Tenant, problems: list[Problem], member: Instance | None) -> bool:
        if host not in self.hosts:
            self.hosts[host] = tenant.name
            return True
        if member:
            message = f"host {host} belongs to {self.hosts[host]} already"
            remedy = "no host may stand twice: change or remove one"
            problems.append(member.problem("spec", message, remedy=remedy, effect=Effect.PART))
        return False


def _merged(account: _Account, settings: RegionSettings, former: Tenant | None) -> Tenant | None:
    """Return the one tenant that the sound instances of an account come to; None without a class."""
    members = account.sound
    class_id = _class_id(account, former)
    if class_id is None:
        return None
    floor = max(member.floor for member in members)
    ceiling = max((member.ceiling for member in members if member.ceiling), default=settings.ceiling)
    if ceiling < floor:
        message = f"ceiling {ceiling} is below floor {floor}, which counts for both"
        remedy = "raise the ceiling or lower the floor"
        account.report(members[0], CEILING_PATH, message, remedy=remedy, effect=Effect.NONE)
        ceiling = floor
    served = _served(account)
    backends = _backends(account, served, settings)
    ports = settings.gateway
    return Tenant(
        name=account.name,
        class_id=class_id,
        floor=floor,
        ceiling=ceiling,
        hosts=served.hosts if backends.http and ports.https_ports else (),
        peer_hosts=served.peer_hosts if backends.peer and ports.peer_ports else (),
        client_cidrs=served.networks,
        backends=backends,
    )


def _class_id(account: _Account, former: Tenant | None) -> int | None:
    """Return the class of an account. It is never renumbered while an instance still has the former one."""
    members = account.sound
    found = [member.class_id for member in members if member.class_id is not None]
    if not found:
        for number, problem in enumerate(account.problems):
            if problem.path == CLASS_PATH:
                account.problems[number] = replace(problem, effect=Effect.LEFT_OUT)
                return None
        remedy = "the controller writes it: look at its log"
        account.report(members[0], CLASS_PATH, "is missing", remedy=remedy, effect=Effect.LEFT_OUT)
        return None
    chosen = former.class_id if former and former.class_id in found else found[0]
    for member in members:
        if member.class_id not in (None, chosen):
            message = f"class {member.class_id:#x} is not the {chosen:#x} of {account.name}"
            remedy = "all instances of an account have one class: the controller mends it"
            account.report(member, CLASS_PATH, message, remedy=remedy, effect=Effect.PART)
    return chosen


@dataclass(frozen=True, slots=True)
class _Served:
    """The names of an account, the networks that may reach them, and the first instance with a name."""

    hosts: tuple[str, ...]
    peer_hosts: tuple[str, ...]
    networks: tuple[IPv4Network | IPv6Network, ...]
    server: Instance
    peer: Instance


def _served(account: _Account) -> _Served:
    """Return who is served. Names for some networks only never become names for everybody.

    A document has one list of networks for all names of a tenant, and an instance's own list
    is for all of its names. So where open and restricted names meet, the restricted ones go.
    """
    members = account.sound
    is_open = any(member.hosts and not member.client_cidrs for member in members)
    hosts: list[str] = []
    networks: set[IPv4Network | IPv6Network] = set()
    server: Instance | None = None
    for member in members:
        names = _names(account, member, among_open=is_open)
        if names:
            server = server or member
            hosts += names
            networks |= set() if is_open else set(member.client_cidrs)
    peers = [member for member in members if member.peer_hosts]
    return _Served(
        hosts=tuple(dict.fromkeys(hosts)),
        peer_hosts=tuple(dict.fromkeys(host for peer in peers for host in peer.peer_hosts)),
        networks=tuple(sorted(networks, key=lambda network: (network.version, network))),
        server=server or members[0],
        peer=peers[0] if peers else members[0],
    )


def _names(account: _Account, member: Instance, *, among_open: bool) -> Sequence[str]:
    """Return the names of an instance that can be served beside the account's others."""
    private = (member.private_host,) if member.private_host else ()
    if private and not member.client_cidrs:
        remedy = "list the networks that may connect in spec.clientCIDRs"
        message = f"{member.private_host} is private, and nothing says for whom"
        account.report(member, "spec.privateHost", message, remedy=remedy, effect=Effect.PART)
        return member.hosts
    names = tuple(dict.fromkeys((*member.hosts, *private)))
    if names and member.client_cidrs and among_open:
        remedy = f"give every instance of {account.name} in the region networks, or none"
        message = f"{', '.join(names)}: is for some networks only, and other names of {account.name} are for all"
        account.report(member, "spec.clientCIDRs", message, remedy=remedy, effect=Effect.PART)
        return ()
    return names


def _backends(account: _Account, served: _Served, settings: RegionSettings) -> Backends:
    http = _service(account, served.server, settings.http_service, HTTP_PORT, settings=settings)
    peer = None
    if served.peer_hosts:
        peer = _service(account, served.peer, settings.peer_service, PEER_PORT, settings=settings)
    return Backends(http=http, grpc=http, peer=peer)


def _service(
    account: _Account, member: Instance, template: str, port: int, *, settings: RegionSettings
) -> Endpoint | None:
    service = template.replace("{instance}", member.name)
    try:
        return check.dns_endpoint(f"{service}.{member.namespace}.svc.{settings.cluster_domain}:{port}")
    except UsageError as error:
        account.report(member, "metadata.name", error.message, remedy=error.remedy, effect=Effect.PART)
        return None
