"""The tenants document is loaded whole and checked, or refused in one line that says where."""

from __future__ import annotations

import time
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kura_shaper.errors import DocumentError
from kura_shaper.tenants.document import Backends, Endpoint, Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.file import SIZE_BYTES_MAX, load_tenants, parse_tenants
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.units import Rate

EXAMPLE = Path(__file__).parents[2] / "haproxy" / "examples" / "tenants.yaml"

# The comments count lines for the tables below.
DOCUMENT = """\
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
marks: {mask: "0xffff0000"}
defaults: {floor: 0, ceiling: 1500M}
gateway:
  https_ports: [443]
  peer_ports: [7443]
  grpc_prefixes: [/google.bytestream.]
# 10
tenants:
  - name: acme
    class: 0x2a7
    floor: 25M
    ceiling: 1.5G
    hosts: [acme.kura.example]
    peer_hosts: [peer.acme.kura.example]
    client_cidrs: [10.0.0.0/8]
    backends:
      http: {address: "10.0.0.5:4000"} # 20
      grpc: {address: "[2001:db8::5]:4001"}
      peer: {dns: "acme.kura.svc.example:7443"}
  - name: beta
    class: 256
    hosts: [beta.kura.example]
    backends: {http: {address: "10.0.0.6:4000"}}
"""


def edited(old: str, new: str) -> str:
    assert DOCUMENT.count(old) == 1, old
    return DOCUMENT.replace(old, new)


def refusal(text: str, *, file: str = "t.yaml") -> str:
    with pytest.raises(DocumentError) as caught:
        parse_tenants(text, file=file)
    assert str(caught.value).isprintable()
    assert caught.value.remedy
    return str(caught.value)


def test_every_part_of_a_document_becomes_a_value() -> None:
    beta = Tenant(
        name="beta",
        class_id=0x100,
        floor=Rate(0),
        ceiling=Rate(1_500_000_000),
        hosts=("beta.kura.example",),
        backends=Backends(http=Endpoint("10.0.0.6", 4000)),
    )
    acme = Tenant(
        name="acme",
        class_id=0x2A7,
        floor=Rate(25_000_000),
        ceiling=Rate(1_500_000_000),
        hosts=("acme.kura.example",),
        peer_hosts=("peer.acme.kura.example",),
        client_cidrs=(ip_network("10.0.0.0/8"),),
        backends=Backends(
            http=Endpoint("10.0.0.5", 4000),
            grpc=Endpoint("2001:db8::5", 4001),
            peer=Endpoint("acme.kura.svc.example", 7443, is_dns_name=True),
        ),
    )
    assert parse_tenants(DOCUMENT, file="t.yaml") == TenantsDocument(
        region="us-east",
        tenants=(beta, acme),  # by class id
        marks=MarkLayout(0xFFFF0000),
        gateway=Gateway(grpc_prefixes=("/google.bytestream.",)),
    )


def test_the_least_document_takes_every_default() -> None:
    text = "apiVersion: kura-shaper/v1\nkind: Tenants\nregion: r\ntenants: [{name: a, class: 0x100}]\n"
    document = parse_tenants(text, file="t.yaml")
    assert document == TenantsDocument(
        region="r", tenants=(Tenant(name="a", class_id=0x100, floor=Rate(0), ceiling=Rate(1_500_000_000)),)
    )


def test_the_ports_of_the_gateway_are_those_of_both_planes() -> None:
    assert parse_tenants(edited("[7443]", "[8443, 80]"), file="t.yaml").gateway.ports == (80, 443, 8443)


def test_a_region_may_have_no_tenants_yet() -> None:
    text = "apiVersion: kura-shaper/v1\nkind: Tenants\nregion: r\ntenants: []\n"
    assert parse_tenants(text, file="t.yaml").tenants == ()


