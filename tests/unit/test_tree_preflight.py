"""What must not be done is said before anything is touched, with what to do instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import ETH0, case, tenant

from kura_shaper.tree.build import root_qdisc
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import ROOT, Device, Handle, HtbQdisc, OtherQdisc
from kura_shaper.tree.preflight import Permission, preflight
from kura_shaper.tree.snapshot import Snapshot

WANTED = case(tenant(0x2A7)).wanted()
OURS = root_qdisc()
OTHER_HTB = HtbQdisc(Handle(1), ROOT, 0x10, 1000)
FQ = OtherQdisc("fq", Handle(0x8001), ROOT)
BOTH = Permission.DISRUPTION | Permission.TAKE_OVER
Root = HtbQdisc | OtherQdisc | None


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
