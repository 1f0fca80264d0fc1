"""The images that the Dockerfile makes, as a registry would get them."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path += [str(Path(__file__).parents[1] / each) for each in ("kube", "manifests")]

from node_rig import TARGETS, images

import kura_shaper

if TYPE_CHECKING:
    from collections.abc import Iterator

# Building takes both processors.
pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.traffic]


@pytest.fixture(scope="module", params=TARGETS[:-1])
def image(request: pytest.FixtureRequest) -> Iterator[tuple[str, tarfile.TarFile]]:
    """Return an image's target and its archive."""
    (path,) = images(request.param)
    with closing(tarfile.open(path)) as archive:
        yield request.param, archive


def read(archive: tarfile.TarFile, name: str) -> Any:
    found = archive.extractfile(name)
    assert found
    return json.load(found)


def test_it_says_what_it_is_and_how_it_runs(image: tuple[str, tarfile.TarFile]) -> None:
    target, archive = image
    config = read(archive, read(archive, "manifest.json")[0]["Config"])["config"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == kura_shaper.__version__
    assert {"title", "description", "revision"} <= labels.keys()
    if target == "gateway":
        assert not config.get("Entrypoint")
        assert config["Cmd"][0] == "haproxy"
    else:
        command = "event-broker" if target == "event-broker" else "agent"
        assert (config["Entrypoint"], config["Cmd"][0]) == (["kura-shaper"], command)
    assert config.get("User", "") == ("65532:65532" if target in ("agent", "event-broker") else "")
    assert config["StopSignal"] == "SIGTERM"


def test_no_layer_has_what_is_only_for_building(image: tuple[str, tarfile.TarFile]) -> None:
    _, archive = image
    leftover = re.compile(r"(\./)?(var/lib/apt/lists/.+_|var/cache/apt/.*\.(deb|bin)$|src/.|wheels/.|usr/bin/pip)")
    for layer in read(archive, "manifest.json")[0]["Layers"]:
        with tarfile.open(fileobj=archive.extractfile(layer)) as found:
            assert [name for name in found.getnames() if leftover.match(name)] == []
