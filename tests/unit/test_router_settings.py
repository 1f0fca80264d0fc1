"""A router's settings, its tokens and its certificate."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from kura_shaper.broker.credentials import CredentialError
from kura_shaper.broker.entries import SettingsError
from kura_shaper.broker.router.counts import RouterCounts
from kura_shaper.broker.router.credentials import ServerCredentials
from kura_shaper.broker.router.faults import Fault, FaultStep
from kura_shaper.broker.router.program import problems_of
from kura_shaper.broker.router.settings import Discover, Subscription, load_settings
from kura_shaper.cli.main import app
from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from pathlib import Path

KEY_WITH_PASSWORD = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
)
WHOLE = """
listen: 0.0.0.0:8443
certificate: {0}/tls.crt
private_key: {0}/tls.key
token_file: {0}/tokens
path_prefix: /gpu/
subscriptions:
  - {{endpoint: "tcp://10.244.1.7:41235", dynamo_namespace: dynamo, topics: [kv_metrics, kv-events]}}
  - {{endpoint: "tcp://[FD00::7]:5557", dynamo_namespace: dynamo, topics: [""], expose: 127.0.0.1:5557}}
discover:
  - {{namespace: gpu, dynamo_namespaces: [dynamo], topics: [kv-events, kv_metrics], kubeconfig: {0}/kubeconfig}}
  - {{namespace: canary, dynamo_namespaces: [dynamo], topics: [""]}}
max_streams: 32
stream_window: 1MiB
serve: 9466
heartbeat_interval: 5s
idle_timeout: 15s
faults:
  - {{after: 500ms, do: goaway}}
"""


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the log reach the test, whatever a command before it had done."""
    monkeypatch.setattr(logging.getLogger("kura_shaper"), "handlers", [])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    issued = trustme.CA().issue_cert("router.test")
    (tmp_path / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "tokens").write_text("old-secret\n\nnew-secret\n")
    (tmp_path / "kubeconfig").write_text("{clusters: [{}], contexts: [{}], users: [{}]}")
    (tmp_path / "c.yaml").write_text(WHOLE.format(tmp_path))
    return tmp_path


def problems(place: Path, text: str) -> tuple[str, ...]:
    (place / "c.yaml").write_text(text)
    with pytest.raises(SettingsError) as raised:
        load_settings(place / "c.yaml")
    return raised.value.problems


def test_everything_is_read(place: Path) -> None:
    found = load_settings(place / "c.yaml")
    assert found.listen == Endpoint("0.0.0.0", 8443)
    assert found.path_prefix == "/gpu"
    assert found.subscriptions == (
        Subscription("tcp://10.244.1.7:41235", "dynamo", ("kv_metrics", "kv-events")),
        Subscription("tcp://[fd00::7]:5557", "dynamo", ("",), Endpoint("127.0.0.1", 5557)),
    )
    assert found.discover == (
        Discover("gpu", ("dynamo",), ("kv-events", "kv_metrics"), place / "kubeconfig"),
        Discover("canary", ("dynamo",), ("",)),
    )
    assert found.stream_window_bytes == 1 << 20
    assert found.serve == Endpoint("127.0.0.1", 9466)
    assert found.faults == (FaultStep(500, Fault.GOAWAY),)


@pytest.mark.case("ER20")
def test_everything_that_is_wrong_is_said_at_once_with_its_place(place: Path) -> None:
    found = problems(
        place,
        "listen: 8443\ncertificate: /c\nfoo: 1\nmax_streams: 0\nidle_timeout: 10s\nstream_window: 1KiB\n"
        "subscriptions:\n  - {endpoint: tcp://127.1:5, dynamo_namespace: d, topics: [a]}\n",
    )
    assert [line.split(": ")[1] for line in found] == [
        "foo",
        "listen",
        "subscriptions[0].endpoint",
        "max_streams",
        "stream_window",
        "private_key",
        "token_file",
        "idle_timeout",
    ]


