"""What a probe is told: a document of targets, URLs and options, each value read in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kura_shaper.errors import DocumentError, UsageError
from kura_shaper.probe.credentials import headers_of
from kura_shaper.probe.target import Family, Protocol, Security, Target
from kura_shaper.probe.task import ENDLESS_BYTES, GRPC_READ_PATH, Task, load_tasks, parse_url, tasks_of_urls
from kura_shaper.tenants.document import Endpoint
from kura_shaper.units import Rate

SECOND = 1_000_000_000
DOCUMENT = """\
apiVersion: kura-shaper/v1
kind: Targets
defaults: {protocol: http2, timeout_s: 2, duration_s: 1.5}
targets:
  - tenant: acme
    url: https://acme.kura.example
    small: /up
    large: /object/1000
    min_rate: 100M
  - name: acme peer
    tenant: acme
    url: https://peer.acme.kura.example:7443
    protocol: tcp
"""


def loaded(tmp_path: Path, text: str, **overrides: str) -> tuple[Task, ...]:
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    return load_tasks(path, overrides)


def one(url: str, **overrides: str) -> Task:
    (task,) = tasks_of_urls([url], overrides)
    return task


def test_a_document_names_targets_with_what_they_share(tmp_path: Path) -> None:
    read, peer = loaded(tmp_path, DOCUMENT)
    assert read.target == Target(
        name="acme.kura.example/object/1000",
        tenant="acme",
        host="acme.kura.example",
        protocol=Protocol.HTTP2,
        small="/up",
        large="/object/1000",
        min_rate=Rate(100_000_000),
    )
    assert (read.load.timeout_ns, read.load.duration_ns) == (2 * SECOND, 3 * SECOND // 2)
    assert (peer.target.name, peer.target.port, peer.target.protocol) == ("acme peer", 7443, Protocol.TCP)
    assert (peer.target.small, peer.target.large) == ("", "")


def test_the_command_line_wins(tmp_path: Path) -> None:
    over = {"timeout_s": "9", "connect_to": "192.0.2.1:8443", "streams": "4"}
    for task in loaded(tmp_path, DOCUMENT, **over):
        assert task.load.timeout_ns == 9 * SECOND
        assert task.load.streams == 4
        assert task.target.connect_to == Endpoint("192.0.2.1", 8443)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: Targets", "kind: Tenants", ["kind", "Targets"]),
        ("- tenant: acme", "- tenat: acme", [":5:", "targets[0].tenat", "did you mean tenant"]),
        ("https://acme.kura.example", "ftp://acme.kura.example", [":6:", "targets[0].url", "https"]),
        ("https://acme.kura.example", "https://acme.kura.example/x", [":5:", "the URL has a path"]),
        ("small: /up", "small: up", [":7:", "targets[0].small", "start with /"]),
        ("min_rate: 100M", "min_rate: 100Mbit", [":9:", "targets[0].min_rate"]),
        ("min_rate: 100M", "min_rate: 0", ["targets[0].min_rate", "leave it out"]),
        ("protocol: tcp", "protocol: udp", ["targets[1].protocol", "use auto, http1"]),
        ("protocol: tcp", "protocol: tcp\n    small: /x", ["targets[1]", "asks for no path"]),
        ("protocol: tcp", "protocol: tcp\n    min_rate: 1M", ["targets[1]", "something large"]),
        ("timeout_s: 2", "timeout_s: 0", ["defaults.timeout_s", "0.1 to 60"]),
        ("timeout_s: 2", "name: x", ["defaults.name", "unknown key"]),
        ("timeout_s: 2", "streams: 1000", ["defaults.streams", "1 to 256"]),
        ("name: acme peer", "name: acme.kura.example/object/1000", ["acme.kura.example/object/1000", "already"]),
        ("name: acme peer", 'name: "a\\nb"', ["targets[1].name", "printable"]),
        ("url: https://peer", "resource: x\n    url: https://peer", ["targets[1]", "only gRPC"]),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert DOCUMENT.count(old) == 1
    with pytest.raises(DocumentError) as raised:
        loaded(tmp_path, DOCUMENT.replace(old, new))
    assert "targets.yaml" in str(raised.value)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_there_are_targets_and_only_so_many(tmp_path: Path) -> None:
    head = DOCUMENT.partition("targets:\n")[0]
    for count in (0, 257):
        targets = [{"url": f"https://a{number}.example"} for number in range(count)]
        with pytest.raises(DocumentError, match="name 1 to 256"):
            loaded(tmp_path, head + yaml.safe_dump({"targets": targets}))


@pytest.mark.parametrize(
    ("url", "over", "expected"),
    [
        ("https://a.example/object/1", {}, ("", "/object/1")),
        ("https://a.example", {}, ("/", "")),
        ("https://a.example/", {"small": "/up"}, ("/up", "")),
        ("https://a.example/x?y=1", {"small": "/up"}, ("/up", "/x?y=1")),
        ("https://a.example", {"protocol": "grpc"}, ("", GRPC_READ_PATH)),
        ("https://a.example/s/M", {"protocol": "grpc"}, ("", "/s/M")),
    ],
)
def test_the_path_of_a_url_is_what_is_large(url: str, over: dict[str, str], expected: tuple[str, str]) -> None:
    target = one(url, **over).target
    assert (target.small, target.large) == expected


def test_a_url_says_where_and_over_what() -> None:
    assert parse_url("https://[2001:DB8::1]:8443/x") == ("2001:db8::1", 8443, Security.TLS, "/x")
    assert parse_url("http://ACME.Example.") == ("acme.example", 80, Security.PLAIN, "")
    assert one("https://[2001:db8::1]:8443/x").target.authority == "[2001:db8::1]:8443"
    assert one("https://192.0.2.7/x").target.name == "192.0.2.7/x"
    assert one("http://a.example:80/x").target.authority == "a.example"


@pytest.mark.parametrize(
    "url",
    [
        *("", "a.example", "//a.example", "https://", "https:///x", "https://a.example:0/", "https://a.example:70000/"),
        *("https://a.example:x/", "https://a b.example/", "https://a.example/\u00e4", "https://a.example/#x"),
        *(
            "https://a.example/\r\nx: y",
            "https://[::1",
            "https://*.example/",
            "https://a..example/",
            "https://fe80::1%lo",
        ),
        *("javascript:alert(1)", "https://" + "a" * 300 + ".example/", "https://a.example/" + "x" * 5_000),
    ],
)
def test_what_is_no_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        one(url)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_what_may_be_secret_in_a_url_is_not_shown() -> None:
    with pytest.raises(UsageError) as raised:
        one("https://user:hunter2@a.example/")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(UsageError) as raised:
        one("https://a.example/x?sig=hunter2", large="/y")
    assert "hunter2" not in str(raised.value)
    assert one("https://a.example/x?sig=hunter2").target.name == "a.example/x"


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"streams": "0"}, "--streams"),
        ({"streams": "x"}, "--streams"),
        ({"size": "-1"}, "--size"),
        ({"size": "0.1"}, "--size"),
        ({"duration_s": "301"}, "--duration"),
        ({"timeout_s": "nan"}, "--timeout"),
        ({"connect_to": "a.example"}, "--connect-to"),
        ({"connect_to": "::1:443"}, "--connect-to"),
        ({"connect_to": "[a.example]:443"}, "--connect-to"),
        ({"connect_to": "a.example:0"}, "--connect-to"),
        ({"sni": "a b"}, "--sni"),
        ({"expect_status": "600"}, "--expect-status"),
        ({"min_rate": "fast"}, "--min-rate"),
        ({"protocol": "HTTP2"}, "--protocol"),
        ({"protocol": "tcp"}, "asks for no path"),
    ],
)
def test_a_bad_option_is_told_by_its_name(over: dict[str, str], words: str) -> None:
    over = {"small": "/", **over} if over == {"protocol": "tcp"} else over
    with pytest.raises(UsageError) as raised:
        one("https://a.example/x", **over)
    assert words in str(raised.value)


def test_options_are_values() -> None:
    task = one("https://a.example/x", connect_to="[::1]:8443", family="6", size="64Mi", sni="b.example", streams="8")
    target = task.target
    assert (target.connect_to, target.family) == (Endpoint("::1", 8443), Family.IPV6)
    assert (target.server_name, target.authority) == ("b.example", "a.example")
    assert (task.load.size_bytes, task.load.streams) == (64 * 2**20, 8)
    assert one("https://a.example/x", connect_to="b.example:1").target.connect_to == Endpoint("b.example", 1, True)
    assert one("https://a.example/x").load.size_bytes is None
    assert one("https://a.example/x", duration_s="3").load.size_bytes == ENDLESS_BYTES
    assert one("https://a.example/x", duration_s="3", size="1M").load.size_bytes == 1_000_000


def test_no_target_stands_there_twice() -> None:
    with pytest.raises(UsageError, match="twice"):
        tasks_of_urls(["https://a.example/x", "https://a.example/x?y"], {})


# Secrets.


def with_file(tmp_path: Path, text: str, kind: str) -> Target:
    path = tmp_path / "secret"
    path.write_text(text)
    return Target(name="it", host="a.example", **{kind: path})  # type: ignore[arg-type]


def test_a_token_and_headers_are_read(tmp_path: Path) -> None:
    target = with_file(tmp_path, "s3cret\n", "token_file")
    assert headers_of(target) == (("authorization", "Bearer s3cret"),)
    target = with_file(tmp_path, "X-Api-Key: s3cret key \n\nx-empty-not: 1\n", "header_file")
    assert headers_of(target) == (("x-api-key", "s3cret key"), ("x-empty-not", "1"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, "token_file") for text in ("", "s3cret two", "s3cret\nmore", "s3cret\u00e4", "s3cret" * 20_000)),
        *((text, "header_file") for text in ("s3cret", "x: s3cret\n y", "a b: s3cret", "x: s3cret\x00", "x:")),
        *((f"{name}: s3cret", "header_file") for name in ("Host", "content-length", "Connection", "te")),
    ],
)
def test_what_is_no_secret_that_can_be_sent_is_refused_and_not_shown(tmp_path: Path, text: str, kind: str) -> None:
    with pytest.raises(UsageError) as raised:
        headers_of(with_file(tmp_path, text, kind))
    error: BaseException | None = raised.value
    while error is not None:
        assert "s3cret" not in str(error)
        error = error.__cause__
    assert str(tmp_path / "secret") in str(raised.value)


def test_a_secret_goes_over_tls_alone() -> None:
    with pytest.raises(UsageError, match="TLS alone"):
        one("http://a.example/x", token_file="/nowhere")
    with pytest.raises(UsageError, match="TLS alone"):
        headers_of(Target(name="it", host="a.example", security=Security.PLAIN, header_file=Path("/nowhere")))
