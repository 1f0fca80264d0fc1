"""gRPC passes the gateway as if it were not there: a real client and a real server at its two ends."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gateway_grpc as ends
import gateway_rig as rig_module
import pytest
from gateway_grpc import End, Seen
from gateway_rig import BETA, VERSIONS, GatewayRig

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trustme

pytestmark = pytest.mark.privileged

MIB = 2**20


@dataclass
class Ends:
    """A gateway with beta's gRPC server behind it, and a client before it."""

    version: str
    rig: GatewayRig
    server: End
    client: End

    def channel(self, name: str = "beta.kura.test", authority: str = "beta.kura.test") -> End:
        """Return the client with a new channel."""
        self.client.do(ends.open_channel, self.rig.ca_file, name, authority)
        return self.client

    def serve(self) -> End:
        """Return the server with nothing seen so far."""
        assert BETA.backends.grpc is not None
        self.server.do(ends.stop_server)
        self.server.do(ends.start_server, BETA.backends.grpc.port)
        return self.server


@pytest.fixture(scope="module", params=VERSIONS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    if reason := rig_module.why_not_here():
        pytest.skip(reason)
    pytest.importorskip("grpc")

    def start_servers(stack: ExitStack, rig: GatewayRig, ca: trustme.CA) -> None:
        rig_module.start_own_servers(stack, rig, ca, without_grpc=("beta",))

    directory = tmp_path_factory.mktemp("gateway")
    with ExitStack() as stack:
        running = rig_module.running_gateway(directory, version=request.param, start_servers=start_servers)
        rig = stack.enter_context(running)
        server, client = (stack.enter_context(ends.end_in(rig.namespace)) for _ in range(2))
        made = Ends(request.param, rig, server, client)
        made.serve()
        yield made


def test_a_large_read_and_a_large_write_pass(running: Ends) -> None:
    client = running.channel()
    read = client.do(ends.read, 8 * MIB)
    assert (read.code, read.bytes_read) == ("OK", 8 * MIB)
    written = client.do(ends.write, 8 * MIB)
    assert (written.code, written.details) == ("OK", str(8 * MIB))


@pytest.mark.parametrize("code", ["NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_a_servers_status_its_text_and_its_trailers_arrive(running: Ends, code: str) -> None:
    ended = running.channel().do(ends.call, "Fail", code)
    assert (ended.code, ended.details) == (code, f"no such blob: {code} \u20ac")
    assert ended.trailers["x-why"] == "a trailer"


def test_a_method_that_a_server_lacks_is_unimplemented(running: Ends) -> None:
    assert running.channel().do(ends.call, "Nothing", "").code == "UNIMPLEMENTED"


def test_a_client_that_cancels_ends_the_servers_stream(running: Ends) -> None:
    running.serve()
    assert running.channel().do(ends.read_and_cancel, MIB) == "CANCELLED"
    deadline = time.monotonic() + 3
    while seen(running).cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert seen(running).cancelled == 1


def seen(running: Ends) -> Seen:
    found = running.server.do(ends.seen)
    assert isinstance(found, Seen)
    return found


def test_a_deadline_ends_a_call_in_time(running: Ends) -> None:
    ended = running.channel().do(ends.call, "Wait", "1500", 0.3)
    assert ended.code == "DEADLINE_EXCEEDED"
    assert ended.seconds < 1


def test_a_hundred_calls_on_one_connection_wait_for_the_32_that_may_run_at_once(running: Ends) -> None:
    running.serve()
    found = running.channel().do(ends.calls, "Wait", "100", 100)
    assert found == ["OK"] * 100
    assert seen(running).most_at_once == 32


def test_a_server_that_restarts_is_unavailable_until_it_is_back(running: Ends) -> None:
    running.serve()
    client = running.channel()
    under_way = client.start(ends.read, -1)
    time.sleep(0.3)
    running.server.do(ends.stop_server)
    # Which of the two is the server's own choice: it resets its streams, then it is gone.
    assert under_way.result(20).code in {"UNAVAILABLE", "CANCELLED"}
    assert client.do(ends.call, "Wait", "0").code == "UNAVAILABLE"
    running.serve()
    deadline = time.monotonic() + 5
    while (ended := client.do(ends.call, "Wait", "0")).code != "OK" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended.code == "OK"


def test_a_name_that_nobody_owns_is_unavailable(running: Ends) -> None:
    """So that a client looks for another address; an HTTP status would keep it here."""
    assert running.channel("unknown.kura.test", "unknown.kura.test").do(ends.call, "Wait", "0").code == "UNAVAILABLE"


def test_another_tenants_name_in_requests_is_an_error(running: Ends) -> None:
    ended = running.channel("beta.kura.test", "acme.kura.test").do(ends.call, "Wait", "0")
    assert (ended.code, "421" in ended.details) == ("UNKNOWN", True)


def test_reads_and_writes_at_the_same_time_share_a_channel(running: Ends) -> None:
    """Last here, since a client whose calls block each other is of no more use."""
    for _ in range(3):
        assert running.channel().do(ends.both_ways, 4 * MIB, 12, 5.0) == {"OK"}