def test_the_example_loads() -> None:
    document = load_tenants(EXAMPLE)
    assert [tenant.name for tenant in document.tenants] == ["acme", "globex", "initech"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kind: Tenants", 'kind: "Tenants"'),
        ("class: 256", 'class: "0x100"'),
        ("class: 256", "class: 0x0100"),
        ("  peer_ports: [7443]\n", ""),
        ("ceiling: 1.5G", 'ceiling: "1500000k"'),
        ("{floor: 0, ceiling: 1500M}", "{ceiling: 15e8}"),
        ("{floor: 0, ceiling: 1500M}", "{}"),
        ('{mask: "0xffff0000"}', "{mask: 4294901760}"),
        ('{mask: "0xffff0000"}', "{neighbours: [calico, cilium], acknowledge: [calico]}"),
        ("[beta.kura.example]", "[Beta.KURA.example.]"),
        ("[10.0.0.0/8]", '["10.0.0.0/8"]'),
        ("[443]", '["443"]'),
        ("apiVersion", "\ufeffapiVersion"),
        ("apiVersion", "%YAML 1.1\n---\napiVersion"),
        ("# 10", "#\r"),
    ],
)
def test_the_same_document_may_be_spelled_in_other_ways(old: str, new: str) -> None:
    assert parse_tenants(edited(old, new), file="t.yaml") == parse_tenants(DOCUMENT, file="t.yaml")


