"""`kura-shaper bench` on the real kernel: a whole object, and nothing left behind however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from conftest import Cli

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

COMMAND = [sys.executable, "-m", "kura_shaper", "bench", "--rate=200M"]
SENDER = b"kura_shaper.bench.load"


def senders_of(pid: int) -> set[Path]:
    """Return the processes that send for a run, told by what they are given to do."""
    parent = f'"parent": {pid}'.encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if SENDER in line and parent in line:
            found.add(process)
    return found


def namespaces_of(processes: Iterable[Path]) -> set[str]:
    """Return the network namespaces that processes are in."""
    found = set()
    for process in processes:
        for link in process.glob("task/[0-9]*/ns/net"):
            try:
                found.add(str(link.readlink()))
            except OSError:
                continue
    return found


def left_here() -> tuple[str, set[str]]:
    """Return this namespace's devices with their qdiscs, and the namespaces that have a name."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return links, {path.name for path in Path("/run/netns").glob("*")}


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def test_a_short_run_is_one_whole_object_and_leaves_nothing() -> None:
    before = left_here()
    given = ["--shapes=single,mq", "--packet-bytes=1514,65536", "--duration=1", "--tenants=4", "--json"]
    with subprocess.Popen([*COMMAND, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        out, err = child.communicate(timeout=120)
    assert (child.returncode, err) == (0, "")
    assert not senders_of(child.pid)
    assert left_here() == before
    found = json.loads(out)
    assert found["rate_mbps"] == 200.0
    assert found["answer"] in ("not-bound", "close-at-mtu", "open-at-mtu", "bound-at-mtu", "bound", "unknown")
    assert found["words"]
    for shape in ("plain", "single"):
        assert found["shapes"][shape]["measured"], found["shapes"]
    assert {"default", "tc", "mq"} <= found["shapes"].keys()
    measured = {name for name, shape in found["shapes"].items() if shape["measured"]}
    assert {point["shape"] for point in found["points"]} == measured
    for point in found["points"]:
        assert point["packets_per_second"] > 0
        assert point["cpu_seconds_per_gbit"] > 0
        on_the_wire = point["mbps"] * 10**6 / 8 / point["packets_per_second"]
        assert on_the_wire == pytest.approx(point["wire_bytes_per_packet"], rel=0.01)
    held = {p["shape"]: p["accuracy"] for p in found["points"] if p["limit_mbps"]}
    assert held.keys() == measured - {"plain", "default"}
    # Busy processors make it less, nothing makes it more.
    assert all(0.5 < held[shape] < 1.03 for shape in held if shape != "tc"), held


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_cut_off_leaves_nothing(number: signal.Signals) -> None:
    before = left_here()
    # Whoever runs the tests in the background may have them ignore SIGINT, which children inherit.
    with subprocess.Popen(
        [*COMMAND, "--shapes=single"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert within(20, lambda: bool(senders_of(child.pid))), "it did not come to send"
        made = namespaces_of([*senders_of(child.pid), Path(f"/proc/{child.pid}")])
        child.send_signal(number)
        assert child.wait(10) == (-number if number is signal.SIGKILL else 128 + number)
    assert str(Path("/proc/self/ns/net").readlink()) not in made
    assert within(5, lambda: not senders_of(child.pid))
    assert not made & namespaces_of(Path("/proc").glob("[0-9]*"))
    assert left_here() == before


def test_without_privilege_it_is_one_line(cli: Cli, drop_capabilities: Callable[[], None]) -> None:
    ended = cli("bench", "--rate=3G", before=drop_capabilities)
    assert (ended.status, ended.stdout) == (3, "")
    assert ended.stderr.count("\n") == 1
    assert "run as root" in ended.stderr


def test_a_page_that_cannot_be_written_is_said_before_it_is_measured(cli: Cli, tmp_path: Path) -> None:
    ended = cli("bench", "--rate=3G", f"--html={tmp_path}/no/such/place.html")
    assert ended.status == 2
    assert "--html" in ended.stderr
