"""All evidence of a run in one file, to hand to somebody who was not there: a .tar.gz of texts.

What was read is written as it was read, not as it was judged, so that another can judge it anew. There is
no secret in it: no process's arguments or environment, no certificate, no key is ever read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kura_shaper import __version__
from kura_shaper.tree.model import Handle
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate
from kura_shaper.verify.observed import Traffic
from kura_shaper.verify.report.machine import to_json, to_junit
from kura_shaper.verify.report.text import to_lines

if TYPE_CHECKING:
    from kura_shaper.verify.observed import Observed
    from kura_shaper.verify.run import Report

_SYSCTL = Path("/proc/sys/net")
_SYSCTLS = (
    "core/default_qdisc",
    "core/netdev_max_backlog",
    "core/netdev_budget",
    "ipv4/tcp_congestion_control",
    "ipv4/tcp_wmem",
    "ipv4/tcp_notsent_lowat",
    "ipv4/ip_forward",
)
_PACKAGES = ("pyroute2", "typer", "PyYAML")


def write_bundle(report: Report, file: BinaryIO, *, extra: Mapping[str, str] | None = None) -> None:
    """Write the bundle. extra are further files by name. Raises OSError."""
    parts = {**_parts(report), **(extra or {})}
    sums = "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(parts.items()))
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in sorted({**parts, "SHA256SUMS": sums}.items()):
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"kura-shaper-verify/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
            archive.addfile(entry, io.BytesIO(data))


def _parts(report: Report) -> dict[str, str]:
    observed = report.observed
    return {
        "report.json": _text(to_json(report)),
        "report.txt": "\n".join(to_lines(report)) + "\n",
        "junit.xml": to_junit(report),
        "settings.json": _text({"settings": report.settings, "asked": observed.question.asked}),
        "promises.json": _text(_promises(observed)),
        "node.json": _text(_node()),
        "readings/tree.json": _text(_tree(observed)),
        "readings/network.json": _text(_network(observed)),
        "readings/gateway.json": _text(_gateway(observed)),
        "readings/sockets.json": _text(_sockets(observed)),
        "samples.csv": "".join(_samples(observed)),
    }


def _text(value: object) -> str:
    return json.dumps(plain(value), indent=1) + "\n"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: rates as bit/s, handles and addresses as text, bytes as hex."""
    match value:
        case Handle() | IPv4Address() | IPv6Address():
            return str(value)
        case Rate():
            return value.bits_per_second
        case Enum():
            return value.value
        case bytes():
            return value.hex()
        case Mapping():
            return {_key(key): plain(one) for key, one in value.items()}
        case str() | int() | float() | None:
            return value
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _ if hasattr(value, "_asdict"):
            return plain(value._asdict())
        case Iterable():
            return [plain(one) for one in value]
    return str(value)


def _key(key: Any) -> str:
    found = plain(key)
    return " ".join(map(str, found)) if isinstance(found, list) else str(found)


def _promises(observed: Observed) -> dict[str, Any]:
    document = observed.question.document
    rows = [
        {"name": t.name, "class": f"{t.class_id:#x}", "floor": t.floor, "ceiling": t.ceiling} for t in document.tenants
    ]
    return {"mask": f"{document.marks.mask:#010x}", "ports": document.gateway.ports, "tenants": rows}


def _node() -> dict[str, Any]:
    """Return versions, kernel and the settings of it that matter. The host's name is not among them."""
    system = os.uname()
    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    sysctls = {}
    for name in _SYSCTLS:
        with suppress(OSError):
            sysctls[f"net/{name}"] = (_SYSCTL / name).read_text("ascii", "replace").strip()
    return {
        "kernel": system.release,
        "build": system.version,
        "machine": system.machine,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kura_shaper": __version__,
        "packages": packages,
        "sysctls": sysctls,
    }


def _tree(observed: Observed) -> object:
    actual = observed.node.snapshot
    if not isinstance(actual, Snapshot):
        return {"unknown": actual.reason}
    return {
        "device": actual.device,
        "root": actual.root,
        "queues": actual.queues,
        "classes": actual.classes,
        "counters": actual.counters,
        "leaves": actual.leaves,
        "filters": actual.filters,
        "hook": actual.hook,
        "tcx": actual.tcx,
        "xps": actual.xps,
        "xps_rxqs": sorted(actual.xps_rxqs),
        "direct_packets": actual.direct_packets,
        "steering_proof": observed.node.proof,
    }


def _network(observed: Observed) -> object:
    node = observed.node
    return {
        "links": node.links,
        "mark_rules": node.rules,
        "port": node.port,
        "xdp_sockets": node.xdp_sockets,
        "hardware_filters": node.hardware_filters,
        "default_devices": node.default_devices,
        "bandwidth_manager": node.bandwidth_manager,
    }


def _gateway(observed: Observed) -> object:
    node = observed.node
    return {"listeners": node.listeners, "holders": node.holders, "attribution": node.attribution}


def _sockets(observed: Observed) -> object:
    traffic = observed.traffic
    if not isinstance(traffic, Traffic):
        return traffic
    return {"before": traffic.before, "after": traffic.after, "ways": traffic.ways, "softnet": traffic.softnet}


def _samples(observed: Observed) -> Iterable[str]:
    yield "counter,at_ns,spread_ns,bytes\n"
    traffic = observed.traffic
    if isinstance(traffic, Traffic):
        classes = [(f"class {minor:#x}", series) for minor, series in sorted(traffic.sent.items())]
        for name, series in (("device", traffic.device), ("root qdisc", traffic.root), *classes):
            for reading in series.readings:
                yield f"{name},{reading.at_ns - traffic.start_ns},{reading.spread_ns},{reading.count_bytes}\n"
