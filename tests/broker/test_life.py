"""A broker's life: its first request, terms, silence, drains, errors, reconnects, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from bus_rig import TOKEN, Peer, Rig, RouterRig, Script, in_a_loop, loop, running, server_context, until
from hpack import Encoder

from kura_shaper.broker.health import BrokerHealth
from kura_shaper.broker.protocol import events
from kura_shaper.broker.protocol.codec import encode_object
from kura_shaper.broker.protocol.codes import DrainReason, SessionCode
from kura_shaper.broker.protocol.events import HeartbeatSeen
from kura_shaper.broker.protocol.frames import Draining, StreamClosed, Welcome, WelcomeLimits
from kura_shaper.broker.service import OnTerminal
from kura_shaper.broker.settings import BusUrl
from kura_shaper.errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path


def welcome(**changes: Any) -> Welcome:
    """Return the terms of a router, some of them others."""
    made = Welcome(session_id="s-01", limits=WelcomeLimits(4_096, 1 << 20))
    return replace(made, **changes)


def drain(peer: Peer, reason: DrainReason, deadline_ms: int = 0) -> None:
    peer.session.drain(reason, deadline_ms)
    peer.flush()


def dials(rig: Rig) -> int:
    return len(rig.router.peers)


# The first request.


@pytest.mark.case("EB7")
@in_a_loop
async def test_the_first_request_is_the_sessions_with_the_token_and_hello_is_its_first_frame() -> None:
    async with running() as rig:
        peer = await rig.router.peer()
        headers = peer.session_headers
        assert peer.requests[0] == "/bus/v1/session"
        assert (headers[":method"], headers[":scheme"]) == ("POST", "https")
        assert headers["authorization"] == f"Bearer {TOKEN}"
        assert headers["content-type"] == headers["accept"] == "application/vnd.continuum.bus.v1"
        assert headers["x-bus-protocol"] == "1"
        hello = peer.told[0].hello
        assert (hello.role, hello.client_id, hello.kubernetes_namespace) == ("broker", "gpu-a-1", "gpu")
        assert hello.dynamo_namespaces == ("dynamo",)
        assert len(hello.instance_id) == 32


@pytest.mark.case("EB8")
@in_a_loop
async def test_the_token_is_in_no_table_of_hpack() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        await peer.opened(publisher.endpoint)
        assert "authorization" in peer.never_indexed


@pytest.mark.case("EB8")
@in_a_loop
async def test_the_token_is_in_no_line_of_the_log_and_no_status(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "kura_shaper"):
        async with running() as rig:
            peer, publisher = await rig.router.peer(), await rig.publisher()
            await peer.opened(publisher.endpoint)
            await peer.refusal("ipc://x")
            status = json.dumps(BrokerHealth(rig.broker, NoDirectory()).status())  # type: ignore[arg-type]
            peer.abort()
            await rig.again()
            address = publisher.endpoint
    said = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "session_established" in said
    assert TOKEN not in said
    assert TOKEN not in status
    assert address in status


class NoDirectory:
    """A directory that says nothing."""

    resources = references = namespaces_synced = 0
    age_s = 0.0

    class counts:  # noqa: N801
        skipped: dict[str, int] = {}  # noqa: RUF012


@pytest.mark.case("EB1")
@pytest.mark.case("EB2")
@in_a_loop
async def test_nothing_is_dialled_before_the_metadata_is_known_and_ready_means_just_that() -> None:
    async with running() as rig:
        rig.directory.is_synced.clear()
        health = BrokerHealth(rig.broker, NoDirectory())  # type: ignore[arg-type]
        for _ in range(50):
            await asyncio.sleep(0)
        assert dials(rig) == 0
        assert "not yet" in health.why_not_ready()
        rig.directory.is_synced.set()
        peer = await rig.router.peer()
        assert health.why_not_ready() == ""
        # The bus is away, and this broker is ready all the same.
        await rig.router.stop()
        await until(lambda: peer.lost)
        assert health.why_not_ready() == ""
        await rig.router.start()


# Terms and silence.


@pytest.mark.case("EB9")
@in_a_loop
async def test_the_routers_terms_are_in_force_and_those_out_of_bounds_end_the_session() -> None:
    script = Script(welcome=welcome(limits=WelcomeLimits(1, 16_384)))
    async with running(script) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        await peer.opened(publisher.endpoint)
        say = {"kind": "zmq_endpoint", "endpoint": publisher.endpoint, "dynamo_namespace": "dynamo"}
        peer.say_object({"type": "subscribe", "stream_id": "two", "target": say})
        await until(lambda: rig.broker.counts.refusals["stream_limit"] == 1)
        session = rig.broker.view.session
        assert session is not None
        assert session.protocol.limits.max_stream_buffer_bytes == 16_384
    script = Script(welcome=None)
    async with running(script) as rig:
        await until(lambda: bool(rig.router.peers) and bool(rig.router.peers[0].told))
        limits = {"max_streams": 0, "max_stream_buffer_bytes": 16_384, "max_frame_bytes": 65_536}
        peer = rig.router.peers[0]
        peer.say_bytes(
            encode_object(
                {
                    "type": "welcome",
                    "protocol_version": 1,
                    "session_id": "s",
                    "limits": limits,
                    "heartbeat_interval_ms": 10_000,
                    "idle_timeout_ms": 30_000,
                }
            )
        )
        await until(lambda: bool(peer.frames(events.PeerFailed)))
        assert peer.frames(events.PeerFailed)[0].error.code == "protocol_error"
        assert rig.broker.counts.errors_sent["protocol_error"] == 1


@pytest.mark.case("EB11")
@pytest.mark.case("EP10")
@in_a_loop
async def test_a_router_that_says_nothing_loses_its_session_at_the_timeout_also_when_data_flows() -> None:
    async with running(Script(beats=False)) as rig:
        peer, _, connection, stream_id = await rig.stream()
        for second in range(29):
            await loop().advance(1)
            peer.send(stream_id, b"x")
            await until(lambda second=second: len(connection.received) > second)  # type: ignore[misc]
        assert not peer.lost
        await loop().advance(1.5)
        await until(lambda: connection.lost)
        assert rig.broker.counts.session_ends["idle_timeout"] == 1
        assert rig.broker.counts.errors_sent["idle_timeout"] == 1


@in_a_loop
async def test_a_loop_that_was_held_up_hears_first_what_the_router_said_meanwhile() -> None:
    async with running(Script(beats=False)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        streams = [await peer.opened(publisher.endpoint) for _ in range(8)]
        await loop().advance(28)
        # More than is read at once, then the router's heartbeat; and the loop stands still until after the timeout.
        for stream_id in streams:
            peer.send(stream_id, bytes(60_000))
        peer.say_object({"type": "heartbeat", "seq": 1})
        loop().ahead_s += 60
        await until(lambda: rig.broker.counts.heartbeats_received == 1)
        await loop().advance(1)
        assert not peer.lost
        assert rig.broker.counts.session_ends["idle_timeout"] == 0


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"session_status": 0}, "handshake_timeout"),
        ({"welcome": None}, "handshake_timeout"),
        ({"content_type": "text/html"}, "rejected"),
        ({"session_status": 503}, "rejected"),
        ({"session_status": 302}, "rejected"),
        ({"session_status": 401}, "auth_failed"),
        ({"session_status": 404}, "rejected"),
    ],
)
def test_an_attempt_that_comes_to_no_session_is_counted_by_its_kind(changes: Any, outcome: str) -> None:
    @in_a_loop
    async def check() -> None:
        async with running(Script(**changes)) as rig:
            await until(lambda: dials(rig) == 1)
            await until(lambda: bool(rig.router.peers[0].session_http_id))
            await loop().advance(10.5)
            await until(lambda: sum(rig.broker.counts.dials.values()) >= 1)
            assert rig.broker.counts.dials[outcome] >= 1
            assert rig.broker.counts.dials["established"] == 0

    check()


def raw_answer(http_id: int, name: bytes, value: bytes) -> bytes:
    """Return an answer whose head a library would not send."""
    block = Encoder().encode([(b":status", b"200"), (name, value)])
    return len(block).to_bytes(3, "big") + b"\x01\x04" + http_id.to_bytes(4, "big") + block


@in_a_loop
async def test_a_router_whose_answer_is_no_text_loses_its_connection_and_the_log_has_a_line_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "kura_shaper"):
        async with running(Script(answers_streams=False)) as rig:
            peer, publisher = await rig.established(), await rig.publisher()
            stream_id = peer.subscribe(publisher.endpoint)
            await until(lambda: stream_id in peer.streams)
            peer.write_raw(raw_answer(peer.streams[stream_id].http_id, b"x-bus", b"\xff"))
            await until(lambda: rig.broker.counts.session_ends["connection_lost"] == 1)
            await rig.again()
    ended = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "session_ended"]
    assert ended[0]["reason"] == "HTTP/2: UnicodeDecodeError"


def noted(caplog: pytest.LogCaptureFixture, *names: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return level, name and fields of what was logged under some names."""
    return [
        (record.levelname, record.getMessage(), record.__dict__["fields"])
        for record in caplog.records
        if record.getMessage() in names
    ]


