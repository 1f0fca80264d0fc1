"""A reflector knows what there is, forgets nothing because something failed, and never asks in a hot loop."""

from __future__ import annotations

import json
import logging
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from kubernetes_rig import Reflecting, in_a_loop

from kura_shaper.tenants.kubernetes.fake import FakeAnswer, FakeApi, FakeAsyncClock, refusal
from kura_shaper.tenants.kubernetes.pace import Backoff, SystemAsyncClock
from kura_shaper.tenants.kubernetes.reflector import Timing
from kura_shaper.tenants.kubernetes.wire import ApiError, GoneError, Kind, parse_event, parse_page, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.tenants.kubernetes.fake import Asked

SECOND_NS = 1_000_000_000


def scene(*names: str, timing: Timing | None = None) -> tuple[FakeApi, FakeAsyncClock, Reflecting]:
    api, clock = FakeApi(), FakeAsyncClock()
    for name in names:
        api.put(name, {"spec": 1})
    return api, clock, Reflecting(api, clock, timing=timing or Timing(watch_s=2, idle_margin_s=1))


def watching(api: FakeApi) -> Callable[[], bool]:
    """Return whether somebody holds a watch now."""
    return lambda: bool(api.watches)


# In good order.


@in_a_loop
async def test_what_there_is_is_listed_and_what_changes_is_followed() -> None:
    api, _, known = scene("a", "b")
    async with known.running():
        await known.until(lambda: known.objects == {"a": 1, "b": 1})
        api.put("c", {"spec": 3})
        api.put("a", {"spec": 2})
        api.delete("b")
        await known.until(lambda: known.objects == {"a": 2, "c": 3})
    assert [asked.is_watch for asked in api.asked] == [False, True]
    assert api.asked[1].query["resourceVersion"] == "3"
    assert api.asked[1].query["allowWatchBookmarks"] == "true"


@in_a_loop
async def test_a_listing_that_was_taken_never_changes() -> None:
    api, _, known = scene("a")
    async with known.running():
        await known.until(lambda: "a" in known.objects)
        before = known.reflector.listing
        assert known.reflector.listing.objects is before.objects
        api.delete("a")
        await known.until(lambda: not known.objects)
    assert list(before.objects) == [("kura", "a")]


@in_a_loop
async def test_nothing_is_known_before_the_first_list_and_an_empty_one_is_known_to_be_empty() -> None:
    _, _, known = scene()
    synced = [known.reflector.listing.state.synced]
    async with known.running():
        await known.until(lambda: known.changes > 0)
    synced.append(known.reflector.listing.state.synced)
    assert synced == [False, True]
    assert known.objects == {}


@in_a_loop
async def test_a_list_in_pages_is_of_one_version() -> None:
    api, _, known = scene(*"abcde", timing=Timing(page_objects=2))

    def change_meanwhile(asked: Asked) -> None:
        if "continue" in asked.query and "z" not in {name for _, name in api._objects}:
            api.put("z", {"spec": 1})
            api.delete("e")

    api.answer = change_meanwhile
    async with known.running():
        await api.until(watching(api))
        await known.until(lambda: set(known.objects) == set("abcdz"))
    lists = [asked.query for asked in api.asked if not asked.is_watch]
    assert [query.get("limit") for query in lists] == ["2", "2", "2"]


@in_a_loop
async def test_a_watch_that_ended_goes_on_where_it_was_and_nothing_between_is_missed() -> None:
    api, clock, known = scene("a")
    async with known.running():
        await api.until(watching(api))
        api.put("b", {"spec": 1})
        await known.until(lambda: "b" in known.objects)
        clock.advance_s(2)
        api.end_watches()
        api.delete("a")
        await known.until(lambda: "a" not in known.objects)
    assert [asked.is_watch for asked in api.asked] == [False, True, True]
    assert api.asked[2].query["resourceVersion"] == "3"
    assert clock.slept_ns == []


