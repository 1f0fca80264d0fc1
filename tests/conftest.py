"""A node's network for tests that need the real kernel, and a child process to run things in.

`network` puts the test, its fixtures and every process that it starts into a network
namespace of its own: a node with the device `nic0`, four transmit queues, whose other end
`up0` is in a second namespace, the world. Neither namespace has a name. They are held by
this thread and one descriptor, so they and all in them vanish with this process, even
when it is killed; nothing has to be undone. Each worker of pytest-xdist is a process, so
tests run side by side.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import struct
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from pyroute2 import IPRoute

from kura_shaper.cli.main import run
from kura_shaper.clock import SystemClock
from kura_shaper.kernel import bpf
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import KernelRefusedError
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.netns import in_new_namespace, inside, open_namespace, own_namespace
from kura_shaper.kernel.probe import probe
from kura_shaper.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kura_shaper.tree.build import Capabilities
    from kura_shaper.tree.model import Device

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
_IFA_F_NODAD = 0x02
_TX_QUEUES = 4


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Leave the log as it was: a command configures it, and what it writes to is gone with its test."""
    logger = logging.getLogger("kura_shaper")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs privilege where there is none, with the reason."""
    privileged = [item for item in items if item.get_closest_marker("privileged")]
    reason = _why_unprivileged() if privileged else ""
    for item in privileged if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


# A kernel is what it is: what it lacks is tested on the stock kernel that scripts/kernel-test brings.
_EXPECTED_SKIP = re.compile(r"this kernel (has|lacks|can't)")
_unexpected_skips: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each skip that nobody would expect where everything was installed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        if not _EXPECTED_SKIP.search(reason):
            _unexpected_skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI everything is installed, so that a test that does not run is a failure."""
    if os.environ.get("KURA_SHAPER_FAIL_ON_SKIP") == "1" and _unexpected_skips:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which skips failed the run."""
    if os.environ.get("KURA_SHAPER_FAIL_ON_SKIP") == "1":
        for line in _unexpected_skips:
            terminalreporter.write_line(f"unexpected skip: {line}", red=True)


def _why_unprivileged() -> str:
    if os.geteuid() != 0:
        return "needs root"
    try:
        in_new_namespace(lambda: None)
    except KernelRefusedError as error:
        return f"needs network namespaces: {error.message}"
    return ""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one end of the wire."""

    v4: str
    v6: str


NODE = Addresses("10.70.0.1", "fd70::1")
WORLD = Addresses("10.70.0.2", "fd70::2")


@dataclass(slots=True)
class Network:
    """The node's namespace, which the test is in, and the world at the other end of `nic0`."""

    world_descriptor: int
    device: Device
    clients: list[TcClient] = field(default_factory=list)

    def in_world(self) -> AbstractContextManager[None]:
        """Be in the world: sockets that are made within stay there."""
        return inside(self.world_descriptor)

    def client(self) -> TcClient:
        """Return a netlink client that is closed with the test."""
        self.clients.append(TcClient())
        return self.clients[-1]

    def control(self) -> KernelTrafficControl:
        """Return the kernel's traffic control of `nic0`."""
        return KernelTrafficControl(self.client(), self.device, clock=SystemClock())

    def read(self) -> Snapshot:
        """Return what is on `nic0` now; the test fails when that is unknown."""
        with TcClient() as client:
            found = KernelTrafficControl(client, self.device, clock=SystemClock()).snapshot()
        assert isinstance(found, Snapshot), found
        return found

    def sent_bytes(self) -> int:
        """Return what `nic0` has sent, by its own counter."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.device.name:
                return int(counters.split()[8])
        raise AssertionError(f"no {self.device.name} here")


@pytest.fixture
def network() -> Iterator[Network]:
    """Put the test into a node's network namespace."""
    with closing(in_new_namespace(open_namespace)) as world, own_namespace():
        _make_wire(world)
        with inside(world):
            _configure("up0", WORLD)
        _configure("nic0", NODE)
        made = Network(world, read_device("nic0"))
        yield made
        for client in made.clients:
            client.close()
        # What is pinned outlives the namespace.
        with suppress(KernelRefusedError):
            bpf.unsteer_tcx(made.device.ifindex)
            bpf.reap_pins()


def _make_wire(world: int) -> None:
    with IPRoute() as ip:
        peer = {"ifname": "up0", "net_ns_fd": world, "num_rx_queues": _TX_QUEUES}
        ip.link("add", ifname="nic0", kind="veth", num_tx_queues=_TX_QUEUES, peer=peer)


def _configure(name: str, addresses: Addresses) -> None:
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=name)
        ip.addr("add", index=index, address=addresses.v4, prefixlen=24)
        # Without NODAD the address can't be used for the first second.
        ip.addr("add", index=index, address=addresses.v6, prefixlen=64, flags=_IFA_F_NODAD)
        for each in (index, 1):
            ip.link("set", index=each, state="up")


@pytest.fixture(scope="session")
def capabilities() -> Capabilities:
    """Return what this kernel accepts."""
    return probe()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child process ended; a negative status is the signal that ended it."""

    status: int
    stdout: str
    stderr: str


def run_in_child(work: Callable[[], int | None]) -> Ended:
    """Run work in a forked process: it may lose its privileges or be killed, and nobody else minds."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            _be_child(work, out, err)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
        return Ended(status, *texts)


def _be_child(work: Callable[[], int | None], out: Any, err: Any) -> None:
    """Never returns. os._exit, since the parent's exit handlers and pytest itself live here too."""
    status = 70
    try:
        sys.stdout, sys.stderr = out, err
        status = work() or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 70 if error.code else 0
    except BaseException:
        traceback.print_exc(file=err)
    finally:
        out.flush()
        err.flush()
        os._exit(status)


@pytest.fixture
def in_child() -> Callable[[Callable[[], int | None]], Ended]:
    """Return what runs a piece of work in a forked process."""
    return run_in_child


@pytest.fixture
def drop_capabilities() -> Callable[[], None]:
    """Return what takes every capability from the process that calls it; it stays the owner of its files."""
    version_3 = struct.pack("=Ii", 0x20080522, 0)

    def drop() -> None:
        if ctypes.CDLL(None, use_errno=True).capset(version_3, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capset")

    return drop


def drop_sys_admin() -> None:
    """Take CAP_SYS_ADMIN from the process that calls it, and leave it the others (capset(2))."""
    libc, header, sets = ctypes.CDLL(None, use_errno=True), struct.pack("=Ii", 0x20080522, 0), bytearray(24)
    buffer = (ctypes.c_char * 24).from_buffer(sets)
    if libc.capget(header, buffer) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = [word & ~(1 << 21) if at < 3 else word for at, word in enumerate(struct.unpack("=6I", sets))]
    if libc.capset(header, struct.pack("=6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


class Cli:
    """The command `kura-shaper` in a process of its own, in the test's network namespace."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def __call__(self, *arguments: str, before: Callable[[], object] = lambda: None) -> Ended:
        """Run the command; `before` is called in its process first."""

        def work() -> None:
            before()
            sys.argv = ["kura-shaper", *arguments]
            os.environ["KURA_SHAPER_STATE_DIR"] = str(self.state)
            run()

        return run_in_child(work)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return the command with a state directory of its own."""
    # typer looks for it at the start of each command, and children inherit what is found here.
    with suppress(ImportError):
        importlib.import_module("pydantic")
    return Cli(tmp_path / "state")
