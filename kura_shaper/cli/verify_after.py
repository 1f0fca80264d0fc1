"""--after and --baseline: a run held against an earlier one, with a restart between the two."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.clock import SystemClock
from kura_shaper.durable import replace_durably
from kura_shaper.errors import RefusedError, StateUnknownError, UsageError
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.after import Facts, facts_of, read_boot, read_facts
from kura_shaper.verify.report.machine import to_json
from kura_shaper.verify.restart import Part, Restart, processes_of, run_command, see_restart
from kura_shaper.verify.run import Before, Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kura_shaper.tenants.document import Gateway
    from kura_shaper.verify.active import LoadRun

_DAY_S = 86_400


def restart_asked(part: Part | None, command: str, *, baseline: Path | None, within_s: float) -> Restart | None:
    """Return the restart that the options ask for. Raises UsageError."""
    if part is None:
        if command:
            raise UsageError("--restart needs --after", remedy="e.g. --after gateway")
        return None
    if part is Part.NODE and baseline is None:
        raise UsageError("--after node needs --baseline", remedy="name a file that outlives the restart")
    if part is not Part.NODE and baseline is not None:
        raise UsageError("--after makes its own baseline", remedy="leave one of --after and --baseline out")
    if not (math.isfinite(within_s) and 0 < within_s <= _DAY_S):
        raise UsageError(f"--within {within_s:g} is out of range", remedy="use seconds, at most a day")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--restart can't be split into words: {error}") from error
    return Restart(part, words, round(within_s * 1e9))


@dataclass(frozen=True, slots=True)
class Around:
    """What is done around one run, or two."""

    restart: Restart | None
    baseline: Path | None
    gateway: Gateway
    agent_port: int
    tell: Callable[[str, int], None]

    def report(self, once: Callable[[Facts | None, LoadRun | None], Report], load: LoadRun | None) -> Report:
        """Return the report of the last run, for which alone load is made."""
        restart = self.restart
        if restart is None:
            return once(read_facts(self.baseline) if self.baseline else None, load)
        if restart.part is Part.NODE:
            return self._of_node(restart, once, load)
        first = once(None, None)
        earlier = _facts_of(first)
        see_restart(restart, lambda: self._processes(restart.part), clock=SystemClock(), tell=self.tell)
        return replace(once(earlier, load), before=_before(restart.part, first))

    def _processes(self, part: Part) -> frozenset[tuple[int, int]]:
        ports = (*self.gateway.https_ports, *self.gateway.peer_ports)
        return processes_of(part, gateway_ports=ports, agent_port=self.agent_port)

    def _of_node(
        self, restart: Restart, once: Callable[[Facts | None, LoadRun | None], Report], load: LoadRun | None
    ) -> Report:
        """Keep a baseline at first, and compare with it once the node has been started anew."""
        path = self.baseline
        assert path is not None  # noqa: S101 - restart_asked has looked
        if path.exists():
            earlier = read_facts(path)
            if earlier.boot == read_boot():
                remedy = f"restart it, or remove {path} to begin again"
                raise UsageError(f"the node was not started anew since {earlier.started_at}", remedy=remedy)
            return once(earlier, load)
        first = once(None, load)
        _facts_of(first)
        try:
            replace_durably(path, json.dumps(to_json(first)))
        except OSError as error:
            raise RefusedError(f"--baseline {str(path)!r} can't be written: {error.strerror}") from error
        if restart.command:
            run_command(restart.command)
        return first


def _facts_of(first: Report) -> Facts:
    """Return what to compare with. Raises StateUnknownError: nothing is restarted that could not be compared."""
    facts = facts_of(first.observed, started_at=first.started_at)
    if facts is None:
        snapshot = first.observed.node.snapshot
        raise StateUnknownError(snapshot.reason if isinstance(snapshot, Unknown) else "the device was not read")
    return facts


def _before(part: Part, first: Report) -> Before:
    codes = tuple(dict.fromkeys(finding.code.name for finding in first.findings))
    return Before(part, first.verdict, codes)
