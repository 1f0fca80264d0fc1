"""A terminal for a command to run in: a pseudo-terminal, what it is sent, and the screen that comes of it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyte

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_WAIT_S = 30.0
_READ_BYTES = 1 << 16


class Terminal:
    """The screen of one command. `sent` has every byte that the command wrote to it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int, columns: int, rows: int) -> None:
        self.process = process
        self.sent = bytearray()
        self._descriptor = descriptor
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def text(self) -> str:
        """What is on the screen now."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._descriptor, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Make the terminal of another size, which the command is told."""
        self._screen.resize(rows, columns)
        _set_size(self._descriptor, columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def until(self, holds: Callable[[str], object]) -> str:
        """Take in what comes until something holds of the screen; return the screen."""
        deadline = time.monotonic() + _WAIT_S
        while not holds(self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"the screen did not become what was waited for:\n{self.text}"
            if not self._take(left):
                assert holds(self.text), f"the command ended with this on the screen:\n{self.text}"
        return self.text

    def ended(self) -> int:
        """Take in what comes until the command has ended; return its status."""
        while self._take(_WAIT_S):
            pass
        return self.process.wait(timeout=_WAIT_S)

    def _take(self, timeout_s: float) -> bool:
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except OSError:
            return False  # EIO: the other end is closed
        self.sent += data
        self._stream.feed(data)
        return bool(data)


@contextmanager
def terminal(command: Sequence[str], *, columns: int = 120, rows: int = 24, **environment: str) -> Iterator[Terminal]:
    """Run a command in a terminal of its own; it is gone at the end of the block."""
    ours, theirs = pty.openpty()
    _set_size(theirs, columns, rows)
    # Whoever runs the tests may have the size of its own terminal there, which is not this one's.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environ = {**inherited, "TERM": "xterm-256color", **environment}
    try:
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(process, ours, columns, rows)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
