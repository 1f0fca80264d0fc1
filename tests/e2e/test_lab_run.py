"""The lab as a stranger runs it: the failure of today shown, then closed, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.binary import find_haproxy

LAB_RUN = [sys.executable, "-m", "kura_shaper", "lab", "run"]


def haproxy_is_missing() -> str:
    """Why there is no gateway to run; empty when there is one."""
    try:
        find_haproxy()
    except KuraShaperError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.privileged,
    pytest.mark.traffic,
    pytest.mark.skipif(bool(haproxy_is_missing()), reason=haproxy_is_missing() or "HAProxy is there"),
]


def processes_of_a_lab() -> list[str]:
    """Command lines of every process that a lab starts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "kura_shaper.lab." in words or "kura-shaper-lab/gateway" in words:
            found.append(words)
    return found


def wait_until(condition: object, *, timeout_s: float) -> None:
    """Wait for what no event tells: processes of another PID namespace."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if callable(condition) and condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "point_s"), [("single", 10), ("mq", 3)])
def test_the_bypass_is_shown_and_closed_over_seconds_on_every_path(tmp_path: Path, shape: str, point_s: int) -> None:
    page = tmp_path / "report.html"
    options = ["--json", f"--shape={shape}", f"--duration={point_s}", f"--html={page}"]
    done = subprocess.run([*LAB_RUN, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert shown["shape"] == shape
    ceiling = shown["ceiling_mbps"]
    for path in ("direct", "shaped", "shaped_http2", "peer"):
        assert sorted(shown["paths"][path]) == ["1", "4", "8"]
        for mbps in shown["paths"][path].values():
            assert 0.95 * ceiling <= mbps <= 1.01 * ceiling, path
    assert all(mbps > 1.5 * ceiling for mbps in shown["paths"]["bypass"].values())
    assert all(mbps > 1.5 * ceiling for mbps in shown["paths"]["local"].values())
    for tenant, floor in shown["floors"].items():
        assert floor["measured_mbps"] >= 0.95 * floor["floor_mbps"], tenant
    assert sum(floor["measured_mbps"] for floor in shown["floors"].values()) <= 1.01 * shown["budget_mbps"]
    assert shown["unattributed_bytes"] == 0
    assert shown["foreign"]["unattributed_bytes"] > 0
    assert shown["foreign"]["mbps"] <= 1.01 * shown["budget_mbps"]
    assert shown["verdict"] == "pass"
    assert "Foreign: bytes without a mark" in page.read_text()
    assert processes_of_a_lab() == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_off_leaves_no_process_namespace_or_file(how: signal.Signals, tmp_path: Path) -> None:
    before = {path.name for path in Path("/run/netns").glob("*")}
    child = subprocess.Popen(
        [*LAB_RUN, "--scenario=shaped", "--streams=1", "--duration=60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        wait_until(lambda: any("lab.traffic" in words for words in processes_of_a_lab()), timeout_s=30)
        child.send_signal(how)
        status = child.wait(timeout=30)
    finally:
        child.kill()
        child.communicate()
    assert status == (-9 if how is signal.SIGKILL else 128 + how)
    wait_until(lambda: not processes_of_a_lab(), timeout_s=10)
    assert {path.name for path in Path("/run/netns").glob("*")} == before
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_can_not_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LAB_RUN, f"--html={tmp_path}/no/such/place.html"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--html" in done.stderr


def test_without_privilege_the_lab_says_so_in_one_line() -> None:
    unprivileged = ["setpriv", "--bounding-set=-sys_admin,-net_admin"]
    done = subprocess.run([*unprivileged, *LAB_RUN], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "root" in done.stderr
