"""Events of real publishers, through real brokers, to the reference router."""

from __future__ import annotations

import pytest
from bus_rig import in_flowing_time, until
from router_rig import ZmqPublisher, routing


@pytest.mark.case("ER14")
@in_flowing_time
async def test_events_of_a_publisher_arrive_in_order() -> None:
    publisher = ZmqPublisher()
    async with routing(publisher) as rig:
        await rig.start_broker()
        await rig.read()
        await publisher.subscribed()
        for _ in range(1_000):
            publisher.publish()
        await until(lambda: len(rig.output.found) == 1_000)
        assert rig.output.numbers() == list(range(1_000))
        assert rig.output.missed == 0
