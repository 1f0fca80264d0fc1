"""The HAProxy program on this machine: where it is, and which version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.options import MIN_VERSION, VersionTooOldError, refuse_old_version, version_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = re.compile(r"^HAProxy version (\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", re.MULTILINE)
_IN_CACHE = Path("haproxy-3.0", "bin", "haproxy")
_ANSWER_SECONDS = 20


class HaproxyMissingError(UsageError):
    """No HAProxy that can be run was found."""

    code = "haproxy_missing"


@dataclass(frozen=True, slots=True)
class HaproxyBinary:
    """A program that was asked for its version. `version` is at least 3.0.3."""

    path: Path
    version: tuple[int, int, int]


def find_haproxy(environ: Mapping[str, str] = os.environ) -> HaproxyBinary:
    """Return the HAProxy to use: KURA_SHAPER_HAPROXY, else the one on PATH, else the one in the cache.

    Raises HaproxyMissingError when there is none, VersionTooOldError when there is only one
    that is older than 3.0.3.
    """
    chosen = environ.get("KURA_SHAPER_HAPROXY")
    if chosen:
        return read_version(Path(chosen))
    on_path = shutil.which("haproxy", path=environ.get("PATH"))
    cached = cache_directory(environ) / _IN_CACHE
    if on_path is not None:
        try:
            return read_version(Path(on_path))
        except (VersionTooOldError, HaproxyMissingError):
            if not os.access(cached, os.X_OK):
                raise
    if os.access(cached, os.X_OK):
        return read_version(cached)
    remedy = f"install HAProxy {version_text(MIN_VERSION)} or newer, or name it in KURA_SHAPER_HAPROXY"
    raise HaproxyMissingError("no HAProxy on this machine", remedy=remedy)


def read_version(path: Path) -> HaproxyBinary:
    """Ask a program for its version. Raises HaproxyMissingError or VersionTooOldError."""
    command = (str(path.absolute()), "-v")
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HaproxyMissingError(f"{path} can't be run", remedy=str(error)) from error
    match = _VERSION.search(answer.stdout.decode("utf-8", errors="replace"))
    if match is None:
        raise HaproxyMissingError(f"{path} is no HAProxy", remedy="name one in KURA_SHAPER_HAPROXY")
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    refuse_old_version(version)
    return HaproxyBinary(path.absolute(), version)


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the scripts keep the programs that they bring: KURA_SHAPER_CACHE, else kura-shaper in the user's."""
    if "KURA_SHAPER_CACHE" in environ:
        return Path(environ["KURA_SHAPER_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return Path(base or Path(environ.get("HOME", "/"), ".cache"), "kura-shaper")
