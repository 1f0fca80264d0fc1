"""Keeping a running gateway in step with its document, for as long as it is told to.

Whatever goes wrong, the last good state stays in force: a document that can't be read,
one that would empty a map, a reload that fails or has to wait. Each is logged once, when
it begins and when it ends, and shows in the metrics for as long as it lasts.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError, UsageError
from kura_shaper.haproxy.apply import Applied, Outcome, alone, carry_out, prepare
from kura_shaper.haproxy.decide import Kind
from kura_shaper.haproxy.master import ReloadFailedError
from kura_shaper.log import event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kura_shaper.clock import Clock
    from kura_shaper.haproxy.apply import Site
    from kura_shaper.tenants.document import TenantsDocument

_SECOND_NS = 1_000_000_000
_FIRST_RETRY_S = 2
_FAILED_RELOAD_S = 600
_LOG = logging.getLogger("kura_shaper.haproxy.watch")

Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass(slots=True)
class WatchState:
    """What the metrics tell. Times are those of the watch's clock; `decisions` counts what was carried out."""

    source_valid: bool = False
    source_read_ns: int = 0
    last_good_ns: int = 0
    tenants: int = 0
    generation: str = ""
    in_step: bool = False
    reload_pending: bool = False
    failures: int = 0
    certificate_findings: int = 0
    decisions: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))


class Watch:
    """Applies a document whenever it changes, and every so often, since somebody may have changed the gateway.

    `load` reads the document and raises UsageError for one that can't be used; `site` is asked
    anew each time, since the gateway may have become another version; `sources` are the
    files whose change counts. `resync_s` bounds how long a change by hand stays.
    """

    def __init__(
        self,
        load: Callable[[], TenantsDocument],
        site: Callable[[], Site],
        *,
        sources: Callable[[], Iterable[Path]],
        clock: Clock,
        resync_s: int = 60,
    ) -> None:
        self.state = WatchState()
        self._load, self._site, self._sources = load, site, sources
        self._clock, self._resync_s = clock, resync_s
        self._stamp: Stamp | None = None
        self._document: TenantsDocument | None = None
        self._next_ns = 0
        self._retry_s = _FIRST_RETRY_S
        self._said: dict[str, str] = {}

    def step(self) -> None:
        """Look once, and do what is due."""
        stamp = stamp_of(self._sources())
        now_ns = self._clock.now_ns()
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        elif now_ns < self._next_ns:
            return
        elif not self.state.source_valid:
            # A reading may fail once, and a change of permissions further up tells nobody.
            self._read()
        if self._document is None:
            self._next_ns = now_ns + self._resync_s * _SECOND_NS
            return
        self._next_ns = self._clock.now_ns() + self._apply(self._document) * _SECOND_NS

    def _read(self) -> None:
        try:
            document = self._load()
        except (UsageError, OSError) as error:
            self.state.source_valid = False
            self._say("source", logging.ERROR, str(error))
            return
        self._document = document
        self.state.source_valid = True
        self.state.source_read_ns = self._clock.now_ns()
        self.state.tenants = len(document.tenants)
        self._say("source", logging.INFO, "")

    def _apply(self, document: TenantsDocument) -> int:
        """Bring the gateway in step and return in how many seconds to look again."""
        try:
            site = self._site()
            with alone(site.directory, self._clock):
                prepared = prepare(document, site)
                applied = carry_out(prepared, site)
        except KuraShaperError as error:
            self.state.failures += 1
            self.state.in_step = self.state.reload_pending = False
            self._said.pop("reload", None)
            self._say("apply", logging.ERROR, str(error))
            if isinstance(error, ReloadFailedError):
                # While a new worker tries in vain to bind, HAProxy lets nobody connect for two seconds.
                return max(_FAILED_RELOAD_S, self._resync_s)
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, self._resync_s)
            return wait_s
        self._retry_s = _FIRST_RETRY_S
        self._say("apply", logging.INFO, "")
        cautions = prepared.report.cautions
        self.state.certificate_findings = len(cautions)
        more = f", and {len(cautions) - 5} more" if len(cautions) > 5 else ""
        self._say("certificates", logging.ERROR, "; ".join(map(str, cautions[:5])) + more)
        return self._note(applied)

    def _note(self, applied: Applied) -> int:
        state, kind = self.state, applied.decision.kind
        state.in_step = applied.outcome in {Outcome.APPLIED, Outcome.UNCHANGED}
        state.reload_pending = applied.outcome is Outcome.DEFERRED
        # The words tell how long ago, so they differ with each look; that is no news.
        why = (self._said.get("reload") or "; ".join(applied.notes)) if state.reload_pending else ""
        self._say("reload", logging.WARNING if why else logging.INFO, why)
        nobody = "no gateway runs; the files are written" if applied.outcome is Outcome.NOT_RUNNING else ""
        self._say("gateway", logging.WARNING if nobody else logging.INFO, nobody)
        if state.reload_pending:
            return min(applied.wait_s, self._resync_s)
        state.generation = applied.generation
        if applied.outcome is Outcome.NOT_RUNNING:
            return _FIRST_RETRY_S
        state.last_good_ns = self._clock.now_ns()
        if applied.outcome is Outcome.APPLIED:
            state.decisions[kind] += 1
            reasons = list(applied.decision.reasons[:10])
            event(_LOG, "gateway_applied", decision=kind, generation=applied.generation, reasons=reasons)
        return self._resync_s

    def _say(self, subject: str, level: int, words: str) -> None:
        """Log the beginning and the end of a condition, and nothing between them."""
        if self._said.get(subject, "") == words:
            return
        self._said[subject] = words
        if words:
            event(
                _LOG, f"{subject}_failed" if level == logging.ERROR else f"{subject}_waits", level=level, reason=words
            )
        else:
            event(_LOG, f"{subject}_recovered")


def stamp_of(paths: Iterable[Path]) -> Stamp:
    """Return what differs when one of the files is another one. A link, as in a mounted ConfigMap, is followed."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - a path that is a loop of links is an answer too
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid
