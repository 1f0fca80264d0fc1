"""What an agent is told, by a file, the environment and options: each key, the order, and what is refused where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kura_shaper.agent.settings import KEYS, AgentSettings, KubernetesSource, load_settings
from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import Endpoint
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.tree.model import HostTraffic, LeafKind
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

MINIMAL = "source: {file: /t.yaml}\nbudget: 3G\n"
# Each key as its text in the environment, and what it becomes.
VALUES: dict[str, tuple[str, object]] = {
    "overlay": ("/o.yaml", Path("/o.yaml")),
    "devices": ("eth0, eth1", ("eth0", "eth1")),
    "budget": ("1500M", Rate(1_500_000_000)),
    "host_traffic": ("inside", HostTraffic.INSIDE),
    "host_reserve": ("10M", Rate(10_000_000)),
    "shape": ("single", ShapeChoice.SINGLE),
    "shaped_queues": ("4", 4),
    "leaf": ("fq", LeafKind.FQ),
    "listen": ("[::1]:9999", Endpoint("::1", 9999)),
    "observe": ("true", True),
    "resync_s": ("30", 30),
    "state_dir": ("/s", Path("/s")),
    "node_file": ("/n", Path("/n")),
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., AgentSettings]:
    """Return what loads settings from a text, environment variables and options."""

    def loaded(text: str | None = MINIMAL, environ: dict[str, str] | None = None, **options: str) -> AgentSettings:
        path = None
        if text is not None:
            path = tmp_path / "agent.yaml"
            path.write_text(text)
        return load_settings(path, environ or {}, options)

    return loaded


def refusal(load: Callable[..., AgentSettings], *arguments: object, **options: str) -> str:
    with pytest.raises(UsageError) as refused:
        load(*arguments, **options)
    assert refused.value.remedy
    text = str(refused.value)
    assert len(text) < 600
    return text


def test_what_is_not_told_is_as_the_contract_says(load: Callable[..., AgentSettings]) -> None:
    made = load()
    assert made == AgentSettings(file=Path("/t.yaml"), budget=Rate(3_000_000_000))
    assert (made.devices, made.shape, made.leaf) == ((), ShapeChoice.AUTO, LeafKind.FQ_CODEL)
    assert (made.listen, made.host_reserve) == (Endpoint("127.0.0.1", 9469), Rate(50_000_000))


def test_the_example_of_the_contract_can_be_read(load: Callable[..., AgentSettings]) -> None:
    made = load(
        "source: {kubernetes: {region: us-east, namespace: kura}}\n"
        "devices: auto\nbudget: node\nhost_traffic: outside\nhost_reserve: 50M\nshape: auto\n"
        "shaped_queues: 1\nleaf: fq_codel\nlisten: 127.0.0.1:9469\n"
    )
    assert made == AgentSettings(kubernetes=KubernetesSource("us-east", "kura"))


@pytest.mark.parametrize("key", VALUES)
def test_every_key_can_stand_in_the_file_the_environment_and_on_the_command_line(
    load: Callable[..., AgentSettings], key: str
) -> None:
    text, value = VALUES[key]
    before = MINIMAL if key != "budget" else MINIMAL.replace("budget: 3G\n", "")
    assert getattr(load(f"{before}{key}: {text!r}\n"), key) == value
    assert getattr(load(before, {f"KURA_SHAPER_{key.upper()}": text}), key) == value
    assert getattr(load(before, **{key: text}), key) == value


def test_every_key_is_tested() -> None:
    assert {*KEYS} == {*VALUES, "file", "region", "namespace", "node", "kubeconfig"}


def test_the_environment_is_over_the_file_and_options_over_both(load: Callable[..., AgentSettings]) -> None:
    environ = {"KURA_SHAPER_BUDGET": "4G", "KURA_SHAPER_LEAF": ""}
    assert load(MINIMAL, environ).budget == Rate(4_000_000_000)
    assert load(MINIMAL, environ, budget="5G").budget == Rate(5_000_000_000)
    assert load(MINIMAL, environ).leaf is LeafKind.FQ_CODEL


def test_no_file_is_needed(load: Callable[..., AgentSettings]) -> None:
    assert load(None, {"KURA_SHAPER_FILE": "/t"}, budget="1G").file == Path("/t")


# The source.


def test_the_last_that_names_a_source_wins(load: Callable[..., AgentSettings]) -> None:
    cluster = "source: {kubernetes: {region: a, namespace: n, node: x, kubeconfig: /k}}\nbudget: 3G\n"
    assert load(cluster).kubernetes == KubernetesSource("a", "n", "x", "/k")
    by_environment = load(cluster, {"KURA_SHAPER_FILE": "/t"})
    assert (by_environment.file, by_environment.kubernetes) == (Path("/t"), None)
    by_option = load(cluster, file="/t")
    assert (by_option.file, by_option.kubernetes) == (Path("/t"), None)
    back = load(MINIMAL, {"KURA_SHAPER_REGION": "b"}, node="y")
    assert (back.file, back.kubernetes) == (None, KubernetesSource("b", node="y"))
    twice = load(cluster, {"KURA_SHAPER_FILE": "/t"}, region="c")
    assert (twice.file, twice.kubernetes) == (None, KubernetesSource("c", "n", "x", "/k"))


def test_all_namespaces_can_be_asked_for(load: Callable[..., AgentSettings]) -> None:
    assert load("source: {kubernetes: {region: a, namespace: ''}}").kubernetes == KubernetesSource("a", "")


def test_two_sources_in_one_place_are_refused_and_both_named(load: Callable[..., AgentSettings]) -> None:
    assert "--file and --region" in refusal(load, MINIMAL, file="/t", region="a")
    both = {"KURA_SHAPER_FILE": "/t", "KURA_SHAPER_REGION": "a"}
    assert "KURA_SHAPER_FILE and KURA_SHAPER_REGION" in refusal(load, None, both)
    assert "source" in refusal(load, "source: {file: /t, kubernetes: {region: a}}\n")


def test_a_budget_of_the_node_needs_the_cluster_that_knows_it(load: Callable[..., AgentSettings]) -> None:
    assert "budget: node" in refusal(load, "source: {file: /t}\nbudget: node\n")
    assert "budget: node" in refusal(load, "source: {file: /t}\n")
    assert load("source: {kubernetes: {region: a}}\nbudget: node\n").budget is None


# What is refused says where and what to do.


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("budget", "fast", "quantity"),
        ("budget", "-1G", ""),
        ("budget", "0", "no rate"),
        ("budget", "true", "no rate"),
        ("budget", "[3G]", ""),
        ("budget", "null", ""),
        ("budget", "9P", "budget"),
        ("host_reserve", "50Mbit", "quantity"),
        ("host_traffic", "both", "outside, inside"),
        ("shape", "multi", "auto, single, mq"),
        ("shape", "[mq]", "auto, single, mq"),
        ("leaf", "cake", "fq_codel"),
        ("shaped_queues", "0", "1 to 16"),
        ("shaped_queues", "17", "1 to 16"),
        ("shaped_queues", "true", "1 to 16"),
        ("shaped_queues", "'٣'", "1 to 16"),
        ("shaped_queues", "1.5", "1 to 16"),
        ("shaped_queues", f"'{'9' * 5000}'", "1 to 16"),
        ("resync_s", "1", "5 to"),
        ("listen", "9469", ""),
        ("listen", "localhost:9469", "IP address"),
        ("listen", "127.0.0.1:70000", ""),
        ("devices", "[]", "auto"),
        ("devices", "''", "name"),
        ("devices", "[eth0, 7]", "text"),
        ("devices", "[auto, eth0]", "auto"),
        ("devices", "eth0/../x", "name"),
        ("devices", "a_name_of_sixteen", "name"),
        ("observe", "maybe", "true or false"),
        ("state_dir", "''", "empty"),
        ("node_file", "5", "text"),
        ("overlay", '"/a\\nb"', "text"),
    ],
)
def test_a_value_that_can_not_be_names_the_file_the_key_and_what_helps(
    load: Callable[..., AgentSettings], key: str, value: str, words: str
) -> None:
    before = "source: {file: /t.yaml}\n" + ("" if key == "budget" else "budget: 3G\n")
    text = refusal(load, f"{before}{key}: {value}\n")
    assert key.replace("_", " ") in text or f"agent.yaml: {key}" in text
    assert words in text


def test_a_bad_value_names_the_variable_or_the_option_that_it_came_by(load: Callable[..., AgentSettings]) -> None:
    assert refusal(load, MINIMAL, {"KURA_SHAPER_LEAF": "x"}).startswith("KURA_SHAPER_LEAF: ")
    assert refusal(load, MINIMAL, shaped_queues="x").startswith("--shaped-queues: ")


def test_settings_that_do_not_go_together_are_refused_before_the_first_look(
    load: Callable[..., AgentSettings],
) -> None:
    assert "shape mq" in refusal(load, MINIMAL + "shape: mq\nhost_traffic: inside\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budgit: 3G\n", "unknown key 'budgit'"),
        ("file: /t\n", "below source"),
        ("region: a\n", "below source"),
        ("- a\n", "no mapping"),
        ("just text\n", "no mapping"),
        ("source: /t\n", "neither file nor kubernetes"),
        ("source: {}\n", "neither file nor kubernetes"),
        ("source: {http: x}\n", "neither file nor kubernetes"),
        ("source: {kubernetes: us-east}\n", "region"),
        ("source: {kubernetes: {}}\n", "region"),
        ("source: {kubernetes: {region: a, zone: b}}\n", "region"),
        ("source: {kubernetes: {region: ''}}\n", "empty"),
        ("source: {kubernetes: {region: null}}\n", "text"),
        ("", "one source"),
        ("budget: 3G\nbudget: 5G\n", "twice"),
        ("source: {file: /t, file: /u}\n", "twice"),
        ("a: &a [x]\nbudget: *a\n", "alias"),
        ("budget: !!python/object/apply:os.system ['true']\n", "can't be read"),
        ("budget: [\n", "can't be read"),
        ("? [a, b]\n: c\n", "can't be read"),
        ("budget: \x00\n", "can't be read"),
        ("[" * 5000, "can't be read"),
        ("# " + "x" * (1 << 20) + "\n" + MINIMAL, "larger"),
    ],
)
def test_a_file_that_is_no_page_of_settings_is_refused_by_its_name(
    load: Callable[..., AgentSettings], text: str, words: str
) -> None:
    found = refusal(load, text)
    assert words in found
    assert "agent.yaml" in found or words == "one source"


def test_aliases_that_grow_without_bound_cost_nothing(load: Callable[..., AgentSettings]) -> None:
    bomb = "a: &a [x]\n" + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{f'*{chr(97 + n)},' * 9}]\n" for n in range(9))
    assert "alias" in refusal(load, bomb)


def test_what_can_not_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            load_settings(path, {})
