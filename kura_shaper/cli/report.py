"""What the commands that measure for a while share: a bar on the terminal, and the file of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self


class PointProgress:
    """Which point is being measured: a bar on a terminal, nothing elsewhere. A context manager."""

    def __init__(self, points: int, *, width: int = 28) -> None:
        console = Console(stderr=True)
        what, count = TextColumn(f"{{task.description:<{width}}}"), TextColumn("{task.completed}/{task.total}")
        columns = (what, BarColumn(), count, TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("setting up", total=points)
        self._started = False

    def tell(self, text: str) -> None:
        """Say what is measured now."""
        self._progress.update(self._task, description=text, advance=1 if self._started else 0)
        self._started = True

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class WaitProgress:
    """How much of a while is over: a bar on a terminal, nothing elsewhere. A context manager."""

    def __init__(self, duration_ms: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=max(1, duration_ms))

    def tell(self, text: str, passed_ms: int) -> None:
        """Say what is done now, and how much of the while is over."""
        self._progress.update(self._task, description=text, completed=passed_ms)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def open_page(path: Path, option: str = "--html") -> TextIO:
    """Return the report's file, made now: what can't be written must not be found out after a minute of measuring.

    Raises UsageError that names the option.
    """
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {str(path)!r} can't be written: {error.strerror}") from error


def open_archive(path: Path, option: str) -> BinaryIO:
    """Return a file for bytes, as `open_page`. Raises UsageError that names the option."""
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(f"{option} {str(path)!r} can't be written: {error.strerror}") from error
