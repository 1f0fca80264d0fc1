"""Generations: whole or not at all, switched by one link, and nothing written through somebody else's."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import KuraShaperError, RefusedError, StateUnknownError, UsageError
from kura_shaper.haproxy.generation import EMPTY, MANIFEST_FILE, GatewayConfig
from kura_shaper.haproxy.write import CURRENT, GENERATIONS, KEPT_GENERATIONS, Written, read_generation, write_generation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def config(text: str) -> GatewayConfig:
    return GatewayConfig.with_manifest({"haproxy.cfg": text.encode(), "sni.map": b""}, version="3.0")


def write_a(directory: Path) -> object:
    return write_generation(config("a"), directory)


both = pytest.mark.parametrize("use", [write_a, read_generation], ids=["write", "read"])


def refused_in_one_line(error: KuraShaperError, name: Path) -> bool:
    """Tell whether the error names the path and a remedy, in one line."""
    return str(name) in error.message and bool(error.remedy) and "\n" not in str(error)


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
    assert read_generation(tmp_path) != config("a")
    assert write_generation(config("a"), tmp_path) is Written.SWITCHED
    assert read_generation(tmp_path) == config("a")
    assert [path.name for path in (tmp_path / GENERATIONS).iterdir()] == [config("a").generation]


@pytest.mark.parametrize("missing", ["haproxy.cfg", "sni.map", MANIFEST_FILE])
def test_a_generation_that_lacks_a_file_is_seen_and_written_anew(tmp_path: Path, missing: str) -> None:
    write_generation(config("a"), tmp_path)
    (tmp_path / CURRENT / missing).unlink()
    (tmp_path / CURRENT / ".haproxy.cfg.swp").write_text("stray")
    found = read_generation(tmp_path)
    assert found.files == {name: content for name, content in config("a").files.items() if name != missing}
    assert write_generation(config("a"), tmp_path) is Written.SWITCHED
    assert read_generation(tmp_path) == config("a")


@pytest.mark.parametrize("manifest", ["", "{", "[]", "{}", '{"files": []}', '{"files": {"../x": ""}}', "[" * 99_999])
def test_a_damaged_manifest_is_seen_and_written_anew(tmp_path: Path, manifest: str) -> None:
    write_generation(config("a"), tmp_path)
    (tmp_path / CURRENT / MANIFEST_FILE).write_text(manifest)
    (tmp_path / CURRENT / ".haproxy.cfg.swp").write_text("stray")
    assert read_generation(tmp_path).files == {**config("a").files, MANIFEST_FILE: manifest.encode()}
    assert write_generation(config("a"), tmp_path) is Written.SWITCHED
    assert read_generation(tmp_path) == config("a")


def stray_file(path: Path) -> None:
    path.write_text("an editor's")


def stray_tree(path: Path) -> None:
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_text("")


def stray_link(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("name", [".haproxy.cfg.swp", "haproxy.cfg~", "more.map"])
@pytest.mark.parametrize("make", [stray_file, stray_tree, stray_link, os.mkfifo])
def test_what_the_manifest_does_not_list_is_ignored_and_goes_with_its_generation(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    write_generation(config("a"), tmp_path)
    make(tmp_path / CURRENT / name)
    before = everything(tmp_path)
    assert read_generation(tmp_path) == config("a")
    assert write_generation(config("a"), tmp_path) is Written.UNCHANGED
    assert everything(tmp_path) == before
    for text in "bcdefg":
        write_generation(config(text), tmp_path)
    kept = {path.name for path in (tmp_path / GENERATIONS).iterdir()}
    assert kept == {config(text).generation for text in "cdefg"}


def test_what_is_no_generation_is_not_pruned(tmp_path: Path) -> None:
    stray_tree(tmp_path / GENERATIONS / "backup")
    stray_tree(tmp_path / GENERATIONS / ".git")
    elsewhere = tmp_path / "elsewhere"
    stray_tree(elsewhere)
    (tmp_path / GENERATIONS / ("0" * 16)).symlink_to(elsewhere)
    os.mkfifo(tmp_path / GENERATIONS / ("1" * 16))
    before = everything(tmp_path / GENERATIONS), everything(elsewhere)
    for text in "abcdefgh":
        write_generation(config(text), tmp_path)
    assert everything(elsewhere) == before[1]
    assert before[0].items() <= everything(tmp_path / GENERATIONS).items()


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


def test_the_operators_own_path_may_be_a_link(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "gateway"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    assert read_generation(link) == EMPTY
    assert write_generation(config("a"), link) is Written.SWITCHED
    assert read_generation(link) == read_generation(elsewhere) == config("a")
    assert link.is_symlink()


def test_a_link_in_place_of_the_generations_is_not_followed(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "elsewhere", tmp_path / "gateway"
    elsewhere.mkdir()
    directory.mkdir()
    (directory / GENERATIONS).symlink_to(elsewhere)
    with pytest.raises(RefusedError, match=GENERATIONS) as caught:
        write_generation(config("a"), directory)
    assert refused_in_one_line(caught.value, directory)
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
@both
def test_a_current_that_leads_elsewhere_is_left_alone(
    tmp_path: Path, target: str, use: Callable[[Path], object]
) -> None:
    (tmp_path / CURRENT).symlink_to(target)
    with pytest.raises(RefusedError, match="was not made by this program") as caught:
        use(tmp_path)
    assert refused_in_one_line(caught.value, tmp_path / CURRENT)
    assert str((tmp_path / CURRENT).readlink()) == target


@both
@pytest.mark.parametrize("make", [stray_file, stray_tree])
def test_a_current_that_is_no_link_is_left_alone(
    tmp_path: Path, make: Callable[[Path], None], use: Callable[[Path], object]
) -> None:
    make(tmp_path / CURRENT)
    before = everything(tmp_path)
    with pytest.raises(RefusedError, match="is no link") as caught:
        use(tmp_path)
    assert refused_in_one_line(caught.value, tmp_path / CURRENT)
    assert "move it away" in caught.value.remedy
    assert everything(tmp_path) == before


def test_nothing_there_is_empty_and_what_can_not_be_read_is_unknown(tmp_path: Path) -> None:
    assert read_generation(tmp_path / "absent") == EMPTY
    assert read_generation(tmp_path) == EMPTY
    write_generation(config("a"), tmp_path)
    (tmp_path / CURRENT / "haproxy.cfg").unlink()
    os.mkfifo(tmp_path / CURRENT / "haproxy.cfg")
    with pytest.raises(StateUnknownError, match=r"'haproxy.cfg' is no plain file") as caught:
        read_generation(tmp_path)
    assert refused_in_one_line(caught.value, tmp_path)


@both
@pytest.mark.parametrize("name", ["file", "file/below", "link"])
def test_a_path_that_is_no_directory_is_an_error_of_usage(
    tmp_path: Path, name: str, use: Callable[[Path], object]
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UsageError, match="is no directory") as caught:
        use(tmp_path / name)
    assert refused_in_one_line(caught.value, tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_link_to_nowhere_is_an_error_of_usage(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="is no directory"):
        write_generation(config("a"), tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()
