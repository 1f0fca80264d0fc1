"""softnet_stat of several kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.softnet import Softnet, parse_softnet, read_softnet

if TYPE_CHECKING:
    from pathlib import Path

LINUX_2_6_32 = """\
0000d7ec 0000000a 00000003 00000000 00000000 00000000 00000000 00000000 00000000
0000a1f0 00000005 00000001 00000000 00000000 00000000 00000000 00000000 00000000
"""
LINUX_3_10 = """\
00358fe3 00006283 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
00953d1a 00000446 00000000 00000000 00000000 00000000 00000000 00000000 008eeb9a 00000000
02600138 00004b1f 00000006 00000000 00000000 00000000 00000000 00000000 018f3a35 00000000
"""
LINUX_4_19 = """\
00001d0d 00000000 00000001 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
00001ab4 000000ff 00000010 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
"""
ZERO = " 00000000"
LINUX_6_1_ONE_CPU = f"00000e2a{ZERO * 12}\n"
LINUX_6_18 = f"""\
1434a5d6 00000000 00000076{ZERO * 12}
0f20c38b 00000000 0000008a{ZERO * 9} 00000001{ZERO * 2}
"""


@pytest.mark.case("F46")
@pytest.mark.parametrize(
    ("text", "dropped", "squeezed"),
    [
        pytest.param(LINUX_2_6_32, 15, 4, id="9 columns"),
        pytest.param(LINUX_3_10, 0x6283 + 0x446 + 0x4B1F, 6, id="10 columns"),
        pytest.param(LINUX_4_19, 0xFF, 0x11, id="11 columns"),
        pytest.param(LINUX_6_1_ONE_CPU, 0, 0, id="13 columns"),
        pytest.param(LINUX_6_18, 0, 0x76 + 0x8A, id="15 columns"),
    ],
)
def test_totals_of_all_cpus_whatever_columns_a_kernel_has(text: str, dropped: int, squeezed: int) -> None:
    assert parse_softnet(text) == Softnet(dropped_packets=dropped, squeezed=squeezed)


def test_a_file_that_is_no_such_is_not_taken_for_zero(tmp_path: Path) -> None:
    with pytest.raises(StateUnknownError, match="softnet_stat can't be read"):
        read_softnet(tmp_path)
    (tmp_path / "net").mkdir()
    for text in ("", "\n", "00000001 00000002\n", "x y z\n"):
        (tmp_path / "net" / "softnet_stat").write_text(text)
        with pytest.raises(StateUnknownError):
            read_softnet(tmp_path)


def test_this_machines_file_is_read() -> None:
    found = read_softnet()
    assert found.dropped_packets >= 0
    assert found.squeezed >= 0
