"""A TCP port that the router listens on for other programs of its machine."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.tenants.document import Endpoint


class Listening:
    """One of them: does not listen before `start`, nor after `stop`. `key` is what the settings call it."""

    def __init__(self, key: str, at: Endpoint) -> None:
        self._key, self._at = key, at
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """Where it listens, 0 when it does not."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server and self._server.sockets else 0

    async def start(self, accept: Callable[[], asyncio.Protocol], *, backlog: int) -> None:
        """Listen. Raises UsageError when the address can't be had."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(accept, self._at.host, self._at.port, backlog=backlog)
        except OSError as error:
            # What asyncio says of an address that is taken has the address again, and the reason at its end.
            reason = os.strerror(error.errno) if error.errno else error.strerror
            words = f"{self._key} {self._at}: {reason}"
            raise UsageError(words, remedy="choose another address or port") from error

    def stop(self) -> None:
        """Take no further connections."""
        if self._server is not None:
            self._server.close()
