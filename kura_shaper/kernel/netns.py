"""Network namespaces of a single thread, which vanish with it."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.errors import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def in_new_namespace(work: Callable[[], _T]) -> _T:
    """Return work() run in a network namespace of its own, which has only a loopback device.

    It runs in a thread: the namespace is that thread's alone, and gone with it even when
    the process is killed. Raises KernelRefusedError when the kernel grants none.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            unshare_network()
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="network-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def unshare_network() -> None:
    """Put the calling thread into a new network namespace. Raises KernelRefusedError when the kernel grants none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise refusal(ctypes.get_errno(), doing="making a network namespace")


def own_namespace() -> AbstractContextManager[None]:
    """Be in a new network namespace for the length of the block; threads and processes started in it are too.

    Raises KernelRefusedError when the kernel grants none.
    """
    return _away(unshare_network)


def inside(namespace: int) -> AbstractContextManager[None]:
    """Put the calling thread into the network namespace of a descriptor for the length of the block."""
    return _away(partial(_enter, namespace))


@contextmanager
def _away(go: Callable[[], None]) -> Iterator[None]:
    with closing(open_namespace()) as home:
        go()
        try:
            yield
        finally:
            _enter(home)


def open_namespace() -> int:
    """Return a descriptor of the calling thread's network namespace, which lives as long as that is open."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise refusal(ctypes.get_errno(), doing="entering a network namespace")
