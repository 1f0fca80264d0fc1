"""A run that the kernel itself cleans up: private PIDs, mounts and network, one life.

Three processes carry a run. The *warden* leaves the caller's namespaces, the *reaper*
is pid 1 of the new PID namespace, and the *worker* does the work. Each dies with the one
before it (PR_SET_PDEATHSIG), and the death of pid 1 ends every process of the run. The
named network namespaces and the temporary files live in a tmpfs of the private mount
namespace, so they go with the last process. Nothing has to be undone by us, which is why
a SIGKILL at any point leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from kura_shaper.errors import KuraShaperError, RefusedError, StateUnknownError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

NETNS_DIR: Final = Path("/run/netns")
# Where the work puts its files: it is also the TMPDIR of the worker and of what it starts.
SCRATCH_DIR: Final = Path("/run/kura-shaper-lab")
# The work ended by an exception that nobody meant: it has no verdict.
CRASHED_STATUS: Final = StateUnknownError.exit_code
STOP_GRACE_S: Final = 5.0

_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWPID = 0x2000_0000
_CLONE_NEWNET = 0x4000_0000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x4_0000
_PR_SET_PDEATHSIG = 1
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_ERRORS_BY_EXIT_CODE = {error.exit_code: error for error in (UsageError, RefusedError, StateUnknownError)}
_MAX_ERROR_BYTES = 32_768

_libc = ctypes.CDLL(None, use_errno=True)


def run_isolated(work: Callable[[], int]) -> int:
    """Run `work` in namespaces of its own and return its exit status once all of the run is gone.

    The work sees an empty network, an empty /run/netns and SCRATCH_DIR as its TMPDIR; other
    files are the machine's. SIGINT and SIGTERM are passed on to it; when it is still there
    STOP_GRACE_S later, or at a second signal, it is killed. A status is the work's own,
    128 + N when signal N ended it (130 for Ctrl-C), or CRASHED_STATUS when it raised.

    Raises RefusedError when the process may not make namespaces, and the KuraShaperError
    that the work raised, as its base class.
    """
    require_privilege()
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = _Pipes.open()
    caller_pid = os.getpid()
    stop = _Stop(pipes.orders_w)
    with stop.installed():
        warden_pid = os.fork()
        if warden_pid == 0:
            _leave_with(lambda: _be_warden(work, pipes=pipes, caller_pid=caller_pid), pipes=pipes)
        os.close(pipes.orders_r)
        os.close(pipes.errors_w)
        try:
            status = _wait_for_warden(warden_pid, stop)
            report = _read_to_end(pipes.errors_r)
        finally:
            os.close(pipes.orders_w)
            os.close(pipes.errors_r)
    if report:
        raise _error_from(report)
    return status


def require_privilege() -> None:
    """Raise RefusedError unless this process may make namespaces and configure networks."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    wanted = {"CAP_SYS_ADMIN": _CAP_SYS_ADMIN, "CAP_NET_ADMIN": _CAP_NET_ADMIN}
    if missing := [name for name, bit in wanted.items() if not held >> bit & 1]:
        remedy = "run it as root (sudo), or in a container started with --privileged"
        raise RefusedError(f"the lab may not make namespaces: {' and '.join(missing)} missing", remedy=remedy)


