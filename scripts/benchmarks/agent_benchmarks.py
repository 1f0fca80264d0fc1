"""What an agent costs a node while nothing happens, beside a loop that asks `tc` once a second."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from gateway_benchmarks import document_of, yaml_of
from kernel_benchmarks import fresh_nic, require_privilege
from measurement import Measurement, SkippedError, progress, require
from pyroute2 import IPRoute

from kura_shaper.kernel.netns import in_new_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PORT = 19_471
_READY_S, _IDLE_S = 60, 20
_TICKS = os.sysconf("SC_CLK_TCK")
_TC_LOOP = "while :; do tc -j -s class show dev {device} >/dev/null; sleep 1; done"


def idle(tenants: int) -> Iterator[Measurement]:
    """Yield the processor's share that an idle agent takes, in percent of one processor."""
    require_privilege()
    require("tc")

    def run() -> dict[str, float]:
        with IPRoute() as ip:
            ip.link("set", index=1, state="up")
        with fresh_nic() as device:
            return _measure(device.name, tenants)

    found = in_new_namespace(run)
    note = f"{found['rss_mb']:.0f} MB; counters are looked at ten times a second; a scrape: {found['scrape_ms']:.0f} ms"
    peer = "tc -j -s class show, once a second"
    yield Measurement("agent-idle", found["agent"], found["loop"], peer, "% CPU", note)


def _measure(device: str, tenants: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        (directory / "tenants.yaml").write_text(yaml_of(document_of(tenants)))
        agent = stack.enter_context(_running(*_agent(directory, device)))
        _until_ready(agent)
        share = _share(agent.pid)
        began = time.perf_counter()
        _get("/metrics")
        scrape_ms = (time.perf_counter() - began) * 1_000
        rss_mb = _status_kib(agent.pid, "VmRSS") / 1_024
        loop = stack.enter_context(_running("sh", "-c", _TC_LOOP.format(device=device)))
        return {"agent": share, "loop": _share(loop.pid), "rss_mb": rss_mb, "scrape_ms": scrape_ms}


def _agent(directory: Path, device: str) -> tuple[str, ...]:
    where = ("--state-dir", str(directory), "--node-file", str(directory / "off"), "--listen", f"127.0.0.1:{_PORT}")
    what = ("--file", str(directory / "tenants.yaml"), "--devices", device, "--budget", "10G", "--shape", "single")
    return (sys.executable, "-m", "kura_shaper", "agent", *what, *where)


@contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _until_ready(agent: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and agent.poll() is None:
        try:
            _get("/readyz")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SkippedError("the agent was not ready in time")


def _get(path: str) -> bytes:
    with urlopen(f"http://127.0.0.1:{_PORT}{path}", timeout=10) as answer:
        content: bytes = answer.read()
        return content


def _share(pid: int) -> float:
    """Return what a process and its children take while nothing happens, in percent of one processor."""
    progress(f"agent-idle: {_IDLE_S} s of nothing")
    before, began = _cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_S)
    return 100 * (_cpu_seconds(pid) - before) / (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # utime, stime, cutime, cstime (proc(5)), counted from the state.
    return sum(map(int, fields[11:15])) / _TICKS


def _status_kib(pid: int, key: str) -> float:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(float(row.split()[1]) for row in rows if row.startswith(f"{key}:"))


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {"agent-idle": lambda: idle(1_000)}
