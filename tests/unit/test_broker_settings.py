"""What a broker may be told, and that everything wrong with it is said at once by its key, and no secret is."""

from __future__ import annotations

import ipaddress
import json
import resource
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kura_shaper.broker.counts import Counts
from kura_shaper.broker.credentials import CredentialError, Credentials
from kura_shaper.broker.entries import SettingsError
from kura_shaper.broker.program import problems_of
from kura_shaper.broker.settings import BrokerSettings, BusUrl, load_settings
from kura_shaper.cli.main import app
from kura_shaper.log import LogFormat, LogLevel
from kura_shaper.tenants.document import Endpoint
from kura_shaper.units import Rate

GOOD: dict[str, Any] = {
    "bus_url": "https://router.example.net:8443/tunnel",
    "client_id": "gpu-a-1",
    "kubernetes_namespace": "gpu",
    "watch_namespaces": ["gpu", "gpu-canary"],
    "dynamo_namespaces": ["dynamo"],
    "token_file": "/var/run/secrets/event-broker/token",
    "ca_bundle": "/etc/event-broker/ca.pem",
    "allowed_cidrs": ["10.244.0.0/16"],
    "max_streams": 256,
    "max_stream_buffer_bytes": "1MiB",
    "upstream_connect_timeout": "5s",
    "reconnect_backoff": {"min": "1s", "max": "60s"},
    "drain_deadline": "25s",
    "deauthorise_after": "30s",
    "max_stream_rate": "2.5Gbit",
    "metrics_listen": "0.0.0.0:9464",
    "so_mark": "0x1000000",
    "log_level": "info",
}
LEAST = {key: GOOD[key] for key in ("bus_url", "client_id", "kubernetes_namespace", "dynamo_namespaces", "token_file")}


def load(tmp_path: Path, told: object, environ: dict[str, str] | None = None) -> BrokerSettings:
    path = tmp_path / "config.yaml"
    path.write_text(told if isinstance(told, str) else yaml.safe_dump(told))
    return load_settings(path, environ or {}, service_account=tmp_path / "none")


def problems(tmp_path: Path, told: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, told)
    return caught.value.problems


def test_everything_that_can_be_told_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD) == BrokerSettings(
        bus_url=BusUrl("router.example.net", 8443, "/tunnel"),
        client_id="gpu-a-1",
        kubernetes_namespace="gpu",
        watch_namespaces=("gpu", "gpu-canary"),
        dynamo_namespaces=("dynamo",),
        token_file=Path("/var/run/secrets/event-broker/token"),
        ca_bundle=Path("/etc/event-broker/ca.pem"),
        allowed_cidrs=(ipaddress.ip_network("10.244.0.0/16"),),
        deauthorise_after_ms=30_000,
        max_stream_rate=Rate(2_500_000_000),
        so_mark=0x1000000,
    )


def test_what_is_not_told_has_its_default(tmp_path: Path) -> None:
    found = load(tmp_path, LEAST)
    assert found.watch_namespaces == ("gpu",)
    assert (found.max_streams, found.max_stream_buffer_bytes) == (256, 1 << 20)
    assert (found.reconnect_least_ms, found.reconnect_most_ms, found.drain_deadline_ms) == (1_000, 60_000, 25_000)
    assert (found.deauthorise_after_ms, found.max_stream_rate) == (None, None)
    assert (found.metrics_listen, found.so_mark) == (Endpoint("0.0.0.0", 9464), None)
    assert (found.log_level, found.log_format) == (LogLevel.INFO, LogFormat.JSON)


def test_the_namespace_is_that_of_the_pod_when_none_is_told(tmp_path: Path) -> None:
    told = {key: value for key, value in LEAST.items() if key != "kubernetes_namespace"}
    assert load(tmp_path, told, {"POD_NAMESPACE": "from-pod"}).watch_namespaces == ("from-pod",)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "namespace").write_text("from-account\n")
    assert load(tmp_path, told).kubernetes_namespace == "from-account"
    (tmp_path / "none" / "namespace").unlink()
    (line,) = problems(tmp_path, told)
    assert "kubernetes_namespace" in line


