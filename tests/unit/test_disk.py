"""Counters of disks as several kernels show them in sysfs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.disk import DiskCounters, parse_disk, read_disks

if TYPE_CHECKING:
    from pathlib import Path

LINUX_4_14 = " 10294    1412   622570    8392    50912    33911  2171112    97876        0    41032   106224\n"
LINUX_4_19 = (
    " 10294    1412   622570    8392    50912    33911  2171112    97876        0    41032   106224"
    "      0        0        0        0\n"
)
LINUX_6_18 = (
    "  759787    77207 26752298   834156   441235   364198 28432600   130833        0   129548   999014"
    "   318807       45 19149176    26930    93311     7095\n"
)


@pytest.mark.parametrize("text", [LINUX_4_14, LINUX_4_19])
def test_a_disk_of_an_older_kernel(text: str) -> None:
    assert parse_disk("sda", text) == DiskCounters(
        name="sda",
        reads=10_294,
        read_bytes=622_570 * 512,
        read_ms=8_392,
        writes=50_912,
        written_bytes=2_171_112 * 512,
        written_ms=97_876,
        busy_ms=41_032,
    )


def test_a_disk_of_a_kernel_that_counts_flushes_too() -> None:
    found = parse_disk("vda", LINUX_6_18)
    assert (found.reads, found.writes) == (759_787, 441_235)
    assert (found.read_bytes, found.written_bytes) == (26_752_298 * 512, 28_432_600 * 512)
    assert (found.read_seconds, found.written_seconds, found.busy_seconds) == (834.156, 130.833, 129.548)


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Return a sysfs with disks, and what is none."""
    for name in ("nvme10n1", "nvme2n1", "sda", "cciss!c0d0", "sr0", "fd0"):
        _add(tmp_path, name, has_device=True)
    for name in ("loop0", "ram0", "zram0", "dm-0", "md127"):
        _add(tmp_path, name, has_device=False)
    # A partition stands below its disk.
    _add(tmp_path / "block" / "sda", "sda1", has_device=False)
    return tmp_path


def _add(root: Path, name: str, *, has_device: bool) -> None:
    directory = root / "block" / name
    directory.mkdir(parents=True)
    (directory / "stat").write_text(LINUX_6_18)
    if has_device:
        (directory / "device").mkdir()


def test_whole_disks_only_in_the_order_of_their_numbers(sys: Path) -> None:
    found = read_disks(sys)
    assert [disk.name for disk in found.disks] == ["cciss/c0d0", "nvme2n1", "nvme10n1", "sda"]
    assert found.left_out == 0


def test_no_more_disks_than_asked_for_and_the_rest_is_said(sys: Path) -> None:
    found = read_disks(sys, at_most=3)
    assert [disk.name for disk in found.disks] == ["cciss/c0d0", "nvme2n1", "nvme10n1"]
    assert found.left_out == 1


def test_a_disk_that_went_meanwhile_is_left_out(sys: Path) -> None:
    (sys / "block" / "sda" / "stat").unlink()
    assert "sda" not in {disk.name for disk in read_disks(sys).disks}


def test_counters_that_can_not_be_read_are_not_taken_for_none(sys: Path, tmp_path: Path) -> None:
    (sys / "block" / "sda" / "stat").write_text("1 2 3\n")
    with pytest.raises(StateUnknownError, match="disk sda"):
        read_disks(sys)
    with pytest.raises(StateUnknownError, match="the disks can't be read"):
        read_disks(tmp_path / "nowhere")
