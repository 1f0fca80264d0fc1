"""The demo of the broker, as a person runs it: it holds, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.privileged, pytest.mark.slow]


def test_the_demo_holds_also_without_a_real_api_server_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(Path("/run/netns").iterdir()) if Path("/run/netns").exists() else set()
    line = [sys.executable, str(ROOT / "scripts" / "broker_demo"), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KURA_SHAPER_CACHE": str(tmp_path / "empty")}
    done = subprocess.run(line, check=False, capture_output=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert said["verdict"] == "pass"
    assert said["metadata"].startswith("a stand-in")
    assert (set(Path("/run/netns").iterdir()) if Path("/run/netns").exists() else set()) == before
    processes = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    assert "ks-demo" not in processes
