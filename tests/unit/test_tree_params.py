"""Handles, buckets, quanta and leaves: each value explicit, within the kernel's bounds, exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ETH0

from kura_shaper.errors import UsageError
from kura_shaper.tree.model import (
    ROOT,
    Bfifo,
    Device,
    Fq,
    FqCodel,
    Handle,
    LeafKind,
    OtherQdisc,
    bytes_of_ticks,
    ticks_of_bytes,
)
from kura_shaper.tree.params import (
    LINE_RATE,
    TRICKLE_MIN,
    burst_bytes,
    htb_class,
    leaf_parameters,
    quantum_bytes,
    whole_bytes,
)
from kura_shaper.units import Rate

JUMBO = Device("eth0", 2, mtu_bytes=9000)
PLAIN = Device("eth0", 2, gso_max_bytes=1514)
BIG_TCP = Device("eth0", 2, gso_max_bytes=524_280)
BYTE_RATES = st.integers(TRICKLE_MIN.bytes_per_second, LINE_RATE.bytes_per_second).map(Rate.from_bytes_per_second)


@pytest.mark.parametrize("rate", ["1M", "10M", "25M", "100M", "500M", "1G", "3G", "10G", "25G", "34G", "40G", "100G"])
@pytest.mark.parametrize("device", [ETH0, JUMBO, PLAIN, BIG_TCP])
@pytest.mark.case("E3")
def test_a_bucket_holds_a_millisecond_a_gso_packet_and_two_frames(rate: str, device: Device) -> None:
    """Case E3."""
    parsed = Rate.parse(rate)
    bucket = burst_bytes(parsed, device)
    wanted = (parsed.bytes_per_second // 1000, device.gso_max_bytes, 2 * (device.mtu_bytes + 14))
    assert bucket == max(wanted)
    spec = htb_class(Handle(1, 2), Handle(1), floor=parsed, ceil=parsed, prio=0, device=device)
    assert spec.burst_bytes >= bucket
    assert spec.cburst_bytes >= bucket


@pytest.mark.parametrize(
    ("rate", "device", "bucket"),
    [
        # What a burst of 15 KB, or one rounded to microseconds, got wrong.
        ("100M", PLAIN, 12_500),
        ("1G", PLAIN, 125_000),
        ("40G", ETH0, 5_000_000),
        ("500M", ETH0, 65_536),
        ("1M", JUMBO, 65_536),
        ("1M", PLAIN, 3_028),
    ],
)
def test_a_bucket_has_this_size(rate: str, device: Device, bucket: int) -> None:
    assert burst_bytes(Rate.parse(rate), device) == bucket


@pytest.mark.parametrize(
    ("rate", "device", "quantum"),
    [
        ("64k", ETH0, 1_514),
        ("64k", JUMBO, 9_014),
        ("121_120".replace("_", ""), ETH0, 1_514),
        ("1M", ETH0, 12_500),
        ("25M", ETH0, 60_000),
        ("25G", ETH0, 60_000),
        ("100G", JUMBO, 60_000),
    ],
)
def test_a_quantum_is_a_tenth_of_a_second_between_a_frame_and_60000_bytes(
    rate: str, device: Device, quantum: int
) -> None:
    assert quantum_bytes(Rate.parse(rate), device) == quantum


@given(BYTE_RATES, st.sampled_from([ETH0, JUMBO, PLAIN, BIG_TCP]))
def test_the_kernel_never_warns_of_a_quantum(rate: Rate, device: Device) -> None:
    assert 1_000 <= device.frame_bytes <= quantum_bytes(rate, device) <= 60_000


@given(BYTE_RATES, st.integers(1, 10**8))
def test_ticks_and_bytes_are_inverse_within_one_tick(rate: Rate, size_bytes: int) -> None:
    ticks = -(-size_bytes * 10**9 // (rate.bytes_per_second * 64))
    if ticks > 0xFFFFFFFF:
        with pytest.raises(UsageError, match="is too long; raise the rate"):
            ticks_of_bytes(rate, size_bytes)
    else:
        assert ticks_of_bytes(rate, size_bytes) == ticks
        one_tick_bytes = rate.bytes_per_second * 64 // 10**9 + 1
        assert size_bytes <= bytes_of_ticks(rate, ticks) <= size_bytes + one_tick_bytes
        assert ticks_of_bytes(rate, bytes_of_ticks(rate, ticks)) == ticks


@pytest.mark.parametrize("rate", ["1M", "34G", "35G", "40G", "100G", "1T"])
def test_a_class_keeps_a_rate_beyond_32_bits_exactly(rate: str) -> None:
    parsed = Rate.parse(rate)
    spec = htb_class(Handle(1, 2), Handle(1), floor=Rate.parse("1M"), ceil=parsed, prio=3, device=ETH0)
    assert (spec.floor, spec.ceil, spec.prio) == (Rate(10**6), parsed, 3)


def test_the_smallest_rate_on_the_largest_packet_still_has_a_bucket() -> None:
    spec = htb_class(Handle(1, 2), Handle(1), floor=TRICKLE_MIN, ceil=TRICKLE_MIN, prio=0, device=BIG_TCP)
    assert spec.burst_bytes >= 524_280


@pytest.mark.parametrize(("rate", "whole"), [(0, 0), (7, 0), (8, 8), (62_500, 62_496), (10**9 + 1, 10**9)])
def test_the_kernel_holds_whole_bytes_a_second(rate: int, whole: int) -> None:
    assert whole_bytes(Rate(rate)) == Rate(whole)


@pytest.mark.parametrize(
    ("kind", "ceil", "device", "parameters"),
    [
        (LeafKind.FQ_CODEL, "500M", ETH0, FqCodel(2_064, 1_024, 5_000, 100_000, 1_514, 33_554_432)),
        (LeafKind.FQ_CODEL, "1M", ETH0, FqCodel(1_000, 1_024, 5_000, 100_000, 1_514, 33_554_432)),
        (LeafKind.FQ_CODEL, "25G", JUMBO, FqCodel(10_240, 1_024, 5_000, 100_000, 9_014, 33_554_432)),
        (LeafKind.FQ, "1M", ETH0, Fq(10_240, 1_000, 3_028, 15_140, 10_000_000)),
        (LeafKind.FQ, "25G", JUMBO, Fq(10_240, 1_000, 18_028, 90_140, 10_000_000)),
        (LeafKind.BFIFO, "1M", ETH0, Bfifo(262_144)),
        (LeafKind.BFIFO, "500M", ETH0, Bfifo(3_125_000)),
        (LeafKind.BFIFO, "25G", ETH0, Bfifo(33_554_432)),
    ],
)
def test_a_leaf_holds_50_ms_at_the_ceil_within_bounds(
    kind: LeafKind, ceil: str, device: Device, parameters: FqCodel | Fq | Bfifo
) -> None:
    found = leaf_parameters(kind, Rate.parse(ceil), device)
    assert found == parameters
    assert found.kind is kind


def test_every_fq_codel_marks_instead_of_dropping_where_it_can() -> None:
    found = leaf_parameters(LeafKind.FQ_CODEL, Rate.parse("1G"), ETH0)
    assert isinstance(found, FqCodel)
    assert found.ecn


@pytest.mark.parametrize(
    ("major", "minor", "text", "u32"),
    [
        (0x20, 0, "20:", 0x200000),
        (0x20, 0x2A7, "20:2a7", 0x2002A7),
        (0xFFFE, 0xFFFE, "fffe:fffe", 0xFFFEFFFE),
        (0xFFFF, 0xFFFF, "ffff:ffff", 0xFFFFFFFF),
    ],
)
def test_a_handle_is_two_halves_of_16_bits(major: int, minor: int, text: str, u32: int) -> None:
    handle = Handle(major, minor)
    assert (str(handle), handle.u32) == (text, u32)
    assert Handle.from_u32(u32) == handle


@pytest.mark.parametrize(("major", "minor"), [(0x10000, 0), (-1, 0), (1, 0x10000), (1, 65_544), (1, -1)])
def test_a_handle_that_the_kernel_would_take_for_another_is_refused(major: int, minor: int) -> None:
    with pytest.raises(UsageError, match=r"is out of range; each half has 16 bits"):
        Handle(major, minor)


def test_only_a_qdisc_without_a_handle_is_the_kernels_own_default() -> None:
    assert OtherQdisc("fq_codel", Handle(0), ROOT).is_kernel_default
    assert not OtherQdisc("fq_codel", Handle(0x8001), ROOT).is_kernel_default


def test_a_bucket_that_the_kernel_has_no_bits_for_is_refused() -> None:
    with pytest.raises(UsageError, match="a bucket of 524288 bytes at 8 bit/s is too long; raise the rate"):
        ticks_of_bytes(Rate(8), 524_288)
