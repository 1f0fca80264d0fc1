"""A device's own counters, many times a second."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from kernel_devices import delete_link
from kernel_traffic import datagram_wire_bytes, send_datagrams

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.device_counters import DeviceCounters

if TYPE_CHECKING:
    from conftest import Network

pytestmark = pytest.mark.privileged

_READINGS = 200
_PAYLOAD, _COUNT = 500, 20
_READING_NS_MAX = 1_000_000


def test_what_is_sent_shows_at_once(network: Network) -> None:
    with DeviceCounters("nic0", network.device.ifindex) as counters:
        send_datagrams(socket.AF_INET, payload=_PAYLOAD)  # the address is asked for first
        before = counters.read()
        send_datagrams(socket.AF_INET, payload=_PAYLOAD, count=_COUNT)
        after = counters.read()
        by_the_kernel, later = network.sent_bytes(), counters.read()
    assert after.packets - before.packets >= _COUNT
    assert after.bytes - before.bytes >= _COUNT * datagram_wire_bytes(socket.AF_INET, _PAYLOAD)
    assert after.dropped_packets == before.dropped_packets
    # A node says hello to its neighbours at a time of its own.
    assert after.bytes <= by_the_kernel <= later.bytes


def test_a_reading_takes_less_than_a_millisecond(network: Network) -> None:
    took = []
    with DeviceCounters("nic0", network.device.ifindex) as counters:
        for _ in range(_READINGS):
            began = time.perf_counter_ns()
            counters.read()
            took.append(time.perf_counter_ns() - began)
    assert sorted(took)[_READINGS // 2] < _READING_NS_MAX


def test_counters_of_a_device_that_is_gone_are_unknown(network: Network) -> None:
    with DeviceCounters("nic0", network.device.ifindex) as counters:
        counters.read()
        delete_link("nic0")
        with pytest.raises(StateUnknownError, match="nic0 can't be read"):
            counters.read()
