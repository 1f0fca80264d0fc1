"""File descriptors that are closed at the end of a block."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Have a descriptor for the length of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
