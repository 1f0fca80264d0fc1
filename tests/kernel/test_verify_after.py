"""`verify --after`: each part is really restarted in the middle of the command, and what that broke is found."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import textwrap
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_agent import AgentProcess, Files
from verify_rig import TENANTS, VerifyRig, gateway

from kura_shaper.haproxy.binary import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Cli, Ended, Network

    from kura_shaper.tree.build import Capabilities

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BUDGET = "100M"
RESTART_AGENT = """
import http.client, os, signal, subprocess, sys, time
pid, pid_file, *command = sys.argv[1:]
os.kill(int(pid), signal.SIGKILL)
made = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
open(pid_file, "w").write(str(made.pid))
while True:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 9469, timeout=5)
        connection.request("GET", "/readyz")
        if connection.getresponse().status == 200:
            break
    except OSError:
        pass
    time.sleep(0.05)
"""
# What a CNI's agent is to `verify`: a process of that name. `meddle` is what it does to the device as it starts.
RESTART_CNI = """
import os, signal, subprocess, sys
pid, pid_file, program, meddle = sys.argv[1:]
os.kill(int(pid), signal.SIGKILL)
made = subprocess.Popen([program, "600"], start_new_session=True)
open(pid_file, "w").write(str(made.pid))
if meddle:
    subprocess.run(["tc", *meddle.split()], check=True)
