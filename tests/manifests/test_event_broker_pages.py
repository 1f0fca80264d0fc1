"""The event broker's examples, notes and README: what they say is so, and each command that they show is one."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
import typer
from event_broker_manifests import BUNDLE, CHART
from manifest_tools import DAEMONSET, anchors, run, tool

from kura_shaper.broker import settings as broker_settings
from kura_shaper.broker.counts import DialOutcome
from kura_shaper.broker.entries import SettingsError
from kura_shaper.broker.metadata import Skip
from kura_shaper.broker.protocol.codes import UNKNOWN, RefusalCode
from kura_shaper.broker.router import settings as router_settings
from kura_shaper.broker.settings import load_settings
from kura_shaper.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

README = (BUNDLE / "README.md").read_text()


# Examples and pages.


EXAMPLES = sorted((BUNDLE / "examples").iterdir())
ROUTER = BUNDLE / "examples" / "router.yaml"


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path != ROUTER], ids=lambda path: path.name)
def test_an_example_is_taken(path: Path) -> None:
    assert load_settings(path, {"POD_NAMESPACE": "gpu"}).dynamo_namespaces[0] == "dynamo"


def test_one_example_has_every_key_and_the_defaults_that_it_says() -> None:
    text = (BUNDLE / "examples" / "everything.yaml").read_text()
    said = set(re.findall(r"^(?:# )?(\w+): ", text, re.MULTILINE))
    assert set(broker_settings._KEYS) <= said
    least = load_settings(BUNDLE / "examples" / "minimal.yaml", {"POD_NAMESPACE": "gpu"})
    every = load_settings(BUNDLE / "examples" / "everything.yaml", {})
    for name in (
        *("max_streams", "max_stream_buffer_bytes", "upstream_connect_timeout_ms", "reconnect_least_ms"),
        *("reconnect_most_ms", "drain_deadline_ms", "metrics_listen", "log_level", "log_format"),
    ):
        assert getattr(every, name) == getattr(least, name), name


def test_the_routers_example_has_every_key_and_the_defaults_that_it_says(tmp_path: Path) -> None:
    said = re.findall(r"^(?:# )?(\w+): ?", ROUTER.read_text(), re.MULTILINE)
    assert sorted(said) == sorted(router_settings._READERS)
    (tmp_path / "least.yaml").write_text("{listen: 0.0.0.0:8443, certificate: c, private_key: k, token_file: t}")
    least, every = router_settings.load_settings(tmp_path / "least.yaml"), router_settings.load_settings(ROUTER)
    own = {"certificate", "private_key", "token_file", "subscriptions", "discover"}
    for each in fields(every):
        assert each.name in own or getattr(every, each.name) == getattr(least, each.name), each.name
    # What is only shown, since by default there is none, is right as well.
    whole = re.sub(r"^# (\w+: )", r"\1", ROUTER.read_text(), flags=re.MULTILINE)
    (tmp_path / "whole.yaml").write_text(whole)
    shown = router_settings.load_settings(tmp_path / "whole.yaml")
    assert shown.serve
    assert shown.faults
    assert shown.path_prefix


def test_the_bounds_that_the_routers_example_says_are_those_that_hold(tmp_path: Path) -> None:
    text = ROUTER.read_text()

    def problems(key: str, value: str) -> tuple[str, ...]:
        (tmp_path / "r.yaml").write_text(re.sub(rf"^{key}: .*", f"{key}: {value}", text, flags=re.MULTILINE))
        try:
            router_settings.load_settings(tmp_path / "r.yaml")
        except SettingsError as error:
            return error.problems
        return ()

    for key, least, most in (
        *(("max_sessions", 1, 1024), ("max_streams", 1, 4096)),
        *(("max_stream_buffer_bytes", 16 << 10, 1 << 20), ("stream_window", 64 << 10, 16 << 20)),
        ("max_message_bytes", 1 << 10, 64 << 20),
    ):
        assert not problems(key, str(least)) + problems(key, str(most)), key
        assert problems(key, str(least - 1))
        assert problems(key, str(most + 1))
    for key, least_ms, most_ms in (("drain_deadline", 0, 600_000), ("idle_timeout", 20_000, 300_000)):
        assert not problems(key, f"{least_ms}ms") + problems(key, f"{most_ms}ms"), key
        assert problems(key, f"{most_ms + 1}ms")


def test_the_routers_settings_are_taken_as_they_are_shown(tmp_path: Path) -> None:
    shown = re.search(r"^## What the router reads\n.*?```yaml\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert shown
    (tmp_path / "router.yaml").write_text(shown[1])
    (discover,) = router_settings.load_settings(tmp_path / "router.yaml").discover
    assert discover.kubeconfig is not None
    assert discover.topics == ("kv-events", "kv_metrics")


def test_whoever_installs_is_told_what_comes_next() -> None:
    words = ("install", "event-broker", CHART, "--namespace", "event-broker", "--dry-run=client")

    def told(*options: str) -> str:
        values = ("--values", CHART / "ci" / "two-values.yaml")
        return run(tool("helm"), *words, *values, *options).stdout.partition("NOTES:")[2]

    assert "exec deploy/event-broker-gpu-a-2" in told()
    assert "any address" not in told()
    assert "allowed_cidrs is empty" in told("--set-json", "settings.allowed_cidrs=[]")
    assert "allowed_cidrs has a /0" in told("--set-json", 'settings.allowed_cidrs=["0.0.0.0/0"]')
    assert "uid 0 with NET_ADMIN" in told("--set", "settings.so_mark=1,monitoring.enabled=false")


def table(heading: str) -> list[str]:
    """Return the first column of the first table below a heading."""
    part = README.partition(f"# {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)


def test_every_code_and_reason_is_explained() -> None:
    assert table("What refusals mean") == [*RefusalCode, UNKNOWN]
    assert set(table("Not connected")) == set(DialOutcome) - {DialOutcome.ESTABLISHED}
    part = README.partition("### Metadata\n")[2].partition("\n#")[0]
    for reason in Skip:
        assert f"`{reason}`" in part or reason.endswith("_too_long")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    page, _, anchor = link.partition("#")
    path = (BUNDLE / page) if page else BUNDLE / "README.md"
    assert not anchor or anchor in anchors(path.read_text())


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:daemonset|tests)/[\w/.-]*\w", README))))
def test_a_path_is_there(path: str) -> None:
    assert (DAEMONSET.parent / path).exists()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^kura-shaper .+$", README, re.MULTILINE))))
def test_a_command_is_taken(command: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    words = shlex.split(command)[1:]
    group.commands[words[0]].make_context(command, words[1:])
