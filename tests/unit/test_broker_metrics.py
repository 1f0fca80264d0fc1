"""What is counted and logged of refusals, and that labels come from closed sets whatever a router says."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kura_shaper.broker.counts import STAGE_BUCKETS_S, Counts, DialOutcome, StreamEnd, Times, count
from kura_shaper.broker.directory import DirectoryCounts
from kura_shaper.broker.endings import Reaction, of_code, of_error, of_status
from kura_shaper.broker.health import BrokerHealth
from kura_shaper.broker.metrics import BrokerMetrics
from kura_shaper.broker.protocol.codes import RefusalCode, SessionCode
from kura_shaper.broker.protocol.limits import SECOND_NS
from kura_shaper.broker.refusals import RefusalLog, Targets
from kura_shaper.broker.security import StreamRefusedError
from kura_shaper.broker.service import View
from kura_shaper.clock import FakeClock

PROMISED = """
refusals_total streams_closed_total streams_opened_total streams_open streams_opening streams_limit
stream_open_seconds_bucket bytes_total buffered_bytes buffer_high_water_bytes sessions_total session_up
session_age_seconds session_ends_total reconnect_delay_seconds reconnects_total errors_total terminal_error
heartbeats_total router_silence_seconds frames_ignored_total metadata_skipped_total metadata_resources
metadata_publishers metadata_namespaces_synced metadata_lists_total watch_restarts_total
metadata_snapshot_age_seconds event_loop_lag_seconds build_info
"""


class FakeBroker:
    """What metrics and probes read of a broker."""

    def __init__(self, clock: FakeClock) -> None:
        self.counts, self.view, self.now_ns, self.max_streams = Counts(), View(turned_s=0.0), clock.now_ns, 256


class FakeDirectory:
    """What they read of a directory."""

    def __init__(self) -> None:
        self.counts = DirectoryCounts()
        self.resources, self.references, self.namespaces_synced, self.age_s = 3, 12, 1, 4.5


def exposed(broker: FakeBroker, *, now_s: float = 0.0) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerMetrics(broker, FakeDirectory(), now_s=lambda: now_s))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@pytest.mark.case("EB44")
def test_every_series_is_there_from_the_start_and_no_code_of_a_router_adds_one() -> None:
    broker, random = FakeBroker(FakeClock()), Random(1)
    before = exposed(broker)
    log = RefusalLog(broker.counts.refusals, now_ns=FakeClock().now_ns)
    known = [*RefusalCode, *SessionCode, *StreamEnd]
    for _ in range(10_000):
        code = random.choice([*known, random.randbytes(4).hex(), "\n", 'a"b'])
        log.note(code)
        for counter in (broker.counts.stream_ends, broker.counts.session_ends, broker.counts.errors_received):
            count(counter, code)
    after = exposed(broker)
    assert after.keys() == before.keys()
    prefix = "continuum_event_broker_"
    assert all(name.startswith(prefix) for name in after)
    assert sum(value for name, value in after.items() if name.startswith(f"{prefix}refusals_total")) == 10_000
    assert after[f'{prefix}refusals_total{{code="unknown"}}'] > 0


def test_the_names_that_were_promised_are_there() -> None:
    names = {
        name.partition("{")[0].removeprefix("continuum_event_broker_") for name in exposed(FakeBroker(FakeClock()))
    }
    assert set(PROMISED.split()) <= names


@pytest.mark.case("ER78")
@pytest.mark.parametrize(("now_s", "lag_s"), [(0.0, 0.02), (0.5, 0.02), (0.75, 0.25), (60.5, 60.0)])
def test_a_loop_that_stands_still_is_late_at_a_scrape_that_comes_meanwhile(now_s: float, lag_s: float) -> None:
    broker = FakeBroker(FakeClock())
    broker.counts.loop_lag_s = 0.02
    assert exposed(broker, now_s=now_s)["continuum_event_broker_event_loop_lag_seconds"] == lag_s


def test_times_are_counted_in_every_bucket_that_holds_them() -> None:
    times = Times()
    for seconds in (0.0005, 0.1, 7, 100):
        times.note(seconds)
    assert times.within == [1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert (times.count, times.sum_s, len(times.within)) == (4, 107.1005, len(STAGE_BUCKETS_S))


class Kept(logging.Handler):
    """Keeps what is logged, whatever another test has configured."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.fields.append(record.__dict__["fields"])


@pytest.mark.case("EB43")
def test_the_first_refusal_of_each_code_in_a_minute_is_logged_with_how_many_were_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, counter, kept = FakeClock(5 * SECOND_NS), Counts().refusals, Kept()
    monkeypatch.setattr(logging.getLogger("kura_shaper.broker"), "handlers", [kept])
    log = RefusalLog(counter, now_ns=clock.now_ns)

    def logged(*codes: str) -> list[tuple[str, int]]:
        kept.fields.clear()
        for code in codes:
            log.note(code)
        return [(each["code"], each["suppressed"]) for each in kept.fields]

    assert logged(*["draining"] * 5) == [("draining", 0)]
    assert logged("connect_failed") == [("connect_failed", 0)]
    clock.wait_ns(59 * SECOND_NS)
    assert logged("draining") == []
    clock.wait_ns(SECOND_NS)
    assert logged("draining") == [("draining", 5)]
    assert logged("draining") == []
    clock.wait_ns(60 * SECOND_NS)
    assert logged("draining") == [("draining", 1)]
    # Codes of no known kind share one window, or they would be a way to flood.
    assert logged(*(f"x{number}" for number in range(9))) == [("unknown", 0)]
    assert (counter["draining"], counter["connect_failed"], counter["unknown"]) == (9, 1, 9)


