"""Pods behind a DNS name come, go, and stop being ready; the gateway follows within seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import gateway_rig
import pytest
from gateway_dns import NAME, POD_PORT, SERVER, Names, Pod
from gateway_rig import BETA, DOCUMENT, VERSIONS, GatewayRig, running_gateway

from kura_shaper.tenants.document import Backends, Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    import trustme

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

FIRST, SECOND = "127.0.1.1", "127.0.1.2"
TENANT = replace(BETA, peer_hosts=(), backends=Backends(http=Endpoint(NAME, POD_PORT, is_dns_name=True)))


class Pods:
    """The pods, their name, and the gateway that asks for it."""

    rig: GatewayRig
    names: Names
    first: Pod
    second: Pod

    def start(self, stack: ExitStack, rig: GatewayRig, ca: trustme.CA) -> None:
        self.rig = rig
        self.names = Names(stack, rig.namespace)
        self.first, self.second = (Pod(stack, rig.namespace, address) for address in (FIRST, SECOND))
        self.names.addresses = (FIRST,)

    def answers(self) -> str:
        """Return which pod answers now, or the status of an answer that is none of theirs."""
        answer = self.rig.curl("https://beta.kura.test/", "--http1.1")
        return answer.stdout if answer.stderr.startswith("200") else answer.stderr.split()[0]

    def wait_until(self, wanted: str, *, within_s: float) -> None:
        """Fail unless the answer is this one in time, and is it from then on."""
        deadline = time.monotonic() + within_s
        while (found := self.answers()) != wanted:
            assert time.monotonic() < deadline, f"{found} still answers"
            time.sleep(0.1)
        assert {self.answers() for _ in range(5)} == {wanted}


@pytest.fixture(params=VERSIONS)
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pods]:
    if reason := gateway_rig.why_not_here():
        pytest.skip(reason)
    pods = Pods()
    document = replace(DOCUMENT, tenants=(TENANT,))
    version, start = request.param, pods.start
    with running_gateway(tmp_path, version=version, document=document, start_servers=start, resolvers=(SERVER,)):
        pods.wait_until(FIRST, within_s=5)
        yield pods


def test_a_pod_that_comes_is_used_and_one_that_goes_is_not(pods: Pods) -> None:
    pods.names.addresses = (FIRST, SECOND)
    time.sleep(2)
    # One at a time, the same for as long as it is there.
    assert {pods.answers() for _ in range(10)} == {FIRST}
    pods.names.addresses = (SECOND,)
    pods.wait_until(SECOND, within_s=7)


def test_a_pod_that_is_not_ready_is_left_within_three_seconds_and_comes_back(pods: Pods) -> None:
    pods.names.addresses = (FIRST, SECOND)
    time.sleep(2)
    pods.first.is_ready = False
    pods.wait_until(SECOND, within_s=3.5)
    pods.second.is_ready = False
    pods.wait_until("503", within_s=3.5)
    pods.first.is_ready = True
    pods.wait_until(FIRST, within_s=2.5)


def test_a_name_that_is_gone_keeps_its_pods_for_some_seconds_and_comes_back_at_once(pods: Pods) -> None:
    pods.names.addresses = ()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        assert pods.answers() == FIRST
        time.sleep(0.2)
    pods.wait_until("503", within_s=8)
    pods.names.addresses = (SECOND,)
    pods.wait_until(SECOND, within_s=4)
