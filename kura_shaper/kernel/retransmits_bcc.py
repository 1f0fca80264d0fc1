# SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
"""TCP retransmits per tenant by a program that bcc compiles on the node.

It does what `retransmits_bpf` does without a compiler, and is for kernels that tell nothing of
themselves (no BTF): then the kernel's headers say where a socket keeps its mark. Headers of another
kernel would compile as well and count by a wrong place, so only the running kernel's are taken.
Where there is BTF it says the places, and any headers that bcc finds will do.

bcc is a package of the distribution (Debian: python3-bpfcc) and never required. It brings LLVM into
the process, about 100 MB that stay. The program needs no tracefs; once it runs nothing of bcc is used any more.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kura_shaper.errors import RefusedError
from kura_shaper.kernel.btf import read_btf
from kura_shaper.kernel.errors import UnsupportedError
from kura_shaper.kernel.retransmits_bpf import (
    NEEDED,
    TRACEPOINT,
    ClassCounts,
    MappedRetransmits,
    check_privilege,
    kernel_layout,
    network_number,
)

if TYPE_CHECKING:
    from kura_shaper.kernel.retransmits_bpf import KernelLayout
    from kura_shaper.tenants.marks import MarkLayout

_HEADERS_VARIABLE = "BCC_KERNEL_SOURCE"
_MODULES = Path("/lib/modules")
_PACKED_HEADERS = Path("/sys/kernel/kheaders.tar.xz")
_RELEASE = re.compile(r'#define UTS_RELEASE "(.+)"')
_EVENT = re.compile(rf"EVENT\w*\((?:\w+,\s*)?{TRACEPOINT}\b.*?TP_PROTO\((.*?)\)", re.DOTALL)

_PLACES_BY_HEADERS = """
#include <net/tcp.h>
#include <net/net_namespace.h>
#define KS_MARK offsetof(struct sock, sk_mark)
#define KS_NETWORK offsetof(struct sock, __sk_common.skc_net)
#define KS_NETWORK_NUMBER offsetof(struct net, ns.inum)
#define KS_SEGMENTS (offsetof(struct sk_buff, cb) + offsetof(struct tcp_skb_cb, tcp_gso_segs))
"""
_PROGRAM = """
BPF_F_TABLE("array", u32, u64, counts, KS_CLASS_IDS, BPF_F_MMAPABLE);

RAW_TRACEPOINT_PROBE(tcp_retransmit_skb) {
    const char *socket = (const char *)ctx->args[0], *packet = (const char *)ctx->args[1], *network = 0;
    u32 number = 0, mark = 0;
    u16 segments = 0;
    if (KS_TELLS_FAILURE && (int)ctx->args[KS_TELLS_FAILURE ? 2 : 0])
        return 0;
    if (bpf_probe_read_kernel(&network, sizeof network, socket + KS_NETWORK) ||
        bpf_probe_read_kernel(&number, sizeof number, network + KS_NETWORK_NUMBER) || number != KS_THIS_NETWORK ||
        bpf_probe_read_kernel(&segments, sizeof segments, packet + KS_SEGMENTS) ||
        bpf_probe_read_kernel(&mark, sizeof mark, socket + KS_MARK))
        return 0;
    u32 class_id = (mark & KS_MASK) >> KS_SHIFT;
    u64 *count = counts.lookup(&class_id);
    if (count)
        __sync_fetch_and_add(count, segments);
    return 0;
}
"""


class BccRetransmits(MappedRetransmits):
    """Retransmits by class id of the thread's network namespace since this was opened."""

    def __init__(self, marks: MarkLayout) -> None:
        """Raises RefusedError when bcc is not there or can't do it."""
        headers = _check_what_is_needed()
        bcc = _import_bcc()
        try:
            places = _places_by_btf(kernel_layout(read_btf()))
        except UnsupportedError:
            places = _places_by_headers(headers)
        class_ids = (marks.mask >> marks.shift) + 1
        numbers = {"CLASS_IDS": class_ids, "MASK": marks.mask, "SHIFT": marks.shift, "THIS_NETWORK": network_number()}
        program = _compile(bcc, places + _defines(numbers) + _PROGRAM)
        try:
            counts = ClassCounts(program[b"counts"].map_fd, class_ids)
            # What bcc opened it closes; a second descriptor keeps the program attached.
            (attached,) = program.raw_tracepoint_fds.values()
            super().__init__(counts, os.dup(attached))
        finally:
            program.cleanup()


def _check_what_is_needed() -> Path | None:
    """Return where the headers are; raise what is known to be in the way before LLVM is brought in."""
    if find_spec("bcc") is None:
        raise _not_installed("no such module")
    headers = _headers()
    check_privilege()
    return headers


def _import_bcc() -> Any:
    try:
        return importlib.import_module("bcc").BPF
    except (ImportError, OSError, AttributeError) as error:  # a package of that name on PyPI is another
        raise _not_installed(error) from error


def _not_installed(why: object) -> RefusedError:
    return RefusedError(f"bcc is not installed: {why}", remedy="Debian has it as python3-bpfcc")


def _headers() -> Path | None:
    """Return where bcc will find headers, None where it unpacks the kernel's own."""
    chosen = os.environ.get(_HEADERS_VARIABLE)
    modules = _MODULES / os.uname().release
    for path in [Path(chosen)] if chosen else [modules / "build", modules / "source"]:
        if (path / "include").is_dir():
            return path
    if not chosen and _PACKED_HEADERS.exists():
        return None
    raise RefusedError(
        f"bcc finds no kernel headers: none are in {chosen or modules / 'build'}", remedy=f"set {_HEADERS_VARIABLE}"
    )


def _places_by_btf(layout: KernelLayout) -> str:
    return _defines(
        {
            "MARK": layout.mark,
            "NETWORK": layout.network,
            "NETWORK_NUMBER": layout.network_number,
            "SEGMENTS": layout.segments,
            "TELLS_FAILURE": int(layout.tells_failure),
        }
    )


def _places_by_headers(headers: Path | None) -> str:
    """Return what finds the places. Raises RefusedError for headers that are not the running kernel's."""
    running = os.uname().release
    try:
        if headers is None:
            raise FileNotFoundError(errno.ENOENT, "packed headers are not looked into")
        release = _RELEASE.search((headers / "include/generated/utsrelease.h").read_text("utf-8"))
        event = _EVENT.search((headers / "include/trace/events/tcp.h").read_text("utf-8"))
    except OSError as error:
        raise RefusedError(f"neither BTF nor headers say where a socket keeps its mark: {error}") from error
    if not release or release[1] != running:
        raise RefusedError(f"the headers are of {release[1] if release else 'no kernel'}, and {running} is running")
    if not event:
        raise RefusedError(f"this kernel lacks the tracepoint {TRACEPOINT}, by its headers")
    return _PLACES_BY_HEADERS + _defines({"TELLS_FAILURE": int(event[1].count(",") >= 2)})


def _defines(numbers: dict[str, int]) -> str:
    return "".join(f"#define KS_{name} {value}u\n" for name, value in numbers.items())


def _compile(bpf: Any, text: str) -> Any:
    try:
        return bpf(text=text.encode(), cflags=["-w"])
    except Exception as error:  # bcc knows no other kind, and writes the reason to stderr
        said = str(error).partition("\n")[0][:200]
        raise RefusedError(f"bcc says: {said} ({NEEDED}, and headers that fit)") from error