@in_a_loop
async def test_a_bookmark_moves_the_version_and_changes_nothing() -> None:
    api, clock, known = scene("a")
    async with known.running():
        await api.until(watching(api))
        changes = known.changes
        clock.advance_s(100)
        age = known.reflector.state.age_ns(clock.now_ns())
        api.bookmark()
        api.end_watches(ApiError("cut"))
        await api.until(lambda: len(api.asked) == 3)
    assert age == 100 * SECOND_NS
    assert api.asked[2].query["resourceVersion"] == str(api.version)
    assert known.changes == changes


@in_a_loop
async def test_what_says_the_same_is_no_change() -> None:
    api, _, known = scene("a")
    async with known.running():
        await api.until(watching(api))
        api.put("a", {"spec": 1, "status": {"phase": "Ready"}})
        api.say(b"\n")
        api.put("b", {"spec": 1})
        await known.until(lambda: "b" in known.objects)
        api.say(json.dumps({"type": "DELETED", "object": {"metadata": {"name": "x", "resourceVersion": "9"}}}).encode())
        api.put("c", {"spec": 1})
        await known.until(lambda: "c" in known.objects)
    assert known.changes == 3


@in_a_loop
async def test_the_age_is_of_the_last_proof_and_a_quiet_watch_that_lasted_its_time_is_one() -> None:
    api, clock, known = scene("a", timing=Timing(watch_s=10, idle_margin_s=3))
    async with known.running():
        await api.until(watching(api))
        seconds = int(api.asked[1].query["timeoutSeconds"])
        assert 5 <= seconds <= 10
        assert api.asked[1].idle_s == seconds + 3
        clock.advance_s(seconds)
        assert known.reflector.state.age_ns(clock.now_ns()) == seconds * SECOND_NS
        api.end_watches()
        await api.until(lambda: len(api.asked) == 3)
        assert known.reflector.state.age_ns(clock.now_ns()) == 0
        # Something between that closes in good order, but early, proves nothing.
        clock.advance_s(2)
        api.end_watches()
        await api.until(lambda: len(api.asked) == 4)
        assert known.reflector.state.age_ns(clock.now_ns()) == 2 * SECOND_NS


# 410, in both forms.


@in_a_loop
async def test_a_version_that_is_gone_on_a_watch_leads_to_a_new_list_and_deletions_between_show() -> None:
    api, clock, known = scene("a", "b")
    async with known.running():
        await api.until(watching(api))
        clock.advance_s(2)
        api.answer = lambda asked: refusal(503, "starting") if asked.is_watch else None
        api.end_watches()
        await api.until(lambda: len(api.asked) == 3)
        api.delete("a")
        api.put("c", {"spec": 1})
        api.forget()
        api.answer = lambda _: None
        await known.until(lambda: set(known.objects) == {"b", "c"})
        assert known.reflector.state.failure == ""
    kinds = [asked.is_watch for asked in api.asked]
    assert False in kinds[3:]


@in_a_loop
async def test_a_list_that_takes_longer_than_a_version_is_kept_is_taken_in_one_piece() -> None:
    api, _, known = scene(*"abcde", timing=Timing(page_objects=2))
    once = iter([True])

    def forget_meanwhile(asked: Asked) -> None:
        if "continue" in asked.query and next(once, False):
            api.forget()

    api.answer = forget_meanwhile
    listing = await known.reflector.read()
    assert len(listing.objects) == 5
    assert [asked.query.get("limit") for asked in api.asked] == ["2", "2", None]


@in_a_loop
async def test_versions_that_are_gone_again_and_again_do_not_make_a_hot_loop() -> None:
    api, clock, known = scene("a")

    def gone(asked: Asked) -> FakeAnswer | None:
        return refusal(410, "too old") if asked.is_watch else None

    api.answer = gone
    async with known.running():
        await api.until(lambda: len(api.asked) >= 20)
    assert clock.slept_ns[6] > 5 * SECOND_NS
    assert known.objects == {"a": 1}


# What fails.