@contextlib.contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Put the calling thread into a network namespace for the length of the block.

    Sockets opened and processes started in the block stay in it. Raises RefusedError
    when the namespace can't be entered.
    """
    with _opened(Path("/proc/thread-self/ns/net")) as home:
        with _opened(namespace) as target:
            _call("setns", target, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)


@contextlib.contextmanager
def _opened(namespace: Path) -> Iterator[int]:
    try:
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RefusedError(f"no network namespace {namespace}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Pipes:
    """`orders` carries signal numbers down, and its end says that the caller died; `errors` goes up."""

    orders_r: int
    orders_w: int
    errors_r: int
    errors_w: int

    @classmethod
    def open(cls) -> _Pipes:
        return cls(*os.pipe(), *os.pipe())


class _Stop:
    """Passes the first SIGINT or SIGTERM on as an order, and says when patience ends."""

    def __init__(self, orders_w: int) -> None:
        self._orders_w = orders_w
        self._deadline_s = float("inf")
        self.signal_number = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers; a caller elsewhere has its own way to stop
            return
        former = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number:
            self._deadline_s = 0.0
            return
        self.signal_number = number
        self._deadline_s = time.monotonic() + STOP_GRACE_S
        with contextlib.suppress(OSError):
            os.write(self._orders_w, bytes([number]))

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline_s


def _wait_for_warden(pid: int, stop: _Stop) -> int:
    alive = os.pidfd_open(pid)
    killed = False
    try:
        while not _readable([alive], timeout_ms=100):
            if stop.is_overdue and not killed:
                os.kill(pid, signal.SIGKILL)
                killed = True
    finally:
        os.close(alive)
    status = _status_of(os.waitpid(pid, 0)[1])
    return 128 + stop.signal_number if killed else status


def _be_warden(work: Callable[[], int], *, pipes: _Pipes, caller_pid: int) -> int:
    os.close(pipes.orders_w)
    os.close(pipes.errors_r)
    # A session of its own: Ctrl-C on the terminal then reaches the caller alone, which passes it on once.
    os.setsid()
    _die_with_parent()
    if os.getppid() != caller_pid:
        return CRASHED_STATUS
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET)
    warden_alive = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        _leave_with(lambda: _be_reaper(work, pipes=pipes, warden_alive=warden_alive), pipes=pipes)
    os.close(pipes.orders_r)
    os.close(pipes.errors_w)
    return _status_of(os.waitpid(pid, 0)[1])


def _be_reaper(work: Callable[[], int], *, pipes: _Pipes, warden_alive: int) -> int:
    _die_with_parent()
    _make_private_mounts()
    pid = os.fork()
    if pid == 0:
        os.close(pipes.orders_r)
        os.close(warden_alive)
        _leave_with(lambda: _be_worker(work), pipes=pipes)
    worker_alive = os.pidfd_open(pid)
    lines = [worker_alive, pipes.orders_r, warden_alive]
    while True:
        ready = _readable(lines, timeout_ms=1_000)
        if worker_alive in ready:
            return _status_of(os.waitpid(pid, 0)[1])
        if warden_alive in ready:
            return CRASHED_STATUS
        if pipes.orders_r in ready:
            order = os.read(pipes.orders_r, 1)
            if not order:
                return CRASHED_STATUS  # the caller died; so does the run
            os.kill(pid, order[0])
        _reap_orphans(pid)


def _be_worker(work: Callable[[], int]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TMPDIR"] = tempfile.tempdir = str(SCRATCH_DIR)
    return work()


def _leave_with(role: Callable[[], int], *, pipes: _Pipes) -> NoReturn:
    """Run a role to its end in a forked process; never return into the caller's stack."""
    status = CRASHED_STATUS
    try:
        status = role()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KuraShaperError as error:
        status = error.exit_code
        _report(error, pipes=pipes)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _report(error: KuraShaperError, *, pipes: _Pipes) -> None:
    # JSON spells a character with at most twelve bytes, so the record is never cut.
    message, remedy = error.message[: _MAX_ERROR_BYTES // 16], error.remedy[: _MAX_ERROR_BYTES // 16]
    record = {"exit_code": error.exit_code, "message": message, "remedy": remedy}
    with contextlib.suppress(OSError):
        os.write(pipes.errors_w, json.dumps(record).encode())


def _error_from(report: bytes) -> KuraShaperError:
    record = json.loads(report)
    kind = _ERRORS_BY_EXIT_CODE.get(record["exit_code"], RefusedError)
    return kind(record["message"], remedy=record["remedy"])


def _make_private_mounts() -> None:
    """Give this mount namespace its own /proc and its own /run over the machine's entries.

    A tmpfs lies over /run, since /run/netns may not exist and a directory made on the
    machine would outlive the run. What the machine has in /run stays visible in its place.
    """
    _mount(None, "/", flags=_MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", kind="proc", flags=_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    run = Path("/run")
    machine = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(run) as entries:
            found = [entry for entry in entries if entry.path not in (str(NETNS_DIR), str(SCRATCH_DIR))]
        _mount("tmpfs", str(run), kind="tmpfs", flags=_MS_NOSUID | _MS_NODEV, options="mode=755")
        for entry in found:
            with contextlib.suppress(OSError):  # it went away between the listing and here
                _keep_visible(entry, f"/proc/self/fd/{machine}/{entry.name}")
    finally:
        os.close(machine)
    NETNS_DIR.mkdir()
    SCRATCH_DIR.mkdir()


def _keep_visible(entry: os.DirEntry[str], source: str) -> None:
    target = Path(entry.path)
    if entry.is_symlink():
        target.symlink_to(Path(source).readlink())
    elif entry.is_dir(follow_symlinks=False):
        target.mkdir()
        _mount(source, entry.path, flags=_MS_BIND | _MS_REC)
    else:
        target.touch()
        _mount(source, entry.path, flags=_MS_BIND)


def _mount(source: str | None, target: str, *, kind: str | None = None, flags: int, options: str = "") -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, flags, os.fsencode(options))


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _call(name: str, *arguments: bytes | int | None) -> None:
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, name)(*values) == 0:
        return
    reason = os.strerror(ctypes.get_errno())
    remedy = "run it as root outside of sandboxes that filter system calls, or in a container with --privileged"
    raise RefusedError(f"{name}: {reason}", remedy=remedy)


def _readable(descriptors: list[int], *, timeout_ms: int) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _events in poll.poll(timeout_ms)}


def _reap_orphans(worker_pid: int) -> None:
    """Wait for what was left to pid 1, but never for the worker, whose status is wanted."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == worker_pid:
            return
        os.waitpid(ended.si_pid, 0)


def _read_to_end(descriptor: int) -> bytes:
    """Read the errors; the end comes when the last process of the run is gone."""
    return b"".join(iter(lambda: os.read(descriptor, _MAX_ERROR_BYTES), b""))


def _status_of(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code
