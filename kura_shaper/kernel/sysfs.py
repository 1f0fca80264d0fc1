"""What netlink does not tell of a device: its live tx queues, and the CPUs that XPS gives each of them.

A sysfs shows the devices of the network namespace it was mounted in, so `/sys` may speak of another
namespace than the thread's: there `eth0` is somebody else's `eth0`. So a sysfs of the thread's own is
opened for each reading. It is mounted nowhere, and gone with its descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import socket
import struct
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.errors import KernelRefusedError, refusal

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_SYS = "/sys"
_NAME_BYTES_MAX = 15

# include/uapi/asm-generic/unistd.h, include/uapi/linux/mount.h; from Linux 5.2.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _CMD_CREATE = 1, 1, 6
_SIOCGIFHWADDR = 0x8927

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_QUEUE = re.compile(r"tx-(\d+)")
# A kernel without XPS has no such file, a device with one queue no mask in it, a queue of another
# traffic class no answer (net/core/net-sysfs.c: xps_cpus_show).
_NO_XPS = frozenset({errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL})


def check_device_name(name: str) -> str:
    """Return the name when the kernel could have such a device. Raises UsageError.

    The rules are those of dev_valid_name in net/core/dev.c, which has them for the sake of sysfs.
    """
    encoded = name.encode(errors="surrogateescape")
    wrong = not encoded or len(encoded) > _NAME_BYTES_MAX or name in (".", "..")
    if wrong or any(c in "/:" or c.isspace() or not c.isprintable() for c in name):
        raise UsageError(
            f"--device {name[:40]!r} can't be the name of a network device",
            remedy="1 to 15 characters without '/', ':' or blanks; `ip link` shows the names",
        )
    return name


class DeviceSysfs:
    """One device's directory in a sysfs of the calling thread's network namespace; a context manager."""

    def __init__(self, device_name: str, ifindex: int) -> None:
        """Raises UsageError for what is no name, StateUnknownError when the device's directory can't be had."""
        self._name = check_device_name(device_name)
        self._directory = _open_device(device_name, ifindex)

    def __enter__(self) -> DeviceSysfs:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._directory)

    def live_tx_queues(self) -> int:
        """Return how many tx queues the kernel chooses from. Raises StateUnknownError.

        A driver makes a device with the most that it may ever have, which is what netlink tells.
        """
        return len(self._queues())

    def xps_masks(self) -> dict[int, int]:
        """Return the CPUs that each queue with any is meant for. Raises StateUnknownError."""
        return self._masks("xps_cpus")

    def xps_rxqs(self) -> dict[int, int]:
        """Return the rx queues whose answers each queue with any is meant for. Raises StateUnknownError.

        These go before the masks of CPUs (net/core/dev.c: get_xps_queue).
        """
        return self._masks("xps_rxqs")

    def speed_mbps(self) -> int:
        """Return the link's speed in Mbit/s, 0 when the device does not tell one."""
        return self._number("speed")

    def virtual_functions(self) -> int:
        """Return how many virtual functions share the device's port, 0 for a device that can have none."""
        return self._number("device/sriov_numvfs")

    def _number(self, file: str) -> int:
        try:
            return max(0, int(_read(file, at=self._directory)))
        except (OSError, ValueError):
            return 0

    def set_xps_mask(self, queue: int, mask: int) -> None:
        """Give a queue to the CPUs of the mask; 0 to none. Raises KernelRefusedError, also when it is not held."""
        doing = f"setting xps_cpus of {self._name} queue {queue} to {mask:x}"
        path = f"queues/tx-{queue}/xps_cpus"
        try:
            _write(path, mask_text(mask), at=self._directory)
            held = mask_of(_read(path, at=self._directory))
        except OSError as error:
            raise refusal(error.errno or errno.EIO, doing=doing) from error
        if held != mask:
            raise KernelRefusedError(errno.EIO, f"it holds {held:x}; are all these CPUs online?", doing=doing)

    def _queues(self) -> list[int]:
        try:
            with _open("queues", _DIRECTORY, at=self._directory) as queues:
                names = os.listdir(queues)  # noqa: PTH208 - a descriptor has no path
        except OSError as error:
            raise StateUnknownError(f"the queues of {self._name} can't be read: {error}") from error
        return sorted(int(found[1]) for found in map(_QUEUE.fullmatch, names) if found)

    def _masks(self, file: str) -> dict[int, int]:
        masks = {}
        for queue in self._queues():
            try:
                mask = mask_of(_read(f"queues/tx-{queue}/{file}", at=self._directory))
            except OSError as error:
                if error.errno in _NO_XPS:
                    continue
                raise StateUnknownError(f"{file} of {self._name} queue {queue} can't be read: {error}") from error
            if mask:
                masks[queue] = mask
        return masks


def mask_of(text: str) -> int:
    """Return the number that words of 32 bits in hex make, the highest first (lib/vsprintf.c: %*pb)."""
    return int(text.strip().replace(",", ""), 16)


def mask_text(mask: int) -> str:
    """Return a number as words of 32 bits in hex."""
    digits = f"{mask:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[start : start + 8] for start in range(0, len(digits), 8))


def _open_device(name: str, ifindex: int) -> int:
    own, refused = -1, ""
    try:
        own = _open_own_sysfs()
    except OSError as error:
        refused = f"; no sysfs of this network namespace can be opened: {error.strerror}"
    try:
        with (
            _open(_SYS, _DIRECTORY) if own < 0 else closing(own) as root,
            _open(f"class/net/{name}", _DIRECTORY, at=root) as directory,
        ):
            is_same = int(_read("ifindex", at=directory)) == ifindex
            if is_same and (own >= 0 or _has_address(name, _read("address", at=directory))):
                return os.dup(directory)
    except OSError as error:
        raise StateUnknownError(f"{name} can't be read in sysfs: {error.strerror}{refused}") from error
    raise StateUnknownError(f"{name} in sysfs is another device than the one here{refused}")


def _open_own_sysfs() -> int:
    """Return the directory of a sysfs that is mounted nowhere. Raises OSError, EPERM without CAP_SYS_ADMIN."""
    with closing(_system_call(_FSOPEN, b"sysfs", _FSOPEN_CLOEXEC)) as context:
        _system_call(_FSCONFIG, context, _CMD_CREATE, None, None, 0)
        return _system_call(_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments)]
    result: int = libc.syscall(*values)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _has_address(name: str, address: str) -> bool:
    """Whether the thread's own device of this name has this link address, as far as the ioctl tells it.

    Devices of two namespaces often share name and index, as pods' do.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        answer = fcntl.ioctl(door, _SIOCGIFHWADDR, struct.pack("=16s24x", name.encode()))
    return answer[18:].startswith(bytes.fromhex(address.strip().replace(":", ""))[:6])


def _read(path: str, *, at: int) -> str:
    with _open(path, os.O_RDONLY, at=at) as file:
        return os.read(file, 4096).decode("ascii")


def _write(path: str, text: str, *, at: int) -> None:
    with _open(path, os.O_WRONLY, at=at) as file:
        os.write(file, text.encode("ascii"))


def _open(path: str, flags: int, *, at: int | None = None) -> AbstractContextManager[int]:
    return closing(os.open(path, flags | os.O_CLOEXEC, dir_fd=at))
