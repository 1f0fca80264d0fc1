"""Addresses where a server is reached, and where something listens."""

from __future__ import annotations

import pytest

from kura_shaper.errors import UsageError
from kura_shaper.tenants.check import address_endpoint, listen_endpoint
from kura_shaper.tenants.document import Endpoint


@pytest.mark.parametrize("text", ["127.0.0.1:8405", "[::1]:8405", "192.0.2.1:1"])
def test_an_address_of_a_machine_is_both(text: str) -> None:
    assert str(address_endpoint(text)) == str(listen_endpoint(text)) == text


@pytest.mark.parametrize("text", ["0.0.0.0:8405", "[::]:8405"])
def test_all_addresses_are_to_listen_at_alone(text: str) -> None:
    assert str(listen_endpoint(text)) == text
    with pytest.raises(UsageError, match="is no address of a server"):
        address_endpoint(text)


@pytest.mark.parametrize(
    "text", ["224.0.0.1:80", "[ff02::1]:80", "localhost:80", "127.0.0.1", "127.0.0.1:0", "[::1%lo]:80"]
)
def test_what_is_no_address_to_listen_at(text: str) -> None:
    with pytest.raises(UsageError):
        listen_endpoint(text)


def test_an_endpoint_is_its_parts() -> None:
    assert listen_endpoint("[2001:DB8::1]:80") == Endpoint("2001:db8::1", 80)
