"""From a subscribe to a stream: every check, every deadline, and nothing left behind by any of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from bus_rig import NAMESPACE, Census, Publisher, Rig, Script, in_a_loop, loop, running, until

from kura_shaper.broker.protocol.frames import OtherTarget, StreamOpened, StreamRefused, ZmqEndpoint
from kura_shaper.broker.protocol.limits import STREAMS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def blackhole(host: str = "127.0.0.2", port: int = 0) -> Iterator[int]:
    """Listen where no connection is ever accepted: further ones get no answer at all."""
    with socket.socket() as listening:
        listening.bind((host, port))
        listening.listen(0)
        waiting = []
        for _ in range(4):
            made = socket.socket()
            made.setblocking(False)
            made.connect_ex((host, listening.getsockname()[1]))
            waiting.append(made)
        yield listening.getsockname()[1]
        for made in waiting:
            made.close()


def addresses(*hosts: str) -> Any:
    """Return a resolver that knows these addresses of any name."""

    def lookup(_: str, port: int, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, port, 0, 0))
            if ":" in host
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host in hosts
        ]

    return lookup


@pytest.mark.case("EB14")
@pytest.mark.case("EB15")
@in_a_loop
async def test_a_target_that_fails_a_check_is_refused_before_anything_is_dialled() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        port = publisher.endpoint.rpartition(":")[2]
        census = Census(rig)
        assert await peer.refusal("ipc:///run/x") == "invalid_target"
        assert await peer.refusal(f"tcp://127.1:{port}") == "invalid_target"
        assert await peer.refusal("tcp://127.0.0.1:9") == "target_not_advertised"
        for target, code in (
            (OtherTarget("announced_source"), "unsupported_target"),
            (ZmqEndpoint(publisher.endpoint, "other"), "namespace_not_covered"),
        ):
            stream_id = peer.session.subscribe(target)
            peer.flush()
            told = await peer.outcome(stream_id)
            assert (told.code, told.retryable) == (code, False)
        assert publisher.accepted == 0
        assert [path for path in peer.requests if STREAMS_PATH in path] == []
        await census.is_as_before()
        assert sum(rig.broker.counts.refusals.values()) == 5


@pytest.mark.case("EB16")
@in_a_loop
async def test_what_is_not_advertised_any_more_is_refused_and_may_be_tried_again() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        rig.directory.is_synced.clear()
        told = await peer.outcome(peer.subscribe(publisher.endpoint))
        assert (told.code, told.retryable) == ("target_not_advertised", True)


@pytest.mark.case("ED18")
@in_a_loop
async def test_an_address_of_the_request_plane_is_not_advertised() -> None:
    async with running() as rig:
        peer = await rig.router.peer()
        rig.directory.advertise("tcp://10.244.1.7:41235")
        assert await peer.refusal("tcp://10.244.1.7:8000") == "target_not_advertised"


@pytest.mark.case("EB17")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "169.254.169.254", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::ffff:127.0.0.1", "::1"]
)
def test_a_name_that_resolves_to_a_special_address_is_refused(host: str) -> None:
    @in_a_loop
    async def check() -> None:
        import ipaddress

        async with running(lookup=addresses(host), allowed_cidrs=(ipaddress.ip_network("10.0.0.0/8"),)) as rig:
            peer, publisher = await rig.router.peer(), await rig.publisher()
            name = f"tcp://worker.svc:{publisher.endpoint.rpartition(':')[2]}"
            rig.directory.advertise(name)
            assert await peer.refusal(name) == "address_not_allowed"
            assert publisher.accepted == 0

    check()


@pytest.mark.case("EB20")
@in_a_loop
async def test_a_name_is_resolved_once_and_what_was_checked_is_dialled() -> None:
    asked: list[str] = []
    good, bad = addresses("127.0.0.1"), addresses("169.254.169.254")

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        found: list[Any] = (good if len(asked) == 1 else bad)(host, port, **options)
        return found

    async with running(lookup=lookup) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        name = f"tcp://worker.svc:{publisher.endpoint.rpartition(':')[2]}"
        rig.directory.advertise(name)
        await peer.opened(name)
        assert asked == ["worker.svc"]
        assert publisher.accepted == 1


@in_a_loop
async def test_what_is_deleted_while_its_name_is_resolved_is_not_dialled() -> None:
    resolving, go_on = threading.Event(), threading.Event()

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        resolving.set()
        go_on.wait(10)
        found: list[Any] = addresses("127.0.0.1")(host, port, **options)
        return found

    async with running(lookup=lookup) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        name = f"tcp://worker.svc:{publisher.endpoint.rpartition(':')[2]}"
        rig.directory.advertise(name)
        stream_id = peer.subscribe(name)
        await until(resolving.is_set)
        rig.directory.known.clear()
        go_on.set()
        assert (await peer.outcome(stream_id)).code == "target_not_advertised"
        assert publisher.accepted == 0


@pytest.mark.case("EB21")
@in_a_loop
async def test_a_second_address_is_tried_when_the_first_does_not_answer() -> None:
    async with running(lookup=addresses("127.0.0.2", "127.0.0.1"), upstream_connect_timeout_ms=3_000) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        port = int(publisher.endpoint.rpartition(":")[2])
        rig.directory.advertise(f"tcp://worker.svc:{port}")
        with blackhole(port=port):
            stream_id = peer.subscribe(f"tcp://worker.svc:{port}")
            await until(lambda: rig.broker.counts.stages["resolve"].count == 1)
            await loop().advance(2.5)
            assert publisher.accepted == 0
            await loop().advance(1)
            assert isinstance(await peer.outcome(stream_id), StreamOpened)


@pytest.mark.case("EB21")
@in_a_loop
async def test_all_addresses_together_have_ten_seconds() -> None:
    hosts = [f"127.0.0.{number}" for number in range(2, 9)]
    async with running(lookup=addresses(*hosts), upstream_connect_timeout_ms=4_000) as rig:
        peer = await rig.router.peer()
        with blackhole("0.0.0.0") as port:
            rig.directory.advertise(f"tcp://worker.svc:{port}")
            census = Census(rig)
            stream_id = peer.subscribe(f"tcp://worker.svc:{port}")
            await until(lambda: rig.broker.counts.stages["resolve"].count == 1)
            await loop().advance(9.5)
            assert not peer.frames(StreamRefused)
            await loop().advance(1)
            assert (await peer.outcome(stream_id)).code == "connect_failed"
            await census.is_as_before()


@pytest.mark.case("EB22")
@in_a_loop
async def test_names_that_hang_are_given_up_and_hold_no_literal_address_up() -> None:
    go_on = threading.Event()

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        go_on.wait(30)
        return []

    async with running(lookup=lookup) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        names = [f"tcp://worker-{number}.svc:1" for number in range(100)]
        for name in names:
            rig.directory.advertise(name)
        asked = [peer.subscribe(name) for name in names]
        await peer.opened(publisher.endpoint)
        await loop().advance(4.5)
        assert not peer.frames(StreamRefused)
        await loop().advance(0.6)
        assert {(await peer.outcome(each)).code for each in asked} == {"resolve_failed"}
        go_on.set()


@in_a_loop
async def test_a_name_that_is_not_known_is_refused() -> None:
    def lookup(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async with running(lookup=lookup) as rig:
        peer = await rig.router.peer()
        rig.directory.advertise("tcp://nobody.svc:1")
        told = await peer.outcome(peer.subscribe("tcp://nobody.svc:1"))
        assert (told.code, told.retryable) == ("resolve_failed", True)


@pytest.mark.case("EB23")
@in_a_loop
async def test_a_place_that_becomes_free_is_given_in_turn_and_who_waits_too_long_is_refused() -> None:
    # One place for the session, and two for streams.
    async with running(Script(max_concurrent=3)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        first = [await peer.opened(publisher.endpoint) for _ in range(2)]
        late = [peer.subscribe(publisher.endpoint) for _ in range(3)]
        await until(lambda: publisher.accepted == 5)
        await loop().advance(3)
        assert len(peer.streams) == 2
        peer.unsubscribe(first[0])
        assert isinstance(await peer.outcome(late[0]), StreamOpened)
        await loop().advance(2.5)
        assert {(await peer.outcome(each)).code for each in late[1:]} == {"stream_slot_timeout"}
        await until(lambda: sum(not each.lost for each in publisher.connections) == 2)


@pytest.mark.case("EB24")
@pytest.mark.case("EP4")
@in_a_loop
async def test_a_router_that_does_not_answer_is_given_up_after_ten_seconds() -> None:
    async with running(Script(answers_streams=False)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        census = Census(rig)
        stream_id = peer.subscribe(publisher.endpoint)
        await until(lambda: stream_id in peer.streams)
        connection = await publisher.connection()
        connection.transport.write(b"greeting")
        await loop().advance(9.5)
        assert not peer.frames(StreamRefused)
        await loop().advance(1)
        assert (await peer.outcome(stream_id)).code == "open_timeout"
        await until(lambda: peer.streams[stream_id].reset == 8)
        await until(lambda: connection.lost)
        connection.transport.abort()
        await census.is_as_before()


@pytest.mark.case("EB25")
@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, b"", "unknown_stream"),
        (409, b"", "duplicate_stream"),
        (401, b"", "stream_rejected"),
        (429, b"", "stream_rejected"),
        (503, b"", "stream_rejected"),
        (500, b"{", "stream_rejected"),
        (302, b"", "stream_rejected"),
        (500, b'{"code":"unknown_stream","message":"x"}', "unknown_stream"),
        (404, b'{"code":"galaxy"}', "unknown_stream"),
        (404, b"x" * 9_000, "unknown_stream"),
    ],
)
def test_a_router_that_refuses_a_stream_is_told_so_by_its_code(status: int, body: bytes, code: str) -> None:
    @in_a_loop
    async def check() -> None:
        async with running(Script(stream_status=status, stream_body=body)) as rig:
            peer, publisher = await rig.router.peer(), await rig.publisher()
            census = Census(rig)
            assert await peer.refusal(publisher.endpoint) == code
            await until(lambda: publisher.connections[0].lost)
            await census.is_as_before()
            # The session goes on.
            peer.script.stream_status = None
            await peer.opened(publisher.endpoint)

    check()


@pytest.mark.case("EB26")
@in_a_loop
async def test_a_whole_opening_has_28_seconds_whatever_its_stages_take() -> None:
    go_on = threading.Event()

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        go_on.wait(30)
        found: list[Any] = addresses("127.0.0.2", "127.0.0.1")(host, port, **options)
        return found

    script = Script(max_concurrent=2, answers_streams=False)
    async with running(script, lookup=lookup, upstream_connect_timeout_ms=9_000) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        port = int(publisher.endpoint.rpartition(":")[2])
        rig.directory.advertise(f"tcp://worker.svc:{port}")
        taken = peer.subscribe(publisher.endpoint)
        await until(lambda: taken in peer.streams)
        peer.answer(taken)
        await peer.outcome(taken)
        with blackhole(port=port):
            began_s = loop().time()
            stream_id = peer.subscribe(f"tcp://worker.svc:{port}")
            await until(lambda: rig.broker.view.session is not None and stream_id in rig.broker.view.session.relays)
            await loop().advance(4.9)
            go_on.set()
            await until(lambda: rig.broker.counts.stages["resolve"].count == 2)
            await loop().advance(9.1)
            await until(lambda: publisher.accepted == 2)
            await until(lambda: rig.broker.counts.stages["connect"].count == 2)
            await loop().advance(4.8)
            peer.unsubscribe(taken)
            await until(lambda: stream_id in peer.streams)
            await until(lambda: rig.broker.counts.stages["slot"].count == 2)
            await loop().advance(27.9 - (loop().time() - began_s))
            assert not peer.frames(StreamRefused)
            # Its answer had time until 28.8 s.
            await loop().advance(0.3)
            assert (await peer.outcome(stream_id)).code == "open_timeout"


@pytest.mark.case("EB33")
@pytest.mark.case("EB26")
@pytest.mark.parametrize("stage", ["resolve", "connect", "slot", "head"])
def test_an_unsubscribe_ends_an_opening_in_silence_at_every_stage(stage: str) -> None:
    go_on = threading.Event()

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        go_on.wait(20)
        return []

    @in_a_loop
    async def check() -> None:
        script = Script(max_concurrent=1 if stage == "slot" else 10, answers_streams=stage != "head")
        async with running(script, lookup=lookup) as rig:
            peer, publisher = await rig.router.peer(), await rig.publisher()
            census = Census(rig)
            with blackhole() as port:
                endpoint = {"resolve": "tcp://worker.svc:1", "connect": f"tcp://127.0.0.2:{port}"}.get(
                    stage, publisher.endpoint
                )
                census.before = census.now()
                rig.directory.advertise(endpoint)
                stream_id = peer.subscribe(endpoint)
                await until(lambda: _is_at(rig, stage, stream_id))
                peer.unsubscribe(stream_id)
                session = rig.broker.view.session
                assert session is not None
                await until(lambda: not session.relays)
                for connection in publisher.connections:
                    await until(lambda connection=connection: connection.lost)  # type: ignore[misc]
                await census.is_as_before()
            assert not peer.frames(StreamRefused)
            assert not peer.frames(StreamOpened)
        go_on.set()

    check()


def _is_at(rig: Rig, stage: str, stream_id: str) -> bool:
    session = rig.broker.view.session
    assert session is not None
    relay = session.relays.get(stream_id)
    stages = rig.broker.counts.stages
    if relay is None:
        return False
    return {
        "resolve": True,
        "connect": stages["resolve"].count == 1,
        "slot": relay in session.link.http._waiting,
        "head": bool(relay.http_id),
    }[stage]


@pytest.mark.case("EP2")
@in_a_loop
async def test_fifty_dials_that_hang_hold_neither_heartbeats_nor_other_streams_up() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        with blackhole() as port:
            rig.directory.advertise(f"tcp://127.0.0.2:{port}")
            for _ in range(50):
                peer.subscribe(f"tcp://127.0.0.2:{port}")
            stream_id = await peer.opened(publisher.endpoint)
            (await publisher.connection()).transport.write(b"x" * 1_000)
            await until(lambda: len(peer.streams[stream_id].received) == 1_000)
            sent = rig.broker.counts.heartbeats_sent
            await loop().advance(11.5)
            await until(lambda: rig.broker.counts.heartbeats_sent > sent)
            await until(lambda: len(peer.frames(StreamRefused)) == 50)


@in_a_loop
async def test_a_target_that_was_just_not_connected_to_is_refused_the_same_and_not_dialled() -> None:
    async with running() as rig:
        peer, publisher = await rig.router.peer(), Publisher()
        await publisher.start()
        endpoint = publisher.endpoint
        rig.directory.advertise(endpoint)
        await publisher.stop()
        first = await peer.outcome(peer.subscribe(endpoint))
        await publisher.start(port=int(endpoint.rpartition(":")[2]))
        await loop().advance(0.9)
        again = await peer.outcome(peer.subscribe(endpoint))
        assert (first.code, first.message) == (again.code, again.message)
        assert (again.code, publisher.accepted) == ("connect_failed", 0)
        await loop().advance(0.1)
        await peer.opened(endpoint)
        await publisher.stop()


@pytest.mark.case("EP3")
@in_a_loop
async def test_a_router_that_never_answers_for_an_hour_holds_no_more_than_max_streams() -> None:
    async with running(Script(answers_streams=False), max_streams=8) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        session = rig.broker.view.session
        assert session is not None
        most = 0
        for round_ in range(125):
            for number in range(20):
                with_id = f"r{round_}-{number}"
                peer.say_object(
                    {
                        "type": "subscribe",
                        "stream_id": with_id,
                        "target": {
                            "kind": "zmq_endpoint",
                            "endpoint": publisher.endpoint,
                            "dynamo_namespace": NAMESPACE,
                        },
                    }
                )
            await until(lambda: session.protocol.stream_count == 8)
            most = max(most, len(session.relays), session.protocol.stream_count)
            await loop().advance(29, step_s=1)
        assert most == 8
        await until(lambda: not session.relays)
        assert rig.broker.counts.refusals["stream_limit"] == 125 * 12


@in_a_loop
async def test_a_publisher_that_ends_before_the_router_answers_has_its_bytes_delivered() -> None:
    async with running(Script(answers_streams=False)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        stream_id = peer.subscribe(publisher.endpoint)
        connection = await publisher.connection()
        connection.transport.write(b"all of it")
        connection.transport.close()
        await until(lambda: connection.lost and stream_id in peer.streams)
        peer.answer(stream_id)
        await peer.closed(stream_id)
        assert bytes(peer.streams[stream_id].received) == b"all of it"


@in_a_loop
async def test_a_publisher_that_floods_before_the_router_answers_is_refused_and_let_go() -> None:
    async with running(Script(answers_streams=False)) as rig:
        peer, publisher = await rig.router.peer(), await rig.publisher()
        census = Census(rig)
        stream_id = peer.subscribe(publisher.endpoint)
        connection = await publisher.connection()
        sending = asyncio.ensure_future(connection.send(bytes(64 << 20)))
        assert (await peer.outcome(stream_id)).code == "internal"
        await sending
        connection.transport.abort()
        await census.is_as_before()
