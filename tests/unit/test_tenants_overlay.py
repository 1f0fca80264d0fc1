"""An overlay changes ports and names and nothing else, or is refused in one line that says where."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kura_shaper.cli.main import run
from kura_shaper.errors import DocumentError
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX, Gateway, TenantsDocument
from kura_shaper.tenants.file import load_tenants, parse_tenants

GATEWAY = Path(__file__).parents[2] / "haproxy"
EXAMPLE = GATEWAY / "examples" / "tenants.yaml"
SIDE_BY_SIDE = GATEWAY / "overlays" / "side-by-side.yaml"
BOTH_PORTS = GATEWAY / "overlays" / "both-ports.yaml"

DOCUMENT = """\
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
gateway: {https_ports: [443], peer_ports: [7443], grpc_prefixes: [/google.bytestream.]}
tenants:
  - name: acme
    class: 0x2a7
    floor: 25M
    hosts: [acme.kura.example]
    peer_hosts: [peer.acme.kura.example]
    client_cidrs: [10.0.0.0/8]
    backends: {http: {address: "10.0.0.5:4000"}, peer: {address: "10.0.0.5:7443"}}
  - name: beta
    class: 0x100
    hosts: [beta.kura.example]
    backends: {http: {address: "10.0.0.6:4000"}}
  - name: idle
    class: 0x101
"""
BARE = parse_tenants(DOCUMENT, file="t.yaml")

# The comment counts lines for the table below.
OVERLAY = """\
apiVersion: kura-shaper/v1
kind: Overlay
gateway:
  https_ports: [8443]
  peer_ports: [9443]
tenants:
  - name: acme
    hosts: [acme-next.kura.example]
    peer_hosts: [peer-next.acme.kura.example]
  - name: beta # 10
    hosts: [beta-next.kura.example]
