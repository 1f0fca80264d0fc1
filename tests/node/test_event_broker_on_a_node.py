"""Event brokers as they are shipped, in the image that the Dockerfile makes, on a real kubelet, with a real router.

Not as shipped: what a server of 1.20 does not have is left out, and the router's name is in the pods' /etc/hosts, since
nobody here answers for names. Nor does anybody enforce NetworkPolicies here.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

sys.path += [str(Path(__file__).parents[1] / each) for each in ("broker", "kube", "manifests", "unit")]

from broker_view import (
    IDENTITIES,
    NAMESPACE,
    PUBLISHERS,
    ROUTER,
    ROUTER_NAME,
    Brokers,
    Publishers,
    Router,
    hearing_by_the_port,
)
from dwm import PATH, channel, resource
from event_broker_cluster import as_of_old
from event_broker_manifests import BUNDLE
from manifest_tools import ROOT, run, tool
from node_rig import Node, images, is_well, node_prefix, running_node, until
from node_view import shown, typed
from pause_image import write_pause_image

if TYPE_CHECKING:
    from collections.abc import Iterator

# Nothing may run beside it: a kubelet and its whole control plane want both processors for themselves.
pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.kube, pytest.mark.traffic]

FIRST, SECOND = IDENTITIES
COUNT = 4
README = BUNDLE / "README.md"
# Run in a pod: the folders that it may write to.
WRITABLE = """
import os
for where, folders, _ in os.walk("/"):
    folders[:] = [each for each in folders if os.path.join(where, each) != "/proc"]
    if os.access(where, os.W_OK):
        print(where)
"""


@dataclass(frozen=True, slots=True)
class World:
    """All that there is, and how it is brought there."""

    node: Node
    brokers: Brokers
    router: Router
    directory: Path

    def apply(self) -> None:
        """Apply the overlay `two`."""
        self.node.kubectl("apply", "--filename", "-", stdin=overlay(self.directory))

    def type(self, words: str, identity: str = FIRST) -> str:
        """Return what a command of the README says, in the directory with the tokens and the router's authority."""
        return typed(self.node, shown(words, README).replace(FIRST, identity), self.directory)

    def replace_token(self, identity: str, token: str) -> None:
        """Give an identity another token."""
        (self.directory / f"new-token-of-{identity}").write_text(f"{token}\n")
        self.type("=new-token-of-", identity)


