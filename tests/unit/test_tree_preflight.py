"""What must not be done is said before anything is touched, with what to do instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import CLSACT, ETH0, case, mq_case, snapshot_of, tenant

from kura_shaper.tree.build import root_qdisc
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    MQ_HANDLE,
    ROOT,
    Device,
    Filter,
    Handle,
    HtbQdisc,
    Leaf,
    MqQdisc,
    OtherMatch,
    OtherQdisc,
)
from kura_shaper.tree.preflight import Permission, is_default, is_ours, misfits, preflight
from kura_shaper.tree.snapshot import Snapshot

WANTED = case(tenant(0x2A7)).wanted()
OURS = root_qdisc()
OTHER_HTB = HtbQdisc(Handle(1), ROOT, 0x10, 1000)
FQ = OtherQdisc("fq", Handle(0x8001), ROOT)
BOTH = Permission.DISRUPTION | Permission.TAKE_OVER
Root = HtbQdisc | MqQdisc | OtherQdisc | None


@pytest.mark.parametrize(
    ("root", "permission", "codes"),
    [
        (None, Permission.NONE, []),
        (OtherQdisc("noqueue", Handle(0), ROOT), Permission.NONE, []),
        (OtherQdisc("mq", Handle(0), ROOT), Permission.NONE, []),
        (OURS, Permission.NONE, []),
        (FQ, Permission.NONE, ["foreign-root"]),
        (FQ, Permission.DISRUPTION, ["foreign-root"]),
        (FQ, Permission.TAKE_OVER, []),
        (OTHER_HTB, Permission.NONE, ["foreign-root"]),
        (OTHER_HTB, Permission.TAKE_OVER, []),
        # Our handle alone makes nothing ours: somebody may have chosen it too.
        (replace(OURS, default_minor=0x10), Permission.DISRUPTION, ["foreign-root"]),
        (OtherQdisc("fq", OURS.handle, ROOT), Permission.DISRUPTION, ["foreign-root"]),
        (replace(OURS, direct_qlen_packets=2), Permission.NONE, ["rebuild-needed"]),
        (replace(OURS, direct_qlen_packets=2), Permission.TAKE_OVER, ["rebuild-needed"]),
        (replace(OURS, direct_qlen_packets=2), Permission.DISRUPTION, []),
        (replace(OURS, direct_qlen_packets=2), BOTH, []),
    ],
)
def test_a_root_is_replaced_only_with_the_permission_that_it_takes(
    root: Root, permission: Permission, codes: list[str]
) -> None:
    refusals = preflight(WANTED.tree, Snapshot(ETH0, root), permission)
    assert [refusal.code for refusal in refusals] == codes
    assert bool(plan(WANTED, Snapshot(ETH0, root), permission).operations) == (not codes)


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (
            FQ,
            "eth0 has a root qdisc of somebody else's: fq 8001:; find its owner first, then --take-over replaces it",
        ),
        (
            OTHER_HTB,
            "eth0 has a root qdisc of somebody else's: htb 1:; find its owner first, then --take-over replaces it",
        ),
        (
            replace(OURS, direct_qlen_packets=2),
            (
                "the root qdisc of eth0 was made with other parameters and can't be changed in place;"
                " --allow-disruption rebuilds it and drops what is queued"
            ),
        ),
    ],
)
def test_a_refusal_says_what_is_there_and_what_to_do(root: Root, says: str) -> None:
    found = plan(WANTED, Snapshot(ETH0, root))
    assert [str(refusal) for refusal in found.refusals] == [says]
    assert (found.operations, found.notes) == ((), WANTED.notes)


def test_the_loopback_device_is_never_shaped_whatever_is_allowed() -> None:
    lo = Device("lo", 1, is_loopback=True)
    found = plan(WANTED, Snapshot(lo, None), BOTH)
    assert [str(refusal) for refusal in found.refusals] == [
        "lo is the loopback device; name the device that bytes leave by"
    ]


def test_every_reason_is_given_at_once() -> None:
    lo = Device("lo", 1, is_loopback=True)
    assert [refusal.code for refusal in plan(WANTED, Snapshot(lo, FQ)).refusals] == ["loopback", "foreign-root"]


MQ = mq_case(tenant(0x2A7), tenant(0x2B0), shaped=2)
MQ_WANTED = MQ.wanted()
MQ_READING = snapshot_of(MQ_WANTED, MQ.device)
SHAPED = Handle(0x1F, 2)


@pytest.mark.parametrize(
    ("root", "ours"),
    [
        (None, False),
        (OURS, True),
        (MqQdisc(MQ_HANDLE), True),
        (MqQdisc(Handle(0x8001)), False),
        (OtherQdisc("mq", Handle(0), ROOT), False),
        (OtherQdisc("fq", MQ_HANDLE, ROOT), False),
        (replace(OURS, handle=Handle(0x21)), False),
    ],
)
def test_a_root_is_ours_by_its_kind_and_handle(root: Root, *, ours: bool) -> None:
    assert is_ours(root) == ours


@pytest.mark.parametrize(
    ("found", "codes"),
    [
        (None, []),
        (OtherQdisc("pfifo_fast", Handle(0), SHAPED), []),
        (MQ_WANTED.tree.queues[1], []),
        (OtherQdisc("fq", Handle(0x8001), SHAPED), ["rebuild-needed"]),
        (replace(MQ_WANTED.tree.htbs[1], default_minor=2), ["rebuild-needed"]),
        (replace(MQ_WANTED.tree.queues[2], parent=SHAPED), ["rebuild-needed"]),
    ],
)
def test_a_queue_that_is_to_be_shaped_is_replaced_alone_only_where_nobody_chose_what_is_there(
    found: HtbQdisc | Leaf | OtherQdisc | None, codes: list[str]
) -> None:
    queues = {place: qdisc for place, qdisc in MQ_READING.queues.items() if place != SHAPED}
    actual = replace(MQ_READING, queues=queues | ({SHAPED: found} if found else {}))
    assert [refusal.code for refusal in preflight(MQ_WANTED.tree, actual, Permission.NONE)] == codes
    assert misfits(MQ_WANTED.tree, actual) == ({SHAPED: (found, "not our HTB")} if codes else {})
    assert not (is_default(found) and codes)
    assert preflight(MQ_WANTED.tree, actual, Permission.DISRUPTION) == ()


def test_shape_single_needs_nothing_of_the_hook() -> None:
    taken = Filter(EGRESS, 11, 3, 1, OtherMatch("u32"))
    for hook in (CLSACT, OtherQdisc("ingress", Handle(0xFFFF), HOOK)):
        assert preflight(WANTED.tree, Snapshot(ETH0, None, hook=hook, filters=(taken,)), Permission.NONE) == ()
        refused = preflight(MQ_WANTED.tree, Snapshot(MQ.device, None, hook=hook, filters=(taken,)), BOTH)
        assert [refusal.code for refusal in refused] == ["hook-taken"]


def test_every_reason_against_shape_mq_is_given_at_once() -> None:
    device = replace(MQ.device, is_loopback=True)
    actual = Snapshot(device, FQ, hook=OtherQdisc("ingress", Handle(0xFFFF), HOOK))
    refused = preflight(MQ_WANTED.tree, actual, Permission.NONE)
    assert [refusal.code for refusal in refused] == ["loopback", "foreign-root", "hook-taken"]
