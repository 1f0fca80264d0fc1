"""What a target has to pass before anything is dialled, in order; the first check that fails is the answer.

The session itself has checked the drain, the id, the limit and the kind of target. Here are the
checks of the target; the filter of addresses is asked again for each address right before its
connect, and what is advertised is looked up again after the resolver has taken its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.endpoint import EndpointError, PublisherAddress, parse_endpoint
from kura_shaper.broker.protocol.codes import RefusalCode

if TYPE_CHECKING:
    from kura_shaper.broker.addresses import AddressFilter
    from kura_shaper.broker.protocol.frames import ZmqEndpoint
    from kura_shaper.broker.resolve import Candidate


class StreamRefusedError(Exception):
    """A subscribe becomes no stream. The message is for the router: it has no address and no reason of the kernel's."""

    def __init__(self, code: RefusalCode, message: str = "") -> None:
        self.code, self.message = code, message or code.words
        super().__init__(self.message)


class Advertised(Protocol):
    """Who knows what is advertised."""

    def is_advertised(self, endpoint: str, dynamo_namespace: str) -> bool:
        """Return whether a canonical endpoint is advertised under a Dynamo namespace; never before the first list."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether what is not advertised is known not to be."""
        ...


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """The checks of a target."""

    dynamo_namespaces: frozenset[str]
    advertised: Advertised
    addresses: AddressFilter

    def address_of(self, target: ZmqEndpoint) -> PublisherAddress:
        """Return the address of a target that may be resolved. Raises StreamRefusedError."""
        try:
            address = parse_endpoint(target.endpoint)
        except EndpointError as error:
            raise StreamRefusedError(RefusalCode.INVALID_TARGET, f"the endpoint {error.message}") from error
        if target.dynamo_namespace not in self.dynamo_namespaces:
            raise StreamRefusedError(RefusalCode.NAMESPACE_NOT_COVERED)
        self.require_advertised(address, target)
        return address

    def is_gone(self, address: PublisherAddress, target: ZmqEndpoint) -> bool:
        """Return whether it is known that the metadata does not have this target. Not to know is not to know so."""
        known = self.advertised
        return known.is_current and not known.is_advertised(str(address), target.dynamo_namespace)

    def require_advertised(self, address: PublisherAddress, target: ZmqEndpoint) -> None:
        """Raise StreamRefusedError when the metadata does not have this target now."""
        if not self.advertised.is_advertised(str(address), target.dynamo_namespace):
            raise StreamRefusedError(RefusalCode.TARGET_NOT_ADVERTISED)

    def allowed(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the addresses that may be dialled. Raises StreamRefusedError when none may."""
        found = tuple(each for each in candidates if self.addresses.allows(each.ip))
        if not found:
            raise StreamRefusedError(RefusalCode.ADDRESS_NOT_ALLOWED)
        return found
