"""An agent at work on `nic0`: in a thread of the test or as the command in a process, with traffic beside it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any

from kernel_traffic import WORLD, listener, set_mark
from kernel_trees import DOCUMENT

from kura_shaper.agent.events import FileEvents
from kura_shaper.agent.loop import Agent
from kura_shaper.agent.settings import AgentSettings
from kura_shaper.agent.source import FileSource
from kura_shaper.clock import SystemClock
from kura_shaper.tree.build import ShapeChoice
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Network

    from kura_shaper.agent.keeper import DeviceKeeper, Looked
    from kura_shaper.tree.build import Capabilities

PORT = 9469


def until(holds: Callable[[], object], *, within_s: float = 10.0, what: str = "") -> float:
    """Wait until something holds and return how long that took, in seconds."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s} s: {what or holds}")
        time.sleep(0.002)
    return time.monotonic() - began


@dataclass(slots=True)
class Files:
    """What an agent of a test reads and keeps."""

    directory: Path

    @property
    def tenants(self) -> Path:
        return self.directory / "tenants.yaml"

    @property
    def marker(self) -> Path:
        return self.directory / "state" / "disabled"

    def write(self, text: str = DOCUMENT) -> None:
        """Put a document in place, whole."""
        beside = self.directory / ".new"
        beside.write_text(text)
        beside.replace(self.tenants)

    def settings(self, **changes: Any) -> AgentSettings:
        """Return settings for `nic0` with this document."""
        defaults: dict[str, Any] = {
            "file": self.tenants,
            "devices": ("nic0",),
            "budget": Rate(10**10),
            "shape": ShapeChoice.SINGLE,
            "state_dir": self.directory / "state",
            "node_file": self.marker,
        }
        return AgentSettings(**{**defaults, **changes})


class AgentThread:
    """An agent in a thread of the test, in the test's network namespace."""

    def __init__(self, files: Files, capabilities: Capabilities, **changes: Any) -> None:
        clock = SystemClock()
        settings = files.settings(**changes)
        assert settings.file is not None
        source = FileSource(settings.file, None, clock=clock)
        self._files = FileEvents((*source.paths, settings.node_file))
        self.agent = Agent(settings, source, capabilities, clock=clock, files=self._files)
        self._thread = threading.Thread(target=self.agent.run, name="agent")

    def __enter__(self) -> AgentThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.stop()
        self._thread.join(30)
        self._files.close()
        assert not self._thread.is_alive()

    def looked(self, name: str = "nic0") -> Looked | None:
        """Return what the last look at a device came to."""
        device = self.agent.view.devices.get(name)
        return device.looked if device else None

    def keeper(self, name: str = "nic0") -> DeviceKeeper:
        """Return what keeps a device now."""
        return self.agent.view.devices[name].keeper

    def settle(self) -> int:
        """Wait until a look that began after this call has found all well; return how many there were until then."""
        before = self.agent.view.looks
        self.agent.wake("test")
        # The one that is under way may have read before this call.
        until(lambda: self.agent.view.looks >= before + 2 or self._is_quiet(before + 1), what="looks")
        until(lambda: all(self._is_well(name) for name in self.agent.view.devices), what=str(self.looked()))
        return self.agent.view.looks

    def _is_quiet(self, looks: int) -> bool:
        return self.agent.view.looks >= looks and self.agent.view.look_began_ns == 0

    def _is_well(self, name: str) -> bool:
        looked = self.looked(name)
        return looked is not None and looked.verdict.is_well


class AgentProcess:
    """The command, in a process of its own. Every way of ending it is the test's choice."""

    def __init__(self, files: Files, *options: str, shape: str = "single", budget: str = "10G") -> None:
        self.log = files.directory / "agent.log"
        state = files.directory / "state"
        argv = [sys.executable, "-m", "kura_shaper", "agent", "--file", str(files.tenants), "--devices", "nic0"]
        argv += ["--budget", budget, "--shape", shape, "--state-dir", str(state), "--node-file", str(files.marker)]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("KURA_SHAPER_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*argv, *options], stdout=log, stderr=log, env=environ)

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(10)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end and return its status."""
        self._process.send_signal(number)
        return self._process.wait(20)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, path: str, *, timeout_s: float = 10.0) -> tuple[int, str]:
        """Return the status and the body of one of its pages; 0 while it does not answer."""
        connection = HTTPConnection("127.0.0.1", PORT, timeout=timeout_s)
        with suppress(OSError, HTTPException):
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            return answer.status, body
        connection.close()
        return 0, ""

    def ready(self, *, within_s: float = 20.0) -> None:
        """Wait until it says that the device is kept."""
        until(lambda: self.ask("/readyz")[0] == 200 or not self.is_running, within_s=within_s, what="/readyz")
        assert self.is_running, self.log.read_text()

    def status(self) -> dict[str, Any]:
        """Return the status page."""
        found: dict[str, Any] = json.loads(self.ask("/statusz")[1])
        return found

    def metric(self, name: str, **labels: str) -> float | None:
        """Return one sample of a scrape."""
        parts = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.ask("/metrics")[1].splitlines():
            if line.startswith((f"kura_shaper_{name} ", f"kura_shaper_{name}{{")) and all(p in line for p in parts):
                return float(line.rpartition(" ")[2])
        return None


@dataclass(slots=True)
class Stream:
    """A tenant's connection that sends a little all the time."""

    sender: socket.socket
    receiver: socket.socket
    received_bytes: int = 0
    last_ns: int = 0
    stall_ns: int = 0
    error: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def send(self) -> None:
        data = bytes(2048)
        try:
            while not self._stop.wait(0.004):
                self.sender.sendall(data)
        except OSError as error:
            self.error = self.error or f"sending: {error}"

    def receive(self) -> None:
        self.last_ns = time.monotonic_ns()
        try:
            while part := self.receiver.recv(65_536):
                now_ns = time.monotonic_ns()
                self.stall_ns = max(self.stall_ns, now_ns - self.last_ns)
                self.last_ns = now_ns
                self.received_bytes += len(part)
        except OSError as error:
            if not self._stop.is_set():
                self.error = self.error or f"receiving: {error}"

    def stop(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self.sender.shutdown(socket.SHUT_RDWR)

    def assert_goes_on(self, *, within_s: float = 5.0) -> None:
        """What is sent from now on arrives, over the same connection."""
        before = self.received_bytes
        until(lambda: self.received_bytes > before + 8192 or self.error, within_s=within_s, what="the stream goes on")
        assert self.error == ""


@contextmanager
def streaming(network: Network, *marks: int) -> Iterator[list[Stream]]:
    """Have a connection of each of these marks send through `nic0` until the end of the block."""
    with ExitStack() as stack:
        streams: list[Stream] = []
        for mark in marks:
            with network.in_world():
                accepting = stack.enter_context(listener(socket.AF_INET, WORLD[socket.AF_INET]))
            sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            set_mark(sender, mark)
            sender.connect(accepting.getsockname())
            receiver = stack.enter_context(accepting.accept()[0])
            receiver.settimeout(None)
            stream = Stream(sender, receiver)
            threads = [threading.Thread(target=work, daemon=True) for work in (stream.send, stream.receive)]
            for thread in threads:
                thread.start()
                stack.callback(thread.join, 5)
            stack.callback(stream.stop)
            streams.append(stream)
        for stream in streams:
            stream.assert_goes_on()
        yield streams
        assert [stream.error for stream in streams] == [""] * len(streams)
