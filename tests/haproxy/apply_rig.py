"""A gateway that runs beside the test: HAProxy with a master socket, small servers, and the command line on it.

No namespaces: each rig has a loopback address of its own, so rigs don't meet. HAProxy dies
with this process, and all that is written is below the test's directory, the sockets
excepted, whose paths must be short.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import trustme
from gateway_ends import serve_http1
from gateway_rig import haproxy_of

from kura_shaper.cli.main import run
from kura_shaper.errors import KuraShaperError
from kura_shaper.haproxy.master import MasterSocket, read_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kura_shaper.haproxy.binary import HaproxyBinary
    from kura_shaper.haproxy.master import Workers

HTTPS, PEER = 443, 7443
HTTP_PORTS = {"acme": 4001, "beta": 4002, "gamma": 4003}
ELSEWHERE = 4100
_CLASSES = {"acme": 0x2A7, "beta": 0x2A8, "gamma": 0x2A9}
_TURN = itertools.count()


def wait_until(is_so: Callable[[], Any], *, within_s: float = 20.0, what: str = "") -> Any:
    """Return the first true value of a question that is asked again and again."""
    deadline = time.monotonic() + within_s
    while not (answer := is_so()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or is_so}"
        time.sleep(0.01)
    return answer


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@dataclass(slots=True)
class ApplyRig:
    """One gateway: its document, its directories, the process, and the ways to ask it something."""

    directory: Path
    run_directory: Path
    address: str
    binary: HaproxyBinary
    authority: trustme.CA
    stack: ExitStack
    process: subprocess.Popen[bytes] | None = None
    options: list[str] = field(default_factory=list)
    common: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.directory / "gateway"

    @property
    def tenants(self) -> Path:
        return self.directory / "tenants.yaml"

    @property
    def current(self) -> str:
        return (self.out / "current").readlink().name

    @property
    def master(self) -> MasterSocket:
        return MasterSocket(self.run_directory / "master.sock")

    @property
    def workers(self) -> Workers:
        return read_workers(self.master)

    @property
    def pid(self) -> int:
        """Process id of the worker that takes new connections."""
        return self.workers.current.pid

    def tenant(self, name: str, **changes: Any) -> dict[str, Any]:
        backend = {"http": {"address": f"{self.address}:{HTTP_PORTS[name]}"}}
        made = {"name": name, "class": _CLASSES[name], "hosts": [f"{name}.kura.test"], "backends": backend}
        return made | changes

    def write(self, *tenants: dict[str, Any], **more: Any) -> None:
        """Put a document where the command reads it."""
        text = json.dumps({"apiVersion": "kura-shaper/v1", "kind": "Tenants", "region": "test", "tenants": tenants})
        entries = json.loads(text) | more
        temporary = self.directory / "tenants.new"
        temporary.write_text(json.dumps(entries, indent=1))
        temporary.replace(self.tenants)

    def certify(self, *names: str, joined: bool = False) -> str:
        """Put a fresh certificate where the gateway reads it; return its serial number, as a client sees it."""
        issued = self.authority.issue_cert(*(names or ("*.kura.test", "*.cache.test")))
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        key = issued.private_key_pem.bytes()
        path = self.certificate
        for file, content in ((path, chain + key if joined else chain), (path.with_suffix(".key"), key)):
            temporary = file.with_suffix(".new")
            temporary.write_bytes(content)
            temporary.replace(file)
        if joined:
            path.with_suffix(".key").unlink()
        return serial_of(chain)

    @property
    def certificate(self) -> Path:
        return self.directory / "tls.crt"

    def arguments(self, *more: str) -> list[str]:
        """Return a command line."""
        where = ["--tenants", str(self.tenants), "--out", str(self.out), "--run-dir", str(self.run_directory)]
        how = ["--user", "root", "--group", "root", "--bind", self.address, "--metrics", f"{self.address}:8405"]
        few = ["--nbthread", "2", "--maxconn", "200", "--certificate", str(self.certificate)]
        if "--certificate-dir" in self.options:
            few = few[:-2]
        return ["kura-shaper", *self.common, "render-haproxy", *where, *how, *few, *self.options, *more]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KURA_SHAPER_HAPROXY": str(self.binary.path)}

    def cli(self, *more: str) -> Ran:
        """Run the command here, in this process."""
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            mock.patch.dict(os.environ, self.environment),
            mock.patch.object(sys, "argv", self.arguments(*more)),
            mock.patch("signal.signal"),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                run()
            except SystemExit as ended:
                code = int(ended.code or 0)
        return Ran(code, out.getvalue(), err.getvalue())

    def apply(self, *more: str) -> Ran:
        """Bring the gateway in step, with no time between two reloads, and read the answer as JSON."""
        return self.cli("--apply", "--json", "--reload-interval-s", "0", *more)

    def applied(self, *more: str) -> dict[str, Any]:
        """Do that, and expect it to go well."""
        ran = self.apply(*more)
        assert ran.code == 0, ran
        return ran.json

    def spawn(self, *more: str, log: Path | None = None) -> subprocess.Popen[str]:
        """Run the command in a process of its own, which dies with this one; what it says goes to the log if any."""
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "kura_shaper", *self.arguments(*more)[1:]]
        with log.open("ab") if log else nullcontext(subprocess.PIPE) as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, text=True, env=self.environment)
        self.stack.callback(_end, process)
        return process

    def start(self) -> None:
        """Start HAProxy with what is in force, and wait until it answers."""
        config = str(self.out / "current" / "haproxy.cfg")
        command = [str(self.binary.path), "-W", "-S", str(self.run_directory / "master.sock"), "-f", config]
        with (self.directory / "haproxy.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.stack.callback(self.stop)
        wait_until(self.is_up, what="HAProxy to start")

    def is_up(self) -> bool:
        assert self.process
        assert self.process.poll() is None, self.log
        with suppress(OSError, KuraShaperError):
            socket.create_connection((self.address, 8405), timeout=1).close()
            # HAProxy 3.2 lists a worker for a moment before it can be asked.
            return "Version: " in self.master.ask("@1 show info")
        return False

    def stop(self) -> None:
        """Kill HAProxy with its workers, and wait until nobody listens."""
        if self.process is None:
            return
        pids = []
        with suppress(KuraShaperError):
            workers = self.workers
            pids = [worker.pid for worker in (workers.current, *workers.old)]
        self.process.kill()
        self.process.wait(timeout=10)
        self.process = None
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        (self.run_directory / "master.sock").unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return (self.directory / "haproxy.log").read_text()

    def connect(self, host: str, *, timeout_s: float = 5.0) -> ssl.SSLSocket:
        """Return a TLS connection that asks for the host; raises OSError when that is refused."""
        context = ssl.create_default_context(cafile=self.directory / "ca.pem")
        plain = socket.create_connection((self.address, HTTPS), timeout=timeout_s)
        try:
            return context.wrap_socket(plain, server_hostname=host)
        except OSError:
            plain.close()
            raise

    def get(self, host: str, path: str = "/who") -> str:
        """Return `STATUS FIRST-WORD-OF-BODY` of a request on a connection of its own, or "refused"."""
        try:
            with self.connect(host) as client:
                return request(client, host, path)
        except OSError:
            return "refused"

    def serial(self, host: str) -> str:
        """Return the serial number of the certificate that a client is shown."""
        with self.connect(host) as client:
            shown = client.getpeercert()
            assert shown
            return str(shown["serialNumber"]).lstrip("0")

    def listen(self, port: int, name: str) -> None:
        """Serve HTTP as somebody."""
        listener = socket.create_server((self.address, port), backlog=256)
        serve_http1(self.stack, listener, name)

    def loads(self) -> bool:
        """Tell whether HAProxy would start with what is in force."""
        command = [str(self.binary.path), "-c", "-f", str(self.out / "current" / "haproxy.cfg")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def request(client: ssl.SSLSocket, host: str, path: str = "/who") -> str:
    """Return `STATUS FIRST-WORD-OF-BODY`; the connection stays open."""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65_536)
        if not part:
            raise ConnectionResetError("no answer")
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for row in head.lower().split(b"\r\n"):
        if row.startswith(b"content-length:"):
            length = int(row.split(b":")[1])
    while len(body) < length:
        body += client.recv(65_536)
    words = body.decode().split()
    return f"{head.split()[1].decode()} {words[0] if words else ''}"


def serial_of(pem: bytes) -> str:
    from cryptography import x509

    return f"{x509.load_pem_x509_certificate(pem).serial_number:X}"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(timeout=10)
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


@contextmanager
def apply_rig(directory: Path, version: str, *, running: Sequence[str] = ("acme", "beta")) -> Iterator[ApplyRig]:
    """Yield a gateway that runs with some tenants, or with none that is only prepared."""
    binary = haproxy_of(version)
    # Of the process and the rig, so that none meets another.
    address = f"127.{os.getpid() // 256 % 250 + 1}.{os.getpid() % 256}.{next(_TURN) % 250 + 1}"
    with ExitStack() as stack:
        # A socket's path has at most 107 characters.
        run_directory = Path(tempfile.mkdtemp(prefix="ks-", dir="/tmp"))
        stack.callback(shutil.rmtree, run_directory, ignore_errors=True)
        rig = ApplyRig(directory, run_directory, address, binary, trustme.CA(), stack)
        rig.authority.cert_pem.write_to_path(directory / "ca.pem")
        rig.certify()
        for name, port in HTTP_PORTS.items():
            rig.listen(port, name)
        if running:
            rig.write(*(rig.tenant(name) for name in running))
            ran = rig.cli()
            assert ran.code == 0, ran
            rig.start()
        yield rig


class MasterProxy:
    """Stands before the real master, passes commands on, and does to chosen ones what a test says."""

    def __init__(self, rig: ApplyRig) -> None:
        self.path = rig.run_directory / "proxy.sock"
        self.asked: list[str] = []
        self.rules: list[tuple[str, str | Callable[[str], str]]] = []
        self._real = str(rig.run_directory / "master.sock")
        self._released = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()
        rig.stack.callback(self._close)

    def refuse(self, words: str, answer: str = "Sorry.\n") -> None:
        """Answer in the master's place."""
        self.rules.append((words, lambda _: answer))

    def cut(self, words: str) -> None:
        """End the connection without an answer."""
        self.rules.append((words, "cut"))

    def stall(self, words: str) -> None:
        """Never answer."""
        self.rules.append((words, "stall"))

    def lose_answer(self, words: str) -> None:
        """Pass the command on, and end the connection without its answer."""
        self.rules.append((words, "lose"))

    def _close(self) -> None:
        self._released.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            text = _read_all(connection)
            self.asked.append(text.decode())
            rule = next((rule for words, rule in self.rules if words in text.decode()), None)
            if callable(rule):
                connection.sendall(rule(text.decode()).encode())
            elif rule == "stall":
                self._released.wait(30)
            elif rule != "cut":
                with socket.socket(socket.AF_UNIX) as real:
                    real.connect(self._real)
                    real.sendall(text)
                    real.shutdown(socket.SHUT_WR)
                    answer = _read_all(real)
                if rule != "lose":
                    connection.sendall(answer)


def _read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))
