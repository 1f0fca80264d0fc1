"""Generations on disk: a directory for each configuration, and one link that says which is in force.

HAProxy reads several files; a reader that found the new configuration with the old maps
would route to the wrong place. So a generation is written whole, forced to disk, and
then `current` moves over to it in one rename.

    DIR/current -> generations/0123456789abcdef
    DIR/generations/0123456789abcdef/{haproxy.cfg,sni.map,...}

Every step goes by descriptors of directories already opened and follows no link, so that
somebody who may write in one of them can't turn a write elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.haproxy.generation import EMPTY, GatewayConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CURRENT = "current"
GENERATIONS = "generations"
KEPT_GENERATIONS = 5
_MAX_FILE_BYTES = 256 * 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Written(Enum):
    """What `write_generation` did."""

    UNCHANGED = "unchanged"
    SWITCHED = "switched"


def write_generation(config: GatewayConfig, directory: Path) -> Written:
    """Make the configuration the one in force under the directory; do nothing when it is already.

    Keeps the last five generations. Raises RefusedError when something that is not ours is
    in the way or the disk refuses: what was in force then still is.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _opened(directory) as top:
            fcntl.flock(top, fcntl.LOCK_EX)
            _refuse_foreign_link(top, directory)
            with suppress(FileExistsError):
                os.mkdir(GENERATIONS, 0o755, dir_fd=top)
            with _opened(GENERATIONS, within=top) as generations:
                return _write(config, top=top, generations=generations)
    except OSError as error:
        raise RefusedError(f"{directory}: generation {config.generation} was not written: {error}") from error


def read_generation(directory: Path) -> GatewayConfig:
    """Return the configuration in force under the directory, EMPTY when there is none yet.

    Raises StateUnknownError when there is something that can't be read.
    """
    try:
        with _opened(directory) as top:
            target = _target(top)
            if target is None:
                return EMPTY
            with _opened(GENERATIONS, within=top) as generations:
                return _read(generations, target)
    except FileNotFoundError:
        return EMPTY
    except OSError as error:
        raise StateUnknownError(f"{directory}: the generation in force can't be read: {error}") from error


def _write(config: GatewayConfig, *, top: int, generations: int) -> Written:
    name = config.generation
    intact = _is_intact(config, generations)
    if intact and _target(top) == name:
        return Written.UNCHANGED
    if intact:
        os.utime(name, dir_fd=generations, follow_symlinks=False)
    else:
        _write_directory(config, generations)
    link = _temporary(CURRENT)
    os.symlink(f"{GENERATIONS}/{name}", link, dir_fd=top)
    try:
        os.replace(link, CURRENT, src_dir_fd=top, dst_dir_fd=top)
    except OSError:
        os.unlink(link, dir_fd=top)
        raise
    os.fsync(top)
    _prune(generations, in_force=name)
    return Written.SWITCHED


def _write_directory(config: GatewayConfig, generations: int) -> None:
    temporary = _temporary(config.generation)
    os.mkdir(temporary, 0o755, dir_fd=generations)
    try:
        with _opened(temporary, within=generations) as directory:
            for name, content in config.files.items():
                _write_file(name, content, directory=directory)
            os.fsync(directory)
        # A damaged directory of this name makes room: nothing may be read from it any more.
        with suppress(FileNotFoundError):
            os.rename(config.generation, _temporary("damaged"), src_dir_fd=generations, dst_dir_fd=generations)
        os.rename(temporary, config.generation, src_dir_fd=generations, dst_dir_fd=generations)
        os.fsync(generations)
    except OSError:
        _remove(generations, temporary)
        raise


def _write_file(name: str, content: bytes, *, directory: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o644, dir_fd=directory), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _is_intact(config: GatewayConfig, generations: int) -> bool:
    try:
        return _read(generations, config.generation) == config
    except OSError:
        return False


def _read(generations: int, name: str) -> GatewayConfig:
    with _opened(name, within=generations) as directory:
        files = {file: _read_file(file, directory=directory) for file in _names(directory)}
    try:
        return GatewayConfig(files)
    except UsageError as error:
        raise OSError(f"generation {name} has a file that was not written here") from error


def _read_file(name: str, *, directory: int) -> bytes:
    # Without O_NONBLOCK a pipe left here would hold us for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise OSError(f"{name[:64]!r} is no plain file of a sane size")
        return file.read(_MAX_FILE_BYTES)


def _target(top: int) -> str | None:
    """Return the generation that `current` names, None when there is no such link of ours."""
    try:
        folder, _, name = os.readlink(CURRENT, dir_fd=top).partition("/")
    except FileNotFoundError:
        return None
    if folder != GENERATIONS or not name or "/" in name or name.startswith("."):
        raise OSError(f"{CURRENT} leads out of {GENERATIONS}")
    return name


def _refuse_foreign_link(top: int, directory: Path) -> None:
    try:
        _target(top)
    except OSError as error:
        message = f"{directory / CURRENT} was not made by this program"
        raise RefusedError(message, remedy="move it away, or write to another directory") from error


def _prune(generations: int, *, in_force: str) -> None:
    """Remove all but the newest generations, and what a write that was cut short left behind."""
    ages: list[tuple[int, str]] = []
    for name in _names(generations):
        if name.startswith("."):
            _remove(generations, name)
        elif name != in_force:
            ages.append((os.stat(name, dir_fd=generations, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(ages, reverse=True)[KEPT_GENERATIONS - 1 :]:
        _remove(generations, name)


def _remove(generations: int, name: str) -> None:
    """Remove a generation; what is no directory of plain files is left alone."""
    with suppress(OSError):
        with _opened(name, within=generations) as directory:
            for file in _names(directory):
                os.unlink(file, dir_fd=directory)
        os.rmdir(name, dir_fd=generations)


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _temporary(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


@contextmanager
def _opened(path: Path | str, *, within: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
