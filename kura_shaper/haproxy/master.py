"""The running gateway, as far as its master socket goes: one question, one answer.

Everything goes through HAProxy's master (`-W -S PATH`), commands for the worker too: the
master always knows which worker is the current one, while a worker's own socket may for
a moment after a reload still be answered by the old one.

Sources: HAProxy management guide, sections 9.3 (runtime commands) and 9.4 (master CLI).
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kura_shaper.errors import RefusedError, StateUnknownError

if TYPE_CHECKING:
    from pathlib import PurePath

# A command and its payload have to fit into one buffer of HAProxy, which has 16384 bytes (tune.bufsize)
# of which some are reserved.
MAX_PAYLOAD_BYTES = 12_000
_ANSWER_S = 10.0
# A reload reads every file and opens every socket: 3 s for 3000 tenants.
_RELOAD_S = 120.0
_MAX_ANSWER_BYTES = 256 * 1024 * 1024

_PROCESS = re.compile(
    r"^(?P<pid>\d{1,10})\s+(?P<kind>master|worker)\s+\d+(?:\s+\[failed: \d+\])?"
    r"\s+(?P<d>\d{1,9})d(?P<h>\d{1,9})h(?P<m>\d{1,9})m(?P<s>\d{1,9})s",
    re.ASCII,
)
_SPEAKER = re.compile(r"(\[[A-Z]+\]) \(\d+\) :", re.ASCII)


class NotRunningError(RefusedError):
    """Nobody listens at the master socket: no gateway runs, or it was started without one."""

    code = "gateway_not_running"


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that serves. `age_s` is the time since it was started, which for the current one is the last reload."""

    pid: int
    age_s: int


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes of one gateway: the worker that takes new connections, and those that only finish theirs.

    `is_disowned` is true when the master calls the current one old.
    """

    current: Worker
    old: tuple[Worker, ...] = ()
    is_disowned: bool = False


class Master(Protocol):
    """Who answers commands: the real master, or in a test something that stands before it."""

    def ask(self, command: str, payload: str = "", *, timeout_s: float = _ANSWER_S) -> str:
        """Return the answer to a command of the master; `@1 ` ahead of it asks the current worker."""
        ...


class MasterSocket:
    """The master's socket in the file system."""

    def __init__(self, path: PurePath) -> None:
        self.path = path

    def ask(self, command: str, payload: str = "", *, timeout_s: float = _ANSWER_S) -> str:
        """Return the answer to one command.

        Raises NotRunningError when nobody listens, StateUnknownError when the answer does
        not come, or not whole, within the time for each part of it. ValueError for a command or
        payload that HAProxy would read as more than one.
        """
        if not (command.isascii() and command.isprintable()) or ";" in command or "\n\n" in payload or "\0" in payload:
            raise ValueError("a command is one line, and a payload has no empty line")
        text = f"{command} <<\n{payload.rstrip()}\n\n" if payload else f"{command}\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
                connection.settimeout(timeout_s)
                connection.connect(str(self.path))
                connection.sendall(text.encode("ascii"))
                # Otherwise the master waits for a further command and never ends its answer.
                connection.shutdown(socket.SHUT_WR)
                return _whole_answer(connection)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            remedy = f"start HAProxy with `-W -S {self.path}`, or name its socket with --master-socket"
            raise NotRunningError(f"no gateway answers at {self.path}", remedy=remedy) from error
        except OSError as error:
            words = f"{self.path} gave no answer to `{command.split(' <<')[0][:60]}`: {error}"
            raise StateUnknownError(words, remedy="see whether the gateway's master still runs") from error


def _whole_answer(connection: socket.socket) -> str:
    parts, size = [], 0
    while part := connection.recv(1 << 20):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise OSError("the answer has no end")
    return b"".join(parts).decode("utf-8", errors="backslashreplace")


def read_workers(master: Master) -> Workers:
    """Return the gateway's processes. Raises what `ask` raises, and StateUnknownError when no worker is current."""
    return parse_workers(master.ask("show proc"))


def parse_workers(text: str) -> Workers:
    """Return the processes in an answer to `show proc`. Raises StateUnknownError when no worker is current."""
    current, old, heading = None, [], ""
    for row in text.splitlines():
        if row.startswith("#"):
            heading = row
            continue
        match = _PROCESS.match(row)
        if match is None or match["kind"] != "worker":
            continue
        days, hours, minutes, seconds = (int(match[unit]) for unit in "dhms")
        worker = Worker(int(match["pid"]), ((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        if heading.startswith("# old"):
            old.append(worker)
        else:
            current = worker
    if current is None and old:
        # After a reload that failed, HAProxy 3.2 calls the worker old that serves on.
        current = min(old, key=lambda worker: worker.age_s)
        old.remove(current)
        return Workers(current, tuple(old), is_disowned=True)
    if current is None:
        raise StateUnknownError("the gateway's master has no worker", remedy="see its log: it may be starting")
    return Workers(current, tuple(old))


def reload(master: Master) -> str:
    """Let the master start a worker with the files on disk; return what HAProxy said.

    Raises ReloadFailedError, with HAProxy's words, when the new worker did not start: the old
    one serves on. StateUnknownError when HAProxy does not say how it ended.
    """
    answer = master.ask("reload", timeout_s=_RELOAD_S)
    head, _, words = answer.partition("--\n")
    if "Success=1" in head:
        return words
    if "Success=0" in head:
        raise ReloadFailedError(words.strip())
    said = " ".join(answer.split())[:200] or "nothing"
    raise StateUnknownError(f"the gateway's master answers `{said}` to a reload", remedy="see its log, and apply again")


class ReloadFailedError(RefusedError):
    """The new worker did not start. `output` is what HAProxy said; the old worker serves on.

    `where` is the place in the files that it complains of, when that is known.
    """

    code = "reload_failed"

    def __init__(self, output: str, *, where: str = "") -> None:
        rows = output.splitlines()
        # Without the process id: the same failure is told in the same words.
        words = _SPEAKER.sub(
            r"\1", " ".join(" ".join([row for row in rows if row.startswith("[ALERT]")] or rows).split())
        )
        super().__init__(
            f"HAProxy did not start with it: {where or words[:500]}",
            remedy="the files and the worker from before are in force",
        )
        self.output = output
