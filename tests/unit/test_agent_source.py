"""A tenants document in a file: the last good one stays, with its age, however the file is replaced or broken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kura_shaper.agent.source import FileSource, Told
from kura_shaper.clock import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 10**9
GOOD = """\
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
tenants:
  - {name: acme, class: 0x2a7, floor: 25M, ceiling: 1500M}
"""
TWO = GOOD + "  - {name: zeta, class: 0x2a8}\n"


class Rig:
    """A source and its files."""

    def __init__(self, directory: Path, *, overlay: bool = False) -> None:
        self.path, self.overlay = directory / "tenants.yaml", directory / "overlay.yaml"
        self.clock = FakeClock(100 * SECOND)
        self.source = FileSource(self.path, self.overlay if overlay else None, clock=self.clock)

    def told(self) -> Told:
        self.clock.wait_ns(SECOND)
        return self.source.told()

    @property
    def names(self) -> list[str]:
        document = self.told().document
        return [tenant.name for tenant in document.tenants] if document else []


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path)
    made.path.write_text(GOOD)
    return made


def test_a_good_file_is_told_with_the_time_at_which_it_was_the_newest(rig: Rig) -> None:
    told = rig.told()
    assert (told.is_valid, told.problems, told.budget, told.may_disrupt) == (True, (), None, False)
    assert told.current_at_ns == rig.clock.now_ns()
    assert rig.told().current_at_ns == rig.clock.now_ns()
    assert rig.told().document is told.document


@pytest.mark.case("G4")
@pytest.mark.parametrize(
    "content",
    ["", "tenants: [", GOOD.replace("0x2a7", "0x1"), GOOD.replace("25M", "25Mbit"), "\x00", "[" * 10_000],
    ids=["empty", "broken", "bad class", "bad rate", "no text", "deep"],
)
def test_a_bad_file_keeps_the_last_good_one_and_says_what_is_wrong(rig: Rig, content: str) -> None:
    """Case G4."""
    good = rig.told()
    rig.path.write_text(content)
    for _ in range(3):
        told = rig.told()
        assert (told.document, told.is_valid) == (good.document, False)
        assert len(told.problems) == 1
        assert "tenants.yaml" in told.problems[0]
        assert told.current_at_ns == good.current_at_ns
    rig.path.write_text(TWO)
    told = rig.told()
    assert (told.is_valid, told.problems) == (True, ())
    assert rig.names == ["acme", "zeta"]


def test_without_a_good_file_there_is_no_document(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    told = rig.told()
    assert (told.document, told.is_valid, told.current_at_ns) == (None, False, 0)
    assert "tenants.yaml" in told.problems[0]
    rig.path.write_text("x")
    assert rig.told().document is None
    rig.path.write_text(GOOD)
    assert rig.names == ["acme"]


def test_a_file_that_goes_and_comes_back_the_same_is_good_again(rig: Rig) -> None:
    good = rig.told()
    content = rig.path.read_text()
    rig.path.unlink()
    told = rig.told()
    assert (told.document, told.is_valid) == (good.document, False)
    rig.path.write_text(content)
    assert rig.told().is_valid


def test_two_writes_within_a_tick_of_the_file_system_are_both_seen(rig: Rig) -> None:
    """The second has the size, the place and the time of the first."""
    before = rig.path.stat()
    assert rig.names == ["acme"]
    with rig.path.open("r+") as file:
        file.write(GOOD.replace("acme", "beta"))
    os.utime(rig.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert rig.path.stat().st_mtime_ns == before.st_mtime_ns
    assert rig.names == ["beta"]


def test_a_file_that_could_not_be_opened_for_a_moment_is_tried_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.told()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert not rig.told().is_valid
    assert rig.told().is_valid


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "link to nothing"])
def test_what_is_no_file_is_said_and_holds_nobody_up(rig: Rig, kind: str) -> None:
    good = rig.told()
    rig.path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(rig.path)
        case "directory":
            rig.path.mkdir()
        case "device":
            rig.path.symlink_to("/dev/zero")
        case _:
            rig.path.symlink_to("nothing")
    told = rig.told()
    assert (told.document, told.is_valid) == (good.document, False)


def test_what_did_not_change_is_not_parsed_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.told()
    monkeypatch.setattr("kura_shaper.agent.source.load_tenants", lambda *_, **__: pytest.fail("parsed"))
    os.utime(rig.path)
    rig.path.with_name("new").write_text(GOOD)
    rig.path.with_name("new").replace(rig.path)
    assert rig.told().is_valid


def test_a_swap_of_a_config_map_is_seen(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for version, content in (("1", GOOD), ("2", TWO)):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "tenants.yaml").write_text(content)
        (tmp_path / "..data_tmp").symlink_to(f"..{version}")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        if version == "1":
            rig.path.symlink_to("..data/tenants.yaml")
            assert rig.names == ["acme"]
    assert rig.names == ["acme", "zeta"]


def test_an_overlay_counts_as_much_as_the_file_below_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, overlay=True)
    rig.path.write_text(GOOD)
    told = rig.told()
    assert (told.document, told.is_valid) == (None, False)
    assert "overlay.yaml" in told.problems[0]
    rig.overlay.write_text("nonsense: 1\n")
    assert "overlay.yaml" in rig.told().problems[0]
    rig.overlay.write_text("apiVersion: kura-shaper/v1\nkind: Overlay\ngateway: {https_ports: [8443]}\n")
    told = rig.told()
    assert told.problems == ()
    assert told.document is not None
    assert told.document.gateway.https_ports == (8443,)
    assert rig.source.paths == (rig.path, rig.overlay)
    rig.overlay.write_text("broken: [")
    kept = rig.told()
    assert (kept.document, kept.is_valid) == (told.document, False)
