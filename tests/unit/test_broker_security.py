"""Which targets may be dialled: how endpoints are written, and which addresses are let through."""

from __future__ import annotations

import ipaddress

import pytest

from kura_shaper.broker.addresses import SPECIAL_RANGES, AddressFilter
from kura_shaper.broker.endpoint import EndpointError, parse_endpoint
from kura_shaper.broker.protocol.codes import RefusalCode
from kura_shaper.broker.protocol.frames import ZmqEndpoint
from kura_shaper.broker.resolve import literal
from kura_shaper.broker.security import StreamRefusedError, TargetCheck

SPECIAL = [
    *("127.0.0.1", "127.255.255.254", "169.254.169.254", "0.0.0.0", "0.1.2.3", "224.0.0.1", "239.255.255.255"),
    *("255.255.255.255", "::", "::1", "fe80::1", "febf::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "::ffff:224.0.0.1", "::ffff:255.255.255.255"),
    *("64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "::127.0.0.1", "::a9fe:a9fe"),
]
ORDINARY = ["10.244.1.7", "192.168.0.1", "8.8.8.8", "fd00::7", "2001:db8::1", "::ffff:10.244.1.7", "64:ff9b::a00:1"]


def allowing(*networks: str) -> AddressFilter:
    return AddressFilter(tuple(ipaddress.ip_network(each) for each in networks))


@pytest.mark.case("EB17")
@pytest.mark.case("ED19")
@pytest.mark.parametrize("address", SPECIAL)
def test_a_special_address_is_never_dialled(address: str) -> None:
    assert not allowing().allows(ipaddress.ip_address(address))


@pytest.mark.case("EB18")
@pytest.mark.parametrize("address", SPECIAL)
@pytest.mark.parametrize("wide", ["0.0.0.0/0", "::/0", "126.0.0.0/7", "128.0.0.0/1", "2002::/16", "::/96", "fe00::/7"])
def test_no_network_that_is_wider_than_a_special_range_opens_it(address: str, wide: str) -> None:
    assert not allowing(wide, "0.0.0.0/0", "::/0").allows(ipaddress.ip_address(address))


@pytest.mark.case("EB18")
@pytest.mark.parametrize(
    ("network", "address"),
    [
        ("127.0.0.0/8", "127.0.0.1"),
        ("127.0.0.1/32", "127.0.0.1"),
        ("169.254.169.0/24", "169.254.169.254"),
        ("::1/128", "::1"),
        ("fe80::/64", "fe80::1"),
        ("127.0.0.0/8", "::ffff:127.0.0.1"),
    ],
)
def test_a_network_within_a_special_range_opens_just_that(network: str, address: str) -> None:
    assert allowing(network).allows(ipaddress.ip_address(address))
    others = [each for each in SPECIAL if ipaddress.ip_address(each.removeprefix("::ffff:")) != address]
    refused = [each for each in others if not allowing(network).allows(ipaddress.ip_address(each))]
    assert len(refused) >= len(others) - 4


def test_an_embedded_special_address_needs_both_its_own_range_and_the_outer_one() -> None:
    address = ipaddress.ip_address("64:ff9b::127.0.0.1")
    assert not allowing("127.0.0.0/8").allows(address)
    assert not allowing("64:ff9b::/96").allows(address)
    assert allowing("127.0.0.0/8", "64:ff9b::/96").allows(address)


@pytest.mark.case("EB19")
@pytest.mark.parametrize("address", ORDINARY)
def test_without_networks_every_ordinary_address_is_let_through(address: str) -> None:
    assert allowing().allows(ipaddress.ip_address(address))


@pytest.mark.case("EB19")
def test_with_networks_only_what_lies_in_one_of_them_is_let_through() -> None:
    chosen = allowing("10.244.0.0/16", "fd00::/8")
    found = {each for each in ORDINARY if chosen.allows(ipaddress.ip_address(each))}
    assert found == {"10.244.1.7", "fd00::7", "::ffff:10.244.1.7"}
    assert not chosen.allows(ipaddress.ip_address("10.245.0.1"))


def test_every_special_range_has_an_address_in_the_test() -> None:
    for special in SPECIAL_RANGES:
        assert any(ipaddress.ip_address(each) in special for each in SPECIAL), special


@pytest.mark.case("ED4")
@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tcp://10.244.1.7:41235", "tcp://10.244.1.7:41235"),
        ("tcp://[FD00:0:0::7]:5557", "tcp://[fd00::7]:5557"),
        ("tcp://Worker-0.Workers.svc:5000", "tcp://worker-0.workers.svc:5000"),
        ("tcp://worker.svc.:5000", "tcp://worker.svc:5000"),
        ("tcp://localhost:5000", "tcp://localhost:5000"),
    ],
)
def test_an_endpoint_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(parse_endpoint(text)) == canonical
    assert str(parse_endpoint(canonical)) == canonical


def test_an_error_does_not_repeat_a_hostile_endpoint() -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint("tcp://\x1b[31m:1")
    assert "\x1b" not in str(caught.value)


class Everything:
    def __init__(self, *known: tuple[str, str]) -> None:
        self.known = set(known)
        self.is_current = True

    def is_advertised(self, endpoint: str, dynamo_namespace: str) -> bool:
        return (endpoint, dynamo_namespace) in self.known


@pytest.mark.case("EB14")
@pytest.mark.parametrize(
    ("endpoint", "namespace", "code"),
    [
        ("http://10.0.0.1:1", "other", RefusalCode.INVALID_TARGET),
        ("tcp://2130706433:80", "dynamo", RefusalCode.INVALID_TARGET),
        ("tcp://10.0.0.9:1", "other", RefusalCode.NAMESPACE_NOT_COVERED),
        ("tcp://10.0.0.9:1", "dynamo", RefusalCode.TARGET_NOT_ADVERTISED),
        ("tcp://10.0.0.1:1", "team-a", RefusalCode.TARGET_NOT_ADVERTISED),
        ("tcp://10.0.0.1:1", "dynamo", None),
    ],
)
def test_the_checks_of_a_target_come_in_their_order(endpoint: str, namespace: str, code: RefusalCode | None) -> None:
    check = TargetCheck(frozenset({"dynamo", "team-a"}), Everything(("tcp://10.0.0.1:1", "dynamo")), allowing())
    if code is None:
        assert check.address_of(ZmqEndpoint(endpoint, namespace)).port == 1
        return
    with pytest.raises(StreamRefusedError) as caught:
        check.address_of(ZmqEndpoint(endpoint, namespace))
    assert caught.value.code is code


@pytest.mark.case("EB17")
def test_of_several_addresses_those_that_may_not_be_dialled_are_left_out() -> None:
    check = TargetCheck(frozenset(), Everything(), allowing())
    good, bad = (literal(ipaddress.ip_address(each), 1) for each in ("10.0.0.1", "127.0.0.1"))
    assert check.allowed((bad, good)) == (good,)
    with pytest.raises(StreamRefusedError) as caught:
        check.allowed((bad,))
    assert caught.value.code is RefusalCode.ADDRESS_NOT_ALLOWED
