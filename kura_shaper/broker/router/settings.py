"""What a router is told: one YAML file. Everything that is wrong with it is said at once, each with its key path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kura_shaper.broker import entries
from kura_shaper.broker.endpoint import EndpointError, parse_endpoint
from kura_shaper.broker.entries import Entries, Parts
from kura_shaper.broker.protocol.codes import Role
from kura_shaper.broker.protocol.frames import AnnouncedSource, ZmqEndpoint
from kura_shaper.broker.protocol.limits import (
    HEARTBEAT_MS_DEFAULT,
    HEARTBEAT_MS_MAX,
    HEARTBEAT_MS_MIN,
    IDLE_MS_DEFAULT,
    IDLE_MS_MAX,
    IDLE_MS_MIN,
    KIB,
    MIB,
    STREAM_BUFFER_BYTES_MAX,
    STREAM_BUFFER_BYTES_MIN,
    STREAMS_DEFAULT,
    STREAMS_MAX,
)
from kura_shaper.broker.router.faults import Fault, FaultStep
from kura_shaper.errors import UsageError
from kura_shaper.log import LogFormat, LogLevel
from kura_shaper.tenants import check
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kura_shaper.tenants.check import Value

_METRICS_LISTEN = Endpoint("0.0.0.0", 9465)  # noqa: S104 - probes come to the pod's own address
SUBSCRIPTIONS_MAX, TOPICS_MAX, FAULTS_MAX, SESSIONS_MAX = 4096, 16, 64, 1024
DISCOVER_MAX = 64
_TOPIC_CHARACTERS_MAX = 253


@dataclass(frozen=True, slots=True)
class Subscription:
    """A publisher that is wanted: its events of some topics, its bytes as a local port, or both.

    A topic is a prefix, as in ZeroMQ; "" is every topic. With a `source` there is no endpoint: it is what a kv_listener
    announced under that name.
    """

    endpoint: str
    dynamo_namespace: str
    topics: tuple[str, ...] = ()
    expose: Endpoint | None = None
    source: str = ""

    def reads_like(self, other: Subscription) -> bool:
        """Whether the same is read of the same publisher."""
        return (self.target, self.topics) == (other.target, other.topics)

    @property
    def target(self) -> ZmqEndpoint | AnnouncedSource:
        """What a client of the bus is asked for."""
        return AnnouncedSource(self.source) if self.source else ZmqEndpoint(self.endpoint, self.dynamo_namespace)

    @property
    def role(self) -> Role:
        """What a client has to be to have it."""
        return Role.KV_LISTENER if self.source else Role.BROKER

    @property
    def name(self) -> str:
        """What it is called for people: its address, or source:NAME."""
        return str(self.target)


@dataclass(frozen=True, slots=True)
class Discover:
    """A Kubernetes namespace whose workers' publishers are wanted: those of some Dynamo namespaces and topics.

    Without a kubeconfig it is the cluster that the router itself is in.
    """

    namespace: str
    dynamo_namespaces: tuple[str, ...]
    topics: tuple[str, ...]
    kubeconfig: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Everything that a router can be told."""

    listen: Endpoint
    certificate: Path
    private_key: Path
    token_file: Path
    path_prefix: str = ""
    subscriptions: tuple[Subscription, ...] = ()
    discover: tuple[Discover, ...] = ()
    max_sessions: int = 64
    max_streams: int = STREAMS_DEFAULT
    max_stream_buffer_bytes: int = STREAM_BUFFER_BYTES_MAX
    stream_window_bytes: int = 256 * KIB
    max_message_bytes: int = MIB
    heartbeat_interval_ms: int = HEARTBEAT_MS_DEFAULT
    idle_timeout_ms: int = IDLE_MS_DEFAULT
    drain_deadline_ms: int = 25_000
    metrics_listen: Endpoint = _METRICS_LISTEN
    serve: Endpoint | None = None
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.JSON
    faults: tuple[FaultStep, ...] = ()


