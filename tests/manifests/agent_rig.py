"""A real agent on a device of a network namespace that is gone with it, and what it answers."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

from kura_shaper.kernel.errors import KernelRefusedError
from kura_shaper.kernel.netns import in_new_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXAMPLE = Path(__file__).parents[2] / "haproxy" / "examples" / "tenants.yaml"
DEVICE, ADDRESS = "nic0", "127.0.0.1:9469"
_LINKS = f"""
link set lo up
link add {DEVICE} numtxqueues 4 type veth peer name up0 numrxqueues 4
link set {DEVICE} up
link set up0 up
addr add 10.70.0.1/24 dev {DEVICE}
"""
_PATIENCE_S = 30
T = TypeVar("T")


def ask(path: str) -> tuple[int, str]:
    """Ask the agent of this thread's network namespace; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{ADDRESS}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def with_agent(
    work: Callable[[], T],
    *,
    options: Sequence[str] = (),
    before: Sequence[Callable[[], object]] = (),
    as_whom: Sequence[str] = (),
) -> T:
    """Return work(), done in a namespace whose agent is ready or has nothing more to try.

    `before` makes what the agent finds, `as_whom` is what the agent is started through.
    """

    def inside() -> T:
        with ExitStack() as stack:
            subprocess.run(["ip", "-batch", "-"], input=_LINKS, text=True, check=True)
            for make in before:
                make()
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context(Path(directory, "log").open("w+"))
            fixed = ("--file", str(EXAMPLE), "--devices", DEVICE, "--budget", "3G", "--listen", ADDRESS)
            places = ("--state-dir", directory, "--node-file", f"{directory}/disabled")
            words = (*as_whom, sys.executable, "-m", "kura_shaper", "agent", *fixed, *places, *options)
            process = subprocess.Popen(words, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"})
            stack.callback(_end, process)
            end = time.monotonic() + _PATIENCE_S
            while ask("/readyz")[0] != 200:
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise AssertionError(f"not ready: {ask('/readyz')}\n{log.read()}")
                time.sleep(0.1)
            return work()

    try:
        return in_new_namespace(inside)
    except KernelRefusedError as error:
        pytest.skip(f"needs network namespaces: {error.message}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)


@functools.cache
def scraped() -> str:
    """Return a real agent's /metrics, with a shaper of somebody else's on the node, once samples were taken."""
    if os.geteuid() != 0:
        pytest.skip("needs root")

    def scrape() -> str:
        end = time.monotonic() + _PATIENCE_S
        while "class_window_max_bits_per_second{" not in (text := ask("/metrics")[1]):
            assert time.monotonic() < end, text
            time.sleep(0.1)
        return text

    def add_other_shaper() -> None:
        subprocess.run(
            ["ip", "link", "add", "kura-egress0", "type", "veth", "peer", "name", "kura-egress1"], check=True
        )

    return with_agent(scrape, before=(add_other_shaper,))
