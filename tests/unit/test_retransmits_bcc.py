"""What bcc is told about where a kernel keeps things."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kura_shaper.errors import RefusedError
from kura_shaper.kernel.retransmits_bcc import _places_by_headers
from kura_shaper.kernel.retransmits_bpf import KernelLayout, counting_program
from kura_shaper.tenants.marks import MarkLayout

if TYPE_CHECKING:
    from pathlib import Path

LINUX_6_1 = """
DEFINE_EVENT(tcp_event_sk_skb, tcp_retransmit_skb,

\tTP_PROTO(const struct sock *sk, const struct sk_buff *skb),

\tTP_ARGS(sk, skb)
);
"""
LINUX_6_18 = """
TRACE_EVENT(tcp_retransmit_skb,

\tTP_PROTO(const struct sock *sk, const struct sk_buff *skb, int err),

\tTP_ARGS(sk, skb, err),
"""
OTHER_EVENT = """
TRACE_EVENT(tcp_retransmit_synack,

\tTP_PROTO(const struct sock *sk, const struct request_sock *req, int other),
"""


def headers(root: Path, event: str, release: str) -> Path:
    """Write headers of a release."""
    for name, text in (
        ("generated/utsrelease.h", f'#define UTS_RELEASE "{release}"\n'),
        ("trace/events/tcp.h", event),
    ):
        (root / "include" / name).parent.mkdir(parents=True)
        (root / "include" / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("event", "tells"), [(LINUX_6_1 + OTHER_EVENT, 0), (OTHER_EVENT + LINUX_6_18, 1)], ids=["6.1", "6.18"]
)
def test_the_running_kernels_headers_tell_the_places_and_whether_failures_are_told(
    event: str, tells: int, tmp_path: Path
) -> None:
    places = _places_by_headers(headers(tmp_path, event, os.uname().release))
    assert f"#define KS_TELLS_FAILURE {tells}u" in places
    assert "offsetof(struct sock, sk_mark)" in places


def test_headers_of_another_kernel_would_count_by_a_wrong_place_and_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"the headers are of 5\.4\.0-1"):
        _places_by_headers(headers(tmp_path, LINUX_6_1, "5.4.0-1"))


def test_a_kernel_without_the_tracepoint_and_no_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="neither BTF nor headers"):
        _places_by_headers(None)
    with pytest.raises(RefusedError, match="neither BTF nor headers"):
        _places_by_headers(tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="this kernel lacks the tracepoint"):
        _places_by_headers(headers(tmp_path, OTHER_EVENT, os.uname().release))


@pytest.mark.parametrize("tells_failure", [False, True])
def test_every_jump_of_the_counting_program_ends_at_its_end(tells_failure: bool) -> None:
    layout = KernelLayout(mark=452, network=48, network_number=176, segments=48, tells_failure=tells_failure)
    code = counting_program(MarkLayout(), layout, 4026531840, 7)
    lines = [code[at : at + 8] for at in range(0, len(code), 8)]
    jumps = [
        at + 1 + int.from_bytes(line[2:4], "little") for at, line in enumerate(lines) if line[0] in (0x15, 0x55, 0x56)
    ]
    assert len(jumps) == 6 + tells_failure
    assert set(jumps) == {len(lines) - 2}
    assert lines[-1][0] == 0x95
