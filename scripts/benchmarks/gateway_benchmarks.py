"""What the gateway costs to render, to check, to change and to keep, beside HAProxy alone and a template.

HAProxy runs in namespaces of its own, so its ports are nobody else's and its checks reach
nobody. Every server that the tenants name is on loopback and answers nothing; a DNS
name stays without an address. What is started ends with this process, however that ends,
and takes its files along.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address, ip_network
from itertools import count
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

import jinja2
from measurement import Measurement, SkippedError, best_in_turns, progress, require, timed

from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.apply import Outcome, ReloadPolicy, Site, carry_out, prepare
from kura_shaper.haproxy.binary import HaproxyBinary, HaproxyMissingError, find_haproxy
from kura_shaper.haproxy.check import check_with_haproxy
from kura_shaper.haproxy.decide import Kind, config_id
from kura_shaper.haproxy.generation import CONFIG_FILE, MANIFEST_FILE, GatewayConfig
from kura_shaper.haproxy.maps import CRT_LIST, GRPC_MAP, MARK_MAP, PEER_MAP, SNI_MAP
from kura_shaper.haproxy.master import MasterSocket, read_workers, reload
from kura_shaper.haproxy.options import BandwidthLimit, GatewayOptions, VersionTooOldError
from kura_shaper.haproxy.process import NO_CONFIG_ID
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.write import write_generation
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_T = TypeVar("_T")
FIRST_CLASS, FLOOR, CEILING = 0x100, Rate.parse("25M"), Rate.parse("1500M")
PROTOCOLS = (("http", 8080), ("grpc", 8980), ("peer", 7443))
HTTPS_PORT, PEER_PORT, METRICS_PORT, DNS_PORT = 18443, 17443, 18405, 10053
# Two descriptors for each connection, one for each server, a few for threads and the program itself.
CONNECTIONS, THREADS, OTHER_DESCRIPTORS = 100, 2, 100
START_S, SETTLE_S = 60, 1.0


# The document that everything is measured with.


@lru_cache(maxsize=2)
def document_of(tenants: int) -> TenantsDocument:
    """Return so many tenants: a tenth has DNS names for servers, another tenth a list of its clients' networks."""
    gateway = Gateway(https_ports=(HTTPS_PORT,), peer_ports=(PEER_PORT,))
    return TenantsDocument("bench", tuple(map(tenant_of, range(tenants))), gateway=gateway)


def tenant_of(number: int) -> Tenant:
    """Return one tenant: two hosts, one host of its peers, a server for each protocol."""
    name = f"tenant-{number:05}"
    # Within 127.0.0.0/8, so that no check of a server ever leaves the machine.
    address = str(ip_address("127.16.0.0") + number)
    if number % 10 == 3:
        servers = [Endpoint(f"{protocol}.{name}.svc.test", port, is_dns_name=True) for protocol, port in PROTOCOLS]
    else:
        servers = [Endpoint(address, port) for _, port in PROTOCOLS]
    first = int(ip_address("10.0.0.0")) + 128 * number
    networks = tuple(ip_network((first + 32 * part, 27)) for part in range(4)) if number % 10 == 7 else ()
    hosts, peer_hosts = (f"{name}.kura.test", f"cache-{name}.kura.test"), (f"peer-{name}.kura.test",)
    return Tenant(name, FIRST_CLASS + number, FLOOR, CEILING, hosts, peer_hosts, networks, Backends(*servers))


def yaml_of(document: TenantsDocument) -> str:
    """Return the document as a person writes it."""
    ports = f"gateway: {{https_ports: [{HTTPS_PORT}], peer_ports: [{PEER_PORT}]}}"
    head = f"apiVersion: kura-shaper/v1\nkind: Tenants\nregion: {document.region}\n{ports}\ntenants:\n"
    return head + "".join(map(yaml_of_tenant, document.tenants))


