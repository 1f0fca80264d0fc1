"""Both ends of gRPC by the library that everybody uses. Each end is a process of its own in the gateway's network.

A process, since the library's threads stay in the network where the first of them was
made; and the test process, which forks, has none of them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kura_shaper.lab.isolation import inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gateway_rig import Namespace

SERVICE = "google.bytestream.ByteStream"
PIECE = bytes(65_536)
_ANSWER_S = 30.0
_PR_SET_PDEATHSIG = 1
# What one process keeps between calls.
_kept: dict[str, Any] = {}


class End:
    """A process that does one thing after the other."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def start(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin something and return what its result will be in."""
        return self._pool.submit(work, *arguments)

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do something and return its result."""
        return self.start(work, *arguments).result(_ANSWER_S)


@contextmanager
def end_in(namespace: Namespace) -> Iterator[End]:
    """Yield a process in a network; it ends with the block, or with this process."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_die_with_parent)
    with inside(namespace.network):
        pid = pool.submit(os.getpid).result(_ANSWER_S)
    try:
        yield End(pool)
    finally:
        # Killed, since a call that never ends would keep it.
        os.kill(pid, signal.SIGKILL)
        pool.shutdown(cancel_futures=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# The server's end.


@dataclass
class Seen:
    """What a server saw of its calls."""

    at_once: int = 0
    most_at_once: int = 0
    cancelled: int = 0
    peers: frozenset[str] = frozenset()


def start_server(port: int) -> None:
    """Serve the bytes and what the errors of a cache look like."""
    import grpc

    handlers = {
        "Read": grpc.unary_stream_rpc_method_handler(_read),
        "Write": grpc.stream_unary_rpc_method_handler(lambda parts, _: str(sum(map(len, parts))).encode()),
        "Wait": grpc.unary_unary_rpc_method_handler(_wait),
        "Fail": grpc.unary_unary_rpc_method_handler(_fail),
    }
    server = grpc.server(ThreadPoolExecutor(128), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    _kept.update(server=server, seen=Seen(), lock=threading.Lock())


def stop_server() -> None:
    """End at once, and every call with it."""
    if "server" in _kept:
        _kept.pop("server").stop(0).wait(5)


def seen() -> Seen:
    """Return what the server saw so far."""
    found = _kept["seen"]
    assert isinstance(found, Seen)
    return found


def _read(request: bytes, context: Any) -> Iterator[bytes]:
    """Send as many bytes as the request says; without end for -1."""
    left = int(request)
    if left < 0:
        # Such a call never ends by itself; an ended one gets no further than its next piece.
        context.add_callback(_note_end)
    while left:
        piece = PIECE if left < 0 else PIECE[:left]
        left -= 0 if left < 0 else len(piece)
        yield piece


def _note_end() -> None:
    _kept["seen"].cancelled += 1


def _wait(request: bytes, context: Any) -> bytes:
    """Answer after so many milliseconds."""
    found: Seen = _kept["seen"]
    with _kept["lock"]:
        found.at_once += 1
        found.most_at_once = max(found.most_at_once, found.at_once)
        found.peers |= {context.peer()}
    time.sleep(int(request) / 1_000)
    with _kept["lock"]:
        found.at_once -= 1
    return b"waited"


def _fail(request: bytes, context: Any) -> bytes:
    import grpc

    context.set_trailing_metadata((("x-why", "a trailer"),))
    context.abort(getattr(grpc.StatusCode, request.decode()), f"no such blob: {request.decode()} \u20ac")
    raise AssertionError("abort returns")


# The client's end.


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: str
    details: str
    trailers: dict[str, str]
    bytes_read: int
    seconds: float


def open_channel(ca_file: Path, name: str, authority: str) -> None:
    """Take a channel to the gateway that asks for a name, and says another in its requests if told so."""
    import grpc

    credentials = grpc.ssl_channel_credentials(ca_file.read_bytes())
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_http_proxy", 0)]
    options += [("grpc.default_authority", authority), ("grpc.max_receive_message_length", -1)]
    options += [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]
    if "channel" in _kept:
        _kept["channel"].close()
    # Each channel has a connection of its own.
    options += [("grpc.use_local_subchannel_pool", 1)]
    _kept["channel"] = grpc.secure_channel("127.0.0.1:443", credentials, options=options)


def call(method: str, request: str, timeout: float = 10.0) -> Ended:
    """Make a call with one answer."""
    return _ended(_kept["channel"].unary_unary(_path(method)).with_call, request.encode(), timeout)


def calls(method: str, request: str, count: int) -> list[str]:
    """Make so many calls at the same time over the one channel and return how they ended."""
    method_call = _kept["channel"].unary_unary(_path(method))
    made = [method_call.future(request.encode(), timeout=20) for _ in range(count)]
    return [each.code().name for each in made]


def write(total: int, timeout: float = 20.0) -> Ended:
    """Upload so many bytes."""
    parts = (PIECE for _ in range(total // len(PIECE)))
    return _ended(_kept["channel"].stream_unary(_path("Write")).with_call, parts, timeout)


def read(size: int, timeout: float = 20.0) -> Ended:
    """Download so many bytes."""
    import grpc

    started, count = time.monotonic(), 0
    stream = _kept["channel"].unary_stream(_path("Read"))(str(size).encode(), timeout=timeout)
    try:
        for piece in stream:
            count += len(piece)
    except grpc.RpcError:
        pass
    trailers = {key: str(value) for key, value in stream.trailing_metadata()}
    return Ended(stream.code().name, stream.details(), trailers, count, time.monotonic() - started)


def read_and_cancel(least: int) -> str:
    """Download without end, and cancel after so many bytes."""
    import grpc

    count = 0
    stream = _kept["channel"].unary_stream(_path("Read"))(b"-1", timeout=20)
    try:
        for piece in stream:
            count += len(piece)
            if count >= least:
                stream.cancel()
    except grpc.RpcError:
        pass
    return str(stream.code().name)


def both_ways(size: int, streams: int, timeout: float) -> set[str]:
    """Upload and download at the same time over the one channel; return how the calls ended."""
    with ThreadPoolExecutor(2 * streams) as threads:
        made = [threads.submit(work, size, timeout) for work in (read, write) for _ in range(streams)]
        return {each.result().code for each in made}


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"


def _ended(method: Callable[..., Any], request: Any, timeout: float) -> Ended:
    import grpc

    started = time.monotonic()
    made: Any
    try:
        answer, made = method(request, timeout=timeout)
        details = answer.decode()
    except grpc.RpcError as error:
        made = error
        details = made.details()
    trailers = {key: str(value) for key, value in made.trailing_metadata() or ()}
    return Ended(made.code().name, details, trailers, 0, time.monotonic() - started)
