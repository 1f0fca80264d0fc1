"""Whoever else has a hand on a device is told by words from a fixed list."""

from __future__ import annotations

from dataclasses import replace

from strategies import CLSACT, ETH0, case, kernel_with, tenant

from kura_shaper.tree.ebpf import TcxProgram, TcxState
from kura_shaper.tree.model import ROOT, Fq, Handle, Leaf, MqQdisc, OtherQdisc
from kura_shaper.tree.owners import foreign_owners
from kura_shaper.tree.snapshot import Snapshot

FOREIGN = OtherQdisc("htb", Handle(1), ROOT)
PROGRAM = TcxProgram(9, "a name that anybody may choose", is_ours=False)
MQ = MqQdisc(Handle(0x8000))


def test_foreign_owners_are_named_by_words_from_a_fixed_list() -> None:
    ours = kernel_with(case(tenant(0x2A7)).wanted()).snapshot()
    assert foreign_owners(ours) == ()
    assert foreign_owners(replace(ours, tcx=TcxState(supported=True, programs=(PROGRAM, PROGRAM)))) == ("tcx",)
    assert foreign_owners(Snapshot(ETH0, FOREIGN)) == ("root",)
    assert foreign_owners(Snapshot(ETH0, OtherQdisc("pfifo_fast", Handle(0), ROOT), hook=CLSACT)) == ()


def test_an_fq_on_every_queue_of_an_mq_that_is_not_ours_is_the_bandwidth_managers() -> None:
    fqs = {MQ.child(queue): OtherQdisc("fq", Handle(0x8001 + queue), MQ.child(queue)) for queue in range(4)}
    read = {place: Leaf(fq.handle, place, Fq(10_000, 100, 3028, 15140, 2_000_000)) for place, fq in fqs.items()}
    one = {**fqs, MQ.child(2): OtherQdisc("pfifo", Handle(0x9000), MQ.child(2))}
    assert foreign_owners(Snapshot(ETH0, MQ, queues=fqs)) == ("cilium-bandwidth-manager",)
    assert foreign_owners(Snapshot(ETH0, MQ, queues=read)) == ("cilium-bandwidth-manager",)
    assert foreign_owners(Snapshot(ETH0, MQ, queues=one)) == ("root",)
    assert foreign_owners(Snapshot(ETH0, MQ)) == ("root",)
