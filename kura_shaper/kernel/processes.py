"""Who holds a socket: processes by the descriptors that they have, as far as /proc shows them to us.

Only a process's short name and the path of its program are read, never its arguments, which hold
secrets now and then.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PROC = Path("/proc")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_CAP_NET_ADMIN, _CAP_NET_RAW = 12, 13
# From here on either of the two lets a process set SO_MARK (net/core/sock.c).
_NET_RAW_MARKS = (5, 17)
_NS_GET_USERNS = 0xB701  # include/uapi/linux/nsfs.h
_START_TIME = 19  # fields after the name in /proc/PID/stat (man proc_pid_stat)
_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds a socket.

    can_mark is whether it may set marks in this network namespace (CAP_NET_ADMIN, from Linux 5.17 on CAP_NET_RAW
    too, in the user namespace that owns it), None when that can't be read. started_ticks are of the clock since the
    boot: with the pid they tell a process from any other of this boot (man proc_pid_stat).
    """

    pid: int
    command: str
    program: str = ""
    can_mark: bool | None = None
    age_s: int = 0
    started_ticks: int = 0

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}{f', {self.program}' if self.program else ''})"


@dataclass(frozen=True, slots=True)
class Holders:
    """Processes by the inode of a socket. unreadable counts the processes whose descriptors were not shown."""

    by_inode: Mapping[int, tuple[Process, ...]] = field(default_factory=dict)
    unreadable: int = 0


def read_holders(inodes: Collection[int], proc: Path = _PROC) -> Holders:
    """Return who holds these sockets. Processes that end meanwhile are none."""
    held: dict[int, list[Process]] = {}
    unreadable = 0
    owner = _owner_of_network(proc)
    for directory in _numbered(proc):
        found = _sockets_of(directory)
        if found is None:
            unreadable += 1
            continue
        mine = found & set(inodes)
        if mine:
            process = _process(directory, proc, owner)
            for inode in mine:
                held.setdefault(inode, []).append(process)
    return Holders({inode: tuple(sorted(some, key=lambda p: p.pid)) for inode, some in held.items()}, unreadable)


def read_named(command: str, proc: Path = _PROC) -> tuple[Process, ...]:
    """Return the running processes of that short name, which is at most 15 bytes long (man proc_pid_comm)."""
    named = (directory for directory in _numbered(proc) if _shown(_text(directory / "comm")) == command)
    # One that has ended keeps its name until its parent has asked about it.
    found = (directory for directory in named if _stat(directory)[:1] not in (["Z"], ["X"]))
    return tuple(sorted((_process(directory, proc, None) for directory in found), key=lambda p: p.pid))


def _numbered(proc: Path) -> list[Path]:
    with suppress(OSError):
        return [proc / name for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208 - thousands of them
    return []


def _sockets_of(directory: Path) -> set[int] | None:
    """Return the inodes of a process's sockets, None when they are not shown to us."""
    found = set()
    try:
        with os.scandir(directory / "fd") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    match = _SOCKET.fullmatch(os.readlink(entry.path))  # noqa: PTH115 - tens of thousands
                    if match:
                        found.add(int(match[1]))
    except PermissionError:
        return None
    except OSError:  # it ended
        return set()
    return found


def _process(directory: Path, proc: Path, owner: int | None) -> Process:
    started_ticks = _started_ticks(directory)
    return Process(
        pid=int(directory.name),
        command=_shown(_text(directory / "comm")),
        program=_shown(_link(directory / "exe")),
        can_mark=_can_mark(directory, owner),
        age_s=_age_s(started_ticks, proc),
        started_ticks=started_ticks,
    )


def _can_mark(directory: Path, owner: int | None) -> bool | None:
    for line in _text(directory / "status").splitlines():
        if line.startswith("CapEff:"):
            has = int(line.split()[1], 16)
            is_set = any(has >> capability & 1 for capability in _marking_capabilities())
            return is_set and _is_same_user_namespace(directory, owner)
    return None


def _marking_capabilities() -> tuple[int, ...]:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    is_new = release is not None and (int(release[1]), int(release[2])) >= _NET_RAW_MARKS
    return (_CAP_NET_ADMIN, _CAP_NET_RAW) if is_new else (_CAP_NET_ADMIN,)


def _is_same_user_namespace(directory: Path, owner: int | None) -> bool:
    """Whether what a process may do counts here. True when that can't be told: then the bit has to do."""
    with suppress(OSError):
        return owner is None or (directory / "ns" / "user").stat().st_ino == owner
    return True


def _owner_of_network(proc: Path) -> int | None:
    """Return the user namespace that owns this thread's network namespace; None when that is not told."""
    try:
        network = os.open(proc / "thread-self" / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = fcntl.ioctl(network, _NS_GET_USERNS)
    except OSError:
        return None
    finally:
        os.close(network)
    try:
        return os.fstat(owner).st_ino
    finally:
        os.close(owner)


def _stat(directory: Path) -> list[str]:
    """Return the fields of a process's stat from its state on (man proc_pid_stat)."""
    return _text(directory / "stat").rpartition(")")[2].split()


def _started_ticks(directory: Path) -> int:
    try:
        return int(_stat(directory)[_START_TIME])
    except (ValueError, IndexError):
        return 0


def _age_s(started_ticks: int, proc: Path) -> int:
    try:
        up_s = float(_text(proc / "uptime").split()[0])
    except (ValueError, IndexError):
        return 0
    return max(0, int(up_s) - started_ticks // os.sysconf("SC_CLK_TCK")) if started_ticks else 0


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""


def _shown(text: str) -> str:
    """Return a name as it can be shown: a process chooses its own, control characters and all."""
    clean = "".join(c if c.isprintable() else "?" for c in text.rstrip("\n"))
    return clean[:_NAME_CHARS] if clean else ""