def load_settings(path: Path) -> RouterSettings:
    """Return the settings of a file. Raises SettingsError with everything that is wrong."""
    reading = Entries.of_file(path, tuple(_READERS))
    found = {field: reading.read(key, reader) for key, (field, reader) in _READERS.items()}
    reading.require("listen", "certificate", "private_key", "token_file")
    told = {field: value for field, value in found.items() if value is not None}
    interval_ms = told.get("heartbeat_interval_ms", HEARTBEAT_MS_DEFAULT)
    if told.get("idle_timeout_ms", IDLE_MS_DEFAULT) < 2 * interval_ms:
        reading.refuse("idle_timeout", "is below twice the heartbeat_interval", remedy="raise idle_timeout")
    _refuse_repeated(told.get("subscriptions", ()), reading)
    _refuse_taken(told, reading)
    reading.raise_if_wrong()
    return RouterSettings(**told)


def _refuse_repeated(subscriptions: tuple[Subscription, ...], reading: Entries) -> None:
    seen: dict[tuple[object, ...], int] = {}
    for number, each in enumerate(subscriptions):
        first = seen.setdefault((each.target, *sorted(each.topics)), number)
        if each.topics and first != number:
            remedy = "remove one, or expose the publisher in the first one as well"
            reading.refuse(f"subscriptions[{number}]", f"is subscriptions[{first}] again", remedy=remedy)


def _refuse_taken(told: dict[str, Any], reading: Entries) -> None:
    """Refuse an address that two are to listen on; the one that has each of its family is another's as well."""
    exposed = enumerate(told.get("subscriptions", ()))
    listening = [
        ("listen", told.get("listen")),
        ("metrics_listen", told.get("metrics_listen", _METRICS_LISTEN)),
        ("serve", told.get("serve")),
        *((f"subscriptions[{number}].expose", each.expose) for number, each in exposed),
    ]
    before: dict[int, list[tuple[str, Endpoint]]] = {}
    for key, at in listening:
        if at is None:
            continue
        taken = next((name for name, other in before.get(at.port, ()) if _is_one_address(at, other)), "")
        before.setdefault(at.port, []).append((key, at))
        if taken:
            remedy = "give each an address or a port of its own"
            reading.refuse(key, f"is {at}, where {taken} listens already", remedy=remedy)


def _is_one_address(one: Endpoint, other: Endpoint) -> bool:
    if (":" in one.host) != (":" in other.host):
        return False
    return one.host == other.host or bool({"0.0.0.0", "::"} & {one.host, other.host})  # noqa: S104 - not listened on here


def keys_that_differ(before: RouterSettings, after: RouterSettings) -> tuple[str, ...]:
    """Return the keys, in their order, that only a restart brings into force."""
    fields = {key: field for key, (field, _) in _READERS.items() if key != "subscriptions"}
    return tuple(key for key, field in fields.items() if getattr(before, field) != getattr(after, field))


# What one entry may be.


def _endpoint(content: str) -> str:
    try:
        return str(parse_endpoint(content))
    except EndpointError as error:
        raise UsageError(f"{check.quoted(content)} {error.message}", remedy="write tcp://address:port") from error


def _topic(content: str) -> str:
    if len(content) > _TOPIC_CHARACTERS_MAX or not (content.isprintable() or not content):
        remedy = f'use at most {_TOPIC_CHARACTERS_MAX} characters, or "" for every topic'
        raise UsageError(f"{check.quoted(content)} is no topic", remedy=remedy)
    return content


def _source(content: str) -> str:
    if not 0 < len(content) <= _TOPIC_CHARACTERS_MAX or not content.isprintable():
        remedy = f"use 1 to {_TOPIC_CHARACTERS_MAX} characters"
        raise UsageError(f"{check.quoted(content)} is no name of a source", remedy=remedy)
    return content


def _subscription(value: Value) -> Subscription:
    found = check.mapping(value, required=("dynamo_namespace",), optional=("endpoint", "source", "topics", "expose"))
    parts = Parts()
    if ("endpoint" in found) == ("source" in found):
        refused = value.refused("names no publisher, or two", remedy="give it endpoint:, or source: of a kv_listener")
        parts.add(refused)
    if "topics" not in found and "expose" not in found:
        parts.add(value.refused("is read by nobody", remedy="add topics: or expose:"))
    endpoint = parts.read(entries.text(_endpoint), found.get("endpoint"))
    namespace = parts.read(entries.text(entries.dynamo_namespace), found["dynamo_namespace"])
    topics = parts.read(entries.listed("topic", _topic, TOPICS_MAX), found.get("topics"))
    expose = parts.read(entries.text(check.listen_endpoint), found.get("expose"))
    source = parts.read(entries.text(_source), found.get("source"))
    parts.raise_if_wrong()
    return Subscription(endpoint or "", namespace or "", topics or (), expose, source or "")