def yaml_of_tenant(tenant: Tenant) -> str:
    """Return a tenant as an item of the document's list."""
    rows = [f"name: {tenant.name}", f"class: {tenant.class_id:#x}"]
    rows += [f"floor: {tenant.floor}", f"ceiling: {tenant.ceiling}"]
    rows.append(f"hosts: [{', '.join(tenant.hosts)}]")
    if tenant.peer_hosts:
        rows.append(f"peer_hosts: [{', '.join(tenant.peer_hosts)}]")
    if tenant.client_cidrs:
        rows.append(f"client_cidrs: [{', '.join(map(str, tenant.client_cidrs))}]")
    rows.append("backends:")
    for protocol, _ in PROTOCOLS:
        endpoint: Endpoint = getattr(tenant.backends, protocol)
        rows.append(f'  {protocol}: {{{"dns" if endpoint.is_dns_name else "address"}: "{endpoint}"}}')
    return "  - " + "\n    ".join(rows) + "\n"


# Rendering, beside a template.


def rendering(tenants: int, runs: int) -> Iterator[Measurement]:
    """From values in memory to the bytes of every file."""
    name = f"render-{tenants}"
    document, options = document_of(tenants), GatewayOptions((3, 0, 11))
    wanted = render(document, options)
    template = Template.like(wanted, options, first=document.tenants[0])
    check_same_files(wanted, template.render(document))
    text = yaml_of(document)
    parsing_s = timed(lambda: parse_tenants(text, file="bench.yaml"))
    mine, theirs = best_in_turns(
        name, runs, lambda: timed(lambda: render(document, options)), lambda: timed(lambda: template.render(document))
    )
    lines = wanted.files[CONFIG_FILE].count(b"\n")
    note = f"{lines} lines; ours checks and quotes every word; to read the document as YAML: {parsing_s:.3g} s more"
    yield Measurement(name, mine, theirs, "jinja2, the same bytes", "s", note)


@dataclass(frozen=True, slots=True)
class Template:
    """The peer: what other renderers do, a template that was compiled beforehand and quotes nothing.

    What is the same for every document it has as a text that is ready.
    """

    files: Mapping[str, jinja2.Template]
    head: str
    options: GatewayOptions

    @classmethod
    def like(cls, config: GatewayConfig, options: GatewayOptions, *, first: Tenant) -> Template:
        """Return the template that gives the same files; `first` is the tenant that comes first in them."""
        text = without_id(config).decode("ascii")
        head = text.partition(f"\n\nbackend {first.name}_")[0] + "\n"
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        return cls({file: environment.from_string(text) for file, text in TEMPLATES.items()}, head, options)

    def render(self, document: TenantsDocument) -> dict[str, bytes]:
        """Return the files by name."""
        tenants = sorted(document.tenants, key=lambda tenant: tenant.name)
        values = {
            "head": self.head,
            "options": self.options,
            "gateway": document.gateway,
            "marks": document.marks,
            "tenants": tenants,
            "hosts": sorted((host, tenant.name) for tenant in tenants for host in tenant.hosts),
            "peer_hosts": sorted((host, tenant.name) for tenant in tenants for host in tenant.peer_hosts),
        }
        return {file: template.render(values).encode("ascii") for file, template in self.files.items()}


def without_id(config: GatewayConfig) -> bytes:
    """Return the main file as it was before the digest of its text was put into it."""
    return config.files[CONFIG_FILE].replace(config_id(config).encode("ascii"), NO_CONFIG_ID.encode("ascii"))


def check_same_files(ours: GatewayConfig, theirs: Mapping[str, bytes]) -> None:
    """Raise SkippedError when the peer renders something else: then a comparison means nothing."""
    wanted = {**ours.files, CONFIG_FILE: without_id(ours)}
    different = sorted(name for name in wanted.keys() - {MANIFEST_FILE} if theirs.get(name) != wanted[name])
    if different:
        raise SkippedError(f"the template renders another {', '.join(different)}")


