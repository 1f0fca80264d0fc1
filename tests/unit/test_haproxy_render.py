"""What is rendered: golden files, determinism, and that no document can write a line of its own.

After a change that is meant, write the golden files anew and read the difference:

    KURA_SHAPER_REGENERATE=1 .venv/bin/python -m pytest tests/unit/test_haproxy_render.py && git diff tests/data/haproxy
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_network
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import DocumentError, KuraShaperError, UsageError
from kura_shaper.haproxy.generation import CONFIG_FILE, MANIFEST_FILE, GatewayConfig, diff_text
from kura_shaper.haproxy.options import BandwidthLimit, CertificateKind, Design, GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.units import Rate

GOLDEN = Path(__file__).parent.parent / "data" / "haproxy"

ACME = Tenant(
    name="acme",
    class_id=0x2A7,
    floor=Rate.parse("25M"),
    ceiling=Rate.parse("1500M"),
    hosts=("acme-us-east-1.kura.example", "acme.cache.example"),
    peer_hosts=("peer.acme-us-east-1.kura.example",),
    backends=Backends(Endpoint("10.0.0.5", 4000), Endpoint("10.0.0.5", 4001), Endpoint("10.0.0.6", 7443)),
)
GLOBEX_SERVER = Endpoint("kura-globex-haproxy.kura.svc.cluster.local", 4000, is_dns_name=True)
GLOBEX = Tenant(
    name="globex",
    class_id=0x2A8,
    floor=Rate(0),
    ceiling=Rate.parse("500M"),
    hosts=("globex-us-east-1.kura.example",),
    client_cidrs=(ip_network("2001:db8:7::/48"), ip_network("192.0.2.0/24"), ip_network("198.51.100.0/24")),
    backends=Backends(http=GLOBEX_SERVER, grpc=GLOBEX_SERVER),
)
INITECH = Tenant(
    name="initech",
    class_id=0xFFFE,
    floor=Rate(0),
    ceiling=Rate.parse("64k"),
    peer_hosts=("peer.initech-us-east-1.kura.example",),
    backends=Backends(peer=Endpoint("2001:db8::7", 7443)),
)
DOCUMENT = TenantsDocument("us-east", (ACME, GLOBEX, INITECH))
OPTIONS = GatewayOptions((3, 0, 11))
# It can limit connections, where 3.0 limits responses.
NEWER = GatewayOptions((3, 2, 26))


def with_acme(**changes: Any) -> TenantsDocument:
    return replace(DOCUMENT, tenants=(replace(ACME, **changes), GLOBEX, INITECH))


def config_of(document: TenantsDocument = DOCUMENT, options: GatewayOptions = OPTIONS) -> str:
    return render(document, options).text(CONFIG_FILE)


def section(config: str, header: str) -> list[str]:
    """Return the lines of the one section that begins with the header."""
    blocks = [block.split("\n") for block in config.strip().split("\n\n")]
    (found,) = [block for block in blocks if block[0].startswith(header)]
    return [row.strip() for row in found[1:]]


@pytest.mark.parametrize(
    ("branch", "options"),
    [
        ("3.0", OPTIONS),
        (
            "3.2",
            replace(
                OPTIONS,
                haproxy_version=(3, 2, 26),
                certificate_kind=CertificateKind.DIRECTORY,
                certificate=PurePosixPath("/etc/kura-shaper/certificates"),
                bandwidth_limit=BandwidthLimit.OFF,
                nbthread=4,
                addresses=(IPv4Address("192.0.2.10"), IPv6Address("2001:db8::10")),
                resolvers=(Endpoint("10.96.0.10", 53),),
            ),
        ),
        (
            "3.2-inline",
            replace(OPTIONS, haproxy_version=(3, 2, 26), design=Design.INLINE, wire_overhead_percent=5, h2_streams=64),
        ),
    ],
)
def test_the_files_are_the_golden_ones(branch: str, options: GatewayOptions) -> None:
    config, folder = render(DOCUMENT, options), GOLDEN / branch
    if os.environ.get("KURA_SHAPER_REGENERATE"):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, content in config.files.items():
            (folder / name).write_bytes(content)
    golden = GatewayConfig({path.name: path.read_bytes() for path in folder.iterdir()})
    assert diff_text(golden, config) == ""
    assert golden == config


def test_the_order_of_tenants_and_the_patch_level_change_nothing() -> None:
    tenants = list(DOCUMENT.tenants)
    random.Random(7).shuffle(tenants)
    shuffled = replace(DOCUMENT, tenants=tuple(tenants))
    patched = replace(OPTIONS, haproxy_version=(3, 0, 99))
    assert render(shuffled, patched) == render(DOCUMENT, OPTIONS)
    assert render(shuffled, patched).generation == render(DOCUMENT, OPTIONS).generation


def test_the_manifest_has_the_sum_of_every_other_file() -> None:
    files = render(DOCUMENT, OPTIONS).files
    manifest = json.loads(files[MANIFEST_FILE])
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != MANIFEST_FILE}
    assert manifest == {"schema": 1, "haproxy": "3.0", "files": expected}


def test_a_document_without_tenants_still_refuses_everybody() -> None:
    config = config_of(replace(DOCUMENT, tenants=()))
    assert "frontend edge" in config
    assert "frontend tls" not in config
    assert render(replace(DOCUMENT, tenants=()), OPTIONS).files["sni.map"] == b""


def test_marks_follow_the_documents_layout() -> None:
    document = replace(with_acme(class_id=0x1FF), marks=MarkLayout(0x00FFFF00))
    config = render(document, OPTIONS)
    assert config.files["mark.map"].startswith(f"acme {0x1FF00}\n".encode())
    assert f"tcp-request connection set-fc-mark {0x1000}" in section(config.text(CONFIG_FILE), "frontend edge")


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        ((3, 0, 3), "tune.h2.fe.initial-window-size 65535", ("rxbuf", "notsent-lowat")),
        ((3, 1, 0), "tune.notsent-lowat.client 16384", ("initial-window-size",)),
        ((3, 2, 26), "tune.h2.fe.rxbuf 4194304", ("initial-window-size",)),
    ],
)
def test_a_version_gets_only_what_it_knows(
    version: tuple[int, int, int], present: str, absent: tuple[str, ...]
) -> None:
    config = config_of(options=replace(OPTIONS, haproxy_version=version))
    assert present in section(config, "global")
    assert not [word for word in absent if word in config]


def test_every_plane_of_a_tenant_counts_in_its_one_bucket() -> None:
    config = config_of(options=NEWER)
    edge, peer = section(config, "backend acme_edge"), section(config, "backend acme_peer")
    limit = "filter bwlim-out ceiling limit 187500000 key str(acme) table ceilings min-size 12288"
    assert [row for row in (*edge, *peer) if "bwlim" in row] == [limit, limit]
    assert config.count("set-bandwidth-limit") == config.count("filter bwlim-out") == 4


@pytest.mark.parametrize("version", [(3, 0, 11), (3, 0, 99), (3, 1, 20), (3, 2, 22), (3, 3, 99), (3, 4, 3)])
def test_a_version_that_would_lose_the_end_of_a_limited_connection_limits_responses(
    version: tuple[int, int, int],
) -> None:
    config = config_of(options=replace(OPTIONS, haproxy_version=version))
    for name in ("acme_edge", "acme_peer"):
        assert not [row for row in section(config, f"backend {name}") if "bwlim" in row]
    for name in ("acme_http", "acme_grpc"):
        rows = section(config, f"backend {name}")
        assert [row for row in rows if "bandwidth-limit" in row] == ["http-response set-bandwidth-limit ceiling"]


@pytest.mark.parametrize("version", [(3, 2, 23), (3, 2, 999), (3, 4, 4), (3, 5, 0)])
def test_a_version_that_does_not_limits_connections(version: tuple[int, int, int]) -> None:
    config = config_of(options=replace(OPTIONS, haproxy_version=version))
    assert [row for row in section(config, "backend acme_edge") if "bwlim" in row]
    assert not [row for row in section(config, "backend acme_http") if "bandwidth-limit" in row]


def test_inline_the_bucket_is_in_the_backends_of_requests_and_used_once_in_each() -> None:
    config = config_of(options=replace(NEWER, design=Design.INLINE))
    assert "frontend edge" not in config
    assert "_edge" not in config
    for name in ("acme_http", "acme_grpc"):
        rows = section(config, f"backend {name}")
        assert [row for row in rows if "bandwidth-limit" in row] == ["http-response set-bandwidth-limit ceiling"]
        assert rows.index("http-response set-bandwidth-limit ceiling") > rows.index(
            "filter bwlim-out ceiling limit 187500000 key str(acme) table ceilings min-size 4096"
        )
    assert "tcp-request content set-bandwidth-limit ceiling" in section(config, "backend acme_peer")


@pytest.mark.parametrize(("percent", "limit"), [(0, 187_500_000), (5, 178_125_000), (50, 93_750_000)])
def test_the_limit_leaves_room_for_headers(percent: int, limit: int) -> None:
    rows = section(config_of(options=replace(NEWER, wire_overhead_percent=percent)), "backend acme_edge")
    assert rows[0].startswith(f"filter bwlim-out ceiling limit {limit} ")


def test_a_gateway_that_needs_more_descriptors_than_it_gets_is_refused_with_a_number_that_fits() -> None:
    options = replace(OPTIONS, nbthread=4, nofile=20_000)
    with pytest.raises(UsageError, match=r"maxconn 10000 takes \d+ descriptors of a limit of 20000") as refused:
        render(DOCUMENT, options)
    most = int(re.findall(r"use maxconn (\d+)", refused.value.remedy)[0])
    assert render(DOCUMENT, replace(options, maxconn=most))
    with pytest.raises(UsageError):
        render(DOCUMENT, replace(options, maxconn=most + 2))


def test_a_configuration_says_who_it_is() -> None:
    rows = [section(config_of(document), "global")[1] for document in (DOCUMENT, with_acme(ceiling=Rate.parse("1G")))]
    assert all(re.fullmatch(r"description kura-shaper-[0-9a-f]{16}", row) for row in rows)
    assert rows[0] != rows[1]
    # The maps are no part of it: they change while the gateway runs.
    assert section(config_of(with_acme(class_id=0x2AA)), "global")[1] == rows[0]


def test_without_the_bandwidth_limit_nothing_of_it_is_left() -> None:
    config = config_of(options=replace(OPTIONS, bandwidth_limit=BandwidthLimit.OFF))
    assert not [word for word in ("bwlim", "bandwidth-limit", "stick-table", "ceilings") if word in config]
    assert section(config, "backend acme_edge") == ["server tls unix@/run/kura-shaper-haproxy/tls.sock send-proxy-v2"]


def test_the_table_has_room_for_every_tenant() -> None:
    tenants = tuple(replace(ACME, name=f"t{n}", class_id=0x100 + n, hosts=(), peer_hosts=()) for n in range(600))
    assert "size 1024" in section(config_of(), "backend ceilings")[0]
    assert "size 2048" in section(config_of(replace(DOCUMENT, tenants=tenants)), "backend ceilings")[0]


@pytest.mark.parametrize("ceiling", ["0", "7", "17179869184", "20G"])
def test_a_ceiling_that_haproxy_can_not_hold_is_refused(ceiling: str) -> None:
    document = with_acme(ceiling=Rate.parse(ceiling))
    with pytest.raises(DocumentError, match=r"tenants\[acme\]\.ceiling"):
        render(document, OPTIONS)
    assert render(document, replace(OPTIONS, bandwidth_limit=BandwidthLimit.OFF))


@pytest.mark.parametrize(("ceiling", "limit"), [("8", 1), ("17179869183", 2**31 - 1)])
def test_the_ends_of_the_range_are_taken(ceiling: str, limit: int) -> None:
    rows = section(config_of(with_acme(ceiling=Rate.parse(ceiling)), NEWER), "backend acme_edge")
    assert f"limit {limit} " in rows[0]


def test_client_ranges_bind_every_plane_and_long_lists_are_spread_over_lines() -> None:
    cidrs = tuple(ip_network(f"10.{n}.0.0/16") for n in range(40))
    config = config_of(with_acme(client_cidrs=cidrs))
    for plane in ("edge", "http", "grpc", "peer"):
        rows = section(config, f"backend acme_{plane}")
        assert [len(row.split()) - 3 for row in rows if row.startswith("acl allowed src ")] == [16, 16, 8]
        refusal = "http-request deny deny_status 403" if plane in {"http", "grpc"} else "tcp-request content reject"
        assert f"{refusal} unless allowed" in rows


def test_grpc_readiness_is_asked_of_the_http_port_beside_it() -> None:
    assert section(config_of(), "backend acme_grpc")[-1].split()[2:8] == (
        ["10.0.0.5:4001", "proto", "h2", "check", "port", "4000"]
    )
    alone = config_of(with_acme(backends=replace(ACME.backends, http=None)))
    assert "httpchk" not in "".join(section(alone, "backend acme_grpc"))
    assert "backend acme_http" not in alone


def test_nothing_answers_for_a_name_without_a_backend_and_nothing_speaks_quic() -> None:
    config = config_of()
    assert "default_backend" not in config
    assert "quic" not in config


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (with_acme(class_id=0x2A8), "belongs to two tenants"),
        (with_acme(class_id=0xFF), "is not a tenant's"),
        (with_acme(class_id=0xFFFF), "is not a tenant's"),
        (with_acme(name="globex"), "is there twice"),
        (with_acme(name="Acme"), "is no tenant name"),
        (with_acme(name="acme_edge"), "is no tenant name"),
        (with_acme(hosts=GLOBEX.hosts), "belongs to two tenants"),
        (with_acme(peer_hosts=GLOBEX.hosts), "belongs to two tenants"),
        (with_acme(hosts=("a.example", "A.example.")), "is named twice"),
        (with_acme(hosts=("*.example",)), "is no DNS name"),
        (with_acme(hosts=("localhost",)), "is no full hostname"),
        (with_acme(hosts=("a" * 64 + ".example",)), "is no DNS name"),
        (with_acme(hosts=("a." * 126 + "ex",)), "is no DNS name"),
        (with_acme(backends=Backends(peer=ACME.backends.peer)), "lead to no server"),
        (with_acme(backends=replace(ACME.backends, peer=None)), "lead to no server"),
        (with_acme(backends=replace(ACME.backends, http=Endpoint("10.0.0.5", 0))), "port 0 is out of range"),
        (with_acme(backends=replace(ACME.backends, http=Endpoint("host", 80))), "is no IP address"),
        (with_acme(backends=replace(ACME.backends, http=Endpoint("a b", 80, is_dns_name=True))), "is no DNS name"),
        (replace(DOCUMENT, gateway=Gateway(peer_ports=(443,))), "a port is used twice"),
        (replace(DOCUMENT, gateway=Gateway(https_ports=(8405,))), "a port is used twice"),
        (replace(DOCUMENT, gateway=Gateway(https_ports=(70_000,))), "is out of range"),
        (replace(DOCUMENT, gateway=Gateway(grpc_prefixes=("/a", "/a"))), "is named twice"),
        (replace(DOCUMENT, gateway=Gateway(grpc_prefixes=("google.",))), "is no path prefix"),
    ],
)
def test_what_can_not_mean_one_thing_is_refused(document: TenantsDocument, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        render(document, OPTIONS)


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["", "acme", "acme.kura.example", "10.0.0.5", "/google."]),
        st.sampled_from(
            ["\n", "\r", "\0", " ", "\t", "#", "'", '"', "\\", "$HOME", "%[src]", "${X}", "\u2028", "_edge"]
        ),
        st.sampled_from(["", "x", "\n    default_backend x", " evil", ".kura.example"]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(text=HOSTILE, field=st.sampled_from(["name", "hosts", "peer_hosts", "http", "dns", "grpc_prefixes", "region"]))
def test_no_text_in_a_document_can_add_or_change_a_line(text: str, field: str) -> None:
    try:
        config = render(_with_text(field, text), OPTIONS)
    except KuraShaperError:
        return
    assert _shape(config) == _shape(render(_with_text(field, _BENIGN[field]), OPTIONS))


_BENIGN = {
    "name": "zeta",
    "hosts": "zeta.example",
    "peer_hosts": "zeta.example",
    "http": "192.0.2.1",
    "dns": "zeta.example",
    "grpc_prefixes": "/zeta.",
    "region": "zeta",
}


def _with_text(field: str, text: str) -> TenantsDocument:
    match field:
        case "grpc_prefixes":
            return replace(DOCUMENT, gateway=Gateway(grpc_prefixes=(text,)))
        case "region":
            return replace(DOCUMENT, region=text)
        case "http" | "dns":
            server = Endpoint(text, 4000, is_dns_name=field == "dns")
            return with_acme(backends=replace(ACME.backends, http=server))
        case "name":
            return with_acme(name=text)
        case _:
            return with_acme(**{field: (text,)})


def _shape(config: GatewayConfig) -> dict[str, list[tuple[int, str]]]:
    """Return how many words each line has and which directive it is, sorted, since a name decides the order."""
    shape = {}
    for name in {*config.files} - {MANIFEST_FILE}:
        rows = config.files[name].decode("ascii").split("\n")
        assert all(row.isprintable() for row in rows)
        words = [row.split(" ") for row in (row.strip(" ") for row in rows)]
        shape[name] = sorted((len(row), row[0] if name == CONFIG_FILE else "") for row in words)
    return shape
