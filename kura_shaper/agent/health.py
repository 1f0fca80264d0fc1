"""The agent's small web server: /metrics, /healthz, /readyz and /statusz, on loopback unless told otherwise."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kura_shaper import __version__
from kura_shaper.agent.keeper import Verdict
from kura_shaper.agent.metrics import AgentMetrics
from kura_shaper.web import ProbeServer

if TYPE_CHECKING:
    from kura_shaper.agent.view import AgentView, DeviceView
    from kura_shaper.clock import Clock
    from kura_shaper.tenants.document import Endpoint

_SECOND_NS = 1_000_000_000
# A look at 5,000 classes that has to be taken again, and a removal that waits for a class to fall silent.
_ALIVE_WITHIN_S = 60


class Health:
    """What the probes are told."""

    def __init__(self, view: AgentView, clock: Clock) -> None:
        self._view, self._clock = view, clock

    def why_dead(self) -> str:
        """Return why the agent should be started again, "" while it works. A bad source or kernel is no reason."""
        now_ns = self._clock.now_ns()
        turned_s = (now_ns - self._view.alive_at_ns) / _SECOND_NS
        if turned_s > _ALIVE_WITHIN_S:
            return f"the loop has not turned for {turned_s:.0f} s"
        # Read once: the look may end meanwhile.
        began_ns = self._view.look_began_ns
        looking_s = (now_ns - began_ns) / _SECOND_NS if began_ns else 0
        return f"a look has taken {looking_s:.0f} s" if looking_s > _ALIVE_WITHIN_S else ""

    def why_not_ready(self) -> str:
        """Return why this node does not keep its promises, "" when it does."""
        view = self._view
        if dead := self.why_dead():
            return dead
        if (disabled := view.disabled) is not None:
            return f"held off: {disabled.reason}"
        if view.waiting_for:
            return f"waiting for {view.waiting_for}"
        for name, device in view.devices.items():
            looked = device.looked
            if looked is None:
                return f"{name}: not looked at yet"
            if looked.verdict is Verdict.WOULD_CHANGE:
                if not view.observes:
                    return f"{name}: held off until now"
            elif not looked.verdict.is_well:
                return f"{name}: {'; '.join(looked.reasons)}"
        return ""

    def status(self) -> dict[str, Any]:
        """Return everything that a person would ask, as JSON has it."""
        view, told, disabled, reason = self._view, self._view.told, self._view.disabled, self.why_not_ready()
        return {
            "version": __version__,
            "ready": not reason,
            "reason": reason,
            "disabled": asdict(disabled) if disabled else None,
            "observing": view.observes,
            "source": {
                "valid": told.is_valid,
                "age_s": self._age_s(told.current_at_ns),
                "tenants": len(told.document.tenants) if told.document else None,
                "problems": list(told.problems),
            },
            "problems": list(view.problems),
            "retransmits": view.retransmits.way if view.retransmits else None,
            "devices": {name: self._device(device) for name, device in view.devices.items()},
        }

    def _device(self, device: DeviceView) -> dict[str, Any]:
        looked = device.looked
        if looked is None:
            return {"verdict": None}
        return {
            "verdict": looked.verdict,
            "reasons": list(looked.reasons),
            "operations": list(looked.operations[:50]),
            "pending": looked.pending,
            "shape": looked.shape,
            "why_shape": looked.why_shape,
            "steering": asdict(looked.proof) if looked.proof else None,
            "foreign": list(looked.foreign),
            "findings": list(looked.findings),
            "budget": str(device.budget) if device.budget else None,
            "age_s": self._age_s(device.looked_at_ns),
        }

    def _age_s(self, then_ns: int) -> float | None:
        return (self._clock.now_ns() - then_ns) / _SECOND_NS if then_ns else None


class HealthServer(ProbeServer):
    """Serves until it is closed. Raises UsageError when the address can't be had."""

    def __init__(self, endpoint: Endpoint, view: AgentView, clock: Clock, *, closes_within_s: float = 0.5) -> None:
        super().__init__(
            endpoint.host,
            endpoint.port,
            collector=AgentMetrics(view, clock),
            health=Health(view, clock),
            closes_within_s=closes_within_s,
        )
