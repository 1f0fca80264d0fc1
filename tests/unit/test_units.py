"""Quantities and rates are exact or refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.errors import QuantityError
from kura_shaper.units import Rate, parse_quantity

SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
RATES = st.integers(min_value=0, max_value=2**63 - 1).map(Rate)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("25M", 25_000_000),
        ("1.5G", 1_500_000_000),
        ("3k", 3_000),
        ("2Gi", 2**31),
        ("1e9", 10**9),
        ("1E3", 1_000),
        ("1E", 10**18),
        ("12E-1", Fraction(12, 10)),
        ("500m", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("+7", 7),
        ("-7k", -7_000),
        ("010", 10),
    ],
)
def test_a_quantity_has_the_value_that_kubernetes_gives_it(text: str, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1 M", " 1M", "1M\n", "M", ".", "1K", "1g", "1ki", "1Mbit", "1,5G", "0x10", "1_000", "1e", "1e100"),
        *("1e3k", "inf", "nan", "~", "1:30", "--1", "\u0663", "\uff11M", "9" * 31),
    ],
)
def test_a_text_that_is_no_quantity_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(QuantityError, match=r"is not a quantity; write a number .* \"25M\"") as caught:
        parse_quantity(text)
    assert str(caught.value).isprintable()


def test_a_long_text_is_cut_in_the_refusal() -> None:
    with pytest.raises(QuantityError) as caught:
        parse_quantity("x" * 100_000)
    assert len(str(caught.value)) < 250


@given(
    sign=st.sampled_from(["", "+", "-"]),
    whole=st.integers(min_value=0, max_value=10**20),
    decimals=st.text("0123456789", max_size=12),
    suffix=st.sampled_from(sorted(SUFFIXES)),
)
def test_a_quantity_equals_the_fraction_it_spells(sign: str, whole: int, decimals: str, suffix: str) -> None:
    exact = Fraction(int(f"{whole}{decimals}"), 10 ** len(decimals)) * SUFFIXES[suffix]
    text = f"{sign}{whole}.{decimals}{suffix}" if decimals else f"{sign}{whole}{suffix}"
    assert parse_quantity(text) == (-exact if sign == "-" else exact)


@given(number=st.integers(min_value=0, max_value=10**9), exponent=st.integers(min_value=-99, max_value=99))
def test_an_exponent_moves_the_point_exactly(number: int, exponent: int) -> None:
    assert parse_quantity(f"{number}e{exponent}") == number * Fraction(10) ** exponent


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-1", "is a negative rate"),
        ("-1m", "is a negative rate"),
        ("1.5", "is not a whole number of bit/s"),
        ("1m", "is not a whole number of bit/s"),
        ("10E", "is out of range"),
        ("1e99", "is out of range"),
        ("fast", "is not a quantity"),
    ],
)
def test_a_quantity_that_is_no_rate_is_refused(text: str, reason: str) -> None:
    with pytest.raises(QuantityError, match=reason):
        Rate.parse(text)


def test_a_rate_is_never_negative_and_fits_the_kernel() -> None:
    assert Rate(2**63 - 1).bits_per_second == 2**63 - 1
    for outside in (-1, 2**63):
        with pytest.raises(QuantityError, match="out of range"):
            Rate(outside)


@pytest.mark.parametrize(
    ("bits_per_second", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1k"),
        (1_500, "1.5k"),
        (1_001, "1.001k"),
        (25_000_000, "25M"),
        (100_000_000, "100M"),
        (1_500_000_000, "1.5G"),
        (1_234_567_890, "1234567.89k"),
        (3_000_000_000_000, "3T"),
        (9_000_000_000_000_000_000, "9000000T"),
        # More digits than a float has.
        (9_223_372_036_854_775_807, "9223372036854775.807k"),
    ],
)
def test_a_rate_is_printed_short_and_exact(bits_per_second: int, text: str) -> None:
    assert str(Rate(bits_per_second)) == text


@given(RATES)
def test_a_printed_rate_parses_to_itself(rate: Rate) -> None:
    assert Rate.parse(str(rate)) == rate


@given(RATES, st.integers(min_value=0, max_value=10**9))
def test_bytes_are_whole_and_rounded_down(rate: Rate, duration_us: int) -> None:
    exact = Fraction(rate.bits_per_second, 8) * Fraction(duration_us, 10**6)
    assert rate.bytes_in_us(duration_us) <= exact < rate.bytes_in_us(duration_us) + 1
    assert Rate.from_bytes_per_second(rate.bytes_per_second) <= rate


def test_the_kernel_and_people_get_their_own_units() -> None:
    rate = Rate.parse("25M")
    assert (rate.bytes_per_second, rate.mbps) == (3_125_000, 25.0)
    assert Rate.from_bytes_per_second(3_125_000) == rate


@given(st.integers(min_value=0, max_value=2**40).map(Rate), st.integers(0, 1000), st.integers(1, 1000))
def test_scaling_rounds_down(rate: Rate, numerator: int, denominator: int) -> None:
    exact = Fraction(rate.bits_per_second * numerator, denominator)
    assert rate.scaled(numerator, denominator).bits_per_second <= exact
    assert rate.scaled(numerator, denominator).bits_per_second + 1 > exact


def test_rates_are_ordered_by_size() -> None:
    assert max(Rate.parse("1G"), Rate.parse("999M")) == Rate(10**9)