def _namespace(content: str) -> str:
    return check.label(content, characters_max=63)


def _discover(value: Value) -> Discover:
    found = check.mapping(value, required=("namespace", "dynamo_namespaces", "topics"), optional=("kubeconfig",))
    namespaces = entries.listed("Dynamo namespace", entries.dynamo_namespace, entries.NAMESPACES_MAX)
    parts = Parts()
    namespace = parts.read(entries.text(_namespace), found["namespace"])
    dynamo_namespaces = parts.read(namespaces, found["dynamo_namespaces"])
    topics = parts.read(entries.listed("topic", _topic, TOPICS_MAX), found["topics"])
    kubeconfig = parts.read(entries.text(entries.file_path), found.get("kubeconfig"))
    parts.raise_if_wrong()
    return Discover(namespace or "", dynamo_namespaces or (), topics or (), kubeconfig)


def _served(content: str) -> Endpoint:
    # Whoever connects is served, so it takes an address of its own to be served elsewhere than on this machine.
    return check.listen_endpoint(f"127.0.0.1:{content}" if content.isdecimal() else content)


def _fault(value: Value) -> FaultStep:
    found = check.mapping(value, required=("after", "do"))
    parts = Parts()
    after_ms = parts.read(entries.duration_ms(0, 3_600_000), found["after"])
    fault: Any = parts.read(entries.choice(Fault), found["do"])
    parts.raise_if_wrong()
    return FaultStep(after_ms or 0, fault)


def _each(what: str, reader: Callable[[Value], Any], most: int) -> Callable[[Value], tuple[Any, ...]]:
    def read(value: Value) -> tuple[Any, ...]:
        items = check.sequence(value)
        if len(items) > most:
            raise value.refused(f"has {len(items)} items", remedy=f"give at most {most} {what}")
        parts = Parts()
        made = tuple(parts.read(reader, item) for item in items)
        parts.raise_if_wrong()
        return made

    return read


_READERS: dict[str, tuple[str, Callable[[Value], Any]]] = {
    "listen": ("listen", entries.text(check.listen_endpoint)),
    "certificate": ("certificate", entries.text(entries.file_path)),
    "private_key": ("private_key", entries.text(entries.file_path)),
    "token_file": ("token_file", entries.text(entries.file_path)),
    "path_prefix": ("path_prefix", entries.text(entries.url_prefix)),
    "subscriptions": ("subscriptions", _each("subscriptions", _subscription, SUBSCRIPTIONS_MAX)),
    "discover": ("discover", _each("namespaces", _discover, DISCOVER_MAX)),
    "max_sessions": ("max_sessions", entries.whole(1, SESSIONS_MAX)),
    "max_streams": ("max_streams", entries.whole(1, STREAMS_MAX)),
    "max_stream_buffer_bytes": (
        "max_stream_buffer_bytes",
        entries.size_bytes(STREAM_BUFFER_BYTES_MIN, STREAM_BUFFER_BYTES_MAX),
    ),
    "stream_window": ("stream_window_bytes", entries.size_bytes(64 * KIB, 16 * MIB)),
    "max_message_bytes": ("max_message_bytes", entries.size_bytes(KIB, 64 * MIB)),
    "heartbeat_interval": ("heartbeat_interval_ms", entries.duration_ms(HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX)),
    "idle_timeout": ("idle_timeout_ms", entries.duration_ms(IDLE_MS_MIN, IDLE_MS_MAX)),
    "drain_deadline": ("drain_deadline_ms", entries.duration_ms(0, 600_000)),
    "metrics_listen": ("metrics_listen", entries.text(check.listen_endpoint)),
    "serve": ("serve", entries.text(_served)),
    "log_level": ("log_level", entries.choice(LogLevel)),
    "log_format": ("log_format", entries.choice(LogFormat)),
    "faults": ("faults", _each("faults", _fault, FAULTS_MAX)),
}
