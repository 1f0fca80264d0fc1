"""What is seen of the agent's pods and of the device that they keep, and what a person would type."""

from __future__ import annotations

import os
import re
import socket
import struct
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifest_tools import DAEMONSET, ROOT, run, tool
from node_rig import ADDRESS, DEVICE, GATEWAY, NAME, Node, is_well, until

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.links import read_device
from kura_shaper.tree.model import Handle
from kura_shaper.tree.snapshot import Snapshot

if TYPE_CHECKING:
    from kura_shaper.units import Rate

AGENT = "daemonset/kura-shaper-us-east"


def pods(node: Node) -> list[dict[str, Any]]:
    """Return the agent's pods."""
    return node.pods("kura-shaper", "app.kubernetes.io/component=agent")


def the_one_pod(node: Node, *, other_than: str = "") -> str:
    """Return the name of the agent's pod once it is ready, and no other is left."""

    def only() -> str:
        found = pods(node)
        name: str = found[0]["metadata"]["name"] if len(found) == 1 and is_well(found[0]) else ""
        return "" if name == other_than else name

    def told() -> str:
        events = node.kubectl("--namespace=kura-shaper", "get", "events")
        return events + node.kubectl("--namespace=kura-shaper", "logs", AGENT, check=False)

    name: str = until(only, what=told)
    return name


def tree() -> Snapshot:
    """Return what is on the node's device, read from outside of every container."""
    with TcClient() as client:
        found = KernelTrafficControl(client, read_device(DEVICE), clock=SystemClock()).snapshot()
    assert isinstance(found, Snapshot), found
    return found


def ceiling(class_id: int) -> Rate | None:
    spec = tree().classes.get(Handle(0x20, class_id))
    return spec.ceil if spec else None


def asked(path: str) -> str:
    """Return a page of the agent, which listens on the node's own address."""
    with urllib.request.urlopen(f"http://{ADDRESS}:9469{path}", timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def metric(name: str) -> float:
    (value,) = re.findall(rf"^kura_shaper_{name}(?:{{[^}}]*}})? (\S+)$", asked("/metrics"), re.MULTILINE)
    return float(value)


def shown(words: str, page: Path = DAEMONSET / "README.md") -> str:
    """Return the command of a page that has these words, for this node and its agent."""
    blocks = re.findall(r"```console\n(.+?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    (command,) = (line for line in lines if words in line)
    return str(command).replace("NODE", NAME).replace("DEVICE", DEVICE).replace(" POD ", f" {AGENT} ")


def typed(node: Node, command: str, where: Path = ROOT) -> str:
    """Return what a command says that somebody types in the tree, or elsewhere."""
    path = f"{Path(tool('kubectl')).parent}:{os.environ['PATH']}"
    environment = (f"PATH={path}", f"KUBECONFIG={node.cluster.admin_kubeconfig}")
    said: str = run("env", *environment, "sh", "-c", f"cd {where}\n{command}").stdout
    return said


def send(class_id: int, *, count: int = 20) -> None:
    """Have a tenant's bytes leave by the device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", class_id << 16))
        for _ in range(count):
            made.sendto(bytes(1000), (GATEWAY, 9))


def metric_or_none(name: str) -> float | None:
    """Return a metric; None while no agent answers."""
    with suppress(OSError):
        return metric(name)
    return None