HTML = FakeAnswer(200, b"<html>Please log in</html>")
FAULTS = [
    pytest.param(refusal(403, "forbidden"), id="403"),
    pytest.param(refusal(401, "Unauthorized"), id="401"),
    pytest.param(FakeAnswer(404, b"404 page not found\n"), id="404 as text"),
    pytest.param(FakeAnswer(503, b"server is starting\n"), id="503 as text"),
    pytest.param(refusal(500, "etcdserver: request timed out"), id="500"),
    pytest.param(HTML, id="a page of HTML"),
    pytest.param(FakeAnswer(200, b""), id="nothing"),
    pytest.param(FakeAnswer(200, b"{}"), id="an empty object"),
    pytest.param(FakeAnswer(200, b"[]"), id="an empty list of JSON"),
    pytest.param(FakeAnswer(200, b'{"kind":"Status","metadata":{"resourceVersion":"1"},"items":[]}'), id="a status"),
    pytest.param(FakeAnswer(200, b'{"kind":"KuraInstanceList","metadata":{},"items":[]}'), id="no version"),
    pytest.param(FakeAnswer(200, b'{"kind":"XList","metadata":{"resourceVersion":"1"}}'), id="no items"),
    pytest.param(FakeAnswer(200, b'{"kind":"XList","metadata":{"resourceVersion":"1"},"items":[{}]}'), id="no name"),
    pytest.param(FakeAnswer(200, b"[" * 100_000), id="deep"),
]


@pytest.mark.case("F23")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("page", [1, 2])
@in_a_loop
async def test_a_list_that_failed_on_any_page_is_never_a_shorter_list(fault: FakeAnswer, page: int) -> None:
    api, clock, known = scene(*"abc", timing=Timing(page_objects=2))
    await known.reflector.read()
    age_ns = 50 * SECOND_NS
    clock.advance_s(50)
    api.answer = lambda asked: fault if ("continue" in asked.query) == (page == 2) else None
    with pytest.raises(ApiError) as caught:
        await known.reflector.read()
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 4
    assert set(known.objects) == set("abc")
    assert known.reflector.state.age_ns(clock.now_ns()) == age_ns


@pytest.mark.parametrize("fault", FAULTS)
@in_a_loop
async def test_what_fails_is_waited_out_longer_each_time_and_what_is_known_stays(fault: FakeAnswer) -> None:
    api, clock, known = scene("a")
    async with known.running():
        await api.until(watching(api))
        api.answer = lambda _: fault
        api.end_watches(ApiError("cut"))
        await api.until(lambda: len(api.asked) >= 15)
        assert known.objects == {"a": 1}
        assert known.reflector.state.failure
        api.answer = lambda _: None
        await api.until(watching(api))
        api.put("b", {"spec": 1})
        await known.until(lambda: set(known.objects) == {"a", "b"})
        assert known.reflector.state.failure == ""
    waits = clock.slept_ns
    assert all(1 / 2 <= waits[n] / (2**n * SECOND_NS / 5) <= 1 for n in range(7))
    assert max(waits) <= 30 * SECOND_NS


@in_a_loop
async def test_a_list_of_two_versions_is_none() -> None:
    api, _, known = scene(*"abc", timing=Timing(page_objects=2))
    page = {"kind": "XList", "metadata": {"resourceVersion": "77"}, "items": []}
    other = FakeAnswer(200, json.dumps(page).encode())
    api.answer = lambda asked: other if "continue" in asked.query else None
    with pytest.raises(ApiError, match="version"):
        await known.reflector.read()


@in_a_loop
async def test_a_watch_that_ends_at_once_is_no_hot_loop_even_in_good_order() -> None:
    api, clock, known = scene("a")
    api.answer = lambda asked: FakeAnswer(200, b"") if asked.is_watch else None
    async with known.running():
        await api.until(lambda: len(api.asked) >= 12)
    assert len(clock.slept_ns) >= 10
    assert clock.slept_ns[8] > 10 * SECOND_NS
    assert [asked.is_watch for asked in api.asked[1:]] == [True] * (len(api.asked) - 1)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ADD',
        b'{"type":"ODD","object":{"metadata":{"name":"x","resourceVersion":"9"}}}',
        b'{"type":"ADDED","object":{"metadata":{"name":"x"}}}',
        b'{"type":"ADDED"}',
        b'{"type":["ADDED"],"object":{}}',
        b'{"type":"BOOKMARK","object":{"metadata":{}}}',
        b'{"type":"ERROR","object":{"code":500,"message":"no"}}',
        b'{"type":"ERROR","object":{"code":"x"}}',
        b"null",
    ],
)
@in_a_loop
async def test_a_line_that_is_no_change_changes_nothing_and_the_watch_goes_on_from_where_it_was(line: bytes) -> None:
    api, clock, known = scene("a")
    async with known.running():
        await api.until(watching(api))
        api.say(line)
        await api.until(lambda: len(api.asked) == 3)
        assert known.reflector.state.failure
        api.put("b", {"spec": 1})
        await known.until(lambda: set(known.objects) == {"a", "b"})
    assert api.asked[2].query["resourceVersion"] == "2"
    assert len(clock.slept_ns) == 1