BAD: list[tuple[str, Any]] = [
    ("bus_url", "http://router.example.net"),
    ("bus_url", "router.example.net"),
    ("bus_url", "https://"),
    ("bus_url", "https://router.example.net:0"),
    ("bus_url", "https://router.example.net:99999"),
    ("bus_url", "https://router.example.net/a b"),
    ("bus_url", "https://router.example.net/../x"),
    ("bus_url", "https://router.example.net/a//b"),
    ("client_id", "-a"),
    ("client_id", "a" * 64),
    ("client_id", "a b"),
    ("kubernetes_namespace", "Gpu"),
    ("watch_namespaces", []),
    ("watch_namespaces", ["gpu", "gpu"]),
    ("watch_namespaces", [f"n{number}" for number in range(65)]),
    ("watch_namespaces", "gpu"),
    ("dynamo_namespaces", []),
    ("dynamo_namespaces", ["a" * 254]),
    ("allowed_cidrs", ["10.244.0.1/16"]),
    ("allowed_cidrs", ["10.244.0.0/33"]),
    ("allowed_cidrs", ["pods"]),
    ("max_streams", 0),
    ("max_streams", 4_097),
    ("max_streams", "many"),
    ("max_stream_buffer_bytes", "15KiB"),
    ("max_stream_buffer_bytes", "2MiB"),
    ("max_stream_buffer_bytes", "1MB"),
    ("upstream_connect_timeout", "99ms"),
    ("upstream_connect_timeout", "11s"),
    ("upstream_connect_timeout", 5),
    ("reconnect_backoff", {"min": "2m", "max": "1m"}),
    ("reconnect_backoff", {"min": "1ms"}),
    ("reconnect_backoff", {"least": "1s"}),
    ("reconnect_backoff", "1s"),
    ("drain_deadline", "11m"),
    ("deauthorise_after", "999ms"),
    ("deauthorise_after", "61m"),
    ("max_stream_rate", "200"),
    ("max_stream_rate", "200mbit"),
    ("max_stream_rate", "255kbit"),
    ("max_stream_rate", "101Gbit"),
    ("max_stream_rate", "1.2345Gbit"),
    ("metrics_listen", "9464"),
    ("so_mark", 0),
    ("so_mark", 1 << 32),
    ("log_level", "loud"),
    ("log_format", "xml"),
    ("token_env", "not a name"),
    ("tls_server_name", "10.0.0.1"),
    ("max_strems", 5),
]


@pytest.mark.case("EB42")
@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_value_is_told_by_its_key_alone(tmp_path: Path, key: str, value: Any) -> None:
    told = GOOD | {key: value}
    if key == "token_env":
        del told["token_file"]
    (line,) = problems(tmp_path, told)
    assert key in line
    assert "\n" not in line


@pytest.mark.case("EB42")
def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, {"bus_url": "http://x", "max_streams": 0, "colour": "red", "token_env": "T"})
    assert len(found) == 6
    for key in ("bus_url", "max_streams", "colour", "client_id", "dynamo_namespaces", "kubernetes_namespace"):
        assert any(key in line for line in found) or key == "kubernetes_namespace"


@pytest.mark.parametrize("told", ["", "[]", "a: [", "bus_url: a\nbus_url: b\n", "- x"])
def test_a_file_that_is_no_mapping_is_told(tmp_path: Path, told: str) -> None:
    assert len(problems(tmp_path, told)) == 1


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        load_settings(tmp_path / "none.yaml", {})


@pytest.mark.case("EB42")
def test_exactly_one_place_of_the_token_is_needed(tmp_path: Path) -> None:
    without = {key: value for key, value in LEAST.items() if key != "token_file"}
    for told in (without, LEAST | {"token_env": "T"}):
        (line,) = problems(tmp_path, told)
        assert "token_file" in line


@pytest.mark.case("EB8")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bus_url", "https://user:hunter2@router.example.net"),
        ("bus_url", "http://user:hunter2@router.example.net"),
        ("bus_url", "https://router.example.net/?token=hunter2"),
        ("bus_url", "https://router.example.net/#hunter2"),
        ("bus_url", "https://[hunter2"),
        ("token_env", "Bearer hunter2"),
    ],
)
def test_what_may_be_a_secret_is_not_repeated(tmp_path: Path, key: str, value: str) -> None:
    told = GOOD | {key: value}
    if key == "token_env":
        del told["token_file"]
    assert "hunter2" not in "".join(problems(tmp_path, told))


# Token and CA bundle.


