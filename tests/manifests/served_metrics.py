"""What the agent, the gateway's watch, the probe and the event broker serve, and what an expression asks of them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, cast

from agent_rig import scraped
from event_broker_metrics import scraped_of_a_broker
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kura_shaper.clock import FakeClock, SystemClock
from kura_shaper.haproxy.metrics import WatchMetrics
from kura_shaper.haproxy.watch import WatchState
from kura_shaper.probe.metrics import ProbeMetrics
from kura_shaper.probe.service import ProbeService
from kura_shaper.probe.target import Load, Measured, Target
from kura_shaper.probe.task import Task
from kura_shaper.units import Rate

# What Prometheus makes itself, and the labels that it or a scrape's relabelling puts on every series.
OWN_SERIES = {"ALERTS", "up"}
TARGET_LABELS = {"cluster", "node", "instance", "job", "namespace"}
_KEYWORDS = {
    *("by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "and", "or", "unless"),
    *("inf", "nan", "start", "end"),
}
# The answer of a master of HAProxy 3.0 to `show proc`: a worker, and one of before a reload.
_SHOW_PROC = """#<PID>          <type>          <reloads>       <uptime>        <version>
10              master          1               0d00h01m00s     3.0.11
# workers
12              worker          0               0d00h00m30s     3.0.11
# old workers
11              worker          1               0d00h01m00s     3.0.11
# programs

"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A series that an expression asks for, with the labels that its braces have."""

    name: str
    labels: frozenset[str]


@functools.cache
def served() -> dict[str, set[str]]:
    """Return every series that a real agent, the watch, the probe and a broker serve, with its labels."""
    registry = CollectorRegistry(auto_describe=False)
    state = WatchState(source_valid=True, in_step=True, source_read_ns=1, last_good_ns=1, generation="1")
    registry.register(WatchMetrics(state, cast("Any", _Master()), SystemClock()))
    registry.register(ProbeMetrics(_probe()))
    texts = (generate_latest(registry).decode(), scraped(), scraped_of_a_broker())
    return {name: labels for text in texts for name, labels in series_of(text).items()}


def _probe() -> ProbeService:
    """Return a probe that knows all of its target."""
    target = Target(name="t", host="a.test", min_rate=Rate(1))
    known = Measured(
        target=target,
        spoken="h2",
        status=200,
        grpc_status=0,
        resolve_ns=1,
        connect_ns=1,
        handshake_ns=1,
        first_byte_ns=1,
        certificate_ends_at_s=1,
        rate=Rate(1),
    )
    clock = FakeClock(1)
    service = ProbeService([Task(target, Load())], lambda *_: known, interval_ns=1, clock=clock)
    service.step()
    thread = service.watched[0].thread
    assert thread is not None
    thread.join()
    return service


def series_of(text: str) -> dict[str, set[str]]:
    """Return the series of an exposition, with their labels. What has no sample at the moment has no labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def asked_by(expression: str) -> list[Asked]:
    """Return the series that an expression selects."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    without_lists = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    found = []
    for match in re.finditer(r"(?<![\w$.:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(\s*\()?", without_lists):
        name, braces, call = match.groups()
        if call or name.lower() in _KEYWORDS or re.fullmatch(r"e\d*", name):
            continue
        labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces or "")
        found.append(Asked(name, frozenset(labels)))
    return found


def grouped_by(expression: str) -> set[str]:
    """Return every label that an expression aggregates or joins by."""
    lists = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {label.strip() for each in lists for label in each.split(",") if label.strip()}


def faults_of(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Return what an expression asks for that nobody serves, a line each."""
    asked, faults = asked_by(expression), []
    for each in asked:
        if each.name in OWN_SERIES:
            continue
        if each.name not in known:
            faults.append(f"nobody serves {each.name}")
            continue
        faults += [
            f"{each.name} has no label {label}" for label in sorted(each.labels - known[each.name] - TARGET_LABELS)
        ]
    everything = set().union(*(known.get(each.name, set()) for each in asked)) | TARGET_LABELS | {"le", "alertname"}
    faults += [f"no series here has the label {label}" for label in sorted(grouped_by(expression) - everything)]
    return faults


class _Master:
    def ask(self, command: str) -> str:
        assert command == "show proc"
        return _SHOW_PROC
