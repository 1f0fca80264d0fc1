"""DynamoWorkerMetadata: which publishers a resource advertises. Anybody may have written it, so all of it is bounded.

Only `spec.data.event_channels` is read, and of that only ZeroMQ publishers with an address of their own.
What is malformed is skipped and counted, entry by entry, and never fails what stands beside it. The shapes of
both generations of workers are known: the scope of a channel was flat, and is an object since.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kura_shaper.broker.endpoint import ENDPOINT_BYTES_MAX, EndpointError, parse_endpoint
from kura_shaper.broker.nesting import elements, members
from kura_shaper.tenants.kubernetes.wire import ApiError, Kind, refused

ENTRIES_MAX, PUBLISHERS_MAX = 1_024, 256
# No settings may have longer ones, so nobody could ask for them, and they are not kept.
NAMESPACE_CHARACTERS_MAX = TOPIC_CHARACTERS_MAX = 253
KEY_BYTES_MAX, VALUE_BYTES_MAX = 1_024, 65_536
_TOPICS_SHARED = 64
_ZMQ = "Zmq"

Publisher = tuple[str, str]
"""A canonical endpoint, and the Dynamo namespace that it is advertised under."""


class Skip(StrEnum):
    """Why something was not taken."""

    MALFORMED_RESOURCE = "malformed_resource"
    MALFORMED_ENTRY = "malformed_entry"
    KEY_TOO_LONG = "key_too_long"
    VALUE_TOO_LARGE = "value_too_large"
    ENDPOINT_TOO_LONG = "endpoint_too_long"
    BAD_ENDPOINT = "bad_endpoint"
    ENTRY_CAP = "entry_cap"
    PUBLISHER_CAP = "publisher_cap"
    RESOURCE_CAP = "resource_cap"
    TOTAL_CAP = "total_cap"


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource by its name, and what it advertises, in the order of the document.

    `topics` has what each of the publishers says that it publishes, "" where it says nothing of use.
    """

    name: str
    publishers: tuple[Publisher, ...] = ()
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetadataPage:
    """Part of a list; `more` asks for the next one."""

    resources: tuple[Resource, ...]
    version: str
    more: str
    skipped: Counter[Skip] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class MetadataEvent:
    """A change of one resource, or a bookmark, which has only a version."""

    kind: Kind
    version: str
    resource: Resource
    skipped: Counter[Skip] = field(default_factory=Counter)


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    more: str | None = msgspec.field(name="continue", default=None)


class _Page(msgspec.Struct):
    kind: str
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Meta(msgspec.Struct):
    name: str
    version: str = msgspec.field(name="resourceVersion", default="")


class _Head(msgspec.Struct):
    metadata: _Meta


class _Data(msgspec.Struct):
    event_channels: dict[str, msgspec.Raw] | None = None


class _Spec(msgspec.Struct):
    data: _Data


class _Body(msgspec.Struct):
    spec: _Spec


class _Item(msgspec.Struct):
    metadata: _Meta
    spec: _Spec


class _WholePage(msgspec.Struct):
    kind: str
    metadata: _ListMeta
    items: list[_Item]


class _Transport(msgspec.Struct):
    kind: str
    config: msgspec.Raw = msgspec.Raw(b"null")


class _Channel(msgspec.Struct):
    transport: _Transport
    scope: msgspec.Raw = msgspec.Raw(b"null")
    namespace: msgspec.Raw = msgspec.Raw(b"null")
    topic: msgspec.Raw = msgspec.Raw(b"null")


class _Zmq(msgspec.Struct):
    endpoint: str


class _InnerScope(msgspec.Struct):
    namespace: str


class _Scope(msgspec.Struct):
    kind: str
    name: str | None = None
    namespace: str | None = None
    endpoint: _InnerScope | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_whole = msgspec.json.Decoder(_WholePage)
_page = msgspec.json.Decoder(_Page)
_head = msgspec.json.Decoder(_Head)
_body = msgspec.json.Decoder(_Body)
_channel = msgspec.json.Decoder(_Channel)
_zmq = msgspec.json.Decoder(_Zmq)
_scope = msgspec.json.Decoder(_Scope)
_event = msgspec.json.Decoder(_Event)
_text = msgspec.json.Decoder(str)


def parse_page(content: bytes) -> MetadataPage:
    """Return the page of a list. Raises ApiError when it is none."""
    skipped: Counter[Skip] = Counter()
    found = _whole_page(content) or _careful_page(content)
    if isinstance(found, _WholePage):
        resources = [_advertising(each.metadata.name, each.spec, skipped) for each in found.items]
    else:
        resources = [made for raw in found.items or () if (made := _resource(raw, skipped)) is not None]
    if not found.kind.endswith("List") or found.items is None or not found.metadata.resource_version:
        raise ApiError("the answer is no list", remedy="is the custom resource definition installed?")
    return MetadataPage(tuple(resources), found.metadata.resource_version, found.metadata.more or "", skipped)


