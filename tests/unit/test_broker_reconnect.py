"""How long a broker stays away: longer each time, never alike, short after a rebalance and not twice."""

from __future__ import annotations

from random import Random

import pytest

from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.broker.protocol.reconnect import Reconnect, ReconnectKind, Wait


def policy(seed: int = 1, *, least_s: int = 1, most_s: int = 60) -> Reconnect:
    return Reconnect(least_ns=least_s * SECOND_NS, most_ns=most_s * SECOND_NS, random=Random(seed))


def is_within(wait: Wait, least_s: float, most_s: float) -> bool:
    return least_s * SECOND_NS <= wait.duration_ns <= most_s * SECOND_NS


@pytest.mark.case("EB35")
def test_waits_double_from_the_least_to_the_most_and_no_two_brokers_are_alike() -> None:
    bounds = [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (30, 60), (30, 60)]
    seen: set[int] = set()
    for seed in range(50):
        reconnect = policy(seed)
        waits = [reconnect.after_failure() for _ in bounds]
        assert all(is_within(wait, *bound) for wait, bound in zip(waits, bounds, strict=True))
        seen.update(wait.duration_ns for wait in waits)
    assert len(seen) == 50 * len(bounds)


def test_a_thousand_failures_are_waited_out_like_ten() -> None:
    reconnect = policy()
    waits = [reconnect.after_failure() for _ in range(1_000)]
    assert is_within(waits[-1], 30, 60)


def test_bounds_that_are_close_together_or_equal_hold() -> None:
    assert is_within(policy(least_s=5, most_s=6).after_failure(), 5, 6)
    assert policy(least_s=5, most_s=5).after_failure().duration_ns == 5 * SECOND_NS


@pytest.mark.case("EB35")
def test_only_a_session_that_lived_a_minute_makes_waits_short_again() -> None:
    reconnect = policy()
    for _ in range(5):
        reconnect.session_lived(59 * SECOND_NS)
        last = reconnect.after_failure()
    assert is_within(last, 16, 32)
    reconnect.session_lived(60 * SECOND_NS)
    assert is_within(reconnect.after_failure(), 1, 2)


@pytest.mark.case("EB37")
def test_a_rebalance_is_fast_the_next_within_a_minute_is_not_and_one_after_that_is_again() -> None:
    reconnect = policy()
    first = reconnect.after_rebalance(0)
    assert first.kind is ReconnectKind.REBALANCE
    assert is_within(first, 0.25, 0.5)
    second = reconnect.after_rebalance(59 * SECOND_NS)
    assert second.kind is ReconnectKind.BACKOFF
    assert is_within(second, 1, 2)
    third = reconnect.after_rebalance((59 + 61) * SECOND_NS)
    assert third.kind is ReconnectKind.REBALANCE
    assert is_within(third, 0.25, 0.5)
    # The count of failures was kept.
    assert is_within(reconnect.after_failure(), 2, 4)


def test_a_router_may_ask_for_a_longer_wait_but_not_for_more_than_the_longest() -> None:
    assert policy().after_failure(retry_after_ns=20 * SECOND_NS).duration_ns == 20 * SECOND_NS
    assert policy().after_failure(retry_after_ns=3_600 * SECOND_NS).duration_ns == 60 * SECOND_NS
    assert is_within(policy().after_failure(retry_after_ns=1), 1, 2)


@pytest.mark.case("EB41")
@pytest.mark.case("EP20")
def test_what_time_will_not_mend_is_tried_again_after_the_longest_wait() -> None:
    for seed in range(50):
        reconnect = policy(seed)
        assert is_within(reconnect.after_refusal(), 30, 60)
        assert is_within(reconnect.after_refusal(), 30, 60)


@pytest.mark.case("EB36")
def test_a_drain_is_waited_out_like_a_failure() -> None:
    reconnect = policy()
    waits = [reconnect.after_drain() for _ in range(2)]
    assert [wait.kind for wait in waits] == [ReconnectKind.DRAIN] * 2
    assert is_within(waits[0], 1, 2)
    assert is_within(waits[1], 2, 4)
