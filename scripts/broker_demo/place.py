"""Where the demo runs: three network namespaces in a line, of which only the middle one reaches both others.

    workers 10.70.1.2 ---- 10.70.1.1 brokers 10.70.2.1 ---- 10.70.2.2 router

The middle one does not forward. All of it is in namespaces of the run's own, which the kernel takes away with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kura_shaper.errors import StateUnknownError
from kura_shaper.lab.isolation import NETNS_DIR, inside

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKERS, BROKERS, ROUTER = "ks-demo-workers", "ks-demo-brokers", "ks-demo-router"
WORKERS_ADDRESS, ROUTER_ADDRESS = "10.70.1.2", "10.70.2.2"
_ROOT = Path(__file__).parents[2]
_LINKS = ((WORKERS, "10.70.1.2/24", "10.70.1.1/24"), (ROUTER, "10.70.2.2/24", "10.70.2.1/24"))


def make_place() -> None:
    """Make the namespaces and the wires between them. Raises StateUnknownError."""
    for name in (WORKERS, BROKERS, ROUTER):
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    for number, (name, far, near) in enumerate(_LINKS):
        ip("-n", BROKERS, "link", "add", f"b{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", BROKERS, "address", "add", near, "dev", f"b{number}")
        ip("-n", BROKERS, "link", "set", f"b{number}", "up")
        ip("-n", name, "address", "add", far, "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def ip(*words: str) -> None:
    """Run `ip`. Raises StateUnknownError when it fails."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise StateUnknownError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def route_from_router_to_workers() -> str:
    """Return what the router's kernel says to a worker's address."""
    line = ["ip", "-n", ROUTER, "route", "get", WORKERS_ADDRESS]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip().removeprefix("RTNETLINK answers: ")


@dataclass(slots=True)
class Program:
    """A program of the run, in one of the namespaces."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def words(self) -> str:
        """The last that it said to nobody."""
        return self.log.read_text(errors="replace")[-600:].strip()

    def line(self) -> dict[str, Any]:
        """Return its next line of JSON. Raises StateUnknownError when it ends first."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            raise StateUnknownError(f"{self.name} ended", remedy=self.words)
        value: dict[str, Any] = json.loads(found)
        return value


@dataclass(slots=True)
class Run:
    """The programs of a run, which end with it."""

    scratch: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, name: str, namespace: str, line: Sequence[str], *, output: IO[bytes] | None = None) -> Program:
        """Start a program; its log is in a file, its output for us where no other place is named."""
        log = self.scratch / f"{name}.log"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT), "HOME": str(self.scratch)}
        with inside(NETNS_DIR / namespace), log.open("ab") as errors:
            made = subprocess.Popen(
                [sys.executable, *line],
                stdin=subprocess.PIPE,
                stdout=output or subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
        self.stack.callback(_end, made)
        return Program(name, made, log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def status_of_router(port: int) -> dict[str, Any]:
    """Return the router's status, {} while it has none."""
    url = f"http://127.0.0.1:{port}/statusz"
    with suppress(OSError), inside(NETNS_DIR / ROUTER), urllib.request.urlopen(url, timeout=2) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
    return {}
