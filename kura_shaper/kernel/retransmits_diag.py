"""TCP retransmits per tenant by asking each marked socket how often it has retransmitted (sock_diag).

A lower bound for a tenant: what a socket retransmits between the last reading and its end is
never heard of. The namespace's own counter knows it still, so the part of no tenant, which is
that counter less all tenants', has it: the sum of all is right.

The kernel leaves unmarked sockets out by itself. It shows marks to CAP_NET_ADMIN only.
A dump is not of one moment: one that resumes within a bucket of the table can miss a socket or
show it twice. So a socket is known by its cookie, and forgotten after two dumps without it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from kura_shaper.kernel import wire
from kura_shaper.kernel.diag import DiagDoor
from kura_shaper.kernel.errors import NoPermissionError, NotThereError, UnsupportedError
from kura_shaper.kernel.retransmits_proc import ProcRetransmits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.clock import Clock
    from kura_shaper.tenants.marks import MarkLayout

SOCKETS_MAX = 65_536
INTERVAL_NS = 1_000_000_000

# include/uapi/linux/{sock_diag,inet_diag,tcp}.h
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, any socket
_MESSAGE_BYTES, _COOKIE_AT = 72, 44
_INFO, _MARK = 2, 15
_TOTAL_RETRANS_AT = 100
_BYTECODE, _JUMP, _MARK_COND = 1, 1, 10
_BC_OP, _MARK_COND_ARGUMENTS = struct.Struct("=BBH"), struct.Struct("=II")
# Established, syn-sent, fin-wait-1 and -2, close-wait, last-ack, closing: who can retransmit, and tells.
_STATES = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))
_WRAP = 1 << 32
_NO_TENANT = 0

_DOING = "reading the TCP sockets"
_LAYOUTS_MAX = 64
_Layout = tuple[int, int, int, int]  # where the mark's attribute begins, its first 4 bytes; the same of tcp_info
_NO_LAYOUT: _Layout = (0, -1, 0, -1)

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class DiagRetransmits:
    """Retransmits by class id of one network namespace since this was opened, read at most once an interval."""

    def __init__(
        self,
        marks: MarkLayout,
        *,
        clock: Clock,
        interval_ns: int = INTERVAL_NS,
        sockets_max: int = SOCKETS_MAX,
    ) -> None:
        """Raises KernelRefusedError when marks are not shown or the kernel has no sock_diag, and StateUnknownError."""
        self._marks = marks
        self._clock, self._interval_ns = clock, interval_ns
        self.ledger = SocketLedger(sockets_max)
        self._node = ProcRetransmits()
        try:
            self._dump = _SocketDump(marks.mask)
        except BaseException:
            self._node.close()
            raise
        try:
            self._read_at_ns = clock.now_ns()
            self._look()
            self.ledger.forget_totals()
        except BaseException:
            self.close()
            raise
        self._unmarked = 0

    @property
    def age_ns(self) -> int:
        """How old the last reading is."""
        return self._clock.now_ns() - self._read_at_ns

    def read(self) -> dict[int, int]:
        """Return the counts, from one dump or, within the interval, from the last. Raises StateUnknownError."""
        if self.age_ns >= self._interval_ns:
            began = self._clock.now_ns()
            self._look()
            self._read_at_ns = began
            of_tenants = sum(self.ledger.totals.values())
            # Read after the sockets, and never taken back: a socket's own count is a little ahead at times.
            self._unmarked = max(self._unmarked, self._node.read()[_NO_TENANT] - of_tenants)
        return {_NO_TENANT: self._unmarked, **self.ledger.totals}

    def close(self) -> None:
        """Close the sockets."""
        self._dump.close()
        self._node.close()

    def _look(self) -> None:
        class_id = self._marks.class_id
        self.ledger.begin()
        try:
            for cookie, mark, count in self._dump.retransmitting():
                self.ledger.note(cookie, class_id(mark), count)
        except BaseException:
            self.ledger.abandon()
            raise


class SocketLedger:
    """Adds up what each socket's own count grows by, for the class that its mark names at the time.

    It knows about sockets_max sockets that have retransmitted. What comes beyond waits until others end.
    """

    def __init__(self, sockets_max: int = SOCKETS_MAX) -> None:
        self.totals: dict[int, int] = {}
        self._max = sockets_max
        # Counts by cookie as of this dump, the one before, and the one before that.
        self._seen: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._oldest: dict[int, int] = {}

    @property
    def sockets(self) -> int:
        """How many sockets are known."""
        return len(self._seen | self._older | self._oldest)

    def begin(self) -> None:
        """Begin a dump, and forget who was in neither of the last two."""
        self._seen, self._older, self._oldest = {}, self._seen, self._older

    def abandon(self) -> None:
        """End a dump that broke off, which tells nothing of who was not in it."""
        self._seen, self._older, self._oldest = self._older | self._seen, self._oldest, {}

    def note(self, cookie: int, class_id: int, count: int) -> None:
        """Note a socket's own count, which has 32 bits."""
        before = self._seen.get(cookie)
        if before is None:
            before = self._older.get(cookie, self._oldest.get(cookie))
        if before is None:
            if max(len(self._seen), len(self._older)) >= self._max:
                return
            before = 0
        self._seen[cookie] = count
        grown = (count - before) % _WRAP
        if grown >= _WRAP // 2:  # a socket that was disconnected and connected again counts from nothing
            grown = count
        if grown:
            self.totals[class_id] = self.totals.get(class_id, 0) + grown

    def forget_totals(self) -> None:
        """Count from here on."""
        self.totals.clear()


