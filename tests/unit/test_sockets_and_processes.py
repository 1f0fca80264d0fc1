"""What the kernel tells of sockets and processes, from its own bytes and files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import StateUnknownError
from kura_shaper.haproxy.sessions import parse_marks, parse_sessions
from kura_shaper.kernel import wire
from kura_shaper.kernel.byways import HardwareFilter, hardware_filter
from kura_shaper.kernel.processes import read_holders
from kura_shaper.kernel.sockets import XdpSocket, parse_xdp, read_xdp_sockets

if TYPE_CHECKING:
    from pathlib import Path


def xdp_message(*attributes: tuple[int, bytes]) -> bytes:
    return bytes(16) + b"".join(wire.attribute(kind, payload) for kind, payload in attributes)


def test_an_af_xdp_socket_that_sends_is_told_with_its_device_and_whether_it_copies() -> None:
    info, ring = (1, struct.pack("=II", 7, 0)), (4, struct.pack("=I", 64))
    umem = struct.pack("=QIIIIIIII", 4096, 1, 1, 2048, 0, 7, 0, 1, 1)
    for attributes, found in (
        ((info, ring), XdpSocket(7)),
        ((info, ring, (5, umem)), XdpSocket(7, is_zero_copy=True)),
        ((info,), None),  # it only receives
        ((ring,), XdpSocket(0)),
    ):
        data = xdp_message(*attributes)
        assert parse_xdp(memoryview(data), 0, len(data)) == found


def test_a_network_namespace_without_af_xdp_sockets_needs_no_diag(tmp_path: Path) -> None:
    net = tmp_path / "thread-self" / "net"
    net.mkdir(parents=True)
    (net / "protocols").write_text("protocol  size sockets  memory\nXDP  960  0  -1\nTCP 2 3 4\n")
    assert read_xdp_sockets(tmp_path) == ()
    (net / "protocols").write_text("protocol  size sockets  memory\nTCP 2 3 4\n")
    assert read_xdp_sockets(tmp_path) == ()
    (net / "protocols").unlink()
    with pytest.raises(StateUnknownError):
        read_xdp_sockets(tmp_path)


@pytest.mark.parametrize(
    ("kind", "attribute", "flags", "is_in_hardware"),
    [
        ("flower", 22, 0b100, True),
        ("flower", 22, 0b1000, False),  # not in hardware
        ("flower", 22, 0b1, False),  # not even tried
        ("matchall", 3, 0b110, True),
        ("bpf", 9, 0b100, True),
        ("u32", 11, 0b101, True),
        ("fw", 22, 0b100, False),  # a kind that hardware never has
    ],
)
def test_a_filter_is_in_hardware_when_the_kernel_says_so(
    kind: str, attribute: int, flags: int, is_in_hardware: bool
) -> None:
    options = wire.attribute(attribute, struct.pack("=I", flags))
    data = memoryview(
        wire.TCMSG.pack(0, 9, 1, 0xFFFFFFF3, 5 << 16)
        + wire.attribute(wire.TCA_KIND, kind.encode() + b"\0")
        + wire.attribute(wire.TCA_OPTIONS, options)
    )
    assert hardware_filter(data, 0, len(data)) == (HardwareFilter(9, kind, 5) if is_in_hardware else None)


def process(proc: Path, pid: int, *sockets: int, name: str = "haproxy", capabilities: str = "0000000000001400") -> Path:
    made = proc / str(pid)
    (made / "fd").mkdir(parents=True)
    for number, inode in enumerate(sockets):
        (made / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
    (made / "fd" / "9").symlink_to("/dev/null")
    (made / "comm").write_text(f"{name}\n")
    (made / "status").write_text(f"Name:\t{name}\nCapEff:\t{capabilities}\n")
    (made / "stat").write_text(f"{pid} ({name}) ) S " + " ".join(str(n) for n in range(1, 30)) + "\n")
    (made / "exe").symlink_to(f"/usr/sbin/{name}")
    return made


def test_a_socket_is_held_by_every_process_that_has_it_open(tmp_path: Path) -> None:
    process(tmp_path, 5, 100, 101)
    process(tmp_path, 6, 101, name="nginx", capabilities="0000000000000400")
    process(tmp_path, 7, 999)
    (tmp_path / "uptime").write_text("5000.25 1.0\n")
    found = read_holders([100, 101], tmp_path)
    assert {inode: [(p.pid, p.command, p.can_mark) for p in some] for inode, some in found.by_inode.items()} == {
        100: [(5, "haproxy", True)],
        101: [(5, "haproxy", True), (6, "nginx", False)],
    }
    assert str(found.by_inode[100][0]) == "haproxy (pid 5, /usr/sbin/haproxy)"
    assert found.by_inode[100][0].age_s == 4_999 + 1


def test_a_process_can_not_write_to_a_terminal_with_its_name(tmp_path: Path) -> None:
    process(tmp_path, 5, 100, name="x\x1b[2Jy")
    assert read_holders([100], tmp_path).by_inode[100][0].command == "x?[2Jy"


def test_a_process_that_ends_meanwhile_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    assert read_holders([100], tmp_path).by_inode == {}


SESSIONS = """\
0x7f251d517800: proto=tcpv4 src=203.0.113.7:52418 fe=edge be=acme_edge srv=tls ts=00 epoch=0 age=0s
0x7f251d517400: proto=unix_stream src=unix:1 fe=tls be=acme_http srv=s ts=00 epoch=0 age=0s
0x7f251d517000: proto=tcpv6 src=2001:db8::7:41044 fe=peer be=beta-2_peer srv=p ts=00 epoch=0 age=0s
0x7f251d517100: proto=tcpv6 src=::ffff:203.0.113.8:41045 fe=tls be=beta-2_grpc srv=p ts=00 epoch=0 age=0s
0x7f251d516c00: proto=tcpv4 src=203.0.113.9:1 fe=edge be=unknown-at-edge srv=<none> ts=00
0x7f251d516d00: proto=sockpair src=unix:1 fe=GLOBAL be=<NONE> srv=<none> ts=00
"""


def test_sessions_of_tenants_are_told_by_their_client() -> None:
    found = {f"{address} {port}": tenant for (address, port), tenant in parse_sessions(SESSIONS).items()}
    assert found == {
        "203.0.113.7 52418": "acme",
        "2001:db8::7 41044": "beta-2",
        "203.0.113.8 41045": "beta-2",
    }


def test_a_map_of_marks_that_is_none_is_unknown() -> None:
    assert parse_marks("acme 44498944\n") == {"acme": 44498944}
    with pytest.raises(StateUnknownError):
        parse_marks("acme 0x2a70000\n")
