"""A name server of one name, as small as can be, and pods that it names."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from gateway_ends import QuietServer

from kura_shaper.tenants.document import Endpoint

if TYPE_CHECKING:
    from collections.abc import Collection

    from gateway_rig import Namespace

NAME = "pods.kura.test"
SERVER = Endpoint("127.0.0.53", 53)
POD_PORT = 4100
_HEADER = struct.Struct("!HHHHHH")
_A, _IN, _TTL_S = 1, 1, 1
_ANSWER, _NAME_ERROR = 0x8180, 0x8183


class Names:
    """The name server. `addresses` are what the name has; without any it does not exist."""

    def __init__(self, stack: ExitStack, namespace: Namespace) -> None:
        self.addresses: Collection[str] = ()
        self._socket = namespace.new_socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((SERVER.host, SERVER.port))
        self._socket.settimeout(0.2)
        self._ended = threading.Event()
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        stack.callback(self._socket.close)
        stack.callback(thread.join, 5)
        stack.callback(self._ended.set)

    def _serve(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                query, client = self._socket.recvfrom(4096)
                self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        """Repeat the question and answer it: with addresses, with none of that kind, or with "no such name"."""
        end = query.index(b"\0", _HEADER.size) + 5
        question = query[_HEADER.size : end]
        (kind,) = struct.unpack("!H", question[-4:-2])
        addresses = list(self.addresses) if kind == _A else []
        flags = _ANSWER if self.addresses else _NAME_ERROR
        header = _HEADER.pack(int.from_bytes(query[:2]), flags, 1, len(addresses), 0, 0)
        # 0xc00c points to the name in the question.
        record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _TTL_S, 4)
        return header + question + b"".join(record + socket.inet_aton(address) for address in addresses)


class Pod:
    """An HTTP server that says its address, and is ready or not."""

    def __init__(self, stack: ExitStack, namespace: Namespace, address: str) -> None:
        self.is_ready = True
        pod = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = address.encode()
                self.send_response(200 if self.path != "/ready" or pod.is_ready else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        server = QuietServer(("", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = namespace.listen(Endpoint(address, POD_PORT))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
