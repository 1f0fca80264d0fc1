"""Classes decoded by a layout that is learned once are what a walk over every attribute finds."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.kernel import wire
from kura_shaper.kernel.decode import class_of, qdisc_of
from kura_shaper.tree.model import Bfifo, Handle, HtbClass, Leaf, OtherQdisc
from kura_shaper.tree.operations import AddClass
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

SPEC = HtbClass(Handle(0x20, 0x2A7), Handle(0x20, 3), Rate(8_000_000), Rate(40_000_000_000), 1000, 2000, 60_000, 1)


def options_of(spec: HtbClass) -> bytes:
    """Return the options as we send them, which is how the kernel shows them."""
    sent = memoryview(wire.encode(AddClass(spec), 7))
    begin, end = wire.spans(sent, wire.HEADER.size + wire.TCMSG.size, len(sent))[wire.TCA_OPTIONS]
    return bytes(sent[begin:end])


def message(
    spec: HtbClass, counters: ClassCounters, *, order: tuple[int, ...] = (1, 8, 3), has_xstats: bool = True
) -> memoryview:
    """Return a class as the kernel tells of it, with its statistics in an order."""
    c = counters
    parts = {
        1: wire.attribute(1, struct.pack("=QIxxxx", c.sent_bytes, c.sent_packets & 0xFFFFFFFF)),
        8: wire.attribute(8, struct.pack("=Q", c.sent_packets)),
        3: wire.attribute(
            3, struct.pack("=IIIII", c.backlog_packets, c.backlog_bytes, c.dropped_packets, 0, c.overlimits)
        ),
    }
    stats = wire.attribute(wire.TCA_STATS2, b"".join(parts[number] for number in order))
    xstats = wire.attribute(wire.TCA_XSTATS, struct.pack("=IIIii", c.lended, c.borrowed, 0, 1, 2))
    body = wire.TCMSG.pack(0, 7, spec.classid.u32, spec.parent.u32, 0)
    body += wire.attribute(wire.TCA_KIND, b"htb\0") + wire.attribute(wire.TCA_OPTIONS, options_of(spec))
    return memoryview(body + stats + (xstats if has_xstats else b""))


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
all_counters = st.builds(ClassCounters, u64, u64, u32, u32, u32, u32, u32, u32)


@given(st.lists(st.tuples(all_counters, st.permutations((1, 8, 3))), min_size=2, max_size=4))
def test_statistics_in_another_order_are_not_read_by_the_layout_of_the_first(
    told: list[tuple[ClassCounters, list[int]]],
) -> None:
    """All these messages have one length."""
    for counters, order in told:
        data = message(SPEC, counters, order=tuple(order))
        found = class_of(data, 0, len(data))
        assert found is not None
        assert (found.spec, found.counters) == (SPEC, counters)


def test_bytes_and_packets_beyond_32_bits_are_whole() -> None:
    """Case C11, P9."""
    counters = ClassCounters(sent_bytes=2**40 + 7, sent_packets=2**33 + 5)
    for _ in range(2):
        data = message(SPEC, counters)
        found = class_of(data, 0, len(data))
        assert found is not None
        assert found.counters == counters


@pytest.mark.parametrize("missing", [1, 8, 3])
def test_statistics_that_a_kernel_does_not_show_are_0(missing: int) -> None:
    counters = ClassCounters(9, 8, 7, 6, 5, 4, 3, 2)
    order = tuple(number for number in (1, 8, 3) if number != missing)
    for _ in range(2):
        data = message(SPEC, counters, order=order)
        found = class_of(data, 0, len(data))
        assert found is not None
        zero = {1: {"sent_bytes": 0}, 8: {}, 3: dict.fromkeys(_QUEUE_FIELDS, 0)}[missing]
        assert found.counters == counters._replace(**zero)


_QUEUE_FIELDS = ("dropped_packets", "overlimits", "backlog_bytes", "backlog_packets")


def test_a_class_without_its_own_statistics_has_lent_nothing() -> None:
    counters = ClassCounters(9, 8, 7, 6, 5, 4, 0, 0)
    data = message(SPEC, counters, has_xstats=False)
    assert class_of(data, 0, len(data)) == (SPEC, counters)


def test_a_changed_class_is_not_taken_for_what_it_was() -> None:
    other = HtbClass(SPEC.classid, SPEC.parent, SPEC.floor, Rate(41_000_000_000), 1000, 2000, 60_000, 1)
    for spec in (SPEC, other, SPEC):
        data = message(spec, ClassCounters())
        found = class_of(data, 0, len(data))
        assert found is not None
        assert found.spec == spec


@pytest.mark.parametrize("kind", [b"mq\0", b"hfsc\0"])
def test_a_class_of_another_kind_is_none_of_an_htb(kind: bytes) -> None:
    body = wire.TCMSG.pack(0, 7, 0x10001, 0x10000, 0) + wire.attribute(wire.TCA_KIND, kind)
    data = memoryview(body + wire.attribute(wire.TCA_OPTIONS, bytes(48)))
    assert class_of(data, 0, len(data)) is None


def test_a_message_that_breaks_off_is_an_error_and_not_a_class() -> None:
    whole = message(SPEC, ClassCounters())
    assert class_of(whole, 0, len(whole)) is not None
    for end in range(wire.TCMSG.size, len(whole), 4):
        cut = memoryview(bytes(whole[:end]))
        try:
            found = class_of(cut, 0, end)
        except (LookupError, ValueError, struct.error):
            continue
        # What is left of it may miss counters, never have others.
        assert found is None or found.spec == SPEC


def test_a_leaf_is_told_from_what_nobody_chose_and_from_what_is_not_ours() -> None:
    def told(kind: bytes, handle: int, options: bytes) -> memoryview:
        head = wire.TCMSG.pack(0, 7, handle, 0x2002A7, 1)
        offload = wire.attribute(12, b"\0")
        return memoryview(
            head + wire.attribute(wire.TCA_KIND, kind) + offload + wire.attribute(wire.TCA_OPTIONS, options)
        )

    place, options = Handle(0x20, 0x2A7), struct.pack("=I", 9000)
    found = [qdisc_of(data, 0, len(data)) for data in (told(b"bfifo\0", h, options) for h in (0x2A70000, 0))]
    assert [each.leaf for each in found if each] == [
        Leaf(Handle(0x2A7), place, Bfifo(9000)),
        OtherQdisc("bfifo", Handle(0), place, options),
    ]
    assert qdisc_of(memoryview(wire.TCMSG.pack(0, 7, 1, 2, 1)), 0, wire.TCMSG.size) is None


def test_every_reading_of_the_same_bytes_is_the_same() -> None:
    data = [message(SPEC, ClassCounters(sent_bytes=n)) for n in range(3)]
    found = [class_of(each, 0, len(each)) for each in data]
    assert [each.counters.sent_bytes for each in found if each] == [0, 1, 2]
    assert all(a and b and a.spec is b.spec for a, b in itertools.pairwise(found))
