"""The programs that read manifests, from where scripts/setup puts them, and what they make of ours."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kura_shaper.haproxy.binary import cache_directory

ROOT = Path(__file__).parents[2]
DAEMONSET = ROOT / "daemonset"
CHART = DAEMONSET / "helm" / "kura-shaper"
OVERLAYS = ("observe", "canary", "all")

# Which folder of the cache has it, and what brings it there.
_BROUGHT = {
    "promtool": ("prometheus", "install-prometheus"),
    "helm": ("helm", "kubernetes/install-helm"),
    "kubectl": ("helm", "kubernetes/install-helm"),
    "python": ("checkers", "kubernetes/install-checkers"),
    "hadolint": ("checkers", "kubernetes/install-checkers"),
    "shellcheck": ("checkers", "kubernetes/install-checkers"),
}

Manifest = dict[str, Any]
# A dashboard within YAML takes Python's own reader a second.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def tool(name: str) -> str:
    """Return a program: that of the cache, else the machine's own. Skips the test where there is none."""
    folder, script = _BROUGHT[name]
    path = cache_directory() / folder / "bin" / name
    own = None if name == "python" else shutil.which(name)
    if not path.exists() and own is None:
        pytest.skip(f"no {name} at {path}; scripts/{script} brings it")
    return str(path) if path.exists() else str(own)


def run(*words: str | Path, check: bool = True, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program; where it should succeed and does not, its own words are the failure's."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, input=stdin, check=False)
    assert not check or done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}"
    return done


@functools.cache
def kustomized(path: str) -> str:
    """Return what Kustomize makes of a folder below daemonset/."""
    return run(tool("kubectl"), "kustomize", DAEMONSET / path).stdout


@functools.cache
def helm_rendered(*options: str) -> str:
    """Return what Helm makes of the chart with these options."""
    return run(tool("helm"), "template", "kura-shaper", CHART, "--namespace", "kura-shaper", *options).stdout


def manifests(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, Loader=_LOADER) if document]


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == kind]


def the(objects: list[Manifest], kind: str) -> Manifest:
    (found,) = of_kind(objects, kind)
    return found


def check_schemas(text: str, *others: str) -> None:
    """Have kubernetes-validate take manifests, whose command lets a kind that it does not know pass.

    It does not have the kinds of others, about which a real server is asked.
    """
    script = (
        "import sys, yaml, kubernetes_validate as v\n"
        "for each in yaml.safe_load_all(sys.stdin):\n"
        "    if each['kind'] not in sys.argv[2:]:\n"
        "        v.validate(each, sys.argv[1], strict=True)\n"
    )
    for version in ("1.25", "1.37"):
        run(tool("python"), "-c", script, version, *others, stdin=text)


def containers(workload: Manifest) -> list[Manifest]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]]


def anchors(markdown: str) -> set[str]:
    """Return the anchors that headings of a page have, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