def test_a_line_of_any_known_code_has_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr(logging.getLogger("kura_shaper.broker"), "handlers", [kept])
    log = RefusalLog(Counts().refusals, now_ns=FakeClock().now_ns)
    for code in RefusalCode:
        log.note(code)
    assert [each["message"] for each in kept.fields] == [code.words for code in RefusalCode]
    assert len({code.words for code in RefusalCode}) == len(RefusalCode)
    assert str(StreamRefusedError(RefusalCode.TARGET_NOT_ADVERTISED)) == RefusalCode.TARGET_NOT_ADVERTISED.words
    kept.fields.clear()
    log.note("of a later version", "as it says")
    assert kept.fields[0]["message"] == "as it says"


def test_a_line_has_its_target_as_a_hash_of_this_process_or_in_clear_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, endpoint = Kept(), "tcp://10.244.1.7:41235"
    monkeypatch.setattr(logging.getLogger("kura_shaper.broker"), "handlers", [kept])

    def named(log: RefusalLog, *targets: str) -> list[str]:
        kept.fields.clear()
        for code, target in zip(RefusalCode, targets, strict=False):
            log.note(code, target=target)
        return [each["target"] for each in kept.fields]

    first, second = (RefusalLog(Counts().refusals, now_ns=FakeClock().now_ns) for _ in range(2))
    one, same, other, odd = named(first, endpoint, endpoint, f"{endpoint}6", "tcp://\ud800")
    assert one == same
    assert len({one, other, odd, *named(second, endpoint)}) == 4
    assert all(len(each) == 12 and int(each, 16) >= 0 for each in (one, other, odd))
    clear = RefusalLog(Counts().refusals, now_ns=FakeClock().now_ns, targets=Targets.CLEAR)
    assert named(clear, endpoint, "x" * 300) == [endpoint, "x" * 256]


@pytest.mark.case("EP7")
def test_dead_is_a_loop_that_stands_still_and_nothing_else() -> None:
    broker = FakeBroker(FakeClock())
    health = BrokerHealth(broker, FakeDirectory(), now_s=lambda: 60.0)  # type: ignore[arg-type]
    assert health.why_dead() == ""
    assert "listed" in health.why_not_ready()
    broker.view.is_synced = True
    assert health.why_not_ready() == ""
    status = health.status()
    assert (status["ready"], status["session"], status["metadata"]["age_s"]) == (True, None, 4.5)
    late = BrokerHealth(broker, FakeDirectory(), now_s=lambda: 61.0)  # type: ignore[arg-type]
    assert "61 s" in late.why_dead()
    assert late.why_not_ready() == late.why_dead()


@pytest.mark.parametrize(
    ("code", "reaction", "terminal"),
    [
        ("unauthorized", Reaction.LOG_IN_AGAIN, False),
        ("forbidden", Reaction.LOG_IN_AGAIN, False),
        ("unsupported_version", Reaction.STAY_AWAY, True),
        ("invalid_hello", Reaction.STAY_AWAY, True),
        ("superseded", Reaction.STAY_AWAY, False),
        ("overloaded", Reaction.BACK_OFF, False),
        ("internal", Reaction.BACK_OFF, False),
        ("of a later version", Reaction.BACK_OFF, False),
    ],
)
def test_each_code_of_a_session_has_its_reaction(code: str, reaction: Reaction, terminal: bool) -> None:
    end = of_code(code)
    assert (end.reaction, end.is_terminal) == (reaction, terminal)
    assert end.code in {*SessionCode, "unknown"}


@pytest.mark.parametrize(
    ("status", "body", "code", "dial"),
    [
        (401, b"", "unauthorized", DialOutcome.AUTH_FAILED),
        (403, b"{", "forbidden", DialOutcome.AUTH_FAILED),
        (409, b"[]", "superseded", DialOutcome.REJECTED),
        (404, b'{"code":7}', "unsupported_version", DialOutcome.REJECTED),
        (500, b'{"code":"forbidden"}', "forbidden", DialOutcome.AUTH_FAILED),
        (503, b'{"code":"galaxy"}', "overloaded", DialOutcome.REJECTED),
        (302, b"", "unknown", DialOutcome.REJECTED),
    ],
)
def test_each_status_has_its_code_and_a_known_one_of_the_body_counts_more(
    status: int, body: bytes, code: str, dial: DialOutcome
) -> None:
    end = of_status(status, retry_after="", body=body)
    assert (end.code, end.dial) == (code, dial)


@pytest.mark.parametrize(("text", "seconds"), [("40", 40), ("", 0), ("-1", 0), ("9" * 7, 0), ("Wed, 21 Oct", 0)])
def test_a_time_to_come_back_is_seconds_or_nothing(text: str, seconds: int) -> None:
    assert of_status(503, retry_after=text, body=b"").retry_after_ns == seconds * SECOND_NS
    assert of_error("overloaded", "", 2_000).retry_after_ns == 2 * SECOND_NS