class _SocketDump:
    """Asks for the TCP sockets of the thread's network namespace with a mark below a mask."""

    def __init__(self, mask: int) -> None:
        self._condition = _any_mark_below(mask)
        self._families = [socket.AF_INET, socket.AF_INET6]
        self._layouts: dict[int, _Layout] = {}
        self._door = DiagDoor()

    def close(self) -> None:
        self._door.close()

    def retransmitting(self) -> Iterator[tuple[int, int, int]]:
        """Yield (cookie, mark, how often it retransmitted) of each socket that has.

        Raises KernelRefusedError, StateUnknownError.
        """
        for family in tuple(self._families):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES) + self._condition
            try:
                for view, start, end in self._door.dump(body, doing=_DOING):
                    found = self._retransmitting_socket(view, start, end)
                    if found:
                        yield found
            except NotThereError as error:
                if family == socket.AF_INET:
                    raise UnsupportedError(errno.EOPNOTSUPP, "this kernel lacks tcp_diag", doing=_DOING) from error
                self._families.remove(family)  # a kernel without IPv6
            except NoPermissionError as error:
                detail = f"{os.strerror(error.errno)}: needs CAP_NET_ADMIN"
                raise NoPermissionError(error.errno, detail, doing=_DOING) from error

    def _retransmitting_socket(self, view: memoryview, start: int, end: int) -> tuple[int, int, int] | None:
        """Return what a message tells when it tells of retransmits.

        Messages of one length have their attributes at the same places, so we look there first.
        """
        head_at = _U32.unpack_from
        mark_at, mark_head, info_at, info_head = self._layouts.get(end - start, _NO_LAYOUT)
        if head_at(view, start + mark_at)[0] != mark_head or head_at(view, start + info_at)[0] != info_head:
            layout = _layout(view, start, end)
            if layout is None:
                return None
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            self._layouts[end - start] = layout
            mark_at, _, info_at, _ = layout
        (count,) = _U32.unpack_from(view, start + info_at + 4 + _TOTAL_RETRANS_AT)
        if not count:
            return None
        return _U64.unpack_from(view, start + _COOKIE_AT)[0], _U32.unpack_from(view, start + mark_at + 4)[0], count


def _layout(view: memoryview, start: int, end: int) -> _Layout | None:
    """Return where a message has a socket's mark and its tcp_info, None when it has not both.

    One that only waits for its last segments to die out (time-wait) has no tcp_info.
    """
    found = wire.spans(view, start + _MESSAGE_BYTES, end)
    (mark_at, _), (info_at, info_end) = found.get(_MARK, (0, 0)), found.get(_INFO, (0, 0))
    if not mark_at or info_end - info_at < _TOTAL_RETRANS_AT + 4:
        return None
    mark_at, info_at = mark_at - wire.ATTRIBUTE.size, info_at - wire.ATTRIBUTE.size
    (mark_head,), (info_head,) = _U32.unpack_from(view, mark_at), _U32.unpack_from(view, info_at)
    return mark_at - start, mark_head, info_at - start, info_head


def _any_mark_below(mask: int) -> bytes:
    """Return the attribute that has the kernel leave out sockets whose mark has no bit of a mask.

    When mark & mask is 0 go on to the second instruction, which jumps past the end, and that is no;
    else go to the end, which is yes. (net/ipv4/inet_diag.c: inet_diag_bc_run, inet_diag_bc_audit)
    """
    jump = _BC_OP.pack(_JUMP, _BC_OP.size, _BC_OP.size + 4)
    size = _BC_OP.size + _MARK_COND_ARGUMENTS.size
    condition = _BC_OP.pack(_MARK_COND, size, size + len(jump)) + _MARK_COND_ARGUMENTS.pack(0, mask)
    return wire.attribute(_BYTECODE, condition + jump)
