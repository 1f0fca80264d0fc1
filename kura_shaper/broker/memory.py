"""How the C library hands out memory, told once at the start.

It gives each thread an arena of its own, which keeps what the thread once needed: a scrape, a page of metadata. Python
lets one thread run at a time, so one arena serves all of them as fast, and what one has freed is another's.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # malloc.h of glibc


def share_one_arena() -> None:
    """Let all threads that are begun from now on share an arena. Where the C library has no such choice, do nothing."""
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_M_ARENA_MAX, 1)
