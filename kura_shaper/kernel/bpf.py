"""The edge of bpf(2): steering programs in the kernel, and which programs a device's egress runs.

A tcx link attaches a program at a place in the chain of a device, before clsact. A link lives
as long as something refers to it: a descriptor, or a name in a bpffs (a pin). So a pin is what
remains of us, and removing it is how we leave. (kernel/bpf/tcx.c, net/bpf/mprog.c)
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.errors import KernelRefusedError, NotThereError, UnsupportedError, refusal
from kura_shaper.tree.ebpf import OUR_PREFIX, TcxProgram, TcxState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.tree.ebpf import EbpfProgram

_SYSCALLS = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _OBJ_PIN, _OBJ_GET, _PROG_GET_FD_BY_ID, _OBJ_GET_INFO = 5, 6, 7, 13, 15
_PROG_QUERY, _LINK_CREATE, _LINK_UPDATE, _LINK_DETACH = 16, 28, 29, 34
_SCHED_CLS, _TCX_EGRESS, _LINK_TYPE_TCX = 3, 47, 11
_BEFORE = 1 << 3
_LICENSE = b"Apache-2.0"
_LOG_LEVEL, _LOG_BYTES = 1, 1 << 20
_CHAIN_MAX = 64  # BPF_MPROG_MAX
_INFO_BYTES = 256
_TRIES = 5  # a signal breaks off the verifier with EAGAIN

_SYSTEM_BPFFS = Path("/sys/fs/bpf")
_SYSTEM_PINS = _SYSTEM_BPFFS / "kura-shaper"
_OUR_BPFFS = Path("/run/kura-shaper/bpf")
_PINS = {_SYSTEM_BPFFS: _SYSTEM_PINS, _OUR_BPFFS: _OUR_BPFFS}  # by the mount that they are in
_NOT_YET = "_new"  # ends the name of a pin that is to replace another
_BPFFS_MAGIC = 0xCAFE4A11
_MOUNT_FLAGS = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC

_LIBC = ctypes.CDLL(None, use_errno=True)


def load_steering(program: EbpfProgram) -> int:
    """Load a program and return its descriptor. Raises KernelRefusedError with the verifier's last words."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    doing = f"loading the steering program {program.name}"
    try:
        return _load(program, None, doing=doing)
    except KernelRefusedError as error:
        if error.errno not in {errno.EINVAL, errno.EACCES}:
            raise
        refused = error
    try:
        return _load(program, log, doing=doing)
    except KernelRefusedError as error:
        lines = log.value.decode(errors="replace").strip().splitlines()
        said = [line for line in lines if not line.startswith(("processed ", "verification time", "stack depth"))]
        raise refusal(refused.errno, said[-1] if said else "", doing=doing) from error


def _load(program: EbpfProgram, log: ctypes.Array[ctypes.c_char] | None, *, doing: str) -> int:
    code = ctypes.create_string_buffer(program.encoded)
    licence = ctypes.create_string_buffer(_LICENSE)
    level, size, at = (_LOG_LEVEL, _LOG_BYTES, ctypes.addressof(log)) if log else (0, 0, 0)
    attributes = struct.pack(
        "=IIQQIIQII16s",
        *(_SCHED_CLS, len(program.instructions), ctypes.addressof(code), ctypes.addressof(licence)),
        *(level, size, at, 0, 0, program.name.encode()),
    )
    return bpf_call(_PROG_LOAD, attributes, doing=doing)


def attached(ifindex: int) -> TcxState:
    """Return what runs at a device's egress, in order. Raises KernelRefusedError for a device that is not there."""
    try:
        chain = _chain(ifindex)
    except UnsupportedError:
        return TcxState(supported=False)
    return TcxState(supported=True, programs=tuple(_program(place.program_id) for place in chain))


@dataclass(frozen=True, slots=True)
class _Place:
    program_id: int
    link_id: int


