"""A restart between two runs: of whom, whether somebody has to make it, and how it is seen to be over.

A part is its processes: for the gateway and the agent whoever listens on their ports, for the CNI whoever has its
name. It was restarted when some of those are gone and others are there, twice in a row, so that a part which
is only just coming up is not taken for one that is back.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.kernel.processes import read_holders, read_named
from kura_shaper.kernel.sockets import read_listeners

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kura_shaper.clock import Clock

CILIUM_PROCESS = "cilium-agent"
_LOOK_EVERY_NS = 500_000_000
_NS_PER_MS = 1_000_000
_STDERR_BYTES = 200

# Process ids with the moment of their start: no two processes of one boot have both.
Born = frozenset[tuple[int, int]]


class Part(StrEnum):
    """What is restarted."""

    GATEWAY = "gateway"
    CILIUM = "cilium"
    AGENT = "agent"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart to wait for, or with a command, to make. No shell is asked for the command."""

    part: Part
    command: tuple[str, ...] = ()
    within_ns: int = 600 * 1_000_000_000


def processes_of(part: Part, *, gateway_ports: Collection[int], agent_port: int) -> Born:
    """Return the processes that a part consists of now. Raises KernelRefusedError, StateUnknownError."""
    if part is Part.CILIUM:
        return frozenset((process.pid, process.started_ticks) for process in read_named(CILIUM_PROCESS))
    ports = gateway_ports if part is Part.GATEWAY else (agent_port,)
    inodes = frozenset(listener.inode for listener in read_listeners(ports))
    holders = read_holders(inodes).by_inode.values()
    return frozenset((process.pid, process.started_ticks) for some in holders for process in some)


def see_restart(
    restart: Restart,
    read: Callable[[], Born],
    *,
    clock: Clock,
    tell: Callable[[str, int], None] = lambda *_: None,
    make: Callable[[tuple[str, ...]], None] | None = None,
) -> None:
    """Make the restart if it has a command, and return when it is over.

    Raises UsageError when no such part runs here, RefusedError when the command fails, StateUnknownError when
    no restart is seen in time.
    """
    before = read()
    if not before:
        raise UsageError(f"no {restart.part} runs in this network namespace", remedy="run it where the part runs")
    if restart.command:
        tell(f"restarting the {restart.part}", 0)
        (make or run_command)(restart.command)
    began_ns, was_back = clock.now_ns(), False
    while True:
        now = read()
        is_back = bool(before - now and now - before)
        if is_back and was_back:
            return
        was_back = is_back
        waited_ns = clock.now_ns() - began_ns
        if waited_ns >= restart.within_ns:
            remedy = "give it more time by --within, or look whether it came back"
            raise StateUnknownError(
                f"the {restart.part} was not seen to be restarted within {restart.within_ns // 10**9} s", remedy=remedy
            )
        tell(f"waiting for the {restart.part} to be restarted", waited_ns // _NS_PER_MS)
        clock.wait_ns(_LOOK_EVERY_NS)


def run_command(command: tuple[str, ...]) -> None:
    """Run a command, whose output goes nowhere. Raises RefusedError when it can't be started or fails.

    What it leaves running may keep its output open: the end of the command alone is waited for.
    """
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(  # noqa: S603 - the operator's own command, by words and without a shell
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, check=False
            )
        except OSError as error:
            raise RefusedError(f"--restart: {command[0]!r} can't be run: {error.strerror}") from error
        if done.returncode:
            said.seek(0)
            words = " ".join(said.read(_STDERR_BYTES).decode(errors="replace").split())
            raise RefusedError(f"--restart: {command[0]!r} ended with {done.returncode}: {words}")