_RULES = """
{% macro allowed(tenant, refuse) %}
{% if tenant.client_cidrs %}
    acl allowed src {{ tenant.client_cidrs|join(' ') }}
    {{ refuse }} unless allowed
{% endif %}
{% endmacro %}
{% macro limit(tenant) %}
    filter bwlim-out ceiling limit {{ tenant.ceiling.bytes_per_second }} key str({{ tenant.name }}) \
table ceilings min-size 16384
    tcp-request content set-bandwidth-limit ceiling
{% endmacro %}
{% macro server(endpoint, check) %}
{% if endpoint.is_dns_name %}
    load-server-state-from-file global
    balance first
    server-template p {{ options.dns_servers }} {{ endpoint }} resolvers dns init-addr last,none {{ check }}
{% else %}
    server p0 {{ endpoint }} {{ check }}
{% endif %}
{% endmacro %}
"""
_TENANTS = """\
{{ head }}
{%- for tenant in tenants %}

backend {{ tenant.name }}_edge from tcp
{{ allowed(tenant, 'tcp-request content reject') -}}
{{ limit(tenant) }}    server tls {{ options.tls_socket }} send-proxy-v2

backend {{ tenant.name }}_http from web
{{ allowed(tenant, 'http-request deny deny_status 403') }}    option httpchk GET /ready
{{ server(tenant.backends.http, 'check inter 1s fall 2 rise 1') }}
backend {{ tenant.name }}_grpc from web
{{ allowed(tenant, 'http-request deny deny_status 403') -}}
{% if tenant.backends.http.host == tenant.backends.grpc.host %}
    option httpchk GET /ready
{{ server(tenant.backends.grpc, 'proto h2 check port %s check-proto h1 inter 1s fall 2 rise 1'
    % tenant.backends.http.port) -}}
{% else %}
{{ server(tenant.backends.grpc, 'proto h2 check inter 1s fall 2 rise 1') -}}
{% endif %}

backend {{ tenant.name }}_peer from tcp
{{ allowed(tenant, 'tcp-request content reject') -}}
{{ limit(tenant) }}    timeout server 10m
{{ server(tenant.backends.peer, 'check inter 1s fall 2 rise 1') -}}
{% endfor %}
"""
TEMPLATES = {
    CONFIG_FILE: _RULES.strip("\n") + "\n" + _TENANTS,
    SNI_MAP: "{% for host, tenant in hosts %}\n{{ host }} {{ tenant }}\n{% endfor %}",
    PEER_MAP: "{% for host, tenant in peer_hosts %}\n{{ host }} {{ tenant }}\n{% endfor %}",
    MARK_MAP: "{% for tenant in tenants %}\n{{ tenant.name }} {{ marks.mark(tenant.class_id) }}\n{% endfor %}",
    GRPC_MAP: "{% for prefix in gateway.grpc_prefixes|sort %}\n{{ prefix }} grpc\n{% endfor %}",
    CRT_LIST: "{% for host, _ in hosts %}\n{{ options.certificate }} {{ host }}\n{% endfor %}",
}


# HAProxy reads the files, beside HAProxy alone.


def checking(tenants: int, runs: int) -> Iterator[Measurement]:
    """From values to HAProxy's verdict: rendered, written, read, and the certificates looked at."""
    name, binary = f"check-{tenants}", require_haproxy()
    with tempfile.TemporaryDirectory(prefix="kura-shaper-bench-") as scratch:
        document, options = document_of(tenants), options_in(Path(scratch), binary)
        write_generation(render(document, options), Path(scratch, "gateway"))
        line = [str(binary.path), "-dW", "-c", "-f", options.file(CONFIG_FILE)]

        def ours() -> None:
            report = check_with_haproxy(document, options, binary=binary)
            if report.findings or report.notes:
                raise SkippedError(f"the check says: {(*report.findings, *report.notes)[0]}")

        def peer() -> None:
            subprocess.run(line, check=True, capture_output=True, env={}, timeout=START_S)

        mine, theirs = best_in_turns(name, runs, lambda: timed(ours), lambda: timed(peer))
    note = f"rendered, written, read by HAProxy {version_of(binary)}, every host's certificate looked at"
    yield Measurement(name, mine, theirs, "haproxy -dW -c, files there already", "s", note)


def require_haproxy() -> HaproxyBinary:
    """Return the HAProxy to measure. Raises SkippedError without one."""
    try:
        return find_haproxy()
    except (HaproxyMissingError, VersionTooOldError) as error:
        raise SkippedError(str(error)) from error


def version_of(binary: HaproxyBinary) -> str:
    """Return a program's version as HAProxy prints it."""
    return ".".join(map(str, binary.version))


