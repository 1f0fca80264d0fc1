"""A mark carries a class id under a mask, and leaves other software's bits alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kura_shaper.errors import UsageError
from kura_shaper.tenants.marks import (
    DEFAULT_MASK,
    KNOWN_MARK_USERS,
    TENANT_CLASS_MAX,
    TENANT_CLASS_MIN,
    MarkLayout,
    ReservedClass,
    known_mark_user,
    require_free_bits,
)

LAYOUTS = st.integers(min_value=9, max_value=16).flatmap(
    lambda bits: st.integers(min_value=0, max_value=32 - bits).map(lambda low: MarkLayout(((1 << bits) - 1) << low))
)
CALICO, TAILSCALE, CILIUM = (known_mark_user(name) for name in ("calico", "tailscale", "cilium"))


@given(LAYOUTS, st.data())
def test_the_class_id_of_the_mark_of_a_class_id_is_that_id(layout: MarkLayout, data: st.DataObject) -> None:
    class_id = data.draw(st.integers(min_value=1, max_value=layout.class_id_max))
    mark = layout.mark(class_id)
    assert layout.class_id(mark) == class_id
    assert mark & ~layout.mask == 0


@given(LAYOUTS, st.integers(min_value=0, max_value=0xFFFFFFFF), st.data())
@pytest.mark.case("F2")
def test_bits_outside_the_mask_do_not_change_the_class_id(layout: MarkLayout, noise: int, data: st.DataObject) -> None:
    """Case F2."""
    class_id = data.draw(st.integers(min_value=1, max_value=layout.class_id_max))
    assert layout.class_id(layout.mark(class_id) | noise & ~layout.mask) == class_id


@pytest.mark.parametrize(
    ("mask", "shift", "class_id_max"),
    [
        (DEFAULT_MASK, 16, TENANT_CLASS_MAX),
        (0x0000FFFF, 0, TENANT_CLASS_MAX),
        (0x01FF0000, 16, 0x1FF),
        (0xFF800000, 23, 0x1FF),
        (0x0FFF0000, 16, 0xFFF),
    ],
)
def test_a_mask_tells_the_shift_and_the_largest_class(mask: int, shift: int, class_id_max: int) -> None:
    layout = MarkLayout(mask)
    assert (layout.shift, layout.class_id_max) == (shift, class_id_max)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (0, "is not a 32-bit mask"),
        (-1, "is not a 32-bit mask"),
        (0x1FFFF0000, "is not a 32-bit mask"),
        (0xFFFE0001, "has gaps"),
        (0xFF00FF00, "has gaps"),
        (0xFF000000, "is 8 bits wide"),
        (0x00000001, "is 1 bits wide"),
        (0xFFFF8000, "is 17 bits wide"),
        (0xFFFFFFFF, "is 32 bits wide"),
    ],
)
def test_a_mask_that_cannot_carry_a_class_id_is_refused(mask: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        MarkLayout(mask)


@pytest.mark.parametrize("class_id", [0, -1, 0x200, 0xFFFF])
def test_a_class_id_that_does_not_fit_gets_no_mark(class_id: int) -> None:
    with pytest.raises(UsageError, match="does not fit mask 0x01ff0000"):
        MarkLayout(0x01FF0000).mark(class_id)


def test_a_mark_without_our_bits_carries_no_class() -> None:
    assert MarkLayout().class_id(0x0000C000) == 0


def test_the_gateway_has_a_mark_of_its_own_below_the_tenants() -> None:
    assert MarkLayout().mark(ReservedClass.GATEWAY) == 0x00100000
    assert max(ReservedClass) < TENANT_CLASS_MIN


def test_the_default_mask_is_free_of_everything_that_runs_on_every_node() -> None:
    require_free_bits(MarkLayout())
    assert [user.name for user in MarkLayout().overlaps()] == ["calico", "weave", "tailscale"]


@pytest.mark.parametrize("mask", [0x0000FFFF, 0x01FFF000, 0x03FE0000 >> 9])
@pytest.mark.case("F3")
def test_bits_of_what_runs_on_every_node_are_refused_even_when_acknowledged(mask: int) -> None:
    """Case F3."""
    with pytest.raises(UsageError, match="which is on every node; use 0xffff0000"):
        require_free_bits(MarkLayout(mask), neighbours=KNOWN_MARK_USERS, acknowledged=KNOWN_MARK_USERS)


def test_bits_of_a_neighbour_are_refused_until_it_is_acknowledged() -> None:
    with pytest.raises(UsageError, match=r"writes bits of calico \(0xffff0000\).*add calico to marks\.acknowledge"):
        require_free_bits(MarkLayout(), neighbours=[CALICO])
    with pytest.raises(UsageError, match="writes bits of tailscale"):
        require_free_bits(MarkLayout(), neighbours=[TAILSCALE, CALICO], acknowledged=[CALICO])
    require_free_bits(MarkLayout(), neighbours=[TAILSCALE, CALICO], acknowledged=[CALICO, TAILSCALE])


def test_a_neighbour_with_other_bits_is_welcome() -> None:
    require_free_bits(MarkLayout(), neighbours=[CILIUM])
    require_free_bits(MarkLayout(0xFFF00000), neighbours=[TAILSCALE])


def test_an_unknown_neighbour_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'flannel\\n' is no known user .*known: kube-proxy, cilium, .*tailscale"):
        known_mark_user("flannel\n")
    assert str(known_mark_user("calico")) == "calico"