@pytest.mark.parametrize(
    ("old", "new", "place", "says"),
    [
        ("kura-shaper/v1", "kura-shaper/v2", "1: apiVersion", "is 'kura-shaper/v2'; this version reads kura-shaper/v1"),
        ("kind: Tenants", "kind: Deployment\nspec: {}", "2: kind", "is 'Deployment'; this version reads Tenants"),
        ("kind: Tenants\n", "", "1", "key kind is missing; add kind:"),
        ("region: us-east", "region: US_East", "3: region", "'US_East' is no DNS-1123 label; use at most 63 of"),
        ("region: us-east", "region: no", "3: region", "'no' without quotes is a boolean; quote it: 'no'"),
        ("region: us-east", "region: 12", "3: region", "'12' without quotes is a number"),
        ("region: us-east", "region: 2026-01-02", "3: region", "'2026-01-02' without quotes is a date"),
        ("region: us-east", "region: =", "3: region", "'=' without quotes is a special value"),
        ("region: us-east", "region:", "3: region", "has no value; give it one, or remove the key"),
        ("region: us-east", "region: [a]", "3: region", "is a list, not a single value; write it as a single value"),
        ("region: us-east", "regoin: us-east", "3: regoin", "unknown key 'regoin'; did you mean region?"),
        ("floor: 0,", "bottom: 0,", "5: defaults.bottom", "unknown key 'bottom'; known keys here: floor, ceiling"),
        ("    floor: 25M", "    Floor: 25M", "14: tenants[0].Floor", "unknown key 'Floor'; did you mean floor?"),
        ("    floor: 25M", '    "a\\nb": 25M', "14: tenants[0].'a\\nb'", "unknown key 'a\\nb'; known keys here: name,"),
        ("    floor: 25M", "    ? [a]\n    : 25M", "14: tenants[0]", "a key is no single word"),
        ("    floor: 25M", "    name: x", "14: tenants[0]", "key 'name' stands twice, first in line 12; remove one"),
        ("    floor: 25M", "    <<: {floor: 1M}", "14: tenants[0]", "uses a merge key of YAML"),
        ("    floor: 25M", '    "<<": {floor: 1M}', "14: tenants[0].'<<'", "unknown key '<<'"),
        ("    floor: 25M", "    floor: &f 25M", "14: tenants[0].floor", "uses an anchor or alias of YAML"),
        ("    floor: 25M", "    floor: *f", "14: tenants[0].floor", "uses an anchor or alias of YAML"),
        ("    floor: 25M", "    floor: !!str 25M", "14: tenants[0].floor", "uses a tag of YAML"),
        ("    floor: 25M", '    floor: ! "25M"', "14: tenants[0].floor", "uses a tag of YAML"),
        ("    floor: 25M", "    floor: !!python/name:os.system", "14: tenants[0].floor", "uses a tag of YAML"),
        ("hosts: [acme", "hosts: !x [acme", "16: tenants[0].hosts", "uses a tag of YAML"),
        ("backends:\n", "backends: &b\n", "19: tenants[0].backends", "uses an anchor or alias of YAML"),
        ("    floor: 25M", "    floor: 25Mbit", "14: tenants[0].floor", "'25Mbit' is not a quantity; write a number"),
        ("    floor: 25M", "    floor: -1M", "14: tenants[0].floor", "'-1M' is a negative rate"),
        ("    floor: 25M", "    floor: 1:30", "14: tenants[0].floor", "'1:30' is not a quantity"),
        ("    floor: 25M", "    floor:", "14: tenants[0].floor", "has no value"),
        ("    floor: 25M", "    floor: ~", "14: tenants[0].floor", "has no value"),
        ("    floor: 25M", "    floor: {}", "14: tenants[0].floor", "is a mapping, not a single value"),
        (
            "floor: 25M",
            "floor: 2G",
            "15: tenants[0].ceiling",
            "ceiling 1.5G (its own, line 15) is below floor 2G (its own, line 14); raise the ceiling or lower",
        ),
        (
            "{floor: 0, ceiling: 1500M}",
            "{floor: 20M, ceiling: 10M}",
            "23: tenants[1]",
            "ceiling 10M (default, line 5) is below floor 20M (default, line 5)",
        ),
        (
            "class: 256",
            "class: 256\n    floor: 2G",
            "23: tenants[1]",
            "ceiling 1.5G (default, line 5) is below floor 2G (its own, line 25)",
        ),
        (
            "defaults: {floor: 0, ceiling: 1500M}",
            "defaults: {floor: 1501M}",
            "23: tenants[1]",
            "ceiling 1.5G (built-in default) is below floor 1.501G (default, line 5)",
        ),
        ("ceiling: 1.5G", "ceiling: 0", "15: tenants[0].ceiling", "ceiling 0 (its own, line 15) is too low"),
        ("ceiling: 1.5G", "ceiling: 63999", "15: tenants[0].ceiling", "too low to serve anybody; use at least 64k"),
        ('"0xffff0000"', '"0xff"', "4: marks.mask", "mask 0x000000ff is 8 bits wide; a class id needs 9 to 16 bits"),
        ('"0xffff0000"', "0xffff", "4: marks.mask", "writes bits of kube-proxy (0x0000c000), which is on every node"),
        (
            '"0xffff0000"',
            "0x1ff0000",
            "13: tenants[0].class",
            "class 0x2a7 does not fit mask 0x01ff0000; use at most 0x1ff",
        ),
        ('mask: "0xffff0000"', "neighbours: [weave]", "4: marks", "writes bits of weave (0x00060000), a neighbour on"),
        (
            'mask: "0xffff0000"',
            "neighbours: [x]",
            "4: marks.neighbours[0]",
            "'x' is no known user of the firewall mark",
        ),
        ('mask: "0xffff0000"', "acknowledge: [y]", "4: marks.acknowledge[0]", "known: kube-proxy, cilium,"),
        ('mask: "0xffff0000"', "neighbours: calico", "4: marks.neighbours", "is a single value, not a list"),
        ("marks: {mask", "marks: [mask", "4", "is not YAML: "),
        ("[443]", "[0]", "7: gateway.https_ports[0]", "port 0 is out of range; use 1 to 65535"),
        ("[443]", "[443, 65536]", "7: gateway.https_ports[1]", "port 65536 is out of range"),
        ("[443]", "[1:30]", "7: gateway.https_ports[0]", "'1:30' is no whole number; write it in decimal or as 0x"),
        ("[443]", "[443, 443]", "7: gateway.https_ports[1]", "port 443 belongs to gateway.https_ports[0] already"),
        ("[7443]", "[443]", "8: gateway.peer_ports[0]", "port 443 belongs to gateway.https_ports[0] already (line 7)"),
        (
            "  https_ports: [443]\n  peer_ports: [7443]",
            "  peer_ports: [443]",
            "7: gateway.peer_ports[0]",
            "https_ports",
        ),
        (
            "[443]\n  peer_ports: [7443]",
            "[7443]",
            "7: gateway.https_ports[0]",
            "belongs to the default peer_ports already",
        ),
        ("[443]", "[]", "16: tenants[0].hosts", "the gateway has no port for the hosts of acme; give the gateway"),
        ("[7443]", "[]", "17: tenants[0].peer_hosts", "the gateway has no port for the peer_hosts of acme"),
        ("[/google.bytestream.]", "[a.b]", "9: gateway.grpc_prefixes[0]", "'a.b' is no path prefix; start with /"),
        ("[/google.bytestream.]", "[/a, /a]", "9: gateway.grpc_prefixes[1]", "prefix /a belongs to gateway.grpc_"),
        (
            "[/google.bytestream.]",
            str([f"/a{number}." for number in range(65)]),
            "9: gateway.grpc_prefixes",
            "has 65 prefixes; keep to 64",
        ),
        ("[443]", str(list(range(8000, 8041))), "6: gateway", "has 42 ports; keep to 40 over both planes"),
        ("tenants:\n", "tenants: []\nmore:\n", "12: more", "unknown key 'more'; known keys here: apiVersion, kind"),
        ("  - name: acme\n    class", "  - class", "12: tenants[0]", "key name is missing"),
        ("name: acme", "name: on", "12: tenants[0].name", "'on' without quotes is a boolean"),
        ("name: acme", "name: 1.2", "12: tenants[0].name", "'1.2' without quotes is a number"),
        ("name: acme", "name: acme_2", "12: tenants[0].name", "'acme_2' is no DNS-1123 label; use at most 50"),
        ("name: acme", "name: acme-", "12: tenants[0].name", "is no DNS-1123 label"),
        ("name: acme", f"name: {'a' * 51}", "12: tenants[0].name", "is no DNS-1123 label"),
        ("name: acme", f"name: {'a' * 5100}", "12: tenants[0].name", "aaa…' is no DNS-1123 label"),
        ("name: acme", 'name: "acme\\n"', "12: tenants[0].name", "'acme\\n' is no DNS-1123 label"),
        ("name: beta", "name: acme", "23: tenants[1].name", "name acme belongs to tenants[0] already (line 12)"),
        ("class: 256", "class: 0x2A7", "24: tenants[1].class", "class 0x2a7 belongs to tenant acme already (line 13)"),
        (
            "class: 256",
            "class: 0xff",
            "24: tenants[1].class",
            "class 0xff is out of range; a tenant's class is 0x100 to",
        ),
        ("class: 256", "class: 0xffff", "24: tenants[1].class", "class 0xffff is out of range"),
        ("class: 256", "class: 0o400", "24: tenants[1].class", "'0o400' is no whole number"),
        ("class: 256", "class: 0400", "24: tenants[1].class", "'0400' is no whole number"),
        ("class: 256", "class: 2_56", "24: tenants[1].class", "'2_56' is no whole number"),
        ("class: 256", "class: 256.0", "24: tenants[1].class", "'256.0' is no whole number"),
        ("class: 256", "class: 0b100000000", "24: tenants[1].class", "is no whole number"),
        ("class: 256", "class: yes", "24: tenants[1].class", "'yes' is no whole number"),
        (
            "[beta.kura.example]",
            "[b.example, ACME.kura.example.]",
            "25: tenants[1].hosts[1]",
            "host acme.kura.example belongs to tenant acme already (line 16); no host may stand twice",
        ),
        ("[peer.acme.kura.example]", "[acme.kura.example]", "17: tenants[0].peer_hosts[0]", "belongs to tenant acme"),
        ("[beta.kura.example]", "[peer.acme.kura.example]", "25: tenants[1].hosts[0]", "tenant acme already (line 17)"),
        ("[beta.kura.example]", "beta.kura.example", "25: tenants[1].hosts", "is a single value, not a list"),
        ("hosts: [beta.kura.example]", "hosts:", "25: tenants[1].hosts", "has no value; give it a list, or remove"),
        (
            "[10.0.0.0/8]",
            "[10.0.0.1/8]",
            "18: tenants[0].client_cidrs[0]",
            "bits set right of its prefix; write 10.0.0.0/8",
        ),
        ("[10.0.0.0/8]", "[10.0.0.0/8, 10.0.0.0/8]", "18: tenants[0].client_cidrs[1]", "network 10.0.0.0/8 belongs to"),
        ("      http: {address", "      htpp: {address", "20: tenants[0].backends.htpp", "did you mean http?"),
        (
            '    backends: {http: {address: "10.0.0.6:4000"}}',
            "    backends: {}",
            "25: tenants[1].hosts",
            "nothing serves the hosts of beta; add backends.http, or remove hosts",
        ),
        (
            '      peer: {dns: "acme.kura.svc.example:7443"}\n',
            "",
            "17: tenants[0].peer_hosts",
            "nothing serves the peer_hosts of acme; add backends.peer",
        ),
        ('{address: "10.0.0.6:4000"}', "{}", "26: tenants[1].backends.http", "has neither address nor dns"),
        (
            '{address: "10.0.0.6:4000"}',
            '{address: "10.0.0.6:4000", dns: "a.example:1"}',
            "26: tenants[1].backends.http",
            "has both address and dns; give one of them",
        ),
        ('{address: "10.0.0.6:4000"}', "x:1", "26: tenants[1].backends.http", "is a single value, not a mapping"),
    ],
)
def test_a_document_with_one_fault_is_refused_at_its_place(old: str, new: str, place: str, says: str) -> None:
    line = refusal(edited(old, new))
    assert line.startswith(f"t.yaml:{place}: ")
    assert says in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "t.yaml: is empty; start with apiVersion: kura-shaper/v1"),
        ("# nothing\n", "t.yaml: is empty"),
        ("---\n", "t.yaml: is empty"),
        ("~", "t.yaml: is empty"),
        ("text", "t.yaml:1: is a single value, not a mapping"),
        ("[]", "t.yaml:1: is a list, not a mapping"),
        ("{}", "t.yaml:1: key apiVersion is missing"),
        (DOCUMENT + "---\n" + DOCUMENT, "t.yaml:27: a second document starts here; keep one for each file"),
        (DOCUMENT + "...\n---\n", "t.yaml:28: a second document starts here"),
        (DOCUMENT + "...\n]", "t.yaml:28: is not YAML: "),
        ("a: [1, 2", "t.yaml:1: is not YAML: did not find expected ',' or ']'; check indentation, quotes and brackets"),
        ("a: b\n\tc: d", "t.yaml:2: is not YAML: "),
        ('a: "\\ud800"', "t.yaml:1: is not YAML: "),
        ("%YAML 9.9\n---\n", "t.yaml:1: is not YAML: "),
        ("a: 1\nb: \x00", "t.yaml:2: contains the character '\\x00'; remove it: YAML has no place for it"),
        ("a: \x1b[2J", "t.yaml:1: contains the character '\\x1b'"),
        ("a:\n\n \ud800", "t.yaml:3: contains the character '\\ud800'"),
        ("a: b\ufeff", "t.yaml:1: contains the character '\\ufeff'"),
        ("a: b\uffff", "t.yaml:1: contains the character '\\uffff'"),
        (
            "- " * 20 + "a",
            "t.yaml:1: [0][0][0][0][0][0][0][0][0][0][0][0][0][0][0][0][0][0][0][0]: is nested deeper than 20",
        ),
        ("[" * 2_000_000, "nest"),  # some versions of the parser notice first
        ("{a: " * 2_000_000, "is nested deeper than 20 levels; write it flat"),
        ("? " * 2_000_000, "is nested deeper than 20 levels; write it flat"),
        ("&a " + "x" * 1_000_000, "t.yaml:1: uses an anchor or alias of YAML"),
        ("x" * (SIZE_BYTES_MAX + 1), "t.yaml: is larger than 16 MiB; keep it to 16 MiB"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_text_that_is_no_document_is_refused_before_it_costs_anything(text: str, line: str) -> None:
    assert line in refusal(text)


def test_an_alias_bomb_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{key}: &{key} [*{last}, *{last}]\n" for last, key in ("ab", "bc", "cd"))
    assert refusal(bomb).startswith("t.yaml:1: a: uses an anchor or alias of YAML")


def test_the_name_of_the_file_can_not_break_the_line() -> None:
    assert refusal("", file="t\n\x1b[31m.yaml").startswith("t\\n\\x1b[31m.yaml: is empty")


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("a.example", "a.example"),
        ("A.Example.", "a.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("3com.example", "3com.example"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        (f"{'a' * 63}.example", f"{'a' * 63}.example"),
        (".".join(["a" * 49] * 5) + ".abc.", ".".join(["a" * 49] * 5) + ".abc"),
    ],
)
def test_a_hostname_is_kept_in_lower_case_without_the_dot_of_the_root(written: str, host: str) -> None:
    assert parse_tenants(edited("beta.kura.example", written), file="t.yaml").tenants[0].hosts == (host,)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("*.example", "'*.example' is a wildcard; list every name: the gateway maps exact names"),
        ("*", "is a wildcard"),
        ("bücher.example", "is not ASCII; write it as xn--bcher-kva.example"),
        ("BÜCHER.example", "is not ASCII; write it as xn--bcher-kva.example"),
        ("straße.example", "is not ASCII; write its A-label (xn--...)"),  # two names, by two standards
        ("\u212aura.example", "is not ASCII; write it as kura.example"),  # never taken for it in silence
        ("ü .example\\n", "is not ASCII; write its A-label (xn--...)"),
        (f"{'ü' * 70}.example", "is not ASCII; write its A-label (xn--...)"),
        ("localhost", "hostname 'localhost' has one label; write the full name"),
        ("10.0.0.5", "'10.0.0.5' is an address, not a hostname; use a DNS name"),
        ("a.example.0x7f", "is an address, not a hostname"),
        ("12345", "is an address, not a hostname"),
        ("::1", "'::1' is no hostname"),
        ("a.example:443", "is no hostname; write dot-separated labels"),
        ("https://a.example", "is no hostname"),
        ("a..example", "is no hostname"),
        ("a.example..", "is no hostname"),
        (".a.example", "is no hostname"),
        (".", "is no hostname"),
        ("", "is no hostname"),
        ("-a.example", "is no hostname"),
        ("a-.example", "is no hostname"),
        ("a_b.example", "is no hostname"),
        ("a b.example", "is no hostname"),
        ("a.example\\n", "is no hostname"),
        ("a.example #x", "is no hostname"),
        (f"{'a' * 64}.example", "is no hostname"),
        (".".join(["a" * 49] * 5) + ".abcd", "is no hostname"),
        ("a." * 200_000, "is too long; use at most 253 characters"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_text_that_the_gateway_could_not_map_is_no_hostname(written: str, says: str) -> None:
    line = refusal(edited("[beta.kura.example]", f'["{written}"]'))
    assert line.startswith("t.yaml:25: tenants[1].hosts[0]: ")
    assert says in line


@pytest.mark.parametrize("plain", ["no", "1.2", "12", "1_000.5", "2026-01-02"])
def test_a_hostname_that_yaml_takes_for_something_else_is_refused(plain: str) -> None:
    assert f"'{plain}' without quotes is" in refusal(edited("beta.kura.example", plain))


@pytest.mark.parametrize(
    ("written", "endpoint", "printed"),
    [
        ('{address: "10.0.0.6:1"}', Endpoint("10.0.0.6", 1), "10.0.0.6:1"),
        ("{address: 10.0.0.6:65535}", Endpoint("10.0.0.6", 65535), "10.0.0.6:65535"),
        ('{address: "[2001:DB8:0::5]:1"}', Endpoint("2001:db8::5", 1), "[2001:db8::5]:1"),
        ('{dns: "Cache.tenant.example.:1"}', Endpoint("cache.tenant.example", 1, is_dns_name=True), None),
        ('{dns: "cache:1"}', Endpoint("cache", 1, is_dns_name=True), "cache:1"),
    ],
)
def test_a_backend_is_an_address_or_a_name_with_a_port(written: str, endpoint: Endpoint, printed: str | None) -> None:
    found = parse_tenants(edited('{address: "10.0.0.6:4000"}', written), file="t.yaml").tenants[0].backends.http
    assert found == endpoint
    assert str(found) == (printed or "cache.tenant.example:1")


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("address", "10.0.0.6", "'10.0.0.6' has no port; write it as 10.0.0.0:4000"),
        ("address", "10.0.0.6:", "has no port"),
        ("address", "10.0.0.6:http", "has no port"),
        ("address", "10.0.0.6:0", "has no port"),
        ("address", "10.0.0.6:080", "has no port"),
        ("address", "10.0.0.6:0x50", "has no port"),
        ("address", "10.0.0.6:65536", "port 65536 is out of range"),
        ("address", "10.0.0.06:80", "is no IP address and port"),
        ("address", "cache.example:80", "is no IP address and port; write it as 10.0.0.5:4000 or [2001:db8::5]:4000"),
        ("address", "2001:db8::5:80", "is no IP address and port"),
        ("address", "[10.0.0.6]:80", "is no IP address and port"),
        ("address", "[fe80::1%eth0]:80", "is no IP address and port"),
        ("address", ":80", "is no IP address and port"),
        ("address", "0.0.0.0:80", "is no address of a server"),
        ("address", "[ff02::1]:80", "is no address of a server"),
        ("dns", "cache.example", "has no port; write it as cache.tenant.example:4000"),
        ("dns", "10.0.0.6:80", "'10.0.0.6' is an address, not a hostname"),
        ("dns", "*.example:80", "is no hostname"),
        ("dns", ":80", "is no hostname"),
    ],
)
def test_a_backend_that_could_not_be_reached_is_refused(key: str, written: str, says: str) -> None:
    line = refusal(edited('{address: "10.0.0.6:4000"}', f'{{{key}: "{written}"}}'))
    assert line.startswith(f"t.yaml:26: tenants[1].backends.http.{key}: ")
    assert says.replace("10.0.0.0:4000", "10.0.0.5:4000") in line


