"""What wakes the agent, and what must not: files that are replaced in every way, and what netlink tells."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kura_shaper.agent.events import FileEvents, KernelEvents
from kura_shaper.kernel import wire
from kura_shaper.tenants.marks import PROOF_CLASS, ReservedClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def watching() -> Iterator[Callable[..., FileEvents]]:
    """Return what watches files until the end of the test."""
    made: list[FileEvents] = []

    def watch(*paths: Path) -> FileEvents:
        made.append(FileEvents(paths))
        return made[-1]

    yield watch
    for each in made:
        each.close()


def replace_atomically(path: Path, content: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(content)
    beside.replace(path)


def swap_config_map(volume: Path, version: str, content: str | None) -> None:
    """What a kubelet does: a new directory, a link `..data` renamed over the old one, links for new files."""
    directory = volume / f"..{version}"
    directory.mkdir()
    if content is not None:
        (directory / "tenants.yaml").write_text(content)
    (volume / "..data_tmp").symlink_to(directory.name)
    (volume / "..data_tmp").rename(volume / "..data")
    if not (volume / "tenants.yaml").is_symlink():
        (volume / "tenants.yaml").symlink_to("..data/tenants.yaml")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("b"),
        lambda path: replace_atomically(path, "b"),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o600),
        lambda path: path.rename(path.with_name("other")),
        lambda path: os.utime(path),
    ],
    ids=["written", "replaced", "deleted", "mode", "renamed", "touched"],
)
def test_any_change_of_a_file_is_told_once(
    tmp_path: Path, watching: Callable[..., FileEvents], change: Callable[[Path], Any]
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("a")
    events = watching(path)
    assert not events.drain()
    change(path)
    assert events.drain()
    assert not events.drain()


def test_a_file_that_comes_back_after_it_was_deleted_is_told(
    tmp_path: Path, watching: Callable[..., FileEvents]
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("a")
    events = watching(path)
    for _ in range(3):
        path.unlink()
        assert events.drain()
        path.write_text("b")
        assert events.drain()


def test_a_link_of_a_mounted_config_map_is_followed_through_every_swap(
    tmp_path: Path, watching: Callable[..., FileEvents]
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    swap_config_map(volume, "1", "a")
    events = watching(volume / "tenants.yaml")
    for version in range(2, 6):
        swap_config_map(volume, str(version), str(version))
        shutil.rmtree(volume / f"..{version - 1}")
        assert events.drain(), version
        events.drain()
        assert not events.drain()
    swap_config_map(volume, "empty", None)
    assert events.drain()
    swap_config_map(volume, "again", "a")
    assert events.drain()


def test_a_link_to_another_directory_is_watched_there_too(tmp_path: Path, watching: Callable[..., FileEvents]) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "real.yaml").write_text("a")
    link = tmp_path / "tenants.yaml"
    link.symlink_to("first/../first/real.yaml")
    events = watching(link)
    (tmp_path / "second" / "real.yaml").write_text("b")
    assert not events.drain()
    (tmp_path / "first" / "real.yaml").write_text("b")
    assert events.drain()
    link.unlink()
    link.symlink_to(tmp_path / "second" / "real.yaml")
    assert events.drain()
    (tmp_path / "second" / "real.yaml").write_text("c")
    assert events.drain()
    (tmp_path / "first" / "real.yaml").write_text("c")
    assert not events.drain()


def test_directories_that_appear_later_are_watched_from_then_on(
    tmp_path: Path, watching: Callable[..., FileEvents]
) -> None:
    path = tmp_path / "a" / "b" / "tenants.yaml"
    events = watching(path)
    (tmp_path / "a").mkdir()
    assert events.drain()
    (tmp_path / "a" / "b").mkdir()
    assert events.drain()
    path.write_text("a")
    assert events.drain()
    replace_atomically(path, "b")
    assert events.drain()


def test_a_directory_that_goes_and_comes_back_is_watched_again(
    tmp_path: Path, watching: Callable[..., FileEvents]
) -> None:
    path = tmp_path / "a" / "tenants.yaml"
    path.parent.mkdir()
    path.write_text("a")
    events = watching(path)
    for _ in range(3):
        shutil.rmtree(path.parent)
        assert events.drain()
        path.parent.mkdir()
        assert events.drain()
        path.write_text("a")
        assert events.drain()
    path.parent.rename(tmp_path / "moved")
    assert events.drain()
    path.parent.mkdir()
    assert events.drain()
    (tmp_path / "moved" / "tenants.yaml").write_text("b")
    assert not events.drain()


def test_what_else_happens_beside_a_file_wakes_nobody(tmp_path: Path, watching: Callable[..., FileEvents]) -> None:
    """The agent's own lock and journal are beside its marker: each look would bring about the next."""
    path = tmp_path / "disabled"
    events = watching(path)
    for name in ("eth0.1.lock", "eth0.1.json", ".disabled-x8f"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).unlink()
    assert not events.drain()
    path.write_text("x")
    assert events.drain()