def test_a_subscription_that_nobody_reads_and_a_port_that_two_want_are_refused(place: Path) -> None:
    whole = WHOLE.format(place)
    (nobody,) = problems(place, whole.replace(", topics: [kv_metrics, kv-events]", ""))
    assert "read by nobody" in nobody
    (twice,) = problems(place, whole.replace("topics: [kv_metrics, kv-events]", "expose: 127.0.0.1:5557"))
    assert "subscriptions[1].expose: is 127.0.0.1:5557, where subscriptions[0].expose listens already" in twice


@pytest.mark.case("ER94")
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("serve: 9466", "serve: 127.0.0.1:8443", "serve: is 127.0.0.1:8443, where listen listens"),
        ("serve: 9466", "serve: 9465", "serve: is 127.0.0.1:9465, where metrics_listen listens"),
        ("serve: 9466", "metrics_listen: 0.0.0.0:8443", "metrics_listen: is 0.0.0.0:8443, where listen listens"),
        ("expose: 127.0.0.1:5557", "expose: 127.0.0.1:9466", "subscriptions[1].expose: is 127.0.0.1:9466, where serve"),
        ("serve: 9466", 'serve: "[::]:8443"', ""),
        ("serve: 9466", "serve: 9467", ""),
    ],
)
def test_an_address_that_two_are_to_listen_on_is_refused(place: Path, before: str, after: str, words: str) -> None:
    text = WHOLE.format(place).replace(before, after)
    if words:
        (told,) = problems(place, text)
        assert words in told
    else:
        (place / "c.yaml").write_text(text)
        load_settings(place / "c.yaml")


@pytest.mark.case("ER94")
def test_a_subscription_that_stands_there_twice_is_refused(place: Path) -> None:
    whole = WHOLE.format(place)
    first = '  - {endpoint: "tcp://10.244.1.7:41235", dynamo_namespace: dynamo, topics: [kv-events, kv_metrics]}\n'
    (told,) = problems(place, whole.replace("discover:\n", f"{first}discover:\n"))
    assert "subscriptions[2]: is subscriptions[0] again" in told
    # Other topics of the same publisher are something else.
    (place / "c.yaml").write_text(whole.replace("discover:\n", f"{first.replace('kv-events, ', '')}discover:\n"))
    assert len(load_settings(place / "c.yaml").subscriptions) == 3


@pytest.mark.case("ER94")
def test_of_each_item_of_a_list_everything_that_is_wrong_is_said(place: Path) -> None:
    found = problems(
        place,
        WHOLE.format(place).partition("subscriptions:")[0]
        + "subscriptions:\n  - {endpoint: tcp://127.1:5, dynamo_namespace: '', topics: []}\n  - {topics: [a]}\n"
        + "discover:\n  - {namespace: GPU, dynamo_namespaces: [], topics: []}\n"
        + "faults: [{after: 1h, do: x}, {after: 1s, do: y}]\n",
    )
    assert [line.split(": ")[1] for line in found] == [
        *("subscriptions[0].endpoint", "subscriptions[0].dynamo_namespace", "subscriptions[0].topics"),
        *("subscriptions[1]", "discover[0].namespace", "discover[0].dynamo_namespaces", "discover[0].topics"),
        *("faults[0].after", "faults[0].do", "faults[1].do"),
    ]


