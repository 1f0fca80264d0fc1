"""What sysfs tells of a device is told of the thread's own network namespace, or not at all."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kernel_devices import add_device, delete_link, set_link, set_live_tx_queues

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.kernel.errors import KernelRefusedError, NotThereError
from kura_shaper.kernel.netns import unshare_network
from kura_shaper.kernel.sysfs import DeviceSysfs, mask_of, mask_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Ended, Network

pytestmark = pytest.mark.privileged

_CLONE_NEWNS = 0x00020000


@pytest.fixture
def sysfs(network: Network) -> Iterator[DeviceSysfs]:
    """Return the sysfs directory of `nic0`."""
    with DeviceSysfs(network.device.name, network.device.ifindex) as opened:
        yield opened


@pytest.fixture
def with_xps(sysfs: DeviceSysfs) -> DeviceSysfs:
    """Return the same where the kernel was built with XPS."""
    try:
        sysfs.set_xps_mask(0, 0)
    except NotThereError:
        pytest.skip("this kernel lacks XPS")
    return sysfs


def mount_sysfs_over_sys() -> None:
    """In a mount namespace of this process alone, let /sys speak of the present network namespace."""
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)


def test_the_devices_of_this_namespace_are_told_where_sys_shows_those_of_another(sysfs: DeviceSysfs) -> None:
    assert not Path("/sys/class/net/nic0").exists()
    assert sysfs.live_tx_queues() == 4


def test_the_count_of_queues_is_the_live_one(network: Network, sysfs: DeviceSysfs) -> None:
    for count in (2, 1, 4):
        set_live_tx_queues(network, count)
        assert sysfs.live_tx_queues() == count


def test_queues_that_nobody_gave_processors_have_no_masks_also_without_xps(sysfs: DeviceSysfs) -> None:
    assert (sysfs.xps_masks(), sysfs.xps_rxqs()) == ({}, {})


def test_a_mask_is_set_seen_cleared_and_restored(with_xps: DeviceSysfs) -> None:
    assert with_xps.xps_masks() == {}
    with_xps.set_xps_mask(2, 0b1)
    former = with_xps.xps_masks()
    assert former == {2: 0b1}
    with_xps.set_xps_mask(2, 0)
    assert with_xps.xps_masks() == {}
    for queue, mask in former.items():
        with_xps.set_xps_mask(queue, mask)
    assert with_xps.xps_masks() == former


def test_masks_of_rx_queues_are_told_apart(with_xps: DeviceSysfs, network: Network) -> None:
    assert with_xps.xps_rxqs() == {}
    directory = os.open("queues/tx-1", os.O_PATH, dir_fd=with_xps._directory)
    file = os.open("xps_rxqs", os.O_WRONLY, dir_fd=directory)
    os.write(file, b"1")
    os.close(file)
    os.close(directory)
    assert (with_xps.xps_rxqs(), with_xps.xps_masks()) == ({1: 1}, {})


def test_a_mask_of_processors_that_are_not_there_is_refused(with_xps: DeviceSysfs) -> None:
    with pytest.raises(KernelRefusedError, match="xps_cpus of nic0 queue 1 to 1000000000000000000000000"):
        with_xps.set_xps_mask(1, 1 << 96)
    assert with_xps.xps_masks() == {}


def test_a_queue_that_is_not_live_takes_no_mask(network: Network, with_xps: DeviceSysfs) -> None:
    set_live_tx_queues(network, 2)
    with pytest.raises(NotThereError, match="queue 3"):
        with_xps.set_xps_mask(3, 1)


def test_a_device_with_one_queue_has_no_xps() -> None:
    # lo of whatever namespace the test is in: all have one, with index 1.
    with DeviceSysfs("lo", 1) as sysfs:
        assert (sysfs.live_tx_queues(), sysfs.xps_masks(), sysfs.xps_rxqs()) == (1, {}, {})


def test_an_open_directory_follows_a_new_name_and_ends_with_the_device(network: Network, sysfs: DeviceSysfs) -> None:
    set_link("nic0", state="down")
    set_link("nic0", ifname="other")
    assert sysfs.live_tx_queues() == 4
    with pytest.raises(StateUnknownError, match="nic0 can't be read in sysfs: No such file"):
        DeviceSysfs("nic0", network.device.ifindex)
    delete_link("other")
    with pytest.raises(StateUnknownError, match="the queues of nic0 can't be read"):
        sysfs.live_tx_queues()


def test_a_device_of_the_same_name_and_another_index_is_another(network: Network) -> None:
    with pytest.raises(StateUnknownError, match=r"is another device than the one here$"):
        DeviceSysfs("nic0", network.device.ifindex + 100)


@pytest.mark.parametrize("name", ["", "..", "../lo", "a b", "n" * 16])
def test_what_is_no_device_name_becomes_no_path(name: str) -> None:
    with pytest.raises(UsageError, match="can't be the name of a network device"):
        DeviceSysfs(name, 1)


def test_without_the_capability_sys_is_read_where_it_shows_this_namespace(
    network: Network, in_child: Callable[[Callable[[], int | None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    def work() -> None:
        mount_sysfs_over_sys()
        drop_capabilities()
        with DeviceSysfs("nic0", network.device.ifindex) as sysfs:
            print(sysfs.live_tx_queues())

    ended = in_child(work)
    assert (ended.status, ended.stdout) == (0, "4\n"), ended.stderr


def test_without_the_capability_the_sys_of_another_namespace_is_not_believed(
    network: Network, in_child: Callable[[Callable[[], int | None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    def work() -> None:
        mount_sysfs_over_sys()
        unshare_network()
        assert add_device("nic0", "bridge", index=network.device.ifindex) == network.device.ifindex
        drop_capabilities()
        try:
            DeviceSysfs("nic0", network.device.ifindex)
        except StateUnknownError as error:
            print(error)

    ended = in_child(work)
    assert ended.status == 0, ended.stderr
    assert ended.stdout.startswith("nic0 in sysfs is another device than the one here; no sysfs of this network")


@pytest.mark.parametrize(
    ("mask", "text"),
    [(0, "00000000"), (0b101, "00000005"), (1 << 32, "00000001,00000000"), (0xFFFFFFFFFF, "000000ff,ffffffff")],
)
def test_masks_are_words_of_32_bits_the_highest_first(mask: int, text: str) -> None:
    assert (mask_text(mask), mask_of(f"{text}\n")) == (text, mask)
