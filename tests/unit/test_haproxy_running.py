"""What a gateway answers, read as HAProxy 3.0 and 3.2 really write it, and what no reader may take for an answer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from gateway_model import ACME, BETA, HEAD, OPTIONS, FakeGateway, document
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.maps import CRT_LIST, SNI_MAP
from kura_shaper.haproxy.render import render
from kura_shaper.haproxy.running import (
    RunningServer,
    parse_certificate_list,
    parse_fingerprint,
    parse_map,
    parse_servers,
    read_running,
    read_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable

EDGE_ROW = "10 acme_edge 1 tls - 2 0 1 1 0 1 0 2 0 0 0 0 - 0 - 0 0 - - 0"
ROW = "11 acme_http 1 p0 127.103.2.185 2 0 1 1 0 15 3 2 6 0 0 0 - 4001 - 0 77 - - 0"
DNS_ROW = "11 beta_http 1 p1 10.0.0.5 2 32 1 1 0 15 3 2 6 0 0 0 beta.svc.test 4002 - 0 0 - - 0"
CERTIFICATE = """Filename: /c/tls.crt
Crt filename: /c/tls.crt
Status: Used
Serial: 1A033C24011C9CFF6D79C924B87146C53599EAB3
Algorithm: EC256
SHA1 FingerPrint: AE3BDE69CC1B028B7DE2DEC36AC98127A96E4D5E
Subject: /O=trustme v1.2.1/OU=Testing cert #UlCcW4GywI74osJF
OCSP Response Key: 