@pytest.mark.parametrize(
    ("written", "network"),
    [
        ("192.0.2.1", "192.0.2.1/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::/0", "::/0"),
    ],
)
def test_clients_are_networks_of_either_family(written: str, network: str) -> None:
    tenants = parse_tenants(edited("[10.0.0.0/8]", f'["{written}"]'), file="t.yaml").tenants
    assert tenants[1].client_cidrs == (ip_network(network),)


@pytest.mark.parametrize(
    "written", ["", "10", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "10.0.0.0/-1", "fe80::%1/64", "a.example", "10.0.0.0/8 "]
)
def test_a_text_that_is_no_network_is_refused(written: str) -> None:
    assert "is no network; write CIDR notation" in refusal(edited("[10.0.0.0/8]", f'["{written}"]'))


@pytest.mark.parametrize("character", [" ", "\t", "\\n", "\\0", "#", "'", '\\"', "\\\\", "%", "{", "}", "é", "\\x7f"])
def test_a_path_prefix_holds_nothing_that_a_map_file_or_a_configuration_would_read(character: str) -> None:
    line = refusal(edited("[/google.bytestream.]", f'["/a{character}b"]'))
    assert "is no path prefix; start with /" in line


def test_64_path_prefixes_fit() -> None:
    prefixes = tuple(f"/p{number}-a.B_c/D." for number in range(64))
    document = parse_tenants(edited("[/google.bytestream.]", str(list(prefixes))), file="t.yaml")
    assert document.gateway.grpc_prefixes == prefixes


