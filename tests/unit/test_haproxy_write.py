"""Generations: whole or not at all, switched by one link, and nothing written through somebody else's."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.haproxy.generation import EMPTY, GatewayConfig
from kura_shaper.haproxy.write import CURRENT, GENERATIONS, KEPT_GENERATIONS, Written, read_generation, write_generation

if TYPE_CHECKING:
    from pathlib import Path


def config(text: str) -> GatewayConfig:
    return GatewayConfig({"haproxy.cfg": text.encode(), "sni.map": b""})


def everything(directory: Path) -> dict[str, str]:
    """Return every path below with what it is, and when it was last written."""
    return {
        str(path.relative_to(directory)): f"{path.readlink() if path.is_symlink() else ''} {path.lstat().st_mtime_ns}"
        for path in sorted(directory.rglob("*"))
    }


def test_a_generation_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert write_generation(config("a"), tmp_path / "new" / "place") is Written.SWITCHED
    assert read_generation(tmp_path / "new" / "place") == config("a")
    assert (tmp_path / "new/place" / CURRENT).resolve() == tmp_path / "new/place" / GENERATIONS / config("a").generation


def test_the_same_again_writes_nothing(tmp_path: Path) -> None:
    write_generation(config("a"), tmp_path)
    before = everything(tmp_path)
    assert write_generation(config("a"), tmp_path) is Written.UNCHANGED
    assert everything(tmp_path) == before


def test_a_reader_who_followed_the_link_keeps_his_generation(tmp_path: Path) -> None:
    write_generation(config("a"), tmp_path)
    followed = (tmp_path / CURRENT).resolve()
    write_generation(config("b"), tmp_path)
    assert (followed / "haproxy.cfg").read_text() == "a"
    assert (tmp_path / CURRENT / "haproxy.cfg").read_text() == "b"


def test_the_last_few_are_kept_and_the_one_in_force_always_is(tmp_path: Path) -> None:
    for text in "abcdefgh":
        write_generation(config(text), tmp_path)
    kept = {path.name for path in (tmp_path / GENERATIONS).iterdir()}
    assert kept == {config(text).generation for text in "defgh"}
    assert len(kept) == KEPT_GENERATIONS
    assert write_generation(config("d"), tmp_path) is Written.SWITCHED
    write_generation(config("x"), tmp_path)
    assert {path.name for path in (tmp_path / GENERATIONS).iterdir()} == {config(text).generation for text in "fghdx"}


def test_a_damaged_generation_is_written_anew(tmp_path: Path) -> None:
    write_generation(config("a"), tmp_path)
    (tmp_path / CURRENT / "haproxy.cfg").write_text("edited")
    assert write_generation(config("a"), tmp_path) is Written.SWITCHED
    assert read_generation(tmp_path) == config("a")
    (tmp_path / CURRENT / "more.map").write_text("not ours")
    assert write_generation(config("a"), tmp_path) is Written.SWITCHED
    assert [path.name for path in (tmp_path / GENERATIONS).iterdir()] == [config("a").generation]


def test_what_a_write_that_was_cut_short_left_is_cleared(tmp_path: Path) -> None:
    write_generation(config("a"), tmp_path)
    left = tmp_path / GENERATIONS / ".0123.4567"
    left.mkdir()
    (left / "haproxy.cfg").write_text("half")
    write_generation(config("b"), tmp_path)
    assert not left.exists()


def test_a_write_that_fails_leaves_the_former_in_force(tmp_path: Path) -> None:
    write_generation(config("a"), tmp_path)
    before = everything(tmp_path / GENERATIONS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(RefusedError, match="File too large"):
            write_generation(config("b" * 100), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_generation(tmp_path) == config("a")
    assert everything(tmp_path / GENERATIONS) == before


@pytest.mark.parametrize("name", [GENERATIONS, ""])
def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "gateway"
    elsewhere.mkdir()
    link = directory / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(RefusedError):
        write_generation(config("a"), directory)
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_place_of_a_generation_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / GENERATIONS).mkdir()
    (tmp_path / GENERATIONS / config("a").generation).symlink_to(elsewhere)
    write_generation(config("a"), tmp_path)
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / GENERATIONS / config("a").generation).is_symlink()


@pytest.mark.parametrize("target", ["/etc", "../elsewhere", "generations/..", "generations/a/b", "generations"])
def test_a_current_that_leads_elsewhere_is_left_alone(tmp_path: Path, target: str) -> None:
    (tmp_path / CURRENT).symlink_to(target)
    with pytest.raises(RefusedError, match="was not made by this program"):
        write_generation(config("a"), tmp_path)
    assert str((tmp_path / CURRENT).readlink()) == target
    with pytest.raises(StateUnknownError):
        read_generation(tmp_path)


def test_a_current_that_is_no_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / CURRENT).mkdir()
    with pytest.raises(RefusedError):
        write_generation(config("a"), tmp_path)
    assert (tmp_path / CURRENT).is_dir()


def test_nothing_there_is_empty_and_what_can_not_be_read_is_unknown(tmp_path: Path) -> None:
    assert read_generation(tmp_path / "absent") == EMPTY
    assert read_generation(tmp_path) == EMPTY
    write_generation(config("a"), tmp_path)
    (tmp_path / CURRENT / "haproxy.cfg").unlink()
    os.mkfifo(tmp_path / CURRENT / "haproxy.cfg")
    with pytest.raises(StateUnknownError, match="is no plain file"):
        read_generation(tmp_path)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError):
        write_generation(config("a"), tmp_path / "file")
