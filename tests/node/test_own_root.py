"""A machine of its own for a test: of whatever it had, nothing stays, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path += [str(Path(__file__).parents[1] / each) for each in ("kube", "manifests")]

from manifest_tools import ROOT
from node_rig import node_prefix, until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.privileged

SCRIPT = ROOT / "scripts" / "kubernetes" / "own-root"
# What a node does: processes that nobody waits for, in groups of their own, and mounts.
COMMAND = """
mkdir /sys/fs/cgroup/memory/pods /sys/fs/cgroup/memory/pods/one
sleep 1000 &
echo $! >/sys/fs/cgroup/memory/pods/one/cgroup.procs
mkdir /mnt/disk && mount -t tmpfs disk /mnt/disk && touch /written
echo done
read -r line
exit 7
"""


def close_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()


def left_behind(process: subprocess.Popen[str], work: Path) -> list[str]:
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/kura-shaper-{process.pid}")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(work) in line]
    return [*groups, *mounts, *([str(work)] if work.exists() else ())]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (close_input, 7),
        (lambda process: process.send_signal(signal.SIGTERM), 143),
        (lambda process: process.send_signal(signal.SIGINT), 130),
    ],
    ids=["its input ends", "SIGTERM", "SIGINT"],
)
def test_nothing_stays(tmp_path: Path, end: Callable[[subprocess.Popen[str]], None], status: int) -> None:
    work, pipe = tmp_path / "work", subprocess.PIPE
    # Whoever runs the tests in the background may have them ignore an interrupt, and their children too.
    heeding = ("env", "--default-signal=INT")
    words = (*heeding, SCRIPT, "--net", node_prefix() / "root", work, "--", "sh", "-c", COMMAND)
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "done\n"
        assert (work / "upper" / "written").exists()
        assert not Path("/written").exists()
        assert len(left_behind(process, work)) > 1
        end(process)
        assert process.wait(20) == status
        assert not Path(f"/proc/{pid}").exists()
        assert left_behind(process, work) == []


def test_killed_outright_its_processes_end_and_the_next_removes_its_groups(tmp_path: Path) -> None:
    work, pipe = tmp_path / "work", subprocess.PIPE
    words = (SCRIPT, node_prefix() / "root", work, "--")
    with subprocess.Popen((*words, "sh", "-c", COMMAND), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "done\n"
        process.kill()
        process.wait(20)
        until(lambda: not Path(f"/proc/{pid}").exists(), within_s=20)
    subprocess.run((*words, "true"), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert left_behind(process, work) == []