def options_in(scratch: Path, binary: HaproxyBinary) -> GatewayOptions:
    """Return how a gateway runs that has all its files in one directory, and put its certificate there."""
    import trustme

    certificate = trustme.CA().issue_cert("*.kura.test")
    pem = scratch / "tls.pem"
    pem.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    return GatewayOptions(
        binary.version,
        directory=PurePosixPath(scratch, "gateway", "current"),
        run_directory=PurePosixPath(scratch),
        certificate=PurePosixPath(pem),
        user="root",
        group="root",
        nbthread=THREADS,
        maxconn=CONNECTIONS,
        metrics_bind=Endpoint("127.0.0.1", METRICS_PORT),
        resolvers=(Endpoint("127.0.0.1", DNS_PORT),),
        # A service of Kubernetes has one address.
        dns_servers=1,
    )


# A gateway that runs.


@dataclass(slots=True)
class RunningGateway:
    """A gateway with what is asked of it. `document` is what it was last given; `note` says what this machine lacks."""

    document: TenantsDocument
    site: Site
    processes: Path
    note: str

    def apply(self, document: TenantsDocument, kind: Kind) -> tuple[float, float]:
        """Bring the gateway to a document and return the seconds of preparing and of carrying out.

        Raises SkippedError when that was done in another way than the kind.
        """
        start = time.perf_counter()
        prepared = prepare(document, self.site)
        middle = time.perf_counter()
        applied = carry_out(prepared, self.site)
        end = time.perf_counter()
        if applied.outcome is not Outcome.APPLIED or applied.decision.kind is not kind or applied.notes:
            raise SkippedError(f"{applied.outcome}, {applied.decision.kind}: {(*applied.notes, 'no note')[0]}")
        self.document = document
        return middle - start, end - middle

    def reload(self) -> float:
        """Have the gateway read the files that are there, and return the seconds that takes."""
        return timed(lambda: reload(self.site.master))

    def settle(self) -> None:
        """Wait until the workers from before are gone and the first checks of all servers are over."""
        deadline = time.monotonic() + START_S
        while read_workers(self.site.master).old and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(SETTLE_S)

    def worker_mb(self) -> float:
        """Return the resident memory of the worker that serves."""
        self.settle()
        pid = read_workers(self.site.master).current.pid
        return status_mb(self.processes / str(pid), "VmRSS")


def status_mb(process: Path, key: str) -> float:
    """Return a size of a process in units of 10^6 bytes."""
    rows = (row.split() for row in (process / "status").read_text().splitlines())
    return next(int(row[1]) for row in rows if row[0] == f"{key}:") * 1024 / 1_000_000