"""  # noqa: W291 - so it writes it


def test_a_map_is_read_as_a_rendered_file() -> None:
    assert (
        parse_map("0x7f4b beta.kura.test beta\n0x7f4a acme.kura.test acme\n\n")
        == b"acme.kura.test acme\nbeta.kura.test beta\n"
    )
    assert parse_map("0x1 a b\n0x2 a c\n0x3 a b\n\n") == b"a b\na b\na c\n"
    assert parse_map("\n") == b""
    assert parse_map("Unknown map identifier. Please use #<id> or <file>.\n\n") is None


@pytest.mark.parametrize("text", ["", "Permission denied\n", "a b\n", "0x1 a b\nSorry\n", "\0"])
def test_what_is_no_map_is_unknown(text: str) -> None:
    with pytest.raises(StateUnknownError):
        parse_map(text)


def test_a_certificate_list_is_read_with_what_removes_each_row() -> None:
    text = "# /g/crt-list.txt\n/c/tls.crt:1 acme.kura.test\n/c/a:b.crt:12 [alpn h2] x.test y.test\n/c/tls.crt:3\n\n"
    assert parse_certificate_list(text) == (
        ("acme.kura.test", "/c/tls.crt", "/c/tls.crt:1"),
        ("[alpn h2] x.test y.test", "/c/a:b.crt", "/c/a:b.crt:12"),
        ("", "/c/tls.crt", "/c/tls.crt:3"),
    )
    assert parse_certificate_list("# /g/crt-list.txt\n\n") == ()
    assert parse_certificate_list("didn't find the specified filename\n\n") == ()


@pytest.mark.parametrize("text", ["", "\n", "Permission denied\n", "/c/tls.crt:1 acme.kura.test\n"])
def test_what_is_no_certificate_list_is_unknown(text: str) -> None:
    with pytest.raises(StateUnknownError):
        parse_certificate_list(text)


def test_an_answer_that_is_cut_short_has_the_serial_number() -> None:
    cut = CERTIFICATE.partition("SHA1 FingerPrint")[0]
    assert parse_fingerprint(cut.replace("Serial: ", "Serial: 00")) == f"serial {parse_serial(CERTIFICATE)}"


def parse_serial(text: str) -> str:
    return text.partition("Serial: ")[2].split("\n")[0].lstrip("0")


def test_a_fingerprint_is_read() -> None:
    assert parse_fingerprint(CERTIFICATE) == "AE3BDE69CC1B028B7DE2DEC36AC98127A96E4D5E"
    assert parse_fingerprint("Can't display the certificate: Not found or the certificate is a bundle!\n") == ""


@pytest.mark.parametrize("text", ["", "\n", "Can't find the target PID matching the prefix '@1'\n"])
def test_what_is_no_certificate_is_unknown(text: str) -> None:
    with pytest.raises(StateUnknownError):
        parse_fingerprint(text)


def test_servers_are_read_with_the_row_that_haproxy_reads_back() -> None:
    head, servers = parse_servers(f"{HEAD}{EDGE_ROW}\n{ROW}\n{DNS_ROW}\n\n")
    assert head == HEAD
    assert servers == {
        "acme_edge/tls": RunningServer("acme_edge/tls", "", 0, 0, "", EDGE_ROW),
        "acme_http/p0": RunningServer("acme_http/p0", "127.103.2.185", 4001, 77, "", ROW),
        "beta_http/p1": RunningServer("beta_http/p1", "10.0.0.5", 4002, 0, "beta.svc.test", DNS_ROW),
    }
    assert parse_servers(HEAD) == (HEAD, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1\n",
        "2" + HEAD[1:],
        HEAD.replace("srv_port", "port"),
        HEAD + "11 acme_http\n",
        HEAD + ROW.replace("4001", "x"),
        HEAD + ROW.replace("4001", "9" * 5000),
        "Permission denied\nAgain\n",
        "1\nno heading\n",
    ],
)
def test_what_is_no_state_of_servers_is_unknown(text: str) -> None:
    with pytest.raises(StateUnknownError):
        parse_servers(text)


@settings(deadline=None)
@given(st.text(max_size=300), st.sampled_from([parse_map, parse_certificate_list, parse_fingerprint, parse_servers]))
def test_no_answer_is_a_crash(text: str, parse: Callable[[str], object]) -> None:
    with suppress(StateUnknownError):
        parse(text)
    with suppress(StateUnknownError):
        parse(HEAD + text)


def gateway() -> FakeGateway:
    made = FakeGateway()
    made.load(render(document(ACME, BETA), OPTIONS))
    return made


def test_everything_is_read() -> None:
    made, wanted = gateway(), render(document(ACME, BETA), OPTIONS)
    made.certificates["/c/tls.crt"] = "A" * 40
    running = read_running(made, OPTIONS, certificates=("/c/tls.crt", "/c/absent.crt"))
    assert running.version == (3, 0, 11)
    assert running.config_id in wanted.text("haproxy.cfg")
    assert len(running.config_id) == 16
    assert running.maps[SNI_MAP] == wanted.files[SNI_MAP]
    assert [f"{certificate} {host}" for host, certificate, _ in running.certificate_rows] == wanted.text(
        CRT_LIST
    ).splitlines()
    assert running.fingerprints == {"/c/tls.crt": "A" * 40}
    assert running.servers["acme_http/p0"].port == 4000


@pytest.mark.parametrize("command", ["show proc", "show info", "show servers state", "show map", "show ssl crt-list"])
@pytest.mark.parametrize("answer", ["", "\n", "Can't find the target PID matching the prefix '@1'\n", "\xff" * 50])
def test_an_answer_that_makes_no_sense_is_unknown(command: str, answer: str) -> None:
    made = gateway()
    made.refuses, made.refusal = command, answer
    if (command, answer) == ("show map", "\n"):
        # That is what an empty map looks like.
        assert read_running(made, OPTIONS).maps[SNI_MAP] == b""
        return
    with pytest.raises(StateUnknownError):
        read_running(made, OPTIONS)


def test_a_gateway_of_somebody_elses_has_no_id() -> None:
    made = gateway()
    for description in ("", "the gateway of somebody"):
        made.description = description
        assert read_running(made, OPTIONS).config_id == ""


@pytest.mark.parametrize("answer", ["Version: x\n", f"Version: {'9' * 5000}.0.0\n", "Name: HAProxy\n"])
def test_a_version_that_is_none_is_unknown(answer: str) -> None:
    made = gateway()
    made.refuses, made.refusal = "show info", answer
    with pytest.raises(StateUnknownError):
        read_version(made)
    made.refusal = "Version: 3.3-dev1\n"
    assert read_version(made) == (3, 3, 0)
