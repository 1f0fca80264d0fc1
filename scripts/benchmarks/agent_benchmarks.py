"""What an agent costs a node while nothing happens, and for how long one step of a look holds up its loop."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import yaml
from gateway_benchmarks import document_of, yaml_of
from kernel_benchmarks import fresh_nic, require_privilege
from measurement import Measurement, SkippedError, progress, require
from pyroute2 import IPRoute

from kura_shaper.agent.loop import Agent
from kura_shaper.agent.settings import AgentSettings
from kura_shaper.agent.source import FileSource
from kura_shaper.cli.agent import stay_responsive
from kura_shaper.clock import SystemClock
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.kernel.probe import probe
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kura_shaper.tenants.document import TenantsDocument

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


def step(tenants: int) -> Iterator[Measurement]:
    """Yield how long the loop's thread was kept from running at most, beside looks at that many tenants."""
    require_privilege()
    # What the command does first of all.
    stay_responsive()

    def run() -> tuple[float, float, float]:
        with fresh_nic() as device, tempfile.TemporaryDirectory() as name:
            return _longest_steps(Path(name), device.name, document_of(tenants))

    ours, peer, looks_s = in_new_namespace(run)
    note = f"4 looks in {looks_s:.1f} s: an install, a quiet one, a change, a repair"
    yield Measurement(f"agent-step-{tenants}", ours, peer, "yaml.load of the same document", "ms", note)


def _longest_steps(directory: Path, device: str, document: TenantsDocument) -> tuple[float, float, float]:
    path, clock = directory / "tenants.yaml", SystemClock()
    path.write_text(yaml_of(document))
    settings = AgentSettings(
        file=path,
        devices=(device,),
        budget=Rate.parse("10G"),
        shape=ShapeChoice.SINGLE,
        state_dir=directory,
        node_file=directory / "off",
    )
    agent = Agent(settings, FileSource(path, None, clock=clock), probe(), clock=clock)
    with ExitStack() as stack:
        stack.callback(agent._close_devices)  # noqa: SLF001 - a look without its loop
        began = time.monotonic()
        with _Pauses() as pauses:
            agent._look()  # noqa: SLF001
            agent._look()  # noqa: SLF001
            tenants = (replace(document.tenants[0], ceiling=Rate.parse("777M")), *document.tenants[1:])
            path.write_text(yaml_of(replace(document, tenants=tenants)))
            agent._look()  # noqa: SLF001
            subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)
            agent._look()  # noqa: SLF001
        looks_s = time.monotonic() - began
        with _Pauses() as beside_peer:
            yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return pauses.longest_ms, beside_peer.longest_ms, looks_s


class _Pauses:
    """A thread that wants to run every millisecond, as the loop may, and by how much it came too late at most."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._end.wait(0.001):
            now = time.monotonic()
            self.longest_ms, last = max(self.longest_ms, (now - last) * 1_000 - 1), now


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    "agent-idle": lambda: idle(1_000),
    "agent-step-5000": lambda: step(5_000),
}
