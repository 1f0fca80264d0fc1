"""A rendered configuration as a value: file names, bytes, and the hash that names them together."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from difflib import unified_diff
from types import MappingProxyType
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_FILE = "haproxy.cfg"
MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = 1
_GENERATION_CHARS = 16
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything that one generation of the gateway reads, the certificates excepted.

    `files` has every file by its name, the manifest included, in sorted order.
    Raises UsageError for a name that is not one plain file name.
    """

    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        for name in self.files:
            if not _FILE_NAME.fullmatch(name):
                raise UsageError(f"{name[:64]!r} is no file name", remedy="use letters, digits, . _ and -")
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))

    @classmethod
    def with_manifest(cls, files: Mapping[str, bytes], *, version: str) -> GatewayConfig:
        """Return the files with a manifest beside them: a SHA-256 for each, and the version rendered for."""
        sums = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}
        manifest = {"schema": MANIFEST_SCHEMA, "haproxy": version, "files": sums}
        return cls({**files, MANIFEST_FILE: (json.dumps(manifest, indent=2) + "\n").encode("ascii")})

    @property
    def generation(self) -> str:
        """Name of this content: equal for equal files, different for different ones."""
        digest = hashlib.sha256()
        for name, content in self.files.items():
            digest.update(f"{name}\n{len(content)}\n".encode("ascii") + content)
        return digest.hexdigest()[:_GENERATION_CHARS]

    def text(self, name: str) -> str:
        """Return a file as text, "" when there is none; bytes that are no UTF-8 are shown as escapes."""
        return self.files.get(name, b"").decode("utf-8", errors="backslashreplace")


def config_digest(content: bytes) -> str:
    """Return the short digest by which a configuration file is known."""
    return hashlib.sha256(content).hexdigest()[:_GENERATION_CHARS]


EMPTY = GatewayConfig({})


def diff_text(old: GatewayConfig, new: GatewayConfig) -> str:
    """Return a unified diff of all files but the manifest; "" when nothing differs. Use EMPTY for no old one."""
    names = sorted({*old.files, *new.files} - {MANIFEST_FILE})
    return "".join(_file_diff(name, old=old, new=new) for name in names)


def _file_diff(name: str, *, old: GatewayConfig, new: GatewayConfig) -> str:
    before, after = (config.text(name).splitlines(keepends=True) for config in (old, new))
    before_name = f"a/{name}" if name in old.files else "/dev/null"
    after_name = f"b/{name}" if name in new.files else "/dev/null"
    lines = unified_diff(before, after, before_name, after_name)
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in lines)
