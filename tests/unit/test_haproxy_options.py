"""Options that no gateway could run with are refused when they are made, not when it starts."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import PurePosixPath
from typing import Any

import pytest

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.options import GatewayOptions, VersionTooOldError
from kura_shaper.tenants.document import Endpoint

OPTIONS = GatewayOptions((3, 0, 11))


@pytest.mark.parametrize("version", [(2, 8, 25), (3, 0, 2), (2, 9, 99)])
def test_an_old_version_is_refused(version: tuple[int, int, int]) -> None:
    with pytest.raises(VersionTooOldError, match=r"is too old; use 3\.0\.3 or newer"):
        replace(OPTIONS, haproxy_version=version)


@pytest.mark.parametrize(
    "changes",
    [
        {"directory": PurePosixPath("relative")},
        {"directory": PurePosixPath("/etc/../root")},
        {"directory": PurePosixPath("/a b")},
        {"certificate": PurePosixPath("/tls/a,b.pem")},
        {"run_directory": PurePosixPath("/" + "r" * 80)},
        {"user": "no body"},
        {"group": ""},
        {"nbthread": 0},
        {"maxconn": 0},
        {"dns_servers": 65},
        {"addresses": ()},
        {"addresses": (IPv4Address("0.0.0.0"), IPv4Address("0.0.0.0"))},
        {"metrics_bind": Endpoint("localhost", 8405)},
        {"metrics_bind": Endpoint("127.0.0.1", 0)},
        {"resolvers": (Endpoint("ns.example", 53),)},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(OPTIONS, **changes)
