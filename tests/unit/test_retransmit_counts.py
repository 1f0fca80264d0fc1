"""How counts of retransmits add up, whatever sockets and kernels do."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.retransmits import NO_TENANT, OTHER, RetransmitCounter, Way, open_retransmit_counter
from kura_shaper.kernel.retransmits_diag import SocketLedger
from kura_shaper.kernel.retransmits_proc import ProcRetransmits, parse_retransmitted_segments
from kura_shaper.tenants.marks import MarkLayout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ALICE, BOB = 0x100, 0x101

SNMP_6_18 = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 11838
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs \
RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 1170 1144 25 14 2 95837 87915 {} 0 1166 0
Udp: InDatagrams NoPorts
Udp: 4 5
"""


@dataclass(slots=True)
class Source:
    """A way to count that says what it is told to."""

    counts: dict[int, int] = field(default_factory=dict)
    age_ns: int = 0
    closed: bool = False

    def read(self) -> dict[int, int]:
        return dict(self.counts)

    def close(self) -> None:
        self.closed = True


def counter(source: Source, *, marks: MarkLayout | None = None, classes_max: int = 100) -> RetransmitCounter:
    """Return a counter that reads a source."""
    return RetransmitCounter(source, Way.TRACEPOINT, marks or MarkLayout(), classes_max=classes_max)


def dump(ledger: SocketLedger, sockets: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Have a ledger note (cookie, class, count) of one dump; return the totals."""
    ledger.begin()
    for each in sockets:
        ledger.note(*each)
    return dict(ledger.totals)


def test_a_socket_adds_what_it_grew_by() -> None:
    ledger = SocketLedger()
    assert dump(ledger, [(1, ALICE, 5), (2, BOB, 1)]) == {ALICE: 5, BOB: 1}
    assert dump(ledger, [(1, ALICE, 5), (2, BOB, 4), (3, ALICE, 2)]) == {ALICE: 7, BOB: 4}


def test_what_was_before_the_beginning_does_not_count() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 5)])
    ledger.forget_totals()
    assert dump(ledger, [(1, ALICE, 6)]) == {ALICE: 1}


def test_a_socket_that_ended_keeps_what_it_added_and_is_forgotten() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 5)])
    for _ in range(3):
        assert dump(ledger, []) == {ALICE: 5}
    assert ledger.sockets == 0


def test_a_socket_that_a_dump_missed_or_showed_twice_is_not_counted_anew() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 5), (1, ALICE, 5)])
    dump(ledger, [])
    assert dump(ledger, [(1, ALICE, 6)]) == {ALICE: 6}


def test_after_dumps_that_broke_off_nothing_is_counted_anew() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 5), (2, ALICE, 5)])
    for _ in range(5):
        dump(ledger, [(2, ALICE, 6)])
        ledger.abandon()
    assert dump(ledger, [(1, ALICE, 5), (2, ALICE, 6)]) == {ALICE: 11}


def test_growth_goes_to_the_mark_that_the_socket_has_at_the_time() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 5)])
    assert dump(ledger, [(1, BOB, 7)]) == {ALICE: 5, BOB: 2}


def test_a_sockets_count_may_wrap_and_one_that_connected_again_counts_from_nothing() -> None:
    ledger = SocketLedger()
    dump(ledger, [(1, ALICE, 0xFFFFFFFE), (2, BOB, 9)])
    ledger.forget_totals()
    assert dump(ledger, [(1, ALICE, 3), (2, BOB, 2)]) == {ALICE: 5, BOB: 2}


def test_a_ledger_knows_no_more_sockets_than_it_may() -> None:
    ledger = SocketLedger(sockets_max=10)
    for start in range(0, 1_000, 100):
        totals = dump(ledger, [(start + each, ALICE, 1) for each in range(100)])
        assert ledger.sockets <= 30
    assert totals[ALICE] <= 100


def test_sockets_beyond_what_may_be_known_wait_and_the_known_stay_known() -> None:
    ledger = SocketLedger(sockets_max=2)
    crowd = [(1, ALICE, 1), (2, ALICE, 1), (3, BOB, 1)]
    for _ in range(4):
        assert dump(ledger, crowd) == {ALICE: 2}
    for _ in range(3):
        totals = dump(ledger, crowd[2:])
    assert totals == {ALICE: 2, BOB: 1}


def test_marks_without_end_become_one_number_that_never_falls() -> None:
    source = Source({NO_TENANT: 3, ALICE: 1})
    made = counter(source, classes_max=3)
    assert made.read() == {NO_TENANT: 3, ALICE: 1}
    source.counts |= dict.fromkeys(range(0x200, 0x1200), 2)
    first = made.read()
    assert len(first) == 5
    assert first[OTHER] == 2 * (0x1000 - 2)
    source.counts |= {0x1200: 7}
    assert made.read() == first | {OTHER: first[OTHER] + 7}


def test_what_no_tenant_can_have_is_other_and_the_gateways_own_is_told() -> None:
    source = Source({0x10: 1, 0x11: 2, 0xFF: 4, 0xFFFF: 8, 0xFFFE: 16})
    assert counter(source).read() == {0x10: 1, OTHER: 14, 0xFFFE: 16}
    narrow = MarkLayout(0x1FF << 8)
    assert counter(Source({0x1FF: 1, 0x200: 2}), marks=narrow).read() == {0x1FF: 1, OTHER: 2}


def test_a_counter_closes_its_source() -> None:
    source = Source()
    with counter(source):
        assert not source.closed
    assert source.closed


def test_the_sum_of_a_namespace_grows_across_a_wrap(tmp_path: Path) -> None:
    file = tmp_path / "thread-self" / "net" / "snmp"
    file.parent.mkdir(parents=True)
    highest = (1 << 8 * struct.calcsize("L")) - 1
    file.write_text(SNMP_6_18.format(highest - 1))
    source = ProcRetransmits(tmp_path)
    assert source.read() == {NO_TENANT: 0}
    file.write_text(SNMP_6_18.format(highest))
    assert source.read() == {NO_TENANT: 1}
    file.write_text(SNMP_6_18.format(4))
    assert source.read() == {NO_TENANT: 6}
    file.write_text("Ip: 1\n")
    with pytest.raises(StateUnknownError, match="RetransSegs"):
        source.read()
    source.close()
    source.close()


def test_a_number_is_found_by_its_name() -> None:
    assert parse_retransmitted_segments(SNMP_6_18.format(417)) == 417
    for text in ("", "Tcp: a b\n", "Tcp: RetransSegs\n", "Tcp: RetransSegs\nTcp: x\n", "Tcp: RetransSegs\nTcp: 1 2\n"):
        with pytest.raises(ValueError, match=r".+"):
            parse_retransmitted_segments(text)


def test_no_way_at_all_is_said_and_not_taken_for_zero() -> None:
    with pytest.raises(StateUnknownError, match="can't be counted"):
        open_retransmit_counter(MarkLayout(), ways=[])
