"""What the first list of a broker takes beside the same list read with the official client, in the same run.

There is no readiness before that list, so it is how long a broker that begins is missing. The server has every page
ready, and is a process of its own, so that it is not what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measurement import Measurement, SkippedError, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HERE = Path(__file__).parent
_PROGRAM = _HERE / "metadata_list.py"
_RESOURCES, _REFERENCES = 16_384, 65_536
_RUNS = 3
_LIMIT_S = 120
_PEER = "official client"


def environment() -> dict[str, str]:
    """Return what programs find this package by."""
    return os.environ | {"PYTHONPATH": str(_HERE.parents[1])}


@contextmanager
def serving() -> Iterator[dict[str, Any]]:
    """Serve the list, which ends with the standard input of the server: with this process at the latest."""
    line = [sys.executable, str(_PROGRAM), "serve", json.dumps({"resources": _RESOURCES})]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            told = server.stdout.readline()
            if not told:
                raise SkippedError("the server of the list does not begin")
            yield json.loads(told)
        finally:
            server.stdin.close()


def kubeconfig(path: Path, port: int) -> None:
    """Write how to reach the server."""
    named = {"clusters": ("cluster", {"server": f"http://127.0.0.1:{port}"}), "users": ("user", {"token": "bench"})}
    named["contexts"] = ("context", {"cluster": "bench", "user": "bench"})
    made = {key: [{"name": "bench", kind: value}] for key, (kind, value) in named.items()}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "bench"} | made))


def read_by(who: str, config: Path) -> dict[str, float]:
    """Return what the list took a reader. Raises SkippedError when it did not read all of it."""
    line = [sys.executable, str(_PROGRAM), who, json.dumps({"kubeconfig": str(config)})]
    try:
        done = subprocess.run(line, capture_output=True, env=environment(), timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SkippedError(f"{who} does not end within {_LIMIT_S} s") from error
    found: dict[str, float] = json.loads(done.stdout) if done.returncode == 0 else {}
    if found.get("references") != _REFERENCES:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"read {found.get('references')}"]
        raise SkippedError(f"{who}: {words[0]}")
    return found


def first_sync() -> Iterator[Measurement]:
    """16,384 resources of four publishers each, in pages of 32."""
    least: dict[str, dict[str, float]] = {"ours": {}, "official": {}}
    with tempfile.TemporaryDirectory(prefix="kura-shaper-bench-") as name, serving() as server:
        config = Path(name) / "config"
        kubeconfig(config, server["port"])
        for run in range(_RUNS):
            for who, best in least.items():
                progress(f"broker-sync: run {run + 1} of {_RUNS}, {who}")
                found = read_by(who, config)
                best.update({key: min(value, best.get(key, value)) for key, value in found.items()})
    size = f"{_RESOURCES:,} resources, {server['list_bytes'] / 1e6:.0f} MB in {server['pages']} pages"
    ours, peer = least.values()
    for key, scale, unit, what in (
        ("processor_s", 1.0, "CPU s", f"{size}; ours checks every entry and bound"),
        ("wall_s", 1.0, "s", "from the first request until all is known, over plain HTTP"),
        ("peak_bytes", 1 / (1 << 20), "MiB", "most memory above what the process had before it began"),
    ):
        yield Measurement("broker-sync", ours[key] * scale, peer[key] * scale, _PEER, unit, what)


BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {"broker-sync": first_sync}
