"""What is at either end of brokers in pods, a router outside of the cluster and publishers, and what a person sees.

All addresses are those that the manifests have as shipped, and the node has them on its own loopback.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import trustme
import zmq
from event_broker_manifests import IDENTITY
from manifest_tools import ROOT, tool
from node_rig import Node, is_well, until
from router_rig import TOPIC, ZmqPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMESPACE, IDENTITIES = "event-broker", ("gpu-a-1", "gpu-a-2")
ROUTER, ROUTER_NAME = "203.0.113.10", "router.example.net"
# In the network of the pods, but on no pod: only who is in allowed_cidrs is dialled.
PUBLISHERS = "10.244.9.1"
_BUS_PORT, _METRICS_PORT, EXPOSED_PORT = 8443, 9465, 7001
_EVERY_S = 0.005
# However the tests end, such a program ends with them.
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class Publishers:
    """Sockets of libzmq that publish numbered events all the time."""

    def __init__(self, count: int) -> None:
        self._sockets = [ZmqPublisher(number, host=PUBLISHERS) for number in range(count)]
        self.endpoints = [each.endpoint for each in self._sockets]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self) -> Publishers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _publish(self) -> None:
        while not self._over.wait(_EVERY_S):
            for each in self._sockets:
                each.publish()


class Router:
    """The command `kura-shaper event-bus`, where brokers look for it. It may be ended and begun anew."""

    def __init__(self, directory: Path, endpoints: list[str]) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        authority = trustme.CA()
        issued = authority.issue_cert(ROUTER_NAME)
        authority.cert_pem.write_to_path(str(directory / "router-ca.pem"))
        files = {"certificate": directory / "tls.crt", "private_key": directory / "tls.key"}
        files["certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(files["private_key"]))
        wanted: list[dict[str, Any]] = [
            {"endpoint": each, "dynamo_namespace": "dynamo", "topics": [TOPIC]} for each in endpoints
        ]
        wanted[0]["expose"] = f"127.0.0.1:{EXPOSED_PORT}"
        settings = {
            **{key: str(path) for key, path in files.items()},
            "listen": f"{ROUTER}:{_BUS_PORT}",
            "metrics_listen": f"127.0.0.1:{_METRICS_PORT}",
            "token_file": str(directory / "tokens"),
            "subscriptions": wanted,
        }
        (directory / "bus.yaml").write_text(json.dumps(settings))

    def let_in(self, *tokens: str) -> None:
        """Let in whoever has one of these tokens."""
        beside = self._directory / "tokens.new"
        beside.write_text("".join(f"{each}\n" for each in tokens))
        beside.replace(self._directory / "tokens")

    def start(self) -> None:
        """Return when it listens."""
        config = str(self._directory / "bus.yaml")
        words = (*_WITH_US, sys.executable, "-m", "kura_shaper", "event-bus", "--config", config, "--quiet")
        with (self._directory / "router.log").open("ab") as log:
            # A session of its own: an interrupt at the terminal is for pytest.
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )
        until(lambda: self.status() is not None, what=lambda: self.logged()[-5:])

    def kill(self) -> None:
        """End it without a word to anybody."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def logged(self) -> list[dict[str, Any]]:
        """Return all that it ever said."""
        return _lines_of(self._directory / "router.log")

    def status(self) -> dict[str, Any] | None:
        """Return what it shows a person; None when it does not run."""
        with suppress(OSError):
            return dict(json.loads(fetched(f"http://127.0.0.1:{_METRICS_PORT}/statusz")))
        return None

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Return the session of each client."""
        return {each["client_id"]: each for each in (self.status() or {}).get("sessions", ())}

    def feeds(self) -> list[dict[str, Any]]:
        return list((self.status() or {}).get("feeds", ()))

    def readers(self) -> list[str | None]:
        """Return over which client each publisher is read."""
        return [each["over"] if each["read"] else None for each in self.feeds()]

    def received(self) -> list[int]:
        """Return how many events of each publisher came; of one without any, none."""
        return [sum(known["received"] for known in each["sequences"]) for each in self.feeds()]

    def missed(self) -> int:
        """Return how many events are missing."""
        return sum(known["missed"] for each in self.feeds() for known in each["sequences"])

    def goes_on(self) -> None:
        """Wait until each publisher has been heard anew."""
        before = self.received()

        def all_are() -> bool:
            now = self.received()
            return len(now) == len(before) and all(map(int.__gt__, now, before))

        until(all_are, what=self.feeds)

    def shares(self, *clients: str) -> None:
        """Wait until every publisher is read, by all of these clients and no other, and no stream is on its way."""

        def is_so() -> bool:
            status = self.status() or {"feeds": (), "ports": (), "sessions": ()}
            wanted = len(status["feeds"]) + sum(port["connections"] for port in status["ports"])
            streams = [stream for session in status["sessions"] for stream in session["streams"]]
            return len(streams) == wanted and set(self.readers()) == set(clients)

        until(is_so, what=lambda: (self.status(), self.logged()[-10:]))


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


@contextmanager
def hearing_by_the_port() -> Iterator[zmq.Socket[bytes]]:
    """Have an unmodified subscriber on the router's local port: a stream that only its reader or a broker ends."""
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVTIMEO, 30_000)
        reader.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        reader.connect(f"tcp://127.0.0.1:{EXPOSED_PORT}")
        reader.recv_multipart()
        yield reader


