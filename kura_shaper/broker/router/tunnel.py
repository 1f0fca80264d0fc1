"""One data stream as the router has it: a subscribe, the bytes of a publisher, and bytes back to it.

```
asked --claimed by its broker--> open --ends either way--> over
  '--refused, expired, session lost, not wanted any more--> over
```

What comes is passed on at once, and the broker may send more only when it was used: `give_credit`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.protocol.buffer import Budget, StreamBuffer
from kura_shaper.broker.protocol.limits import MIB
from kura_shaper.broker.router.counts import TunnelEnding

if TYPE_CHECKING:
    from collections.abc import Callable

    from kura_shaper.broker.link import BusLink
    from kura_shaper.broker.protocol.frames import AnnouncedSource, ZmqEndpoint
    from kura_shaper.broker.router.connection import BusConnection
    from kura_shaper.broker.router.http2 import Http2Server
    from kura_shaper.broker.router.session import ClientSession

# What a consumer may want to say ahead of what the broker takes.
OUT_BYTES_MAX = MIB
# How long the broker has to end a stream that is over for us.
_LINGER_S = 5.0


@dataclass(frozen=True, slots=True)
class TunnelEnd:
    """How a tunnel ended. `code` is the broker's where it gave one; `is_retryable` as far as that is known."""

    ending: TunnelEnding
    code: str = ""
    is_retryable: bool = True


class Consumer(Protocol):
    """Who uses a tunnel."""

    def on_open(self) -> None:
        """The broker is connected to the publisher."""

    def on_bytes(self, data: bytes, credit_bytes: int) -> None:
        """The publisher sent something; give the credit back when it was used."""

    def on_sent(self) -> None:
        """Everything that was to be sent is on its way."""

    def on_over(self, end: TunnelEnd) -> None:
        """There will be no more; told once, and not after `close`."""


class TunnelState(Enum):
    """Where a tunnel is; see the module."""

    ASKED = "asked"
    OPEN = "open"
    OVER = "over"


class Tunnel:
    """It is the body of HTTP/2, and the source of what is sent."""

    def __init__(
        self, stream_id: str, target: ZmqEndpoint | AnnouncedSource, session: ClientSession, consumer: Consumer
    ) -> None:
        self.stream_id, self.target, self.session = stream_id, target, session
        self.state = TunnelState.ASKED
        self.http_id = 0
        self.buffer = StreamBuffer(OUT_BYTES_MAX, Budget(OUT_BYTES_MAX))
        self.sent_bytes = 0
        self.received_bytes = 0
        self.owed_bytes = 0
        self.began_s = asyncio.get_running_loop().time()
        self._consumer = consumer
        self._connection: BusConnection | None = None
        self._link: BusLink[Http2Server] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, connection: BusConnection, http_id: int) -> None:
        """Take the data stream that the broker opened; its head was answered."""
        self._connection, self._link, self.http_id = connection, connection.link, http_id
        self.state = TunnelState.OPEN
        self._consumer.on_open()

    def send(self, data: bytes) -> bool:
        """Send to the publisher. Returns False when more waits than may, and then the data does not."""
        if self.state is not TunnelState.OPEN or self._connection is None or not data:
            return True
        if not self.buffer.put(data):
            return False
        self._connection.link.put(self)
        return True

    def give_credit(self, credit_bytes: int) -> None:
        """Let the broker send so much more."""
        if not self.session.grants:
            self.owed_bytes += credit_bytes
        elif credit_bytes and self._link is not None:
            # Also when the stream is gone: the credit is the connection's as well.
            self._link.http.give_credit(self.http_id, credit_bytes)
            self._link.stir()

    def give_owed(self) -> None:
        """Give the credit back that was withheld."""
        owed_bytes, self.owed_bytes = self.owed_bytes, 0
        self.give_credit(owed_bytes)

    def close(self) -> None:
        """End it; nothing is told of it any more."""
        if self.state is not TunnelState.OVER:
            self.session.unsubscribe(self)
            self._be_over(TunnelEnding.UNSUBSCRIBED)

    def reset(self) -> None:
        """Break the data stream off without a word to the broker: a fault that tests want."""
        self.session.protocol.forget(self.stream_id)
        self._release()
        self.over(TunnelEnd(TunnelEnding.RESET))

    # What the session tells.

    def on_closed(self, code: str) -> None:
        """The broker says that the stream ended. Its last bytes may still be on their way."""
        if code == TunnelEnding.BUFFER_OVERFLOW:
            self.over(TunnelEnd(TunnelEnding.BUFFER_OVERFLOW, code))
        elif self.state is TunnelState.OPEN:
            self._set_timer(lambda: self.over(TunnelEnd(TunnelEnding.UPSTREAM_CLOSED, code)))

    def over(self, end: TunnelEnd) -> None:
        """End it, and tell the consumer how."""
        if self.state is not TunnelState.OVER:
            self._be_over(end.ending)
            self._consumer.on_over(end)

    # What HTTP/2 tells.

    def on_data(self, data: bytes, credit_bytes: int) -> None:
        """See Body."""
        self.received_bytes += len(data)
        self.session.counts.from_broker_bytes += len(data)
        if self.state is TunnelState.OPEN:
            self._consumer.on_bytes(data, credit_bytes)
        else:
            self.give_credit(credit_bytes)

    def on_end(self) -> None:
        """See Body."""
        if self._connection is not None:
            self._connection.link.outbox.remove(self)
            self._connection.link.http.finish(self.http_id)
        self._release()
        self.session.expect_closed(self)
        self.over(TunnelEnd(TunnelEnding.UPSTREAM_CLOSED))

    def on_reset(self) -> None:
        """See Body."""
        self._release()
        self.session.expect_closed(self)
        self.over(TunnelEnd(TunnelEnding.RESET))

    def on_window(self) -> None:
        """See Body."""
        if self.buffer and self._connection is not None:
            self._connection.link.put(self)

    def on_drained(self) -> None:
        """See Source."""
        if self.state is TunnelState.OPEN:
            self._consumer.on_sent()

    def _be_over(self, ending: TunnelEnding) -> None:
        self.state = TunnelState.OVER
        self.session.counts.tunnel_ends[ending] += 1
        self.session.forget(self)
        if self._connection is None:
            return
        self._connection.link.outbox.remove(self)
        self.buffer.drop()
        if ending is TunnelEnding.SESSION_LOST:
            self._release()
        else:
            # The broker ends its data stream; one that does not is cut off.
            self._set_timer(self._release)

    def _release(self) -> None:
        self._cancel_timer()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.link.outbox.remove(self)
            connection.link.http.release(self.http_id)
            connection.link.stir()
            connection.look_if_idle()

    def _set_timer(self, call: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
