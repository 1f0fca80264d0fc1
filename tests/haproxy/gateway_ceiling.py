"""How much of a tenant's ceiling its clients get who want all of it, as they see it themselves."""

from __future__ import annotations

import ssl
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gateway_rig import ACME, PEER_PORT, SLOW_CEILING

if TYPE_CHECKING:
    from gateway_rig import GatewayRig


def share_of_slow_ceiling(gateway: GatewayRig) -> float:
    """Return what ACME's clients receive on every plane together, as a share of its ceiling."""
    with ExitStack() as stack:
        everyone = [stack.enter_context(gateway.connect_tls(ACME.hosts[n % 2])) for n in range(3)]
        for connection in everyone:
            connection.sendall(b"GET /endless HTTP/1.1\r\nHost: acme.kura.test\r\n\r\n")
        # Where HAProxy can't limit connections, the peer plane is the tree's alone to bound.
        if gateway.options.limits_connections:
            everyone.append(stack.enter_context(gateway.connect_tls(ACME.peer_hosts[0], PEER_PORT)))
            everyone[-1].sendall(b"endless")
        for connection in everyone:
            connection.settimeout(0.001)
        _drain(everyone, seconds=1.0)
        return 8 * _drain(everyone, seconds=2.0) / 2 / SLOW_CEILING.bits_per_second


def _drain(connections: list[ssl.SSLSocket], *, seconds: float) -> int:
    received, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for connection in connections:
            try:
                received += len(connection.recv(262_144))
            except (TimeoutError, ssl.SSLWantReadError):
                continue
    return received
