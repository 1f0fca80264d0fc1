"""What a person or a CI job gets from the command line for bad input: one line and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kura_shaper.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
tenants:
  - name: acme
    class: 0x2a7
    floor: 25M
    ceiling: 1500M
    hosts: [acme.kura.example]
    backends:
      http: {address: "10.0.0.5:4000"}
  - name: globex
    class: 0x2a8
    hosts: [globex.kura.example]
    backends:
      http: {address: "10.0.0.6:4000"}
"""


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["kura-shaper", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("floor: 25M", "floor: 25Mbit", ["tenants[0].floor", ":7:"]),
        ("floor: 25M", "floor: 1600M", ["tenants[0].ceiling", "floor 1.6G"]),
        ("class: 0x2a8", "class: 0x2a7", ["tenants[1].class", "acme"]),
        ("class: 0x2a8", "class: 0xffff", ["tenants[1].class"]),
        ("class: 0x2a8", "class: 0xff", ["tenants[1].class"]),
        ("globex.kura.example", "acme.kura.example", ["tenants[1].hosts", "acme"]),
        ("    floor: 25M\n", "    flor: 25M\n", ["flor", "floor"]),
        ("name: globex", "name: no", ["tenants[1].name", "quote"]),
        ("[globex.kura.example]", "[10]", ["tenants[1].hosts"]),
        ("[globex.kura.example]", "[&a a.example, *a]", ["anchor"]),
        ("region: us-east", "region: us-east\nregion: eu", ["region"]),
        ("kind: Tenants", "kind: Tenant", ["kind"]),
        ('"10.0.0.6:4000"', '"$(id):4000"', ["tenants[1].backends.http"]),
    ],
)
def test_a_bad_document_is_one_line_with_its_place_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    old: str,
    new: str,
    words: list[str],
) -> None:
    file = tmp_path / "tenants.yaml"
    assert old in GOOD
    head, tail = GOOD.rsplit(old, 1)
    file.write_text(head + new + tail)
    for command in (["tenants", "lint"], ["plan", "--device", "lo", "--budget", "1G", "--tenants"]):
        assert call(monkeypatch, *command, str(file)) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert "Traceback" not in shown.err
        for word in [str(file), *words]:
            assert word in shown.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "eth0;id", "--budget", "1G"], "no such network device"),
        (["--device", "eth0 $(id)", "--budget", "1G"], "can't be the name"),
        (["--device", "../../etc", "--budget", "1G"], "can't be the name"),
        (["--device", "a" * 16, "--budget", "1G"], "can't be the name"),
        (["--device", "", "--budget", "1G"], "can't be the name"),
        (["--device", "nope0", "--budget", "1G"], "there are: "),
        (["--device", "lo", "--budget", "1Gbit"], "--budget"),
        (["--device", "lo", "--budget", "-1G"], "--budget"),
        (["--device", "lo", "--budget", "1G", "--host-reserve", "x"], "--host-reserve"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(GOOD)
    assert call(monkeypatch, "plan", "--tenants", str(file), *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert words in shown.err


def test_a_file_that_is_not_there_is_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "tenants", "lint", "/nowhere/tenants.yaml") == 2
    assert "/nowhere/tenants.yaml" in capsys.readouterr().err


def test_lint_says_how_many_tenants_as_text_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(GOOD)
    assert call(monkeypatch, "tenants", "lint", str(file)) == 0
    assert "2 tenants of region us-east" in capsys.readouterr().out
    assert call(monkeypatch, "tenants", "lint", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tenants"] == 2


def test_the_version_and_every_help_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("kura-shaper ")
    for command in ("plan", "apply", "status", "top", "uninstall", "render-haproxy", "tenants lint", "lab run"):
        assert call(monkeypatch, *command.split(), "--help") == 0
        assert "Example: kura-shaper" in capsys.readouterr().out.replace("\n", " ")


def test_a_setting_can_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(GOOD)
    monkeypatch.setenv("KURA_SHAPER_TENANTS", str(file))
    monkeypatch.setenv("KURA_SHAPER_BUDGET", "lots")
    assert call(monkeypatch, "plan", "--device", "lo") == 2
    assert "lots" in capsys.readouterr().err


def test_rendering_for_a_version_needs_no_haproxy_and_the_second_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, out = tmp_path / "tenants.yaml", tmp_path / "out"
    file.write_text(GOOD)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KURA_SHAPER_CACHE", str(tmp_path / "none"))
    render = ["render-haproxy", "--tenants", str(file), "--out", str(out), "--haproxy-version", "3.0"]
    assert call(monkeypatch, *render, "--diff") == 1
    assert "+backend acme_edge" in capsys.readouterr().out
    assert not out.exists()
    assert call(monkeypatch, *render) == 0
    assert (out / "current" / "haproxy.cfg").is_file()
    capsys.readouterr()
    assert call(monkeypatch, *render, "--diff") == 0
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, *render, "--json") == 0
    assert json.loads(capsys.readouterr().out)["changed"] is False


@pytest.mark.parametrize("version", ["2.8", "3.0.2", "three", "", "3.0; id"])
def test_a_version_that_is_too_old_or_none_is_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, version: str
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(GOOD)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KURA_SHAPER_CACHE", str(tmp_path / "none"))
    out = str(tmp_path / "out")
    command = ["render-haproxy", "--tenants", str(file), "--out", out, "--haproxy-version", version]
    assert call(monkeypatch, *command) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_error_is_one_object_too_where_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["plan", "--json"],
        ["status", "--device", "nope0", "--json"],
        ["plan", "--shape", "x", "--json"],
    ):
        assert call(monkeypatch, *arguments, "--json") == 2
        shown = capsys.readouterr()
        assert json.loads(shown.out)["error"]["code"] == "usage"
        assert shown.err.count("\n") == 1


def test_an_option_that_is_missing_or_unknown_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in ((["plan"], "--tenants"), (["nope"], "nope"), (["plan", "--nope"], "--nope")):
        assert call(monkeypatch, *arguments) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert words in shown
        assert "--help" in shown


def test_a_fault_of_ours_does_not_look_like_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kura_shaper.cli.tenants.load_tenants", fail)
    assert call(monkeypatch, "tenants", "lint", "x") == 4
    assert "error[internal]" in capsys.readouterr().err


@pytest.mark.parametrize("sink", ["pipe", "/dev/full"])
def test_output_that_can_not_be_written_does_not_change_what_the_exit_code_says(tmp_path: Path, sink: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(GOOD)
    if sink == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(sink, os.O_WRONLY)
    command = [sys.executable, "-m", "kura_shaper", "tenants", "lint", str(file)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
