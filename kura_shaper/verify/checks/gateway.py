"""Whether the gateway's ports are the gateway's, whether it may mark, and whether it marks as the document says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.values import Check, Code, Evidence, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.haproxy.sessions import Attribution
    from kura_shaper.kernel.processes import Holders, Process
    from kura_shaper.kernel.sockets import Listener
    from kura_shaper.verify.observed import Observed

PORT_CLOSED = Code(
    "gateway-port-closed",
    Severity.WARNING,
    "nobody listens on a port of the gateway: no customer is served there, and nothing can be shown",
    "start the gateway; if the port is not used here, take it out of the document",
)
PORT_FOREIGN = Code(
    "gateway-port-foreign",
    Severity.ERROR,
    "a process that is not the gateway listens on a gateway port: what it serves carries no mark",
    "stop it, or move it to another port; `--gateway` names the gateway's process",
)
CANT_MARK = Code(
    "gateway-cant-mark",
    Severity.ERROR,
    "the gateway has no capability to mark here (CAP_NET_ADMIN): it serves, and its marks are silently not set",
    "give the gateway CAP_NET_ADMIN (HAProxy: `setcap cap_net_admin`, and the capability in its container)",
)
MARKS_DIFFER = Code(
    "gateway-marks-differ",
    Severity.ERROR,
    "the running gateway gives a tenant another mark than the document: its bytes go to another class, or to none",
    "`kura-shaper render-haproxy --apply` with the same document as this node's tree",
)
OLD_WORKER = Code(
    "gateway-old-worker",
    Severity.WARNING,
    "a worker of an earlier configuration still serves: it has old marks, and a bandwidth limit of its own",
    "let `hard-stop-after` end it, or end it by hand once its connections may go",
)


def _ports(observed: Observed) -> Judged:
    listeners, holders = observed.node.listeners, observed.node.holders
    ports = observed.question.document.gateway.ports
    if isinstance(listeners, Unknown):
        return Judged(unknown=listeners.reason)
    # What only the node itself can reach sends nothing out of the device.
    outward = [one for one in listeners if not one.address.is_loopback]
    open_ports = {one.port for one in outward if one.protocol == "tcp"}
    closed = [port for port in ports if port not in open_ports]
    findings = [Finding(PORT_CLOSED, f"nobody listens on TCP port {port}", evidence={"port": port}) for port in closed]
    if isinstance(holders, Unknown):
        return Judged(findings=tuple(findings), unknown=holders.reason)
    strangers, unseen = _strangers(outward, holders, observed.question.gateway)
    findings += strangers
    seen = f"ports {', '.join(map(str, ports))}: {_names(outward, holders) or 'nobody'}"
    return Judged(seen, tuple(findings), unknown=_unseen(unseen, holders))


def _strangers(outward: Iterable[Listener], holders: Holders, gateway: str) -> tuple[list[Finding], list[Listener]]:
    """Return the findings, and the listeners whose processes are not seen from here."""
    findings, unseen = [], []
    told: set[tuple[int, int]] = set()
    for one in outward:
        held_by = holders.by_inode.get(one.inode, ())
        if not held_by:
            unseen.append(one)
        for process in held_by:
            if process.command == gateway or (process.pid, one.port) in told:
                continue
            told.add((process.pid, one.port))
            evidence: Evidence = {
                "port": one.port,
                "pid": process.pid,
                "command": process.command,
                "program": process.program,
            }
            message = f"{process} listens on {one}; the gateway is {gateway!r}"
            findings.append(Finding(PORT_FOREIGN, message, evidence=evidence))
    return findings, unseen


def _unseen(listeners: list[Listener], holders: Holders) -> str:
    if not listeners:
        return ""
    hidden = f", and the descriptors of {holders.unreadable} processes can't be read" if holders.unreadable else ""
    return f"whoever holds {', '.join(map(str, listeners[:3]))} is not seen from here (the host's /proc?){hidden}"


def _names(outward: Iterable[Listener], holders: Holders) -> str:
    names = {process.command for one in outward for process in holders.by_inode.get(one.inode, ())}
    return ", ".join(sorted(names))


def _capability(observed: Observed) -> Judged:
    holders, gateway = observed.node.holders, observed.question.gateway
    if isinstance(holders, Unknown):
        return Judged(unknown=holders.reason)
    processes: dict[int, Process] = {p.pid: p for some in holders.by_inode.values() for p in some}
    ours = [process for process in processes.values() if process.command == gateway]
    if not ours:
        return Judged(skipped=f"no process {gateway!r} listens on a gateway port")
    unable = [process for process in ours if process.can_mark is False]
    if unable:
        words = "has no CAP_NET_ADMIN, nor what may stand for it"
        return Judged(findings=tuple(Finding(CANT_MARK, f"{p} {words}", evidence={"pid": p.pid}) for p in unable))
    if any(process.can_mark is None for process in ours):
        return Judged(unknown="the gateway's capabilities can't be read")
    return Judged(f"pid {', '.join(str(process.pid) for process in ours)} may set marks")


def _configuration(observed: Observed) -> Judged:
    attribution = _attribution(observed)
    if not isinstance(attribution, Judged):
        return _judge_configuration(attribution, observed)
    return attribution


def _judge_configuration(attribution: Attribution, observed: Observed) -> Judged:
    document = observed.question.document
    findings = list(_old_workers(attribution, observed.question.old_worker_s))
    if attribution.marks is None:
        return Judged(findings=tuple(findings), unknown="the gateway has no map of marks: it was not rendered here")
    served = {tenant.name: document.marks.mark(tenant.class_id) for tenant in document.tenants}
    for name in sorted(served.keys() | attribution.marks.keys()):
        wanted, has = served.get(name), attribution.marks.get(name)
        if wanted != has:
            findings.append(_marks_differ(name, wanted, has))
    seen = f"{len(served)} tenants marked as in the document, {len(attribution.workers.old)} old workers"
    return Judged(seen, tuple(findings))


def _marks_differ(name: str, wanted: int | None, has: int | None) -> Finding:
    words = [f"{mark:#010x}" if mark is not None else "none" for mark in (has, wanted)]
    message = f"the gateway gives {name} the mark {words[0]}, the document {words[1]}"
    return Finding(MARKS_DIFFER, message, name, evidence={"gateway": words[0], "document": words[1]})


def _old_workers(attribution: Attribution, limit_s: int) -> Iterable[Finding]:
    # One is old from the moment on that the present worker was started.
    since_s = attribution.workers.current.age_s
    for worker in attribution.workers.old:
        if since_s > limit_s:
            message = f"worker {worker.pid} has been an old one for {since_s} s"
            yield Finding(OLD_WORKER, message, evidence={"pid": worker.pid, "age_s": worker.age_s})


def _attribution(observed: Observed) -> Attribution | Judged:
    found = observed.node.attribution
    if found is None:
        return Judged(skipped="no --master-socket was given")
    return Judged(unknown=found.reason) if isinstance(found, Unknown) else found


CHECKS = (
    Check(
        "gateway-ports",
        "Do the gateway's ports belong to the gateway alone?",
        Phase.STATIC,
        (PORT_CLOSED, PORT_FOREIGN),
        _ports,
    ),
    Check(
        "gateway-capability",
        "May the gateway set marks?",
        Phase.STATIC,
        (CANT_MARK,),
        _capability,
    ),
    Check(
        "gateway-configuration",
        "Does the running gateway mark as the document says, and does no old worker serve on?",
        Phase.STATIC,
        (MARKS_DIFFER, OLD_WORKER),
        _configuration,
    ),
)