@functools.cache
def overlay(directory: Path) -> str:
    """Return what Kustomize makes of the overlay `two` for this node."""
    where = directory / "overlay"
    where.mkdir()
    alias = [
        {"op": "add", "path": "/spec/template/spec/hostAliases", "value": [{"ip": ROUTER, "hostnames": [ROUTER_NAME]}]}
    ]
    patch = {"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(alias)}
    whole = {"resources": [os.path.relpath(BUNDLE / "overlays" / "two", where.resolve())], "patches": [patch]}
    (where / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    return as_of_old(run(tool("kubectl"), "kustomize", where).stdout)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return a node with both identities of the overlay `two`, and a router that reads four publishers over them."""
    directory = tmp_path_factory.mktemp("broker")
    built = images("event-broker")
    pause = write_pause_image(directory / "pause.tar", node_prefix() / "root" / "usr" / "bin" / "busybox")
    with running_node(directory, pause, *built) as node:
        for address in (ROUTER, PUBLISHERS):
            run("ip", "address", "add", f"{address}/32", "dev", "lo")
        for definitions in (ROOT / "tests" / each for each in ("manifests/definitions.yaml", "kube/dwm_crd.yaml")):
            node.kubectl("apply", "--filename", str(definitions))
            node.kubectl("wait", "--for=condition=Established", "--timeout=30s", "--filename", str(definitions))
        node.kubectl("create", "namespace", "gpu")
        with Publishers(COUNT) as publishers:
            for number, endpoint in enumerate(publishers.endpoints):
                made = resource({"k": channel(endpoint)}, name=f"w{number}")
                del made["metadata"]["resourceVersion"]
                node.cluster.create(PATH.format("gpu"), made)
            found = World(node, Brokers(node), Router(directory, publishers.endpoints), directory)
            try:
                begin(found)
                yield found
            finally:
                found.router.kill()


def begin(world: World) -> None:
    """Install brokers as the README says, and only then have a router: readiness does not wait for one."""
    world.router.let_in(*IDENTITIES)
    for identity in IDENTITIES:
        (world.directory / f"token-of-{identity}").write_text(f"{identity}\n")
    world.type("create namespace event-broker")
    world.type("create secret generic event-broker-ca")
    for identity in IDENTITIES:
        world.type("=token-of-", identity)
    world.apply()
    for identity in IDENTITIES:
        world.brokers.pod(identity)
        assert world.brokers.status(identity)["session"] is None
    world.router.start()
    world.router.shares(*IDENTITIES)


@pytest.fixture
def one_at_a_time(world: World) -> Iterator[None]:
    """See to it that the router has no two sessions of one client, so that none takes another one's place."""
    there, before = set(world.router.sessions()), len(world.router.logged())
    yield
    for each in world.router.logged()[before:]:
        match each["event"]:
            case "started":
                there.clear()
            case "session_began":
                assert each["client_id"] not in there
                there.add(each["client_id"])
            case "session_ended":
                assert each["code"] != "superseded"
                there.remove(each["client_id"])


def test_events_come_to_the_router_over_both_identities(world: World) -> None:
    world.router.shares(*IDENTITIES)
    assert sorted(world.router.readers(), key=str) == [FIRST] * 2 + [SECOND] * 2
    world.router.goes_on()
    found = json.loads(world.type("/statusz"))
    assert found["ready"]
    assert found["session"]["id"]
    assert [stream["state"] for stream in found["session"]["streams"]] == ["open"] * 2
    known = {"resources": COUNT, "publishers": COUNT, "namespaces_synced": 1, "skipped": {}}
    assert found["metadata"] == {**known, "age_s": found["metadata"]["age_s"]}


def test_a_pod_runs_as_nobody_and_has_nothing_to_write_to(world: World) -> None:
    node = world.node
    pid = node.run("pgrep", "--full", "--oldest", "kura-shaper event-broker").strip()
    status = dict(line.split(":\t", 1) for line in node.run("cat", f"/proc/{pid}/status").splitlines() if ":\t" in line)
    assert status["Uid"].split() == status["Gid"].split() == ["65532"] * 4
    assert [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [0] * 5
    # It can't gain any, and a filter of system calls is in force.
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    found = world.brokers.kubectl("exec", f"deployment/event-broker-{FIRST}", "--", "python3", "-c", WRITABLE)
    # In memory, and the pod's own.
    assert set(found.split()) == {"/dev/shm", "/dev/mqueue"}
    own, nodes = (node.run("readlink", f"/proc/{each}/ns/net") for each in (pid, "1"))
    assert own != nodes


def test_the_account_lists_metadata_of_the_watched_namespace_and_nothing_else(world: World) -> None:
    may = PATH.format("gpu")
    may_not = (
        *(PATH.format("default"), "/apis/nvidia.com/v1alpha1/dynamoworkermetadatas", "/api/v1/namespaces/gpu/pods"),
        *("/api/v1/namespaces/event-broker/secrets", "/api/v1/namespaces", "/api/v1/nodes"),
    )
    found = world.node.answers(NAMESPACE, f"deployment/event-broker-{FIRST}", may, *may_not)
    assert found == {may: 200} | dict.fromkeys(may_not, 403)


@pytest.mark.usefixtures("one_at_a_time")
def test_a_pod_is_ready_when_it_knows_the_metadata(world: World) -> None:
    brokers, name = world.brokers, world.brokers.pod(FIRST)["metadata"]["name"]
    world.node.kubectl("--namespace=gpu", "delete", "rolebinding", "event-broker")
    try:
        brokers.kubectl("rollout", "restart", f"deployment/event-broker-{FIRST}")
        until(lambda: brokers.is_started(FIRST, other_than=name), what=lambda: brokers.told(FIRST))
        until(lambda: "metadata_failed" in brokers.said(FIRST), what=lambda: brokers.told(FIRST))
        assert not any(map(is_well, brokers.pods(FIRST)))
        # The other one knows what it knew, and goes on with all of it.
        assert set(world.router.readers()) == {SECOND}
    finally:
        world.apply()
    brokers.pod(FIRST, other_than=name)
    world.router.shares(*IDENTITIES)


@pytest.mark.usefixtures("one_at_a_time")
def test_another_token_is_used_at_the_next_dial_and_no_pod_starts_anew(world: World) -> None:
    router, brokers, pods = world.router, world.brokers, {each: world.brokers.pod(each) for each in IDENTITIES}
    router.let_in("new-1", "new-2")
    world.replace_token(FIRST, "new-1")
    read = ("exec", f"deployment/event-broker-{FIRST}", "--", "cat", "/var/run/secrets/event-broker/token")
    until(lambda: brokers.kubectl(*read) == "new-1\n")
    router.goes_on()
    router.kill()
    router.start()
    until(lambda: FIRST in router.sessions(), what=lambda: brokers.said(FIRST))
    # The other one still has what is no longer taken. That a new one is there is enough for it to be back.
    refused = 'sessions_total{outcome="auth_failed"}'
    until(lambda: brokers.counted(SECOND, refused) > 0, what=lambda: brokers.said(SECOND))
    assert brokers.counted(FIRST, refused) == 0
    world.replace_token(SECOND, "new-2")
    until(lambda: SECOND in router.sessions(), what=lambda: brokers.said(SECOND))
    router.shares(*IDENTITIES)
    for identity, before in pods.items():
        now = brokers.pod(identity)
        assert now["metadata"]["uid"] == before["metadata"]["uid"]
        assert now["status"]["containerStatuses"][0]["restartCount"] == 0
        assert "new-" not in brokers.said(identity)


@pytest.mark.usefixtures("one_at_a_time")
def test_a_rollout_lets_streams_finish_and_only_then_brings_another_pod(world: World) -> None:
    router, brokers = world.router, world.brokers
    router.shares(*IDENTITIES)
    missed = router.missed()
    with hearing_by_the_port() as reader:
        identity = busier(router)
        (other,) = set(IDENTITIES) - {identity}
        pod = brokers.pod(identity)
        name = pod["metadata"]["name"]
        with brokers.watching(identity) as watched:
            brokers.kubectl("rollout", "restart", f"deployment/event-broker-{identity}")
            # The router is told first, and reads everything over the other one before anything ends.
            router.shares(other)
            drained = router.sessions()[identity]
            assert (drained["draining"], len(drained["streams"])) == (True, 1)
            until(lambda: received(router, identity) > drained["streams"][0]["received_bytes"])
            reader.recv_multipart()
            until(lambda: brokers.end_of(pod) is not None, what=lambda: brokers.told(identity))
            assert brokers.end_of(pod) == 0
            brokers.pod(identity, other_than=name)
            router.shares(*IDENTITIES)
            kinds = [(kind, is_it == name) for kind, is_it in watched.steps()]
            assert kinds == [("ADDED", True), ("DELETED", True), ("ADDED", False)]
            said = [each["event"] for each in watched.said()]
            assert said[-3:] == ["stopping", "session_ended", "stopped"]
            assert watched.reasons(name) <= {"Completed"}
        router.goes_on()
    assert router.missed() == missed


def busier(router: Router) -> str:
    """Return over whose session the port's stream is: one more than what is read over it."""
    readers = router.readers()
    (found,) = [name for name, each in router.sessions().items() if len(each["streams"]) > readers.count(name)]
    return found


def received(router: Router, identity: str) -> int:
    """Return how much came over the streams of a client."""
    streams: list[dict[str, Any]] = router.sessions()[identity]["streams"]
    return sum(each["received_bytes"] for each in streams)


def test_a_pod_that_is_deleted_has_a_successor_that_cuts_its_drain_short(world: World) -> None:
    """Unlike a rollout: a ReplicaSet does not wait for what is deleted or evicted to be gone."""
    router, brokers = world.router, world.brokers
    router.shares(*IDENTITIES)
    missed = router.missed()
    with hearing_by_the_port() as reader:
        identity, logged = busier(router), len(router.logged())
        pod = brokers.pod(identity)
        name = pod["metadata"]["name"]
        with brokers.watching(identity) as watched:
            brokers.kubectl("delete", "pod", name, "--wait=false")
            until(lambda: brokers.end_of(pod) is not None, what=lambda: brokers.told(identity))
            assert brokers.end_of(pod) == 0
            assert [(kind, is_it == name) for kind, is_it in watched.steps()][:2] == [("ADDED", True), ("ADDED", False)]
        brokers.pod(identity, other_than=name)
        router.shares(*IDENTITIES)
        assert "superseded" in [each.get("code") for each in router.logged()[logged:]]
        reader.recv_multipart()
    # What is read for events moved as soon as the broker said that it leaves.
    assert router.missed() == missed


@pytest.mark.usefixtures("one_at_a_time")
def test_when_one_identity_goes_the_other_has_all_and_nothing_is_lost(world: World) -> None:
    router, brokers = world.router, world.brokers
    router.shares(*IDENTITIES)
    missed = router.missed()
    brokers.kubectl("delete", f"deployment/event-broker-{FIRST}")
    router.shares(SECOND)
    router.goes_on()
    assert router.missed() == missed
    until(lambda: not brokers.pods(FIRST))
    world.apply()
    router.shares(*IDENTITIES)
    assert router.missed() == missed


@pytest.mark.usefixtures("one_at_a_time")
def test_a_broker_that_is_told_to_end_has_completed_as_the_kubelet_sees_it(world: World) -> None:
    brokers, name = world.brokers, world.brokers.pod(FIRST)["metadata"]["name"]
    kill = "import os, signal; os.kill(1, signal.SIGTERM)"
    brokers.kubectl("exec", name, "--", "python3", "-c", kill)

    def last() -> dict[str, Any]:
        (pod,) = brokers.pods(FIRST)
        found: dict[str, Any] = pod["status"]["containerStatuses"][0]["lastState"].get("terminated", {})
        return found

    until(last, what=lambda: brokers.told(FIRST))
    assert (last()["exitCode"], last()["reason"]) == (0, "Completed")
    assert brokers.pod(FIRST)["metadata"]["name"] == name
    world.router.shares(*IDENTITIES)
    # Somebody who looks for why finds both.
    assert '"event": "stopped"' in world.type("--previous")
    assert "Completed" in world.type("describe pods")