def _chain(ifindex: int) -> list[_Place]:
    """Return who stands in a device's chain. Raises UnsupportedError when the kernel has no tcx."""
    programs, links = (ctypes.c_uint32 * _CHAIN_MAX)(), (ctypes.c_uint32 * _CHAIN_MAX)()
    question = struct.pack(
        "=IIIIQIIQQQQ",
        *(ifindex, _TCX_EGRESS, 0, 0, ctypes.addressof(programs), _CHAIN_MAX, 0, 0, ctypes.addressof(links), 0, 0),
    )
    attributes = ctypes.create_string_buffer(question, len(question))
    doing = f"reading the tcx programs of device {ifindex}"
    try:
        _bpf_in_place(_PROG_QUERY, attributes, doing=doing)
    except KernelRefusedError as error:
        if error.errno == errno.EINVAL:  # before 6.6, or without CONFIG_NET_XGRESS
            raise UnsupportedError(errno.EOPNOTSUPP, "this kernel lacks tcx", doing=doing) from error
        raise
    (count,) = struct.unpack_from("=I", attributes, 24)
    return [_Place(programs[at], links[at]) for at in range(count)]


def _program(program_id: int) -> TcxProgram:
    name = ""
    with suppress(NotThereError):  # gone since; any other refusal leaves open whose it is
        descriptor = bpf_call(_PROG_GET_FD_BY_ID, struct.pack("=III", program_id, 0, 0), doing="opening a program")
        with closing(descriptor):
            name = _info(descriptor)[64:80].partition(b"\0")[0].decode(errors="replace")
    return TcxProgram(program_id, name, is_ours=name.startswith(OUR_PREFIX))


def attach_first(descriptor: int, ifindex: int) -> int:
    """Attach a program before all others of a device's egress; return the descriptor of its link."""
    attributes = struct.pack("=IIIIIIQ", descriptor, ifindex, _TCX_EGRESS, _BEFORE, 0, 0, 0)
    return bpf_call(_LINK_CREATE, attributes, doing=f"attaching the steering program to device {ifindex}")


def update(link: int, descriptor: int) -> None:
    """Have a link run another program from now on, at the same place."""
    bpf_call(_LINK_UPDATE, struct.pack("=IIII", link, descriptor, 0, 0), doing="replacing the steering program")


def pin(descriptor: int, path: Path) -> None:
    """Give a link or a program a name in a bpffs."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    bpf_call(_OBJ_PIN, struct.pack("=QII", ctypes.addressof(text), descriptor, 0), doing=f"pinning {path}")


def open_pinned(path: Path) -> int:
    """Return a descriptor of what has this name in a bpffs."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    return bpf_call(_OBJ_GET, struct.pack("=QII", ctypes.addressof(text), 0, 0), doing=f"opening {path}")


def steer_by_tcx(program: EbpfProgram, ifindex: int) -> None:
    """Have a device's egress run this program first, whatever becomes of this process.

    What steered before is replaced in place where it stands first, and else goes once its
    successor stands. Raises KernelRefusedError; what was there before then still steers.
    """
    with closing(load_steering(program)) as descriptor:
        path = pin_directory() / _pin_name(ifindex)
        with _open(path) as link:
            if link is not None and _stands_first(link, ifindex):
                update(link, descriptor)
            else:
                with closing(attach_first(descriptor, ifindex)) as successor:
                    _replace(path, successor)
        for other in _pins(ifindex):
            if other != path:
                _remove(other)
    reap_pins()


def _replace(path: Path, link: int) -> None:
    """Pin a link where another may be; that one goes, at once."""
    fresh = path.with_name(path.name + _NOT_YET)
    _remove(fresh)  # left by a process that was killed just before the next lines
    pin(link, fresh)
    with _open(path) as old, _refusals(doing=f"pinning {path}"):
        fresh.rename(path)
        if old is not None:
            _detach(old)


def unsteer_tcx(ifindex: int) -> None:
    """Leave a device's egress; nothing to do where we are not. Raises KernelRefusedError."""
    for path in _pins(ifindex):
        _remove(path)


def _remove(path: Path) -> None:
    with _open(path) as link, _refusals(doing=f"removing {path}"):
        if link is not None:
            _detach(link)
        path.unlink(missing_ok=True)


def reap_pins() -> None:
    """Remove the pins whose device is gone, in whatever network namespace it was."""
    for path in _pins():
        with suppress(KernelRefusedError), _open(path) as link:
            if link is not None and _link_of(link).ifindex == 0:
                _remove(path)


def _stands_first(link: int, ifindex: int) -> bool:
    found = _link_of(link)
    return found.ifindex == ifindex and [place.link_id for place in _chain(ifindex)][:1] == [found.link_id]


@dataclass(frozen=True, slots=True)
class _Link:
    link_id: int
    ifindex: int


