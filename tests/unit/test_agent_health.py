"""The agent's web server and what its probes are told: dead only when the loop stands still, ready when it is kept."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest
from agent_view import IN_STEP, SECOND, agent_view, device_view

from kura_shaper.agent.health import Health, HealthServer
from kura_shaper.agent.keeper import Verdict
from kura_shaper.agent.marker import Disabled
from kura_shaper.agent.source import Told
from kura_shaper.clock import FakeClock
from kura_shaper.errors import UsageError
from kura_shaper.kernel.prove import Proof
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tree.model import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.agent.view import AgentView


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000 * SECOND)


@pytest.fixture
def view(clock: FakeClock) -> AgentView:
    return agent_view(clock)


@pytest.fixture
def health(view: AgentView, clock: FakeClock) -> Health:
    return Health(view, clock)


# Alive.


def test_an_agent_whose_loop_turns_is_alive_and_one_whose_loop_stands_still_is_dead(
    view: AgentView, clock: FakeClock, health: Health
) -> None:
    clock.wait_ns(60 * SECOND)
    assert health.why_dead() == ""
    clock.wait_ns(SECOND)
    assert "has not turned for 61 s" in health.why_dead()
    assert health.why_not_ready() == health.why_dead()
    view.alive_at_ns = clock.now_ns()
    assert health.why_dead() == ""


def test_a_look_that_never_ends_is_dead_though_the_loop_turns(
    view: AgentView, clock: FakeClock, health: Health
) -> None:
    view.look_began_ns = clock.now_ns()
    clock.wait_ns(61 * SECOND)
    view.alive_at_ns = clock.now_ns()
    assert "a look has taken 61 s" in health.why_dead()
    view.look_began_ns = 0
    assert health.why_dead() == ""


def test_a_look_that_ends_while_it_is_asked_about_is_not_taken_for_a_long_one(clock: FakeClock) -> None:
    class Ending:
        """A view whose look ends right after its beginning was read."""

        def __init__(self) -> None:
            self.alive_at_ns = clock.now_ns()
            self.readings = [clock.now_ns(), 0, 0]

        @property
        def look_began_ns(self) -> int:
            return self.readings.pop(0)

    ending: Any = Ending()
    assert Health(ending, clock).why_dead() == ""


def test_neither_a_bad_source_nor_a_kernel_that_refuses_is_a_reason_to_start_again(
    view: AgentView, health: Health
) -> None:
    view.told, view.waiting_for, view.problems = Told(problems=("x",)), "a tenants document", ("y",)
    view.disabled = Disabled("z")
    for verdict in Verdict:
        view.devices["eth0"].looked = replace(IN_STEP, verdict=verdict)
        assert health.why_dead() == ""


# Ready.


def test_an_agent_in_step_is_ready(health: Health) -> None:
    assert health.why_not_ready() == ""


def test_each_reason_not_to_be_ready_is_told(view: AgentView, health: Health) -> None:
    device = view.devices["eth0"]
    device.looked = None
    assert health.why_not_ready() == "eth0: not looked at yet"
    device.looked = replace(IN_STEP, verdict=Verdict.FAILED, reasons=("add class: EPERM", "more"))
    assert health.why_not_ready() == "eth0: add class: EPERM; more"
    view.waiting_for = "this node's budget"
    assert health.why_not_ready() == "waiting for this node's budget"
    view.disabled = Disabled("incident 4711")
    assert health.why_not_ready() == "held off: incident 4711"


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("observes", [False, True])
def test_readiness_goes_by_the_last_look(view: AgentView, health: Health, verdict: Verdict, observes: bool) -> None:
    view.observes = observes
    view.devices["eth0"].looked = replace(IN_STEP, verdict=verdict, reasons=("why",))
    # An agent that was held off until now has its first look still to come.
    is_ready = verdict.is_well or (observes and verdict is Verdict.WOULD_CHANGE)
    assert (health.why_not_ready() == "") is is_ready


def test_one_device_that_fails_is_enough(clock: FakeClock) -> None:
    failed = replace(IN_STEP, verdict=Verdict.UNKNOWN, reasons=("no reading",))
    view = agent_view(clock, eth0=device_view(clock), eth1=device_view(clock, name="eth1", looked=failed))
    assert Health(view, clock).why_not_ready() == "eth1: no reading"


# The server.


@contextmanager
def serving(view: AgentView, clock: FakeClock, host: str = "127.0.0.1") -> Iterator[HealthServer]:
    server = HealthServer(Endpoint(host, 0), view, clock, closes_within_s=0.01)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server(view: AgentView, clock: FakeClock) -> Iterator[HealthServer]:
    with serving(view, clock) as made:
        yield made


def ask(server: HealthServer, path: str, host: str = "127.0.0.1", **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection(host, server.port, timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


def test_each_page_is_there_and_others_say_which_are(server: HealthServer) -> None:
    assert ask(server, "/healthz")[::2] == (200, "ok\n")
    assert ask(server, "/readyz")[::2] == (200, "ok\n")
    assert ask(server, "/metrics?x=1")[0] == 200
    assert ask(server, "/")[::2] == (404, "/metrics /healthz /readyz /statusz\n")
    assert ask(server, "/../../etc/passwd")[0] == 404


def test_probes_get_the_reason_with_the_status(server: HealthServer, view: AgentView, clock: FakeClock) -> None:
    view.waiting_for = "a tenants document"
    assert ask(server, "/readyz")[::2] == (503, "waiting for a tenants document\n")
    assert ask(server, "/healthz")[0] == 200
    clock.wait_ns(100 * SECOND)
    assert ask(server, "/healthz")[0] == 500


def test_metrics_come_in_the_format_that_is_asked_for(server: HealthServer) -> None:
    _, kind, body = ask(server, "/metrics")
    assert kind.startswith("text/plain")
    assert "# EOF" not in body
    _, kind, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_the_status_page_is_json_with_all_that_a_person_asks(server: HealthServer, view: AgentView) -> None:
    view.devices["eth0"].looked = replace(
        IN_STEP, shape=Shape.MQ, proof=Proof(is_proven=False, reason="r"), operations=("o",) * 1000, foreign=("tcx",)
    )
    view.disabled = Disabled("incident 4711", "eve", "now")
    status, kind, body = ask(server, "/statusz")
    found = json.loads(body)
    assert (status, kind) == (200, "application/json")
    assert (found["ready"], found["reason"]) == (False, "held off: incident 4711")
    assert found["disabled"] == {"reason": "incident 4711", "who": "eve", "at": "now"}
    assert found["source"] == {"valid": True, "age_s": 0.0, "tenants": 2, "problems": []}
    device = found["devices"]["eth0"]
    assert (device["verdict"], device["shape"], device["budget"]) == ("in step", "mq", "3G")
    assert device["steering"] == {"is_proven": False, "reason": "r"}
    assert len(device["operations"]) == 50


def test_what_no_encoding_has_breaks_no_answer(server: HealthServer, view: AgentView) -> None:
    view.waiting_for = view.disabled = None  # type: ignore[assignment]
    view.devices["eth0"].looked = replace(IN_STEP, verdict=Verdict.FAILED, reasons=("\ud800\r\nX: y",))
    assert ask(server, "/readyz")[0] == 503
    assert ask(server, "/statusz")[0] == 200
    assert ask(server, "/metrics")[0] == 200


def test_it_listens_on_ipv6_too(view: AgentView, clock: FakeClock) -> None:
    with serving(view, clock, "::1") as made:
        assert ask(made, "/healthz", "::1")[0] == 200


def test_no_name_server_is_asked_on_the_way(view: AgentView, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("asked"))
    with serving(view, clock) as made:
        assert ask(made, "/healthz")[0] == 200


def test_an_address_that_is_taken_or_not_ours_is_refused_by_name(view: AgentView, clock: FakeClock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            HealthServer(Endpoint("127.0.0.1", port), view, clock)
    with pytest.raises(UsageError, match=r"192.0.2.1:80"):
        HealthServer(Endpoint("192.0.2.1", 80), view, clock)


def test_whoever_opens_a_connection_and_says_nothing_holds_up_nobody(server: HealthServer) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        began = time.monotonic()
        assert ask(server, "/healthz")[0] == 200
        assert time.monotonic() - began < 2


def test_there_are_only_so_many_threads(server: HealthServer) -> None:
    server._server._places = threading.BoundedSemaphore(5)
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(30)]
        for each in silent[10:]:
            each.settimeout(5)
            assert each.recv(1) == b""
        assert threading.active_count() <= before + 5


@pytest.mark.parametrize(
    "request_bytes", [b"\x00" * 100_000, b"GET " + b"x" * 100_000, b"BREW / HTTP/1.1\r\n\r\n", b""]
)
def test_garbage_ends_the_connection_and_nothing_else(server: HealthServer, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        try:
            client.sendall(request_bytes)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65_536):
                pass
        except OSError:
            pass
    assert ask(server, "/healthz")[0] == 200
