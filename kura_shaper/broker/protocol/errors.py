"""What a peer or we ourselves may do wrong with the protocol."""

from __future__ import annotations

from typing import ClassVar

from kura_shaper.broker.protocol.codes import SessionCode
from kura_shaper.errors import RefusedError


class ProtocolViolationError(RefusedError):
    """The peer said what it must not say: the session ends with an error frame of `session_code`.

    The message names the place and the rule, never the value: it goes to the peer and to logs.
    """

    code: ClassVar[str] = "bus_protocol"
    session_code: ClassVar[SessionCode] = SessionCode.PROTOCOL_ERROR


class MisuseError(RuntimeError):
    """This program asked a session for what the protocol does not have: a fault of ours."""