def test_a_file_that_is_not_there_or_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none.yaml", "none.yaml: could not be read: No such file or directory; check the path"),
        (tmp_path, ": could not be read: Is a directory"),
        (tmp_path / "a\0b", "a\\x00b: could not be read: there can be no such path"),
    ):
        with pytest.raises(DocumentError) as caught:
            load_tenants(path)
        assert reason in str(caught.value)


def test_a_file_that_is_not_utf_8_is_refused_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes(b"kind: Tenants\nregion: \xff\n")
    with pytest.raises(DocumentError, match=r"tenants\.yaml:2: is not UTF-8; save the file as UTF-8"):
        load_tenants(path)


def test_a_large_file_is_refused_even_when_its_characters_are_few(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_bytes("é".encode() * (SIZE_BYTES_MAX // 2) + b"xx")
    with pytest.raises(DocumentError, match="is larger than 16 MiB"):
        load_tenants(path)


def test_a_text_of_more_values_than_any_region_has_is_refused_before_it_is_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kura_shaper.tenants.file.VALUES_MAX", 1_000)
    with pytest.raises(DocumentError, match="has more than 1000 values; one document for each region"):
        parse_tenants("\n".join(f"- {number}" for number in range(2_000)), file="t.yaml")


def test_a_document_of_a_large_region_loads_in_a_fraction_of_a_reconcile() -> None:
    tenants = "".join(
        f"  - name: t{number}\n    class: {number:#x}\n    hosts: [t{number}.example]\n"
        '    backends: {http: {address: "10.0.0.5:4000"}}\n'
        for number in range(0x100, 0x100 + 2_500)
    )
    text = f"apiVersion: kura-shaper/v1\nkind: Tenants\nregion: r\ntenants:\n{tenants}"
    start = time.process_time()
    assert len(parse_tenants(text, file="t.yaml").tenants) == 2_500
    assert time.process_time() - start < 2


def texts(characters_max: int) -> st.SearchStrategy[str]:
    """Any characters, with enough ASCII among them to look like YAML; surrogates too."""
    characters = st.one_of(st.integers(0, 0x7F), st.integers(0, 0x2FFF), st.integers(0, 0x10FFFF)).map(chr)
    return st.lists(characters, max_size=characters_max).map("".join)


def outcome(text: str) -> str:
    """Load a text, whatever it is, and return the one line of its refusal, if any."""
    try:
        document = parse_tenants(text, file="t.yaml")
    except DocumentError as error:
        refused = error
    else:
        assert list(document.tenants) == sorted(document.tenants, key=lambda tenant: tenant.class_id)
        return ""
    assert str(refused).isprintable()
    assert refused.remedy
    assert len(str(refused)) < 1_000
    return str(refused)


@given(texts(40))
@example("\x85")
@example("\u2028: \u2028")
def test_any_text_is_a_document_or_refused_in_one_line(text: str) -> None:
    assert outcome(text)


@settings(max_examples=150)
@given(start=st.integers(0, len(DOCUMENT)), length=st.integers(0, 12), new=texts(6))
def test_a_document_with_a_hole_anywhere_is_a_document_or_refused_in_one_line(
    start: int, length: int, new: str
) -> None:
    outcome(DOCUMENT[:start] + new + DOCUMENT[start + length :])


SCALARS = ["25M", '"0x2a7"', "443", "[443]", "acme", "a.example", "10.0.0.5:4000"]
WORDS = [
    "~",
    "no",
    "1:30",
    "0o7",
    "<<:",
    "&",
    "*",
    "!",
    "!!int",
    '"\\n"',
    "[]",
    "{}",
    "[",
    "]",
    "}",
    "-",
    "?",
    "|",
    ">",
    "%",
    "@",
    '"',
]


@settings(max_examples=150)
@given(line=st.integers(0, DOCUMENT.count("\n") - 1), new=st.sampled_from(SCALARS + WORDS) | texts(8))
def test_a_document_with_any_value_replaced_is_a_document_or_refused_in_one_line(line: int, new: str) -> None:
    lines = DOCUMENT.splitlines()
    key, colon, _ = lines[line].partition(":")
    lines[line] = f"{key}{colon} {new}"
    outcome("\n".join(lines))


@settings(max_examples=150)
@given(texts(20) | st.text("aü.-*0:[]/ \n\x1b", max_size=80))
def test_any_host_is_kept_safe_or_refused_in_one_line(host: str) -> None:
    quoted = '"' + "".join(f"\\U{ord(character):08x}" for character in host) + '"'
    line = outcome(edited("beta.kura.example", quoted))
    if not line:
        kept = parse_tenants(edited("beta.kura.example", quoted), file="t.yaml").tenants[0].hosts[0]
        assert set(kept) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
