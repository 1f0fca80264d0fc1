"""What the kernel refuses, typed by errno in one place."""

from __future__ import annotations

import errno
import os
from typing import ClassVar

from kura_shaper.errors import RefusedError


class KernelRefusedError(RefusedError):
    """The kernel refused a message. errno is its number, detail its own words (extack)."""

    code: ClassVar[str] = "kernel_refused"
    hint: ClassVar[str] = "see the kernel's own words above"

    def __init__(self, number: int, detail: str = "", *, doing: str = "") -> None:
        words = detail or os.strerror(number)
        prefix = f"{doing}: " if doing else ""
        super().__init__(f"{prefix}the kernel says {errno.errorcode.get(number, number)}: {words}", remedy=self.hint)
        self.errno = number
        self.detail = detail


class NoPermissionError(KernelRefusedError):
    """EPERM, EACCES."""

    code = "no_permission"
    hint = "run as root, or with CAP_NET_ADMIN"


class AlreadyThereError(KernelRefusedError):
    """EEXIST."""

    code = "already_there"
    hint = "somebody else made it meanwhile: run again"


class NotThereError(KernelRefusedError):
    """ENOENT, ENODEV, ESRCH."""

    code = "not_there"
    hint = "somebody else removed it meanwhile: run again"


class InUseError(KernelRefusedError):
    """EBUSY: a class that a filter or a child still names."""

    code = "in_use"
    hint = "remove the filter or the child that names it first"


class InvalidError(KernelRefusedError):
    """EINVAL."""

    code = "invalid"
    hint = "the kernel's own words say which part"


class UnsupportedError(KernelRefusedError):
    """EOPNOTSUPP, ENOSYS, and ENOENT for a kind that no module brings."""

    code = "unsupported"
    hint = "this kernel lacks it"


_BY_ERRNO: dict[int, type[KernelRefusedError]] = {
    errno.EPERM: NoPermissionError,
    errno.EACCES: NoPermissionError,
    errno.EEXIST: AlreadyThereError,
    errno.ENOENT: NotThereError,
    errno.ENODEV: NotThereError,
    errno.ESRCH: NotThereError,
    errno.EBUSY: InUseError,
    errno.EINVAL: InvalidError,
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSYS: UnsupportedError,
}

# ENOENT has two meanings, told apart by the kernel's words (net/sched/sch_api.c, cls_api.c).
_MISSING_KIND = frozenset({"Specified qdisc kind is unknown", "TC classifier not found"})


def refusal(number: int, detail: str = "", *, doing: str = "") -> KernelRefusedError:
    """Return the typed error for an errno."""
    kind = _BY_ERRNO.get(number, KernelRefusedError)
    if kind is NotThereError and detail in _MISSING_KIND:
        kind = UnsupportedError
    return kind(number, detail, doing=doing)
