"""What clients notice of `render-haproxy --apply`: nothing, while it reloads, changes, is killed, or waits for DNS."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from apply_rig import ELSEWHERE, HTTP_PORTS, ApplyRig, apply_rig, wait_until
from gateway_rig import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.privileged


@pytest.fixture(params=VERSIONS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApplyRig]:
    with apply_rig(tmp_path, request.param) as made:
        yield made


class Stream:
    """Connects again and again, keeps one connection too, and counts what failed."""

    def __init__(self, rig: ApplyRig, host: str) -> None:
        self.done, self.failed = 0, list[str]()
        self._rig, self._host, self._ended = rig, host, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            answer = self._rig.get(self._host)
            self.done += 1
            if not answer.startswith("200"):
                self.failed.append(answer)

    def end(self) -> list[str]:
        self._ended.set()
        self._thread.join(timeout=10)
        return self.failed


@pytest.mark.slow
def test_no_connection_fails_during_reloads_and_changes(rig: ApplyRig) -> None:
    rig.listen(ELSEWHERE, "acme")
    streams = [Stream(rig, "acme.kura.test"), Stream(rig, "beta.kura.test")]
    with rig.connect("beta.kura.test") as download:
        download.sendall(b"GET /endless HTTP/1.1\r\nHost: beta.kura.test\r\n\r\n")
        for turn in range(20):
            backend = {"http": {"address": f"{rig.address}:{(4001, ELSEWHERE)[turn % 2]}"}}
            hosts = ["acme.kura.test", f"alias{turn}.kura.test"]
            ceiling = f"{100 + turn // 5}M"
            rig.write(rig.tenant("acme", hosts=hosts, backends=backend, ceiling=ceiling), rig.tenant("beta"))
            if turn % 4 == 0:
                rig.certify()
            done = rig.applied()
            assert done["outcome"] == "applied"
            assert download.recv(100_000)
    assert [stream.end() for stream in streams] == [[], []]
    assert all(stream.done > 20 for stream in streams)
    assert int(rig.master.ask("show proc").split("master")[1].split()[0]) == 4


@pytest.mark.slow
def test_an_apply_that_is_killed_anywhere_is_made_good_by_the_next(rig: ApplyRig) -> None:
    rig.listen(ELSEWHERE, "acme")
    stream = Stream(rig, "beta.kura.test")
    started = time.monotonic()
    rig.spawn("--apply", "--reload-interval-s", "0").wait(timeout=20)
    whole_s = time.monotonic() - started
    for turn in range(8):
        backend = {"http": {"address": f"{rig.address}:{(4001, ELSEWHERE)[turn % 2]}"}}
        rig.write(
            rig.tenant("acme", hosts=[f"a{turn}.kura.test"], backends=backend, ceiling=f"{100 + turn // 2}M"),
            rig.tenant("beta"),
        )
        process = rig.spawn("--apply", "--reload-interval-s", "0")
        # Most of its time it only starts.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=whole_s * (0.6 + 0.06 * turn))
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        assert rig.loads()
        rig.applied()
        assert rig.get(f"a{turn}.kura.test") == "200 acme"
        assert rig.applied()["outcome"] == "unchanged"
    assert stream.end() == []


@pytest.mark.slow
def test_two_applies_at_a_time_take_turns(rig: ApplyRig) -> None:
    rig.write(rig.tenant("acme"), rig.tenant("beta"), rig.tenant("gamma"))
    applies = [rig.spawn("--apply", "--json", "--reload-interval-s", "0") for _ in range(3)]
    ended = [process.communicate(timeout=60) for process in applies]
    assert [process.returncode for process in applies] == [0, 0, 0], ended
    assert sorted('"outcome": "applied"' in out for out, _ in ended) == [False, False, True]
    assert rig.get("gamma.kura.test") == "200 gamma"


class Resolver:
    """A DNS server that knows one address for every name, and takes its time."""

    def __init__(self, rig: ApplyRig, port: int) -> None:
        self.answers, self.delay_s = 0, 0.0
        self._address = socket.inet_aton(rig.address)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((rig.address, port))
        threading.Thread(target=self._serve, daemon=True).start()
        rig.stack.callback(self._socket.close)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                query, client = self._socket.recvfrom(4096)
                threading.Timer(self.delay_s, self._answer, (query, client)).start()

    def _answer(self, query: bytes, client: tuple[str, int]) -> None:
        end = query.index(b"\0", 12) + 5
        is_a = query[end - 4 : end - 2] == b"\0\1"
        head = query[:2] + b"\x84\0" + b"\0\1" + (b"\0\1" if is_a else b"\0\0") + b"\0\0\0\0"
        record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + self._address if is_a else b""
        with suppress(OSError):
            self._socket.sendto(head + query[12:end] + record, client)
            self.answers += 1


def test_a_reload_keeps_the_addresses_that_dns_gave(rig: ApplyRig) -> None:
    resolver = Resolver(rig, 5353)
    rig.options = ["--resolver", f"{rig.address}:5353"]

    def publish(turn: int) -> None:
        backend = {"http": {"dns": f"acme.svc.test:{HTTP_PORTS['acme']}"}}
        rig.write(rig.tenant("acme", backends=backend, ceiling=f"{100 + turn}M"), rig.tenant("beta"))

    publish(0)
    rig.applied()
    wait_until(lambda: rig.get("acme.kura.test") == "200 acme")
    resolver.delay_s = 0.4
    stream = Stream(rig, "acme.kura.test")
    for turn in (1, 2):
        publish(turn)
        assert rig.applied()["decision"] == "reload"
        assert not (rig.run_directory / "servers.state").exists()
    assert stream.end() == []
    # Without the state it would not be so: this shows that the test can fail.
    stream = Stream(rig, "acme.kura.test")
    publish(3)
    with mock.patch("kura_shaper.haproxy.apply._write_servers_state"):
        rig.applied()
    wait_until(lambda: rig.get("acme.kura.test") == "200 acme")
    assert {answer[:3] for answer in stream.end()} == {"503"}
