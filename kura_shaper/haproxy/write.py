"""Generations on disk: a directory for each configuration, and one link that says which is in force.

HAProxy reads several files; a reader that found the new configuration with the old maps
would route to the wrong place. So a generation is written whole, forced to disk, and
then `current` moves over to it in one rename.

    DIR/current -> generations/0123456789abcdef
    DIR/generations/0123456789abcdef/{haproxy.cfg,sni.map,...}

DIR is the operator's own path and may be a link. Below it every step goes by descriptors of
directories already opened and follows no link, so that somebody who may write in one of
them can't turn a write elsewhere.

A generation is what its manifest lists. Whatever else lies in its directory, say an editor's
swap file, is nobody's: it is not read, and goes when the generation is pruned.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.haproxy.generation import EMPTY, MANIFEST_FILE, GatewayConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CURRENT = "current"
GENERATIONS = "generations"
KEPT_GENERATIONS = 5
_MAX_FILE_BYTES = 256 * 1024 * 1024
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_GENERATION = re.compile(r"[0-9a-f]{16}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9a-z]+\.[0-9a-f]+", re.ASCII)


class Written(Enum):
    """What `write_generation` did."""

    UNCHANGED = "unchanged"
    SWITCHED = "switched"


def write_generation(config: GatewayConfig, directory: Path, *, keep: frozenset[str] = frozenset()) -> Written:
    """Make the configuration the one in force under the directory; do nothing when it is already.

    Keeps the last five generations, and those whose names are in `keep`. Raises UsageError
    when the path is no directory, and RefusedError when something that is not ours is in
    the way or the disk refuses: what was in force then still is.
    """
    try:
        with suppress(FileExistsError, NotADirectoryError):
            directory.mkdir(parents=True, exist_ok=True)
        if not directory.is_dir():
            raise _no_directory(directory)
        with _top(directory) as top:
            fcntl.flock(top, fcntl.LOCK_EX)
            in_force = _target(top, directory)
            with suppress(FileExistsError):
                os.mkdir(GENERATIONS, 0o755, dir_fd=top)
            with _opened(GENERATIONS, within=top) as generations:
                return _write(config, top=top, generations=generations, in_force=in_force, keep=keep)
    except OSError as error:
        message = f"{directory}: generation {config.generation} was not written: {error}"
        raise RefusedError(message, remedy="put that right and try again; what was in force still is") from error


def read_generation(directory: Path) -> GatewayConfig:
    """Return the configuration in force under the directory, EMPTY when there is none yet.

    It has the files that the manifest lists; one that is missing is missing here too, so
    what is damaged differs from what was written. Raises UsageError when the path is no
    directory, RefusedError when `current` is not ours, and StateUnknownError when there is
    something that can't be read.
    """
    try:
        with _top(directory) as top:
            target = _target(top, directory)
            if target is None:
                return EMPTY
            with _opened(GENERATIONS, within=top) as generations:
                return _read(generations, target)
    except FileNotFoundError:
        return EMPTY
    except OSError as error:
        message = f"{directory}: the generation in force can't be read: {error}"
        raise StateUnknownError(message, remedy="make that readable, or move it away") from error


def find_generation(directory: Path, is_wanted: Callable[[GatewayConfig], bool]) -> GatewayConfig | None:
    """Return the newest kept configuration that is wanted, None when there is none. Raises StateUnknownError."""
    try:
        with _top(directory) as top, _opened(GENERATIONS, within=top) as generations:
            for _, name in sorted(_ages(generations), reverse=True):
                with suppress(OSError):
                    config = _read(generations, name)
                    if is_wanted(config):
                        return config
    except FileNotFoundError:
        return None
    except OSError as error:
        message = f"{directory}: the kept generations can't be read: {error}"
        raise StateUnknownError(message, remedy="make them readable") from error
    return None


def withdraw_generation(directory: Path) -> None:
    """Take away the link `current`, so that no generation is in force. Raises RefusedError when that fails."""
    try:
        with _top(directory) as top:
            fcntl.flock(top, fcntl.LOCK_EX)
            if _target(top, directory) is not None:
                os.unlink(CURRENT, dir_fd=top)
                os.fsync(top)
    except OSError as error:
        message = f"{directory}: the generation in force was not withdrawn: {error}"
        raise RefusedError(message, remedy="remove the link `current` by hand") from error


def _write(config: GatewayConfig, *, top: int, generations: int, in_force: str | None, keep: frozenset[str]) -> Written:
    name = config.generation
    intact = _is_intact(config, generations)
    if intact and in_force == name:
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
    _prune(generations, keep=keep | {name})
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
    """Return whether every file of the configuration is there as it should be; others don't matter."""
    try:
        with _opened(config.generation, within=generations) as directory:
            return all(_read_file(name, directory=directory) == content for name, content in config.files.items())
    except OSError:
        return False