def test_links_in_a_ring_end(tmp_path: Path, watching: Callable[..., FileEvents]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    events = watching(tmp_path / "a", tmp_path / "no" / "such" / "directory" / "a")
    assert not events.drain()
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_text("x")
    assert events.drain()


def test_more_than_the_kernel_keeps_counts_as_a_change(tmp_path: Path, watching: Callable[..., FileEvents]) -> None:
    path = tmp_path / "tenants.yaml"
    events = watching(path)
    assert events._counts(-1, 0x4000, "")


def test_a_thousand_swaps_leave_no_watch_and_no_descriptor_behind(
    tmp_path: Path, watching: Callable[..., FileEvents]
) -> None:
    swap_config_map(tmp_path, "0", "a")
    events = watching(tmp_path / "tenants.yaml")
    watches, descriptors = len(events._names), len(list(Path("/proc/self/fd").iterdir()))
    for version in range(1, 300):
        swap_config_map(tmp_path, str(version), "a")
        shutil.rmtree(tmp_path / f"..{version - 1}")
        assert events.drain()
    assert len(events._names) == watches
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


# Netlink: messages that a socket would bring, made here.


class FakeSocket:
    """Brings datagrams, and errors, in order."""

    def __init__(self, *told: bytes | OSError) -> None:
        self.told = list(told)

    def recv(self, _: int) -> bytes:
        if not self.told:
            raise BlockingIOError
        first = self.told.pop(0)
        if isinstance(first, OSError):
            raise first
        return first


def message(kind: int, body: bytes) -> bytes:
    return wire.HEADER.pack(wire.HEADER.size + len(body), kind, 0, 0, 0) + body


def tc_message(kind: int, ifindex: int, handle: int = 0x200100) -> bytes:
    return message(kind, wire.TCMSG.pack(0, ifindex, handle, 0, 0))


def route_message(destination_bits: int) -> bytes:
    return message(24, struct.pack("=BBBBBBBBI", 2, destination_bits, 0, 0, 254, 3, 0, 1, 0))


def heard(*told: bytes | OSError, ifindexes: tuple[int, ...] = (7,), balanced: tuple[int, ...] = ()) -> frozenset[str]:
    events = object.__new__(KernelEvents)
    events._socket = FakeSocket(*told)  # type: ignore[assignment]
    return events.drain(ifindexes, balanced)


@pytest.mark.parametrize(
    "kind", [36, 37, 40, 41, 44, 45], ids=["qdisc", "no qdisc", "class", "no class", "filter", "no filter"]
)
def test_traffic_control_of_our_device_alone_is_told(kind: int) -> None:
    assert heard(tc_message(kind, 7)) == {"tc"}
    assert heard(tc_message(kind, 8)) == frozenset()


def test_what_balancing_changes_is_no_news_where_a_budget_is_balanced() -> None:
    for minor in (ReservedClass.BUDGET, PROOF_CLASS, PROOF_CLASS + 15):
        changed = tc_message(wire.Message.NEWTCLASS, 7, 0x200000 | minor)
        assert heard(changed, balanced=(7,)) == frozenset()
        assert heard(tc_message(wire.Message.DELTCLASS, 7, 0x200000 | minor), balanced=(7,)) == {"tc"}
    assert heard(tc_message(wire.Message.NEWTCLASS, 7, 0x2002A7), balanced=(7,)) == {"tc"}


def test_a_budget_that_nobody_balances_is_told_when_somebody_edits_it() -> None:
    changed = tc_message(wire.Message.NEWTCLASS, 7, 0x200000 | ReservedClass.BUDGET)
    assert heard(changed) == {"tc"}
    assert heard(changed, ifindexes=(7, 8), balanced=(8,)) == {"tc"}


def test_links_and_default_routes_are_told_and_other_routes_are_not() -> None:
    assert heard(message(16, bytes(16)), message(17, bytes(16))) == {"link"}
    assert heard(route_message(0)) == {"route"}
    assert heard(route_message(24)) == frozenset()


def test_what_got_lost_is_told_as_such_and_the_rest_is_still_heard() -> None:
    lost = OSError(errno.ENOBUFS, "No buffer space available")
    assert heard(lost, tc_message(40, 7), lost, message(16, bytes(16))) == {"lost", "tc", "link"}


def test_a_socket_that_breaks_is_no_lost_event() -> None:
    with pytest.raises(OSError, match="Bad file"):
        heard(OSError(errno.EBADF, "Bad file descriptor"))


def test_many_messages_of_one_datagram_are_all_heard() -> None:
    assert heard(tc_message(40, 8) * 100 + tc_message(40, 7)) == {"tc"}
