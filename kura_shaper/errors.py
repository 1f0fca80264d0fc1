"""One shallow tree of errors, each with what a machine and what a person needs.

`code` is stable and short, `remedy` is the next thing to do, `exit_code` is the
process status that the command line turns the error into (0 fine, 1 findings,
2 usage, document or settings, 3 refused, 4 state could not be read).
"""

from __future__ import annotations

from typing import ClassVar


class KuraShaperError(Exception):
    """Base of every error that this package raises on purpose."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(KuraShaperError):
    """An option or a setting that can't be used as given."""

    code = "usage"
    exit_code = 2


class QuantityError(UsageError, ValueError):
    """A text that is no quantity of the wanted unit."""

    code = "quantity"


class DocumentError(UsageError):
    """A document that can't be used; says where: file, line and key path."""

    code = "document"

    def __init__(self, message: str, *, file: str = "", line: int = 0, path: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.file = file
        self.line = line
        self.path = path

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.path, super().__str__()) if part)


class RefusedError(KuraShaperError):
    """The kernel, the gateway or the cluster said no, or we will not ask it to."""

    code = "refused"
    exit_code = 3


class StateUnknownError(KuraShaperError):
    """The present state could not be read. Unknown is not absent: nothing was written."""

    code = "state_unknown"
    exit_code = 4
