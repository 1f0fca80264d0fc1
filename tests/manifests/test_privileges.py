"""The agent with exactly the capabilities that the manifests grant, in a filesystem as a container has it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent_rig import DEVICE, ask, with_agent
from manifest_tools import DAEMONSET, containers, kustomized, manifests, the

from kura_shaper.kernel import bpf
from kura_shaper.tree.ebpf import EbpfProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.case("F-75")]

_PATIENCE_S = 20
# As a container with the host's network has it: only /tmp can be written to (the state is there in this test), sysfs is
# of that network, a bpffs is there.
MOUNTS = """
set -e
mount --make-rprivate /
mount --bind /tmp /tmp
mount -o remount,bind,ro /
mount -t sysfs none /sys
mount -o remount,bind,ro /sys
mount -t bpf -o mode=700 none /sys/fs/bpf
exec "$@"
"""


def granted() -> list[str]:
    """Return the capabilities of the base."""
    (container,) = containers(the(manifests(kustomized("base")), "DaemonSet"))
    found: list[str] = container["securityContext"]["capabilities"]["add"]
    return found


def granted_for_mq() -> list[str]:
    component = (DAEMONSET / "components" / "mq" / "kustomization.yaml").read_text()
    return [*granted(), *re.findall(r"add/-, value: (\w+)}", component)]


def confined_to(capabilities: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs another with these capabilities and no way to more."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv; it is in util-linux")
    allowed = ",".join(("-all", *(f"+{name.lower()}" for name in capabilities)))
    setpriv = ("setpriv", f"--bounding-set={allowed}", "--inh-caps=-all", "--no-new-privs")
    return ("unshare", "--mount", "sh", "-c", MOUNTS, "sh", *setpriv)


def looked_at() -> dict[str, Any]:
    """Return what the agent says of its device after a look."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        _, body = ask("/statusz")
        device: dict[str, Any] = json.loads(body or "{}").get("devices", {}).get(DEVICE, {})
        if device.get("verdict"):
            return device
        assert time.monotonic() < end, body
        time.sleep(0.1)


def present() -> bool:
    return f'kura_shaper_config_present{{device="{DEVICE}"}} 1.0' in ask("/metrics")[1]


@pytest.mark.parametrize("capabilities", [["NET_ADMIN"], "granted"], ids=["NET_ADMIN alone", "granted"])
def test_shape_single_works_and_retransmits_are_counted_in_the_best_way(capabilities: list[str] | str) -> None:
    def told() -> tuple[Any, bool, str]:
        return looked_at(), present(), json.loads(ask("/statusz")[1])["retransmits"]

    confined = confined_to(granted() if capabilities == "granted" else capabilities)
    found, is_there, way = with_agent(told, options=("--shape", "single"), as_whom=confined)
    assert found["shape"] == "single"
    assert is_there
    # With BTF the kernel tells where a socket keeps its mark; the program that counts needs the other two.
    in_kernel = capabilities == "granted" and Path("/sys/kernel/btf/vmlinux").exists()
    assert (way == "tracepoint") is in_kernel


def test_a_steered_tree_works_with_what_mq_grants() -> None:
    found = with_agent(looked_at, options=("--shape", "auto"), as_whom=confined_to(granted_for_mq()))
    if found["shape"] != "mq":
        pytest.skip(f"this kernel can't steer: {found['why_shape']}")
    assert found["steering"]["is_proven"]


def test_without_net_raw_no_steering_is_proven() -> None:
    without = [name for name in granted_for_mq() if name != "NET_RAW"]
    found = with_agent(looked_at, options=("--shape", "auto"), as_whom=confined_to(without))
    assert found["shape"] == "single"


@dataclass(frozen=True, slots=True)
class _Foreign(EbpfProgram):
    """Somebody else's program, which ends the chain: TCX_PASS."""

    instructions: tuple[tuple[int, int, int, int, int], ...] = ((0xB7, 0, 0, 0, 0), (0x95, 0, 0, 0, 0))

    @property
    def name(self) -> str:
        return "cil_to_netdev"


def test_beside_a_cnis_tcx_program_a_steered_tree_works_with_what_mq_grants() -> None:
    """SYS_ADMIN is there for this: the kernel tells nobody else whose programs are on a device."""

    def attach() -> None:
        if not bpf.attached(socket.if_nametoindex(DEVICE)).supported:
            pytest.skip("this kernel lacks tcx")
        program = bpf.load_steering(_Foreign())
        attached.append(bpf.attach_first(program, socket.if_nametoindex(DEVICE)))
        os.close(program)

    attached: list[int] = []
    try:
        found = with_agent(
            looked_at, options=("--shape", "auto"), as_whom=confined_to(granted_for_mq()), before=(attach,)
        )
    finally:
        for link in attached:
            os.close(link)
    assert (found["shape"], found["steering"]["is_proven"]) == ("mq", True)


def test_the_agent_needs_no_file_that_the_image_does_not_let_it_write() -> None:
    """Its root is read-only there: everything that it writes is below what is mounted."""
    (container,) = containers(the(manifests(kustomized("base")), "DaemonSet"))
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/var/lib/kura-shaper", "/sys/fs/bpf", "/tmp"}