@pytest.mark.case("ER94")
def test_an_empty_file_is_told_what_it_begins_with(place: Path) -> None:
    (told,) = problems(place, "")
    assert told.endswith("c.yaml: is empty; start with listen:")


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ("{namespace: GPU, dynamo_namespaces: [d], topics: [t]}", "discover[0].namespace"),
        ("{namespace: gpu, dynamo_namespaces: [], topics: [t]}", "discover[0].dynamo_namespaces"),
        ("{namespace: gpu, dynamo_namespaces: [d, d], topics: [t]}", "discover[0].dynamo_namespaces[1]"),
        ("{namespace: gpu, dynamo_namespaces: [d], topics: []}", "discover[0].topics"),
        ("{namespace: gpu, dynamo_namespaces: [d]}", "discover[0]"),
        ("{namespace: gpu, dynamo_namespaces: [d], topics: [t], selector: x}", "discover[0].selector"),
        ('{namespace: gpu, dynamo_namespaces: [d], topics: [t], kubeconfig: ""}', "discover[0].kubeconfig"),
    ],
)
def test_what_is_wrong_with_a_discovery_is_said_with_its_place(place: Path, entry: str, where: str) -> None:
    whole = WHOLE.format(place).partition("discover:")[0]
    (line,) = problems(place, f"{whole}discover:\n  - {entry}\n")
    assert line.split(": ")[1] == where


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "could not be read"),
        (b"{a: [", "is no YAML"),
        (b"\xff", "is no YAML"),
        (b"- a", "names no clusters"),
        (b"clusters: []", "names no clusters"),
        (b"#" * (1 << 20) + b"#", "is larger than"),
    ],
)
def test_a_kubeconfig_that_is_none_is_told_with_its_place(place: Path, content: bytes | None, words: str) -> None:
    settings = load_settings(place / "c.yaml")
    assert problems_of(settings, ServerCredentials(settings)) == ()
    (place / "kubeconfig").unlink()
    if content is not None:
        (place / "kubeconfig").write_bytes(content)
    (line,) = problems_of(settings, ServerCredentials(settings))
    assert line.startswith("discover[0].kubeconfig: ")
    assert words in line


@pytest.mark.case("ER17")
def test_events_are_served_where_it_is_said_and_a_port_alone_is_the_loopbacks(place: Path) -> None:
    text = WHOLE.format(place)
    (place / "c.yaml").write_text(text.replace("serve: 9466", 'serve: "[::]:9466"'))
    assert load_settings(place / "c.yaml").serve == Endpoint("::", 9466)
    for wrong in ("localhost:9466", "70000", "127.0.0.1", "-1", "224.0.0.1:9466"):
        (told,) = problems(place, text.replace("serve: 9466", f"serve: {wrong}"))
        assert "serve: " in told


@pytest.mark.case("ER1")
def test_any_of_the_tokens_is_let_in_and_nothing_else(place: Path) -> None:
    made = ServerCredentials(load_settings(place / "c.yaml"))
    made.load()
    assert [
        made.is_allowed(each) for each in ("old-secret", "new-secret", "", "new-secre", "new-secret ", "\udcff")
    ] == [
        *(True, True),
        *(False, False, False, False),
    ]


@pytest.mark.case("ER13")
def test_tokens_and_certificate_are_replaced_while_it_runs_and_bad_ones_are_not_taken(place: Path) -> None:
    made, counts = ServerCredentials(load_settings(place / "c.yaml")), RouterCounts()
    made.load()
    before = made.context
    (place / "tokens").write_text("third")
    made.reload(counts)
    assert made.context is before
    assert made.is_allowed("third")
    assert not made.is_allowed("old-secret")
    (place / "tokens").write_text("")
    (place / "tls.crt").write_text("no PEM")
    made.reload(counts)
    assert made.context is before
    assert made.is_allowed("third")
    issued = trustme.CA().issue_cert("router.test")
    (place / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (place / "tls.key").write_bytes(issued.private_key_pem.bytes())
    made.reload(counts)
    assert made.context is not before
    assert counts.credential_reloads == {"ok": 1, "failed": 2}


@pytest.mark.case("ER20")
@pytest.mark.parametrize("content", [b"", b"\n \n", b"a b\n", b"tok\x00en", b"a\n" * 65, b"x" * (64 * 16 * 1024 + 1)])
def test_a_token_file_that_can_not_be_used_is_refused_and_not_repeated(place: Path, content: bytes) -> None:
    (place / "tokens").write_bytes(content)
    with pytest.raises(CredentialError) as raised:
        ServerCredentials(load_settings(place / "c.yaml")).read_tokens()
    assert raised.value.key == "token_file"
    assert "tok" not in str(raised.value).replace("token", "")


@pytest.mark.case("ER20")
def test_a_key_of_another_certificate_is_refused(place: Path) -> None:
    (place / "tls.key").write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes())
    with pytest.raises(CredentialError):
        ServerCredentials(load_settings(place / "c.yaml")).load()


