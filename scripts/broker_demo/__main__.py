"""The event broker on one machine: events flow to a router without a route, a broker dies, another takes over.

0 when everything held, 1 when something did not, 3 where namespaces can't be made.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trustme
import zmq
from cluster import NAMESPACE, api_server, metadata
from place import (
    BROKERS,
    ROUTER,
    ROUTER_ADDRESS,
    WORKERS,
    WORKERS_ADDRESS,
    Program,
    Run,
    make_place,
    route_from_router_to_workers,
    status_of_router,
)
from workers import TOPICS

from kura_shaper.broker.router.dynamo import decode_event
from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.lab.isolation import NETNS_DIR, SCRATCH_DIR, inside, run_isolated

if TYPE_CHECKING:
    from collections.abc import Callable

PORTS = (41_001, 41_002, 41_003, 41_004)
BUS_PORT, METRICS_PORT, EXPOSED_PORT = 8443, 9465, 5557
_HERE = Path(__file__).parent
_WITHIN_S, _FLOW_S = 40.0, 1.5
_TOKEN = "demo-token-that-is-in-no-output"


@dataclass(slots=True)
class Events:
    """What the router printed: numbers by publisher and topic, and what it said is missing."""

    numbers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    missed: Counter[tuple[int, str]] = field(default_factory=Counter)
    total: int = 0

    def read(self, router: Program) -> None:
        """Read until the router ends."""
        assert router.process.stdout is not None
        for line in router.process.stdout:
            event = json.loads(line)
            key = event["publisher_id"], event["topic"]
            self.numbers.setdefault(key, []).append(event["sequence"])
            self.missed[key] += event["missed_before"]
            self.total += 1


@dataclass(slots=True)
class Story:
    """The run: its programs, and a row for each thing that held or did not."""

    run: Run
    events: Events = field(default_factory=Events)
    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def note(self, what: str, found: str, *, holds: bool) -> None:
        """Add a row."""
        self.rows.append((what, found, holds))

    def until(self, done: Callable[[], bool], what: str) -> float:
        """Wait until something holds; return how long that took. Raises StateUnknownError when it never does."""
        start = time.monotonic()
        while not done():
            if time.monotonic() - start > _WITHIN_S:
                raise StateUnknownError(f"{what} did not come within {_WITHIN_S:.0f} s", remedy=self._words())
            time.sleep(0.01)
        return time.monotonic() - start

    def _words(self) -> str:
        return "\n".join(f"{log.stem}: {log.read_text()[-300:]}" for log in sorted(self.run.scratch.glob("*.log")))


def over() -> dict[str, int]:
    """Return how many publishers are read over which broker."""
    status = status_of_router(METRICS_PORT)
    return dict(Counter(feed["over"] for feed in status.get("feeds", ()) if feed["read"]))


def write_files(scratch: Path) -> None:
    """Write certificates, the token, and the settings of the router and of both brokers."""
    authority = trustme.CA()
    issued = authority.issue_cert(ROUTER_ADDRESS)
    authority.cert_pem.write_to_path(scratch / "ca.pem")
    (scratch / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(scratch / "tls.key")
    (scratch / "token").write_text(_TOKEN)
    subscriptions: list[dict[str, Any]] = [
        {"endpoint": f"tcp://{WORKERS_ADDRESS}:{port}", "dynamo_namespace": "dynamo", "topics": list(TOPICS)}
        for port in PORTS
    ]
    subscriptions[0]["expose"] = f"127.0.0.1:{EXPOSED_PORT}"
    router = {
        "listen": f"{ROUTER_ADDRESS}:{BUS_PORT}",
        "certificate": str(scratch / "tls.crt"),
        "private_key": str(scratch / "tls.key"),
        "token_file": str(scratch / "token"),
        "subscriptions": subscriptions,
        "metrics_listen": f"127.0.0.1:{METRICS_PORT}",
    }
    (scratch / "router.yaml").write_text(json.dumps(router))
    for number, name in enumerate(("gpu-a", "gpu-b")):
        broker = {
            "bus_url": f"https://{ROUTER_ADDRESS}:{BUS_PORT}",
            "client_id": name,
            "kubernetes_namespace": NAMESPACE,
            "dynamo_namespaces": ["dynamo"],
            "token_file": str(scratch / "token"),
            "ca_bundle": str(scratch / "ca.pem"),
            "allowed_cidrs": [f"{WORKERS_ADDRESS}/32"],
            "metrics_listen": f"127.0.0.1:{9_470 + number}",
        }
        (scratch / f"{name}.yaml").write_text(json.dumps(broker))


def start_broker(story: Story, name: str) -> Program:
    """Start a broker, and return when the router has it."""
    scratch = story.run.scratch
    line = ["-m", "kura_shaper", "event-broker", "--config", str(scratch / f"{name}.yaml")]
    made = story.run.start(name, BROKERS, [*line, "--kubeconfig", str(scratch / "kubeconfig")])
    sessions = lambda: [each["client_id"] for each in status_of_router(METRICS_PORT).get("sessions", ())]  # noqa: E731
    story.until(lambda: name in sessions(), f"broker {name}")
    return made


def tell(story: Story) -> None:
    """The story itself."""
    why = route_from_router_to_workers()
    story.note("route from the router to the workers", why or "there is one", holds=bool(why))
    workers = story.run.start("workers", WORKERS, [str(_HERE / "workers.py"), WORKERS_ADDRESS, *map(str, PORTS)])
    workers.line()
    config = str(story.run.scratch / "router.yaml")
    router = story.run.start("router", ROUTER, ["-m", "kura_shaper", "event-bus", "--config", config, "--json"])
    reading = threading.Thread(target=story.events.read, args=[router], daemon=True)
    reading.start()
    first = start_broker(story, "gpu-a")
    second = start_broker(story, "gpu-b")
    even = {"gpu-a": 2, "gpu-b": 2}
    story.until(lambda: over() == even, "an even share")
    before = story.events.total
    time.sleep(_FLOW_S)
    rate = (story.events.total - before) / _FLOW_S
    story.note("events through two brokers", f"{rate:.0f}/s, 2 publishers each", holds=rate > 0)
    found, holds = through_port()
    story.note("an unmodified SUB socket on the exposed port", found, holds=holds)
    kill(story, first)
    back(story)
    leave(story, second)
    assert workers.process.stdin is not None
    workers.process.stdin.close()
    published = workers.line()["published"]
    time.sleep(0.5)
    router.process.terminate()
    status = router.process.wait(30)
    reading.join(5)
    story.note("the router's exit status", str(status), holds=status == 0)
    account(story, {(int(port), topic): number for port, each in published.items() for topic, number in each.items()})


def kill(story: Story, broker: Program) -> None:
    """Kill a broker, and see the other one take over."""
    lost = story.events.missed.total()
    broker.process.kill()
    took_s = story.until(lambda: over() == {"gpu-b": 4}, "the take-over")
    story.note("gpu-a killed: gpu-b reads all 4 after", f"{took_s * 1_000:.0f} ms", holds=took_s < 1.0)
    time.sleep(_FLOW_S)
    gaps = story.events.missed.total() - lost
    story.note("events lost by the kill, as the gaps say", str(gaps), holds=True)


def back(story: Story) -> None:
    """Let it come back, and take its share again without a loss."""
    lost = story.events.missed.total()
    start_broker(story, "gpu-a")
    story.until(lambda: over() == {"gpu-a": 2, "gpu-b": 2}, "an even share")
    time.sleep(_FLOW_S)
    gaps = story.events.missed.total() - lost
    story.note("gpu-a back: its share moved to it, events lost", str(gaps), holds=gaps == 0)


def leave(story: Story, broker: Program) -> None:
    """Let the other one leave in good order, as a rollout does."""
    lost = story.events.missed.total()
    broker.process.terminate()
    status = broker.process.wait(40)
    story.until(lambda: over() == {"gpu-a": 4}, "the hand-over")
    time.sleep(_FLOW_S)
    gaps = story.events.missed.total() - lost
    story.note(
        "gpu-b told to stop: handed over, events lost", f"{gaps}, exit status {status}", holds=gaps == 0 == status
    )


def through_port() -> tuple[str, bool]:
    """Read some events with libzmq alone, in the router's namespace."""
    with inside(NETNS_DIR / ROUTER), zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.rcvtimeo = 10_000
        subscriber.subscribe(TOPICS[0])
        subscriber.connect(f"tcp://127.0.0.1:{EXPOSED_PORT}")
        try:
            numbers = [decode_event(subscriber.recv_multipart()).sequence for _ in range(100)]
        except zmq.Again:
            return "nothing came", False
    in_order = numbers == list(range(numbers[0], numbers[0] + 100))
    return f"100 events, {'in order' if in_order else 'out of order'}", in_order