"""
HEAD = "apiVersion: kura-shaper/v1\nkind: Overlay\n"


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlay") / "o.yaml"


def laid(path: Path, overlay: str, *, document: str = DOCUMENT) -> TenantsDocument:
    path.write_bytes(overlay.encode("utf-8", errors="surrogatepass"))
    return parse_tenants(document, file="t.yaml", overlay=path)


def names(document: TenantsDocument) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {t.name: (t.hosts, t.peer_hosts) for t in document.tenants if t.hosts or t.peer_hosts}


def without_names(document: TenantsDocument) -> TenantsDocument:
    """Everything that an overlay has no word for."""
    tenants = tuple(replace(tenant, hosts=(), peer_hosts=()) for tenant in document.tenants)
    return replace(document, tenants=tenants, gateway=replace(document.gateway, https_ports=(), peer_ports=()))


def require_rules(document: TenantsDocument) -> None:
    """What every reader of a document relies on, said once more and in other words."""
    gateway = document.gateway
    ports = [*gateway.https_ports, *gateway.peer_ports]
    hosts = [host for tenant in document.tenants for host in (*tenant.hosts, *tenant.peer_hosts)]
    assert len(set(ports)) == len(ports) <= GATEWAY_PORTS_MAX
    assert all(1 <= port <= 65_535 for port in ports)
    assert len(set(hosts)) == len(hosts)
    assert set("".join(hosts)) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    for tenant in document.tenants:
        assert not tenant.hosts or (gateway.https_ports and tenant.backends.http)
        assert not tenant.peer_hosts or (gateway.peer_ports and tenant.backends.peer)


def test_an_overlay_replaces_ports_and_names_and_nothing_else(path: Path) -> None:
    document = laid(path, OVERLAY)
    assert document.gateway == Gateway((8443,), (9443,), ("/google.bytestream.",))
    assert names(document) == {
        "acme": (("acme-next.kura.example",), ("peer-next.acme.kura.example",)),
        "beta": (("beta-next.kura.example",), ()),
    }
    assert without_names(document) == without_names(BARE)
    assert [tenant.name for tenant in document.tenants] == ["beta", "idle", "acme"]


def test_a_tenant_that_is_not_listed_has_no_name_and_keeps_its_servers(path: Path) -> None:
    document = laid(path, HEAD + "tenants: [{name: beta, hosts: [beta.kura.example]}]\n")
    assert names(document) == {"beta": (("beta.kura.example",), ())}
    assert without_names(document) == without_names(BARE)
    assert document.gateway == BARE.gateway


def test_what_is_not_given_stays(path: Path) -> None:
    assert laid(path, HEAD) == BARE
    assert laid(path, HEAD + "gateway: {}\n") == BARE
    assert laid(path, HEAD + "gateway: {peer_ports: [1]}\n").gateway == replace(BARE.gateway, peer_ports=(1,))
    assert laid(path, HEAD + "gateway: {https_ports: [1]}\n").gateway == replace(BARE.gateway, https_ports=(1,))
    assert names(laid(path, HEAD + "gateway: {https_ports: [1]}\n")) == names(BARE)


def test_the_two_planes_may_change_places(path: Path) -> None:
    gateway = laid(path, HEAD + "gateway: {https_ports: [7443], peer_ports: [443]}\n").gateway
    assert (gateway.https_ports, gateway.peer_ports) == ((7443,), (443,))


def test_a_name_may_go_from_one_tenant_or_plane_to_another(path: Path) -> None:
    text = HEAD + "tenants:\n  - {name: beta, hosts: [acme.kura.example]}\n"
    text += "  - {name: acme, hosts: [], peer_hosts: [beta.kura.example]}\n"
    assert names(laid(path, text)) == {
        "beta": (("acme.kura.example",), ()),
        "acme": ((), ("beta.kura.example",)),
    }


@pytest.mark.parametrize("tenants", ["[]", "[{name: acme, hosts: []}, {name: idle, peer_hosts: []}]"])
def test_a_gateway_may_serve_nobody_and_then_needs_no_port(path: Path, tenants: str) -> None:
    document = laid(path, HEAD + f"gateway: {{https_ports: [], peer_ports: []}}\ntenants: {tenants}\n")
    assert document.gateway.ports == ()
    assert names(document) == {}


@pytest.mark.parametrize(
    ("old", "new", "place", "says"),
    [
        ("kind: Overlay", "kind: Tenants", "2: kind", "is 'Tenants'; this version reads Overlay"),
        ("kura-shaper/v1", "kura-shaper/v2", "1: apiVersion", "this version reads kura-shaper/v1"),
        ("kind: Overlay\n", "", "1", "key kind is missing; add kind:"),
        ("gateway:", "gatway:", "3: gatway", "unknown key 'gatway'; did you mean gateway?"),
        ("  https_ports: [8443]", "  grpc_prefixes: []", "4: gateway.grpc_prefixes", "known keys here: https_ports,"),
        ("[8443]", "[]", "8: tenants[0].hosts", "the gateway has no port for the hosts of acme; give the gateway"),
        ("[9443]", "[]", "9: tenants[0].peer_hosts", "the gateway has no port for the peer_hosts of acme"),
        ("[8443]", "[0]", "4: gateway.https_ports[0]", "port 0 is out of range"),
        (
            "[8443]",
            "[9443]",
            "5: gateway.peer_ports[0]",
            "port 9443 belongs to gateway.https_ports[0] already (line 4)",
        ),
        ("[8443]", "", "4: gateway.https_ports", "has no value"),
        ("[8443]", str(list(range(8000, 8040))), "3: gateway", "has 41 ports; keep to 40 over both planes"),
        (
            "[8443]\n  peer_ports: [9443]",
            "[8443, 7443]",
            "4: gateway.https_ports[1]",
            "port 7443 belongs to peer_ports of the tenants document already; use another, or give peer_ports",
        ),
        (
            "  https_ports: [8443]\n  peer_ports: [9443]",
            "  peer_ports: [443]",
            "4: gateway.peer_ports[0]",
            "port 443 belongs to https_ports of the tenants document already",
        ),
        ("name: acme", "name: acne", "7: tenants[0].name", "is no tenant of the tenants document; did you mean acme?"),
        ("name: acme", "name: zzzzz", "7: tenants[0].name", "use the name of a tenant in the tenants document"),
        ("name: acme", "name: no", "7: tenants[0].name", "'no' without quotes is a boolean"),
        ("name: beta", "name: acme", "10: tenants[1].name", "name acme belongs to tenants[0] already (line 7)"),
        ("name: beta", "class: 0x100", "10: tenants[1].class", "unknown key 'class'; known keys here: name, hosts,"),
        ("name: beta", "name: idle", "11: tenants[1].hosts", "nothing serves the hosts of idle; add its backends in"),
        ("  - name: beta # 10\n", "  - name: beta\n    ceiling: 1M\n", "11: tenants[1].ceiling", "unknown key"),
        ("    hosts: [beta-next.kura.example]\n", "", "10: tenants[1]", "gives beta neither hosts nor peer_hosts"),
        ("    hosts: [acme-next.kura.example]", "    floor: 1M", "8: tenants[0].floor", "unknown key 'floor'"),
        ("beta-next.kura.example", "'*.kura.example'", "11: tenants[1].hosts[0]", "'*.kura.example' is a wildcard"),
        ("beta-next.kura.example", "10.0.0.1", "11: tenants[1].hosts[0]", "is an address, not a hostname"),
        (
            "beta-next.kura.example",
            "Acme-next.kura.example.",
            "11: tenants[1].hosts[0]",
            "host acme-next.kura.example belongs to tenant acme already (line 8)",
        ),
        (
            "peer-next.acme.kura.example",
            "acme-next.kura.example",
            "9: tenants[0].peer_hosts[0]",
            "host acme-next.kura.example belongs to tenant acme already (line 8)",
        ),
        ("[beta-next.kura.example]", "beta.example", "11: tenants[1].hosts", "is a single value, not a list"),
        ("  - name: beta # 10\n", "  - &b\n    name: beta\n", "10: tenants[1]", "uses an anchor or alias of YAML"),
    ],
)
def test_a_fault_is_told_by_file_line_and_key_path(path: Path, old: str, new: str, place: str, says: str) -> None:
    assert OVERLAY.count(old) == 1, old
    with pytest.raises(DocumentError) as caught:
        laid(path, OVERLAY.replace(old, new))
    assert str(caught.value).startswith(f"{path}:{place}: ")
    assert says in str(caught.value)
    assert caught.value.remedy
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("https_ports", "leaves no port for the hosts of beta; give a port, or list the tenants"),
        ("peer_ports", "leaves no port for the peer_hosts of acme; give a port, or list the tenants"),
    ],
)
def test_a_plane_that_tenants_keep_names_on_keeps_a_port(path: Path, key: str, says: str) -> None:
    with pytest.raises(DocumentError) as caught:
        laid(path, HEAD + f"gateway:\n  {key}: []\n")
    assert str(caught.value) == f"{path}:4: gateway.{key}: {says} that keep names under tenants:"


def test_a_fault_of_the_document_is_told_before_one_of_the_overlay(path: Path) -> None:
    with pytest.raises(DocumentError, match=r"^t\.yaml:3: region: "):
        laid(path, "nonsense", document=DOCUMENT.replace("us-east", "US"))


def test_an_overlay_that_can_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"gone\.yaml: could not be read: No such file"):
        load_tenants(EXAMPLE, overlay=tmp_path / "gone.yaml")
    (tmp_path / "o.yaml").write_bytes(HEAD.encode() + b"\xff")
    with pytest.raises(DocumentError, match=r"o\.yaml:3: is not UTF-8"):
        load_tenants(EXAMPLE, overlay=tmp_path / "o.yaml")
    (tmp_path / "o.yaml").write_bytes(b"")
    with pytest.raises(DocumentError, match=r"o\.yaml: is empty; start with apiVersion: kura-shaper/v1"):
        load_tenants(EXAMPLE, overlay=tmp_path / "o.yaml")


# The shipped stages.


def test_side_by_side_serves_one_test_name_on_one_port() -> None:
    document, plain = load_tenants(EXAMPLE, overlay=SIDE_BY_SIDE), load_tenants(EXAMPLE)
    assert document.gateway.ports == (8443,)
    assert names(document) == {"acme": (("acme-next.kura.example",), ())}
    assert without_names(document) == without_names(plain)


def test_both_ports_serves_every_name_on_the_old_ports_too() -> None:
    document, plain = load_tenants(EXAMPLE, overlay=BOTH_PORTS), load_tenants(EXAMPLE)
    assert (document.gateway.https_ports, document.gateway.peer_ports) == ((443, 8443), (7443,))
    assert document.tenants == plain.tenants


# Whatever stands in the file.


def outcome(path: Path, overlay: str) -> TenantsDocument | None:
    """Lay a text over the document: it holds the rules, or one line says why not."""
    refusal: DocumentError | None = None
    try:
        document = laid(path, overlay)
    except DocumentError as error:
        refusal = error
    if refusal is not None:
        assert str(refusal).isprintable()
        assert refusal.remedy
        assert refusal.file == str(path)
        return None
    require_rules(document)
    assert without_names(document) == without_names(BARE)
    return document


NAMES = ["acme", "beta", "idle", "beta.kura.example"]
WORDS = [*NAMES, "[443]", "[7443]", "[]", "{}", "~", "no", "0x1bb", "1:30", "<<", "&", "*", "!!int", "[", "{", "-", "?"]
HOSTILE = st.text(max_size=12) | st.sampled_from(WORDS) | st.text("a.-*:[]{}\"'#%\\ \n\t\x1b\x85\u2028ü0", max_size=40)


@settings(max_examples=200)
@given(start=st.integers(0, len(OVERLAY)), length=st.integers(0, 40), new=HOSTILE)
@example(start=0, length=len(OVERLAY), new="\ud800")
def test_an_overlay_with_a_hole_anywhere_is_laid_or_refused(path: Path, start: int, length: int, new: str) -> None:
    outcome(path, OVERLAY[:start] + new + OVERLAY[start + length :])


@settings(max_examples=200)
@given(line=st.integers(0, OVERLAY.count("\n") - 1), new=HOSTILE)
def test_an_overlay_with_any_value_replaced_is_laid_or_refused(path: Path, line: int, new: str) -> None:
    lines = OVERLAY.splitlines()
    key, colon, _ = lines[line].partition(":")
    lines[line] = f"{key}{colon} {new}"
    outcome(path, "\n".join(lines))


PORTS = st.lists(st.sampled_from([443, 7443, 8443, 9443, 0, 65_536]), max_size=3) | st.just(list(range(1, 45)))
HOSTS = st.lists(st.sampled_from(["a.example", "A.example.", "acme.kura.example", "*.b.example", "c"]), max_size=2)
TENANT = st.fixed_dictionaries(
    {"name": st.sampled_from(["acme", "beta", "idle", "nobody"])}, optional={"hosts": HOSTS, "peer_hosts": HOSTS}
)
OVERLAYS = st.fixed_dictionaries(
    {},
    optional={
        "gateway": st.fixed_dictionaries({}, optional={"https_ports": PORTS, "peer_ports": PORTS}),
        "tenants": st.lists(TENANT, max_size=3),
    },
)


@settings(max_examples=300)
@given(overlay=OVERLAYS)
def test_an_overlay_of_the_right_shape_holds_the_rules_or_is_refused(path: Path, overlay: dict[str, object]) -> None:
    document = outcome(path, json.dumps({"apiVersion": "kura-shaper/v1", "kind": "Overlay", **overlay}))
    if document is not None and "tenants" not in overlay:
        assert names(document) == names(BARE)


# The command line.


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["kura-shaper", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


def test_lint_tells_of_the_overlay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("tenants", "lint", str(EXAMPLE), "--overlay", str(SIDE_BY_SIDE))
    assert call(monkeypatch, *command) == 0
    assert f"{SIDE_BY_SIDE}: names for 1 of 3 tenants, ports 8443\n" in capsys.readouterr().out
    assert call(monkeypatch, *command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["overlay"] == str(SIDE_BY_SIDE)


@pytest.mark.parametrize("from_environment", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ("tenants", "lint", str(EXAMPLE)),
        ("plan", "--device", "lo", "--budget", "9G", "--tenants", str(EXAMPLE)),
        ("apply", "--device", "lo", "--budget", "9G", "--tenants", str(EXAMPLE)),
        ("status", "--device", "lo", "--tenants", str(EXAMPLE)),
    ],
    ids=lambda command: command[0],
)
def test_a_bad_overlay_is_code_2_at_every_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: tuple[str, ...],
    from_environment: bool,
) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text(HEAD + "tenants: [{name: nobody, hosts: []}]\n")
    if from_environment:
        monkeypatch.setenv("KURA_SHAPER_OVERLAY", str(overlay))
    assert call(monkeypatch, *command, *(() if from_environment else ("--overlay", str(overlay)))) == 2
    assert f"{overlay}:3: tenants[0].name: 'nobody' is no tenant" in capsys.readouterr().err


def test_status_takes_no_overlay_without_a_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "status", "--device", "lo", "--overlay", str(SIDE_BY_SIDE)) == 2
    assert "--overlay has no document to lie over; give --tenants too" in capsys.readouterr().err
