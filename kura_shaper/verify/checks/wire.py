"""Whether the bytes pass the tree at all: by the tree's own tripwires, the device, and the gateway's sockets.

The failure that this product exists for was no wrong value: it was a correct configuration that the
traffic did not pass. So what is counted in one place is held against what is counted in another.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.checks.rates import in_words, traffic_of
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.kernel.sockets import Connection
    from kura_shaper.verify.observed import Observed, Traffic

# What is short of this is a matter of the moment that counters were read at.
_MISSING_BYTES, _MISSING_PERCENT = 1_000_000, 5
_RESENT_LEAST = 100
_SHOWN_MAX = 10

UNATTRIBUTED_BYTES = Code(
    "unattributed-bytes",
    Severity.ERROR,
    "payload left a gateway port without a mark: somebody serves customers past the gateway, or it does not mark",
    "`kura-shaper verify --static` names who listens; then the gateway's capability and its map of marks",
)
UNKNOWN_MARK_BYTES = Code(
    "unknown-mark-bytes",
    Severity.ERROR,
    "bytes left with a mark that no class of this node has: they are held to no ceiling",
    "`kura-shaper apply` the document that the gateway was rendered from",
)
DIRECT_PACKETS = Code(
    "direct-packets",
    Severity.ERROR,
    "packets passed an HTB without any class",
    "`kura-shaper plan`: the default class or a leaf is missing",
)
BYTES_OUTSIDE = Code(
    "bytes-outside",
    Severity.ERROR,
    "the device sent bytes that its root qdisc never saw",
    "the check `byways` lists what can: XDP, AF_XDP, hardware; packet sockets may ask for it too (PACKET_QDISC_BYPASS)",
)
TREE_VANISHED = Code(
    "tree-vanished",
    Severity.ERROR,
    "the tree was taken away while it was looked at",
    "find out who did (`tc monitor`): another owner of the device; the agent puts it back and counts it as drift",
)
SOCKET_UNMARKED = Code(
    "socket-unmarked",
    Severity.ERROR,
    "a connection of a gateway port has sent payload and has no mark",
    "see which process holds it (`ss -tnpe`): another server, or a gateway that can't mark",
)
SOCKET_UNKNOWN_MARK = Code(
    "socket-unknown-mark",
    Severity.ERROR,
    "a connection of a gateway port has the mark of a class that the document does not have",
    "bring the gateway and the node to the same document",
)
BYTES_NOT_IN_CLASS = Code(
    "bytes-not-in-class",
    Severity.ERROR,
    "a tenant's connections sent bytes that never came to its class: they left another way, or lost their mark",
    "`ip route get` to such a client with its mark; `nft list ruleset` for whoever sets marks; the check `steering`",
)
SOCKET_WRONG_MARK = Code(
    "socket-wrong-mark",
    Severity.ERROR,
    "the gateway serves a connection as one tenant's, and its socket carries another's mark",
    "compare the gateway's map of marks with the document; a connection of two tenants is a fault of the gateway",
)
RETRANSMITS_HIGH = Code(
    "retransmits-high",
    Severity.WARNING,
    "a tenant's connections send much of their payload again: the wire carries what no payload counter knows",
    "look at drops in its class (`kura-shaper status`), then at the path",
)
SOFTNET_DROPS = Code(
    "softnet-drops",
    Severity.WARNING,
    "the kernel dropped packets between devices and the stack, which no class and no device counts",
    "raise net.core.netdev_max_backlog or spread receiving over more CPUs",
)


def _attribution(observed: Observed) -> Judged:
    traffic = traffic_of(observed)
    if isinstance(traffic, Judged):
        return traffic
    classes = (
        (ReservedClass.UNATTRIBUTED, UNATTRIBUTED_BYTES, "left gateway ports without a mark"),
        (ReservedClass.UNKNOWN, UNKNOWN_MARK_BYTES, "left with a mark that no class has, or unclassified"),
    )
    findings, unknown = [], []
    for class_id, code, words in classes:
        series = traffic.sent.get(class_id)
        if class_id in traffic.broken or series is None:
            unknown.append(f"class {class_id.name.lower()}: {traffic.broken.get(class_id, 'it was not read')}")
        elif sent := series.whole().sent_bytes:
            findings.append(Finding(code, f"{in_words(sent)} {words}", evidence={"bytes": sent}))
    if traffic.direct_packets:
        message = f"{traffic.direct_packets} packets passed without a class"
        findings.append(Finding(DIRECT_PACKETS, message, evidence={"packets": traffic.direct_packets}))
    seen = "0 bytes unattributed, 0 bytes of unknown marks, 0 direct packets"
    return Judged(seen, tuple(findings), unknown="; ".join(unknown))


def _accounting(observed: Observed) -> Judged:
    traffic = observed.traffic
    if traffic is None:
        return Judged(skipped="no traffic was looked at")
    if isinstance(traffic, Unknown):
        return Judged(unknown=traffic.reason)
    if traffic.vanished_at_ns is not None:
        after_ms = (traffic.vanished_at_ns - traffic.start_ns) // 1_000_000
        message = f"the tree was gone {after_ms} ms after the first reading"
        return Judged(findings=(Finding(TREE_VANISHED, message, evidence={"after_ms": after_ms}),))
    ours = traffic_of(observed)
    if isinstance(ours, Judged):
        return ours
    if 0 in traffic.broken:
        return Judged(unknown=traffic.broken[0])
    if min(len(traffic.device.readings), len(traffic.root.readings)) < 2:
        return Judged(unknown="the device was not read twice")
    sent, passed = traffic.device.whole().sent_bytes, traffic.root.whole().sent_bytes
    if traffic.outside_bytes > 0:
        message = f"{in_words(traffic.outside_bytes)} left the device that its root qdisc never saw"
        evidence = {"outside_bytes": traffic.outside_bytes, "device_bytes": sent, "root_bytes": passed}
        return Judged(findings=(Finding(BYTES_OUTSIDE, message, evidence=evidence),))
    return Judged(f"the device sent {in_words(sent)}, its root qdisc passed {in_words(passed)}")


def _sockets(observed: Observed) -> Judged:
    traffic = traffic_of(observed)
    if isinstance(traffic, Judged):
        return traffic
    before, after = traffic.before, traffic.after
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        reason = before.reason if isinstance(before, Unknown) else after.reason if isinstance(after, Unknown) else ""
        return Judged(unknown=reason)
    outward = [one for one in after.connections if _leaves(one, observed, traffic)]
    if not outward:
        return Judged(skipped="no client outside this node was connected to a gateway port at the end")
    if all(one.mark is None for one in outward):
        return Judged(unknown="marks of sockets are shown to CAP_NET_ADMIN only")
    findings = (*_unmarked(outward, observed), *_missing(before.connections, outward, observed, traffic))
    elsewhere = len(after.connections) - len(outward)
    aside = f"; {elsewhere} with peers on this node left aside" if elsewhere else ""
    held = sum(traffic.ways.get(str(one.peer)) == observed.node.device.ifindex for one in outward)
    words = f"{len(outward)} connections of gateway ports, each with a tenant's mark"
    return Judged(f"{words}; bytes of {held} of them held against classes{aside}", findings)


def _leaves(one: Connection, observed: Observed, traffic: Traffic) -> bool:
    """Whether what a connection sends leaves by a NIC, as far as is known: other NICs count too."""
    if one.peer.is_loopback:
        return False
    way = traffic.ways.get(str(one.peer))
    links = observed.node.links
    if way is None or isinstance(links, Unknown) or way == observed.node.device.ifindex:
        return True
    kinds = {link.ifindex: (link.kind, link.name) for link in links}
    kind, name = kinds.get(way, ("", ""))
    # A pod's veth, a bridge, a tunnel: it stays here, or is counted under another name. A NIC has no kind.
    return name == observed.node.device.master or (not kind and name != "lo")


def _unmarked(connections: list[Connection], observed: Observed) -> Iterable[Finding]:
    marks = observed.question.document.marks
    known = {tenant.class_id for tenant in observed.question.document.tenants} | {ReservedClass.GATEWAY}
    sending = [one for one in connections if one.mark is not None and one.sent_bytes]
    bare = [one for one in sending if one.mark is not None and marks.class_id(one.mark) == 0]
    strange = [one for one in sending if one.mark is not None and marks.class_id(one.mark) not in known | {0}]
    if bare:
        message = f"{len(bare)} connections have sent payload without a mark, e.g. {_words(bare[0])}"
        yield Finding(SOCKET_UNMARKED, message, evidence=_evidence(bare))
    if strange:
        message = f"{len(strange)} connections have a mark of no tenant, e.g. {_words(strange[0])}"
        yield Finding(SOCKET_UNKNOWN_MARK, message, evidence=_evidence(strange))


def _evidence(connections: list[Connection]) -> dict[str, int | str | tuple[str, ...]]:
    sent = sum(one.sent_bytes or 0 for one in connections)
    first = tuple(_words(one) for one in sorted(connections, key=lambda one: -(one.sent_bytes or 0))[:_SHOWN_MAX])
    return {"connections": len(connections), "sent_bytes": sent, "first": first}


def _words(one: Connection) -> str:
    mark = "no mark shown" if one.mark is None else f"mark {one.mark:#x}"
    return f":{one.port} to {one.peer} port {one.peer_port}, {mark}, {in_words(one.sent_bytes or 0)}"


def _missing(
    before: tuple[Connection, ...], after: list[Connection], observed: Observed, traffic: Traffic
) -> Iterable[Finding]:
    """Return the tenants whose connections sent more than their class counted.

    Of connections that were there at both readings and are known to leave by this very device (not by a bond, which
    has other ports too), so it is the least that they can have sent.
    """
    marks, known = observed.question.document.marks, {one.cookie: one for one in before}
    sent: Counter[int] = Counter()
    for one in after:
        earlier = known.get(one.cookie)
        is_ours = traffic.ways.get(str(one.peer)) == observed.node.device.ifindex
        if earlier and is_ours and one.mark == earlier.mark and one.mark and one.sent_bytes is not None:
            sent[marks.class_id(one.mark)] += max(0, one.sent_bytes - (earlier.sent_bytes or 0))
    for tenant in observed.question.document.tenants:
        series = traffic.sent.get(tenant.class_id)
        if series is None or tenant.class_id in traffic.broken or len(series.readings) < 2:
            continue
        # What waits in the class or was dropped there did come to it; a packet has up to this many bytes.
        dropped = traffic.dropped_packets.get(tenant.class_id, 0) * observed.node.device.gso_max_bytes
        counted = series.whole().sent_bytes + traffic.backlog_bytes.get(tenant.class_id, 0) + dropped
        total = sent[tenant.class_id]
        lost = total - counted
        if lost > _MISSING_BYTES and lost * 100 > total * _MISSING_PERCENT:
            message = (
                f"{tenant.name}: its connections sent {in_words(total)}, and its class counted {in_words(counted)}"
            )
            evidence = {"sent_bytes": total, "class_bytes": counted}
            yield Finding(BYTES_NOT_IN_CLASS, message, tenant.name, evidence)


def _sessions(observed: Observed) -> Judged:
    traffic = observed.traffic
    if traffic is None:
        return Judged(skipped="no traffic was looked at")
    if isinstance(traffic, Unknown):
        return Judged(unknown=traffic.reason)
    after = traffic.after
    if isinstance(after, Unknown):
        return Judged(unknown=after.reason)
    if after.attribution is None:
        return Judged(skipped="no --master-socket was given")
    if isinstance(after.attribution, Unknown):
        return Judged(unknown=after.attribution.reason)
    marks = observed.question.document.marks
    wanted = {tenant.name: marks.mark(tenant.class_id) for tenant in observed.question.document.tenants}
    names = {mark: name for name, mark in wanted.items()}
    held, wrong = 0, []
    for one in after.connections:
        tenant = after.attribution.sessions.get((one.peer, one.peer_port))
        # What has no mark at all is a matter of the check `sockets`.
        if tenant is None or one.mark is None or marks.class_id(one.mark) < TENANT_CLASS_MIN:
            continue
        held += 1
        if one.mark & marks.mask != wanted.get(tenant, 0):
            wrong.append((tenant, one))
    if wrong:
        tenant, one = wrong[0]
        other = names.get((one.mark or 0) & marks.mask, "nobody")
        message = (
            f"{len(wrong)} connections that are {tenant}'s by the gateway carry the mark of {other}: {_words(one)}"
        )
        return Judged(findings=(Finding(SOCKET_WRONG_MARK, message, tenant, _evidence([c for _, c in wrong])),))
    if not held:
        return Judged(skipped="the gateway told of no session whose socket was seen")
    return Judged(f"{held} connections carry the mark of the tenant that the gateway serves them as")


def _losses(observed: Observed) -> Judged:
    traffic = observed.traffic
    if traffic is None:
        return Judged(skipped="no traffic was looked at")
    if isinstance(traffic, Unknown):
        return Judged(unknown=traffic.reason)
    findings, unknown = list(_resent(observed, traffic)), []
    softnet = "softnet not read"
    if isinstance(traffic.softnet, Unknown):
        unknown.append(traffic.softnet.reason)
    else:
        first, last = traffic.softnet
        dropped = last.dropped_packets - first.dropped_packets
        softnet = f"{dropped} packets dropped in softnet"
        if dropped > 0:
            message = f"{dropped} packets were dropped between devices and the stack, on the whole node"
            findings.append(Finding(SOFTNET_DROPS, message, evidence={"packets": dropped}))
    unknown += [part.reason for part in (traffic.before, traffic.after) if isinstance(part, Unknown)][:1]
    return Judged(f"few segments sent again, {softnet}", tuple(findings), unknown="; ".join(unknown))


def _resent(observed: Observed, traffic: Traffic) -> Iterable[Finding]:
    if isinstance(traffic.before, Unknown) or isinstance(traffic.after, Unknown):
        return
    marks, known = observed.question.document.marks, {one.cookie: one for one in traffic.before.connections}
    sent: Counter[int] = Counter()
    resent: Counter[int] = Counter()
    for one in traffic.after.connections:
        earlier = known.get(one.cookie)
        if earlier and one.mark:
            class_id = marks.class_id(one.mark)
            sent[class_id] += max(0, one.sent_segments - earlier.sent_segments)
            resent[class_id] += max(0, one.resent_segments - earlier.resent_segments)
    limit = observed.question.resent_per_million
    for tenant in observed.question.document.tenants:
        again, total = resent[tenant.class_id], sent[tenant.class_id]
        if again >= _RESENT_LEAST and again * 1_000_000 > total * limit:
            message = f"{tenant.name}: {again} of {total} segments were sent again"
            evidence = {"resent_segments": again, "sent_segments": total}
            yield Finding(RETRANSMITS_HIGH, message, tenant.name, evidence)


CHECKS = (
    Check(
        "attribution",
        "Do all bytes of the gateway's ports belong to a tenant?",
        Phase.PASSIVE,
        (UNATTRIBUTED_BYTES, UNKNOWN_MARK_BYTES, DIRECT_PACKETS),
        _attribution,
    ),
    Check(
        "accounting",
        "Did everything that left the device pass its root qdisc?",
        Phase.PASSIVE,
        (BYTES_OUTSIDE, TREE_VANISHED),
        _accounting,
    ),
    Check(
        "sockets",
        "Does each connection carry a tenant's mark, and do its bytes come to that tenant's class?",
        Phase.PASSIVE,
        (SOCKET_UNMARKED, SOCKET_UNKNOWN_MARK, BYTES_NOT_IN_CLASS),
        _sockets,
    ),
    Check(
        "sessions",
        "Is each connection's mark that of the tenant whom the gateway serves on it?",
        Phase.PASSIVE,
        (SOCKET_WRONG_MARK,),
        _sessions,
    ),
    Check(
        "losses",
        "Is little sent twice, and nothing lost where no class counts it?",
        Phase.PASSIVE,
        (RETRANSMITS_HIGH, SOFTNET_DROPS),
        _losses,
    ),
)