def pair(place: Path, not_before: datetime, not_after: datetime) -> None:
    issued = trustme.CA().issue_cert("router.test", not_before=not_before, not_after=not_after)
    (place / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (place / "tls.key").write_bytes(issued.private_key_pem.bytes())


@pytest.mark.case("ER94")
@pytest.mark.parametrize(("days", "words"), [(-20, "expired on"), (20, "is not valid before")])
def test_a_certificate_that_is_not_valid_now_is_a_problem_of_a_check_and_a_warning_at_the_start(
    place: Path, days: int, words: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    middle = datetime.now(UTC) + timedelta(days=days)
    pair(place, middle - timedelta(days=5), middle + timedelta(days=5))
    line = ["event-bus", "--config", str(place / "c.yaml"), "--check-config", "--json"]
    assert app(line, standalone_mode=False) == 2
    (told,) = json.loads(capsys.readouterr().out)["problems"]
    assert told.startswith(f"certificate: {place}/tls.crt has certificate 1 of 1, which {words}")
    settings = load_settings(place / "c.yaml")
    made = ServerCredentials(settings)
    logging.getLogger("kura_shaper").propagate = True
    assert problems_of(settings, made) == ()
    made.load()
    made.reload(RouterCounts())
    (warned,) = [each for each in caplog.records if each.message == "certificate_not_valid"]
    assert words in warned.fields["reason"]  # type: ignore[attr-defined]


@pytest.mark.case("ER94")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tls.crt", b"garbage", "certificate: {0}/tls.crt has no certificate in PEM"),
        ("tls.key", b"garbage", "private_key: {0}/tls.key has no key in PEM"),
        ("tls.key", KEY_WITH_PASSWORD, "private_key: {0}/tls.key has a password"),
        ("tls.key", trustme.CA().issue_cert("x").private_key_pem.bytes(), "private_key: {0}/tls.key is not of the"),
        ("tokens", b"", "token_file: {0}/tokens has 0 tokens"),
    ],
)
def test_what_is_wrong_with_a_file_says_which_and_how(place: Path, name: str, content: bytes, words: str) -> None:
    (place / name).write_bytes(content)
    settings = load_settings(place / "c.yaml")
    (told,) = problems_of(settings, ServerCredentials(settings))
    assert told.startswith(words.format(place))


@pytest.mark.case("ER94")
def test_all_files_that_are_missing_are_told_at_once_and_the_log_has_each_key_once(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(place / "c.yaml")
    made = ServerCredentials(settings)
    made.load()
    for name in ("tls.crt", "tls.key", "tokens"):
        (place / name).unlink()
    found = problems_of(settings, made)
    assert [each.partition(":")[0] for each in found] == ["certificate", "private_key", "token_file"]
    made.reload(RouterCounts())
    told = [each.fields for each in caplog.records]  # type: ignore[attr-defined]
    assert [each["key"] for each in told] == ["certificate", "token_file"]
    assert all(each["reason"].startswith("could not be read") for each in told)


@pytest.mark.case("ER20")
def test_check_config_says_fine_or_what_is_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["event-bus", "--config", str(place / "c.yaml"), "--check-config"]
    app(line, standalone_mode=False)
    assert capsys.readouterr().out == f"{place}/c.yaml: fine\n"
    (place / "tokens").unlink()
    assert app([*line, "--json"], standalone_mode=False) == 2
    said = json.loads(capsys.readouterr().out)
    assert not said["valid"]
    assert said["problems"][0].startswith("token_file: could not be read")
