"""What a request carries to be let in, from files. It is sent to the target, and never shown, logged or kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.probe.target import Security

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.probe.target import Target

_FILE_BYTES_MAX = 65_536
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?", re.ASCII)
# What the client says itself; another value would have the other side read another request than was sent.
_OURS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "te", "upgrade", "keep-alive", "proxy-connection"}
)


def headers_of(target: Target) -> tuple[tuple[str, str], ...]:
    """Return the header fields that a target's files hold, names in lower case. They are read anew each time.

    Raises UsageError, which names the file and the line, and never what stands there.
    """
    if target.security is Security.PLAIN and (target.token_file or target.header_file):
        raise UsageError(f"{target.name}: a token or header from a file goes over TLS alone", remedy="use https")
    fields: list[tuple[str, str]] = []
    if target.token_file is not None:
        fields.append(("authorization", f"Bearer {_token(target.token_file)}"))
    if target.header_file is not None:
        fields += _fields(target.header_file)
    return tuple(fields)


def _token(path: Path) -> str:
    token = _text(path).strip()
    if not _VALUE.fullmatch(token) or " " in token:
        raise UsageError(f"{path}: is no token", remedy="one line of ASCII without blanks, and nothing else")
    return token


def _fields(path: Path) -> list[tuple[str, str]]:
    fields = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise UsageError(f"{path}:{number}: is no header field", remedy="write `Name: value` in ASCII, one a line")
        if name in _OURS:
            raise UsageError(f"{path}:{number}: {name} is set by the probe itself", remedy="remove the line")
        fields.append((name, value))
    return fields


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise UsageError(f"{path}: is larger than {_FILE_BYTES_MAX // 1024} KiB", remedy="is it the right file?")
        return content.decode("ascii")
    except OSError as error:
        raise UsageError(
            f"{path}: can't be read: {error.strerror}", remedy="check the path and who may read it"
        ) from None
    except UnicodeDecodeError:
        # From None: the error would show what stands there.
        raise UsageError(f"{path}: is not ASCII", remedy="is it the right file?") from None
