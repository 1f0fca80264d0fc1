"""`kura-shaper probe` as a person and a cluster run it: output, exit codes, secrets, and a service that ends."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from probe_rig import HOST, Served, authority_file, objects, read_request, server_context, serving

from kura_shaper.cli.main import run

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 20.0


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kura-shaper", "probe", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(objects, server_context("http/1.1")) as made:
        yield made


def place(served: Served) -> tuple[str, ...]:
    return ("--connect-to", f"127.0.0.1:{served.port}", "--ca-file", str(authority_file()))


def test_a_table_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    assert call(monkeypatch, "--url", f"https://{HOST}/200000", "--size", "3M", *place(served)) == 0
    shown = capsys.readouterr()
    heading, row = shown.out.splitlines()
    assert heading.split()[:4] == ["TARGET", "SPOKEN", "STATUS", "CONNECT"]
    assert row.split()[:3] == [f"{HOST}/200000", "http/1.1", "200"]
    assert row.split()[-1] == "fine"
    assert shown.err == ""


def test_json_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served) -> None:
    urls = ("--url", f"https://{HOST}/200000", "--url", f"https://{HOST}/7")
    assert call(monkeypatch, *urls, "--streams", "2", "--json", *place(served)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fine"
    assert [each["received_bytes"] for each in found["targets"]] == [400_000, 14]
    assert found["targets"][0]["handshake_ms"] > 0


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--min-rate", "1k", "--size", "3M"), 0, ""),
        (("--min-rate", "9E", "--size", "3M"), 1, "slow: "),
        (("--expect-status", "404"), 1, "failure[status]: "),
        (("--protocol", "http2"), 1, "failure[alpn]: "),
        (("--sni", "globex.kura.test"), 1, "failure[tls]: "),
        (("--connect-to", "127.0.0.1:1"), 1, "failure[connect]: "),
    ],
)
def test_what_is_not_fine_is_said_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: Served,
    options: tuple[str, ...],
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr("kura_shaper.probe.target.BUSY_PERCENT", 10_000)
    assert call(monkeypatch, "--url", f"https://{HOST}/200000", *place(served), *options) == status
    assert words in capsys.readouterr().out


def test_a_rate_that_can_not_be_told_is_an_unknown_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: Served
) -> None:
    assert call(monkeypatch, "--url", f"https://{HOST}/7", "--min-rate", "1M", *place(served)) == 4
    assert "too little came" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--url U"),
        (("--url", "https://a.example", "--targets", "x.yaml"), "--url U"),
        (("--targets", "/nowhere.yaml"), "/nowhere.yaml"),
        (("--url", "gopher://a.example"), "--url"),
        (("--url", "https://a.example", "-4", "-6"), "-4 and -6"),
        (("--url", "https://a.example", "--ca-file", "/nowhere.pem"), "/nowhere.pem"),
        (("--url", "https://a.example", "--token-file", "/nowhere"), "/nowhere"),
        (("--url", "https://a.example", "--interval", "5"), "--listen"),
        (("--url", "https://a.example", "--listen", "9471", "--interval", "0"), "--interval"),
        (("--url", "https://a.example", "--listen", "localhost:1"), "--listen"),
        (("--url", "https://a.example", "--listen", "9471", "--json"), "/statusz"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_a_token_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, how: tuple[str, ...]
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    asked: list[bytes] = []

    def handle(peer: socket.socket) -> None:
        asked.append(read_request(peer))
        # A server may send it back.
        peer.sendall(b"HTTP/1.1 401 s3cret\r\nlocation: s3cret\r\ncontent-length: 6\r\n\r\ns3cret")

    with serving(handle, server_context()) as served:
        options = ("--token-file", str(tmp_path / "token"), *place(served), *how)
        assert call(monkeypatch, "--url", f"https://{HOST}/x", *options) == 1
    shown = capsys.readouterr()
    assert b"authorization: Bearer s3cret\r\n" in asked[0]
    assert "s3cret" not in shown.out + shown.err
    assert "status 401" in shown.out
