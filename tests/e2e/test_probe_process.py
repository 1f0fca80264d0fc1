"""The probe as a service, as a process of its own: it tells Prometheus, and ends when it is told to."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from probe_rig import HOST, Served, authority_file, objects, server_context, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(objects, server_context("http/1.1")) as made:
        yield made


@contextmanager
def service(tmp_path: Path, served: Served) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a probe that runs as a service, and where it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "targets.yaml").write_text(
        "apiVersion: kura-shaper/v1\nkind: Targets\ntargets:\n"
        f"  - {{tenant: acme, name: reads, url: 'https://{HOST}', small: /7, large: /200000, protocol: http1}}\n"
        f"  - {{tenant: acme, name: away, url: 'https://{HOST}', small: /7, protocol: http2}}\n"
    )
    words = (sys.executable, "-m", "kura_shaper", "probe", "--targets", str(tmp_path / "targets.yaml"))
    place = ("--connect-to", f"127.0.0.1:{served.port}", "--ca-file", str(authority_file()))
    command = (*words, "--listen", str(port), "--interval", "1", *place)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def ask(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def wait_for(url: str, *words: str) -> str:
    end_s = time.monotonic() + PATIENCE_S
    while not all(word in (text := ask(url)) for word in words):
        assert time.monotonic() < end_s, text
        time.sleep(0.05)
    return text


def test_a_service_tells_prometheus_and_ends_when_it_is_told_to(tmp_path: Path, served: Served) -> None:
    with service(tmp_path, served) as (process, where):
        labels = 'protocol="http1",target="reads",tenant="acme"'
        text = wait_for(
            f"{where}/metrics",
            f"kura_shaper_probe_up{{{labels}}} 1.0",
            'kura_shaper_probe_failures_total{protocol="http2",reason="alpn",target="away",tenant="acme"}',
            'kura_shaper_probe_up{protocol="http2",target="away",tenant="acme"} 0.0',
        )
        assert f"kura_shaper_probe_rate_bits_per_second{{{labels}}}" in text
        assert ask(f"{where}/healthz") == "ok\n"
        assert {each["name"] for each in json.loads(wait_for(f"{where}/statusz", "away"))} == {"reads", "away"}
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert [line.split()[2] for line in log.splitlines()] == ["target_failed"]


def test_a_port_that_is_taken_is_bad_usage(tmp_path: Path, served: Served) -> None:
    with service(tmp_path, served) as (_, where):
        wait_for(f"{where}/healthz", "ok")
        again = ("probe", "--url", f"https://{HOST}/7", "--listen", where.rpartition(":")[2])
        done = subprocess.run(
            (sys.executable, "-m", "kura_shaper", *again), capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert "choose another" in done.stderr