@pytest.mark.parametrize("why", [*DrainReason, "stop"])
def test_the_end_of_a_session_that_drains_says_why(why: str, caplog: pytest.LogCaptureFixture) -> None:

    @in_a_loop
    async def check() -> None:
        async with running() as rig:
            peer = await rig.established()
            if why == "stop":
                rig.broker.stop()
            else:
                drain(peer, DrainReason(why))
            await until(lambda: rig.broker.counts.session_ends["drain"] == 1)

    with caplog.at_level(logging.INFO, "kura_shaper"):
        check()
    ((_, _, fields),) = noted(caplog, "session_ended")
    assert fields["reason"] == ("this broker was told to stop" if why == "stop" else f"the router drains: {why}")


@pytest.mark.parametrize("when", ["head", "welcome"])
def test_an_attempt_that_a_stop_ends_is_no_dial_that_failed(when: str, caplog: pytest.LogCaptureFixture) -> None:

    @in_a_loop
    async def check() -> None:
        async with running(Script(session_status=0) if when == "head" else Script(welcome=None)) as rig:
            await until(lambda: dials(rig) == 1 and bool(rig.router.peers[0].session_http_id))
            rig.broker.stop()
            await rig.running
            assert sum(rig.broker.counts.dials.values()) == 0

    with caplog.at_level(logging.INFO, "kura_shaper"):
        check()
    told = noted(caplog, "dial_failed", "dial_given_up", "session_ended")
    assert told == [("INFO", "dial_given_up", {"reason": "this broker was told to stop"})]


