"""One run: read, look, judge. What comes of it is a Report, which says by itself how the process ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.verify.checks import CHECKS, codes
from kura_shaper.verify.expect import observed_of
from kura_shaper.verify.values import Finding, Outcome, Phase, Result, Severity, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kura_shaper.verify.active import LoadRun
    from kura_shaper.verify.after import Facts
    from kura_shaper.verify.collect import NodeReader
    from kura_shaper.verify.observed import Observed, Question

FINDINGS_EXIT_CODE = 1
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is made: 0 ms of looking make it a reading alone.

    accepted are findings that somebody knows of and lives with: they are shown and do not count. With
    needs_traffic a check that saw no traffic is one that could not be made.
    """

    duration_ms: int = 10_000
    window_ms: int = 100
    accepted: frozenset[str] = frozenset()
    needs_traffic: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for what can't be."""
        if not 10 <= self.window_ms <= 60_000:
            raise UsageError(f"--window {self.window_ms} is out of range", remedy="use 10 to 60000 ms")
        if self.duration_ms and not 2 * self.window_ms <= self.duration_ms <= 86_400_000:
            raise UsageError(
                f"--duration of {self.duration_ms / 1_000:g} s is out of range", remedy="use two windows to a day"
            )
        unheard = sorted(self.accepted - codes().keys())
        if unheard:
            raise UsageError(f"--accept {unheard[0][:64]!r} is no finding", remedy=f"known: {', '.join(codes())}")


@dataclass(frozen=True, slots=True)
class Before:
    """How the run before a restart ended: of what part the restart was, the verdict, and the findings' codes."""

    part: str
    verdict: str
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"before the restart of the {self.part}: {', '.join((self.verdict, *self.findings))}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. started_at is local time with its offset (ISO 8601)."""

    observed: Observed
    settings: Settings
    results: tuple[Result, ...]
    started_at: str = ""
    before: Before | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings that count, errors first."""
        every = (finding for result in self.results for finding in result.findings)
        counted = [finding for finding in every if finding.code.name not in self.settings.accepted]
        return tuple(sorted(counted, key=lambda finding: finding.code.severity is not Severity.ERROR))

    @property
    def accepted(self) -> tuple[Finding, ...]:
        """The findings that somebody lives with."""
        every = (finding for result in self.results for finding in result.findings)
        return tuple(finding for finding in every if finding.code.name in self.settings.accepted)

    @property
    def unknown(self) -> tuple[Result, ...]:
        """The checks that could not be made, whole or in part."""
        return tuple(result for result in self.results if result.unknown)

    @property
    def verdict(self) -> str:
        """pass, findings, or unknown."""
        if self.findings:
            return "findings"
        return "unknown" if self.unknown else "pass"

    @property
    def exit_code(self) -> int:
        """How the process ends."""
        return {"pass": 0, "findings": FINDINGS_EXIT_CODE, "unknown": StateUnknownError.exit_code}[self.verdict]


def run(
    question: Question,
    reader: NodeReader,
    settings: Settings,
    *,
    started_at: str = "",
    tell: Callable[[str, int], None] = lambda *_: None,
    load: LoadRun | None = None,
    earlier: Facts | None = None,
) -> Report:
    """Make one run. tell hears what is done and how many ms of looking are over.

    With a load the traffic is looked at until that is over, with earlier facts this run is held against them.
    """
    tell("reading the node", 0)
    node = reader.read(question)
    traffic = None
    phases = {Phase.STATIC}
    if settings.duration_ms:
        phases.add(Phase.PASSIVE)
        if load:
            phases.add(Phase.ACTIVE)
            load.start()
        traffic = reader.watch(
            question,
            duration_ns=settings.duration_ms * _NS_PER_MS,
            window_ns=settings.window_ms * _NS_PER_MS,
            tell=lambda passed_ns: tell("looking at the traffic", passed_ns // _NS_PER_MS),
            is_over=lambda: load is None or load.is_over,
        )
    if earlier:
        phases.add(Phase.AFTER)
    made = load.result() if load and settings.duration_ms else None
    observed = replace(observed_of(question, node, traffic), load=made, earlier=earlier)
    return Report(observed, settings, tuple(judge(observed, settings, phases)), started_at)


def judge(observed: Observed, settings: Settings, phases: Iterable[Phase]) -> Iterable[Result]:
    """Yield the result of each check of these phases."""
    chosen = frozenset(phases)
    for check in CHECKS:
        if check.phase in chosen:
            result = result_of(check, check.judge(observed))
            if settings.needs_traffic and check.phase is Phase.PASSIVE and result.outcome is Outcome.SKIPPED:
                result = replace(result, outcome=Outcome.UNKNOWN, unknown=result.words)
            yield result