def _link_of(link: int) -> _Link:
    """Return what a link is attached to; ifindex 0 when its device is gone, or it is another kind of link."""
    kind, link_id, _, _, ifindex, attach_type = struct.unpack_from("=IIIIII", _info(link))
    return _Link(link_id, ifindex if (kind, attach_type) == (_LINK_TYPE_TCX, _TCX_EGRESS) else 0)


def _detach(link: int) -> None:
    """Detach now: after the last reference is gone, the kernel does it too, but some time later."""
    with suppress(KernelRefusedError):
        bpf_call(_LINK_DETACH, struct.pack("=I", link), doing="detaching a steering program")


def pin_directory() -> Path:
    """Return where our pins live; a bpffs is mounted when the system has none. Raises KernelRefusedError."""
    with _refusals(doing="making a place for pins"):
        if _is_bpffs(_SYSTEM_BPFFS):
            _SYSTEM_PINS.mkdir(mode=0o700, exist_ok=True)
            return _SYSTEM_PINS
        _OUR_BPFFS.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_bpffs(_OUR_BPFFS) and has_private_mounts():
        raise KernelRefusedError(
            errno.EOPNOTSUPP,
            f"a bpffs would vanish with this process's own mounts: mount one at {_SYSTEM_BPFFS} first",
            doing="making a place for pins",
        )
    if not _is_bpffs(_OUR_BPFFS) and _LIBC.mount(b"bpf", os.fsencode(_OUR_BPFFS), b"bpf", _MOUNT_FLAGS, b"mode=0700"):
        raise refusal(ctypes.get_errno(), doing=f"mounting a bpffs on {_OUR_BPFFS}")
    return _OUR_BPFFS


def has_private_mounts() -> bool:
    """Whether what this process mounts is seen by it and its children only, as below `ip netns exec`.

    False as well where process 1 does not let itself be compared with.
    """
    try:
        return Path("/proc/self/ns/mnt").readlink() != Path("/proc/1/ns/mnt").readlink()
    except OSError:
        return False


def _pins(ifindex: int | None = None) -> list[Path]:
    """Return the pins of a device, or all. The system may have got a bpffs since we mounted one."""
    names = "steer_*" if ifindex is None else _pin_name(ifindex)
    directories = [pins for mount, pins in _PINS.items() if _is_bpffs(mount)]
    return [path for each in directories for end in ("", _NOT_YET) for path in each.glob(names + end)]


def _pin_name(ifindex: int) -> str:
    """Name a device: its number is unique in its network namespace only. A bpffs allows no dots."""
    namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    return f"steer_{ifindex}_{namespace}"


def _is_bpffs(path: Path) -> bool:
    found = (ctypes.c_ulong * 64)()  # struct statfs, whose first member is the type
    failed: int = _LIBC.statfs(os.fsencode(path), found)
    return not failed and found[0] == _BPFFS_MAGIC


@contextmanager
def _open(path: Path) -> Iterator[int | None]:
    """Open a pin for a while; None where there is none."""
    try:
        link = open_pinned(path)
    except KernelRefusedError:
        yield None
        return
    with closing(link):
        yield link


@contextmanager
def _refusals(*, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refusal(error.errno or 0, doing=doing) from error


def _info(descriptor: int) -> bytes:
    """Return struct bpf_prog_info or bpf_link_info."""
    found = ctypes.create_string_buffer(_INFO_BYTES)
    attributes = struct.pack("=IIQ", descriptor, _INFO_BYTES, ctypes.addressof(found))
    bpf_call(_OBJ_GET_INFO, attributes, doing="reading about a program")
    return found.raw


def bpf_call(command: int, attributes: bytes, *, doing: str) -> int:
    """Call bpf(2) and return its result; `doing` names the call in an error. Raises KernelRefusedError."""
    return _bpf_in_place(command, ctypes.create_string_buffer(attributes, len(attributes)), doing=doing)


def _bpf_in_place(command: int, attributes: ctypes.Array[ctypes.c_char], *, doing: str) -> int:
    """Call bpf(2), which may write its answer into the attributes. Raises KernelRefusedError."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise UnsupportedError(errno.ENOSYS, f"bpf(2) is not known for {platform.machine()}", doing=doing)
    for _ in range(_TRIES):
        result = int(_LIBC.syscall(ctypes.c_long(number), command, attributes, ctypes.sizeof(attributes)))
        if result >= 0:
            return result
        if ctypes.get_errno() != errno.EAGAIN:
            break
    raise refusal(ctypes.get_errno(), doing=doing)
