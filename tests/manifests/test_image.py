"""The Dockerfile and the scripts: read by hadolint and shellcheck, and fetching nothing without a digest."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
from manifest_tools import DAEMONSET, ROOT, run, tool

DOCKERFILE = (DAEMONSET / "Dockerfile").read_text()
SCRIPTS = (
    "daemonset/break-glass.sh",
    "scripts/install-prometheus",
    "scripts/install-haproxy",
    "scripts/kubernetes/install-apiserver",
    *(f"scripts/kubernetes/{name}" for name in ("install-helm", "install-checkers", "sync-monitoring")),
    *(f"scripts/kubernetes/{name}" for name in ("install-node", "own-root", "build-images")),
)


def pins(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / path).read_text(), re.MULTILINE))


def test_hadolint_finds_nothing() -> None:
    run(tool("hadolint"), DAEMONSET / "Dockerfile")


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script: str) -> None:
    run(tool("shellcheck"), "--external-sources", f"--source-path={ROOT}", ROOT / script)
    assert os.access(ROOT / script, os.X_OK)


def test_the_image_has_the_versions_that_are_tested() -> None:
    image, tested = pins("daemonset/requirements.lock"), pins("requirements.lock")
    assert image.items() <= tested.items()
    for name in ("kubernetes", "aiohttp", "prometheus-client", "pyroute2", "typer"):
        assert name in image
    assert not {"pytest", "mypy", "plotly", "grpcio"} & image.keys()


def test_nothing_comes_from_pypi_without_a_digest() -> None:
    for line in re.sub(r"\\\n\s*", " ", DOCKERFILE).splitlines():
        for command in re.findall(r"pip [^&|]*\b(?:install|wheel)\b[^&|]*", line):
            assert "--require-hashes" in command or {"--no-index", "--no-build-isolation"} & set(command.split())
    assert not re.search(r"(curl|wget|ADD http)", DOCKERFILE)


def test_each_target_says_what_it_is() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    targets = {stage.splitlines()[0].split(" AS ")[1]: stage for stage in stages}
    for name in ("agent", "agent-bcc", "gateway"):
        assert "org.opencontainers.image.title" in targets[name]
    assert "org.opencontainers.image.version" in targets["runtime"]
    assert "\nUSER 65532:65532\n" in targets["agent"]
    assert list(targets)[-1] == "agent", "what a build without --target makes"


def test_what_is_copied_is_not_ignored() -> None:
    ignored = (DAEMONSET / "Dockerfile.dockerignore").read_text().split()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        path for paths in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for path in paths.split()
    }
    assert copied == allowed
    for path in copied:
        assert subprocess.run(["test", "-e", ROOT / path], check=False).returncode == 0


def test_the_event_broker_has_what_it_needs_and_is_nobody() -> None:
    (stage,) = re.findall(r"^FROM runtime AS event-broker\n(.+?)(?=^FROM )", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert "org.opencontainers.image.title" in stage
    assert "\nUSER 65532:65532\n" in stage
    assert 'CMD ["event-broker", "--config", "/etc/event-broker/config.yaml"]' in stage
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in (*extras["broker"], *extras["kubernetes"]):
        assert re.split(r"[<>=]", requirement)[0] in pins("daemonset/requirements.lock")
