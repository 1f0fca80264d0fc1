"""What an earlier report says of the same node, to hold this run against: after a restart of anything.

A report's `facts` are what a restart of the gateway, of the CNI or of the agent must not change, and
counters that only grow. A node that was started anew begins with new counters, so each report names its boot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kura_shaper.errors import UsageError
from kura_shaper.tree.observe import shape_in_force
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.verify.observed import Observed

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a report can be compared. sent_bytes is by classid, tenants has the class id by name."""

    boot: str = ""
    ifindex: int = 0
    shape: str = ""
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, int] = field(default_factory=dict)
    gateway: tuple[int, ...] = ()
    started_at: str = ""


def facts_of(observed: Observed, *, started_at: str = "") -> Facts | None:
    """Return the facts of a reading, None when the kernel's state could not be read."""
    node = observed.node
    if isinstance(node.snapshot, Unknown):
        return None
    holders = {} if isinstance(node.holders, Unknown) else node.holders.by_inode
    return Facts(
        boot=node.boot,
        ifindex=node.device.ifindex,
        shape=shape_in_force(node.snapshot) or "",
        sent_bytes={str(classid): found.sent_bytes for classid, found in node.snapshot.counters.items()},
        tenants={tenant.name: tenant.class_id for tenant in observed.question.document.tenants},
        gateway=tuple(sorted({process.pid for some in holders.values() for process in some})),
        started_at=started_at,
    )


def read_boot(path: Path = _BOOT) -> str:
    """Return what names this boot of the node, "" when it can't be read."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def read_facts(path: Path) -> Facts:
    """Return the facts of a report that `--json` wrote. Raises UsageError for a file that is none."""
    option = f"--baseline {str(path)!r}"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{option} is too large to be a report")
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{option} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{option} is no JSON", remedy="name a file that `verify --json` wrote") from error
    try:
        return _facts(found)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{option} has no facts", remedy="name a file that `verify --json` wrote") from error


def _facts(found: Any) -> Facts:
    facts = found["facts"]
    return Facts(
        boot=str(facts["boot"]),
        ifindex=int(facts["ifindex"]),
        shape=str(facts["shape"] or ""),
        sent_bytes={str(classid): int(count) for classid, count in facts["sent_bytes"].items()},
        tenants={str(name): int(class_id, 16) for name, class_id in facts["tenants"].items()},
        gateway=tuple(int(pid) for pid in facts["gateway"]),
        started_at=str(found["started_at"]),
    )