"""


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def files(tmp_path: Path, tenants: Path) -> Files:
    """What an agent of the test reads: the same document."""
    assert tenants.name == Files(tmp_path).tenants.name
    return Files(tmp_path)


@contextmanager
def ended_by_its_file(pid_file: Path) -> Iterator[None]:
    """End whatever process a restart left there."""
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)


def restarting(program: str, *arguments: object) -> str:
    return shlex.join([sys.executable, "-c", program, *map(str, arguments)])


def verify_after(cli: Cli, tenants: Path, part: str, command: str) -> Ended:
    fixed = ("--tenants", str(tenants), "--device", "nic0", "--budget", BUDGET, "--static", "--json")
    return cli("verify", *fixed, "--after", part, "--restart", command, "--within", "30")


def seen(ended: Ended) -> tuple[dict[str, Any], str]:
    """Return the report, and what it says of the restart."""
    report = json.loads(ended.stdout)
    (restart,) = [check for check in report["checks"] if check["name"] == "restart"]
    return report, restart["seen"]


def test_an_agent_that_is_killed_and_comes_back_left_the_tree_as_it_was(
    network: Network, cli: Cli, tenants: Path, files: Files, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    with gateway(), ended_by_its_file(pid_file), AgentProcess(files, budget=BUDGET) as agent:
        agent.ready()
        options = ("--state-dir", files.directory / "state", "--node-file", files.marker, "--devices", "nic0")
        command = (sys.executable, "-m", "kura_shaper", "agent", "--file", tenants, "--budget", BUDGET)
        restart = restarting(RESTART_AGENT, agent.pid, pid_file, *command, "--shape", "single", *options)
        ended = verify_after(cli, tenants, "agent", restart)
        report, words = seen(ended)
        assert (ended.status, report["findings"]) == (0, []), ended.stdout
        assert report["before"] == {"part": "agent", "verdict": "pass", "findings": []}
        assert words.startswith("the same tree")


@pytest.mark.parametrize(
    ("meddle", "codes"),
    [("", []), ("qdisc replace dev nic0 root handle 9: pfifo", ["tree-foreign"])],
    ids=["leaves-it", "takes-the-root"],
)
def test_a_cni_that_comes_back_may_take_the_root_along(
    network: Network,
    capabilities: Capabilities,
    cli: Cli,
    tenants: Path,
    tmp_path: Path,
    meddle: str,
    codes: list[str],
) -> None:
    program = tmp_path / "cilium-agent"
    program.symlink_to("/usr/bin/sleep")
    pid_file = tmp_path / "pid"
    VerifyRig(network, capabilities).shape()
    with gateway(), ended_by_its_file(pid_file), subprocess.Popen([program, "600"]) as cni:
        restart = restarting(RESTART_CNI, cni.pid, pid_file, program, meddle)
        ended = verify_after(cli, tenants, "cilium", restart)
        report, _ = seen(ended)
        assert ended.status == bool(codes), ended.stdout
        assert set(codes) <= {finding["code"] for finding in report["findings"]}
        assert bool(codes) is bool(report["findings"])
        assert report["before"]["verdict"] == "pass"


def test_a_part_that_does_not_run_and_a_command_that_fails_are_said(
    network: Network, capabilities: Capabilities, cli: Cli, tenants: Path
) -> None:
    VerifyRig(network, capabilities).shape()
    with gateway():
        ended = verify_after(cli, tenants, "agent", "true")
        assert (ended.status, "no agent runs" in ended.stderr) == (2, True)
        ended = verify_after(cli, tenants, "gateway", "false")
        assert (ended.status, "--restart: 'false' ended with 1" in ended.stderr) == (3, True)


# A node that is started anew: a kernel of its own, twice.

BOOT = """
set -eu
cd {root}
ip link add nic0 numtxqueues 1 type veth peer name up0
ip link set nic0 up; ip link set up0 up
mkdir -p /dev/shm/state
cp {kept}/* /dev/shm/state/ 2>/dev/null || true
run="{python} -m kura_shaper"
$run agent --file {tenants} --devices nic0 --budget 100M --shape single --state-dir /dev/shm/state \\
  --node-file /dev/shm/state/disabled >/dev/shm/agent.log 2>&1 &
for _ in $(seq 300); do
  curl -sf http://127.0.0.1:9469/readyz >/dev/null && break
  sleep 0.2
done
# Without a gateway the ports are closed, which is known here.
set +e
$run verify --tenants {tenants} --device nic0 --budget 100M --shape single --static --json \\
  --accept gateway-port-closed --after node --baseline /dev/shm/state/baseline.json >/dev/shm/state/report.json
echo "verify ended with $?"
curl -s http://127.0.0.1:9469/metrics | grep '^kura_shaper_installs_total'
kill %1; wait
rm -f /dev/shm/state/.lock*
echo "<<<"; tar -C /dev/shm/state -cf - . | base64 -w 76; echo ">>>"
"""


def boot(tenants: Path, kept: Path) -> tuple[str, dict[str, bytes]]:
    """Run a node from its start to its end; return what it printed, and the files that its disk keeps."""
    prefix = cache_directory() / "uml-trixie"
    if not (prefix / "linux").exists():
        pytest.skip(f"no kernel at {prefix}; scripts/setup brings it")
    script = textwrap.dedent(BOOT).format(root=ROOT, kept=kept, python=sys.executable, tenants=tenants)
    done = subprocess.run(
        [ROOT / "scripts/kernels/run-guest", prefix, "240", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    printed = done.stdout.replace("\r", "")
    packed = re.search(r"<<<\n(.*?)\n>>>", printed, re.DOTALL)
    assert packed, (printed[-3000:], done.stderr)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed[1]))) as archive:
        for member in archive.getmembers():
            if member.isfile():
                content = archive.extractfile(member)
                assert content is not None
                found[Path(member.name).name] = content.read()
    return printed[: packed.start()], found


def test_a_node_that_is_started_anew_has_its_tree_again_and_the_baseline_of_before_says_so(
    tmp_path: Path, tenants: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    printed, files = boot(tenants, kept)
    assert "verify ended with 0" in printed, printed
    assert json.loads(files["report.json"])["verdict"] == "pass"
    for name, content in files.items():
        (kept / name).write_bytes(content)
    printed, files = boot(tenants, kept)
    assert "verify ended with 0" in printed, (printed, files.get("report.json"))
    # The journal of the boot before is no tree: this one was made from nothing.
    assert re.search(r"installs_total\{[^}]*\} 1\.0", printed)
    report = json.loads(files["report.json"])
    (restart,) = [check for check in report["checks"] if check["name"] == "restart"]
    assert "the node was started anew" in restart["seen"]
    assert report["facts"]["boot"] != json.loads(files["baseline.json"])["facts"]["boot"]
