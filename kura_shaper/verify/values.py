"""What a check is and what comes of it.

A check asks one question of values that were read, and says which findings it can have. It either
holds, has findings, could not be asked (unknown, which is never a pass), or has nothing to ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kura_shaper.verify.observed import Observed


class Severity(StrEnum):
    """error: a promise is broken, or bytes pass it by. warning: it holds now, and something can break it unseen."""

    ERROR = "error"
    WARNING = "warning"


class Outcome(StrEnum):
    """What came of a check."""

    HOLDS = "holds"
    FINDING = "finding"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


class Phase(StrEnum):
    """What a check needs: a reading, a while of looking, load of its own, or an earlier report."""

    STATIC = "static"
    PASSIVE = "passive"
    ACTIVE = "active"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Code:
    """The name of one kind of finding, which never changes; what it means, and the next thing to do."""

    name: str
    severity: Severity
    meaning: str
    remedy: str


Evidence = Mapping[str, int | str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as promised: what was seen, whose it is, and the numbers that show it."""

    code: Code
    message: str
    tenant: str = ""
    evidence: Evidence = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a check came to. seen says what was looked at, so that a pass is evidence too.

    unknown is why it could not be asked, skipped why there was nothing to ask; findings count ahead of both.
    """

    seen: str = ""
    findings: tuple[Finding, ...] = ()
    unknown: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question, the findings that it can have, and who answers it. judge does nothing but judge."""

    name: str
    question: str
    phase: Phase
    codes: tuple[Code, ...]
    judge: Callable[[Observed], Judged]


@dataclass(frozen=True, slots=True)
class Result:
    """A check that was made. words is what was seen, or why there was nothing to ask; unknown is what could not
    be asked, also where a part could and had findings."""

    check: Check
    outcome: Outcome
    words: str
    findings: tuple[Finding, ...] = ()
    unknown: str = ""


def result_of(check: Check, judged: Judged) -> Result:
    """Return what a judgement amounts to."""
    if judged.findings:
        return Result(check, Outcome.FINDING, judged.seen, judged.findings, judged.unknown)
    if judged.unknown:
        return Result(check, Outcome.UNKNOWN, judged.seen, unknown=judged.unknown)
    if judged.skipped:
        return Result(check, Outcome.SKIPPED, judged.skipped)
    return Result(check, Outcome.HOLDS, judged.seen)