def parse_event(line: bytes) -> MetadataEvent:
    """Return an event of a watch. Raises GoneError or ApiError for one that is no change."""
    try:
        kind, content = _kind_and_object(line)
        if kind == "ERROR":
            status = msgspec.json.decode(content)
            code = status.get("code") if isinstance(status, dict) else 0
            raise refused(code if isinstance(code, int) else 0, content)
        if kind not in list(Kind):
            raise ApiError("an event is of no known kind")
        head = _metadata_of(content)
        if kind == Kind.BOOKMARK:
            return MetadataEvent(Kind.BOOKMARK, head["resourceVersion"], Resource(""))
        skipped: Counter[Skip] = Counter()
        made = _resource(content, skipped) if kind != Kind.DELETED else None
        version = head["resourceVersion"]
        return MetadataEvent(Kind(kind), version, made or Resource(head["name"]), skipped)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ApiError("an event can't be read") from error


def _kind_and_object(line: bytes) -> tuple[str, bytes]:
    try:
        found = _event.decode(line)
        return found.type, bytes(found.object)
    except RecursionError:
        parts = members(line)
        return _text.decode(parts["type"]), parts["object"]


def _metadata_of(content: bytes) -> dict[str, str]:
    """Return name and version of an object, also of one that is nested without end."""
    raw = members(content)["metadata"]
    found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {key: _text.decode(found[key]) for key in ("name", "resourceVersion") if key in found}


def _whole_page(content: bytes) -> _WholePage | None:
    """Return a page in which nothing is malformed, as one of workers alone is: its text is read once, not thrice."""
    try:
        return _whole.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _careful_page(content: bytes) -> _Page:
    """Return a page whose resources are still to be read, each by itself. Raises ApiError."""
    try:
        return _page.decode(content)
    except RecursionError:
        return _deep_page(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError("the answer is no list") from error


def _deep_page(content: bytes) -> _Page:
    """Return a page in which something is nested deeper than a parser goes; only that resource will be missing."""
    try:
        parts = members(content)
        return _Page(
            _text.decode(parts["kind"]),
            msgspec.json.decode(parts["metadata"], type=_ListMeta),
            [msgspec.Raw(each) for each in elements(parts["items"])],
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ApiError("the answer is no list") from error


def _resource(content: bytes | msgspec.Raw, skipped: Counter[Skip]) -> Resource | None:
    """Return what a resource advertises, None when not even its name can be read."""
    name = ""
    try:
        name = _head.decode(content).metadata.name
        spec = _body.decode(content).spec
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        skipped[Skip.MALFORMED_RESOURCE] += 1
        return Resource(name) if name else None
    return _advertising(name, spec, skipped)


def _advertising(name: str, spec: _Spec, skipped: Counter[Skip]) -> Resource:
    found: list[Publisher] = []
    topics: list[str] = []
    for number, (key, raw) in enumerate((spec.data.event_channels or {}).items()):
        if number == ENTRIES_MAX:
            skipped[Skip.ENTRY_CAP] += 1
            break
        made = _publisher(key, raw)
        if isinstance(made, Skip):
            skipped[made] += 1
        elif made is not None:
            if len(found) == PUBLISHERS_MAX:
                skipped[Skip.PUBLISHER_CAP] += 1
                break
            found.append(made[0])
            topics.append(made[1])
    return Resource(name, tuple(found), _shared(tuple(topics)))


# Workers of one kind have the same topics, in the same order.
@functools.lru_cache(_TOPICS_SHARED)
def _shared(topics: tuple[str, ...]) -> tuple[str, ...]:
    return topics


def _publisher(key: str, raw: msgspec.Raw) -> tuple[Publisher, str] | Skip | None:
    """Return what a channel advertises and its topic, None for what is no publisher of ours, or why it was skipped."""
    if len(key.encode(errors="surrogatepass")) > KEY_BYTES_MAX:
        return Skip.KEY_TOO_LONG
    if memoryview(raw).nbytes > VALUE_BYTES_MAX:
        return Skip.VALUE_TOO_LARGE
    try:
        channel = _channel.decode(raw)
        if channel.transport.kind != _ZMQ:
            return None
        endpoint, namespace = _zmq.decode(channel.transport.config).endpoint, _namespace(channel)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Skip.MALFORMED_ENTRY
    if len(endpoint.encode(errors="surrogatepass")) > ENDPOINT_BYTES_MAX:
        return Skip.ENDPOINT_TOO_LONG
    if len(namespace) > NAMESPACE_CHARACTERS_MAX:
        return Skip.MALFORMED_ENTRY
    try:
        # Many resources name the same few namespaces, and relists the same endpoints.
        return (sys.intern(str(parse_endpoint(endpoint))), sys.intern(namespace)), _topic(channel)
    except EndpointError:
        return Skip.BAD_ENDPOINT


def _namespace(channel: _Channel) -> str:
    """Return the Dynamo namespace of a channel. Raises msgspec.ValidationError."""
    if bytes(channel.scope) == b"null":
        return _text.decode(channel.namespace)
    scope = _scope.decode(channel.scope)
    found = {
        "namespace": scope.name,
        "component": scope.namespace,
        "endpoint": scope.endpoint.namespace if scope.endpoint else None,
    }.get(scope.kind)
    if found is None:
        raise msgspec.ValidationError("a scope of no known kind")
    return found


def _topic(channel: _Channel) -> str:
    """Return the topic of a channel, "" for none that can be read: that is no fault, since it allows nothing."""
    try:
        topic = _text.decode(channel.topic)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return sys.intern(topic) if len(topic) <= TOPIC_CHARACTERS_MAX else ""