@pytest.fixture
def files(tmp_path: Path) -> BrokerSettings:
    (tmp_path / "token").write_text(" secret\n")
    (tmp_path / "ca.pem").write_bytes(trustme.CA().cert_pem.bytes())
    told = GOOD | {"token_file": str(tmp_path / "token"), "ca_bundle": str(tmp_path / "ca.pem")}
    return load(tmp_path, told)


@pytest.mark.case("EB42")
def test_good_files_have_no_problems(files: BrokerSettings) -> None:
    assert problems_of(files, Credentials(files)) == ()
    assert Credentials(files).read_token() == "secret"
    context = Credentials(files).read_context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.check_hostname


@pytest.mark.case("EB42")
@pytest.mark.parametrize("content", [b"", b" \n", b"a b", b"a\r\nX-Evil: 1", b"a\0", "ä".encode(), b"x" * 20_000])
def test_a_token_that_is_no_header_is_told_and_not_shown(files: BrokerSettings, content: bytes) -> None:
    assert files.token_file
    files.token_file.write_bytes(content)
    (line,) = problems_of(files, Credentials(files))
    assert line.startswith("token_file")
    assert "Evil" not in line


@pytest.mark.case("EB42")
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_bundle_without_a_certificate_is_told(files: BrokerSettings, content: bytes) -> None:
    assert files.ca_bundle
    files.ca_bundle.write_bytes(content)
    (line,) = problems_of(files, Credentials(files))
    assert line.startswith("ca_bundle")


@pytest.mark.case("EB42")
def test_files_that_are_not_there_are_both_told(files: BrokerSettings) -> None:
    assert files.token_file
    assert files.ca_bundle
    files.token_file.unlink()
    files.ca_bundle.unlink()
    assert [line.partition(":")[0] for line in problems_of(files, Credentials(files))] == ["token_file", "ca_bundle"]


def test_a_token_of_the_environment_is_read_at_each_dial(tmp_path: Path) -> None:
    told = {key: value for key, value in LEAST.items() if key != "token_file"} | {"token_env": "BUS_TOKEN"}
    environ = {"BUS_TOKEN": "one"}
    settings = load(tmp_path, told)
    credentials = Credentials(settings, environ)
    assert credentials.read_token() == "one"
    environ["BUS_TOKEN"] = "two"
    assert credentials.has_other_token("one")
    del environ["BUS_TOKEN"]
    assert problems_of(settings, credentials) == ("token_env: is empty or not set; put the router's token there",)


@pytest.mark.case("EP5")
def test_a_file_that_goes_bad_keeps_the_last_that_was_good(files: BrokerSettings) -> None:
    assert files.ca_bundle
    assert files.token_file
    counts, credentials = Counts(), Credentials(files)
    first = credentials.current(counts)
    assert credentials.current(counts) == first
    files.ca_bundle.write_bytes(b"garbage")
    assert credentials.current(counts) == first
    files.token_file.unlink()
    assert credentials.current(counts) == first
    assert counts.credential_reloads == {"ok": 2, "failed": 2}
    files.token_file.write_text("other")
    files.ca_bundle.write_bytes(trustme.CA().cert_pem.bytes())
    token, context = credentials.current(counts)
    assert token == "other"
    assert context is not first[1]


def test_without_any_good_file_there_is_no_dial(files: BrokerSettings) -> None:
    assert files.token_file
    files.token_file.unlink()
    with pytest.raises(CredentialError):
        Credentials(files).current(Counts())


def test_a_message_of_a_file_names_it(files: BrokerSettings) -> None:
    assert files.token_file
    assert files.ca_bundle
    files.token_file.unlink()
    files.ca_bundle.write_text("garbage")
    assert problems_of(files, Credentials(files)) == (
        f"token_file: could not be read: {files.token_file}: No such file or directory; check the path and its mode",
        f"ca_bundle: {files.ca_bundle} has no certificates that can be read; give PEM",
    )
    files.token_file.write_text(" ")
    assert f"token_file: {files.token_file} is empty" in problems_of(files, Credentials(files))[0]


def test_descriptors_that_are_not_allowed_are_told(files: BrokerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 319))
    (line,) = problems_of(files, Credentials(files))
    assert line == "max_streams needs 320 descriptors, and 319 are allowed; raise the limit of open files to 320"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 320))
    assert problems_of(files, Credentials(files)) == ()