@in_a_loop
async def test_a_welcome_that_is_refused_and_a_goodbye_before_it_are_no_sessions() -> None:
    async with running(Script(welcome=None)) as rig:
        await until(lambda: bool(rig.router.peers) and bool(rig.router.peers[0].told))
        rig.router.peers[0].say_object({"type": "welcome", "protocol_version": 7})
        await until(lambda: rig.broker.counts.errors_sent["protocol_error"] == 1)
        again = await rig.again()
        again.go_away()
        await until(lambda: rig.broker.counts.dials["rejected"] == 2)
        assert rig.broker.counts.dials["established"] == 0


# Reconnects.


class Slept:
    """How long a machine has slept, as a test says."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


@in_a_loop
async def test_a_router_that_is_still_there_after_a_sleep_keeps_its_session_and_was_asked_at_once() -> None:
    slept = Slept()
    async with running(Script(beats=False), slept_s=slept) as rig:
        peer = await rig.established()
        slept.seconds += 0.9  # no sleep, but a clock that is being set right
        await loop().advance(1)
        assert rig.broker.counts.heartbeats_sent == 0
        slept.seconds += 3_600
        await loop().advance(1)
        assert rig.broker.counts.heartbeats_sent == 1
        await until(lambda: len(peer.frames(HeartbeatSeen)) == 1)
        session = rig.broker.view.session
        assert session is not None
        await until(lambda: session.link.http.pongs == 1)
        await loop().advance(10)
        assert session is rig.broker.view.session


@in_a_loop
async def test_a_router_that_is_gone_after_a_sleep_is_left_within_seconds() -> None:
    slept = Slept()
    async with running(slept_s=slept) as rig:
        peer = await rig.established()
        peer.stall()
        slept.seconds += 3_600
        await loop().advance(5)
        assert rig.broker.counts.session_ends["idle_timeout"] == 0
        await loop().advance(1)
        assert rig.broker.counts.session_ends["idle_timeout"] == 1
        peer.go_on()


@pytest.mark.case("EB35")
@pytest.mark.case("EP9")
@in_a_loop
async def test_a_router_that_comes_back_is_found_within_one_wait() -> None:
    async with running() as rig:
        peer = await rig.router.peer()
        port = rig.router.port
        await rig.router.stop()
        await until(lambda: peer.lost)
        await loop().advance(300, step_s=1)
        assert rig.broker.counts.dials["dial_failed"] >= 6
        await rig.router.start(port=port)
        began_s = loop().time()
        while dials(rig) < 2:
            await loop().advance(1)
        assert loop().time() - began_s < 62
        await rig.router.peer(2)


@pytest.mark.case("EB35")
@pytest.mark.parametrize("what", ["refused", "tls", "503"])
def test_waits_grow_whatever_it_is_that_fails(what: str) -> None:
    @in_a_loop
    async def check() -> None:
        script = Script(session_status=503) if what == "503" else Script()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        context.set_alpn_protocols(["h2"])
        async with running(script, context=context if what == "tls" else None) as rig:
            if what == "refused":
                await rig.router.stop()
            waits = []
            for number in range(1, 7):
                await until(lambda number=number: sum(rig.broker.counts.reconnects.values()) == number)  # type: ignore[misc]
                waits.append(rig.broker.counts.reconnect_wait_s)
                await loop().advance(waits[-1] + 0.01, step_s=5)
            bounds = [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (30, 60)]
            assert all(least <= wait <= most for wait, (least, most) in zip(waits, bounds, strict=True))
            kind = {"refused": "dial_failed", "tls": "tls_failed", "503": "rejected"}[what]
            assert rig.broker.counts.dials[kind] >= 6
            if what == "refused":
                await rig.router.start()

    check()


@in_a_loop
async def test_a_router_that_says_when_to_come_back_is_not_asked_sooner() -> None:
    async with running(Script(session_status=503, session_headers=(("retry-after", "40"),))) as rig:
        await until(lambda: sum(rig.broker.counts.reconnects.values()) == 1)
        assert rig.broker.counts.reconnect_wait_s == 40


@pytest.mark.case("EB41")
@pytest.mark.parametrize(
    "script",
    [Script(session_status=404), Script(session_status=409), Script(session_status=401), Script(session_status=426)],
    ids=lambda script: str(script.session_status),
)
def test_what_time_will_not_mend_is_tried_twice_a_minute_at_most(script: Script) -> None:
    @in_a_loop
    async def check() -> None:
        async with running(script) as rig:
            await until(lambda: sum(rig.broker.counts.reconnects.values()) == 1)
            await loop().advance(59, step_s=1)
            assert dials(rig) <= 2
            assert sum(rig.broker.counts.terminal_error.values()) == (script.session_status in (404, 426))
            # Until there is a welcome.
            script.session_status = 200
            await loop().advance(61, step_s=1)
            await until(lambda: rig.broker.counts.dials["established"] == 1)
            assert not any(rig.broker.counts.terminal_error.values())

    check()


@in_a_loop
async def test_a_broker_that_is_to_give_up_does_so_when_only_other_settings_will_do() -> None:
    async with running(Script(session_status=404), on_terminal=OnTerminal.GIVE_UP) as rig:
        with pytest.raises(RefusedError, match="404"):
            await rig.running


@pytest.mark.case("EP23")
@in_a_loop
async def test_a_token_that_was_replaced_is_tried_at_once_and_only_once(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    script = Script(session_status=401)
    async with running(script, token_file=token) as rig:
        await until(lambda: sum(rig.broker.counts.reconnects.values()) == 1)
        assert dials(rig) == 1
        await loop().advance(25, step_s=1)
        assert dials(rig) == 1
    async with running(Script(session_status=0), token_file=token) as rig:
        await until(lambda: dials(rig) == 1 and bool(rig.router.peers[0].session_http_id))
        token.write_text("new")
        peer = rig.router.peers[0]
        peer._h2.send_headers(peer.session_http_id, [(":status", "401")], end_stream=True)
        peer.flush()
        await until(lambda: dials(rig) == 2 and bool(rig.router.peers[1].session_http_id))
        assert rig.router.peers[1].session_headers["authorization"] == "Bearer new"
        assert sum(rig.broker.counts.reconnects.values()) == 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_stream_that_is_not_let_in_has_the_next_ones_asked_for_with_the_token_as_it_is_now(
    status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("of-yesterday")

    @in_a_loop
    async def check() -> None:
        async with running(Script(token="of-yesterday", login_status=status), token_file=token) as rig:
            peer, publisher, connection, first = await rig.stream()
            session = rig.broker.view.session
            peer.script.token = "of-today"
            assert await peer.refusal(publisher.endpoint) == "stream_rejected"
            token.write_text(" ")  # what can't be used is not used
            assert await peer.refusal(publisher.endpoint) == "stream_rejected"
            token.write_text("of-today\n")
            # The look is taken when a stream is not let in, so the next one is.
            assert await peer.refusal(publisher.endpoint) == "stream_rejected"
            second = await peer.opened(publisher.endpoint)
            assert peer.streams[second].headers["authorization"] == "Bearer of-today"
            assert peer.streams[second].headers["x-bus-session"] == peer.streams[first].headers["x-bus-session"]
            assert "authorization" in peer.never_indexed
            assert rig.broker.view.session is session
            assert dials(rig) == 1
            await connection.send(b"still here")
            await until(lambda: bytes(peer.streams[first].received) == b"still here")
            status_text = json.dumps(BrokerHealth(rig.broker, NoDirectory()).status())  # type: ignore[arg-type]
            assert "of-today" not in status_text

    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "kura_shaper"):
        check()
    said = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert said.count("token_changed") >= 1
    assert "of-today" not in said
    assert "of-yesterday" not in said


@pytest.mark.case("EP5")
@in_a_loop
async def test_an_authority_that_was_replaced_is_trusted_at_the_next_dial_and_a_bad_file_keeps_the_last(
    tmp_path: Path,
) -> None:
    ca = tmp_path / "ca.pem"
    other = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.issue_cert("127.0.0.1").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    ca.write_bytes(other.cert_pem.bytes())
    async with running(ca_bundle=ca) as rig:
        await until(lambda: rig.broker.counts.dials["tls_failed"] == 1)
        port = rig.router.port
        await rig.router.stop()
        await rig.router.start(port=port, context=context)
        await loop().advance(10, step_s=1)
        await until(lambda: rig.broker.counts.dials["established"] == 1)
        ca.write_text("garbage")
        rig.router.peers[-1].abort()
        await loop().advance(10, step_s=1)
        await until(lambda: rig.broker.counts.dials["established"] == 2)
        assert rig.broker.counts.credential_reloads["failed"] >= 1
        await rig.router.stop()
        await rig.router.start(port=port, context=server_context())
        from bus_rig import authority

        ca.write_bytes(authority().cert_pem.bytes())
        await loop().advance(70, step_s=1)
        await until(lambda: rig.broker.counts.dials["established"] == 3)


@pytest.mark.case("EB37")
@in_a_loop
async def test_a_rebalance_comes_back_at_once_the_next_within_a_minute_does_not_and_one_later_does() -> None:
    async with running() as rig:
        waits = []
        for number, pause_s in ((1, 5), (2, 70), (3, 0)):
            peer = await rig.router.peer(number)
            drain(peer, DrainReason.REBALANCE)
            await until(lambda number=number: sum(rig.broker.counts.reconnects.values()) == number)  # type: ignore[misc]
            waits.append(rig.broker.counts.reconnect_wait_s)
            await loop().advance(waits[-1] + 0.01)
            await rig.router.peer(number + 1)
            await loop().advance(pause_s, step_s=1)
        assert 0.25 <= waits[0] <= 0.5
        assert 1 <= waits[1] <= 2
        assert 0.25 <= waits[2] <= 0.5
        assert rig.broker.counts.reconnects == {"backoff": 1, "rebalance": 2, "drain": 0}


@pytest.mark.case("EB48")
@pytest.mark.case("EP20")
@in_a_loop
async def test_another_holder_of_the_name_is_not_fought() -> None:
    async with running() as rig:
        peer, _, connection, _ = await rig.stream()
        peer.session.fail(SessionCode.SUPERSEDED, "client_id connected elsewhere")
        peer.flush()
        await until(lambda: connection.lost)
        await until(lambda: sum(rig.broker.counts.reconnects.values()) == 1)
        assert 30 <= rig.broker.counts.reconnect_wait_s <= 60
        assert rig.broker.counts.errors_received["superseded"] == 1


@pytest.mark.case("EB49")
@in_a_loop
async def test_two_brokers_of_one_namespace_live_side_by_side() -> None:
    async with running() as one, running(client_id="gpu-a-2") as two:
        ends = [await one.stream(), await two.stream()]
        assert [peer.told[0].hello.client_id for peer, *_ in ends] == ["gpu-a-1", "gpu-a-2"]
        one.running.cancel()
        await until(lambda: ends[0][2].lost)
        peer, _, connection, stream_id = ends[1]
        await connection.send(b"still here")
        await until(lambda: bytes(peer.streams[stream_id].received) == b"still here")


@in_a_loop
async def test_a_dial_that_takes_long_takes_nothing_from_the_time_for_the_welcome() -> None:
    go_on = threading.Event()

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        go_on.wait(20)
        found: list[Any] = socket.getaddrinfo("127.0.0.1", port, **options)
        return found

    router = RouterRig(Script(welcome=None))
    await router.start()
    async with running(lookup=lookup, bus_url=BusUrl("localhost", router.port)) as rig:
        await until(lambda: rig.broker.view.is_synced)
        await loop().advance(4.5)
        go_on.set()
        await until(lambda: bool(router.peers) and bool(router.peers[0].told))
        await loop().advance(9)
        router.peers[0].session.welcome(welcome())
        router.peers[0].flush()
        await until(lambda: rig.broker.counts.dials["established"] == 1)
    await router.stop()


@in_a_loop
async def test_a_stop_during_a_drain_of_the_router_keeps_the_nearer_deadline() -> None:
    async with running(drain_deadline_ms=300_000) as rig:
        peer, _, connection, _ = await rig.stream()
        drain(peer, DrainReason.SHUTDOWN, 20_000)
        session = rig.broker.view.session
        assert session is not None
        await until(lambda: session.protocol.is_draining)
        rig.broker.stop()
        await loop().advance(21)
        await rig.running
        await until(lambda: connection.lost)


# The end.


@pytest.mark.case("EB38")
@pytest.mark.case("EP8")
@in_a_loop
async def test_a_stop_lets_streams_finish_refuses_what_is_new_and_dials_no_more() -> None:
    async with running(drain_deadline_ms=120_000) as rig:
        peer, publisher, connection, stream_id = await rig.stream()
        rig.broker.stop()
        await until(lambda: bool(peer.frames(Draining)))
        assert peer.frames(Draining) == [Draining("shutdown", 120_000)]
        assert await peer.refusal(publisher.endpoint) == "draining"
        await loop().advance(100, step_s=1)
        await connection.send(b"y" * 1_000)
        await until(lambda: len(peer.streams[stream_id].received) == 1_000)
        connection.transport.close()
        assert (await peer.closed(stream_id)).code == "upstream_closed"
        await rig.running
        assert dials(rig) == 1


@pytest.mark.case("EB38")
@in_a_loop
async def test_the_deadline_cuts_streams_that_are_stuck() -> None:
    async with running(drain_deadline_ms=25_000) as rig:
        peer, _, connection, _ = await rig.stream()
        rig.broker.stop()
        await loop().advance(24)
        assert not rig.running.done()
        await loop().advance(2)
        await rig.running
        await until(lambda: connection.lost and peer.lost)


@pytest.mark.case("EP6")
@pytest.mark.case("EP15")
@in_a_loop
async def test_an_idle_session_is_told_at_once_and_no_goaway_comes_before() -> None:
    async with running() as rig:
        peer = await rig.established()
        before_s = loop().ahead_s
        rig.broker.stop()
        await until(lambda: bool(peer.frames(Draining)))
        await rig.running
        await until(lambda: peer.lost)
        assert peer.session_ended
        assert loop().ahead_s == before_s  # nothing had to be waited for
        assert not peer.frames(StreamClosed)


@in_a_loop
async def test_an_opening_that_is_withdrawn_is_nothing_to_wait_for() -> None:
    async with running(Script(answers_streams=False)) as rig:
        peer, publisher = await rig.established(), await rig.publisher()
        stream_id = peer.subscribe(publisher.endpoint)
        await until(lambda: stream_id in peer.streams)
        rig.broker.stop()
        await until(lambda: bool(peer.frames(Draining)))
        assert not rig.running.done()
        peer.unsubscribe(stream_id)
        await rig.running


@in_a_loop
async def test_a_session_that_drops_while_it_drains_is_not_dialled_again() -> None:
    async with running() as rig:
        peer, *_ = await rig.stream()
        rig.broker.stop()
        await until(lambda: bool(peer.frames(Draining)))
        peer.abort()
        await rig.running
        assert dials(rig) == 1


@pytest.mark.case("EB40")
@pytest.mark.parametrize("when", ["list", "dial", "backoff", "head", "welcome"])
def test_a_stop_at_any_other_time_ends_at_once(when: str) -> None:
    @in_a_loop
    async def check() -> None:
        script = {"head": Script(session_status=0), "welcome": Script(welcome=None)}.get(when, Script())
        async with running(script) as rig:
            match when:
                case "list":
                    rig.directory.is_synced.clear()
                    await asyncio.sleep(0)
                case "dial":
                    await until(lambda: rig.broker.view.is_synced)
                case "backoff":
                    (await rig.established()).abort()
                    await until(lambda: sum(rig.broker.counts.reconnects.values()) == 1)
                case _:
                    await until(lambda: dials(rig) == 1 and bool(rig.router.peers[0].session_http_id))
            rig.broker.stop()
            await rig.running
            assert dials(rig) <= 1

    check()


@in_a_loop
async def test_the_first_dial_and_no_other_is_at_some_time_within_the_spread_and_a_stop_does_not_wait_for_it() -> None:
    async with running(start_within_s=60.0) as rig:
        await until(lambda: rig.broker.view.is_synced)
        await loop().advance(5)
        assert dials(rig) == 0
        await loop().advance(55, step_s=1)
        (await rig.established()).abort()
        await rig.again()
        assert dials(rig) == 2
    async with running(start_within_s=60.0) as rig:
        await until(lambda: rig.broker.view.is_synced)
        rig.broker.stop()
        await rig.running
        assert dials(rig) == 0


@pytest.mark.case("EP24")
@in_a_loop
async def test_a_router_that_never_says_goodbye_is_left_after_two_seconds() -> None:
    async with running() as rig:
        peer, _, connection, _ = await rig.stream()
        await connection.send(bytes(1000))
        peer.stall()
        rig.broker.stop()
        connection.transport.close()
        await loop().advance(60, step_s=1)
        await rig.running
        peer.go_on()
        await until(lambda: peer.lost)