@in_a_loop
async def test_a_server_that_wants_to_be_left_alone_is() -> None:
    api, clock, known = scene("a")
    busy = refusal(429, "too many requests", retry_after_ns=20 * SECOND_NS)
    api.answer = lambda asked: busy if len(api.asked) == 1 else None
    async with known.running():
        await api.until(watching(api))
    # And a little longer than it said, each of a fleet another little.
    (slept_ns,) = clock.slept_ns
    assert 20 * SECOND_NS < slept_ns <= 20 * SECOND_NS + Timing().backoff_least_ns


@in_a_loop
async def test_an_event_begins_the_waits_anew() -> None:
    api, clock, known = scene("a")
    api.answer = lambda asked: refusal(500, "no") if asked.is_watch and len(api.asked) < 8 else None
    async with known.running():
        await api.until(watching(api))
        api.put("b", {"spec": 1})
        await known.until(lambda: "b" in known.objects)
        api.end_watches(ApiError("cut"))
        await api.until(lambda: len(clock.slept_ns) == 7)
    assert clock.slept_ns[5] > 3 * SECOND_NS
    assert clock.slept_ns[6] <= SECOND_NS / 5


def test_waits_are_not_alike_on_two_nodes() -> None:
    one, other = (Backoff(least_ns=200, most_ns=10_000, random=Random(seed)) for seed in (1, 2))
    assert [one.next_ns() for _ in range(9)] != [other.next_ns() for _ in range(9)]


@in_a_loop
async def test_the_real_clock_goes_on() -> None:
    clock = SystemAsyncClock()
    before = clock.now_ns()
    await clock.sleep_ns(1)
    assert clock.now_ns() > before


@in_a_loop
async def test_failure_and_recovery_are_logged_once_each() -> None:
    api, _, known = scene("a")
    api.answer = lambda _: refusal(500, "no") if len(api.asked) < 6 else None
    heard = Heard()
    logger = logging.getLogger("kura_shaper.tenants.kubernetes.reflector")
    before = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        async with known.running():
            await api.until(watching(api))
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)
    assert heard.events == ["api_failed", "api_answers_again"]


class Heard(logging.Handler):
    """The events that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.getMessage())


# The words.


def test_an_answer_becomes_an_error_that_says_its_status_and_what_to_do() -> None:
    error = refused(403, b'{"message":"nodes is forbidden"}')
    assert (error.status, str(error)) == (403, "403: nodes is forbidden; grant get, list and watch")
    assert isinstance(refused(410, b"x"), GoneError)
    assert str(refused(500, b"a\nb\x1b[31m\xff")).isprintable()
    assert str(refused(500, b'{"message":7}')) == '500: {"message":7}'


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 200_000, b"9" * 5_000, b"\xff"], ids=lambda body: body[:5])
def test_a_refusal_that_no_parser_goes_through_is_a_refusal_all_the_same(body: bytes) -> None:
    assert str(refused(503, body)).startswith("503: ")


def test_pages_and_events_are_read() -> None:
    raw: dict[str, Any] = {"metadata": {"name": "n", "resourceVersion": "5"}}
    page = parse_page(
        json.dumps({"kind": "NodeList", "metadata": {"resourceVersion": "9", "continue": "c"}, "items": [raw]}).encode()
    )
    assert (page.version, page.more, page.items[0].key, page.items[0].version) == ("9", "c", ("", "n"), "5")
    event = parse_event(json.dumps({"type": "MODIFIED", "object": raw}).encode())
    assert (event.kind, event.item.raw) == (Kind.MODIFIED, raw)
