"""Which publishers a resource advertises: every shape that workers write, and everything else that somebody might."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from dwm import channel, listed, resource, zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.broker.metadata import MetadataPage, Publisher, Skip, parse_event, parse_page
from kura_shaper.broker.nesting import elements, members
from kura_shaper.tenants.kubernetes.wire import ApiError, GoneError, Kind


def page(*items: Any) -> MetadataPage:
    return parse_page(json.dumps(listed(*items)).encode())


def read(channels: Any, **data: Any) -> tuple[list[Publisher], dict[str, int]]:
    found = page(resource(channels, **data))
    return [each for made in found.resources for each in made.publishers], {
        str(reason): number for reason, number in found.skipped.items()
    }


@pytest.mark.case("ED1")
def test_a_channel_of_a_component_as_older_workers_write_it() -> None:
    found = read({"dynamo/backend/kv-events/2a": channel("tcp://10.244.1.7:41235")})
    assert found == ([("tcp://10.244.1.7:41235", "dynamo")], {})


@pytest.mark.case("ED2")
def test_a_channel_of_a_namespace_as_older_workers_write_it() -> None:
    found = read({"dynamo//kv_metrics/2a": channel("tcp://10.244.1.7:41236", component="", topic="kv_metrics")})
    assert found == ([("tcp://10.244.1.7:41236", "dynamo")], {})


def scoped(scope: Any, endpoint: str = "tcp://10.244.1.7:1") -> dict[str, Any]:
    return {"type": "EventChannel", "scope": scope, "topic": "t", "instance_id": 1, "transport": zmq(endpoint)}


@pytest.mark.case("ED3")
@pytest.mark.parametrize(
    "scope",
    [
        {"kind": "endpoint", "endpoint": {"namespace": "team-a", "component": "backend", "name": "generate"}},
        {"kind": "component", "namespace": "team-a", "component": "backend"},
        {"kind": "namespace", "name": "team-a"},
    ],
)
def test_a_channel_with_a_scope_as_newer_workers_write_it(scope: Any) -> None:
    assert read({"k": scoped(scope)}) == ([("tcp://10.244.1.7:1", "team-a")], {})


@pytest.mark.parametrize(
    ("topic", "found"),
    [("kv-events", "kv-events"), ("x" * 254, ""), (7, ""), (None, ""), (["kv-events"], "")],
)
def test_a_topic_is_known_where_it_can_be_read_and_advertises_nothing_more_or_less(topic: Any, found: str) -> None:
    read_page = page(resource({"k": channel("tcp://10.244.1.7:1", topic=topic), "bad": 7, "n": channel("tcp://a:2")}))
    (made,) = read_page.resources
    assert made.publishers == (("tcp://10.244.1.7:1", "dynamo"), ("tcp://a:2", "dynamo"))
    assert made.topics == (found, "kv-events")


def test_a_dynamo_namespace_that_no_settings_may_have_is_not_kept() -> None:
    channels = {
        "a": channel("tcp://10.0.0.1:1", namespace="n" * 254),
        "b": channel("tcp://10.0.0.1:2", namespace="n" * 253),
    }
    assert read(channels) == ([("tcp://10.0.0.1:2", "n" * 253)], {"malformed_entry": 1})


@pytest.mark.case("ED4")
def test_an_ipv6_address_is_known_by_its_canonical_form() -> None:
    channels = {"a": scoped({"kind": "namespace", "name": "team-a"}, "tcp://[FD00:0:0::7]:5557")}
    assert read(channels)[0] == [("tcp://[fd00::7]:5557", "team-a")]


@pytest.mark.case("ED5")
def test_a_worker_with_nats_has_no_publisher_and_nothing_is_wrong() -> None:
    nats = {"kind": "Nats", "config": {"subject_prefix": "namespace.dynamo"}}
    channels = {name: channel("", transport=nats) for name in ("a", "b")}
    assert read(channels, endpoints={"x": {"transport": {"nats_tcp": "y"}}}) == ([], {})


@pytest.mark.case("ED6")
def test_a_worker_behind_a_zeromq_broker_has_no_publisher_and_nothing_is_wrong() -> None:
    config = {"xsub_endpoints": ["tcp://b:5555"], "xpub_endpoints": ["tcp://b:5556"]}
    assert read({"k": channel("", transport={"kind": "ZmqBroker", "config": config})}) == ([], {})


@pytest.mark.case("ED7")
def test_no_channels_are_normal() -> None:
    empty = resource({})
    absent = resource({}) | {"spec": {"data": {}}}
    found = page(resource(None), empty, absent)
    assert [made.publishers for made in found.resources] == [(), (), ()]
    assert not found.skipped


@pytest.mark.case("ED8")
@pytest.mark.parametrize(
    "spec", [None, "x", {}, {"data": "x"}, {"data": []}, {"data": {"event_channels": []}}, {"data": None}]
)
def test_a_resource_that_is_none_is_skipped_and_its_page_is_kept(spec: Any) -> None:
    bad = resource({}, name="bad") | {"spec": spec}
    absent = {key: value for key, value in resource({}, name="absent").items() if key != "spec"}
    good = resource({"a": channel("tcp://10.0.0.1:1")}, name="good")
    found = page(bad, absent, good)
    assert {made.name: len(made.publishers) for made in found.resources} == {"bad": 0, "absent": 0, "good": 1}
    assert found.skipped == {Skip.MALFORMED_RESOURCE: 2}


def test_what_has_not_even_a_name_is_skipped() -> None:
    found = page(7, None, {"metadata": {}}, resource({}))
    assert [made.name for made in found.resources] == ["w0-main"]
    assert found.skipped == {Skip.MALFORMED_RESOURCE: 3}


@pytest.mark.case("ED9")
def test_a_bad_channel_is_skipped_and_the_good_one_beside_it_is_kept() -> None:
    channels = {
        "good": channel("tcp://10.0.0.1:1"),
        "text": "oops",
        "no transport": channel("", transport=None),
        "odd id": channel("tcp://10.0.0.1:2", instance_id="x"),
    }
    found = [("tcp://10.0.0.1:1", "dynamo"), ("tcp://10.0.0.1:2", "dynamo")]
    assert read(channels) == (found, {Skip.MALFORMED_ENTRY: 2})


@pytest.mark.parametrize(
    "bad",
    [
        channel(7),
        channel("x", transport={"kind": "Zmq"}),
        channel("x", transport={"kind": 7}),
        channel("tcp://10.0.0.1:1", namespace=None),
        scoped({"kind": "galaxy", "name": "x"}),
        scoped({"kind": "namespace"}),
        scoped({"kind": "endpoint", "endpoint": "x"}),
        scoped("dynamo"),
    ],
)
def test_a_channel_without_what_is_needed_is_malformed(bad: Any) -> None:
    assert read({"k": bad}) == ([], {Skip.MALFORMED_ENTRY: 1})


BAD_ENDPOINTS = [
    *("tcp://*:5557", "ipc://x", "tcp://10.0.0.1", "tcp://10.0.0.1:0", "tcp://10.0.0.1:70000", "tcp://u@h:1"),
    *("tcp://10.0.0.1:1/x", "TCP://10.0.0.1:1", "", "tcp://", "tcp://:1", "tcp://a b:1", "tcp://ä:1", "tcp://a..b:1"),
    *("tcp://2130706433:80", "tcp://127.1:80", "tcp://0x7f.1:80", "tcp://0x7f000001:80", "tcp://0177.0.0.1:80"),
    *("tcp://10.244.001.7:80", "tcp://[fe80::1%eth0]:1", "tcp://fd00::1:1", "tcp://[10.0.0.1]:1", "tcp://[::]1:1"),
    *("tcp://10.0.0.1:01", "tcp://10.0.0.1:+1", "tcp://10.0.0.1:1\n", "tcp://a\0b:1", "tcp://1.2.3.4.:5", "tcp://-a:1"),
]


@pytest.mark.case("ED10")
@pytest.mark.case("ED19")
@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_an_endpoint_that_is_none_is_skipped(endpoint: str) -> None:
    assert read({"k": channel(endpoint)}) == ([], {Skip.BAD_ENDPOINT: 1})


@pytest.mark.case("ED19")
def test_an_endpoint_with_a_special_address_is_advertised_since_the_filter_is_asked_later() -> None:
    channels = {"a": channel("tcp://127.0.0.1:5557"), "b": channel("tcp://169.254.169.254:80")}
    assert len(read(channels)[0]) == 2


@pytest.mark.case("ED11")
def test_an_endpoint_may_have_256_bytes() -> None:
    name = ".".join(["a" * 61] * 3 + ["a" * 58])
    longest = f"tcp://{name}:1"
    assert len(longest) + 2 == 254
    fits, long = f"tcp://{name}:{'1' * 3}", f"tcp://{name}:{'1' * 5}"
    assert (len(fits), len(long)) == (254, 256)
    assert read({"k": channel(long)})[0] == [(long, "dynamo")]
    assert read({"k": channel(long + "1")}) == ([], {Skip.ENDPOINT_TOO_LONG: 1})


@pytest.mark.case("ED12")
def test_a_key_may_have_1024_bytes_and_a_value_65536() -> None:
    small = channel("tcp://10.0.0.1:1")
    assert len(read({"k" * 1_024: small})[0]) == 1
    assert read({"k" * 1_025: small}) == ([], {Skip.KEY_TOO_LONG: 1})
    assert read({"ä" * 513: small}) == ([], {Skip.KEY_TOO_LONG: 1})
    room = 65_536 - len(json.dumps(small | {"pad": ""}))
    assert len(read({"k": small | {"pad": "x" * room}})[0]) == 1
    assert read({"k": small | {"pad": "x" * (room + 1)}}) == ([], {Skip.VALUE_TOO_LARGE: 1})


@pytest.mark.case("ED13")
def test_1024_channels_are_looked_at_and_no_more() -> None:
    others = {f"n{number}": channel("", transport={"kind": "Nats"}) for number in range(1_024)}
    assert read(others | {"last": channel("tcp://10.0.0.1:1")}) == ([], {Skip.ENTRY_CAP: 1})
    del others["n0"]
    assert len(read(others | {"last": channel("tcp://10.0.0.1:1")})[0]) == 1


@pytest.mark.case("ED14")
def test_256_publishers_of_a_resource_are_kept_in_their_order() -> None:
    channels = {f"k{number}": channel(f"tcp://10.0.0.1:{number + 1}") for number in range(257)}
    found, skipped = read(channels)
    assert found == [(f"tcp://10.0.0.1:{number + 1}", "dynamo") for number in range(256)]
    assert skipped == {Skip.PUBLISHER_CAP: 1}


@pytest.mark.case("ED16")
@pytest.mark.parametrize("depth", [900, 5_000, 200_000])
def test_a_model_card_without_a_bottom_costs_only_its_own_resource(depth: int) -> None:
    good = [resource({"a": channel(f"tcp://10.0.0.{n}:1")}, name=f"w{n}") for n in range(31)]
    deep = json.dumps(resource({"a": channel("tcp://10.9.9.9:1")}, name="deep", model_cards="DEEP"))
    text = json.dumps(listed(*good, "HERE"))
    content = text.replace('"HERE"', deep.replace('"DEEP"', "[" * depth + "]" * depth)).encode()
    found = parse_page(content)
    assert {made.name for made in found.resources if made.publishers} >= {f"w{n}" for n in range(31)}
    assert found.version == "9"
    if depth > 1_000:
        assert found.skipped == {Skip.MALFORMED_RESOURCE: 1}


@pytest.mark.case("ED16")
def test_a_change_to_a_model_card_without_a_bottom_takes_away_what_was_advertised() -> None:
    deep = json.dumps(resource({"a": channel("tcp://10.9.9.9:1")}, name="deep", model_cards="DEEP"))
    line = f'{{"type":"MODIFIED","object":{deep}}}'.replace('"DEEP"', "[" * 9_000 + "]" * 9_000).encode()
    event = parse_event(line)
    assert (event.kind, event.version, event.resource.name, event.resource.publishers) == (
        Kind.MODIFIED,
        "7",
        "deep",
        (),
    )


@pytest.mark.case("ED18")
def test_an_endpoint_of_the_request_plane_is_never_advertised() -> None:
    assert read({}, endpoints={"generate": "10.244.1.7:8000/42/generate"}) == ([], {})


@pytest.mark.case("EP25")
def test_publishers_under_one_id_are_all_kept() -> None:
    channels = {f"k{number}": channel(f"tcp://10.0.0.1:{number + 1}", instance_id=7) for number in range(3)}
    assert len(read(channels)[0]) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", b"{}", b'{"kind":"List"}', b'{"kind":"X","metadata":{"resourceVersion":"1"},"items":[]}'],
)
def test_a_page_that_is_none_is_an_error_and_no_empty_list(content: bytes) -> None:
    with pytest.raises(ApiError):
        parse_page(content)


def test_a_page_says_where_it_goes_on() -> None:
    assert parse_page(json.dumps(listed(more="abc")).encode()).more == "abc"


def event(kind: str, content: Any) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode()


def test_events_are_read_by_their_kind() -> None:
    made = parse_event(event("ADDED", resource({"a": channel("tcp://10.0.0.1:1")})))
    assert (made.kind, made.version, made.resource.publishers) == (Kind.ADDED, "7", (("tcp://10.0.0.1:1", "dynamo"),))
    gone = parse_event(event("DELETED", resource({"a": channel("tcp://10.0.0.1:1")})))
    assert (gone.kind, gone.resource.name, gone.resource.publishers) == (Kind.DELETED, "w0-main", ())
    assert parse_event(event("BOOKMARK", {"metadata": {"resourceVersion": "12"}})).version == "12"


@pytest.mark.case("EP22")
def test_an_error_of_a_version_that_is_gone_says_so_whatever_the_status_of_http_was() -> None:
    with pytest.raises(GoneError):
        parse_event(event("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"}))
    with pytest.raises(ApiError):
        parse_event(event("ERROR", {"kind": "Status", "code": 500}))


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"type":"ADDED"}', b'{"type":"X","object":{"metadata":{}}}'])
def test_a_line_that_is_no_event_is_an_error(line: bytes) -> None:
    with pytest.raises(ApiError):
        parse_event(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON, ascii_only=st.booleans())
def test_outermost_parts_are_those_that_a_parser_finds(value: Any, ascii_only: bool) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode()
    if isinstance(value, list):
        assert [json.loads(each) for each in elements(content)] == value
    elif isinstance(value, dict):
        assert {key: json.loads(each) for key, each in members(content).items()} == value


@settings(max_examples=100, deadline=None)
@given(channels=JSON, key=st.text(max_size=4))
def test_no_channels_that_anybody_may_write_fail_a_page(channels: Any, key: str) -> None:
    good = resource({"a": channel("tcp://10.0.0.1:1")}, name="good")
    found = page(resource(channels), resource({key: channels}), resource({key: channel(channels)}), good)
    assert found.resources[-1].publishers == (("tcp://10.0.0.1:1", "dynamo"),)


@settings(max_examples=40, deadline=None)
@given(channels=st.dictionaries(st.text(max_size=4), JSON, max_size=3), key=st.text(max_size=4))
def test_a_resource_is_read_alike_whatever_stands_beside_it(channels: Any, key: str) -> None:
    several = channels | {key: channel("tcp://10.0.0.1:1"), "z": channel("tcp://10.0.0.1")}
    # What is malformed keeps a page from being read at once: each of its resources is read by itself.
    alone, beside = page(resource(several)), page(resource(several), resource(7, name="malformed"))
    assert alone.resources == beside.resources[:1]
    assert beside.skipped == alone.skipped + Counter([Skip.MALFORMED_RESOURCE])
    assert (
        parse_event(json.dumps({"type": "ADDED", "object": resource(several)}).encode()).resource == alone.resources[0]
    )