def has_ended(pod: dict[str, Any]) -> bool:
    """Whether a pod is to go, and nothing of it runs any more."""
    states = [each["state"] for each in pod["status"].get("containerStatuses", ())]
    # A kubelet of 1.20 that has already removed a container says that it waits.
    return "deletionTimestamp" in pod["metadata"] and bool(states) and not any("running" in each for each in states)


class Brokers:
    """The brokers' pods, as the API tells of them and as they tell of themselves."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.begin("events", "ctr", "--namespace", "k8s.io", "events")

    def pods(self, identity: str) -> list[dict[str, Any]]:
        """Return the pods of an identity that have not ended."""
        found = self.node.pods(NAMESPACE, f"{IDENTITY}={identity}")
        for each in filter(has_ended, found):
            # A kubelet of 1.20 takes its next cleaning of sandboxes, once a minute, to let go of it.
            name = each["metadata"]["name"]
            self.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found", "--wait=false")
        return [each for each in found if not has_ended(each)]

    def pod(self, identity: str, *, other_than: str = "") -> dict[str, Any]:
        """Return the pod of an identity once that is ready and the only one."""

        def only() -> dict[str, Any] | None:
            found = self.pods(identity)
            is_it = len(found) == 1 and is_well(found[0]) and found[0]["metadata"]["name"] != other_than
            return found[0] if is_it else None

        pod: dict[str, Any] = until(only, what=lambda: self.told(identity))
        return pod

    def end_of(self, pod: dict[str, Any]) -> int | None:
        """Return the status that a pod's program ended with, by containerd, which never misses it; None before."""
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        exits = (self.node.directory / "node" / "events.log").read_text().split(" /tasks/exit ")[1:]
        found = [json.loads(each.partition("\n")[0]) for each in exits if "\n" in each]
        # A program that was begun beside it has an id of its own.
        ends = [each.get("exit_status", 0) for each in found if each["id"] == each["container_id"] == container]
        return ends[0] if ends else None

    def is_started(self, identity: str, *, other_than: str) -> bool:
        """Whether an identity has another pod than that one, and its program answers."""
        found = [pod for pod in self.pods(identity) if pod["metadata"]["name"] != other_than]
        return any(each["started"] for pod in found for each in pod["status"].get("containerStatuses", ()))

    def told(self, identity: str) -> str:
        """Return what may be why a pod is not as it should be."""
        events = self.node.kubectl("--namespace", NAMESPACE, "get", "events")
        return events + self.said(identity)

    def said(self, identity: str) -> str:
        """Return the log of an identity's pod; "" while there is none."""
        return self.kubectl("logs", f"--selector={IDENTITY}={identity}", "--tail=-1", check=False)

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return self.node.kubectl("--namespace", NAMESPACE, *words, stdin=stdin, check=check)

    def ask(self, identity: str, path: str) -> str:
        """Return one of a pod's own pages."""
        return fetched(f"http://{self.pods(identity)[0]['status']['podIP']}:9464{path}")

    def status(self, identity: str) -> dict[str, Any]:
        return dict(json.loads(self.ask(identity, "/statusz")))

    def counted(self, identity: str, name: str) -> float:
        """Return one of a pod's metrics, with the labels that it is said with."""
        start = f"continuum_event_broker_{name} "
        (line,) = [each for each in self.ask(identity, "/metrics").splitlines() if each.startswith(start)]
        return float(line.removeprefix(start))

    @contextmanager
    def watching(self, identity: str) -> Iterator[Watched]:
        """Have everything that happens to the pods of an identity, and all that they say from now on."""
        kubeconfig = ("--kubeconfig", self.node.cluster.admin_kubeconfig, "--namespace", NAMESPACE)
        pod = self.pod(identity)["metadata"]["name"]
        events, log = (self.node.directory / f"watched.{name}" for name in ("events", "log"))
        watch = (
            "get",
            "pods",
            f"--selector={IDENTITY}={identity}",
            "--watch",
            "--output-watch-events",
            "--output=json",
        )
        with ExitStack() as stack:
            for words, path in ((watch, events), (("logs", "--follow", pod), log)):
                file = stack.enter_context(path.open("wb"))
                command = (*_WITH_US, tool("kubectl"), *kubeconfig, *words)
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
                stack.callback(process.wait)
                stack.callback(process.kill)
            until(lambda: events.stat().st_size and log.stat().st_size)
            yield Watched(events, log)


class Watched:
    """What happened to some pods, in its order."""

    def __init__(self, events: Path, log: Path) -> None:
        self._events, self._log = events, log

    def said(self) -> list[dict[str, Any]]:
        """Return what the pod said that was there at the beginning."""
        return _lines_of(self._log)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return each change as its kind and the pod."""
        return [(each["type"], each["object"]) for each in _lines_of(self._events)]

    def steps(self) -> list[tuple[str, str]]:
        """Return which pods came and went."""
        return [(kind, pod["metadata"]["name"]) for kind, pod in self.events() if kind in ("ADDED", "DELETED")]

    def reasons(self, name: str) -> set[str]:
        """Return how a pod's container ended. A kubelet of 1.20 may remove it before it has told that."""
        states = [
            status["state"]
            for _, pod in self.events()
            for status in pod["status"].get("containerStatuses", ())
            if pod["metadata"]["name"] == name
        ]
        return {each["terminated"]["reason"] for each in states if each.get("terminated", {}).get("reason")}


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one in each line, but for a last one that is not yet whole."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
