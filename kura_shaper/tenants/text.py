"""A tenants document as YAML: the same values give the same text, and the text the same values."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import yaml

from kura_shaper.tenants.file import KIND
from kura_shaper.tenants.rules import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kura_shaper.tenants.document import Endpoint, Tenant, TenantsDocument

_PLAIN_TAG = "tag:yaml.org,2002:str"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-./_")


def document_text(document: TenantsDocument) -> str:
    """Return the text of a document, which `load_tenants` reads to the same values."""
    gateway = document.gateway
    lines = [
        f"apiVersion: {API_VERSION}",
        f"kind: {KIND}",
        f"region: {_word(document.region)}",
        f'marks: {{mask: "{document.marks.mask:#010x}"}}',
        "gateway:",
        f"  https_ports: [{', '.join(map(str, gateway.https_ports))}]",
        f"  peer_ports: [{', '.join(map(str, gateway.peer_ports))}]",
        f"  grpc_prefixes: {_words(gateway.grpc_prefixes)}",
        "tenants:" if document.tenants else "tenants: []",
    ]
    for tenant in document.tenants:
        lines += _tenant(tenant)
    return "\n".join(lines) + "\n"


def _tenant(tenant: Tenant) -> Iterator[str]:
    yield f"  - name: {_word(tenant.name)}"
    yield f"    class: {tenant.class_id:#x}"
    yield f"    floor: {tenant.floor}"
    yield f"    ceiling: {tenant.ceiling}"
    for key, words in (
        ("hosts", tenant.hosts),
        ("peer_hosts", tenant.peer_hosts),
        ("client_cidrs", tuple(map(str, tenant.client_cidrs))),
    ):
        if words:
            yield f"    {key}: {_words(words)}"
    backends = tenant.backends
    served = [
        (key, end) for key, end in (("http", backends.http), ("grpc", backends.grpc), ("peer", backends.peer)) if end
    ]
    if served:
        yield "    backends:"
        yield from (f"      {key}: {_endpoint(end)}" for key, end in served)


def _endpoint(end: Endpoint) -> str:
    return f'{{{"dns" if end.is_dns_name else "address"}: "{end}"}}'


def _words(words: Iterable[str]) -> str:
    return f"[{', '.join(map(_word, words))}]"


@cache
def _resolve() -> Callable[..., object]:
    found: Callable[..., object] = yaml.resolver.Resolver().resolve
    return found


def _word(word: str) -> str:
    """Return a word as every reader of YAML takes it for a text: quoted, unless that is plain to see."""
    is_plain = word[0].isalpha() and _PLAIN.issuperset(word) and len(word) > 1
    if is_plain and _resolve()(yaml.ScalarNode, word, (True, False)) == _PLAIN_TAG:
        return word
    return json.dumps(word)
