"""break-glass.sh on a real device: it takes off what is ours, in order, proves it, and says by its exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from manifest_tools import DAEMONSET

from kura_shaper.agent.marker import read_marker
from kura_shaper.kernel import bpf
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.ebpf import steering_program
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.steer import is_ours_at_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Cli, Ended, Network

pytestmark = [pytest.mark.privileged, pytest.mark.case("F-36")]

SCRIPT = DAEMONSET / "break-glass.sh"
EXAMPLE = Path(__file__).parents[2] / "haproxy" / "examples" / "tenants.yaml"
GONE, LEFT, USAGE, REFUSED, UNKNOWN = 0, 1, 2, 3, 4


def tc(command: str) -> str:
    done = subprocess.run(["tc", *command.split()], capture_output=True, text=True, check=False)
    if "kind is unknown" in done.stderr:
        pytest.skip(f"this kernel lacks it: tc {command}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return what comes first in the script's PATH. A second is a moment there."""
    made = tmp_path / "bin"
    made.mkdir()
    _write_program(made / "sleep", "exec /bin/sleep 0.02")
    return made


def _write_program(path: Path, words: str) -> None:
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(0o755)


@pytest.fixture
def glass(state: Path, programs: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs the script as a debug pod would: from its standard input, without a terminal."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        path = f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        words = ["sh", "-s", "--", "--state-dir", str(state), *options]
        with SCRIPT.open() as script:
            return subprocess.run(
                words, stdin=script, capture_output=True, text=True, env={"PATH": path}, timeout=60, check=False
            )

    return run


@pytest.fixture
def apply(cli: Cli) -> Callable[[str], Ended]:
    def run(shape: str) -> Ended:
        done = cli("apply", "--tenants", str(EXAMPLE), "--device", "nic0", "--budget", "3G", "--shape", shape, "--json")
        if "no way of steering" in done.stdout + done.stderr:
            pytest.skip("this kernel can't steer to a queue")
        assert done.status == 0, done.stdout + done.stderr
        return done

    return run


@pytest.mark.case("F36")
@pytest.mark.parametrize("shape", ["single", "mq"])
def test_everything_of_ours_goes_and_an_agent_keeps_off(
    network: Network,
    glass: Callable[..., subprocess.CompletedProcess[str]],
    apply: Callable[[str], Ended],
    state: Path,
    shape: str,
) -> None:
    before = tc("qdisc show dev nic0")
    apply(shape)
    assert is_ours(network.read().root)
    assert glass("--check").returncode == LEFT
    assert is_ours(network.read().root), "a check changes nothing"
    assert read_marker(state / "disabled") is None
    done = glass("--reason", 'incident 4711, "nic0" \\ all')
    assert done.returncode == GONE, done.stdout + done.stderr
    assert [line for line in tc("qdisc show dev nic0").splitlines() if "clsact" not in line] == before.splitlines()
    found = network.read()
    assert not any(is_ours_at_hook(each) for each in found.filters)
    assert not any(program.is_ours for program in (found.tcx.programs if found.tcx else ()))
    marker = read_marker(state / "disabled")
    assert marker
    assert marker.reason == 'incident 4711, "nic0" \\ all'
    assert marker.who.startswith("break-glass.sh@")
    assert marker.at
    assert glass("--check").returncode == GONE
    assert glass().returncode == GONE, "again is no harm"


def test_the_marker_comes_first(glass: Callable[..., subprocess.CompletedProcess[str]], network: Network) -> None:
    """Without it an agent would put everything back, so nothing goes before it is there."""
    script = SCRIPT.read_text()
    assert script.index("write_marker ||") < script.index("for device in $roots; do remove_root")


def test_a_marker_that_cant_be_written_stops_it(
    network: Network,
    glass: Callable[..., subprocess.CompletedProcess[str]],
    apply: Callable[[str], Ended],
    tmp_path: Path,
) -> None:
    apply("single")
    (tmp_path / "file").touch()
    elsewhere = ("--state-dir", str(tmp_path / "file"))
    assert glass(*elsewhere).returncode == REFUSED
    assert is_ours(network.read().root)
    assert glass(*elsewhere, "--without-marker").returncode == GONE
    assert not is_ours(network.read().root)


def test_what_somebody_had_chosen_can_be_brought_back_afterwards(
    network: Network, glass: Callable[..., subprocess.CompletedProcess[str]], cli: Cli
) -> None:
    tc("qdisc replace dev nic0 root handle 5: pfifo limit 77")
    chosen = network.read().root
    done = cli(
        "apply", "--tenants", str(EXAMPLE), "--device", "nic0", "--budget", "3G", "--shape", "single", "--take-over"
    )
    assert done.status == 0, done.stderr
    assert glass().returncode == GONE
    assert network.read().root != chosen
    assert cli("uninstall", "--device", "nic0").status == 0
    assert network.read().root == chosen


def test_pinned_links_go(network: Network, glass: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ifindex = network.device.ifindex
    if not bpf.attached(ifindex).supported:
        pytest.skip("this kernel lacks tcx")
    program = steering_program(MarkLayout(), [443], placement={}, shaped_queues=1, live_queues=4)
    bpf.steer_by_tcx(program, ifindex)
    with network.in_world():
        elsewhere = socket.if_nametoindex("up0")
        bpf.steer_by_tcx(program, elsewhere)
    try:
        done = glass("--device", "nic0")
        assert done.returncode == GONE, done.stdout + done.stderr
        assert bpf.attached(ifindex).programs == ()
        with network.in_world():
            assert bpf.attached(elsewhere).programs, "it is of another network namespace"
    finally:
        with network.in_world():
            bpf.unsteer_tcx(elsewhere)


def test_what_is_somebody_elses_stays(network: Network, glass: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    tc("qdisc replace dev nic0 root handle 20: htb default 30")
    tc("qdisc add dev nic0 clsact")
    tc("filter add dev nic0 egress protocol ip pref 12 u32 match u32 0 0")
    before, filters = network.read(), tc("filter show dev nic0 egress")
    done = glass()
    assert done.returncode == GONE, done.stdout + done.stderr
    assert (network.read().root, tc("filter show dev nic0 egress")) == (before.root, filters)


def test_only_the_device_that_was_named(
    network: Network, glass: Callable[..., subprocess.CompletedProcess[str]], apply: Callable[[str], Ended]
) -> None:
    apply("single")
    assert glass("--device", "lo").returncode == GONE
    assert is_ours(network.read().root)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("case $2 in show) echo 'Cannot talk to rtnetlink' >&2; exit 1 ;; esac", UNKNOWN, "can't be read"),
        (
            "case $2 in del) echo 'Operation not permitted' >&2; exit 2 ;; esac",
            REFUSED,
            "still here: root qdisc on nic0",
        ),
        ("case $2 in del) exit 0 ;; esac", LEFT, "somebody puts it back: root qdisc on nic0"),
    ],
    ids=["unreadable", "refused", "comes back"],
)
def test_an_end_that_is_not_good_is_told_by_its_exit_code(
    network: Network,
    glass: Callable[..., subprocess.CompletedProcess[str]],
    apply: Callable[[str], Ended],
    programs: Path,
    words: str,
    code: int,
    said: str,
) -> None:
    apply("single")
    _write_program(programs / "tc", f'{words}\nexec /usr/sbin/tc "$@"')
    done = glass()
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert is_ours(network.read().root)


@pytest.mark.parametrize("options", [["--nonsense"], ["--device"], ["--device", "nothere0"]])
def test_usage(glass: Callable[..., subprocess.CompletedProcess[str]], options: list[str], network: Network) -> None:
    assert glass(*options).returncode == USAGE


def test_neither_python_nor_the_agent_is_asked() -> None:
    text = "\n".join(line.partition("#")[0] for line in SCRIPT.read_text().splitlines())
    assert "python" not in text.lower()
    assert "kura-shaper " not in text.replace("/kura-shaper", "")


def test_the_agent_reads_its_marker_as_its_own(
    glass: Callable[..., subprocess.CompletedProcess[str]], network: Network, state: Path
) -> None:
    """Case F-38."""
    assert glass("--reason", "x").returncode == GONE
    written = json.loads((state / "disabled").read_text())
    assert written.keys() == {"reason", "who", "at"}
    enable = [sys.executable, "-m", "kura_shaper", "enable", "--node-file", str(state / "disabled")]
    done = subprocess.run(enable, capture_output=True, text=True, check=True)
    assert "held off since" in done.stdout
