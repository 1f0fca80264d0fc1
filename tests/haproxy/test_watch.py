"""`render-haproxy --watch` beside a real HAProxy: what it picks up, what it outlives, and what it tells."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from apply_rig import ApplyRig, apply_rig, wait_until
from gateway_rig import VERSIONS

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.privileged

_SERIES = re.compile(r"^kura_shaper_gateway_(\w+) (\S+)$", re.MULTILINE)


class Watched:
    """A watch in a process of its own."""

    def __init__(self, rig: ApplyRig, *more: str) -> None:
        self.rig = rig
        self._log = rig.directory / "watch.log"
        how = ["--reload-interval-s", "0", "--resync-s", "1", "--listen", f"{rig.address}:9470"]
        self.process: subprocess.Popen[str] = rig.spawn("--watch", *how, *more, log=self._log)
        wait_until(lambda: self.series("source_valid"), within_s=15, what="the watch to begin")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def series(self, name: str) -> float | None:
        """Return the value of a series of its metrics, None when it is not there."""
        with suppress(OSError), urllib.request.urlopen(f"http://{self.rig.address}:9470/metrics", timeout=5) as answer:
            values = dict(_SERIES.findall(answer.read().decode()))
            return float(values[name]) if name in values else None
        return None

    def serves(self, host: str, who: str) -> None:
        """Wait until a host is served, as soon as a change has to be picked up."""
        wait_until(lambda: self.rig.get(host) == who, within_s=20, what=f"{host} to be {who}")


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApplyRig]:
    with apply_rig(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def watched(rig: ApplyRig) -> Watched:
    return Watched(rig)


def alias(rig: ApplyRig, host: str) -> None:
    rig.write(rig.tenant("acme", hosts=["acme.kura.test", host]), rig.tenant("beta"))


def test_changes_are_picked_up_and_a_bad_document_changes_nothing(watched: Watched) -> None:
    rig = watched.rig
    alias(rig, "one.kura.test")
    watched.serves("one.kura.test", "200 acme")
    rig.tenants.write_text("kind: nonsense\n")
    wait_until(lambda: watched.series("source_valid") == 0)
    wait_until(lambda: watched.log.count("source_failed"))
    rig.certify()
    serial = rig.certify()
    # The certificate is another source, and what is in force is the last good document.
    wait_until(lambda: rig.serial("one.kura.test") == serial)
    alias(rig, "two.kura.test")
    watched.serves("two.kura.test", "200 acme")
    assert watched.series("source_valid") == 1
    assert rig.get("one.kura.test") == "refused"
    assert (watched.log.count("source_failed"), watched.log.count("source_recovered")) == (1, 1)


def test_a_document_that_is_mounted_and_swapped_by_links_is_picked_up(rig: ApplyRig) -> None:
    """As the kubelet does it: tenants.yaml -> ..data/tenants.yaml, ..data -> ..NUMBER, and a rename of ..data."""
    mount = rig.directory / "mount"
    mount.mkdir()

    def publish(turn: int) -> None:
        alias(rig, f"turn{turn}.kura.test")
        (mount / f"..{turn}").mkdir()
        (mount / f"..{turn}" / "tenants.yaml").write_bytes(rig.tenants.read_bytes())
        (mount / "..data_tmp").symlink_to(f"..{turn}")
        (mount / "..data_tmp").replace(mount / "..data")

    publish(1)
    (mount / "tenants.yaml").symlink_to("..data/tenants.yaml")
    # The last one counts.
    watched = Watched(rig, "--tenants", str(mount / "tenants.yaml"))
    watched.serves("turn1.kura.test", "200 acme")
    publish(2)
    watched.serves("turn2.kura.test", "200 acme")
    assert rig.get("turn1.kura.test") == "refused"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(watched: Watched, number: int) -> None:
    # The kernel gives a signal to any thread that takes it.
    assert len(list(Path(f"/proc/{watched.process.pid}/task").iterdir())) > 1
    watched.process.send_signal(number)
    assert watched.process.wait(timeout=5) == 0
    assert "Traceback" not in watched.log


def test_a_restart_of_haproxy_is_noticed_and_what_it_missed_made_good(watched: Watched) -> None:
    rig = watched.rig
    assert watched.series("up") == 1
    rig.stop()
    wait_until(lambda: watched.series("up") == 0)
    assert watched.series("old_workers") is None
    alias(rig, "late.kura.test")
    wait_until(lambda: "late.kura.test" in (rig.out / "current" / "sni.map").read_text())
    assert watched.series("in_step") == 0
    rig.start()
    watched.serves("late.kura.test", "200 acme")
    wait_until(lambda: watched.series("in_step"))
    assert watched.series("up") == 1
    assert (watched.log.count("gateway_waits"), watched.log.count("gateway_recovered")) == (1, 1)
    assert watched.process.poll() is None


def test_what_is_changed_by_hand_does_not_stay(watched: Watched) -> None:
    rig = watched.rig
    wait_until(lambda: watched.series("in_step"))
    rig.master.ask(f"@1 del map {rig.out}/current/sni.map acme.kura.test")
    watched.serves("acme.kura.test", "200 acme")


def test_old_workers_are_counted_for_as_long_as_they_serve(watched: Watched) -> None:
    rig = watched.rig
    wait_until(lambda: watched.series("in_step"))
    with rig.connect("acme.kura.test") as download:
        download.sendall(b"GET /endless HTTP/1.1\r\nHost: acme.kura.test\r\n\r\n")
        assert download.recv(10)
        rig.write(rig.tenant("acme", ceiling="80M"), rig.tenant("beta"))
        wait_until(lambda: watched.series("old_workers") == 1)
        assert download.recv(10)
    wait_until(lambda: watched.series("old_workers") == 0)


def test_a_reload_that_fails_is_tried_once_and_told_once(watched: Watched) -> None:
    rig = watched.rig
    with ExitStack() as stack:
        stack.enter_context(socket.create_server((rig.address, 8443)))
        rig.write(rig.tenant("acme"), rig.tenant("beta"), gateway={"https_ports": [443, 8443]})
        wait_until(lambda: watched.series("apply_failures_total") == 1)
        watched.serves("acme.kura.test", "200 acme")
        alias(rig, "next.kura.test")
        watched.serves("next.kura.test", "200 acme")
    assert watched.series("apply_failures_total") == 1
    wait_until(lambda: watched.log.count("apply_recovered"))
    assert (watched.log.count("apply_failed"), watched.log.count("apply_recovered")) == (1, 1)
    rig.write(rig.tenant("acme"), rig.tenant("beta"), gateway={"https_ports": [443, 8443]})
    wait_until(lambda: _connects(rig.address, 8443))


def _connects(address: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


def test_its_log_can_be_read_by_programs(rig: ApplyRig) -> None:
    rig.common = ["--log-format", "json"]
    log = rig.directory / "watch.log"
    rig.spawn("--watch", "--reload-interval-s", "0", log=log)
    alias(rig, "one.kura.test")
    wait_until(lambda: rig.get("one.kura.test") == "200 acme")
    wait_until(lambda: "gateway_applied" in log.read_text())
    (line,) = (json.loads(row) for row in log.read_text().splitlines())
    assert (line["event"], line["decision"]) == ("gateway_applied", "runtime")
    assert "map sni.map: 3 rows" in line["reasons"]
