"""What was on a device before us, kept on disk so that `uninstall` can bring it back.

One small file for each device, written whole and synced before the first operation that
loses it, and one lock, so that two runs never program a device at once. A journal of
another boot, another device of the same name or another network namespace is not used.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kura_shaper.durable import replace_durably
from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.tree.model import Handle, OtherQdisc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kura_shaper.tree.model import Device

DEFAULT_STATE_DIRECTORY = Path("/var/lib/kura-shaper")
_VERSION = 1
# An attribute holds 16 bits of length, its header included.
_OPTIONS_MAX_BYTES = 65_000
# What a file that is no journal makes of reading it.
_DAMAGED = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError, UsageError)
_HOOKS = frozenset({"ingress", "clsact"})


@dataclass(frozen=True, slots=True)
class Former:
    """What a device had before us: its qdiscs, root first, the kernel's own bytes kept, and XPS masks by queue."""

    qdiscs: tuple[OtherQdisc, ...]
    xps: Mapping[int, int] = field(default_factory=dict)

    @property
    def has_hook(self) -> bool:
        """Whether somebody else had made the ingress and egress hooks."""
        return any(q.kind in _HOOKS for q in self.qdiscs)

    @property
    def restorable(self) -> tuple[OtherQdisc, ...]:
        """Those that somebody chose and that we replaced, root first.

        What the kernel makes by itself comes back by itself, and the hooks stay as they are.
        """
        return tuple(q for q in self.qdiscs if not q.is_kernel_default and q.kind not in _HOOKS)


class Journal:
    """The journal of one device below a state directory. path is the file."""

    def __init__(self, directory: Path, device: Device) -> None:
        self._identity = _identity(device)
        # Devices of other network namespaces may have the same name.
        stem = f"{device.name}.{self._identity['network_namespace']}"
        self.path = directory / f"{stem}.json"
        self._lock_path = directory / f"{stem}.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the device's lock. Raises RefusedError when another run holds it, or it can't be had."""
        try:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RefusedError(
                f"the lock {self._lock_path} can't be made: {error.strerror}",
                remedy="run as root; apply and uninstall need the same --state-dir",
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RefusedError("another run is programming this device", remedy="wait for it to end") from error
            yield
        finally:
            os.close(descriptor)

    def write(self, former: Former) -> None:
        """Keep the former state durably. Raises RefusedError when it can't be written."""
        state = {"qdiscs": [_to_json(q) for q in former.qdiscs], "xps": {str(q): m for q, m in former.xps.items()}}
        content = json.dumps({"version": _VERSION, **self._identity, **state}, indent=1)
        try:
            replace_durably(self.path, content + "\n", prepare=lambda descriptor: os.fchmod(descriptor, 0o600))
        except OSError as error:
            raise RefusedError(
                f"the journal {self.path} can't be written: {error.strerror}", remedy="nothing was changed"
            ) from error

    def read(self) -> Former | None:
        """Return the former state of this very device, None when there is none.

        Raises StateUnknownError when the journal is damaged.
        """
        try:
            content = json.loads(_read_file(self.path))
            if content.get("version") != _VERSION or any(content.get(k) != v for k, v in self._identity.items()):
                return None
            xps = {int(queue): int(mask) for queue, mask in content.get("xps", {}).items()}
            return Former(tuple(_from_json(q) for q in content["qdiscs"]), xps)
        except FileNotFoundError:
            return None
        except (OSError, *_DAMAGED) as error:
            raise StateUnknownError(
                f"the journal {self.path} can't be read: {error}", remedy="remove it to uninstall without it"
            ) from error

    def remove(self) -> None:
        """Forget the former state: it is in force again."""
        self.path.unlink(missing_ok=True)


def _identity(device: Device) -> dict[str, Any]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The thread's, since that is where its netlink socket goes.
    namespace = Path("/proc/thread-self/ns/net").stat()
    return {
        "device": device.name,
        "ifindex": device.ifindex,
        "boot_id": boot_id,
        "network_namespace": namespace.st_ino,
    }


def _to_json(qdisc: OtherQdisc) -> dict[str, Any]:
    return {
        "kind": qdisc.kind,
        "handle": qdisc.handle.u32,
        "parent": qdisc.parent.u32,
        "options": qdisc.options.hex(),
    }


def _from_json(value: dict[str, Any]) -> OtherQdisc:
    options = bytes.fromhex(value["options"])
    if len(options) > _OPTIONS_MAX_BYTES:
        raise ValueError(f"options of {len(options)} bytes fit in no message")
    return OtherQdisc(
        str(value["kind"]),
        Handle.from_u32(int(value["handle"])),
        Handle.from_u32(int(value["parent"])),
        options,
    )


def _read_file(path: Path) -> str:
    """Return a regular file's text; anything else in its place (a pipe would wait for ever) is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        return file.read()
