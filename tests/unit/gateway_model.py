"""A gateway as a value: answers the commands that are asked of HAProxy's master, in the words of 3.0, and changes.

What it has is in the open, so a test looks at it between any two commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kura_shaper.haproxy.certificates import fingerprint
from kura_shaper.haproxy.decide import config_id
from kura_shaper.haproxy.generation import CONFIG_FILE, GatewayConfig
from kura_shaper.haproxy.maps import CRT_LIST
from kura_shaper.haproxy.master import NotRunningError
from kura_shaper.haproxy.options import GatewayOptions
from kura_shaper.haproxy.running import MAPS
from kura_shaper.tenants.document import Backends, Endpoint, Tenant, TenantsDocument
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIONS = GatewayOptions((3, 0, 11), directory=PurePosixPath("/g/current"), certificate=PurePosixPath("/c/tls.crt"))
HEAD = (
    "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
    "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state "
    "bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr "
    "srv_agent_addr srv_agent_port\n"
)
_ID = re.compile(r"^\S+ \S+ (\S+ \S+) (\S+) ")
_SERVER = re.compile(r"    server (\S+) (?:unix@\S+|\[?([0-9a-f.:]+?)\]?:(\d+))( .*)?$")


def tenant(name: str, class_id: int = 0x100, **changes: Any) -> Tenant:
    slot = class_id - 0x100
    backends = Backends(Endpoint("10.0.0.1", 4000 + slot), Endpoint("10.0.0.1", 5000 + slot), None)
    made = Tenant(name, class_id, Rate(0), Rate.parse("1G"), (f"{name}.kura.test",), (), (), backends)
    return replace(made, **changes)


ACME, BETA = tenant("acme"), tenant("beta", 0x101)


def document(*tenants: Tenant, **changes: Any) -> TenantsDocument:
    return replace(TenantsDocument("test", tenants), **changes)


@dataclass
class FakeServer:
    address: str
    port: int
    check_port: int
    fqdn: str = "-"


@dataclass
class FakeGateway:
    """`files` gives what a reload reads; `is_running` says whether anybody listens."""

    options: GatewayOptions = OPTIONS
    files: Callable[[], GatewayConfig] | None = None
    is_running: bool = True
    pid: int = 100
    age_s: int = 1000
    old: int = 0
    description: str = ""
    maps: dict[str, list[str]] = field(default_factory=dict)
    rows: list[tuple[str, str, int]] = field(default_factory=list)
    servers: dict[str, FakeServer] = field(default_factory=dict)
    certificates: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    refuses: str = "nothing is refused"
    refusal: str = "Sorry.\n"
    after_each: Callable[[], None] = lambda: None
    _prepared: dict[str, list[str]] = field(default_factory=dict)
    _certificate: dict[str, str] = field(default_factory=dict)
    _line: int = 0

    def load(self, config: GatewayConfig) -> None:
        """Become what starts with a configuration."""
        text = config.text(CONFIG_FILE)
        self.description = f"kura-shaper-{config_id(config)}"
        used = [name for name in MAPS if self.options.file(name) in text]
        self.maps = {self.options.file(name): config.text(name).splitlines() for name in used}
        listed = [row.split(" ") for row in config.text(CRT_LIST).splitlines()]
        self.rows = [(certificate, host, line) for line, (certificate, host) in enumerate(listed, 1)]
        self._line = len(self.rows)
        self.servers, section = {}, ""
        for row in text.splitlines():
            if not row.startswith(" "):
                section = row.split(" ")[1] if row.startswith("backend ") else ""
            elif section and (match := _SERVER.match(row)):
                check = re.search(r" port (\d+)", match[4] or "")
                server = FakeServer(match[2] or "-", int(match[3] or 0), int(check[1]) if check else 0)
                self.servers[f"{section}/{match[1]}"] = server

    def ask(self, command: str, payload: str = "", *, timeout_s: float = 1.0) -> str:
        """Answer as the master does."""
        if not self.is_running:
            raise NotRunningError("nobody is there")
        self.asked.append(command)
        if command.removeprefix("@1 ").startswith(self.refuses):
            return self.refusal
        words = command.split(" ")
        verb = " ".join(word for word in words[:4] if word.isalpha() or "-" in word)
        answer = getattr(self, f"_{re.sub('[^a-z]', '_', verb.split(' /')[0])}")(words, payload)
        self.after_each()
        return f"{answer}\n"

    def _show_proc(self, words: list[str], payload: str) -> str:
        old = "".join(f"{self.pid - n - 1} worker 1 0d00h10m00s 3.0.11\n" for n in range(self.old))
        days, hours, minutes, seconds = (
            self.age_s // 86400,
            self.age_s // 3600 % 24,
            self.age_s // 60 % 60,
            self.age_s % 60,
        )
        age = f"{days}d{hours:02}h{minutes:02}m{seconds:02}s"
        head = "#<PID>          <type>          <reloads>       <uptime>        <version>\n"
        head += f"99              master          0 [failed: 0]   {age}     3.0.11\n# workers\n"
        return f"{head}{self.pid} worker 0 {age} 3.0.11\n" + (f"# old workers\n{old}" if old else "") + "# programs\n\n"

    def _show_info(self, words: list[str], payload: str) -> str:
        return f"Name: HAProxy\nVersion: 3.0.11-1+deb13u5\ndescription: {self.description}\n"

    def _show_servers_state(self, words: list[str], payload: str) -> str:
        rows = [
            f"9 {name.replace('/', ' 1 ')} {s.address} 2 0 1 1 0 15 3 2 6 0 0 0 {s.fqdn} {s.port}"
            f" - 0 {s.check_port} - - 0"
            for name, s in self.servers.items()
        ]
        return HEAD + "\n".join(rows) + "\n"

    def _show_map(self, words: list[str], payload: str) -> str:
        if words[-1] not in self.maps:
            return "Unknown map identifier. Please use #<id> or <file>.\n"
        return "".join(f"0x7f {row}\n" for row in self.maps[words[-1]])

    def _prepare_map(self, words: list[str], payload: str) -> str:
        self._prepared[words[-1]] = []
        return "New version created: 7\n"

    def _add_map(self, words: list[str], payload: str) -> str:
        self._prepared[words[-1]] += payload.splitlines()
        return ""

    def _commit_map(self, words: list[str], payload: str) -> str:
        self.maps[words[-1]] = self._prepared.pop(words[-1])
        return ""

    def _show_ssl_crt_list(self, words: list[str], payload: str) -> str:
        return f"# {words[-1]}\n" + "".join(f"{path}:{line} {host}\n" for path, host, line in self.rows)

    def _add_ssl_crt_list(self, words: list[str], payload: str) -> str:
        certificate, host = payload.split()
        self._line += 1
        self.rows.append((certificate, host, self._line))
        return "Inserting certificate.\nSuccess!\n"

    def _del_ssl_crt_list(self, words: list[str], payload: str) -> str:
        kept = [row for row in self.rows if f"{row[0]}:{row[2]}" != words[-1]]
        assert len(kept) == len(self.rows) - 1
        self.rows = kept
        return "Entry deleted in crtlist\n"

    def _show_ssl_cert(self, words: list[str], payload: str) -> str:
        found = self.certificates.get(words[-1])
        return f"SHA1 FingerPrint: {found}\n" if found else "Can't display the certificate: Not found!\n"

    def _set_ssl_cert(self, words: list[str], payload: str) -> str:
        self._certificate[words[-1]] = fingerprint(payload)
        return "Transaction created for certificate\n"

    def _commit_ssl_cert(self, words: list[str], payload: str) -> str:
        self.certificates[words[-1]] = self._certificate.pop(words[-1])
        return "Committing.\nSuccess!\n"

    def _abort_ssl_cert(self, words: list[str], payload: str) -> str:
        self._certificate.clear()
        return "Transaction aborted\n"

    def _set_server(self, words: list[str], payload: str) -> str:
        server = self.servers.get(words[3])
        if server is None:
            return "No such server.\n"
        if words[4] == "check-port":
            server.check_port = int(words[5])
        else:
            server.address, server.port = words[5], int(words[7])
        return "changed\n"

    def _set_server_check_port(self, words: list[str], payload: str) -> str:
        return self._set_server(words, payload)

    def _reload(self, words: list[str], payload: str) -> str:
        assert self.files
        self.load(self.files())
        self.pid, self.age_s = self.pid + 1, 0
        return "Success=1\n--\n[NOTICE] (99) : Loading success.\n"