@contextmanager
def running_gateway(tenants: int, *, limit: BandwidthLimit = BandwidthLimit.ON) -> Iterator[RunningGateway]:
    """Start a gateway for so many tenants; end it, with all that belongs to it, when the block ends."""
    binary = require_haproxy()
    require_namespaces()
    scratch = Path(tempfile.mkdtemp(prefix="kura-shaper-bench-"))
    try:
        options = replace(options_in(scratch, binary), bandwidth_limit=limit)
        document, note = fitting(document_of(tenants), options)
        write_generation(render(document, options), scratch / "gateway")
        line = [str(binary.path), "-W", "-S", str(scratch / "master.sock"), "-f", options.file(CONFIG_FILE)]
        master = MasterSocket(scratch / "master.sock")
        with namespaces(scratch) as holder, haproxy(holder, line, scratch / "haproxy.log", master):
            site = Site(options, scratch / "gateway", master, policy=ReloadPolicy(0, old_workers_max=64))
            gateway = RunningGateway(document, site, Path(f"/proc/{holder}/root/proc"), note)
            gateway.settle()
            yield gateway
    except KuraShaperError as error:
        raise SkippedError(str(error)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def require_namespaces() -> None:
    """Raise SkippedError where nothing can be run in namespaces of its own."""
    if os.geteuid() != 0:
        raise SkippedError("needs root")
    for command in ("unshare", "nsenter", "ip"):
        require(command)


def fitting(document: TenantsDocument, options: GatewayOptions) -> tuple[TenantsDocument, str]:
    """Return the document with as many servers as this machine has descriptors for, and what was left out."""
    rows = render(document, options).text(CONFIG_FILE).split("\n")
    # Each counts, with a check or without; a template has one, as the options say.
    servers = sum(row.startswith(("    server ", "    server-template ")) for row in rows)
    needed = servers + 2 * options.process_maxconn + OTHER_DESCRIPTORS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    missing = needed - most
    if missing <= 0 or can_raise_limit(needed):
        return document, ""
    if missing > len(document.tenants) // 5:
        raise SkippedError(f"needs {needed} descriptors, and the limit is {most}")
    kept, short = document.tenants[:-missing], document.tenants[-missing:]
    tenants = (*kept, *(replace(tenant, peer_hosts=()) for tenant in short))
    why = f"{missing} tenants without peers, since the limit is {most} descriptors"
    return replace(document, tenants=tenants), why


def can_raise_limit(descriptors: int) -> bool:
    """Whether HAProxy could raise the limit on its descriptors, as root may on most machines."""
    tried = subprocess.run(["sh", "-c", f"ulimit -n {descriptors}"], check=False, capture_output=True)
    return tried.returncode == 0


@contextmanager
def namespaces(scratch: Path) -> Iterator[int]:
    """Make namespaces for network, mounts and processes; yield the id of the process that holds them.

    The first process inside waits for the end of its input, which the end of this process brings too. With it
    every other one inside ends; the directory goes last.
    """
    inside = 'ip link set lo up && echo ready && cat >/dev/null; rm -rf -- "$1"'
    line = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", inside, "sh", str(scratch)]
    # A session of its own: Ctrl-C is for us, who then close the input.
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"ready\n":
                raise SkippedError("needs namespaces")
            yield holder.pid
        finally:
            holder.stdin.close()


@contextmanager
def haproxy(holder: int, line: list[str], log: Path, master: MasterSocket) -> Iterator[None]:
    """Run HAProxy in the holder's namespaces, from when a worker answers; it ends with the holder at the latest."""
    doors = ["nsenter", f"--net=/proc/{holder}/ns/net", f"--pid=/proc/{holder}/ns/pid_for_children"]
    with (
        log.open("wb") as output,
        subprocess.Popen([*doors, *line], stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
    ):
        try:
            wait_for_worker(process, master, log)
            yield
        finally:
            process.kill()


def wait_for_worker(process: subprocess.Popen[bytes], master: MasterSocket, log: Path) -> None:
    """Return once a worker answers. Raises SkippedError, with HAProxy's words, when none does."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(KuraShaperError):
            if "Version:" in master.ask("@1 show info"):
                return
        time.sleep(0.05)
    alerts = [row for row in log.read_text(errors="replace").splitlines() if row.startswith("[ALERT]")]
    raise SkippedError(f"HAProxy did not start: {(alerts or ['it gives no reason'])[0]}")


# Changes of a gateway that runs, beside a bare reload.


def reloading(tenants: int, runs: int) -> Iterator[Measurement]:
    """Another ceiling for one tenant, which HAProxy takes by a reload alone."""
    name, ceilings = f"reload-{tenants}", count(1)
    with running_gateway(tenants) as gateway:
        whole, parts = contender(gateway, lambda document: with_ceiling(document, next(ceilings)), Kind.RELOAD)
        mine, theirs = best_in_turns(name, runs, whole, lambda: settled(gateway, gateway.reload))
    yield Measurement(
        name, mine, theirs, "reload at the master's socket, files there already", "s", noted(gateway, parts_of(parts))
    )


def changing_host(tenants: int, runs: int) -> Iterator[Measurement]:
    """One more hostname for one tenant, which the gateway takes while it runs."""
    name, numbers = f"change-host-{tenants}", count(1)
    with running_gateway(tenants) as gateway:
        whole, parts = contender(gateway, lambda document: with_host(document, next(numbers)), Kind.RUNTIME)
        mine, theirs = best_in_turns(name, runs, whole, lambda: settled(gateway, gateway.reload))
    yield Measurement(
        name, mine, theirs, "reload at the master's socket, files there already", "s", noted(gateway, parts_of(parts))
    )


def contender(
    gateway: RunningGateway, change: Callable[[TenantsDocument], TenantsDocument], kind: Kind
) -> tuple[Callable[[], float], list[tuple[float, float]]]:
    """Return what applies one more change and returns its seconds, and the list that it leaves the parts of them in."""
    parts: list[tuple[float, float]] = []

    def whole() -> float:
        document = change(gateway.document)
        parts.append(settled(gateway, lambda: gateway.apply(document, kind)))
        return sum(parts[-1])

    return whole, parts


def settled(gateway: RunningGateway, work: Callable[[], _T]) -> _T:
    """Return work() done at a moment when the gateway does nothing else than to serve."""
    gateway.settle()
    return work()


def parts_of(parts: list[tuple[float, float]]) -> str:
    """Return in words what the best run consists of."""
    preparing_s, carrying_s = min(parts, key=sum)
    return f"render, read, decide {preparing_s:.3g} s; write, change, read back {carrying_s:.3g} s"


def noted(gateway: RunningGateway, words: str) -> str:
    """Return the words, and what this machine lacks for the whole document."""
    return f"{words}; {gateway.note}" if gateway.note else words


def with_ceiling(document: TenantsDocument, number: int) -> TenantsDocument:
    """Return the document with a ceiling for its first tenant that no other number gives."""
    first, *others = document.tenants
    return replace(document, tenants=(replace(first, ceiling=Rate(CEILING.bits_per_second + 8_000 * number)), *others))


def with_host(document: TenantsDocument, number: int) -> TenantsDocument:
    """Return the document with one more host for its first tenant."""
    first, *others = document.tenants
    return replace(document, tenants=(replace(first, hosts=(*first.hosts, f"more-{number}.kura.test")), *others))


# What it keeps in memory.


def memory(tenants: int) -> Iterator[Measurement]:
    """HAProxy's worker with a shared ceiling for each tenant, and without; and the process that applies."""
    name = f"memory-gateway-{tenants}"
    progress(f"{name}: one tenant")
    with running_gateway(1) as gateway:
        base = gateway.worker_mb()
    progress(f"{name}: without ceilings")
    with running_gateway(tenants, limit=BandwidthLimit.OFF) as gateway:
        theirs = gateway.worker_mb()
    progress(f"{name}: with ceilings")
    with running_gateway(tenants) as gateway:
        mine = gateway.worker_mb()
        own = own_peak_mb(gateway)
    each = (mine - base) * 1000 / tenants
    words = (
        f"{each:.0f} kB a tenant over the {base:.0f} MB with one; our process, which reads, decides, reloads: {own:.0f}"
    )
    yield Measurement(
        name, mine, theirs, "the same worker without bandwidth limits", "MB", noted(gateway, f"{words} MB at its peak")
    )


def own_peak_mb(gateway: RunningGateway) -> float:
    """Return the most memory that a fresh process takes which reads the document anew, and applies a change of it."""
    text = yaml_of(with_ceiling(gateway.document, 1))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(apply_text, text, gateway.site).result(timeout=START_S)


def apply_text(text: str, site: Site) -> float:
    """Apply a document and return the most memory that this process has had, in units of 10^6 bytes."""
    applied = carry_out(prepare(parse_tenants(text, file="bench.yaml"), site), site)
    if applied.outcome is not Outcome.APPLIED:
        raise SkippedError(f"the change is {applied.outcome}")
    return status_mb(Path("/proc/self"), "VmHWM")


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    "render-1000": lambda: rendering(1_000, runs=9),
    "render-5000": lambda: rendering(5_000, runs=5),
    "check-1000": lambda: checking(1_000, runs=5),
    "check-5000": lambda: checking(5_000, runs=2),
    "reload-1000": lambda: reloading(1_000, runs=5),
    "reload-5000": lambda: reloading(5_000, runs=3),
    "change-host-5000": lambda: changing_host(5_000, runs=3),
    "memory-gateway-1000": lambda: memory(1_000),
    "memory-gateway-5000": lambda: memory(5_000),
}
