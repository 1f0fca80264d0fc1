"""The cluster as an agent's source, and what it last said, kept on disk.

An agent that starts while the API server can't be asked begins with what was last good, so
that a tenant which is faulty just then is not left out, and no node waits for a control plane.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from kura_shaper.agent.source import Told
from kura_shaper.durable import replace_durably
from kura_shaper.errors import KuraShaperError
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tenants.kubernetes.source import LastGood
from kura_shaper.tenants.text import document_text
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tenants.kubernetes.thread import FollowedCluster

MAINTENANCE = "kura-shaper/maintenance"
LAST_GOOD_FILE = "last-good.json"
_YES = frozenset({"true", "yes", "1"})


class ClusterTold:
    """See `source.Source`. Keeps what is good in a file when it is another one than before."""

    def __init__(self, followed: FollowedCluster, state_dir: Path) -> None:
        self._followed = followed
        self._path = state_dir / LAST_GOOD_FILE
        self._kept: tuple[TenantsDocument | None, Rate | None] = (None, None)

    def told(self) -> Told:
        """See `source.Source`."""
        said = self._followed.snapshot()
        problems = tuple(str(problem) for problem in said.problems)
        is_valid = said.synced and not said.failure and said.document is not None
        if is_valid and (said.document, said.budget) != self._kept:
            write_last_good(self._path, LastGood(said.document, said.budget))
            self._kept = (said.document, said.budget)
        waits = () if said.synced else ("the cluster has not been read yet",)
        return Told(
            document=said.document,
            is_valid=is_valid,
            current_at_ns=said.current_at_ns,
            budget=said.budget,
            problems=(*((said.failure,) if said.failure else waits), *problems),
            may_disrupt=dict(said.annotations).get(MAINTENANCE, "").strip().lower() in _YES,
        )


def write_last_good(path: Path, last: LastGood) -> None:
    """Keep what was good, whole or not at all. A disk that refuses costs only the next start its memory."""
    if last.document is None:
        return
    budget = last.budget.bits_per_second if last.budget else None
    content = json.dumps({"budget_bits_per_second": budget, "document": document_text(last.document)})
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, content)


def read_last_good(state_dir: Path) -> LastGood:
    """Return what was last good; nothing where there is nothing, or nothing that can be used."""
    path = state_dir / LAST_GOOD_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        budget = found["budget_bits_per_second"]
        document = parse_tenants(str(found["document"]), file=str(path))
        return LastGood(document, Rate(int(budget)) if budget else None)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, KuraShaperError):
        return LastGood()