def _read(generations: int, name: str) -> GatewayConfig:
    files: dict[str, bytes] = {}
    with _opened(name, within=generations) as directory:
        for file in _listed(directory):
            with suppress(FileNotFoundError):
                files[file] = _read_file(file, directory=directory)
    return GatewayConfig(files)


def _listed(directory: int) -> list[str]:
    """Return the names in the manifest, and its own; without a sound one, every name that could be in it."""
    with suppress(FileNotFoundError, UsageError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names = [*json.loads(_read_file(MANIFEST_FILE, directory=directory))["files"].keys(), MANIFEST_FILE]
        return list(GatewayConfig(dict.fromkeys(names, b"")).files)
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if _is_ours(entry.name) and entry.is_file(follow_symlinks=False)]


def _is_ours(name: str) -> bool:
    with suppress(UsageError):
        return bool(GatewayConfig({name: b""}).files)
    return False


def _read_file(name: str, *, directory: int) -> bytes:
    # Without O_NONBLOCK a pipe left here would hold us for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise OSError(f"{name[:64]!r} is no plain file of a sane size")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_MAX_FILE_BYTES)
    finally:
        os.close(descriptor)


def _target(top: int, directory: Path) -> str | None:
    """Return the generation that `current` names, None when there is none; RefusedError when it is not our link."""
    try:
        folder, _, name = os.readlink(CURRENT, dir_fd=top).partition("/")
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _not_ours(directory, "is no link") from error
    if folder != GENERATIONS or not name or "/" in name or name.startswith("."):
        raise _not_ours(directory, f"leads out of {GENERATIONS}")
    return name


def _not_ours(directory: Path, why: str) -> RefusedError:
    message = f"{directory / CURRENT} {why}, so it was not made by this program"
    return RefusedError(message, remedy="move it away, or write to another directory")


def _no_directory(directory: Path) -> UsageError:
    return UsageError(f"{directory} is no directory", remedy="name a directory, or a path where one can be made")


def _prune(generations: int, *, keep: frozenset[str]) -> None:
    """Remove all but the newest generations, and what a write that was cut short left behind."""
    for name in _names(generations):
        if _TEMPORARY.fullmatch(name):
            _remove(generations, name)
    ages = [(age_ns, name) for age_ns, name in _ages(generations) if name not in keep]
    for _, name in sorted(ages, reverse=True)[KEPT_GENERATIONS - 1 :]:
        _remove(generations, name)


def _ages(generations: int) -> list[tuple[int, str]]:
    """Return when each generation was last put in force, in nanoseconds since 1970, and its name."""
    names = [name for name in _names(generations) if _GENERATION.fullmatch(name)]
    return [(os.stat(name, dir_fd=generations, follow_symlinks=False).st_mtime_ns, name) for name in names]


def _remove(generations: int, name: str) -> None:
    """Remove a generation with all that is in it; a link or a file in place of one is left alone."""
    # Opened first, since rmtree would wait for a writer to a pipe.
    with suppress(OSError), _opened(name, within=generations):
        shutil.rmtree(name, dir_fd=generations)


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _temporary(name: str) -> str:
    return f".{name}.{secrets.token_hex(8)}"


@contextmanager
def _top(directory: Path) -> Iterator[int]:
    try:
        descriptor = os.open(directory, _DIRECTORY)
    except NotADirectoryError as error:
        raise _no_directory(directory) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened(name: str, *, within: int) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