def kubeconfig(**changes: Any) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t0k"}}],
    } | changes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "could not be read: "),
        ("a: [", "is no YAML"),
        ("\x00", "is no YAML"),
        ("[" * 100_000, "is no YAML"),
        ("t0k", "it is no mapping"),
        ("", "it is no mapping"),
        (kubeconfig(contexts="t0k"), "contexts is no list"),
        (kubeconfig(contexts=["t0k"]), "contexts is no list of mappings"),
        (kubeconfig(contexts=[{"name": "c", "context": "t0k"}]), "an entry of contexts has no context"),
        (kubeconfig(**{"current-context": "x"}), "current-context names none of contexts"),
        (kubeconfig(**{"current-context": None}), "current-context names none of contexts"),
        (kubeconfig(clusters=[]), "the current context's cluster names none of clusters"),
        (kubeconfig(clusters=[{"name": "k", "cluster": {"server": "t0k"}}]), "its current cluster has no server"),
        (kubeconfig(users=None), "users is no list"),
        (kubeconfig(users=[{"name": "v", "user": {}}]), "the current context's user names none of users"),
    ],
)
def test_a_kubeconfig_that_is_none_is_told_by_its_path(
    tmp_path: Path, files: BrokerSettings, content: object, said: str
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    (line,) = problems_of(files, Credentials(files), kubeconfig=path)
    assert line.startswith("--kubeconfig: ")
    assert str(path) in line
    assert said in line
    assert "t0k" not in line
    assert "give --kubeconfig" not in line


@pytest.mark.parametrize("user", [{}, None, {"exec": {"command": "/bin/false"}}])
def test_a_kubeconfig_is_fine_and_what_it_names_is_not_started(
    tmp_path: Path, files: BrokerSettings, user: object
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig(users=[{"name": "u", "user": user}])))
    assert problems_of(files, Credentials(files), kubeconfig=path) == ()


def authority(*, until: datetime) -> bytes:
    """Return the certificate of an authority that is good until a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "of\nold")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(until - timedelta(days=9)).not_valid_after(until)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


# The command.


def checked(tmp_path: Path, told: object, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(told))
    status = app(["event-broker", "--config", str(path), "--check-config", *options], standalone_mode=False)
    said = capsys.readouterr()
    return status or 0, said.out, said.err


@pytest.mark.case("EB42")
def test_a_check_says_fine_or_each_problem_in_a_line_and_never_the_token(
    tmp_path: Path, files: BrokerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    told = GOOD | {"token_file": str(files.token_file), "ca_bundle": str(files.ca_bundle)}
    status, out, err = checked(tmp_path, told, capsys)
    assert (status, err) == (0, "")
    assert out.endswith("config.yaml: fine\n")
    assert files.ca_bundle
    files.ca_bundle.write_text("garbage")
    status, out, err = checked(tmp_path, told, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("ca_bundle: ")
    status, out, err = checked(tmp_path, told | {"bus_url": "http://x", "nope": 1}, capsys)
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert "secret" not in out + err


def test_a_check_reads_the_kubeconfig_as_well(
    tmp_path: Path, files: BrokerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    told = GOOD | {"token_file": str(files.token_file), "ca_bundle": str(files.ca_bundle)}
    path = tmp_path / "kubeconfig"
    status, out, err = checked(tmp_path, told, capsys, "--kubeconfig", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    path.write_text(yaml.safe_dump(kubeconfig()))
    assert checked(tmp_path, told, capsys, "--kubeconfig", str(path))[0] == 0


def test_a_check_warns_of_an_authority_whose_time_is_over_and_that_is_no_failure(
    tmp_path: Path, files: BrokerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert files.ca_bundle
    old, new = (authority(until=datetime.now(UTC) + timedelta(days=days)) for days in (-1, 8))
    files.ca_bundle.write_bytes(old + new)
    told = GOOD | {"token_file": str(files.token_file), "ca_bundle": str(files.ca_bundle)}
    status, out, err = checked(tmp_path, told, capsys)
    assert (status, err.count("\n")) == (0, 1)
    assert out.endswith("config.yaml: fine\n")
    assert err.startswith(f"warning: ca_bundle: {files.ca_bundle}: ")
    assert "the certificate of 'commonName=of\\nold' expired on " in err
    status, out, err = checked(tmp_path, told, capsys, "--json")
    assert (status, err) == (0, "")
    assert [len(json.loads(out)[key]) for key in ("problems", "warnings")] == [0, 1]