def account(story: Story, published: dict[tuple[int, str], int]) -> None:
    """Compare what was published with what came and with what was said to be missing."""
    events, wrong = story.events, []
    for key, number in published.items():
        numbers = events.numbers.get(key, [])
        whole = number - numbers[0] if numbers else -1
        if not numbers or len(numbers) + events.missed[key] != whole or numbers != sorted(set(numbers)):
            wrong.append(key)
    total, missed = events.total, events.missed.total()
    words = f"{total} came once each, {missed} counted as missing"
    if wrong:
        words += f", which is not what was published: {wrong}"
    story.note(f"accounts of {len(published)} publishers and topics", words, holds=not wrong and total > 0)
    said = "".join(log.read_text(errors="replace") for log in story.run.scratch.glob("*.log"))
    story.note("the token in any log", "no" if _TOKEN not in said else "YES", holds=_TOKEN not in said)


def show(rows: list[tuple[str, str, bool]], *, served_by: str, took_s: float, as_json: bool) -> int:
    """Print the table and the verdict; return the exit status."""
    holds = all(row[2] for row in rows)
    if as_json:
        checks = [{"check": what, "found": found, "holds": is_so} for what, found, is_so in rows]
        print(json.dumps({"checks": checks, "metadata": served_by, "verdict": "pass" if holds else "fail"}, indent=2))
        return 0 if holds else 1
    width = max(len(row[0]) for row in rows)
    for what, found, is_so in rows:
        print(f"{'ok  ' if is_so else 'FAIL'}  {what.ljust(width)}  {found}")
    print(f"\nmetadata from {served_by}; {took_s:.0f} s\nverdict: {'pass' if holds else 'FAIL'}")
    return 0 if holds else 1


def work(*, as_json: bool) -> int:
    """Run it all, within namespaces of the run's own."""
    start = time.monotonic()
    make_place()
    write_files(SCRATCH_DIR)
    endpoints = [f"tcp://{WORKERS_ADDRESS}:{port}" for port in PORTS]
    told = [metadata(f"worker-{number}", endpoints[number * 2 : number * 2 + 2]) for number in range(2)]
    with api_server(told, SCRATCH_DIR / "kubeconfig") as served_by:
        run = Run(SCRATCH_DIR)
        with run.stack:
            story = Story(run)
            tell(story)
    return show(story.rows, served_by=served_by, took_s=time.monotonic() - start, as_json=as_json)


def main() -> int:
    """Take the command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo-broker", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else there")
    options = parser.parse_args()
    try:
        return run_isolated(lambda: work(as_json=options.json))
    except KuraShaperError as error:
        sys.stderr.write(f"demo-broker: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
