"""The answer to the question in words, and what it rests on.

The question: is one classful root CPU-bound at this rate, on this machine? Every HTB has one lock, so
what counts is packets a second: what the rate needs, beside what the tree was seen to carry when all
senders push at once. A large buffer (GSO) passes the lock as one packet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.bench.points import Point, Report
    from kura_shaper.units import Rate

SINGLE, PLAIN = "single", "plain"
# Above this part of what was carried there is no room for anything else that the CPU has to do.
BOUND_PERMILLE, CLOSE_PERMILLE = 800, 500
HELD_PERMILLE = 970
# A tree that lets through more than this of what the senders reach without one was not the bottleneck.
SENDERS_PERMILLE = 800
_FULL_PERMILLE = 950
# What others may take of the machine before rates mean less, and before too little is no evidence any more.
QUIET_PERMILLE, DISTURBED_PERMILLE = 50, 150


class Answer(StrEnum):
    """Whether one classful root is CPU-bound at the rate."""

    NOT_BOUND = "not-bound"
    CLOSE_AT_MTU = "close-at-mtu"
    OPEN_AT_MTU = "open-at-mtu"
    BOUND_AT_MTU = "bound-at-mtu"
    BOUND = "bound"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class OtherShape:
    """What a shape beside `single` carried, the CPU time of a packet there, and what others took meanwhile."""

    name: str
    carried: int
    packet_ns: int
    others_permille: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the answer rests on. Packets are a second's; held ones are what a limited run reached of the rate.

    carried, alone and plain are the smallest packets: through `single` by many senders and by one, and by
    many without a tree. packet_ns is the CPU time of a packet that many senders sent through `single`, tree_ns
    what the tree adds to it. 0 and None: not measured.
    cores are what a run held to the rate took in all. others_permille is what other processes took of the
    machine while `single` carried that; is_cost_rough says that they disturbed what tree_ns comes from.
    """

    rate: Rate
    mtu_bytes: int
    gso_bytes: int
    carried: int
    alone: int = 0
    plain: int = 0
    tree_ns: int = 0
    mtu_held_permille: int | None = None
    gso_held_permille: int | None = None
    mtu_cores_permille: int = 0
    gso_cores_permille: int = 0
    plain_mtu_permille: int | None = None
    packet_ns: int = 0
    mq: tuple[OtherShape, ...] = ()
    others_permille: int = 0
    is_cost_rough: bool = False
    cpus: int = 0

    @property
    def mtu_needed(self) -> int:
        """Packets a second at the rate when each is a frame."""
        return -(-self.rate.bits_per_second // (8 * self.mtu_bytes))

    @property
    def gso_needed(self) -> int:
        """Packets a second at the rate when each is a large buffer."""
        return -(-self.rate.bits_per_second // (8 * self.gso_bytes))

    def used_permille(self, needed: int) -> int:
        """Return so many packets in thousandths of what was carried."""
        return needed * 1_000 // max(1, self.carried)

    @property
    def is_short_of_senders(self) -> bool:
        """Whether it was the senders and not the tree that set what was carried: then the tree carries at least that.

        False where it is not known.
        """
        return self.carried * 1_000 >= self.plain * SENDERS_PERMILLE if self.plain else False

    @property
    def fills_every_cpu(self) -> bool:
        """Whether frames held to the rate took all CPUs: a throttled tree wakes and is asked for each packet."""
        return bool(self.cpus) and self.mtu_cores_permille >= self.cpus * _FULL_PERMILLE

    @property
    def is_disturbed(self) -> bool:
        """Whether others had so much of the machine that the tree may carry more than was seen."""
        return self.others_permille > DISTURBED_PERMILLE

    def core_permille(self, needed: int) -> int:
        """Return the thousandths of one core that the tree takes for so many packets."""
        return needed * self.tree_ns // 1_000_000


class _Use(StrEnum):
    FITS = "fits"
    CLOSE = "close"
    OPEN = "open"
    BOUND = "bound"


def answer(evidence: Evidence) -> Answer:
    """Return the answer.

    What a run at the rate itself held weighs more than what follows from packets a second. Where the
    senders or other processes may have been the reason, a tree carries at least what was seen: that can
    show that it is not bound, never that it is.
    """
    if not evidence.carried:
        return Answer.UNKNOWN
    match (
        _use(evidence, evidence.gso_needed, evidence.gso_held_permille),
        _use(evidence, evidence.mtu_needed, evidence.mtu_held_permille),
    ):
        case (_Use.FITS, _Use.FITS) if evidence.fills_every_cpu:
            return Answer.CLOSE_AT_MTU
        case (_Use.BOUND, _):
            return Answer.BOUND
        case (_Use.OPEN, _):
            return Answer.UNKNOWN
        case (_, _Use.BOUND):
            return Answer.BOUND_AT_MTU
        case (_, _Use.OPEN):
            return Answer.OPEN_AT_MTU
        case (_, _Use.CLOSE):
            return Answer.CLOSE_AT_MTU
    return Answer.NOT_BOUND


def _use(evidence: Evidence, needed: int, held_permille: int | None) -> _Use:
    used = evidence.used_permille(needed)
    if used <= CLOSE_PERMILLE:
        return _Use.FITS
    if used <= BOUND_PERMILLE:
        return _Use.FITS if evidence.is_short_of_senders or evidence.is_disturbed else _Use.CLOSE
    if held_permille is not None and held_permille >= HELD_PERMILLE:
        return _Use.CLOSE
    return _Use.OPEN if evidence.is_short_of_senders or evidence.is_disturbed else _Use.BOUND


_HEADLINES = {
    Answer.NOT_BOUND: "No: one classful root is not CPU-bound at {rate}bit/s on this machine.",
    Answer.CLOSE_AT_MTU: (
        "No, but with little to spare: at {rate}bit/s one classful root holds when every packet is a single frame, and"
        " takes more than half of what it carried here, or every CPU."
    ),
    Answer.OPEN_AT_MTU: (
        "No with large buffers (GSO), and not answered without: at {rate}bit/s and a frame a packet the senders, or"
        " what else runs on this machine, gave out before the tree did."
    ),
    Answer.BOUND_AT_MTU: (
        "Only without large buffers: one classful root is CPU-bound at {rate}bit/s on this machine when every packet"
        " is a single frame, and not when the senders use GSO."
    ),
    Answer.BOUND: "Yes: one classful root is CPU-bound at {rate}bit/s on this machine, even with GSO.",
    Answer.UNKNOWN: (
        "Not answered: shape single was not measured without a limit, or the senders, or what else runs on this"
        " machine, gave out far below {rate}bit/s."
    ),
}


def words(evidence: Evidence) -> tuple[str, ...]:
    """Return the answer to the question, a sentence with numbers each."""
    given = answer(evidence)
    headline = _HEADLINES[given].format(rate=evidence.rate)
    if not evidence.carried:
        return (headline,)
    return (headline, _needs(evidence), *_cost(evidence), *_held(evidence), *_mq(evidence))


def _needs(e: Evidence) -> str:
    alone = f", {_count(e.alone)} from one sender" if e.alone else ""
    plain = f"; without a tree the senders reach {_count(e.plain)}" if e.plain else ""
    limiter = ""
    if e.is_short_of_senders:
        limiter = ", so the tree was not what held them back and carries at least that"
    elif e.is_disturbed:
        limiter = f", while others took {_percent(e.others_permille)} of the machine: it carries at least that"
    return (
        f"{e.rate}bit/s is {_count(e.mtu_needed)} packets/s at MTU and {_count(e.gso_needed)} at 64 KB;"
        f" single carried {_count(e.carried)} small packets/s from all senders{alone}{plain}{limiter}. The rate takes"
        f" {'at most ' if limiter else ''}{_percent(e.used_permille(e.mtu_needed))} of what single carried at MTU and"
        f" {_percent(e.used_permille(e.gso_needed))} at 64 KB."
    )


def _cost(e: Evidence) -> Iterable[str]:
    if not (e.alone and e.plain):
        return
    if e.tree_ns <= 0:
        yield "The tree's own cost a packet was too small to tell from the bare device's here."
        return
    roughly = "roughly " if e.is_cost_rough else ""
    at_mtu, at_gso = (_percent(e.core_permille(needed)) for needed in (e.mtu_needed, e.gso_needed))
    yield (
        f"The tree costs {roughly}{e.tree_ns} ns of CPU a packet beyond the bare device. One lock guards that work, so"
        f" it can fill one core at most: at the rate it takes {at_mtu} of a core at MTU and {at_gso} at 64 KB."
    )


def _held(e: Evidence) -> Iterable[str]:
    sizes = (
        ("64 KB", e.gso_held_permille, e.gso_needed, e.gso_cores_permille),
        ("MTU", e.mtu_held_permille, e.mtu_needed, e.mtu_cores_permille),
    )
    reached = [
        f"{_percent(held)} of it at {name} with {cores / 1_000:.2f} cores"
        for name, held, _, cores in sizes
        if held is not None
    ]
    if reached:
        yield f"Held to the rate, single reached {' and '.join(reached)}, the senders' own work and waking included."
    short = [
        name
        for name, held, needed, _ in sizes
        if held is not None and held < HELD_PERMILLE and e.used_permille(needed) <= BOUND_PERMILLE
    ]
    if e.plain_mtu_permille is not None and e.plain_mtu_permille < 1_000:
        yield (
            f"The senders themselves reach only {_percent(e.plain_mtu_permille)} of the rate at MTU without any tree,"
            " so at that size it is they who fall short."
        )
    elif short:
        yield f"What is missing at {' and '.join(short)} is not packets a second: the senders compete for the CPUs."


def _mq(e: Evidence) -> Iterable[str]:
    for other in e.mq:
        cost = f"{other.packet_ns} ns of CPU a packet in all beside {e.packet_ns}"
        others = max(other.others_permille, e.others_permille)
        if others > DISTURBED_PERMILLE:
            gain = (
                f"{other.name} takes {cost} in single; others took up to {_percent(others)} of the machine, so"
                " packets/s can't be compared"
            )
        else:
            times = other.carried * 100 // max(1, e.carried) / 100
            gain = f"{other.name} carried {_count(other.carried)} packets/s, {times:.2f} times single, with {cost}"
        if other.name == "mq":
            yield f"{gain}. One shaped queue is one lock, for tenants as before, but host traffic is off it."
        else:
            yield f"{gain}. Each shaped queue has a lock of its own."


def evidence_of(report: Report) -> Evidence:
    """Return what the answer rests on, out of a run."""
    smallest = min((p.wire_bytes for p in report.points), default=report.mtu_bytes)
    many = report.machine.many

    def free(form: str, senders: int) -> Point | None:
        return report.find(form, wire_bytes=smallest, senders=senders, is_limited=False)

    def held(wire_bytes: int) -> Point | None:
        return report.find(SINGLE, wire_bytes=wire_bytes, senders=many, is_limited=True)

    def packets(point: Point | None) -> int:
        return point.packets_per_second if point else 0

    all_at_once, one, bare = free(SINGLE, many), free(SINGLE, 1), free(PLAIN, 1)
    mtu, gso = held(report.mtu_bytes), held(report.gso_bytes)
    at_mtu = report.find(PLAIN, wire_bytes=report.mtu_bytes, senders=many, is_limited=False)
    others = [made.form for made in report.made_of if made.form.partition(":")[0] == "mq"]
    return Evidence(
        report.rate,
        report.mtu_bytes,
        report.gso_bytes,
        carried=packets(all_at_once),
        alone=packets(one),
        plain=packets(free(PLAIN, many)),
        tree_ns=one.ns_per_packet - bare.ns_per_packet if one and bare else 0,
        mtu_held_permille=mtu.of_limit_permille() if mtu else None,
        gso_held_permille=gso.of_limit_permille() if gso else None,
        mtu_cores_permille=mtu.cores_permille if mtu else 0,
        gso_cores_permille=gso.cores_permille if gso else 0,
        plain_mtu_permille=at_mtu.bits_per_second * 1_000 // report.rate.bits_per_second if at_mtu else None,
        is_cost_rough=any(p.others_permille > DISTURBED_PERMILLE for p in (one, bare) if p),
        cpus=report.machine.cpus,
        packet_ns=all_at_once.ns_per_packet if all_at_once else 0,
        mq=tuple(
            OtherShape(form, point.packets_per_second, point.ns_per_packet, point.others_permille)
            for form in others
            if (point := free(form, many))
        ),
        others_permille=all_at_once.others_permille if all_at_once else 0,
    )


def caveats(report: Report) -> tuple[str, ...]:
    """Return what a reader has to know about the machine before the numbers mean anything."""
    said = []
    if report.machine.many >= report.machine.cpus:
        said.append(
            f"This machine has {report.machine.cpus} CPUs and {report.machine.many} senders: the load takes the CPUs"
            " that the tree needs, so what was carried is the least that it can carry, and locks are contended by"
            " few. Measure on the node itself before you choose a shape."
        )
    others = max((point.others_permille for point in report.points), default=0)
    if others > QUIET_PERMILLE:
        said.append(
            f"Other processes took up to {_percent(others)} of the machine meanwhile: rates are too low by that, and"
            " ratios less sure."
        )
    return tuple(said)


def _count(packets: int) -> str:
    """Return a number of packets with three digits that mean something."""
    if packets >= 999_500:
        return f"{packets / 10**6:.2f}M"
    return f"{packets / 1_000:.0f}k" if packets >= 9_950 else f"{packets / 1_000:.1f}k"


def _percent(permille: int) -> str:
    return f"{permille / 10:.1f} %"
