"""The master's socket: one question, one whole answer, or an error that says which of the two went wrong."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.master import (
    MasterSocket,
    NotRunningError,
    ReloadFailedError,
    Worker,
    Workers,
    parse_workers,
    read_workers,
    reload,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# As HAProxy answered.
HEAD = "#<PID>          <type>          <reloads>       <uptime>        <version>      \n"
FRESH_3_0 = f"""{HEAD}25546           master          0 [failed: 0]   0d00h00m00s     3.0.11-1+deb13u5
# workers
25548           worker          0               0d00h00m00s     3.0.11-1+deb13u5
# programs

"""
RELOADED_3_0 = f"""{HEAD}25546           master          2 [failed: 1]   0d01h00m02s     3.0.11-1+deb13u5
# workers
25588           worker          1               0d00h59m01s     3.0.11-1+deb13u5
# old workers
25548           worker          2               1d01h00m02s     3.0.11-1+deb13u5
25547           worker          3               1d02h00m02s     3.0.11-1+deb13u5
# programs

"""
FRESH_3_2 = f"""{HEAD}25599           master          0 [failed: 0]   0d00h00m00s     3.2.26-1
# workers
25601           worker          0               0d00h00m00s     3.2.26-1

"""
FAILED_3_2 = f"""{HEAD}30865           master          1 [failed: 1]   0d00h00m03s     3.2.26-1
# workers
# old workers
30867           worker          2               0d00h00m03s     3.2.26-1
30866           worker          3               0d00h00m33s     3.2.26-1

"""


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        (FRESH_3_0, Workers(Worker(25548, 0))),
        (FRESH_3_2, Workers(Worker(25601, 0))),
        (RELOADED_3_0, Workers(Worker(25588, 3541), (Worker(25548, 90_002), Worker(25547, 93_602)))),
        (FAILED_3_2, Workers(Worker(30867, 3), (Worker(30866, 33),), is_disowned=True)),
    ],
)
def test_the_processes_are_read(text: str, workers: Workers) -> None:
    assert parse_workers(text) == workers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "Permission denied\n",
        "Unknown command: 'show proc'\n",
        HEAD + "1 master 0 [failed: 0] 0d00h00m00s 3.0\n# workers\n# programs\n",
        f"{'9' * 5000} worker 0 0d00h00m00s 3.0",
        f"9 worker 0 {'9' * 5000}d00h00m00s 3.0",
        "٣ worker 0 0d00h00m00s 3.0",
        "1 worker 0 0d00h00m 3.0",
        "\0" * 100,
    ],
)
def test_an_answer_without_a_worker_is_unknown(text: str) -> None:
    with pytest.raises(StateUnknownError):
        parse_workers(text)


@settings(deadline=None)
@given(st.text(alphabet="0123456789dhms# workerlastp\n[]:", max_size=200))
def test_no_answer_is_a_crash(text: str) -> None:
    with suppress(StateUnknownError):
        parse_workers(text)


@contextmanager
def answering(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[MasterSocket]:
    """Yield a master's socket; `answer` is called with its one connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield MasterSocket(path)
        thread.join(timeout=5)


def whole(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_a_question_and_its_payload_arrive_whole_and_so_does_the_answer(tmp_path: Path) -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        asked.append(whole(connection))
        for _ in range(100):
            connection.sendall(b"x" * 10_000)

    with answering(tmp_path / "s", answer) as master:
        assert master.ask("@1 add map @1 /m", "a b\nc d\n") == "x" * 1_000_000
    assert asked == [b"@1 add map @1 /m <<\na b\nc d\n\n"]


@pytest.mark.parametrize(
    ("command", "payload"),
    [
        ("show proc; reload", ""),
        ("show proc\nreload", ""),
        ("show proc\r", ""),
        ("show ssl cert /ü.pem", ""),
        ("add map /m", "a b\n\nreload\n"),
        ("add map /m", "a\0b"),
    ],
)
def test_what_would_be_read_as_more_than_one_is_not_sent(tmp_path: Path, command: str, payload: str) -> None:
    with pytest.raises(ValueError, match="one line"):
        MasterSocket(tmp_path / "nobody").ask(command, payload)


def test_nobody_there_is_told_from_nobody_answering(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError, match=r"no gateway answers at .*/absent"):
        MasterSocket(tmp_path / "absent").ask("show proc")
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "stale"))
    with pytest.raises(NotRunningError):
        MasterSocket(tmp_path / "stale").ask("show proc")
    for path in (tmp_path / ("x" * 200), tmp_path / "stale" / "below"):
        with pytest.raises(StateUnknownError):
            MasterSocket(path).ask("show proc")
    released = threading.Event()

    def wait(connection: socket.socket) -> None:
        released.wait(5)

    with answering(tmp_path / "s", wait) as master:
        with pytest.raises(StateUnknownError, match="gave no answer to `show proc`"):
            master.ask("show proc", timeout_s=0.1)
        released.set()


def test_a_part_of_an_answer_is_no_answer(tmp_path: Path) -> None:
    released = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(FRESH_3_0.encode())
        released.wait(5)

    with answering(tmp_path / "s", answer) as master:
        with pytest.raises(StateUnknownError):
            master.ask("show proc", timeout_s=0.1)
        released.set()


def test_an_answer_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kura_shaper.haproxy.master._MAX_ANSWER_BYTES", 100_000)

    def answer(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x" * 65_536)

    with answering(tmp_path / "s", answer) as master, pytest.raises(StateUnknownError, match="no end"):
        master.ask("show proc")


def test_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    with answering(tmp_path / "s", lambda c: c.sendall(b"\xff") if whole(c) else None) as master:
        assert master.ask("show proc") == "\\xff"


class Answers:
    """A master with one answer."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 0) -> str:
        return self.answer


def test_a_reload_that_went_well_returns_its_words() -> None:
    assert (
        reload(Answers("Success=1\n--\n[NOTICE]   (1) : Loading success.\n")) == "[NOTICE]   (1) : Loading success.\n"
    )


FAILED = """Success=0
--
[NOTICE]   (30865) : Initializing new worker (30999)
[ALERT]    ({pid}) : Binding [/g/haproxy.cfg:46] for frontend edge: cannot bind socket (Address already in use)
[ALERT]    ({pid}) : [haproxy.main()] Some protocols failed to start their listeners! Exiting.
"""


def test_a_reload_that_failed_is_told_by_its_alerts_and_each_time_in_the_same_words() -> None:
    said = []
    for pid in (1, 22):
        with pytest.raises(ReloadFailedError) as failed:
            reload(Answers(FAILED.format(pid=pid)))
        said.append(str(failed.value))
    assert said[0] == said[1]
    assert "cannot bind socket" in said[0]
    assert "Initializing" not in said[0]
    assert f"({22})" in failed.value.output
    with pytest.raises(ReloadFailedError, match="only words"):
        reload(Answers("Success=0\n--\nonly words\n"))


@pytest.mark.parametrize("answer", ["", "\n", "Permission denied\n", "Unknown command: 'reload'\n", "Suc"])
def test_a_reload_that_nobody_tells_the_end_of_is_unknown(answer: str) -> None:
    with pytest.raises(StateUnknownError, match=r"(nothing|Permission|Unknown|Suc)"):
        reload(Answers(answer))


def test_workers_are_asked_for() -> None:
    assert read_workers(Answers(FRESH_3_2)).current.pid == 25601
