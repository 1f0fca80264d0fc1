"""Rates and sizes as integers whose unit is in the name, and Kubernetes quantities.

A quantity is a decimal number with a binary suffix (Ki Mi Gi Ti Pi Ei), a decimal
suffix (n u m k M G T P E) or an exponent (e3, E-2); grammar: Kubernetes API
conventions, "Quantity". A rate is a quantity of bit/s, so `25M` is 25 Mbit/s.
No float is used anywhere: a quantity is exact or it is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kura_shaper.errors import QuantityError

_SUFFIX_POWERS_OF_TEN = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SUFFIX_POWERS_OF_TWO = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,2}))?",
    re.ASCII,
)
# The kernel keeps an HTB rate in bytes per second in 64 bits; this is 9.2 Ebit/s.
_MAX_BITS_PER_SECOND = 2**63 - 1


def parse_quantity(text: str) -> Fraction:
    """Return the exact value of a Kubernetes quantity such as `1.5G`, `3k`, `2Gi` or `1e9`.

    Raises QuantityError when the text is not one.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        hint = 'write a number with an optional suffix k, M, G, T or Ki, Mi, Gi, Ti, e.g. "25M" or "1.5G"'
        raise QuantityError(f"{text[:64]!r} is not a quantity", remedy=hint)
    value = Fraction(match["number"])
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    elif match["suffix"] in _SUFFIX_POWERS_OF_TWO:
        value *= 2 ** _SUFFIX_POWERS_OF_TWO[match["suffix"]]
    else:
        value *= Fraction(10) ** _SUFFIX_POWERS_OF_TEN[match["suffix"] or ""]
    return -value if match["sign"] == "-" else value


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """A rate in whole bits per second, never negative."""

    bits_per_second: int

    def __post_init__(self) -> None:
        if not 0 <= self.bits_per_second <= _MAX_BITS_PER_SECOND:
            raise QuantityError(f"a rate of {self.bits_per_second} bit/s is out of range", remedy="use 0 to 9.2E")

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Return the rate that a Kubernetes quantity of bit/s names.

        Raises QuantityError when it is no quantity, negative, or no whole number of bit/s.
        """
        value = parse_quantity(text)
        if value < 0:
            raise QuantityError(f"{text!r} is a negative rate", remedy="rates are 0 or more")
        if value.denominator != 1:
            raise QuantityError(f"{text!r} is not a whole number of bit/s", remedy='write it in bit/s, e.g. "1500k"')
        return cls(value.numerator)

    @classmethod
    def from_bytes_per_second(cls, bytes_per_second: int) -> Rate:
        """Return the rate of so many bytes each second, the unit that the kernel speaks."""
        return cls(bytes_per_second * 8)

    @property
    def bytes_per_second(self) -> int:
        """Whole bytes each second, rounded down."""
        return self.bits_per_second // 8

    @property
    def mbps(self) -> float:
        """Mbit/s of 10^6 bit, for people and reports only: no decision is made on it."""
        return self.bits_per_second / 1_000_000

    def bytes_in_us(self, duration_us: int) -> int:
        """Whole bytes that pass at this rate in so many microseconds, rounded down."""
        return self.bits_per_second * duration_us // 8_000_000

    def scaled(self, numerator: int, denominator: int) -> Rate:
        """Return this rate times numerator / denominator, rounded down."""
        return Rate(self.bits_per_second * numerator // denominator)

    def __str__(self) -> str:
        for suffix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
            thousandths, rest = divmod(self.bits_per_second * 1000, size)
            if self.bits_per_second >= size and rest == 0:
                return f"{thousandths // 1000}.{thousandths % 1000:03}".rstrip("0").rstrip(".") + suffix
        return str(self.bits_per_second)
