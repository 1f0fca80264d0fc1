"""What a person should know about a wanted tree or about what stands on a device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Weight(StrEnum):
    """How much a note matters: a finding is something to mend, the rest is good to know."""

    INFO = "info"
    FINDING = "finding"


@dataclass(frozen=True, slots=True)
class Note:
    """One thing to know; code is stable."""

    code: str
    message: str
    tenant: str = ""
    weight: Weight = Weight.INFO
