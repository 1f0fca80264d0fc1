"""Every operation says in one line what it does, and what it costs traffic."""

from __future__ import annotations

import pytest
from strategies import mq_case, tenant

from kura_shaper.tree.ebpf import EbpfProgram
from kura_shaper.tree.model import (
    EGRESS,
    MQ_HANDLE,
    ROOT,
    Bfifo,
    DirectBpf,
    Filter,
    Handle,
    HtbQdisc,
    Leaf,
    MqQdisc,
    OtherMatch,
    OtherQdisc,
    SteeringKind,
)
from kura_shaper.tree.operations import (
    AddHook,
    AddRoot,
    DeleteFilter,
    DeleteHook,
    Impact,
    Operation,
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetQueue,
    SetTcx,
    SetXps,
)

TREE = mq_case(tenant(0x100), tenant(0x101), shaped=2, live=4).wanted().tree
SHAPED, *BY_MARK, HOST = (found for found in TREE.filters if found.parent == EGRESS)
PROGRAM = EbpfProgram(((0xB7, 0, 0, 0, -1), (0x95, 0, 0, 0, 0)))
HTB = HtbQdisc(Handle(0x21), MqQdisc(MQ_HANDLE).child(1), 0x12, 1000)


@pytest.mark.parametrize(
    ("operation", "impact", "line"),
    [
        (AddRoot(MqQdisc(MQ_HANDLE)), Impact.DEVICE_LOSS, "add root qdisc mq 1f:"),
        (SetQueue(HTB), Impact.DEVICE_LOSS, "set qdisc of tx queue 1 to htb 21: default 12"),
        (
            SetQueue(TREE.queues[2]),
            Impact.DEVICE_LOSS,
            "set qdisc of tx queue 2 to fq limit 10240p flow_limit 1000p",
        ),
        (
            SetQueue(Leaf(Handle(0xB0), Handle(0x1F, 0x12C), Bfifo(9_000))),
            Impact.DEVICE_LOSS,
            "set qdisc of tx queue 299 to bfifo limit 9000b",
        ),
        (AddHook(), Impact.DEVICE_LOSS, "add qdisc clsact, for the egress hook"),
        (DeleteHook(), Impact.DEVICE_LOSS, "delete qdisc clsact"),
        (SetTcx(PROGRAM), Impact.HITLESS, f"set first tcx egress program to {PROGRAM.name} of 2 instructions"),
        (RemoveTcx(), Impact.HITLESS, "remove tcx egress program"),
        (SetXps(3, 0), Impact.HITLESS, "clear XPS of tx queue 3"),
        (SetXps(3, 0xF0), Impact.HITLESS, "set XPS of tx queue 3 to 0xf0"),
        (
            RestoreQdisc(OtherQdisc("mq", Handle(0x8001), ROOT)),
            Impact.DEVICE_LOSS,
            "restore qdisc mq 8001: parent root",
        ),
        (
            SetFilter(SHAPED),
            Impact.HITLESS,
            "set filter prio 11 on the egress hook: bpf of 59 instructions, tx queue 0",
        ),
        (
            SetFilter(BY_MARK[0]),
            Impact.HITLESS,
            "set filter prio 12 on the egress hook: fw mark 0x210000/0xffff0000, tx queue 1",
        ),
        (
            SetFilter(HOST),
            Impact.HITLESS,
            "set filter prio 13 on the egress hook: bpf of 59 instructions, tx queue 2 to 3, by hash",
        ),
        (
            DeleteFilter(Filter(EGRESS, 11, 3, 1, DirectBpf(PROGRAM.name, PROGRAM))),
            Impact.HITLESS,
            f"delete filter prio 11 on the egress hook: eBPF {PROGRAM.name}, which sets the tx queue",
        ),
        (
            DeleteFilter(Filter(EGRESS, 5, 3, 1, OtherMatch("flower"))),
            Impact.HITLESS,
            "delete filter prio 5 on the egress hook: flower",
        ),
    ],
)
def test_an_operation_says_what_it_does_and_what_it_costs(operation: Operation, impact: Impact, line: str) -> None:
    assert operation.impact is impact
    assert operation.describe() == line


def test_a_program_is_named_after_what_it_does_so_another_one_has_another_name() -> None:
    named = [
        mq_case(*tenants, shaped=2, live=live, steering=SteeringKind.TCX).wanted().tree.steering
        for tenants, live in (((), 4), ((), 5), ((tenant(0x100),), 4), ((tenant(0x100), tenant(0x101)), 4))
    ]
    programs = [found.program for found in named if found and found.program]
    # 0x100 has the queue that all without a place have, so its coming changes nothing.
    assert [programs[0].name == program.name for program in programs] == [True, False, True, False]
