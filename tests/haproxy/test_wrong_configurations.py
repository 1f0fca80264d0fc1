"""What `haproxy -c` accepts although it is wrong: shown with the real one, and refused by us before it gets there."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from gateway_rig import VERSIONS, haproxy_of

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.options import GatewayOptions
from kura_shaper.haproxy.render import render
from kura_shaper.tenants.file import parse_tenants

if TYPE_CHECKING:
    from pathlib import Path

    from kura_shaper.haproxy.binary import HaproxyBinary

_HEAD = """
global
    stats socket {directory}/admin.sock
defaults
    mode http
    timeout client 1s
    timeout server 1s
    timeout connect 1s
frontend f
    bind 127.0.0.1:1
"""
_DOCUMENT = """
apiVersion: kura-shaper/v1
kind: Tenants
region: r
marks: {{mask: "{mask}"}}
gateway: {{https_ports: {ports}, peer_ports: {peer_ports}}}
tenants:
  - name: "{name}"
    class: {class_id}
    hosts: {hosts}
    peer_hosts: {peer_hosts}
    backends: {{http: {{address: "127.0.0.1:4000"}}}}
"""
_GOOD = {
    "mask": "0xffff0000",
    "ports": "[443]",
    "peer_ports": "[7443]",
    "name": "acme",
    "class_id": "0x2a7",
    "hosts": "[acme.example]",
    "peer_hosts": "[]",
}


@dataclass(frozen=True)
class Wrong:
    """A wrong configuration: lines that HAProxy takes, its map, and the document that would lead to it."""

    lines: str
    document: dict[str, str]
    rows: str = "acme.example acme\n"
    options: dict[str, int] = field(default_factory=dict)


_USES_MAP = "    use_backend %[hdr(host),map_str({directory}/x.map)]\n"

WRONG = {
    "a line's end in a host adds a directive": Wrong(
        "    acl h hdr(host) acme.example\n    http-request deny\n",
        {"hosts": '["acme.example\\n    http-request deny"]'},
    ),
    "a blank in a host makes a second pattern": Wrong(
        "    acl h hdr(host) acme.example evil.example\n    http-request deny if h\n",
        {"hosts": '["acme.example evil.example"]'},
    ),
    "double quotes expand the environment": Wrong(
        '    acl h hdr(host) "$HOME"\n    http-request deny if h\n', {"hosts": "['\"$HOME\"']"}
    ),
    "a log format expands expressions": Wrong(
        '    log-format "%[env(HOME)] %ci"\n    log 127.0.0.1 local0\n', {"name": "%[env(HOME)]"}
    ),
    "two doors on one port share it at random": Wrong("frontend g\n    bind 127.0.0.1:1\n", {"peer_ports": "[443]"}),
    "a name leads to a backend that is not there": Wrong(
        _USES_MAP, {"peer_hosts": "[peer.acme.example]"}, rows="acme.example nowhere\n"
    ),
    "a key stands twice in a map": Wrong(
        _USES_MAP, {"hosts": "[acme.example, ACME.example.]"}, rows="acme.example a\nacme.example b\n"
    ),
    "a key has no value": Wrong(_USES_MAP, {"name": ""}, rows="acme.example\n"),
    "a mark has more than 32 bits": Wrong(
        "    tcp-request connection set-fc-mark 0x1ffffffff\n", {"mask": "0x1ffff0000"}
    ),
    "a host is not ASCII": Wrong(
        "    acl h hdr(host) bücher.example\n    http-request deny if h\n", {"hosts": "[bücher.example]"}
    ),
    "there are fewer descriptors than connections": Wrong("    maxconn 1000000\n", {}, options={"nofile": 20_000}),
}


def accepted(binary: HaproxyBinary, wrong: Wrong, directory: Path) -> bool:
    (directory / "x.map").write_text(wrong.rows)
    config = directory / "wrong.cfg"
    config.write_text((_HEAD + wrong.lines).replace("{directory}", str(directory)))
    done = subprocess.run([binary.path, "-c", "-f", config], capture_output=True, timeout=20, check=False, env={})
    return done.returncode == 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", WRONG)
def test_haproxy_takes_it_and_we_do_not(name: str, version: str, tmp_path: Path) -> None:
    wrong, binary = WRONG[name], haproxy_of(version)
    assert accepted(binary, wrong, tmp_path)
    options = GatewayOptions(binary.version)
    good = parse_tenants(_DOCUMENT.format(**_GOOD), file="good.yaml")
    assert render(good, options)
    with pytest.raises(UsageError):
        render(
            parse_tenants(_DOCUMENT.format(**{**_GOOD, **wrong.document}), file="wrong.yaml"),
            replace(options, **wrong.options),  # type: ignore[arg-type]
        )


def test_there_are_eleven() -> None:
    assert len(WRONG) == 11


@pytest.mark.parametrize("version", VERSIONS)
def test_a_shared_limit_is_a_constant_and_so_a_new_ceiling_takes_a_reload(version: str, tmp_path: Path) -> None:
    # Should this fail with a version to come, ceilings could change while the gateway runs: see decide.py.
    table = "    stick-table type string len 64 size 1k expire 1h store bytes_out_rate(1s)\n"
    shared = "    filter bwlim-out c limit 1000 key str(acme) table f\n"
    use = "    http-request set-bandwidth-limit c"
    assert accepted(haproxy_of(version), Wrong(f"{table}{shared}{use}\n", {}), tmp_path)
    for limit in ("limit 2000", "limit str(acme),map_str_int({directory}/x.map)"):
        assert not accepted(haproxy_of(version), Wrong(f"{table}{shared}{use} {limit}\n", {}), tmp_path)
    computed = shared.replace("limit 1000", "limit str(acme),map_str_int({directory}/x.map)")
    assert not accepted(haproxy_of(version), Wrong(f"{table}{computed}{use}\n", {}), tmp_path)
