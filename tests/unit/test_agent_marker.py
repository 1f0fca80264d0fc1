"""The marker that holds the agent off: whatever stands there counts, and nobody stumbles over it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from kura_shaper.agent.marker import Disabled, read_marker, remove_marker, write_marker
from kura_shaper.errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

INCIDENT = Disabled("incident 4711", "root@node", "2026-11-30T12:00:00+00:00")


@pytest.mark.case("F38")
def test_a_marker_says_who_when_and_why_until_it_is_removed(tmp_path: Path) -> None:
    """Case F38."""
    path = tmp_path / "state" / "disabled"
    assert read_marker(path) is None
    write_marker(path, INCIDENT)
    assert read_marker(path) == INCIDENT
    assert path.stat().st_mode & 0o777 == 0o644
    write_marker(path, Disabled("another"))
    assert read_marker(path) == Disabled("another")
    assert [each.name for each in path.parent.iterdir()] == ["disabled"]
    assert remove_marker(path)
    assert not remove_marker(path)
    assert read_marker(path) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"   ", b"\xff\xfe\x00", b"null", b"[]", b'"x"', b"17", b"{", b"{}", b"9" * 10_000, b"[" * 60_000],
    ids=lambda content: repr(content[:8]),
)
def test_whatever_a_file_holds_it_is_a_marker(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "disabled"
    path.write_bytes(content)
    found = read_marker(path)
    assert found is not None
    assert len(found.reason) <= 500


def test_a_reason_that_was_written_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "disabled"
    path.write_text("please keep off, Eve\n")
    assert read_marker(path) == Disabled("please keep off, Eve")


def test_what_somebody_wrote_breaks_no_line_no_terminal_and_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "disabled"
    path.write_text(json.dumps({"reason": "a\nb\x1b[2J\ud800", "who": {"x": ["y"] * 1000}, "at": None}))
    found = read_marker(path)
    assert found is not None
    for text in asdict(found).values():
        assert text.isprintable()
        assert len(text.encode()) <= 2000
    assert found.reason == "a b [2J"


def test_a_huge_marker_is_read_only_in_part(tmp_path: Path) -> None:
    path = tmp_path / "disabled"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    assert read_marker(path) is not None


def test_a_pipe_in_its_place_is_a_marker_and_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "disabled"
    os.mkfifo(path)
    found: list[Disabled | None] = []
    reader = threading.Thread(target=lambda: found.append(read_marker(path)), daemon=True)
    reader.start()
    reader.join(2)
    assert found
    assert found[0] is not None


def test_what_can_not_be_read_is_a_marker_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("none")
    (tmp_path / "ring").symlink_to("ring")
    for name in ("directory", "file/disabled", "nowhere", "ring"):
        found = read_marker(tmp_path / name)
        assert found is not None, name
        assert str(tmp_path / name) in found.reason
    assert read_marker(tmp_path / "none" / "disabled") is None


def test_a_marker_that_can_not_be_written_or_removed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="can't be written"):
        write_marker(tmp_path / "file" / "disabled", INCIDENT)
    (tmp_path / "disabled").mkdir()
    with pytest.raises(RefusedError, match="can't be written"):
        write_marker(tmp_path / "disabled", INCIDENT)
    with pytest.raises(RefusedError, match="can't be removed"):
        remove_marker(tmp_path / "disabled")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disabled", "file"]


def test_a_reader_sees_the_old_marker_or_the_new_one_and_never_a_part(tmp_path: Path) -> None:
    path = tmp_path / "disabled"
    texts = ["a" * 400, "b" * 400]
    write_marker(path, Disabled(texts[0]))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_marker(path, Disabled(text))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            found = read_marker(path)
            assert found is not None
            assert found.reason in texts
    finally:
        stop.set()
        writer.join()
